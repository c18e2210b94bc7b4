"""Learnable positive weights and learned priors."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rotp_vision.layers.options import FLOAT32, finite_number


class PositiveWeight(nn.Module):
    """A positive weight by softplus, w = start · softplus(β) / softplus(0), with β = 0 at the start.

    With the paper's start, softplus(0), this is the paper's w = softplus(β). Because of the factor `start`, a step of
    β is a *relative* change of w, so that a weight of 1000 is learned as readily as a weight of 1.
    """

    start: Tensor
    beta: Tensor

    def __init__(self, start: float | Sequence[float], size: int = 1, learn: bool = True):
        super().__init__()
        self.initial = start
        self.register_buffer('start', torch.empty(size))
        if learn:
            self.beta = nn.Parameter(torch.empty(size))
        else:
            self.register_buffer('beta', torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to the value it was constructed with."""
        with torch.no_grad():
            self.start.copy_(torch.as_tensor(self.initial, dtype=torch.float32))
            self.beta.zero_()

    def forward(self) -> Tensor:
        # A half-precision model stores its weights in half precision but solves in float32.
        beta = self.beta if self.beta.dtype == torch.float64 else self.beta.float()
        return self.start * (F.softplus(beta) / math.log(2.0))

    def _apply(self, fn, recurse=True):
        # Keep `start` in float32 in a half-precision model: large values would overflow float16.
        start = self.start
        super()._apply(fn, recurse)
        if self.start.dtype in (torch.float16, torch.bfloat16):
            self.start = start.to(self.start.device)
        return self

    def set(self, value: Tensor | float | Sequence[float]) -> None:
        """Set the weight to `value`, with β = 0."""
        value = torch.as_tensor(value, dtype=self.start.dtype, device=self.start.device)
        if not bool((value > 0).all() and value.isfinite().all()):
            raise ValueError(f'a weight must be positive and finite, got {value.tolist()}')
        if not bool(((value >= FLOAT32.tiny) & (value <= FLOAT32.max)).all()):
            raise ValueError(f'a weight must be a normal float32 number, got {value.tolist()}')
        with torch.no_grad():
            self.start.copy_(value.expand_as(self.start))
            self.beta.zero_()

    def extra_repr(self) -> str:
        if self.beta.is_meta:
            return f'size={tuple(self.beta.shape)}'
        values = ', '.join(f'{value:.4g}' for value in self.forward().detach().flatten()[:8].tolist())
        return f'{values}{", …" if self.beta.numel() > 8 else ""}'


class NormPrior(nn.Module):
    """The power β of the norm prior q0_n ∝ ‖x_n‖^β, with the norm over the features of a sample.

    Args:
        start: β at the start, any finite number; at zero q0 is uniform.
        learn: whether β is a parameter or a buffer.
    """

    power: Tensor

    def __init__(self, start: float = 0.0, learn: bool = True):
        super().__init__()
        self.initial = finite_number('norm_power', start)
        if learn:
            self.power = nn.Parameter(torch.empty(1))
        else:
            self.register_buffer('power', torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set β to the value it was constructed with."""
        nn.init.constant_(self.power, self.initial)

    def forward(self) -> Tensor:
        """(1,) β, in float32 or wider."""
        return self.power if self.power.dtype == torch.float64 else self.power.float()

    def set(self, value: Tensor | float | Sequence[float]) -> None:
        """Set β to `value`."""
        value = torch.as_tensor(value, dtype=self.power.dtype, device=self.power.device)
        if value.numel() != 1 or not bool(value.isfinite()):
            raise ValueError(f'the power of the norm prior must be one finite number, got {value.tolist()}')
        with torch.no_grad():
            self.power.copy_(value.view(1))

    def extra_repr(self) -> str:
        return '' if self.power.is_meta else f'{float(self.power.detach()):.4g}'


class AttentionPrior(nn.Module):
    """Learned logits of the priors (paper, section 4): wᵀ tanh(V X) over samples, U X 1 over features.

    Args:
        num_features: D.
        width: rows of V, and inner width of U = U2 U1; None for the paper's D × D matrices.
        uniform_start: start with w = 0 and U = 0 (or U2 = 0), which gives uniform priors with non-zero gradients.
    """

    def __init__(self, num_features: int, width: int | None = None, uniform_start: bool = False):
        super().__init__()
        self.uniform_start = uniform_start
        self.sample_hidden = nn.Linear(num_features, width or num_features, bias=False)
        self.sample_score = nn.Linear(width or num_features, 1, bias=False)
        self.feature_hidden = nn.Identity() if width is None else nn.Linear(num_features, width, bias=False)
        self.feature_score = nn.Linear(width or num_features, num_features, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices anew."""
        for child in self.children():
            if isinstance(child, nn.Linear):
                child.reset_parameters()
        if self.uniform_start:
            nn.init.zeros_(self.sample_score.weight)
            nn.init.zeros_(self.feature_score.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of p0 (B, D) and of q0 (B, N) for `x` (B, D, N), zero on masked samples."""
        # Never read a child's weight: quantised, offloaded and adapted layers hold it elsewhere.
        dtype = next((parameter.dtype for parameter in self.parameters()), x.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        sample_logits = self.sample_score(torch.tanh(self.sample_hidden(x.mT.to(dtype)))).squeeze(2)
        # Compute U X 1 as N times U of the mean: the sum of a map may overflow float16.
        mean = (x.sum(2, dtype=wide) / x.shape[2]).to(dtype)
        return self.feature_score(self.feature_hidden(mean)).to(wide) * x.shape[2], sample_logits
