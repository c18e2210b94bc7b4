"""Learnable positive weights and learned priors."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rotp_vision.core import SOLVERS, VIEW_FLOOR, Solver, StepWeights, positive_weights, transforms_active
from rotp_vision.layers.options import FLOAT32, PoolOptions

# Squares of features from about 1e-5 to 1e30 stay in float32's range after this factor, a power of two.
NORM_SCALE = 2.0**-46


class PositiveWeight(nn.Module):
    """A positive weight by softplus, w = start · softplus(β) / softplus(0), with β = 0 at the start.

    From the paper's start, softplus(0), this is the paper's w = softplus(β). Scaling by the start makes a step of β
    a *relative* change of w, so that a weight which starts at 1000 can be learned as readily as one at 1.
    """

    start: Tensor
    beta: Tensor

    def __init__(self, start: float | Sequence[float], size: tuple[int, ...] = (), learn: bool = True):
        super().__init__()
        self.register_buffer('start', torch.tensor(start, dtype=torch.float32).expand(size).clone())
        if learn:
            self.beta = nn.Parameter(torch.zeros(size))
        else:
            self.register_buffer('beta', torch.zeros(size))

    def forward(self) -> Tensor:
        # A half-precision model keeps its weights in half precision but solves in float32.
        beta = self.beta if self.beta.dtype == torch.float64 else self.beta.float()
        return self.start * (F.softplus(beta) / math.log(2.0))

    def _apply(self, fn, recurse=True):
        # `start` stays in float32 in a half-precision model, because large ones overflow float16.
        start = self.start
        super()._apply(fn, recurse)
        if self.start.dtype in (torch.float16, torch.bfloat16):
            self.start = start.to(self.start.device)
        return self

    def set(self, value: Tensor | float | Sequence[float]):
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


class ModuleWeights(nn.Module):
    """The weights of a solver's modules; those that the solver does not read are None."""

    def __init__(self, options: PoolOptions):
        super().__init__()
        self.num_modules = options.modules
        size = () if options.learn == 'shared' else (options.modules,)
        starts = options.starting_weights()

        def weight(name: str) -> PositiveWeight | None:
            return PositiveWeight(starts[name], size, options.learn != 'fixed') if name in starts else None

        self.smoothness = weight('smoothness')
        self.feature_penalty = weight('feature_penalty')
        self.sample_penalty = weight('sample_penalty')
        self.structure = weight('structure')
        self.step = weight('step')
        self.proximal = weight('proximal')

    def forward(self) -> StepWeights:
        step = None if self.step is None else self.step().expand(self.num_modules)
        smoothness = step if self.smoothness is None else self.smoothness().expand(self.num_modules)
        assert smoothness is not None  # every solver reads one of the two
        return StepWeights(
            smoothness,
            None if self.feature_penalty is None else self.feature_penalty().expand(self.num_modules),
            None if self.sample_penalty is None else self.sample_penalty().expand(self.num_modules),
            None if self.structure is None else self.structure().expand(self.num_modules),
            step,
            None if self.proximal is None else self.proximal().expand(self.num_modules),
        )

    def with_gain(self, gain: PositiveWeight | None, solver: Solver) -> tuple[StepWeights, Tensor | None]:
        """The weights, and that of `gain`, all made at once by the solver's backend."""
        given = {name: weight for name, weight in self.named_children() if isinstance(weight, PositiveWeight)}
        every = [*given.values()] if gain is None else [*given.values(), gain]
        values = positive_weights([weight.beta for weight in every], [weight.start for weight in every], solver)
        weights = {name: value.expand(self.num_modules) for name, value in zip(given, values, strict=False)}
        if 'smoothness' not in weights:
            weights['smoothness'] = weights['step']  # every solver reads one of the two
        return StepWeights(**weights), None if gain is None else values[-1]


class RegisteredWeights(nn.Module):
    """The weights of the modules of a registered solver, which sees them as the attributes that it has declared."""

    def __init__(self, options: PoolOptions):
        super().__init__()
        self.num_modules = options.modules
        self.solver = options.solver
        size = () if options.learn == 'shared' else (options.modules,)
        for name, start in options.starting_weights().items():
            setattr(self, name, PositiveWeight(start, size, options.learn != 'fixed'))

    def forward(self) -> Any:
        weights_type = SOLVERS[self.solver].weights_type
        assert weights_type is not None
        return weights_type(*(weight().expand(self.num_modules) for weight in self.children()))

    def with_gain(self, gain: PositiveWeight | None, solver: Solver) -> tuple[Any, Tensor | None]:
        """The weights, and that of `gain`."""
        return self(), None if gain is None else gain()


class AttentionPrior(nn.Module):
    """Learned prior marginals as logits (paper, section 4): wᵀ tanh(V X) over samples, U X 1 over features.

    Args:
        num_features: D.
        width: rows of V, and inner width of U = U2 U1; None for the paper's D × D matrices.
        uniform_start: start with w = 0 and U = 0 (or U2 = 0): uniform priors whose gradients are not zero.
    """

    def __init__(self, num_features: int, width: int | None = None, uniform_start: bool = False):
        super().__init__()
        self.sample_hidden = nn.Linear(num_features, width or num_features, bias=False)
        self.sample_score = nn.Linear(width or num_features, 1, bias=False)
        self.feature_hidden = nn.Identity() if width is None else nn.Linear(num_features, width, bias=False)
        self.feature_score = nn.Linear(width or num_features, num_features, bias=False)
        if uniform_start:
            nn.init.zeros_(self.sample_score.weight)
            nn.init.zeros_(self.feature_score.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of p0 (B, D) and of q0 (B, N) for `x` (B, D, N), zero on masked samples."""
        # A matrix product from the left needs no transposed copy of x.
        hidden = torch.tanh(torch.matmul(self.sample_hidden.weight, x.to(self.sample_hidden.weight.dtype)))
        sample_logits = torch.matmul(self.sample_score.weight, hidden).squeeze(1)
        # U X 1 as N times U of the mean, because the sum of a map may overflow float16.
        weight = self.feature_score.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        mean = x.sum(2, dtype=wide) / x.shape[2]
        return self.feature_score(self.feature_hidden(mean.to(weight.dtype))).to(wide) * x.shape[2], sample_logits


class NormPrior(nn.Module):
    """Prior marginal of the samples by their norm, as logits: log q0_n = β log ‖x_n‖.

    The norm is over the features of a sample. β may be any real number; at its start of zero q0 is uniform.
    """

    power: Tensor

    def __init__(self, learn: bool = True):
        super().__init__()
        if learn:
            self.power = nn.Parameter(torch.zeros(()))
        else:
            self.register_buffer('power', torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Logits of p0, which stays uniform, and of q0 (B, N) for `x` (B, D, N)."""
        power = self.power if self.power.dtype == torch.float64 else self.power.float()
        return None, power * log_norm(x)

    def set(self, value: Tensor | float | Sequence[float]):
        """Set β to `value`."""
        value = torch.as_tensor(value, dtype=self.power.dtype, device=self.power.device)
        if value.numel() != 1 or not bool(value.isfinite()):
            raise ValueError(f'the power of the norm prior must be one finite number, got {value.tolist()}')
        with torch.no_grad():
            self.power.copy_(value.view(()))

    def extra_repr(self) -> str:
        return '' if self.power.is_meta else f'{float(self.power.detach()):.4g}'


def log_norm(x: Tensor) -> Tensor:
    """(B, N) log of the norm of each sample of `x` (B, D, N), in float32 or wider; at least log `VIEW_FLOOR`."""
    if torch.jit.is_scripting() or transforms_active():  # pyright: ignore[reportPrivateImportUsage]
        return _log_norm(x)
    return _LogNorm.apply(x)  # pyright: ignore[reportReturnType]


def _log_norm(x: Tensor, floor: float = VIEW_FLOOR, scale: float = NORM_SCALE) -> Tensor:
    scaled = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    return torch.linalg.vector_norm(scaled, dim=1).clamp_min(floor * scale).log() - math.log(scale)


class _LogNorm(torch.autograd.Function):
    """`log_norm` with a backward that saves x, as the pooling does, instead of a scaled copy of it."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _log_norm(x)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        # d log ‖x‖ / dx = x / ‖x‖², as a product whose factors neither overflow nor underflow; zero at the floor.
        x, log_norms = ctx.saved_tensors
        inverse = (-log_norms).exp().masked_fill(log_norms <= math.log(VIEW_FLOOR), 0.0).unsqueeze(1)
        return (x.to(inverse.dtype) * inverse * (grad.unsqueeze(1) * inverse)).to(x.dtype)
