"""Generalized-mean pooling, optionally weighted by the norms of the positions."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from rotp_vision.core import log_norm
from rotp_vision.layers.base import MapShape, OneNode, start_where_absent
from rotp_vision.layers.options import positive_number
from rotp_vision.layers.parameters import NormPrior


class GeMPool2d(MapShape, OneNode):
    """Generalized-mean (GeM) pooling of feature maps of any height and width.

        f_d = (Σ_n q_n max(x_dn, eps)^p)^(1/p),   q_n ∝ ‖x_n‖^norm_power

    with the norm of a position over its channels. p = 1 is the mean weighted by q, without the clamp, so that negative
    features count. norm_power = 0 weights all positions alike.

    The powers are taken in the log domain, in float32 or wider, so that neither a large p nor a channel below eps
    overflows or underflows.

    Args:
        p: exponent, positive.
        norm_power: exponent of the norms, any finite number.
        learn: whether the exponents are learned from these values. p = 1 and norm_power = 0 stay fixed.
        flatten: whether to drop the spatial axes of the output.
        input_fmt: 'NCHW' or 'NHWC'.
        eps: lower bound of the features.

    Shapes:
        (B, C, H, W) to (B, C), or (B, C, 1, 1) if not `flatten`; NHWC: (B, H, W, C) to (B, C) or (B, 1, 1, C).

    Example:
        >>> import torch
        >>> from rotp_vision.layers import GeMPool2d
        >>> maps = torch.rand(2, 8, 7, 7)
        >>> GeMPool2d(norm_power=2.0)(maps).shape
        torch.Size([2, 8])
        >>> torch.allclose(GeMPool2d(p=1.0)(maps), maps.mean((2, 3)))
        True
    """

    pool_type = 'gem'
    p: Tensor | None

    def __init__(
        self,
        p: float = 3.0,
        norm_power: float = 0.0,
        learn: bool = False,
        flatten: bool = True,
        input_fmt: Literal['NCHW', 'NHWC'] = 'NCHW',
        eps: float = 1e-6,
    ):
        super().__init__()
        self.set_shape(flatten, input_fmt)
        self.initial, self.eps = positive_number('p', p), positive_number('eps', eps)
        if learn and p == 1 and norm_power == 0:
            raise ValueError('learn has no effect with p = 1 and norm_power = 0, which is the mean; change one of them')
        if learn and p != 1:
            self.p = nn.Parameter(torch.empty(1))
        else:
            self.register_buffer('p', None if p == 1 else torch.empty(1))
        self.prior = None if norm_power == 0 else NormPrior(norm_power, learn)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the exponents to the values they were constructed with."""
        if self.p is not None:
            with torch.no_grad():
                self.p.fill_(self.initial)
        if self.prior is not None:
            self.prior.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """The pooled map, in the dtype of `x`."""
        sets = self.sets(x)
        wide = sets.to(torch.promote_types(sets.dtype, torch.float32))
        log_q = None
        if self.prior is not None:
            log_q = (self.prior() * log_norm(wide)).log_softmax(1).unsqueeze(1)  # (B, 1, N)
        if self.p is None:
            pooled = wide.mean(2) if log_q is None else (wide * log_q.exp()).sum(2)
        else:
            p = self.p.to(wide.dtype)
            log_q = -math.log(wide.shape[2]) if log_q is None else log_q
            pooled = ((p * wide.clamp_min(self.eps).log() + log_q).logsumexp(2) / p).exp()
        return self.shaped(pooled.to(x.dtype))

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        start_where_absent(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        shown = self.initial if self.p is None or self.p.is_meta else float(self.p.detach())
        return f'p={shown:.4g}, eps={self.eps:g}, {self.shape_repr()}'
