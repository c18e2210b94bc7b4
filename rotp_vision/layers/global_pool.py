"""Global pooling of feature maps, in place of average pooling before a classifier."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rotp_vision.layers.base import InputFormat, MapShape, ROTPool
from rotp_vision.layers.options import PoolOptions


class MapPool(MapShape, ROTPool):
    """Base of ROT pools of feature maps in either format."""

    pool_type = 'rotp'

    def __init__(
        self,
        options: PoolOptions | Mapping[str, Any] | str | None = None,
        num_features: int | None = None,
        *,
        flatten: bool = True,
        input_fmt: InputFormat = 'NCHW',
    ):
        super().__init__(options, num_features)
        self.set_shape(flatten, input_fmt)

    def sample_prior(self, x: Tensor, log_sample_prior: Tensor | None) -> Tensor | None:
        """Flatten logits of q0 for the map `x` from (B or 1, H, W) to those of its sets (B or 1, N)."""
        if log_sample_prior is None:
            return None
        size = x.shape[1:3] if self.input_fmt == 'NHWC' else x.shape[2:]
        if log_sample_prior.shape[1:] != size:
            raise ValueError(
                f'log_sample_prior must have shape (B or 1, {", ".join(map(str, size))}), a number per position, got '
                f'{list(log_sample_prior.shape)}'
            )
        return log_sample_prior.flatten(1)

    def map_of(self, sets: Tensor, x: Tensor) -> Tensor:
        """Give values (B, D, N) of the sets of `x` the axes of `x`."""
        if self.input_fmt == 'NHWC':
            return sets.transpose(1, 2).unflatten(1, x.shape[1:3])
        return sets.unflatten(2, x.shape[2:])

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, {self.shape_repr()}'


class GlobalROTPool2d(MapPool):
    """Global ROT pooling of feature maps of any height and width.

        f_d = Σ_n x_dn P_dn / Σ_n P_dn,   P the plan of the image's problem

    Args:
        options: `PoolOptions`, a mapping of its fields, or a name, see `pool_options`. None is the recommended
            pooling, which starts as for training a network along with it, and next to the mean once weights of a
            network with another pooling are loaded.
        num_features: channels; needed only for attention priors and a gain per channel.
        flatten: whether to drop the spatial axes of the output.
        input_fmt: 'NCHW', 'NHWC' or 'NCL'.

    Shapes:
        (B, C, H, W) to (B, C), or (B, C, 1, 1) if not `flatten`; NHWC: (B, H, W, C) to (B, C) or (B, 1, 1, C); NCL:
        (B, C, L) to (B, C) or (B, C, 1).

    Example:
        >>> import torch
        >>> from rotp_vision.layers import GlobalROTPool2d
        >>> pool = GlobalROTPool2d()
        >>> maps = torch.rand(2, 8, 7, 7)
        >>> pool(maps).shape
        torch.Size([2, 8])
        >>> pool.plan(maps).shape, bool(torch.isclose(pool.plan(maps).sum((1, 2, 3)), torch.ones(2)).all())
        (torch.Size([2, 8, 7, 7]), True)

        A prior passed to `forward`, here one that excludes the left column:

        >>> prior = torch.zeros(1, 7, 7)
        >>> prior[:, :, 0] = -100.0
        >>> pool(maps, log_sample_prior=prior).shape
        torch.Size([2, 8])
    """

    auto_start = 'train'
    auto_prior = 'norm'

    def forward(self, x: Tensor, log_sample_prior: Tensor | None = None) -> Tensor:
        """Pool the map; `log_sample_prior` (B or 1, H, W) holds logits of q0, added to those of the layer's prior."""
        if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            return self.run_unscripted(x, log_sample_prior)
        else:
            return self.shaped(self.pool_sets(self.sets(x), None, self.sample_prior(x, log_sample_prior)))

    def log_plan(self, x: Tensor, log_sample_prior: Tensor | None = None) -> Tensor:
        """The log plan of each map, of mass one, with the axes of `x`; arguments as in `forward`."""
        log_plan = self.solve_sets(self.sets(x), log_sample_prior=self.sample_prior(x, log_sample_prior))
        return self.map_of(log_plan, x)
