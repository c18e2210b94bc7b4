"""The published Bregman ADMM in Triton, entropic and quadratic, no structural term; `explicit.badmm` has its equations.

Forward is a launch per module. Launch k finishes c of module k-1 from the parts its predecessor left, replays Z (and M)
of the modules before from X and the saved vectors r and c, does the P-step, which is local, and leaves its part of c.
Tiles of Q, the softmax over samples, and of V, that over features, are plan_q and plan_v.
Backward is a launch per module too, from the last to the first: launch k finishes the gradient dv of the v that module
k+1 read, replays, and leaves its part of the next dv; the one for module 0 writes the gradients. Z cannot be run
backwards, so it is replayed for each module: O(T²) exponentials per element and launch, but no memory.
"""

# Kernels are not Python to a type checker.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotp_vision.core.triton.coefficients import badmm_coefficients
from rotp_vision.core.triton.tiles import (
    KINDS,
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
NOT_SPECIALIZED = ['num_modules', 'module', 'sub_tiles']


@triton.jit
def _load_c(saved_c, k, n, N):
    """c of module k (BLOCK_N,) out of (T - 1, N); infinity beyond N, where V is zero. For k = -1, the start, zero."""
    beyond = tl.where(k >= 0, float('inf'), 0.0)
    return tl.load(saved_c + k * N + n, mask=n < tl.where(k >= 0, N, 0), other=beyond)


@triton.jit
def _q_logits(x, m, z, log_q0, c_before, coefficients, k, num_modules):
    """Logits of Q in module k; c_before is c of the module before, zero for the first."""
    beta = tl.load(coefficients + k)
    rho = tl.load(coefficients + 2 * num_modules + k)
    return beta * x + m - z / rho + (log_q0 - c_before)[None, :]


@triton.jit
def _v_logits(x, m, log_p0, r, coefficients, k, num_modules):
    """Logits of V in module k, -inf for features that do not exist."""
    beta = tl.load(coefficients + k)
    kappa = tl.load(coefficients + num_modules + k)
    return kappa * (beta * x + m + (log_p0 - r)[:, None])


@triton.jit
def _start(x, p0, q0, coefficients, num_modules, QUADRATIC: tl.constexpr):
    """Z and M before the P-step of module 0."""
    z = x * 0.0
    m = z
    if QUADRATIC:
        m -= tl.load(coefficients + 3 * num_modules) * p0[:, None] * q0[None, :]
    return z, m


@triton.jit
def _module(x, m, z, log_p0, log_q0, p0, r, c_before, c, coefficients, k, num_modules, QUADRATIC: tl.constexpr):
    """Q and V of module k from the vectors that forward saved, and M between them; z, m are before its P-step."""
    plan_q = tl.exp(_q_logits(x, m, z, log_q0, c_before, coefficients, k, num_modules) - r[:, None])
    if QUADRATIC:
        m -= tl.load(coefficients + 3 * num_modules + k) * p0[:, None] * plan_q
    plan_v = tl.exp(_v_logits(x, m, log_p0, r, coefficients, k, num_modules) - c[None, :])
    return plan_q, plan_v, m


@triton.jit
def _replay(
    x, log_p0, log_q0, p0, q0, saved_r, saved_c, c_last, stop, coefficients, num_modules, d, n, D, N,
    QUADRATIC: tl.constexpr,
):  # fmt: skip
    """Z and M before the P-step of module `stop`.

    saved_r and saved_c point to r (T, D) and c (T - 1, N) of the set; c of module `stop` - 1 is c_last.
    """
    z, m = _start(x, p0, q0, coefficients, num_modules, QUADRATIC)
    c_before = _load_c(saved_c, -1, n, N)
    for k in range(stop):
        r = tl.load(saved_r + k * D + d, mask=d < D, other=float('inf'))
        c = tl.load(saved_c + k * N + n, mask=n < tl.where(k < stop - 1, N, 0), other=float('inf'))
        c = tl.where(k == stop - 1, c_last, c)
        plan_q, plan_v, m = _module(
            x, m, z, log_p0, log_q0, p0, r, c_before, c, coefficients, k, num_modules, QUADRATIC
        )
        rho = tl.load(coefficients + 2 * num_modules + k)
        z += rho * (p0[:, None] * plan_q - q0[None, :] * plan_v)
        if QUADRATIC:
            m -= tl.load(coefficients + 3 * num_modules + k + 1) * q0[None, :] * plan_v
        c_before = c
    return z, m


@triton.jit
def _replay_module(
    x, log_p0, log_q0, p0, q0, saved_r, saved_c, k, coefficients, num_modules, d, n, D, N, QUADRATIC: tl.constexpr
):  # fmt: skip
    """Z before module k, its Q and V, and its r, all from the vectors that forward saved."""
    c_before = _load_c(saved_c, k - 1, n, N)
    r = tl.load(saved_r + k * D + d, mask=d < D, other=float('inf'))
    z, m = _replay(
        x, log_p0, log_q0, p0, q0, saved_r, saved_c, c_before, k, coefficients, num_modules, d, n, D, N, QUADRATIC
    )
    c = _load_c(saved_c, k, n, N)
    plan_q, plan_v, m = _module(x, m, z, log_p0, log_q0, p0, r, c_before, c, coefficients, k, num_modules, QUADRATIC)
    return z, to_mass_one(plan_q), plan_v, r


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def badmm_forward(
    features, log_prior_d, log_prior_n, coefficients,
    pooled, saved_r, saved_c, parts,
    D, N, num_modules, module, sub_tiles, floor,
    features_strides, prior_d_strides, prior_n_strides,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    LAST: tl.constexpr, VIEW: tl.constexpr, QUADRATIC: tl.constexpr,
):  # fmt: skip
    """Launch `module` of forward on the grid (B, tiles).

    saved_r (B, T, D) gets r, saved_c (B, T - 1, N) gets c of the module before, parts (T - 1, B, tiles, 2, N) gets
    this program's part of c; the LAST writes pooled (B, D) instead.
    """
    b, n, log_q0, num_samples = open_set(log_prior_n, prior_n_strides, N, BLOCK_N)
    q0 = tl.exp(log_q0)
    saved_r += b * num_modules * D
    saved_c += b * (num_modules - 1) * N

    c_before = log_q0
    if module > 0:
        c_before = combine_lse(parts, module - 1, saved_c + (module - 1) * N, n, N, TILES)
    else:
        c_before = _load_c(saved_c, -1, n, N)

    top = tl.full((BLOCK_N,), float('-inf'), tl.float32)
    total = tl.full((BLOCK_N,), 0.0, tl.float32)
    for sub_tile in range(sub_tiles):
        d, log_p0 = open_tile(log_prior_d, prior_d_strides, sub_tile, sub_tiles, D, BLOCK_D)
        x, peak, scale, raw = load_view(features, b, d, n, features_strides, D, log_q0, num_samples, floor, VIEW)
        p0 = tl.exp(log_p0)
        z, m = _replay(
            x, log_p0, log_q0, p0, q0, saved_r, saved_c, c_before, module, coefficients, num_modules, d, n, D, N,
            QUADRATIC,
        )  # fmt: skip
        y = _q_logits(x, m, z, log_q0, c_before, coefficients, module, num_modules)
        q_top = tl.max(y, 1)
        plan_q = tl.exp(y - q_top[:, None])
        q_total = tl.sum(plan_q, 1)
        r = q_top + tl.log(q_total)
        tl.store(saved_r + module * D + d, r, mask=d < D)
        if LAST:
            f = average(plan_q, q_total, x, peak, scale, raw, VIEW) * tl.load(coefficients + 4 * num_modules)
            tl.store(pooled + b * D + d, f.to(pooled.dtype.element_ty), mask=d < D)
        else:
            if QUADRATIC:
                m -= tl.load(coefficients + 3 * num_modules + module) * p0[:, None] * (plan_q / q_total[:, None])
            y = _v_logits(x, m, log_p0, r, coefficients, module, num_modules)
            tile_top, tile_total = tile_lse(y)
            top, total = merge_lse(top, total, tile_top, tile_total)
    if not LAST:
        leave_lse(parts, module, top, total, n, N)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def badmm_backward(
    grad, features, log_prior_d, log_prior_n, coefficients, saved_r, saved_c,
    d_c, parts, d_features, d_log_p0, slopes,
    D, N, num_modules, module, sub_tiles, floor,
    grad_strides, features_strides, prior_d_strides, prior_n_strides, d_features_strides,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    FIRST: tl.constexpr, VIEW: tl.constexpr, NEED_FEATURES: tl.constexpr, QUADRATIC: tl.constexpr,
):  # fmt: skip
    """Launch for `module` of backward, from T - 1 down to 0 (FIRST), on the grid (B, tiles).

    parts (T, B, tiles, N) gets this program's part of dv, the gradient of the v that this module read (of log q0
    in module 0); d_c (B, T, N) gets dv of the module after. FIRST writes the gradients, of the coefficients as
    slopes (B, tiles, sub_tiles, 4 T + 1), to be added up.
    """
    b, n, log_q0, num_samples = open_set(log_prior_n, prior_n_strides, N, BLOCK_N)
    q0 = tl.exp(log_q0)
    saved_r += b * num_modules * D
    saved_c += b * (num_modules - 1) * N
    d_c += b * num_modules * N
    last = num_modules - 1
    gain = tl.load(coefficients + 4 * num_modules)

    dv_after = q0
    if module < last:
        dv_after = combine_sum(parts, module + 1, d_c + (module + 1) * N, n, N, TILES)

    dv_part = tl.full((BLOCK_N,), 0.0, tl.float32)
    for sub_tile in range(sub_tiles):
        d, log_p0 = open_tile(log_prior_d, prior_d_strides, sub_tile, sub_tiles, D, BLOCK_D)
        x, peak, scale, raw = load_view(features, b, d, n, features_strides, D, log_q0, num_samples, floor, VIEW)
        g = tl.load(grad + b * grad_strides[0] + d * grad_strides[1], mask=d < D, other=0.0).to(tl.float32)
        p0 = tl.exp(log_p0)
        slope = slopes + ((b * tl.num_programs(1) + tl.program_id(1)) * sub_tiles + sub_tile) * (4 * num_modules + 1)

        # f = Σ_n features Q
        c_before = _load_c(saved_c, last - 1, n, N)
        z, m = _replay(
            x, log_p0, log_q0, p0, q0, saved_r, saved_c, c_before, last, coefficients, num_modules, d, n, D, N,
            QUADRATIC,
        )  # fmt: skip
        r = tl.load(saved_r + last * D + d, mask=d < D, other=float('inf'))
        plan_q = tl.exp(_q_logits(x, m, z, log_q0, c_before, coefficients, last, num_modules) - r[:, None])
        plan_q = to_mass_one(plan_q)
        if FIRST:
            tl.store(slope + 4 * num_modules, tl.sum(g * average(plan_q, 1.0, x, peak, scale, raw, VIEW)))
        dy, direct, moved = average_back(plan_q, g * gain, x, peak, scale, raw, VIEW)
        dx = direct
        if VIEW == 'log':
            dx = x * 0.0
        dz = x * 0.0
        dm = dz
        d_p0 = g * 0.0
        d_beta = 0.0
        d_kappa = 0.0
        d_rho = 0.0
        d_rough = 0.0
        # dy is the gradient of the logits of Q in module k; each round takes it to the module before.
        for i in range(last - module):
            k = last - i
            j = k - 1
            beta = tl.load(coefficients + k)
            rho = tl.load(coefficients + 2 * num_modules + k)
            rough = 0.0
            if QUADRATIC:
                rough = tl.load(coefficients + 3 * num_modules + k)
                dm += dy
            dx += beta * dy
            dz -= dy / rho
            z, plan_q, plan_v, r = _replay_module(
                x, log_p0, log_q0, p0, q0, saved_r, saved_c, j, coefficients, num_modules, d, n, D, N, QUADRATIC
            )
            if FIRST:
                rho_before = tl.load(coefficients + 2 * num_modules + j)
                z += rho_before * (p0[:, None] * plan_q - q0[None, :] * plan_v)
                d_beta += tl.sum(dy * x)
                d_rho += tl.sum(dy * z) / (rho * rho)
                d_rough -= tl.sum(q0[None, :] * dm * plan_v)
                store_slopes(slope, d_beta, d_kappa, d_rho, d_rough, k, num_modules)

            # S = q0 V of the module before: read by its Z and by this module's M.
            beta = tl.load(coefficients + j)
            kappa = tl.load(coefficients + num_modules + j)
            rho = tl.load(coefficients + 2 * num_modules + j)
            dv = tl.load(d_c + k * N + n, mask=n < tl.where(k > module + 1, N, 0), other=0.0)
            dv = tl.where(k == module + 1, dv_after, dv)
            ds = rho * dz
            if QUADRATIC:
                ds += rough * dm
            dt = plan_v * (-q0[None, :] * ds - dv[None, :])
            # dt is the gradient of the logits of V.
            du = tl.sum(dt, 1)
            dx += (kappa * beta) * dt
            if FIRST:
                along = tl.sum(dt * x)
                d_beta = kappa * along
                d_kappa = beta * along + tl.sum(du * tl.where(d < D, log_p0 - r, 0.0))
                d_rho = tl.sum(dz * (p0[:, None] * plan_q - q0[None, :] * plan_v))

            # P = p0 Q of the module before: read by its Z and by its M.
            dp = rho * dz
            if QUADRATIC:
                dm += dt
                dp -= tl.load(coefficients + 3 * num_modules + j) * dm
                if FIRST:
                    d_rough = -tl.sum(p0[:, None] * dm * plan_q)
            dp *= p0[:, None]
            du = kappa * du + tl.sum(plan_q * dp, 1)
            d_p0 += du
            # In this order a feature with all its mass in one entry has no gradient, to the last bit.
            dy = plan_q * (dp - du[:, None])

        dv = tl.sum(dy, 0)
        if QUADRATIC:
            dm += dy
        if FIRST:
            dx += tl.load(coefficients) * dy
            d_beta += tl.sum(dy * x)
            if QUADRATIC:
                # S' = p0 q0
                dm *= p0[:, None] * q0[None, :]
                rough = tl.load(coefficients + 3 * num_modules)
                d_p0 -= rough * tl.sum(dm, 1)
                dv -= rough * tl.sum(dm, 0)
                d_rough -= tl.sum(dm)
            store_slopes(slope, d_beta, d_kappa, d_rho, d_rough, 0, num_modules)
            tl.store(d_log_p0 + b * D + d, d_p0, mask=d < D)
            if NEED_FEATURES:
                if VIEW == 'log':
                    # Read again, for it need not be held all the way.
                    raw = load_tile(features, b, d, n, features_strides, D, log_q0)
                dx = view_back(dx, direct, x, peak, scale, raw, moved, num_samples, floor, VIEW)
                store_tile(d_features, dx, b, d, n, d_features_strides, D, N, log_q0)
        else:
            j = module - 1
            dz -= dy / tl.load(coefficients + 2 * num_modules + module)
            ds = tl.load(coefficients + 2 * num_modules + j) * dz
            if QUADRATIC:
                ds += tl.load(coefficients + 3 * num_modules + module) * dm
            _, _, plan_v, _ = _replay_module(
                x, log_p0, log_q0, p0, q0, saved_r, saved_c, j, coefficients, num_modules, d, n, D, N, QUADRATIC
            )
            dv -= q0 * tl.sum(plan_v * ds, 0)
        dv_part += dv
    leave_sum(parts, module, dv_part, n, N)


def _launches(coefficients: Tensor, quadratic: bool) -> Launches:
    num_modules = len(coefficients) // KINDS
    return Launches(badmm_forward, badmm_backward, num_modules, num_modules, {'QUADRATIC': quadratic})


register_sets('badmm_pool', _launches, ', bool quadratic')


def badmm_pool(
    features: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    weights: StepWeights,
    gain: Tensor | None,
    view: str,
    quadratic: bool,
) -> Tensor:
    """(B, D) pooled features of (B, D, N), times the gain; see `launch_forward`."""
    coefficients = badmm_coefficients(weights, gain, quadratic)
    return torch.ops.rotp_vision.triton_badmm_pool(features, log_p0, log_q0, coefficients, view, quadratic)[0]
