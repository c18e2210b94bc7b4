"""Sinkhorn scaling of windows in Triton, which reads them in the map; `triton.sinkhorn` has the equations.

Priors are as in `local_badmm`. Forward keeps l of every step and window, with which backward replays the rest.
"""

# Kernels are not Python to a type checker.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotp_vision.core.solver import Windows
from rotp_vision.core.triton.coefficients import sinkhorn_coefficients
from rotp_vision.core.triton.tiles import Launches, store_slopes
from rotp_vision.core.triton.windows import (
    add_taps,
    dot_taps,
    load_pooled,
    load_saved,
    open_windows,
    pool_back,
    read_again,
    register_windows,
    softmax_channels,
    softmax_taps,
    store_pooled,
    store_windows,
    view_back,
    view_start,
)
from rotp_vision.core.weights import StepWeights


@triton.jit
def _sample_step(xs, ls_before, inside, scale, rate_b):
    """softmax_n(s X + b) and its log-sum-exp r; b is made of l of the step before, zero at the start."""
    ys = ()
    for n in tl.static_range(len(xs)):
        dual = tl.where(inside[n], -rate_b * ls_before[n], float('-inf'))
        ys += (scale * xs[n] + dual[:, None],)
    return softmax_taps(ys)


@triton.jit(do_not_specialize=['num_steps', 'blocks'])
def local_sinkhorn_forward(
    x_map, coefficients, pooled, saved,
    num_steps, blocks, geometry, floor, x_strides, pooled_strides,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    VIEW: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """Pooled (B, C, H', W'), and l into saved (B, H' W', K, taps), on the grid (B · blocks of windows,)."""
    place, index, has_c, inside, _count, raw, xs = open_windows(
        x_map, x_strides, blocks, geometry, floor, KH, KW, BLOCK_W, BLOCK_C, VIEW, CHANNELS_LAST
    )
    saved += index * (num_steps * (KH * KW))
    scale, rate_a, rate_b = tl.load(coefficients), tl.load(coefficients + 2), tl.load(coefficients + 3)

    ls = load_saved(saved, -1, inside)
    for k in range(num_steps):
        _, r = _sample_step(xs, ls, inside, scale, rate_b)
        ls = ()
        for n in tl.static_range(KH * KW):
            _, lse = softmax_channels(scale * xs[n] - rate_a * r, has_c)
            tl.store(saved + (k * (KH * KW) + n), lse, mask=place[3])
            ls += (tl.where(inside[n], lse, float('inf')),)
    weights, _ = _sample_step(xs, ls, inside, scale, rate_b)
    raw = read_again(raw, x_map, x_strides, place, inside, geometry, KH, KW, VIEW, CHANNELS_LAST)
    store_pooled(pooled, tl.load(coefficients + 4) * dot_taps(weights, raw), pooled_strides, place, CHANNELS_LAST)


@triton.jit(do_not_specialize=['num_steps', 'blocks'])
def local_sinkhorn_backward(
    grad, x_map, coefficients, saved, d_windows, slopes,
    num_steps, blocks, geometry, floor, grad_strides, x_strides, spacing,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    VIEW: tl.constexpr, CHANNELS_LAST: tl.constexpr, NEED_X: tl.constexpr,
):  # fmt: skip
    """Gradients of the windows, and of the coefficients as slopes (B, blocks, 5), to be added up."""
    place, index, has_c, inside, count, raw, xs = open_windows(
        x_map, x_strides, blocks, geometry, floor, KH, KW, BLOCK_W, BLOCK_C, VIEW, CHANNELS_LAST
    )
    saved += index * (num_steps * (KH * KW))
    scale, rate_a, rate_b = tl.load(coefficients), tl.load(coefficients + 2), tl.load(coefficients + 3)

    ls = load_saved(saved, num_steps - 1, inside)
    pooling, _ = _sample_step(xs, ls, inside, scale, rate_b)
    g = load_pooled(grad, grad_strides, place, CHANNELS_LAST)
    slopes += tl.program_id(0).to(tl.int64) * 5
    tl.store(slopes + 4, tl.sum(g * dot_taps(pooling, raw)))
    d_raw, dys = pool_back(g * tl.load(coefficients + 4), pooling, raw)
    totals = dys  # gradient of s X
    d_rate_a = 0.0
    d_rate_b = 0.0
    for i in range(num_steps):
        # dys is the gradient of the logits s X + b of the step after, ls made that b.
        k = num_steps - 1 - i
        ls_before = load_saved(saved, k - 1, inside)
        weights, r = _sample_step(xs, ls_before, inside, scale, rate_b)
        dts = ()
        along = count * 0.0
        for n in tl.static_range(KH * KW):
            db = tl.sum(dys[n], 1)
            along -= db * tl.where(inside[n], ls[n], 0.0)
            column = tl.exp(scale * xs[n] - rate_a * r - ls[n][:, None])
            dts += (-rate_b * db[:, None] * tl.where(has_c[None, :], column, 0.0),)
        d_rate_b += tl.sum(along)
        da = dts[0]
        for n in tl.static_range(1, KH * KW):
            da += dts[n]
        d_rate_a -= tl.sum(da * r)
        dys = ()
        for n in tl.static_range(KH * KW):
            dys += (weights[n] * (-rate_a * da),)
        totals = add_taps(add_taps(totals, dts, 1.0), dys, 1.0)
        ls = ls_before

    store_slopes(slopes, tl.sum(dot_taps(totals, xs)), 0.0, d_rate_a, d_rate_b, 0, 1)
    if NEED_X:
        dxs = add_taps(view_start(d_raw, VIEW), totals, scale)
        raw = read_again(raw, x_map, x_strides, place, inside, geometry, KH, KW, VIEW, CHANNELS_LAST)
        dxs = view_back(raw, dxs, d_raw, count, floor, VIEW)
        store_windows(d_windows, dxs, spacing, place, inside, KH, KW, CHANNELS_LAST)


def _launches(coefficients: Tensor, num_inner: int) -> Launches:
    return Launches(local_sinkhorn_forward, local_sinkhorn_backward, num_inner, num_inner + 1, {})


register_windows('sinkhorn_pool', _launches, ', int num_inner')


def sinkhorn_pool_windows(
    maps: Tensor, weights: StepWeights, gain: Tensor | None, windows: Windows, view: str, num_inner: int
) -> Tensor:
    """(B, C, H', W') every window of `maps` (B, C, H, W) pooled, see `rot_pool_windows`."""
    coefficients = sinkhorn_coefficients(weights, gain)
    return torch.ops.rotp_vision.triton_local_sinkhorn_pool(maps, coefficients, list(windows), view, num_inner)[0]
