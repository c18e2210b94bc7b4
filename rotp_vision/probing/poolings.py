"""The poolings that a probe tries."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

from torch import Tensor

from rotp_vision.calibration.scores import gem
from rotp_vision.core import PENALTY
from rotp_vision.layers import PoolOptions, ROTPool

# The best of the poolings that a ROT pool can compute: Sinkhorn, softmax and max pooling.
OURS = 'ROTP'
_TEMPERATURES = (4.0, 2.0, 1.0, 0.5)  # of features in units of their root mean square
_NORM_POWERS = (0.0, 1.0, 2.0)
_GEM_POWERS = (2.0, 3.0, 5.0, 8.0)
_AS_MEAN = 1e4  # the temperature at which a ROT pool is average pooling


class Pooling(NamedTuple):
    """A pooling with its parameters.

    Attributes:
        family: its kind; poolings of one family differ in their parameters.
        setting: the parameters as text.
        pool: a function from sets (B, D, N) to features (B, D), or a ROT pool.
        options: options of the ROT pool that computes the same, to install in a network; None if there is none.
    """

    family: str
    setting: str
    pool: Callable[[Tensor], Tensor] | ROTPool
    options: PoolOptions | None = None

    def __call__(self, sets: Tensor) -> Tensor:
        """(B, D) features of `sets` (B, D, N)."""
        return self.pool.to(sets.device).pool_sets(sets) if isinstance(self.pool, ROTPool) else self.pool(sets)


def softmax_options(temperature: float) -> PoolOptions:
    """Softmax pooling: one iteration of entropic Bregman ADMM with a uniform prior."""
    return PoolOptions('badmm-e', num_iters=1, step=temperature, gain='off')


def _mean(sets: Tensor) -> Tensor:
    return sets.mean(2)


def _mean_max(sets: Tensor) -> Tensor:
    return (sets.mean(2) + sets.amax(2)) / 2


def _rot(family: str, setting: str, options: PoolOptions, norm_power: float = 0.0) -> Pooling:
    pool = ROTPool(options).requires_grad_(False)
    if norm_power:
        pool.set_weights(norm_power=norm_power)
    return Pooling(family, setting, pool, options)


def _sinkhorn(temperature: float, norm_power: float) -> Pooling:
    options = PoolOptions(
        smoothness=temperature,
        sample_penalty=PENALTY * temperature,
        prior='norm' if norm_power else 'uniform',
        gain='off',
    )
    setting = f'temperature {temperature:g}' + (f', norm power {norm_power:g}' if norm_power else '')
    return _rot('Sinkhorn', setting, options, norm_power)


AVERAGE = Pooling('average', '', _mean, softmax_options(_AS_MEAN))


def all_poolings() -> list[Pooling]:
    """The poolings to try, average pooling first."""
    return [
        AVERAGE,
        _rot('max', '', PoolOptions('badmm-e', num_iters=1, start='max', gain='off')),
        Pooling('average + max', '', _mean_max),
        *(Pooling('GeM', f'p = {power:g}', partial(gem, power=power)) for power in _GEM_POWERS),
        *(_rot('softmax', f'temperature {t:g}', softmax_options(t)) for t in _TEMPERATURES),
        *(_sinkhorn(t, power) for power, t in product(_NORM_POWERS, _TEMPERATURES)),
    ]
