"""Sinkhorn scaling in Triton, without structural and proximal terms.

With G = s X, `a` the duals of the features and `b` those of the samples (b = 0 at first), step k of K is

    r = LSE_n(G + b)        a = rate_a (log p0 - r)
    l = LSE_d(G + a)        b = rate_b (log q0 - l)

and the pooling has the weights softmax_n(G + b). Kernels see X less the peak of every feature, so that nothing large
enters an exponent: r is then less by s · peak, and a, for G of the shifted X, more by s (1 - rate_a) · peak, which is
lift · peak with lift = 1 / (α1 + α2). All state is vectors. Forward is K + 1 launches: launch k finishes l of the step
before from the parts its predecessor left, does r (local), and leaves its part of l; the last pools. Backward is K + 1
launches as well: those for b of the steps K … 1 leave their part of its gradient, and the last one, which knows all
those gradients, writes what backward is for.
"""

# Kernels are not Python to a type checker.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotp_vision.core.triton.coefficients import sinkhorn_coefficients
from rotp_vision.core.triton.tiles import (
    Launches,
    average,
    average_back,
    combine_lse,
    combine_sum,
    leave_lse,
    leave_sum,
    load_tile,
    load_view,
    merge_lse,
    open_set,
    open_tile,
    register_sets,
    store_slopes,
    store_tile,
    tile_lse,
    to_mass_one,
    view_back,
)
from rotp_vision.core.weights import StepWeights

# Their values must not make variants of a kernel.
NOT_SPECIALIZED = ['num_steps', 'step', 'sub_tiles']


@triton.jit
def _load_b(saved_l, log_q0, rate_b, k, n, N):
    """b before step k (BLOCK_N,) from l (K, N) of the step before; -inf on masked samples."""
    lse = tl.load(saved_l + (k - 1) * N + n, mask=n < tl.where(k > 0, N, 0), other=0.0)
    return _b_of(lse, log_q0, rate_b, k)


@triton.jit
def _b_of(lse, log_q0, rate_b, k):
    start = tl.where(log_q0 == float('-inf'), log_q0, 0.0)
    return tl.where(k > 0, rate_b * (log_q0 - lse), start)


@triton.jit
def _load_coefficients(coefficients):
    """s, lift, rate_a, rate_b, gain."""
    return (
        tl.load(coefficients), tl.load(coefficients + 1), tl.load(coefficients + 2), tl.load(coefficients + 3),
        tl.load(coefficients + 4),
    )  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def sinkhorn_forward(
    features, log_prior_d, log_prior_n, coefficients,
    pooled, saved_r, saved_l, parts,
    D, N, num_steps, step, sub_tiles, floor,
    features_strides, prior_d_strides, prior_n_strides,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, LAST: tl.constexpr, VIEW: tl.constexpr,
):  # fmt: skip
    """Launch `step` of forward, from 0 to K (LAST), on the grid (B, tiles).

    saved_r (B, K + 1, D) gets r, saved_l (B, K, N) gets l of the step before, parts (K, B, tiles, 2, N) gets this
    program's part of l; the LAST writes pooled (B, D) instead.
    """
    b, n, log_q0, num_samples = open_set(log_prior_n, prior_n_strides, N, BLOCK_N)
    s, lift, rate_a, rate_b, gain = _load_coefficients(coefficients)
    saved_r += b * (num_steps + 1) * D
    saved_l += b * num_steps * N

    lse = tl.full((BLOCK_N,), 0.0, tl.float32)
    if step > 0:
        lse = combine_lse(parts, step - 1, saved_l + (step - 1) * N, n, N, TILES)
    dual = _b_of(lse, log_q0, rate_b, step)

    top = tl.full((BLOCK_N,), float('-inf'), tl.float32)
    total = tl.full((BLOCK_N,), 0.0, tl.float32)
    for sub_tile in range(sub_tiles):
        d, log_p0 = open_tile(log_prior_d, prior_d_strides, sub_tile, sub_tiles, D, BLOCK_D)
        x, peak, scale, raw = load_view(features, b, d, n, features_strides, D, log_q0, num_samples, floor, VIEW)
        y = s * x + dual[None, :]
        y_top = tl.max(y, 1)
        weights = tl.exp(y - y_top[:, None])
        weights_total = tl.sum(weights, 1)
        r = y_top + tl.log(weights_total)
        tl.store(saved_r + step * D + d, r, mask=d < D)
        if LAST:
            f = average(weights, weights_total, x, peak, scale, raw, VIEW) * gain
            tl.store(pooled + b * D + d, f.to(pooled.dtype.element_ty), mask=d < D)
        else:
            tile_top, tile_total = tile_lse(s * x + (lift * peak + rate_a * (log_p0 - r))[:, None])
            top, total = merge_lse(top, total, tile_top, tile_total)
    if not LAST:
        leave_lse(parts, step, top, total, n, N)


@triton.jit
def _step_back(x, peak, log_p0, log_q0, saved_r, saved_l, gap, s, lift, rate_a, rate_b, k, d, n, D, N):
    """Step k backwards from `gap`, the gradient of its log q0 - l.

    Returns dt and dy, gradients of the logits of l and r, and da.
    """
    r = tl.load(saved_r + k * D + d, mask=d < D, other=float('inf'))
    lse = tl.load(saved_l + k * N + n, mask=n < N, other=float('inf'))
    a = lift * peak + rate_a * (log_p0 - r)
    dt = tl.exp(s * x + a[:, None] - lse[None, :]) * -gap[None, :]
    da = tl.sum(dt, 1)
    dual = _load_b(saved_l, log_q0, rate_b, k, n, N)
    dy = tl.exp(s * x + dual[None, :] - r[:, None]) * (-rate_a * da)[:, None]
    return dt, dy, da


@triton.jit
def _load_gap(d_gaps, gap_first, k, n, N):
    """`gap` of step k (BLOCK_N,) out of (K + 1, N); that of step 0 is gap_first."""
    gap = tl.load(d_gaps + (k + 1) * N + n, mask=n < tl.where(k > 0, N, 0), other=0.0)
    return tl.where(k == 0, gap_first, gap)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def sinkhorn_backward(
    grad, features, log_prior_d, log_prior_n, coefficients, saved_r, saved_l,
    d_gaps, parts, d_features, d_log_p0, slopes,
    D, N, num_steps, step, sub_tiles, floor,
    grad_strides, features_strides, prior_d_strides, prior_n_strides, d_features_strides,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    FIRST: tl.constexpr, VIEW: tl.constexpr, NEED_FEATURES: tl.constexpr,
):  # fmt: skip
    """Launch `step` of backward, from K down to 0 (FIRST), on the grid (B, tiles).

    parts (K + 1, B, tiles, N) gets this program's part of `gap`, rate_b times the gradient of b before the step and so
    that of the log q0 - l it was made of; d_gaps (B, K + 1, N) gets that of b after it. FIRST writes the gradients,
    of the coefficients as slopes (B, tiles, sub_tiles, 5), to be added up; b before it is constant: no part.
    """
    b, n, log_q0, num_samples = open_set(log_prior_n, prior_n_strides, N, BLOCK_N)
    s, lift, rate_a, rate_b, gain = _load_coefficients(coefficients)
    saved_r += b * (num_steps + 1) * D
    saved_l += b * num_steps * N
    d_gaps += b * (num_steps + 1) * N

    gap_after = tl.full((BLOCK_N,), 0.0, tl.float32)
    if step < num_steps:
        gap_after = combine_sum(parts, step + 1, d_gaps + (step + 1) * N, n, N, TILES)

    d_rate_b = 0.0
    if FIRST:
        for k in range(num_steps):
            gap = _load_gap(d_gaps, gap_after, k, n, N)
            lse = tl.load(saved_l + k * N + n, mask=n < N, other=0.0)
            d_rate_b += tl.sum(gap * tl.where(log_q0 == float('-inf'), 0.0, log_q0 - lse)) / rate_b

    db_part = tl.full((BLOCK_N,), 0.0, tl.float32)
    for sub_tile in range(sub_tiles):
        d, log_p0 = open_tile(log_prior_d, prior_d_strides, sub_tile, sub_tiles, D, BLOCK_D)
        x, peak, scale, raw = load_view(features, b, d, n, features_strides, D, log_q0, num_samples, floor, VIEW)
        if FIRST or step == num_steps:
            # f = Σ_n features softmax_n(G + b)
            g = tl.load(grad + b * grad_strides[0] + d * grad_strides[1], mask=d < D, other=0.0).to(tl.float32)
            r = tl.load(saved_r + num_steps * D + d, mask=d < D, other=float('inf'))
            dual = _load_b(saved_l, log_q0, rate_b, num_steps, n, N)
            weights = to_mass_one(tl.exp(s * x + dual[None, :] - r[:, None]))
            d_gain = tl.sum(g * average(weights, 1.0, x, peak, scale, raw, VIEW))
            dy, direct, moved = average_back(weights, g * gain, x, peak, scale, raw, VIEW)
            if FIRST:
                d_p0 = g * 0.0
                d_rate_a = 0.0
                d_lift = 0.0
                for i in range(num_steps):
                    k = num_steps - 1 - i
                    gap = _load_gap(d_gaps, gap_after, k, n, N)
                    dt, more, da = _step_back(
                        x, peak, log_p0, log_q0, saved_r, saved_l, gap, s, lift, rate_a, rate_b, k, d, n, D, N
                    )
                    dy += dt + more
                    d_p0 += rate_a * da
                    r = tl.load(saved_r + k * D + d, mask=d < D, other=float('inf'))
                    d_rate_a += tl.sum(da * tl.where(d < D, log_p0 - r, 0.0))
                    d_lift += tl.sum(da * peak)
                slope = slopes + ((b * tl.num_programs(1) + tl.program_id(1)) * sub_tiles + sub_tile) * 5
                d_rate_b = tl.where(tl.program_id(1) + sub_tile == 0, d_rate_b, 0.0)
                store_slopes(slope, tl.sum(dy * x), d_lift, d_rate_a, d_rate_b, 0, 1)
                tl.store(slope + 4, d_gain)
                tl.store(d_log_p0 + b * D + d, d_p0, mask=d < D)
                if NEED_FEATURES:
                    dx = s * dy
                    if VIEW == 'log':
                        # Read again, for it need not be held all the way.
                        raw = load_tile(features, b, d, n, features_strides, D, log_q0)
                    else:
                        dx += direct
                    dx = view_back(dx, direct, x, peak, scale, raw, moved, num_samples, floor, VIEW)
                    store_tile(d_features, dx, b, d, n, d_features_strides, D, N, log_q0)
            else:
                db_part += tl.sum(dy, 0)
        else:
            _, dy, _ = _step_back(
                x, peak, log_p0, log_q0, saved_r, saved_l, gap_after, s, lift, rate_a, rate_b, step, d, n, D, N
            )
            db_part += tl.sum(dy, 0)
    leave_sum(parts, step, rate_b * db_part, n, N)


def _launches(coefficients: Tensor, num_inner: int) -> Launches:
    return Launches(sinkhorn_forward, sinkhorn_backward, num_inner, num_inner + 1, {})


register_sets('sinkhorn_pool', _launches, ', int num_inner')


def sinkhorn_pool(
    features: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    weights: StepWeights,
    gain: Tensor | None,
    view: str,
    num_inner: int,
) -> Tensor:
    """(B, D) pooled features of (B, D, N), times the gain; see `launch_forward`."""
    coefficients = sinkhorn_coefficients(weights, gain)
    return torch.ops.rotp_vision.triton_sinkhorn_pool(features, log_p0, log_q0, coefficients, view, num_inner)[0]
