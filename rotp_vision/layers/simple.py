"""Poolings without a plan, and their names: average, max, both, and the generalized mean, also weighted by norms."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from rotp_vision.core import log_norm
from rotp_vision.layers.base import InputFormat, MapShape, OneNode, start_where_absent
from rotp_vision.layers.options import PoolOptions, finite_number, pool_options, positive_number
from rotp_vision.layers.parameters import NormPrior

SIMPLE_POOLS = ('avg', 'max', 'avgmax', 'gem')
"""Names of the poolings without a plan: the first three as in timm."""


@dataclass(frozen=True)
class SimplePoolOptions:
    """A pooling without a plan, by its name and its numbers; `GeMPool2d` and `AvgMaxPool2d` give the formulas.

    A name or a mapping of these fields is accepted wherever pooling options are: `convert(model, 'gem')`,
    `convert(model, {'pool': 'avg', 'norm_power': 2.0})` for the mean weighted by norms, `--pool gem --set power=4`.

    Attributes:
        pool: 'avg', 'max', 'avgmax' (half the sum of the two, as in timm) or 'gem' (generalized mean).
        power: exponent of 'gem', by default 3; None for the others.
        norm_power: of 'avg' and 'gem', exponent of the norms by which the positions are weighted; 0 weights all alike.
        learn: whether the exponents are learned.
        gain: fixed positive factor on the output, which `calibrate` fits.

    Example:
        >>> from rotp_vision.layers import SimplePoolOptions
        >>> SimplePoolOptions('gem', norm_power=2.0).to_dict()
        {'pool': 'gem', 'power': 3.0, 'norm_power': 2.0}
    """

    pool: str
    power: float | None = None
    norm_power: float = 0.0
    learn: bool = False
    gain: float = 1.0

    def __post_init__(self):
        if self.pool not in SIMPLE_POOLS:
            raise ValueError(f'pool must be one of {", ".join(SIMPLE_POOLS)}, got {self.pool!r}')
        if self.pool == 'gem':
            object.__setattr__(self, 'power', positive_number('power', 3.0 if self.power is None else self.power))
        elif self.power is not None:
            raise ValueError(f"power has no effect with pool={self.pool!r}; leave it out, or use pool='gem'")
        object.__setattr__(self, 'norm_power', finite_number('norm_power', self.norm_power))
        object.__setattr__(self, 'gain', positive_number('gain', self.gain))
        if 'max' in self.pool and (self.norm_power or self.learn):
            raise ValueError(f'norm_power and learn have no effect with pool={self.pool!r}; leave them out')
        if self.pool == 'avg' and self.learn and not self.norm_power:
            raise ValueError('learn has no effect with the mean; leave it out, or give a norm_power')

    def to_dict(self) -> dict[str, Any]:
        """The name and the numbers that say something, ready for JSON; `any_pool_options` reads them."""
        defaults = {'gain': 1.0}
        return {name: value for name, value in asdict(self).items() if value and value != defaults.get(name)}

    def make(self, *, flatten: bool = True, input_fmt: InputFormat = 'NCHW') -> 'SimplePool':
        """The layer."""
        if self.pool == 'avgmax':
            pool = AvgMaxPool2d(flatten, input_fmt)
        else:
            power = self.power or {'avg': 1.0, 'max': math.inf}[self.pool]
            pool = GeMPool2d(power, self.norm_power, self.learn, flatten, input_fmt)
        pool.gain = self.gain
        return pool


AnyPoolOptions = PoolOptions | SimplePoolOptions


def any_pool_options(options: AnyPoolOptions | Mapping[str, Any] | str | None = None, **changes: Any) -> AnyPoolOptions:
    """Options of a ROT pool as `pool_options` reads them, or of a pooling without a plan by its name.

    >>> any_pool_options('gem', power=4.0)
    SimplePoolOptions(pool='gem', power=4.0, norm_power=0.0, learn=False, gain=1.0)
    >>> any_pool_options({'pool': 'avg', 'norm_power': 2}).norm_power
    2.0
    >>> any_pool_options('embedding').prior
    'norm'
    """
    if isinstance(options, str) and options in SIMPLE_POOLS:
        options = SimplePoolOptions(options)
    if isinstance(options, Mapping) and 'pool' in options:
        given = dict(options) | changes
    elif isinstance(options, SimplePoolOptions):
        given = options.to_dict() | changes
    else:
        return pool_options(options, **changes)
    known = [field.name for field in fields(SimplePoolOptions)]
    unknown = sorted(str(name) for name in given if name not in known)
    if unknown:
        raise ValueError(f'a pooling without a plan has no option {", ".join(unknown)}; known are {", ".join(known)}')
    return SimplePoolOptions(**given)


class SimplePool(MapShape, OneNode):
    """Base of pools without a plan: maps in either format, or tokens (B, N, C), to vectors."""

    pool_type = 'rotp'  # of this package, as reset_classifier and config.json call it
    gain = 1.0

    @property
    def options(self) -> SimplePoolOptions:
        """What makes this pool again."""
        raise NotImplementedError

    def pool_sets(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool sets (B, D, N) to features (B, D); `mask` (B, N) is True where a sample exists, None if all do."""
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The pooled map in the dtype of `x`; tokens (B, N, C), which may have a mask (B, N), to (B, C)."""
        if x.dim() == 3 and self.input_fmt != 'NCL':
            return self.pool_sets(x.transpose(1, 2), mask)
        return self.shaped(self.pool_sets(self.sets(x), mask))

    def named_weights(self) -> dict[str, Tensor]:
        """The current exponents by name, detached."""
        return {}


class GeMPool2d(SimplePool):
    """Generalized-mean (GeM) pooling of feature maps of any height and width, or of tokens.

        f_d = (Σ_n q_n max(x_dn, eps)^power)^(1/power),   q_n ∝ ‖x_n‖^norm_power

    with the norm of a position over its channels. power = 1 is the mean weighted by q, without the clamp, so that
    negative features count; power = inf is the maximum. norm_power = 0 weights all positions alike.

    The powers are taken in the log domain, in float32 or wider, so that neither a large power nor a channel below eps
    overflows or underflows.

    Args:
        power: exponent, positive.
        norm_power: exponent of the norms, any finite number.
        learn: whether the exponents are learned from these values. power = 1 and norm_power = 0 stay fixed.
        flatten: whether to drop the spatial axes of the output.
        input_fmt: 'NCHW' or 'NHWC'.
        eps: lower bound of the features.

    Shapes:
        (B, C, H, W) to (B, C), or (B, C, 1, 1) if not `flatten`; NHWC: (B, H, W, C) to (B, C) or (B, 1, 1, C);
        (B, N, C) to (B, C).

    Example:
        >>> import torch
        >>> from rotp_vision.layers import GeMPool2d
        >>> maps = torch.rand(2, 8, 7, 7)
        >>> GeMPool2d(norm_power=2.0)(maps).shape
        torch.Size([2, 8])
        >>> torch.allclose(GeMPool2d(power=1.0)(maps), maps.mean((2, 3)))
        True
    """

    power: Tensor | None

    def __init__(
        self,
        power: float = 3.0,
        norm_power: float = 0.0,
        learn: bool = False,
        flatten: bool = True,
        input_fmt: InputFormat = 'NCHW',
        eps: float = 1e-6,
    ):
        super().__init__()
        self.set_shape(flatten, input_fmt)
        self.initial = power if power == math.inf else positive_number('power', power)
        self.eps, self.learn = positive_number('eps', eps), learn
        if power == math.inf and norm_power != 0:
            raise ValueError('norm_power has no effect with power = inf, which is the maximum; leave it out')
        if learn and power in (1, math.inf) and norm_power == 0:
            raise ValueError(
                'learn has no effect with norm_power = 0 and power = 1, which is the mean, or inf, the maximum; change '
                'one of them'
            )
        if learn and power != 1:
            self.power = nn.Parameter(torch.empty(1))
        else:
            self.register_buffer('power', None if power in (1, math.inf) else torch.empty(1))
        self.prior = None if norm_power == 0 else NormPrior(norm_power, learn)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the exponents to the values they were constructed with."""
        if self.power is not None:
            with torch.no_grad():
                self.power.fill_(self.initial)
        if self.prior is not None:
            self.prior.reset_parameters()

    @property
    def options(self) -> SimplePoolOptions:
        name = {1: 'avg', math.inf: 'max'}.get(self.initial, 'gem')
        norm_power = 0.0 if self.prior is None else self.prior.initial
        return SimplePoolOptions(name, self.initial if name == 'gem' else None, norm_power, self.learn, self.gain)

    def pool_sets(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        hidden = None if mask is None else ~mask.unsqueeze(1)
        if self.initial == math.inf:
            largest = (wide if hidden is None else wide.masked_fill(hidden, -math.inf)).amax(2)
            return (self.gain * largest).to(x.dtype)
        log_q = None
        if hidden is not None:
            wide = wide.masked_fill(hidden, 0.0)  # masked samples may contain NaN
        if self.prior is not None or hidden is not None:
            logits = wide.new_zeros(wide.shape[0], 1, wide.shape[2])  # (B, 1, N)
            if self.prior is not None:
                logits = (self.prior() * log_norm(wide)).unsqueeze(1)
            log_q = (logits if hidden is None else logits.masked_fill(hidden, -math.inf)).log_softmax(2)
        if self.power is None:
            pooled = wide.mean(2) if log_q is None else (wide * log_q.exp()).sum(2)
        else:
            power = self.power.to(wide.dtype)
            log_q = -math.log(wide.shape[2]) if log_q is None else log_q
            pooled = ((power * wide.clamp_min(self.eps).log() + log_q).logsumexp(2) / power).exp()
        return (self.gain * pooled).to(x.dtype)

    def named_weights(self) -> dict[str, Tensor]:
        known = {'power': self.power, 'norm_power': None if self.prior is None else self.prior()}
        return {name: value.detach() for name, value in known.items() if value is not None}

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        start_where_absent(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        shown = self.initial if self.power is None or self.power.is_meta else float(self.power.detach())
        return f'power={shown:.4g}, eps={self.eps:g}, {self.shape_repr()}'


class AvgMaxPool2d(SimplePool):
    """Half the sum of average and max pooling, timm's 'avgmax', for maps in either format and for tokens.

    Args:
        flatten: whether to drop the spatial axes of the output.
        input_fmt: 'NCHW' or 'NHWC'.

    Shapes:
        As of `GeMPool2d`.
    """

    def __init__(self, flatten: bool = True, input_fmt: InputFormat = 'NCHW'):
        super().__init__()
        self.set_shape(flatten, input_fmt)
        self.average, self.largest = GeMPool2d(1.0), GeMPool2d(math.inf)

    @property
    def options(self) -> SimplePoolOptions:
        return SimplePoolOptions('avgmax', gain=self.gain)

    def pool_sets(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return (self.average.pool_sets(x, mask) + self.largest.pool_sets(x, mask)) * (self.gain / 2)

    def extra_repr(self) -> str:
        return self.shape_repr()
