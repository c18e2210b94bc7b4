"""What the kernels for windows share: how windows are read from a map, and how their gradients get back to it.

A program has a block of windows of one image with *all* their channels. Each of the few taps of a window is a tile
(BLOCK_W, BLOCK_C), windows by channels, read from the map by strides, and a window is the tuple of its taps: a sum over
samples adds tiles, a sum over channels stays within the program. So forward is one launch, and so is backward.

Where windows overlap, backward leaves the gradients of every window in a buffer, for some images at a time, and
`gather_windows` adds up for each pixel what the windows that cover it left; elsewhere they go to their pixels directly.
No atomics: results do not depend on the order in which programs run.
"""

# Kernels are not Python to a type checker.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotp_vision.core.operator import Pair, define
from rotp_vision.core.problem import VIEW_FLOOR
from rotp_vision.core.solver import Windows
from rotp_vision.core.triton import tiles
from rotp_vision.core.triton.tiles import AMD, NUM_WARPS, Launches, launch_options, on_device

GATHER_BLOCK = 512
# Of the buffer for the gradients of windows, unless those of one image are more: it bounds the memory of backward, to
# 2 GB. The stem of a ResNet-50 with 256 images takes 1.9 GB, next to maps of 0.8 GB in float32.
BUFFER_ELEMENTS = 2**29


class WindowTiling(NamedTuple):
    """Windows and channels of a program, and its warps."""

    block_w: int
    block_c: int
    num_warps: int


def window_tiling(num_channels: int, taps: int, backward: bool) -> WindowTiling:
    """As many windows as fit the registers; more warps where one window does not."""
    per_thread = (1 if backward else 2) * (2 if taps <= 4 else 1)
    block_c = max(16, triton.next_power_of_2(num_channels))
    block_w = max(1, per_thread * 32 * NUM_WARPS // block_c)
    return WindowTiling(block_w, block_c, max(NUM_WARPS, block_c // (32 * per_thread)))


def tiles_of_windows(num_channels: int, windows: Windows) -> tuple[int, ...]:
    """The constants that the windows give their kernels; strides and dilation of one are such too."""
    cuts = (window_tiling(num_channels, windows.kernel_h * windows.kernel_w, backward) for backward in (False, True))
    return (*windows[:4], *windows[6:8], *(size for cut in cuts for size in cut))


def launch_windows_forward(
    kernel: Any,
    x: Tensor,
    coefficients: Tensor,
    pooled: Tensor,
    saved: Tensor,
    windows: tuple[int, ...],
    view: str,
    count: int,
    **flags: bool,
) -> None:
    """Fills `pooled` and `saved`.

    Args:
        kernel: `local_badmm_forward`, `local_sinkhorn_forward`.
        x: (B, C, H, W).
        coefficients: see `coefficients.py`.
        pooled: (B, C, H', W').
        saved: (B, H' W', vectors, taps) what backward needs.
        windows: the fields of `Windows`.
        view: what the plan sees of the maps, see `view_of`.
        count: of modules or steps, as the kernel takes it.
        flags: what else the kernel takes.
    """
    kernel_h, kernel_w, *steps, out_h, out_w = windows
    cut = window_tiling(x.shape[1], kernel_h * kernel_w, backward=False)
    blocks = triton.cdiv(out_h * out_w, cut.block_w)
    with on_device(x):
        tiles.launch(
            kernel, (x.shape[0] * blocks,),
            x, coefficients, pooled, saved,
            count, blocks, (*x.shape[1:], out_h, out_w, *steps), VIEW_FLOOR, x.stride(), pooled.stride(),
            KH=kernel_h, KW=kernel_w, BLOCK_W=cut.block_w, BLOCK_C=cut.block_c,
            VIEW=view, CHANNELS_LAST=is_channels_last(x), **flags, **launch_options(AMD, cut.num_warps),
        )  # fmt: skip


def launch_windows_backward(
    kernel: Any,
    grad: Tensor,
    x: Tensor,
    coefficients: Tensor,
    saved: Tensor,
    d_x: Tensor | None,
    windows: tuple[int, ...],
    view: str,
    count: int,
    **flags: bool,
) -> Tensor:
    """Fills d_x, where it is given, with the gradient of x. Returns that of the coefficients for every program."""
    kernel_h, kernel_w, *steps, out_h, out_w = windows
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w = steps
    num_images, num_channels = x.shape[:2]
    taps, num_windows = kernel_h * kernel_w, out_h * out_w
    cut = window_tiling(num_channels, taps, backward=True)
    blocks = triton.cdiv(num_windows, cut.block_w)
    slopes = x.new_empty(num_images, blocks, len(coefficients), dtype=torch.float32)
    overlap = dilation_h * (kernel_h - 1) >= stride_h or dilation_w * (kernel_w - 1) >= stride_w
    images = num_images
    buffer = None
    # How far apart gradients lie: (image, channel, row and column of the window, row and column of the tap), the first.
    spacing = (0,) * 7
    if d_x is not None and overlap:
        images = max(1, min(num_images, BUFFER_ELEMENTS // (taps * num_windows * num_channels)))
        shape = (num_windows, num_channels) if is_channels_last(x) else (num_channels, num_windows)
        buffer = x.new_empty(images, taps, *shape, dtype=torch.float32)
        buffer = buffer if is_channels_last(x) else buffer.mT  # (images, taps, windows, C)
        at_image, at_tap, at_window, at_channel = buffer.stride()
        spacing = (at_image, at_channel, out_w * at_window, at_window, kernel_w * at_tap, at_tap, 0)
    elif d_x is not None:
        d_x.zero_()  # some pixels may be in no window
        at_image, at_channel, at_h, at_w = d_x.stride()
        first = -pad_h * at_h - pad_w * at_w
        spacing = (at_image, at_channel, stride_h * at_h, stride_w * at_w, dilation_h * at_h, dilation_w * at_w, first)
    geometry = (*x.shape[1:], out_h, out_w, *steps)
    with on_device(x):
        for start in range(0, num_images, images or 1):
            some = slice(start, min(start + images, num_images))
            target = buffer if buffer is not None else x if d_x is None else d_x
            tiles.launch(
                kernel, ((some.stop - start) * blocks,),
                grad[some], x[some], coefficients, saved[some], target, slopes[some],
                count, blocks, geometry, VIEW_FLOOR, grad.stride(), x.stride(), spacing,
                KH=kernel_h, KW=kernel_w, BLOCK_W=cut.block_w, BLOCK_C=cut.block_c,
                VIEW=view, CHANNELS_LAST=is_channels_last(x), NEED_X=d_x is not None, **flags,
                **launch_options(AMD, cut.num_warps),
            )  # fmt: skip
            if buffer is not None and d_x is not None:
                gather_blocks = triton.cdiv(x[0].numel(), GATHER_BLOCK)
                tiles.launch(
                    gather_windows, ((some.stop - start) * gather_blocks,),
                    buffer, d_x[some], gather_blocks, geometry, buffer.stride(), d_x.stride(),
                    KH=kernel_h, KW=kernel_w, BLOCK=GATHER_BLOCK, CHANNELS_LAST=is_channels_last(x),
                    **launch_options(AMD, NUM_WARPS),
                )  # fmt: skip
    return slopes


def is_channels_last(x: Tensor) -> bool:
    """Which axis of a map (B, C, H, W) is read along memory."""
    return x.stride(1) == 1


def register_windows(name: str, kernels: Callable[..., Launches], options: str) -> None:
    """Make `torch.ops.rotp_vision.triton_local_name(x, coefficients, windows, view, *options)`.

    It takes maps (B, C, H, W) and the fields of `Windows`, and returns the pooled map in the memory format of x, and
    for backward the vectors (B, H' W', L - 1, taps). Arguments as those of `register_sets`.
    """

    def run_forward(x, coefficients, windows, view, *extra) -> tuple[Tensor, Tensor]:
        pooled, saved = fake_forward(x, coefficients, windows, view, *extra)
        forward, _, count, _, flags = kernels(coefficients, *extra)
        launch_windows_forward(forward, x, coefficients, pooled, saved, windows, view, count, **flags)
        return pooled, saved

    def run_backward(grad, x, coefficients, saved, needs, windows, view, *extra) -> tuple[Tensor, Tensor]:
        d_x = torch.empty_like(x) if needs[0] else None
        _, backward, count, _, flags = kernels(coefficients, *extra)
        slopes = launch_windows_backward(backward, grad, x, coefficients, saved, d_x, windows, view, count, **flags)
        return x.new_empty(0) if d_x is None else d_x, slopes.sum((0, 1)) if needs[1] else slopes.new_empty(0)

    def fake_forward(x, coefficients, windows, view, *extra) -> tuple[Tensor, Tensor]:
        *_, out_h, out_w = windows
        layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
        vectors = kernels(coefficients, *extra).launches - 1
        return (
            torch.empty(*x.shape[:2], out_h, out_w, dtype=x.dtype, device=x.device, memory_format=layout),
            x.new_empty(x.shape[0], out_h * out_w, vectors, windows[0] * windows[1], dtype=torch.float32),
        )

    def fake_backward(grad, x, coefficients, saved, needs, windows, view, *extra) -> tuple[Tensor, Tensor]:
        d_x = torch.empty_like(x) if needs[0] else x.new_empty(0)
        return d_x, x.new_empty(coefficients.shape if needs[1] else 0, dtype=torch.float32)

    inputs, chosen = 'Tensor x, Tensor coefficients', f'SymInt[] windows, str view{options}'
    define(
        f'triton_local_{name}',
        Pair(run_forward, run_backward, fake_forward, fake_backward),
        f'({inputs}, {chosen}) -> (Tensor, Tensor)',
        f'(Tensor grad, {inputs}, Tensor saved, bool[] needs, {chosen}) -> (Tensor, Tensor)',
        num_inputs=2,
    )


@triton.jit
def gather_windows(
    buffer, d_x, blocks, geometry, buffer_strides, d_x_strides,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """d_x (B, C, H, W): for each pixel the sum over the taps that lie on it, from (B, taps, windows, C).

    The grid is (B · blocks of an image's values in their order in memory,): one axis, as only the first may be long.
    """
    C, H, W, out_h, out_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w = geometry
    buffer_b, buffer_tap, buffer_w, buffer_c = buffer_strides
    d_x_b, d_x_c, d_x_h, d_x_w = d_x_strides
    b = (tl.program_id(0) // blocks).to(tl.int64)
    i = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    exists = i < C * H * W
    if CHANNELS_LAST:
        pixel, c = i // C, i % C
    else:
        pixel, c = i % (H * W), i // (H * W)
    h, w = pixel // W, pixel % W
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for tap_h in tl.static_range(KH):
        for tap_w in tl.static_range(KW):
            above, before = h + pad_h - tap_h * dilation_h, w + pad_w - tap_w * dilation_w
            row, column = above // stride_h, before // stride_w
            covers = exists & (above >= 0) & (before >= 0) & (row < out_h) & (column < out_w)
            covers &= (row * stride_h == above) & (column * stride_w == before)
            taps = buffer + (b * buffer_b + (tap_h * KW) * buffer_tap + tap_w * buffer_tap)  # in int64, as b is
            total += tl.load(taps + ((row * out_w + column) * buffer_w + c * buffer_c), mask=covers, other=0.0)
    tl.store(d_x + b * d_x_b + (c * d_x_c + h * d_x_h + w * d_x_w), total.to(d_x.dtype.element_ty), mask=exists)


@triton.jit
def open_windows(
    x_map, x_strides, blocks, geometry, floor,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    VIEW: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """What a program of the grid (B · blocks of windows,) works on: one axis, as only the first may be long.

    Returns:
        place: the image; row and column (BLOCK_W,) of the windows, beyond the end the last window once more; which of
            them are no such repetition; channels (BLOCK_C,), and which exist.
        index: (BLOCK_W,) number of the windows, counted over images.
        has_c: (BLOCK_C,) which channels exist.
        inside: for each tap (BLOCK_W,) whether it lies in the map.
        count: (BLOCK_W,) of how many taps that is so.
        raw: the taps.
        xs: what the plan sees of them.
    """
    C, H, W, out_h, out_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w = geometry
    wanted = (tl.program_id(0) % blocks) * BLOCK_W + tl.arange(0, BLOCK_W)
    index = tl.minimum(wanted, out_h * out_w - 1)
    row, column = index // out_w, index % out_w
    inside = ()
    count = row * 0.0
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            h, w = row * stride_h - pad_h + i * dilation_h, column * stride_w - pad_w + j * dilation_w
            tap = (h >= 0) & (h < H) & (w >= 0) & (w < W)
            inside += (tap,)
            count += tl.where(tap, 1.0, 0.0)
    b, c = (tl.program_id(0) // blocks).to(tl.int64), tl.arange(0, BLOCK_C)
    place = (b, row, column, wanted < out_h * out_w, c, c < C)
    raw = _load_windows(x_map, x_strides, place, inside, geometry, KH, KW, CHANNELS_LAST)
    return place, b * (out_h * out_w) + index, c < C, inside, count, raw, _view(raw, count, floor, VIEW)


@triton.jit
def read_again(
    raw, x_map, x_strides, place, inside, geometry,
    KH: tl.constexpr, KW: tl.constexpr, VIEW: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """The taps, which are not held where the plan sees something else."""
    if VIEW != 'identity':
        raw = _load_windows(x_map, x_strides, place, inside, geometry, KH, KW, CHANNELS_LAST)
    return raw


@triton.jit
def _load_windows(x, strides, place, inside, geometry, KH: tl.constexpr, KW: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """The taps of the windows, zero outside the map, whatever lies there."""
    _, _, _, _, _, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w = geometry
    b, row, column, _, c, has_c = place
    x_b, x_c, x_h, x_w = strides
    x += b * x_b
    taps = ()
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            h, w = row * stride_h - pad_h + i * dilation_h, column * stride_w - pad_w + j * dilation_w
            taps += (_load_tile(x, h * x_h + w * x_w, c * x_c, inside[i * KW + j], has_c, CHANNELS_LAST),)
    return taps


@triton.jit
def store_windows(
    pointer, taps, spacing, place, inside, KH: tl.constexpr, KW: tl.constexpr, CHANNELS_LAST: tl.constexpr
):  # fmt: skip
    """Gradients of the taps to where `launch_windows_backward` says."""
    b, row, column, own, c, has_c = place
    at_image, at_channel, at_row, at_column, at_i, at_j, first = spacing
    at = row * at_row + column * at_column
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            start = pointer + (b * at_image + first + i * at_i + j * at_j)  # in int64, as b is
            exists = own & inside[i * KW + j]
            _store_tile(start, taps[i * KW + j], at, c * at_channel, exists, has_c, CHANNELS_LAST)


@triton.jit
def load_pooled(pointer, strides, place, CHANNELS_LAST: tl.constexpr):
    """(BLOCK_W, BLOCK_C) of the pooled map; zero for windows that are repeated."""
    b, row, column, own, c, has_c = place
    at_b, at_c, at_h, at_w = strides
    return _load_tile(pointer + b * at_b, row * at_h + column * at_w, c * at_c, own, has_c, CHANNELS_LAST)


@triton.jit
def store_pooled(pointer, values, strides, place, CHANNELS_LAST: tl.constexpr):
    b, row, column, own, c, has_c = place
    at_b, at_c, at_h, at_w = strides
    _store_tile(pointer + b * at_b, values, row * at_h + column * at_w, c * at_c, own, has_c, CHANNELS_LAST)


@triton.jit
def _load_tile(pointer, at_w, at_c, has_w, has_c, CHANNELS_LAST: tl.constexpr):
    """(BLOCK_W, BLOCK_C) in float32, zero where nothing is, read with neighbours in memory as the last axis."""
    if CHANNELS_LAST:
        at, has = at_w[:, None] + at_c[None, :], has_w[:, None] & has_c[None, :]
        return tl.load(pointer + at, mask=has, other=0.0).to(tl.float32)
    else:
        at, has = at_c[:, None] + at_w[None, :], has_c[:, None] & has_w[None, :]
        return tl.trans(tl.load(pointer + at, mask=has, other=0.0).to(tl.float32))


@triton.jit
def _store_tile(pointer, values, at_w, at_c, has_w, has_c, CHANNELS_LAST: tl.constexpr):
    values = values.to(pointer.dtype.element_ty)
    if CHANNELS_LAST:
        tl.store(pointer + (at_w[:, None] + at_c[None, :]), values, mask=has_w[:, None] & has_c[None, :])
    else:
        tl.store(pointer + (at_c[:, None] + at_w[None, :]), tl.trans(values), mask=has_c[:, None] & has_w[None, :])


@triton.jit
def add_taps(xs, ys, factor):
    """Tap by tap x + factor · y."""
    taps = ()
    for n in tl.static_range(len(xs)):
        taps += (xs[n] + factor * ys[n],)
    return taps


@triton.jit
def dot_taps(xs, ys):
    """Σ over taps of x y."""
    total = xs[0] * ys[0]
    for n in tl.static_range(1, len(xs)):
        total += xs[n] * ys[n]
    return total


@triton.jit
def pool_back(g, weights, xs):
    """Back through f = Σ over taps of x softmax(y), from its gradient g: those of x, as it stands there, and of y."""
    f = dot_taps(weights, xs)
    dxs = ()
    dys = ()
    for n in tl.static_range(len(xs)):
        dxs += (weights[n] * g,)
        dys += (weights[n] * g * (xs[n] - f),)
    return dxs, dys


@triton.jit
def zero_taps(xs):
    taps = ()
    for n in tl.static_range(len(xs)):
        taps += (xs[n] * 0.0,)
    return taps


@triton.jit
def softmax_taps(ys):
    """Over taps: the weights, and the log-sum-exp."""
    top = ys[0]
    for n in tl.static_range(1, len(ys)):
        top = tl.maximum(top, ys[n])
    taps = ()
    total = top * 0.0
    for n in tl.static_range(len(ys)):
        y = tl.exp(ys[n] - top)
        taps += (y,)
        total += y
    weights = ()
    for n in tl.static_range(len(ys)):
        weights += (taps[n] / total,)
    return weights, top + tl.log(total)


@triton.jit
def softmax_channels(y, has_c):
    """Over channels: the weights, and the log-sum-exp (BLOCK_W,)."""
    y = tl.where(has_c[None, :], y, float('-inf'))
    top = tl.max(y, 1)
    y = tl.exp(y - top[:, None])
    total = tl.sum(y, 1)
    return y / total[:, None], top + tl.log(total)


@triton.jit
def load_saved(saved, k, inside):
    """Vector k (BLOCK_W,) of each tap, zero for k = -1; ∞ outside the map."""
    taps = ()
    for n in tl.static_range(len(inside)):
        value = tl.load(saved + (k * len(inside) + n), mask=tl.where(inside[n], k, -1) >= 0, other=0.0)
        taps += (tl.where(inside[n], value, float('inf')),)
    return taps


@triton.jit
def _view(raw, count, floor, VIEW: tl.constexpr):
    """What the plan sees of a window."""
    taps = raw
    if VIEW == 'log':
        taps = ()
        for n in tl.static_range(len(raw)):
            taps += (tl.log(tl.maximum(raw[n], 0.0) + floor),)
    elif VIEW == 'rms':
        scale = _rms_scale(raw, count, floor)
        taps = ()
        for n in tl.static_range(len(raw)):
            taps += (raw[n] * scale,)
    return taps


@triton.jit
def view_start(d_raw, VIEW: tl.constexpr):
    """Where gradients of what the plan sees are added up: for the identity upon those of the taps themselves."""
    if VIEW == 'identity':
        return d_raw
    else:
        return zero_taps(d_raw)


@triton.jit
def view_back(raw, d_taps, d_raw, count, floor, VIEW: tl.constexpr):
    """All gradients of the taps, from d_taps, what `view_start` became."""
    total = d_taps
    if VIEW == 'log':
        total = ()
        for n in tl.static_range(len(raw)):
            total += (d_raw[n] + tl.where(raw[n] > 0.0, d_taps[n] / (raw[n] + floor), 0.0),)
    elif VIEW == 'rms':
        scale = _rms_scale(raw, count, floor)
        pull = dot_taps(d_taps, raw) * (scale * scale * scale / count[:, None])
        total = ()
        for n in tl.static_range(len(raw)):
            total += (d_raw[n] + scale * d_taps[n] - pull * raw[n],)
    return total


@triton.jit
def _rms_scale(raw, count, floor):
    return tl.rsqrt(dot_taps(raw, raw) / count[:, None] + floor * floor)
