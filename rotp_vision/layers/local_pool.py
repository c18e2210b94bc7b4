"""Local pooling over windows, in place of max or average pooling."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rotp_vision.layers.base import ROTPool
from rotp_vision.layers.options import PoolOptions

# Window values that are pooled at a time. What a backward pass recomputes is a small multiple of it.
CHUNK_VALUES = 2**19


class LocalROTPool2d(ROTPool):
    """ROT pooling of every window: a drop-in for `nn.MaxPool2d` and `nn.AvgPool2d`.

    Each window is a set of kernel_size² samples with all channels as features. Padding is masked: it takes no mass.
    Windows are pooled in chunks of rows and recomputed in the backward pass, so that memory stays bounded.

    Args:
        options: `PoolOptions`, a mapping of its fields, or a solver's name.
        num_features: channels; needed only for attention priors and a gain per channel.
        kernel_size, stride, padding, dilation, ceil_mode: as in `nn.MaxPool2d`.
        same: pad as TensorFlow does, so that the output has ceil(size / stride) rows and columns.
        count_include_pad: as in `nn.AvgPool2d`: padding takes no mass, but counts as zeros in what is averaged.

    Shapes:
        (B, C, H, W) to (B, C, H', W') with H', W' as `nn.MaxPool2d` has them; (C, H, W) without a batch.

    Example:
        >>> import torch
        >>> from rotp_vision.layers import LocalROTPool2d
        >>> pool = LocalROTPool2d('sinkhorn', kernel_size=3, stride=2, padding=1)
        >>> pool(torch.rand(2, 8, 14, 14)).shape
        torch.Size([2, 8, 7, 7])
    """

    def __init__(
        self,
        options: PoolOptions | Mapping[str, Any] | str | None = None,
        num_features: int | None = None,
        *,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        ceil_mode: bool = False,
        same: bool = False,
        count_include_pad: bool = False,
    ):
        super().__init__(options, num_features)
        self.kernel_size = _pair('kernel_size', kernel_size, 1)
        self.stride = self.kernel_size if stride is None else _pair('stride', stride, 1)
        self.padding = _pair('padding', padding, 0)
        self.dilation = _pair('dilation', dilation, 1)
        self.ceil_mode = ceil_mode
        self.same = same
        self.count_include_pad = count_include_pad
        if any(2 * p > k for p, k in zip(self.padding, self.kernel_size, strict=True)):
            raise ValueError(
                f'padding must be at most half of kernel_size, got {self.padding} for {self.kernel_size}: '
                'a window of nothing but padding has no samples'
            )

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if x.dim() != 4:
            raise ValueError(f'x must be a feature map (B, C, H, W) or (C, H, W), got {tuple(x.shape)}')
        rows = _Axis('height', x.shape[2], self, 0)
        columns = _Axis('width', x.shape[3], self, 1)
        size = x.shape[0] * x.shape[1] * columns.num_windows * self.kernel_size[0] * self.kernel_size[1]
        # A traced graph has one chunk: its number may not depend on the batch, and memory is the compiler's business.
        step = rows.num_windows if torch.compiler.is_compiling() else max(1, CHUNK_VALUES // size)
        recompute = torch.is_grad_enabled() and step < rows.num_windows
        padded = torch.nn.functional.pad(x, (columns.before, columns.after, rows.before, rows.after))
        chunks = []
        for first in range(0, rows.num_windows, step):
            last = min(first + step, rows.num_windows)
            if recompute:
                chunks.append(checkpoint(self._pool_rows, padded, rows, columns, first, last, use_reentrant=False))
            else:
                chunks.append(self._pool_rows(padded, rows, columns, first, last))
        pooled = chunks[0] if len(chunks) == 1 else torch.cat(chunks, 1)  # (B, H', W', C)
        return pooled.permute(0, 3, 1, 2)

    def _pool_rows(self, padded: Tensor, rows: '_Axis', columns: '_Axis', first: int, last: int) -> Tensor:
        """(B, last - first, W', C) pooled windows of some rows of the output."""
        # Only the rows in question, so that the gradient of each tap is no larger than the chunk.
        begin, end = rows.span(first, last)
        part = padded[:, :, begin:end].permute(0, 2, 3, 1)
        windows = torch.stack(
            [
                part[:, rows.taps(i, last - first), columns.taps(j, columns.num_windows)]
                for i in range(rows.kernel)
                for j in range(columns.kernel)
            ]
        )  # (k², B, h, W', C)
        kernel, batch, height, width, channels = windows.shape
        sets = windows.view(kernel, batch * height * width, channels).permute(1, 2, 0)  # (B h W', C, k²), not copied
        mask = None
        if rows.padded or columns.padded:
            inside_rows = torch.tensor(rows.inside(first, last))  # (h, kh)
            inside_columns = torch.tensor(columns.inside(0, width))  # (W', kw)
            inside = inside_rows[:, None, :, None] & inside_columns[None, :, None, :]  # (h, W', kh, kw)
            mask = inside.view(1, height * width, kernel).expand(batch, -1, -1).reshape(-1, kernel)
            mask = mask.to(padded.device, non_blocking=True)
        pooled = self.pool_sets(sets, mask).view(batch, height, width, channels)
        if mask is not None and self.count_include_pad:
            share = torch.tensor(rows.shares(first, last))[:, None] * torch.tensor(columns.shares(0, width))  # (h, W')
            pooled = pooled * share[..., None].to(pooled, non_blocking=True)
        return pooled

    def extra_repr(self) -> str:
        shape = {'kernel_size': self.kernel_size, 'stride': self.stride, 'padding': self.padding}
        shape |= {'dilation': self.dilation} if self.dilation != (1, 1) else {}
        shape |= {'ceil_mode': True} if self.ceil_mode else {}
        shape |= {'same': True} if self.same else {}
        shape |= {'count_include_pad': True} if self.count_include_pad else {}
        return f'{super().extra_repr()}, ' + ', '.join(f'{name}={value}' for name, value in shape.items())


class _Axis:
    """Where the windows lie along one axis of a map; sizes follow torch's pooling."""

    def __init__(self, name: str, size: int, pool: LocalROTPool2d, axis: int):
        self.size, self.kernel, self.stride = size, pool.kernel_size[axis], pool.stride[axis]
        self.dilation, self.before = pool.dilation[axis], pool.padding[axis]
        reach = self.dilation * (self.kernel - 1) + 1
        if pool.same:
            self.num_windows = -(-size // self.stride)
            self.before = max((self.num_windows - 1) * self.stride + reach - size, 0) // 2
            self.counted = size + (self.num_windows - 1) * self.stride + reach
        else:
            self.counted = size + 2 * self.before
            space = size + 2 * self.before - reach
            self.num_windows = (-(-space // self.stride) if pool.ceil_mode else space // self.stride) + 1
            # With ceil_mode the last window must begin inside the map or its padding before it.
            if pool.ceil_mode and (self.num_windows - 1) * self.stride >= size + self.before:
                self.num_windows -= 1
        if self.num_windows < 1 or not all(any(taps) for taps in self.inside(0, self.num_windows)):
            raise ValueError(
                f'the window (kernel_size {self.kernel}, dilation {self.dilation}, padding {self.before}) does not fit '
                f'a map of {name} {size}'
            )
        self.after = max((self.num_windows - 1) * self.stride + reach - size - self.before, 0)
        self.padded = self.before > 0 or self.after > 0

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Where in the padded map the windows `first` … `last` - 1 begin and end."""
        return first * self.stride, (last - 1) * self.stride + self.dilation * (self.kernel - 1) + 1

    def taps(self, offset: int, num_windows: int) -> slice:
        """The positions, counted from the first window's begin, that so many windows have at one offset."""
        begin = offset * self.dilation
        return slice(begin, begin + (num_windows - 1) * self.stride + 1, self.stride)

    def shares(self, first: int, last: int) -> list[float]:
        """For each window, how much of it lies inside the map; what ceil_mode adds beyond the padding is no part."""
        return [
            sum(taps) / sum(window * self.stride + i * self.dilation < self.counted for i in range(self.kernel))
            for window, taps in enumerate(self.inside(first, last), first)
        ]

    def inside(self, first: int, last: int) -> list[list[bool]]:
        """For each window, which of its offsets lie inside the map."""
        return [
            [0 <= window * self.stride + i * self.dilation - self.before < self.size for i in range(self.kernel)]
            for window in range(first, last)
        ]


def _pair(name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(v, int) and v >= least for v in pair):
        raise ValueError(f'{name} must be one or two integers of at least {least}, got {value!r}')
    return pair[0], pair[1]
