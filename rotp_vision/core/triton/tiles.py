"""What the Triton kernels share: how a plan is cut into tiles, and how programs pass vectors on to the next launch.

A program works on one set and on some channels, `sub_tiles` tiles of BLOCK_D features by *all* samples (padded to
BLOCK_N) one after the other. A sum over samples is then local to a tile; of a sum over features every program leaves
its part, a vector of N, and all programs of the next launch add the parts up. So nothing plan-sized is written but
results, there are no atomics, and results do not depend on the order in which programs run.

What the plan sees of the features is made in the tile: the log-sum-exps r (over samples) and c (over features) are all
that launches keep, and an operator made here returns them for backward: T · (D + N) numbers per set. It computes in
float32, whatever the dtypes.
"""

# Kernels are not Python to a type checker.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotp_vision.core.operator import Pair, define
from rotp_vision.core.problem import VIEW_FLOOR

MAX_TILES = 16  # programs per set: every one of them reads the parts of all
FORWARD_ELEMENTS = 2048  # of a tile; what the kernels hold per element fits the registers
BACKWARD_ELEMENTS = 1024
KINDS = 4  # of coefficients that a module has; after them comes the gain
NUM_WARPS = 4
# Left to itself NVIDIA's assembler takes fewer registers, for the sake of occupancy, and spills some.
MAX_REGISTERS = 255
AMD = torch.version.hip is not None


class Tiling(NamedTuple):
    """How the (D, N) plan of a set is cut."""

    block_n: int
    block_d: int
    sub_tiles: int  # of a program
    tiles: int  # programs per set

    @property
    def padded_tiles(self) -> int:
        return triton.next_power_of_2(self.tiles)


def tiling(num_features: int, num_samples: int, elements: int) -> Tiling:
    block_n = max(16, triton.next_power_of_2(num_samples))
    block_d = max(1, min(elements // block_n, triton.next_power_of_2(num_features)))
    blocks = triton.cdiv(num_features, block_d)
    sub_tiles = triton.cdiv(blocks, MAX_TILES)
    return Tiling(block_n, block_d, sub_tiles, triton.cdiv(blocks, sub_tiles))


def tiles_of_set(num_features: int, num_samples: int) -> tuple[int, ...]:
    """The constants that the size of a set gives its kernels."""
    cuts = (tiling(num_features, num_samples, elements) for elements in (FORWARD_ELEMENTS, BACKWARD_ELEMENTS))
    return tuple(size for cut in cuts for size in (cut.block_d, cut.block_n, cut.padded_tiles))


def on_device(x: Tensor):
    """Triton launches on the current device: make it that of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def launch_options(amd: bool, num_warps: int = NUM_WARPS) -> dict[str, int | bool]:
    """Of every kernel; a limit of registers exists on NVIDIA only."""
    options = {'num_warps': num_warps, 'enable_fp_fusion': True}
    return options if amd else options | {'maxnreg': MAX_REGISTERS}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Every launch of a kernel goes through here."""
    kernel[grid](*arguments, **constants)


def launch_forward(
    kernel: Any,
    features: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    coefficients: Tensor,
    view: str,
    count: int,
    launches: int,
    **flags: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, D) pooled, and the log-sum-exps r (B, launches, D) and c (B, launches - 1, N).

    Args:
        kernel: `badmm_forward`, `sinkhorn_forward`.
        features: (B, D, N) what is averaged; masked samples are not read.
        log_p0: (B, D).
        log_q0: (B, N), -inf on masked samples.
        coefficients: see `coefficients.py`.
        view: what the plan sees of the features, see `view_of`.
        count: of modules or steps, as the kernel takes it.
        launches: how many make a forward.
        flags: what else the kernel takes.
    """
    num_sets, num_features, num_samples = features.shape
    cut = tiling(num_features, num_samples, FORWARD_ELEMENTS)
    pooled = features.new_empty(features.shape[:2])
    saved_r = features.new_empty(num_sets, launches, num_features, dtype=torch.float32)
    saved_c = features.new_empty(num_sets, launches - 1, num_samples, dtype=torch.float32)
    parts = features.new_empty(launches - 1, num_sets, cut.tiles, 2, num_samples, dtype=torch.float32)
    with on_device(features):
        for k in range(launches):
            launch(
                kernel, (num_sets, cut.tiles),
                features, log_p0, log_q0, coefficients,
                pooled, saved_r, saved_c, parts,
                num_features, num_samples, count, k, cut.sub_tiles, VIEW_FLOOR,
                features.stride(), log_p0.stride(), log_q0.stride(),
                BLOCK_D=cut.block_d, BLOCK_N=cut.block_n, TILES=cut.padded_tiles,
                LAST=k + 1 == launches, VIEW=view, **flags, **launch_options(AMD),
            )  # fmt: skip
    return pooled, saved_r, saved_c


def launch_backward(
    kernel: Any,
    grad: Tensor,
    features: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    coefficients: Tensor,
    saved_r: Tensor,
    saved_c: Tensor,
    needs: list[bool],
    view: str,
    count: int,
    **flags: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the features, log_p0 (B, D), log_q0 (B, N) and the coefficients; empty where not needed."""
    (num_sets, launches, num_features), num_samples = saved_r.shape, features.shape[2]
    cut = tiling(num_features, num_samples, BACKWARD_ELEMENTS)
    d_features = torch.empty_like(features) if needs[0] else features.new_empty(0)
    target = d_features if needs[0] else features
    d_c = features.new_empty(num_sets, launches, num_samples, dtype=torch.float32)
    parts = features.new_empty(launches, num_sets, cut.tiles, num_samples, dtype=torch.float32)
    d_log_p0 = features.new_empty(log_p0.shape, dtype=torch.float32)
    slopes = features.new_empty(num_sets, cut.tiles * cut.sub_tiles, len(coefficients), dtype=torch.float32)
    with on_device(features):
        for k in reversed(range(launches)):
            launch(
                kernel, (num_sets, cut.tiles),
                grad, features, log_p0, log_q0, coefficients, saved_r, saved_c,
                d_c, parts, target, d_log_p0, slopes,
                num_features, num_samples, count, k, cut.sub_tiles, VIEW_FLOOR,
                grad.stride(), features.stride(), log_p0.stride(), log_q0.stride(), target.stride(),
                BLOCK_D=cut.block_d, BLOCK_N=cut.block_n, TILES=cut.padded_tiles,
                FIRST=k == 0, VIEW=view, NEED_FEATURES=needs[0], **flags, **launch_options(AMD),
            )  # fmt: skip
    # Outputs of an operator may not share memory, not even none.
    return (
        d_features,
        d_log_p0 if needs[1] else d_log_p0.new_empty(0),
        parts.sum((0, 2)) if needs[2] else parts.new_empty(0),
        slopes.sum((0, 1)) if needs[3] else slopes.new_empty(0),
    )


class Launches(NamedTuple):
    """The kernels of an operator and how they are launched."""

    forward: Any  # kernel
    backward: Any
    size: int  # modules or steps, as the kernels take it
    launches: int  # of which a forward or backward for sets consists; one less are the vectors that backward needs
    flags: dict[str, bool]


def register_sets(name: str, kernels: Callable[..., Launches], options: str) -> None:
    """Make `torch.ops.rotp_vision.triton_name(features, log_p0, log_q0, coefficients, view, *options)`.

    It returns (B, D) pooled features, and for backward the log-sum-exps r (B, L, D) and c (B, L - 1, N).

    Args:
        name: of the torch operator.
        kernels: from coefficients and options.
        options: what else the operator takes, as in a schema: ', int num_inner'.
    """

    def run_forward(features, log_p0, log_q0, coefficients, view, *extra) -> tuple[Tensor, Tensor, Tensor]:
        forward, _, count, launches, flags = kernels(coefficients, *extra)
        return launch_forward(forward, features, log_p0, log_q0, coefficients, view, count, launches, **flags)

    def run_backward(
        grad, features, log_p0, log_q0, coefficients, saved_r, saved_c, needs, view, *extra
    ) -> tuple[Tensor, ...]:
        _, backward, count, _, flags = kernels(coefficients, *extra)
        inputs = features, log_p0, log_q0, coefficients, saved_r, saved_c
        return launch_backward(backward, grad, *inputs, needs, view, count, **flags)

    def fake_forward(features, log_p0, log_q0, coefficients, view, *extra) -> tuple[Tensor, Tensor, Tensor]:
        launches, (num_sets, num_features, num_samples) = kernels(coefficients, *extra).launches, features.shape
        return (
            features.new_empty(num_sets, num_features),
            features.new_empty(num_sets, launches, num_features, dtype=torch.float32),
            features.new_empty(num_sets, launches - 1, num_samples, dtype=torch.float32),
        )

    def fake_backward(
        grad, features, log_p0, log_q0, coefficients, saved_r, saved_c, needs, view, *extra
    ) -> tuple[Tensor, ...]:
        vectors = zip((log_p0, log_q0, coefficients), needs[1:], strict=True)
        return (
            torch.empty_like(features) if needs[0] else features.new_empty(0),
            *(features.new_empty(v.shape if need else 0, dtype=torch.float32) for v, need in vectors),
        )

    inputs = 'Tensor features, Tensor log_p0, Tensor log_q0, Tensor coefficients'
    define(
        f'triton_{name}',
        Pair(run_forward, run_backward, fake_forward, fake_backward),
        f'({inputs}, str view{options}) -> (Tensor, Tensor, Tensor)',
        f'(Tensor grad, {inputs}, Tensor saved_r, Tensor saved_c, bool[] needs, str view{options}) '
        '-> (Tensor, Tensor, Tensor, Tensor)',
        num_inputs=4,
    )


@triton.jit
def open_set(log_prior_n, strides, N, BLOCK_N: tl.constexpr):
    """The set of a program of the grid (B, tiles), the samples, their log q0, -inf beyond N, and how many there are."""
    b, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    log_q0 = tl.load(log_prior_n + b * strides[0] + n * strides[1], mask=n < N, other=float('-inf')).to(tl.float32)
    return b, n, log_q0, tl.sum(tl.where(log_q0 > float('-inf'), 1.0, 0.0))


@triton.jit
def open_tile(log_prior_d, strides, sub_tile, sub_tiles, D, BLOCK_D: tl.constexpr):
    """The features of a tile, and their log p0, -inf beyond D."""
    d = (tl.program_id(1) * sub_tiles + sub_tile) * BLOCK_D + tl.arange(0, BLOCK_D)
    log_prior_d += tl.program_id(0).to(tl.int64) * strides[0]
    return d, tl.load(log_prior_d + d * strides[1], mask=d < D, other=float('-inf')).to(tl.float32)


@triton.jit
def load_tile(pointer, set_index, d, n, strides, D, log_q0):
    """(BLOCK_D, BLOCK_N) of a (B, D, N) tensor in float32, zero on masked samples and where nothing exists."""
    exists = (d < D)[:, None] & (log_q0 > float('-inf'))[None, :]
    pointer += set_index * strides[0]
    return tl.load(pointer + (d[:, None] * strides[1] + n[None, :] * strides[2]), mask=exists, other=0.0).to(tl.float32)


@triton.jit
def load_view(features, set_index, d, n, strides, D, log_q0, num_samples, floor, VIEW: tl.constexpr):
    """What the plan sees of a tile.

    Returns:
        x: (BLOCK_D, BLOCK_N) less the largest entry in every row; zero on masked samples and where nothing exists.
        peak: (BLOCK_D,) that entry.
        scale: (BLOCK_D,) for the view 'rms': the features are (x + peak) / scale; one for others.
        raw: (BLOCK_D, BLOCK_N) the features.
    """
    raw = load_tile(features, set_index, d, n, strides, D, log_q0)
    seen = (d < D)[:, None] & (log_q0 > float('-inf'))[None, :]
    x = raw
    scale = tl.sum(raw, 1) * 0.0 + 1.0
    if VIEW == 'rms':
        # In units of the row's largest magnitude, whose square might overflow.
        unit = tl.maximum(tl.max(tl.abs(raw), 1), floor)
        ratio = raw / unit[:, None]
        least = floor / unit
        scale = tl.rsqrt(tl.sum(ratio * ratio, 1) / num_samples + least * least) / unit
        x = raw * scale[:, None]
    elif VIEW == 'log':
        x = tl.log(tl.maximum(raw, 0.0) + floor)
    peak = tl.max(tl.where(seen, x, float('-inf')), 1)
    peak = tl.where(peak == float('-inf'), 0.0, peak)
    return tl.where(seen, x - peak[:, None], 0.0), peak, scale, raw


@triton.jit
def average(weights, total, x, peak, scale, raw, VIEW: tl.constexpr):
    """(BLOCK_D,) the average of the features with the weights (BLOCK_D, BLOCK_N), whose rows add up to total."""
    if VIEW == 'log':
        return tl.sum(weights * raw, 1) / total
    else:
        return (tl.sum(weights * x, 1) / total + peak) / scale


@triton.jit
def average_back(weights, g, x, peak, scale, raw, VIEW: tl.constexpr):
    """Back through `average` from its gradient g (BLOCK_D,).

    Returns the gradient of the weights' logits, that of x (of raw for the view 'log') which keeps its place in memory,
    and (BLOCK_D,) the average times its gradient.
    """
    averaged = x
    if VIEW == 'log':
        averaged = raw
    g = g / scale
    direct = weights * g[:, None]
    f = tl.sum(weights * averaged, 1)
    return direct * (averaged - f[:, None]), direct, g * (f + peak)


@triton.jit
def view_back(dx, direct, x, peak, scale, raw, moved, num_samples, floor, VIEW: tl.constexpr):
    """The gradient of the features.

    Of dx, that of x, with `direct`, the share of the average, but for the view 'log'; `moved` is of `average_back`.
    """
    if VIEW == 'rms':
        # Through s = (mean_n features² + floor²)^(-1/2), which x is multiplied with and its average divided by.
        d_log_s = tl.sum(dx * x, 1) + peak * tl.sum(dx, 1) - moved
        pull = d_log_s * scale / num_samples
        dx = dx * scale[:, None] - (x + peak[:, None]) * pull[:, None]
    elif VIEW == 'log':
        dx = direct + tl.where(raw > 0.0, dx / (raw + floor), 0.0)
    return dx


@triton.jit
def store_tile(pointer, values, set_index, d, n, strides, D, N, log_q0):
    """Values to a (B, D, N) tensor, zero on masked samples."""
    values = tl.where((log_q0 > float('-inf'))[None, :], values, 0.0)
    exists = (d < D)[:, None] & (n < N)[None, :]
    pointer += set_index * strides[0]
    values = values.to(pointer.dtype.element_ty)
    tl.store(pointer + (d[:, None] * strides[1] + n[None, :] * strides[2]), values, mask=exists)


@triton.jit
def merge_lse(top, total, more_top, more_total):
    """The log-sum-exp (top, total), meaning top + log(total), of two; of nothing it is (-inf, 0)."""
    new_top = tl.maximum(top, more_top)
    safe = tl.where(new_top == float('-inf'), 0.0, new_top)
    return new_top, total * tl.exp(top - safe) + more_total * tl.exp(more_top - safe)


@triton.jit
def tile_lse(y):
    """Over features, of a tile: (BLOCK_N,) top and total. A tile without features gives (-inf, 0)."""
    top = tl.max(y, 0)
    safe = tl.where(top == float('-inf'), 0.0, top)
    return top, tl.sum(tl.exp(y - safe[None, :]), 0)


@triton.jit
def to_mass_one(weights):
    """A softmax along the samples, made with a saved log-sum-exp, with mass one for every feature to the last bit.

    The log-sum-exp is rounded, and what is off would leak the mean of a gradient. Beyond D it is infinite: all zero.
    """
    total = tl.sum(weights, 1)
    return weights / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def combine_lse(parts, launch, target, n, N, TILES: tl.constexpr):
    """(BLOCK_N,) log-sum-exp over features from the parts of all programs of a set; infinity beyond N.

    parts (launches, B, tiles, 2, N) holds them for each launch; what comes out is stored at `target` too.
    """
    tiles = tl.num_programs(1)
    t = tl.arange(0, TILES)
    exists = (t < tiles)[:, None] & (n < N)[None, :]
    parts += (launch * tl.num_programs(0) + tl.program_id(0).to(tl.int64)) * tiles * (2 * N)
    at = parts + t[:, None] * (2 * N) + n[None, :]
    tops = tl.load(at, mask=exists, other=float('-inf'))
    totals = tl.load(at + N, mask=exists, other=0.0)
    top = tl.where(n < N, tl.max(tops, 0), 0.0)
    total = tl.sum(totals * tl.exp(tops - top[None, :]), 0)
    lse = tl.where(n < N, top + tl.log(tl.where(n < N, total, 1.0)), float('inf'))
    tl.store(target + n, lse, mask=n < tl.where(tl.program_id(1) == 0, N, 0))
    return lse


@triton.jit
def leave_lse(parts, launch, top, total, n, N):
    """This program's part for `combine_lse`."""
    at = (launch * tl.num_programs(0) + tl.program_id(0).to(tl.int64)) * tl.num_programs(1) + tl.program_id(1)
    tl.store(parts + at * (2 * N) + n, top, mask=n < N)
    tl.store(parts + at * (2 * N) + N + n, total, mask=n < N)


@triton.jit
def combine_sum(parts, launch, target, n, N, TILES: tl.constexpr):
    """(BLOCK_N,) sum over features from the parts (launches, B, tiles, N), stored at `target` too."""
    tiles = tl.num_programs(1)
    t = tl.arange(0, TILES)
    exists = (t < tiles)[:, None] & (n < N)[None, :]
    parts += (launch * tl.num_programs(0) + tl.program_id(0).to(tl.int64)) * tiles * N
    total = tl.sum(tl.load(parts + t[:, None] * N + n[None, :], mask=exists, other=0.0), 0)
    tl.store(target + n, total, mask=n < tl.where(tl.program_id(1) == 0, N, 0))
    return total


@triton.jit
def leave_sum(parts, launch, values, n, N):
    """This program's part for `combine_sum`."""
    at = (launch * tl.num_programs(0) + tl.program_id(0).to(tl.int64)) * tl.num_programs(1) + tl.program_id(1)
    tl.store(parts + at * N + n, values, mask=n < N)


@triton.jit
def store_slopes(slope, d_beta, d_kappa, d_rho, d_rough, k, num_modules):
    """Gradients of the coefficients of module k, of which kind by kind there are (4, T)."""
    tl.store(slope + k, d_beta)
    tl.store(slope + num_modules + k, d_kappa)
    tl.store(slope + 2 * num_modules + k, d_rho)
    tl.store(slope + 3 * num_modules + k, d_rough)
