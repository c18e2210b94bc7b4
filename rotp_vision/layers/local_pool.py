"""Local pooling over windows, in place of max or average pooling."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rotp_vision.core import StepWeights, Windows, rot_pool_windows, solve, transforms_active
from rotp_vision.layers.base import ROTPool
from rotp_vision.layers.options import PoolOptions, is_integer

# Number of window values that are pooled at a time; a backward pass recomputes a small multiple of it. On CPU a chunk
# should stay in the cache; elsewhere launches count, and the limit only bounds memory.
CHUNK_VALUES = {'cpu': 2**21}
CHUNK_VALUES_ELSEWHERE = 2**27


class Pixels(NamedTuple):
    """What windows know of their pixels besides the features."""

    inside: Tensor | None  # (H', W', kh, kw) whether a tap lies inside the map; None where all do
    log_prior: Tensor | None  # (B or 1, 1, …) logits of q0, padded as the map is; None for uniform


class LocalROTPool2d(ROTPool):
    """ROT pooling of every window: a drop-in for `nn.MaxPool2d` and `nn.AvgPool2d`.

    Each window is a set of kernel_size² samples with all channels as features. Padding is masked.
    Windows are pooled in chunks of rows and recomputed in the backward pass, so that memory stays bounded.
    The backend 'triton' reads windows of at most 3×3 with uniform priors and up to 256 channels from the map itself;
    other windows are copied out of the map, as by the other backends.

    Args:
        options: `PoolOptions`, a mapping of its fields, or a solver's name.
        num_features: channels; needed only for attention priors and a gain per channel.
        kernel_size, stride, padding, dilation, ceil_mode: as in `nn.MaxPool2d`.
        same: pad as TensorFlow does, so that the output has ceil(size / stride) rows and columns.
        count_include_pad: as in `nn.AvgPool2d`: padding is masked in the plan, but counts as zeros in the average.

    Shapes:
        (B, C, H, W) to (B, C, H', W') with H', W' as for `nn.MaxPool2d`, or (C, H, W) without a batch.

    Example:
        >>> import torch
        >>> from rotp_vision.layers import LocalROTPool2d
        >>> pool = LocalROTPool2d(kernel_size=3, stride=2, padding=1)
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

    def forward(self, x: Tensor, log_sample_prior: Tensor | None = None) -> Tensor:
        """The pooled map; `log_sample_prior` (B or 1, H, W) holds logits of q0, which a window reads at its pixels."""
        if x.dim() == 3:
            x = x.unsqueeze(0)
            return self._pool_maps(x, self._prior_map(x, log_sample_prior)).squeeze(0)
        return self._pool_maps(x, self._prior_map(x, log_sample_prior))

    def log_plan(self, x: Tensor, log_sample_prior: Tensor | None = None) -> Tensor:
        """(B, C, H', W', kernel_h, kernel_w) log plan of each window, of mass one, -inf in the padding.

        Arguments as in `forward`. All windows are held in memory at once.
        """
        if x.dim() == 3:
            return self.log_plan(x.unsqueeze(0), log_sample_prior).squeeze(0)
        prior = self._prior_map(x, log_sample_prior)
        rows, top, bottom = self._layout(x.shape[2], 0)
        columns, left, right = self._layout(x.shape[3], 1)
        padding = [left, right, top, bottom]
        row_taps, column_taps = self._taps(x, 0, rows, top), self._taps(x, 1, columns, left)
        inside = _inside(row_taps, x.shape[2])[:, None, :, None] & _inside(column_taps, x.shape[3])[None, :, None, :]
        pixels = Pixels(inside if any(padding) else None, None if prior is None else F.pad(prior, padding))
        problem = self._problem(*self._windows(F.pad(x, padding), pixels, 0, rows, columns), zeroed=True)
        log_plan = solve(problem, self.weights(), self.solver)
        return log_plan.view(-1, rows, columns, x.shape[1], *self.kernel_size).permute(0, 3, 1, 2, 4, 5)

    def _pool_maps(self, x: Tensor, prior: Tensor | None) -> Tensor:
        rows, top, bottom = self._layout(x.shape[2], 0)
        columns, left, right = self._layout(x.shape[3], 1)
        pooled: Tensor | None = None
        weights, gain = self._weights_and_gain()
        if self.prior is None and prior is None and not torch.jit.is_scripting():  # pyright: ignore
            windows = Windows(*self.kernel_size, *self.stride, top, left, *self.dilation, rows, columns)
            pooled = rot_pool_windows(x, weights, self.solver, windows, self.view, gain)
            if pooled is not None and not self.count_include_pad:
                return pooled
        padding = [left, right, top, bottom]
        padded, log_prior = F.pad(x, padding), None if prior is None else F.pad(prior, padding)
        if max(padding) == 0:
            if pooled is None:
                pooled = self._pool_padded(padded, Pixels(None, log_prior), rows, columns, weights, gain)
            return pooled
        row_taps, column_taps = self._taps(x, 0, rows, top), self._taps(x, 1, columns, left)  # (H', kh), (W', kw)
        inside_rows, inside_columns = _inside(row_taps, x.shape[2]), _inside(column_taps, x.shape[3])
        if pooled is None:
            inside = inside_rows[:, None, :, None] & inside_columns[None, :, None, :]
            pooled = self._pool_padded(padded, Pixels(inside, log_prior), rows, columns, weights, gain)
        if self.count_include_pad:
            # Padding counts as zeros; what ceil_mode adds beyond the padding does not count at all.
            counted_rows = row_taps < x.shape[2] + max(self.padding[0], bottom if self.same else 0)
            counted_columns = column_taps < x.shape[3] + max(self.padding[1], right if self.same else 0)
            share = (inside_rows.sum(1) / counted_rows.sum(1))[:, None] * (
                inside_columns.sum(1) / counted_columns.sum(1)
            )
            pooled = pooled * share.to(pooled.dtype)
        return pooled

    def _pool_padded(
        self, padded: Tensor, pixels: Pixels, rows: int, columns: int, weights: StepWeights, gain: Tensor | None
    ) -> Tensor:
        """Pool all windows, in chunks if there are many."""
        # A traced graph has one chunk: the number of chunks must not depend on the batch size.
        if torch.jit.is_scripting() or torch.compiler.is_compiling():  # pyright: ignore[reportPrivateImportUsage]
            return self._pool_rows(padded, pixels, 0, rows, columns, weights, gain)
        size = padded.shape[0] * padded.shape[1] * columns * self.kernel_size[0] * self.kernel_size[1]
        limit = CHUNK_VALUES.get(padded.device.type, CHUNK_VALUES_ELSEWHERE)
        step = max(1, limit // max(1, size))
        chunks: list[Tensor] = []
        for first in range(0, rows, step):
            last = min(first + step, rows)
            pooled, padded = self._pool_chunk(padded, pixels, first, last, columns, weights, gain, step < rows)
            chunks.append(pooled)
        return torch.cat(chunks, 2) if len(chunks) > 1 else chunks[0]

    def _pool_rows(
        self,
        padded: Tensor,
        pixels: Pixels,
        first: int,
        last: int,
        columns: int,
        weights: StepWeights,
        gain: Tensor | None,
    ) -> Tensor:
        """(B, C, last - first, W') pooled windows of some rows of the output, channels last in memory."""
        sets, mask, logits = self._windows(padded, pixels, first, last, columns)
        pooled = self._pool(self._problem(sets, mask, logits, zeroed=True), weights, gain)
        return pooled.view(padded.shape[0], last - first, columns, padded.shape[1]).permute(0, 3, 1, 2)

    def _pool_chunk(
        self,
        padded: Tensor,
        pixels: Pixels,
        first: int,
        last: int,
        columns: int,
        weights: StepWeights,
        gain: Tensor | None,
        one_of_many: bool,
    ) -> tuple[Tensor, Tensor]:
        """`_pool_rows`, and the map for the next chunk, see `_CutWindows`.

        Of many chunks none saves its windows for its backward pass, which copies them out of the map again.
        """
        if not torch.is_grad_enabled() or transforms_active():
            return self._pool_rows(padded, pixels, first, last, columns, weights, gain), padded
        source, sets = padded.detach(), None

        def pack(tensor: Tensor) -> Tensor | None:
            if not one_of_many or sets is None or tensor.shape != sets.shape:
                return tensor
            return None if tensor.data_ptr() == sets.data_ptr() else tensor

        def unpack(packed: Tensor | None) -> Tensor:
            nonlocal sets
            if packed is not None:
                return packed
            if sets is None:
                sets = self._cut(source, first, last, columns).flatten(0, 2).mT
            return sets

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            windows, padded = _CutWindows.apply(padded, self._taps_of(first, last, columns))  # pyright: ignore
            sets = windows.flatten(0, 2).mT
            mask, logits = self._known(padded, pixels, first, last, columns)
            pooled = self._pool(self._problem(sets, mask, logits, zeroed=True), weights, gain)
        sets = None
        return pooled.view(padded.shape[0], last - first, columns, padded.shape[1]).permute(0, 3, 1, 2), padded

    def _prior_map(self, x: Tensor, log_sample_prior: Tensor | None) -> Tensor | None:
        """(B or 1, 1, H, W) the prior that is given for the maps `x`."""
        if x.dim() != 4:
            raise ValueError(f'x must be a feature map (B, C, H, W) or (C, H, W), got {list(x.shape)}')
        if log_sample_prior is None:
            return None
        batch, _, height, width = x.shape
        given = list(log_sample_prior.shape)
        if given != [batch, height, width] and given != [1, height, width]:
            raise ValueError(
                f'log_sample_prior must have shape ({batch} or 1, {height}, {width}), a number per pixel, got {given}'
            )
        return log_sample_prior.unsqueeze(1)

    def _windows(
        self, padded: Tensor, pixels: Pixels, first: int, last: int, columns: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The windows of some rows as sets (B h W', C, k²), a view of (B h W', k², C), their mask and logits of q0."""
        sets = self._cut(padded, first, last, columns).flatten(0, 2).mT
        mask, logits = self._known(padded, pixels, first, last, columns)
        return sets, mask, logits

    def _known(
        self, padded: Tensor, pixels: Pixels, first: int, last: int, columns: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """The mask and the logits of q0 of the windows of some rows, (B h W', k²) each."""
        mask: Tensor | None = None
        logits: Tensor | None = None
        inside, log_prior = pixels.inside, pixels.log_prior
        if inside is not None:
            mask = inside[first:last].flatten(2).flatten(0, 1).repeat(padded.shape[0], 1)
        if log_prior is not None:
            logits = self._cut(log_prior, first, last, columns)  # (b, h, W', k², 1)
            logits = logits.expand(padded.shape[0], -1, -1, -1, -1).flatten(3).flatten(0, 2)
        return mask, logits

    def _cut(self, padded: Tensor, first: int, last: int, columns: int) -> Tensor:
        """(B, h, W', k², C) the windows of some rows."""
        taps: list[Tensor] = []
        for y, y_end, y_step, x, x_end, x_step in self._taps_of(first, last, columns):
            taps.append(padded[:, :, y:y_end:y_step, x:x_end:x_step].permute(0, 2, 3, 1))
        return torch.stack(taps, 3)

    def _taps_of(self, first: int, last: int, columns: int) -> list[tuple[int, int, int, int, int, int]]:
        """Where in the padded map the taps of the windows of some rows lie, as two slices each."""
        (kernel_h, kernel_w), (dilation_h, dilation_w) = self.kernel_size, self.dilation
        stride_h, stride_w = self.stride
        reach_h, reach_w = (last - first - 1) * stride_h + 1, (columns - 1) * stride_w + 1
        taps: list[tuple[int, int, int, int, int, int]] = []
        for i in range(kernel_h):
            for j in range(kernel_w):
                y, x = first * stride_h + i * dilation_h, j * dilation_w
                taps.append((y, y + reach_h, stride_h, x, x + reach_w, stride_w))
        return taps

    def _layout(self, size: int, axis: int) -> tuple[int, int, int]:
        """Number of windows along an axis, as in torch's pooling, and the padding before and after."""
        stride, before = self.stride[axis], self.padding[axis]
        reach = self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
        if self.same:
            windows = (size + stride - 1) // stride
            before = max((windows - 1) * stride + reach - size, 0) // 2
        else:
            space = size + 2 * before - reach
            windows = (space + stride - 1 if self.ceil_mode else space) // stride + 1
            # With ceil_mode the last window must begin inside the map or its padding before it.
            if self.ceil_mode and (windows - 1) * stride >= size + before:
                windows -= 1
        if windows < 1 or not self._fits(size, axis, windows, before):
            raise ValueError(
                f'a window of kernel_size {self.kernel_size[axis]}, dilation {self.dilation[axis]} and padding '
                f'{before} does not fit a map of {"width" if axis else "height"} {size}'
            )
        return windows, before, max((windows - 1) * stride + reach - size - before, 0)

    def _fits(self, size: int, axis: int, windows: int, before: int) -> bool:
        """Whether every window has a tap inside the map; only the outermost ones may have none."""
        for window in (0, windows - 1):
            found = False
            for tap in range(self.kernel_size[axis]):
                found = found or 0 <= window * self.stride[axis] + tap * self.dilation[axis] - before < size
            if not found:
                return False
        return True

    def _taps(self, x: Tensor, axis: int, windows: int, before: int) -> Tensor:
        """(windows, taps) positions in the map; those in the padding lie outside."""
        start = torch.arange(windows, device=x.device) * self.stride[axis] - before
        return start[:, None] + torch.arange(self.kernel_size[axis], device=x.device) * self.dilation[axis]

    def extra_repr(self) -> str:
        shape = {'kernel_size': self.kernel_size, 'stride': self.stride, 'padding': self.padding}
        shape |= {'dilation': self.dilation} if self.dilation != (1, 1) else {}
        shape |= {'ceil_mode': True} if self.ceil_mode else {}
        shape |= {'same': True} if self.same else {}
        shape |= {'count_include_pad': True} if self.count_include_pad else {}
        return f'{super().extra_repr()}, ' + ', '.join(f'{name}={value}' for name, value in shape.items())


def _inside(taps: Tensor, size: int) -> Tensor:
    return (taps >= 0) & (taps < size)


class _CutWindows(torch.autograd.Function):
    """Windows (B, h, W', k², C) cut out of a padded map, and the map once more, for the next to cut theirs out of.

    As the map goes from one to the next, backward comes from the last to the first, and each adds its part of the one
    gradient in place: no chunk makes a gradient as large as the map.
    """

    @staticmethod
    def forward(ctx, padded: Tensor, taps: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        ctx.taps, ctx.shape = taps, padded.shape
        ctx.channels_last = padded.stride(1) == 1
        ctx.set_materialize_grads(False)
        parts = [padded[:, :, y:y_end:y_step, x:x_end:x_step] for y, y_end, y_step, x, x_end, x_step in taps]
        return torch.stack([part.permute(0, 2, 3, 1) for part in parts], 3), padded.view_as(padded)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, d_windows: Tensor | None, d_padded: Tensor | None
    ) -> tuple[Tensor | None, None]:
        if d_windows is None:
            return d_padded, None
        if d_padded is None:
            layout = torch.channels_last if ctx.channels_last else torch.contiguous_format
            d_padded = torch.empty(ctx.shape, dtype=d_windows.dtype, device=d_windows.device, memory_format=layout)
            d_padded.zero_()
        for tap, (y, y_end, y_step, x, x_end, x_step) in enumerate(ctx.taps):
            # As a method: the operator would copy the result onto itself.
            d_padded[:, :, y:y_end:y_step, x:x_end:x_step].add_(d_windows[:, :, :, tap].permute(0, 3, 1, 2))
        return d_padded, None


def _pair(name: str, value: Any, least: int) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2 or not all(is_integer(v) and v >= least for v in pair):
        raise ValueError(f'{name} must be one or two integers of at least {least}, got {value!r}')
    return int(pair[0]), int(pair[1])
