"""The published Bregman ADMM in Triton, entropic and quadratic, no structural term; `explicit.badmm` has its equations.

Forward is a launch per module. Launch k finishes c of module k-1 from the parts its predecessor left, replays Z (and M)
of the modules before from X and the saved vectors r and c, does the P-step, which is local, and leaves its part of c.
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

from rotp_vision.core.explicit.badmm import badmm_coefficients
from rotp_vision.core.triton.tiles import (
    Launches,
    combine_lse,
    combine_sum,
    leave_lse,
    leave_sum,
    load_tile,
    merge_lse,
    open_set,
    open_tile,
    register_sets,
    shift_tile,
    store_slopes,
    store_tile,
    tile_lse,
    to_mass_one,
)
from rotp_vision.core.weights import StepWeights

# Their values must not make variants of a kernel.
NOT_SPECIALIZED = ['num_modules', 'module', 'sub_tiles']


@triton.jit
def _load_c(columns, k, n, N):
    """c of module k (BLOCK_N,) out of (T - 1, N); infinity beyond N, where V is zero. For k = -1, the start, zero."""
    beyond = tl.where(k >= 0, float('inf'), 0.0)
    return tl.load(columns + k * N + n, mask=n < tl.where(k >= 0, N, 0), other=beyond)


@triton.jit
def _row_logits(x, m, z, log_q0, c_before, coefficients, k, num_modules):
    """Logits of Q in module k; c_before is c of the module before, zero for the first."""
    beta = tl.load(coefficients + k)
    rho = tl.load(coefficients + 2 * num_modules + k)
    return beta * x + m - z / rho + (log_q0 - c_before)[None, :]


@triton.jit
def _column_logits(x, m, log_p0, r, coefficients, k, num_modules):
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
    row = tl.exp(_row_logits(x, m, z, log_q0, c_before, coefficients, k, num_modules) - r[:, None])
    if QUADRATIC:
        m -= tl.load(coefficients + 3 * num_modules + k) * p0[:, None] * row
    column = tl.exp(_column_logits(x, m, log_p0, r, coefficients, k, num_modules) - c[None, :])
    return row, column, m


@triton.jit
def _replay(
    x, log_p0, log_q0, p0, q0, rows, columns, c_last, stop, coefficients, num_modules, d, n, D, N,
    QUADRATIC: tl.constexpr,
):  # fmt: skip
    """Z and M before the P-step of module `stop`.

    rows and columns point to r (T, D) and c (T - 1, N) of the set; c of module `stop` - 1 is c_last.
    """
    z, m = _start(x, p0, q0, coefficients, num_modules, QUADRATIC)
    c_before = _load_c(columns, -1, n, N)
    for k in range(stop):
        r = tl.load(rows + k * D + d, mask=d < D, other=float('inf'))
        c = tl.load(columns + k * N + n, mask=n < tl.where(k < stop - 1, N, 0), other=float('inf'))
        c = tl.where(k == stop - 1, c_last, c)
        row, column, m = _module(x, m, z, log_p0, log_q0, p0, r, c_before, c, coefficients, k, num_modules, QUADRATIC)
        rho = tl.load(coefficients + 2 * num_modules + k)
        z += rho * (p0[:, None] * row - q0[None, :] * column)
        if QUADRATIC:
            m -= tl.load(coefficients + 3 * num_modules + k + 1) * q0[None, :] * column
        c_before = c
    return z, m


@triton.jit
def _replay_module(
    x, log_p0, log_q0, p0, q0, rows, columns, k, coefficients, num_modules, d, n, D, N, QUADRATIC: tl.constexpr
):  # fmt: skip
    """Z before module k, its Q and V, and its r, all from the vectors that forward saved."""
    c_before = _load_c(columns, k - 1, n, N)
    r = tl.load(rows + k * D + d, mask=d < D, other=float('inf'))
    z, m = _replay(
        x, log_p0, log_q0, p0, q0, rows, columns, c_before, k, coefficients, num_modules, d, n, D, N, QUADRATIC
    )
    c = _load_c(columns, k, n, N)
    row, column, m = _module(x, m, z, log_p0, log_q0, p0, r, c_before, c, coefficients, k, num_modules, QUADRATIC)
    return z, to_mass_one(row), column, r


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def badmm_forward(
    features, x_map, log_prior_d, log_prior_n, coefficients,
    pooled, rows, columns, parts,
    D, N, num_modules, module, sub_tiles,
    features_strides, x_strides, prior_d_strides, prior_n_strides,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    LAST: tl.constexpr, SAME: tl.constexpr, QUADRATIC: tl.constexpr,
):  # fmt: skip
    """Launch `module` of forward on the grid (B, tiles).

    rows (B, T, D) gets r, columns (B, T - 1, N) gets c of the module before, parts (T - 1, B, tiles, 2, N) gets
    this program's part of c; the LAST writes pooled (B, D) instead. SAME: the features are X.
    """
    b, n, log_q0 = open_set(log_prior_n, prior_n_strides, N, BLOCK_N)
    q0 = tl.exp(log_q0)
    rows += b * num_modules * D
    columns += b * (num_modules - 1) * N

    c_before = log_q0
    if module > 0:
        c_before = combine_lse(parts, module - 1, columns + (module - 1) * N, n, N, TILES)
    else:
        c_before = _load_c(columns, -1, n, N)

    top = tl.full((BLOCK_N,), float('-inf'), tl.float32)
    total = tl.full((BLOCK_N,), 0.0, tl.float32)
    for sub_tile in range(sub_tiles):
        d, exists, log_p0 = open_tile(log_prior_d, prior_d_strides, sub_tile, sub_tiles, n, D, N, BLOCK_D)
        x, peak = shift_tile(load_tile(x_map, b, d, n, x_strides, exists), exists, log_q0)
        p0 = tl.exp(log_p0)
        z, m = _replay(
            x, log_p0, log_q0, p0, q0, rows, columns, c_before, module, coefficients, num_modules, d, n, D, N, QUADRATIC
        )
        y = _row_logits(x, m, z, log_q0, c_before, coefficients, module, num_modules)
        row_top = tl.max(y, 1)
        row = tl.exp(y - row_top[:, None])
        row_total = tl.sum(row, 1)
        r = row_top + tl.log(row_total)
        tl.store(rows + module * D + d, r, mask=d < D)
        if LAST:
            averaged = x
            if not SAME:
                averaged = load_tile(features, b, d, n, features_strides, exists)
            f = tl.sum(row * averaged, 1) / row_total
            if SAME:
                f += peak
            tl.store(pooled + b * D + d, f.to(pooled.dtype.element_ty), mask=d < D)
        else:
            if QUADRATIC:
                m -= tl.load(coefficients + 3 * num_modules + module) * p0[:, None] * (row / row_total[:, None])
            y = _column_logits(x, m, log_p0, r, coefficients, module, num_modules)
            tile_top, tile_total = tile_lse(y)
            top, total = merge_lse(top, total, tile_top, tile_total)
    if not LAST:
        leave_lse(parts, module, top, total, n, N)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def badmm_backward(
    grad, features, x_map, log_prior_d, log_prior_n, coefficients, rows, columns,
    d_columns, parts, d_features, d_x, d_log_p0, slopes,
    D, N, num_modules, module, sub_tiles,
    grad_strides, features_strides, x_strides, prior_d_strides, prior_n_strides, d_features_strides, d_x_strides,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    FIRST: tl.constexpr, SAME: tl.constexpr, QUADRATIC: tl.constexpr,
    NEED_FEATURES: tl.constexpr, NEED_X: tl.constexpr,
):  # fmt: skip
    """Launch for `module` of backward, from T - 1 down to 0 (FIRST), on the grid (B, tiles).

    parts (T, B, tiles, N) gets this program's part of dv, the gradient of the v that this module read (of log q0
    in module 0); d_columns (B, T, N) gets dv of the module after. FIRST writes the gradients, of the coefficients as
    slopes (B, tiles, sub_tiles, 4, T), to be added up.
    """
    b, n, log_q0 = open_set(log_prior_n, prior_n_strides, N, BLOCK_N)
    q0 = tl.exp(log_q0)
    rows += b * num_modules * D
    columns += b * (num_modules - 1) * N
    d_columns += b * num_modules * N
    last = num_modules - 1

    dv_after = q0
    if module < last:
        dv_after = combine_sum(parts, module + 1, d_columns + (module + 1) * N, n, N, TILES)

    dv_part = tl.full((BLOCK_N,), 0.0, tl.float32)
    for sub_tile in range(sub_tiles):
        d, exists, log_p0 = open_tile(log_prior_d, prior_d_strides, sub_tile, sub_tiles, n, D, N, BLOCK_D)
        x, _ = shift_tile(load_tile(x_map, b, d, n, x_strides, exists), exists, log_q0)
        averaged = x
        if not SAME:
            averaged = load_tile(features, b, d, n, features_strides, exists)
        g = tl.load(grad + b * grad_strides[0] + d * grad_strides[1], mask=d < D, other=0.0).to(tl.float32)
        p0 = tl.exp(log_p0)
        slope = slopes + ((b * tl.num_programs(1) + tl.program_id(1)) * sub_tiles + sub_tile) * 4 * num_modules

        # f = Σ_n features Q
        c_before = _load_c(columns, last - 1, n, N)
        z, m = _replay(
            x, log_p0, log_q0, p0, q0, rows, columns, c_before, last, coefficients, num_modules, d, n, D, N, QUADRATIC
        )
        r = tl.load(rows + last * D + d, mask=d < D, other=float('inf'))
        row = tl.exp(_row_logits(x, m, z, log_q0, c_before, coefficients, last, num_modules) - r[:, None])
        row = to_mass_one(row)
        dx = row * g[:, None]
        if FIRST and NEED_FEATURES:
            store_tile(d_features, dx, b, d, n, d_features_strides, exists)
        f = tl.sum(row * averaged, 1)
        dy = dx * (averaged - f[:, None])
        if not SAME:
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
            z, row, column, r = _replay_module(
                x, log_p0, log_q0, p0, q0, rows, columns, j, coefficients, num_modules, d, n, D, N, QUADRATIC
            )
            if FIRST:
                rho_before = tl.load(coefficients + 2 * num_modules + j)
                z += rho_before * (p0[:, None] * row - q0[None, :] * column)
                d_beta += tl.sum(dy * x)
                d_rho += tl.sum(dy * z) / (rho * rho)
                d_rough -= tl.sum(q0[None, :] * dm * column)
                store_slopes(slope, d_beta, d_kappa, d_rho, d_rough, k, num_modules)

            # S = q0 V of the module before: read by its Z and by this module's M.
            beta = tl.load(coefficients + j)
            kappa = tl.load(coefficients + num_modules + j)
            rho = tl.load(coefficients + 2 * num_modules + j)
            dv = tl.load(d_columns + k * N + n, mask=n < tl.where(k > module + 1, N, 0), other=0.0)
            dv = tl.where(k == module + 1, dv_after, dv)
            ds = rho * dz
            if QUADRATIC:
                ds += rough * dm
            dt = column * (-q0[None, :] * ds - dv[None, :])
            # dt is the gradient of the logits of V.
            du = tl.sum(dt, 1)
            dx += (kappa * beta) * dt
            if FIRST:
                along = tl.sum(dt * x)
                d_beta = kappa * along
                d_kappa = beta * along + tl.sum(du * tl.where(d < D, log_p0 - r, 0.0))
                d_rho = tl.sum(dz * (p0[:, None] * row - q0[None, :] * column))

            # P = p0 Q of the module before: read by its Z and by its M.
            dp = rho * dz
            if QUADRATIC:
                dm += dt
                dp -= tl.load(coefficients + 3 * num_modules + j) * dm
                if FIRST:
                    d_rough = -tl.sum(p0[:, None] * dm * row)
            dp *= p0[:, None]
            du = kappa * du + tl.sum(row * dp, 1)
            d_p0 += du
            # In this order a row with all its mass in one entry has no gradient, to the last bit.
            dy = row * (dp - du[:, None])

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
            if NEED_X:
                store_tile(d_x, dx, b, d, n, d_x_strides, exists)
        else:
            j = module - 1
            dz -= dy / tl.load(coefficients + 2 * num_modules + module)
            ds = tl.load(coefficients + 2 * num_modules + j) * dz
            if QUADRATIC:
                ds += tl.load(coefficients + 3 * num_modules + module) * dm
            _, _, column, _ = _replay_module(
                x, log_p0, log_q0, p0, q0, rows, columns, j, coefficients, num_modules, d, n, D, N, QUADRATIC
            )
            dv -= q0 * tl.sum(column * ds, 0)
        dv_part += dv
    leave_sum(parts, module, dv_part, n, N)


def _launches(coefficients: Tensor, quadratic: bool) -> Launches:
    num_modules = coefficients.shape[1]
    return Launches(badmm_forward, badmm_backward, num_modules, num_modules, {'QUADRATIC': quadratic})


register_sets('badmm_pool', _launches, ', bool quadratic')


def badmm_pool(
    features: Tensor | None, x: Tensor, log_p0: Tensor, log_q0: Tensor, weights: StepWeights, quadratic: bool
) -> Tensor:
    """(B, D) pooled features; `features` (B, D, N) are averaged, None where they are `x`, which the plan sees."""
    coefficients = badmm_coefficients(weights, quadratic).float()
    return torch.ops.rotp_vision.triton_badmm_pool(features, x, log_p0, log_q0, coefficients, quadratic)[0]
