"""The published Bregman ADMM of windows in Triton, which reads them in the map; `explicit.badmm` has the equations.

Both priors are uniform, p0 over the channels and q0 over the taps inside the map. Their logarithms are then constants,
which the softmaxes do not see, and v = log q0 - c becomes -c, with c = ∞ at taps outside the map: they take no mass.

Forward keeps c of every module and window; with it backward replays the rest tap by tap, for each module from the start
since Z cannot be run backwards: O(T²) exponentials, but no memory.
"""

# Kernels are not Python to a type checker.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotp_vision.core.solver import Windows
from rotp_vision.core.triton.coefficients import badmm_coefficients
from rotp_vision.core.triton.tiles import KINDS, Launches, store_slopes
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
    zero_taps,
)
from rotp_vision.core.weights import StepWeights


@triton.jit
def _start(xs, inside, p0, q0, coefficients, num_modules, QUADRATIC: tl.constexpr):
    """Z and M before the P-step of module 0; M is empty where there is none."""
    ms = ()
    if QUADRATIC:
        rough = tl.load(coefficients + 3 * num_modules)
        for n in tl.static_range(len(xs)):
            ms += (xs[n] * 0.0 - tl.where(inside[n][:, None], rough * p0 * q0, 0.0),)
    return zero_taps(xs), ms


@triton.jit
def _q_step(xs, ms, zs, cs_before, coefficients, k, num_modules, QUADRATIC: tl.constexpr):
    """Q and r of module k."""
    beta, rho = tl.load(coefficients + k), tl.load(coefficients + 2 * num_modules + k)
    ys = ()
    for n in tl.static_range(len(xs)):
        y = beta * xs[n] - zs[n] / rho - cs_before[n][:, None]
        if QUADRATIC:
            y += ms[n]
        ys += (y,)
    return softmax_taps(ys)


@triton.jit
def _push(ms, plan, weight, QUADRATIC: tl.constexpr):
    """M minus weight · plan."""
    taps = ()
    if QUADRATIC:
        for n in tl.static_range(len(plan)):
            taps += (ms[n] - weight * plan[n],)
    return taps


@triton.jit
def _rough(coefficients, k, num_modules, QUADRATIC: tl.constexpr):
    """α1 / ρ of module k, which only a quadratic smoothness has."""
    if QUADRATIC:
        return tl.load(coefficients + 3 * num_modules + k)
    else:
        return 0.0


@triton.jit
def _v_logits(xs, ms, r, coefficients, k, num_modules, QUADRATIC: tl.constexpr):
    """Logits of V in module k."""
    beta, kappa = tl.load(coefficients + k), tl.load(coefficients + num_modules + k)
    taps = ()
    for n in tl.static_range(len(xs)):
        t = beta * xs[n] - r
        if QUADRATIC:
            t += ms[n]
        taps += (kappa * t,)
    return taps


@triton.jit
def _replay_module(xs, ms, zs, cs_before, cs, has_c, p0, coefficients, k, num_modules, QUADRATIC: tl.constexpr):
    """Q, V and r of module k, and M between them; zs, ms are before its P-step."""
    plan_q, r = _q_step(xs, ms, zs, cs_before, coefficients, k, num_modules, QUADRATIC)
    ms = _push(ms, plan_q, _rough(coefficients, k, num_modules, QUADRATIC) * p0, QUADRATIC)
    logits = _v_logits(xs, ms, r, coefficients, k, num_modules, QUADRATIC)
    plan_v = ()
    for n in tl.static_range(len(xs)):
        plan_v += (tl.where(has_c[None, :], tl.exp(logits[n] - cs[n][:, None]), 0.0),)
    return plan_q, plan_v, r, ms


@triton.jit
def _finish(ms, zs, plan_q, plan_v, p0, q0, coefficients, k, num_modules, QUADRATIC: tl.constexpr):
    """Z after module k, and M before the P-step of the next."""
    rho = tl.load(coefficients + 2 * num_modules + k)
    taps = ()
    for n in tl.static_range(len(zs)):
        taps += (zs[n] + rho * (p0 * plan_q[n] - q0 * plan_v[n]),)
    return taps, _push(ms, plan_v, _rough(coefficients, k + 1, num_modules, QUADRATIC) * q0, QUADRATIC)


@triton.jit
def _replay(xs, saved, stop, has_c, inside, p0, q0, coefficients, num_modules, QUADRATIC: tl.constexpr):
    """Z and M before the P-step of module `stop`, and c of the module before it."""
    zs, ms = _start(xs, inside, p0, q0, coefficients, num_modules, QUADRATIC)
    cs_before = load_saved(saved, -1, inside)
    for k in range(stop):
        cs = load_saved(saved, k, inside)
        plan_q, plan_v, _, ms = _replay_module(
            xs, ms, zs, cs_before, cs, has_c, p0, coefficients, k, num_modules, QUADRATIC
        )
        zs, ms = _finish(ms, zs, plan_q, plan_v, p0, q0, coefficients, k, num_modules, QUADRATIC)
        cs_before = cs
    return zs, ms, cs_before


@triton.jit
def _last_weights(xs, saved, has_c, inside, p0, q0, coefficients, num_modules, QUADRATIC: tl.constexpr):
    """Q of the last module."""
    last = num_modules - 1
    zs, ms, cs = _replay(xs, saved, last, has_c, inside, p0, q0, coefficients, num_modules, QUADRATIC)
    plan_q, _ = _q_step(xs, ms, zs, cs, coefficients, last, num_modules, QUADRATIC)
    return plan_q


@triton.jit(do_not_specialize=['num_modules', 'blocks'])
def local_badmm_forward(
    x_map, coefficients, pooled, saved,
    num_modules, blocks, geometry, floor, x_strides, pooled_strides,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    VIEW: tl.constexpr, CHANNELS_LAST: tl.constexpr, QUADRATIC: tl.constexpr,
):  # fmt: skip
    """Pooled (B, C, H', W'), and c into saved (B, H' W', T - 1, taps), on the grid (B · blocks of windows,)."""
    place, index, has_c, inside, count, raw, xs = open_windows(
        x_map, x_strides, blocks, geometry, floor, KH, KW, BLOCK_W, BLOCK_C, VIEW, CHANNELS_LAST
    )
    p0, q0 = 1.0 / geometry[0], 1.0 / count[:, None]
    saved += index * ((num_modules - 1) * (KH * KW))

    zs, ms = _start(xs, inside, p0, q0, coefficients, num_modules, QUADRATIC)
    cs = load_saved(saved, -1, inside)
    for k in range(num_modules - 1):
        plan_q, r = _q_step(xs, ms, zs, cs, coefficients, k, num_modules, QUADRATIC)
        ms = _push(ms, plan_q, _rough(coefficients, k, num_modules, QUADRATIC) * p0, QUADRATIC)
        logits = _v_logits(xs, ms, r, coefficients, k, num_modules, QUADRATIC)
        plan_v = ()
        cs = ()
        for n in tl.static_range(KH * KW):
            plan, c = softmax_channels(logits[n], has_c)
            tl.store(saved + (k * (KH * KW) + n), c, mask=place[3])
            plan_v += (tl.where(inside[n][:, None], plan, 0.0),)
            cs += (tl.where(inside[n], c, float('inf')),)
        zs, ms = _finish(ms, zs, plan_q, plan_v, p0, q0, coefficients, k, num_modules, QUADRATIC)
    plan_q, _ = _q_step(xs, ms, zs, cs, coefficients, num_modules - 1, num_modules, QUADRATIC)
    raw = read_again(raw, x_map, x_strides, place, inside, geometry, KH, KW, VIEW, CHANNELS_LAST)
    gain = tl.load(coefficients + 4 * num_modules)
    store_pooled(pooled, gain * dot_taps(plan_q, raw), pooled_strides, place, CHANNELS_LAST)


@triton.jit(do_not_specialize=['num_modules', 'blocks'])
def local_badmm_backward(
    grad, x_map, coefficients, saved, d_windows, slopes,
    num_modules, blocks, geometry, floor, grad_strides, x_strides, spacing,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    VIEW: tl.constexpr, CHANNELS_LAST: tl.constexpr, NEED_X: tl.constexpr, QUADRATIC: tl.constexpr,
):  # fmt: skip
    """Gradients of the windows, and of the coefficients as slopes (B, blocks, 4 T + 1), to be added up."""
    place, index, has_c, inside, count, raw, xs = open_windows(
        x_map, x_strides, blocks, geometry, floor, KH, KW, BLOCK_W, BLOCK_C, VIEW, CHANNELS_LAST
    )
    p0, q0 = 1.0 / geometry[0], 1.0 / count[:, None]
    saved += index * ((num_modules - 1) * (KH * KW))
    slopes += tl.program_id(0).to(tl.int64) * (4 * num_modules + 1)
    last = num_modules - 1

    weights = _last_weights(xs, saved, has_c, inside, p0, q0, coefficients, num_modules, QUADRATIC)
    g = load_pooled(grad, grad_strides, place, CHANNELS_LAST)
    tl.store(slopes + 4 * num_modules, tl.sum(g * dot_taps(weights, raw)))
    d_raw, dys = pool_back(g * tl.load(coefficients + 4 * num_modules), weights, raw)
    dxs = view_start(d_raw, VIEW)
    dzs = zero_taps(xs)
    dms = ()
    if QUADRATIC:
        dms = zero_taps(xs)
    d_beta = 0.0
    d_kappa = 0.0
    d_rho = 0.0
    d_rough = 0.0
    # dys is the gradient of the logits of Q in module k; each round takes it to the module before.
    for i in range(last):
        k = last - i
        j = k - 1
        beta, rho = tl.load(coefficients + k), tl.load(coefficients + 2 * num_modules + k)
        rough = _rough(coefficients, k, num_modules, QUADRATIC)
        zs, ms, cs_before = _replay(xs, saved, j, has_c, inside, p0, q0, coefficients, num_modules, QUADRATIC)
        cs = load_saved(saved, j, inside)
        plan_q, plan_v, r, ms = _replay_module(
            xs, ms, zs, cs_before, cs, has_c, p0, coefficients, j, num_modules, QUADRATIC
        )
        zs, ms = _finish(ms, zs, plan_q, plan_v, p0, q0, coefficients, j, num_modules, QUADRATIC)
        dxs = add_taps(dxs, dys, beta)
        dzs = add_taps(dzs, dys, -1.0 / rho)
        if QUADRATIC:
            dms = add_taps(dms, dys, 1.0)
            d_rough -= tl.sum(q0 * dot_taps(dms, plan_v))
        d_beta += tl.sum(dot_taps(dys, xs))
        d_rho += tl.sum(dot_taps(dys, zs)) / (rho * rho)
        store_slopes(slopes, d_beta, d_kappa, d_rho, d_rough, k, num_modules)

        # S = q0 V of the module before: read by its Z and by this module's M.
        beta, kappa = tl.load(coefficients + j), tl.load(coefficients + num_modules + j)
        rho = tl.load(coefficients + 2 * num_modules + j)
        d_rho = tl.sum(p0 * dot_taps(dzs, plan_q) - q0 * dot_taps(dzs, plan_v))
        dts = ()
        for n in tl.static_range(KH * KW):
            ds = rho * dzs[n]
            if QUADRATIC:
                ds += rough * dms[n]
            ds = q0 * plan_v[n] * ds
            dv = tl.sum(dys[n] - ds, 1)
            dts += (-ds - plan_v[n] * dv[:, None],)
        # dts is the gradient of the logits of V.
        dxs = add_taps(dxs, dts, kappa * beta)
        du = dts[0]
        for n in tl.static_range(1, KH * KW):
            du += dts[n]
        along = tl.sum(dot_taps(dts, xs))
        d_beta = kappa * along
        d_kappa = beta * along - tl.sum(du * r)

        # P = p0 Q of the module before: read by its Z and by its M.
        du = kappa * du
        rough = _rough(coefficients, j, num_modules, QUADRATIC)
        if QUADRATIC:
            dms = add_taps(dms, dts, 1.0)
            d_rough = -p0 * tl.sum(dot_taps(dms, plan_q))
        dps = ()
        for n in tl.static_range(KH * KW):
            dp = rho * dzs[n]
            if QUADRATIC:
                dp -= rough * dms[n]
            dps += (p0 * dp,)
        du += dot_taps(plan_q, dps)
        dys = ()
        for n in tl.static_range(KH * KW):
            dys += (plan_q[n] * (dps[n] - du),)

    d_beta += tl.sum(dot_taps(dys, xs))
    if QUADRATIC:
        # S' = p0 q0
        total = zero_taps(dys)[0]
        for n in tl.static_range(KH * KW):
            total += tl.where(inside[n][:, None], dms[n] + dys[n], 0.0)
        d_rough -= p0 * tl.sum(q0 * total)
    store_slopes(slopes, d_beta, d_kappa, d_rho, d_rough, 0, num_modules)
    if NEED_X:
        dxs = add_taps(dxs, dys, tl.load(coefficients))
        raw = read_again(raw, x_map, x_strides, place, inside, geometry, KH, KW, VIEW, CHANNELS_LAST)
        dxs = view_back(raw, dxs, d_raw, count, floor, VIEW)
        store_windows(d_windows, dxs, spacing, place, inside, KH, KW, CHANNELS_LAST)


def _launches(coefficients: Tensor, quadratic: bool) -> Launches:
    num_modules = len(coefficients) // KINDS
    return Launches(local_badmm_forward, local_badmm_backward, num_modules, num_modules, {'QUADRATIC': quadratic})


register_windows('badmm_pool', _launches, ', bool quadratic')


def badmm_pool_windows(
    maps: Tensor, weights: StepWeights, gain: Tensor | None, windows: Windows, view: str, quadratic: bool
) -> Tensor:
    """(B, C, H', W') every window of `maps` (B, C, H, W) pooled, see `rot_pool_windows`."""
    coefficients = badmm_coefficients(weights, gain, quadratic)
    return torch.ops.rotp_vision.triton_local_badmm_pool(maps, coefficients, list(windows), view, quadratic)[0]
