"""Windows of a feature map as sets of samples, cut out and pooled a chunk at a time."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rotp_vision.core.chunks import ENTRIES
from rotp_vision.core.solver import sees_formula

# Pools sets (B, D, N) with a mask (B, N) or None and logits of q0 (B, N) or None.
PoolSets = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


class Windows(NamedTuple):
    """Windows as `nn.MaxPool2d` has them; pairs are (rows, columns)."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    ceil_mode: bool = False
    same: bool = False  # pad as TensorFlow does, so that there are ceil(size / stride) windows

    def layout(self, size: int, axis: int) -> tuple[int, int, int]:
        """The number of windows along an axis of the map, and the padding before and after it."""
        stride, before = self.stride[axis], self.padding[axis]
        reach = self.reach(axis)
        if self.same:
            count = (size + stride - 1) // stride
            before = max((count - 1) * stride + reach - size, 0) // 2
        else:
            space = size + 2 * before - reach
            count = (space + stride - 1 if self.ceil_mode else space) // stride + 1
            # With ceil_mode the last window must begin inside the map or its padding before it.
            if self.ceil_mode and (count - 1) * stride >= size + before:
                count -= 1
        if count < 1 or not all(self._has_pixel(size, axis, window, before) for window in (0, count - 1)):
            raise ValueError(
                f'a window of kernel_size {self.kernel_size[axis]}, dilation {self.dilation[axis]} and padding '
                f'{before} does not fit a map of {"width" if axis else "height"} {size}'
            )
        return count, before, max((count - 1) * stride + reach - size - before, 0)

    def reach(self, axis: int) -> int:
        """Pixels from the first to the last tap of a window."""
        return self.dilation[axis] * (self.kernel_size[axis] - 1) + 1

    def _has_pixel(self, size: int, axis: int, window: int, before: int) -> bool:
        taps = range(self.kernel_size[axis])
        return any(0 <= window * self.stride[axis] + tap * self.dilation[axis] - before < size for tap in taps)

    def cut(self, padded: Tensor, rows: int, columns: int) -> Tensor:
        """(B, rows, columns, k², C) the first windows of a padded map (B, C, H, W): its taps as strided slices."""
        (stride_h, stride_w), (dilation_h, dilation_w) = self.stride, self.dilation
        taps = []
        for y in range(0, self.kernel_size[0] * dilation_h, dilation_h):
            for x in range(0, self.kernel_size[1] * dilation_w, dilation_w):
                height, width = (rows - 1) * stride_h + 1, (columns - 1) * stride_w + 1
                tap = padded[:, :, y : y + height : stride_h, x : x + width : stride_w]
                taps.append(tap.permute(0, 2, 3, 1))
        return torch.stack(taps, 3)


def cut_windows(maps: Tensor, windows: Windows, log_sample_prior: Tensor | None = None) -> tuple:
    """All windows of `maps` (B, C, H, W) as sets (B H' W', C, k²), their mask and logits of q0 (B H' W', k²) or None.

    `log_sample_prior` (B or 1, H, W) holds logits of q0 for each pixel.
    """
    padded, exists, prior, rows, columns = _padded(maps, windows, log_sample_prior)
    return _as_sets(windows, padded, exists, prior, rows, columns)


def pool_windows(maps: Tensor, windows: Windows, pool: PoolSets, log_sample_prior: Tensor | None = None) -> Tensor:
    """(B, C, H', W') every window of `maps` (B, C, H, W) pooled as a set of its pixels, padding masked.

    Windows are cut out and pooled a chunk at a time, and again in backward, so that memory stays bounded for a large
    batch and for one large image.

    Args:
        maps: (B, C, H, W).
        windows: which windows.
        pool: pools the sets of a chunk.
        log_sample_prior: (B or 1, H, W) logits of q0 for each pixel; None for uniform.
    """
    padded, exists, prior, rows, columns = _padded(maps, windows, log_sample_prior)

    def pool_block(block: Tensor, exists: Tensor | None, prior: Tensor | None, rows: int) -> Tensor:
        pooled = pool(*_as_sets(windows, block, exists, prior, rows, columns))
        return pooled.view(block.shape[0], rows, columns, maps.shape[1]).permute(0, 3, 1, 2)

    if sees_formula():
        return pool_block(padded, exists, prior, rows)
    per_row = max(1, maps.shape[1] * columns * windows.kernel_size[0] * windows.kernel_size[1])
    limit = ENTRIES['windows'][maps.device.type != 'cpu']
    num_images = max(1, limit // (per_row * rows))
    # At least as many rows as the next chunk shares with this one.
    shared = max(0, windows.reach(0) - windows.stride[0])
    num_rows = min(rows, max(1, limit // per_row, -(-shared // windows.stride[0])))
    height = num_rows * windows.stride[0] if num_rows < rows else padded.shape[2]
    images = []
    for first in range(0, max(1, maps.shape[0]), num_images):
        one = slice(first, first + num_images)
        some_prior = prior if prior is None or prior.shape[0] == 1 else prior[one]
        blocks = [None if x is None else _blocks(x, height, shared) for x in (padded[one], exists, some_prior)]
        parts = []
        for i in range(-(-rows // num_rows)):
            block = [None if x is None else x[i] for x in blocks]
            count = min(num_rows, rows - i * num_rows)
            if torch.is_grad_enabled():
                parts.append(checkpoint(pool_block, *block, count, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(pool_block(*block, count))  # pyright: ignore[reportArgumentType, reportCallIssue]
        images.append(torch.cat(parts, 2) if len(parts) > 1 else parts[0])
    return torch.cat(images) if len(images) > 1 else images[0]


def share_inside(maps: Tensor, windows: Windows) -> Tensor:
    """(1, 1, H', W') the share of each window that lies in the map and not in its padding, as `nn.AvgPool2d` counts."""
    ones = maps.new_ones([1, 1, *maps.shape[2:]], dtype=torch.float32)
    if windows.same:
        (_, top, bottom), (_, left, right) = (windows.layout(maps.shape[2 + axis], axis) for axis in (0, 1))
        return F.avg_pool2d(F.pad(ones, [left, right, top, bottom]), windows.kernel_size, windows.stride)
    return F.avg_pool2d(ones, windows.kernel_size, windows.stride, windows.padding, windows.ceil_mode)


def _padded(maps: Tensor, windows: Windows, log_sample_prior: Tensor | None) -> tuple:
    """The padded map, where it exists (1, 1, H, W), its prior (B or 1, 1, H, W), and H' and W' of the windows."""
    rows, top, bottom = windows.layout(maps.shape[2], 0)
    columns, left, right = windows.layout(maps.shape[3], 1)
    padding = [left, right, top, bottom]
    exists = None
    if any(padding):
        exists = F.pad(torch.ones(1, 1, *maps.shape[2:], dtype=torch.bool, device=maps.device), padding)
        maps = F.pad(maps, padding)
    prior = None if log_sample_prior is None else F.pad(log_sample_prior.unsqueeze(1), padding)
    return maps, exists, prior, rows, columns


def _as_sets(
    windows: Windows, padded: Tensor, exists: Tensor | None, prior: Tensor | None, rows: int, columns: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Windows as sets (B rows columns, C, k²), their mask and logits of q0 (B rows columns, k²)."""
    sets = windows.cut(padded, rows, columns).flatten(0, 2).mT
    known = [
        None
        if x is None
        else windows.cut(x, rows, columns).expand(padded.shape[0], -1, -1, -1, -1).flatten(3).flatten(0, 2)
        for x in (exists, prior)
    ]
    return sets, known[0], known[1]


def _blocks(x: Tensor, height: int, shared: int) -> list[Tensor]:
    """`x` (B, C, H, W) in blocks of rows, each with the first rows of the next.

    Pieces of a split have gradients of their own size, while a slice has one as large as the map.
    """
    pieces = x.split(height, 2)
    blocks = [torch.cat([one, after[:, :, :shared]], 2) for one, after in pairwise(pieces)]
    return [*(blocks if shared else pieces[:-1]), pieces[-1]]
