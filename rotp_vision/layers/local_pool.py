"""Local pooling over windows, in place of max or average pooling."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rotp_vision.core import Windows, cut_windows, pool_windows, share_inside
from rotp_vision.layers.base import ROTPool
from rotp_vision.layers.options import PoolOptions, is_integer


class LocalROTPool2d(ROTPool):
    """ROT pooling of every window: a drop-in for `nn.MaxPool2d` and `nn.AvgPool2d`.

    Each window is a set of kernel_size² samples with all channels as features. Padding is masked. Windows are pooled in
    chunks, which the backward pass computes again to bound the memory.

    Args:
        kernel_size, stride, padding, dilation, ceil_mode: as in `nn.MaxPool2d`.
        options: `PoolOptions`, a mapping of its fields, or a solver's name.
        num_features: channels; needed only for attention priors and a gain per channel.
        same: pad as TensorFlow does, so that the output has ceil(size / stride) rows and columns.
        count_include_pad: as in `nn.AvgPool2d`: padding is masked in the plan but counts as zeros in the average. It
            cannot be combined with a dilation, which average pooling does not have.

    Shapes:
        (B, C, H, W) to (B, C, H', W') with H', W' as for `nn.MaxPool2d`, or (C, H, W) without a batch.

    Example:
        >>> import torch
        >>> from rotp_vision.layers import LocalROTPool2d
        >>> pool = LocalROTPool2d(3, 2, 1)  # as nn.MaxPool2d(3, 2, 1)
        >>> pool(torch.rand(2, 8, 14, 14)).shape
        torch.Size([2, 8, 7, 7])
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        *,
        options: PoolOptions | Mapping[str, Any] | str | None = None,
        num_features: int | None = None,
        ceil_mode: bool = False,
        same: bool = False,
        count_include_pad: bool = False,
    ):
        super().__init__(options, num_features)
        kernel_size = _pair('kernel_size', kernel_size, 1)
        stride = kernel_size if stride is None else _pair('stride', stride, 1)
        padding, dilation = _pair('padding', padding, 0), _pair('dilation', dilation, 1)
        self.windows = Windows(kernel_size, stride, padding, dilation, ceil_mode, same)
        self.count_include_pad = count_include_pad
        if any(2 * p > k for p, k in zip(padding, kernel_size, strict=True)):
            raise ValueError(
                f'padding must be at most half of kernel_size, got {padding} for {kernel_size}: '
                'a window that holds only padding has no samples'
            )
        if count_include_pad and dilation != (1, 1):
            raise ValueError(
                'count_include_pad is defined as in nn.AvgPool2d, without dilation; leave out one of the two'
            )

    def forward(self, x: Tensor, log_sample_prior: Tensor | None = None) -> Tensor:
        """Pool the map; `log_sample_prior` (B or 1, H, W) holds logits of q0, which windows read at their pixels."""
        if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            return self.run_unscripted(x, log_sample_prior)
        else:
            return self._pool(x, log_sample_prior)

    def _pool(self, x: Tensor, log_sample_prior: Tensor | None) -> Tensor:
        if x.dim() == 3:
            return self._pool(x.unsqueeze(0), log_sample_prior).squeeze(0)
        _check_map(x, log_sample_prior)
        # Backward computes chunks of windows again, so there is no need to recompute their sets as well.
        pooled = pool_windows(x, self.windows, partial(self.pool_sets, recompute=False), log_sample_prior)
        if self.count_include_pad:
            pooled = pooled * share_inside(x, self.windows).to(pooled.dtype)
        return pooled

    def log_plan(self, x: Tensor, log_sample_prior: Tensor | None = None) -> Tensor:
        """(B, C, H', W', kernel_h, kernel_w) log plan of each window, of mass one, -inf in the padding.

        Arguments as in `forward`. Holds all windows in memory at once.
        """
        if x.dim() == 3:
            return self.log_plan(x.unsqueeze(0), log_sample_prior).squeeze(0)
        _check_map(x, log_sample_prior)
        log_plan = self.solve_sets(*cut_windows(x, self.windows, log_sample_prior))
        rows, columns = (self.windows.layout(x.shape[2 + axis], axis)[0] for axis in (0, 1))
        log_plan = log_plan.view(-1, rows, columns, x.shape[1], *self.windows.kernel_size)
        return log_plan.permute(0, 3, 1, 2, 4, 5)

    def extra_repr(self) -> str:
        kernel_size, stride, padding, *others = self.windows
        shown: dict[str, Any] = {'kernel_size': kernel_size, 'stride': stride, 'padding': padding}
        given = zip(Windows._fields[3:], others, strict=True)
        shown |= {name: value for name, value in given if value != Windows._field_defaults[name]}
        shown |= {'count_include_pad': True} if self.count_include_pad else {}
        return f'{super().extra_repr()}, ' + ', '.join(f'{name}={value}' for name, value in shown.items())


def _check_map(x: Tensor, log_sample_prior: Tensor | None) -> None:
    if x.dim() != 4:
        raise ValueError(f'x must be a feature map (B, C, H, W) or (C, H, W), got {list(x.shape)}')
    batch, _, height, width = x.shape
    if log_sample_prior is not None and list(log_sample_prior.shape) not in (
        [batch, height, width],
        [1, height, width],
    ):
        raise ValueError(
            f'log_sample_prior must have shape ({batch} or 1, {height}, {width}), a number per pixel, got '
            f'{list(log_sample_prior.shape)}'
        )


def _pair(name: str, value: Any, least: int) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2 or not all(is_integer(v) and v >= least for v in pair):
        raise ValueError(f'{name} must be one or two integers of at least {least}, got {value!r}')
    return int(pair[0]), int(pair[1])
