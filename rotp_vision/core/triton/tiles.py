"""What the Triton kernels share: how a plan is cut into tiles, and how programs pass vectors on to the next launch.

A program works on one set and on some channels, `sub_tiles` tiles of BLOCK_D features by *all* samples (padded to
BLOCK_N) one after the other. A sum over samples is then local to a tile; of a sum over features every program leaves
its part, a vector of N, and all programs of the next launch add the parts up. So nothing plan-sized is written but
results, there are no atomics, and results do not depend on the order in which programs run.

An operator made here also returns the vectors that it has at hand anyway and backward needs: T · (D + N) numbers per
set. It computes in float32, whatever the dtypes.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotp_vision.core.explicit.ops import Pair, define

MAX_TILES = 16  # programs per set: every one of them reads the parts of all
FORWARD_ELEMENTS = 2048  # of a tile; what the kernels hold per element fits the registers
BACKWARD_ELEMENTS = 1024
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


def on_device(x: Tensor):
    """Triton launches on the current device: make it that of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def launch_options(amd: bool, num_warps: int = NUM_WARPS) -> dict[str, int | bool]:
    """Of every kernel; a limit of registers exists on NVIDIA only."""
    options = {'num_warps': num_warps, 'enable_fp_fusion': True}
    return options if amd else options | {'maxnreg': MAX_REGISTERS}


def launch_forward(
    kernel: Any,
    features: Tensor | None,
    x: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    coefficients: Tensor,
    count: int,
    launches: int,
    **flags: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, D) pooled, rows (B, launches, D) and columns (B, launches - 1, N).

    Args:
        kernel: `badmm_forward`, `sinkhorn_forward`.
        features: (B, D, N) what is averaged; None where it is x.
        x: (B, D, N) what the plan sees.
        log_p0: (B, D).
        log_q0: (B, N), -inf on masked samples.
        coefficients: as the torch operator takes them.
        count: of modules or steps, as the kernel takes it.
        launches: how many make a forward.
        flags: what else the kernel takes.
    """
    num_sets, num_features, num_samples = x.shape
    cut = tiling(num_features, num_samples, FORWARD_ELEMENTS)
    averaged = x if features is None else features
    pooled = x.new_empty(x.shape[:2], dtype=averaged.dtype)
    rows = x.new_empty(num_sets, launches, num_features, dtype=torch.float32)
    columns = x.new_empty(num_sets, launches - 1, num_samples, dtype=torch.float32)
    parts = x.new_empty(launches - 1, num_sets, cut.tiles, 2, num_samples, dtype=torch.float32)
    with on_device(x):
        for launch in range(launches):
            kernel[(num_sets, cut.tiles)](
                averaged, x, log_p0, log_q0, coefficients,
                pooled, rows, columns, parts,
                num_features, num_samples, count, launch, cut.sub_tiles,
                averaged.stride(), x.stride(), log_p0.stride(), log_q0.stride(),
                BLOCK_D=cut.block_d, BLOCK_N=cut.block_n, TILES=cut.padded_tiles,
                LAST=launch + 1 == launches, SAME=features is None, **flags, **launch_options(AMD),
            )  # fmt: skip
    return pooled, rows, columns


def launch_backward(
    kernel: Any,
    grad: Tensor,
    features: Tensor | None,
    x: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    coefficients: Tensor,
    rows: Tensor,
    columns: Tensor,
    d_features: Tensor | None,
    d_x: Tensor | None,
    count: int,
    **flags: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fills d_features and d_x, where they are given, with gradients.

    Returns:
        Those of log_p0 (B, D), log_q0 (B, N) and the coefficients.
    """
    (num_sets, launches, num_features), num_samples = rows.shape, x.shape[2]
    cut = tiling(num_features, num_samples, BACKWARD_ELEMENTS)
    averaged = x if features is None else features
    to_features, to_x = x if d_features is None else d_features, x if d_x is None else d_x
    d_columns = x.new_empty(num_sets, launches, num_samples, dtype=torch.float32)
    parts = x.new_empty(launches, num_sets, cut.tiles, num_samples, dtype=torch.float32)
    d_log_p0 = x.new_empty(log_p0.shape, dtype=torch.float32)
    slopes = x.new_empty(num_sets, cut.tiles * cut.sub_tiles, 4, coefficients.shape[1], dtype=torch.float32)
    with on_device(x):
        for launch in reversed(range(launches)):
            kernel[(num_sets, cut.tiles)](
                grad, averaged, x, log_p0, log_q0, coefficients, rows, columns,
                d_columns, parts, to_features, to_x, d_log_p0, slopes,
                num_features, num_samples, count, launch, cut.sub_tiles,
                grad.stride(), averaged.stride(), x.stride(), log_p0.stride(), log_q0.stride(),
                to_features.stride(), to_x.stride(),
                BLOCK_D=cut.block_d, BLOCK_N=cut.block_n, TILES=cut.padded_tiles,
                FIRST=launch == 0, SAME=features is None,
                NEED_FEATURES=d_features is not None, NEED_X=d_x is not None, **flags, **launch_options(AMD),
            )  # fmt: skip
    return d_log_p0, parts.sum((0, 2)), slopes.sum((0, 1))[: coefficients.shape[0]]


class Launches(NamedTuple):
    """The kernels of an operator and how they are launched."""

    forward: Any  # kernel
    backward: Any
    size: int  # modules or steps, as the kernels take it
    launches: int  # of which a forward or backward for sets consists; one less are the vectors that backward needs
    flags: dict[str, bool]


def register_sets(name: str, kernels: Callable[..., Launches], options: str) -> None:
    """Make `torch.ops.rotp_vision.triton_name(features, x, log_p0, log_q0, coefficients, *options)`.

    It returns (B, D) pooled features, and for backward rows (B, L, D) and columns (B, L - 1, N).

    Args:
        name: of the torch operator.
        kernels: from coefficients and options.
        options: what else the operator takes, as in a schema: ', int num_inner'.
    """

    def run_forward(features, x, log_p0, log_q0, coefficients, *extra) -> tuple[Tensor, Tensor, Tensor]:
        forward, _, count, launches, flags = kernels(coefficients, *extra)
        inputs = features, x, log_p0, log_q0, coefficients.contiguous()
        return launch_forward(forward, *inputs, count, launches, **flags)

    def run_backward(
        grad, features, x, log_p0, log_q0, coefficients, rows, columns, needs, *extra
    ) -> tuple[Tensor, ...]:
        d_features, d_x = make_maps(features, x, needs)
        _, backward, count, _, flags = kernels(coefficients, *extra)
        inputs = features, x, log_p0, log_q0, coefficients.contiguous()
        rest = launch_backward(backward, grad, *inputs, rows, columns, d_features, d_x, count, **flags)
        return *(x.new_empty(0) if d is None else d for d in (d_features, d_x)), *rest

    def make_maps(features, x, needs) -> tuple[Tensor | None, Tensor | None]:
        d_features = torch.empty_like(features) if features is not None and needs[0] else None
        return d_features, torch.empty_like(x) if needs[1] else None

    def fake_forward(features, x, log_p0, log_q0, coefficients, *extra) -> tuple[Tensor, Tensor, Tensor]:
        size = kernels(coefficients, *extra).launches
        return (
            x.new_empty(x.shape[:2], dtype=x.dtype if features is None else features.dtype),
            x.new_empty(x.shape[0], size, x.shape[1], dtype=torch.float32),
            x.new_empty(x.shape[0], size - 1, x.shape[2], dtype=torch.float32),
        )

    def fake_backward(
        grad, features, x, log_p0, log_q0, coefficients, rows, columns, needs, *extra
    ) -> tuple[Tensor, ...]:
        vectors = (x.new_empty(v.shape, dtype=torch.float32) for v in (log_p0, log_q0, coefficients))
        return *(x.new_empty(0) if d is None else d for d in make_maps(features, x, needs)), *vectors

    inputs = 'Tensor? features, Tensor x, Tensor log_p0, Tensor log_q0, Tensor coefficients'
    define(
        f'triton_{name}',
        Pair(run_forward, run_backward, fake_forward, fake_backward),
        f'({inputs}{options}) -> (Tensor, Tensor, Tensor)',
        f'(Tensor grad, {inputs}, Tensor rows, Tensor columns, bool[] needs{options}) '
        '-> (Tensor, Tensor, Tensor, Tensor, Tensor)',
        num_inputs=5,
    )


@triton.jit
def open_set(log_prior_n, strides, N, BLOCK_N: tl.constexpr):
    """The set of a program of the grid (B, tiles), the samples and their log q0, -inf beyond N."""
    b, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    log_q0 = tl.load(log_prior_n + b * strides[0] + n * strides[1], mask=n < N, other=float('-inf'))
    return b, n, log_q0


@triton.jit
def open_tile(log_prior_d, strides, sub_tile, sub_tiles, n, D, N, BLOCK_D: tl.constexpr):
    """The features of a tile, which of its (BLOCK_D, BLOCK_N) exist, and their log p0, -inf beyond D."""
    d = (tl.program_id(1) * sub_tiles + sub_tile) * BLOCK_D + tl.arange(0, BLOCK_D)
    log_prior_d += tl.program_id(0).to(tl.int64) * strides[0]
    log_p0 = tl.load(log_prior_d + d * strides[1], mask=d < D, other=float('-inf'))
    return d, (d < D)[:, None] & (n < N)[None, :], log_p0


@triton.jit
def load_tile(pointer, set_index, d, n, strides, exists):
    """(BLOCK_D, BLOCK_N) of a (B, D, N) tensor in float32, zero where nothing exists."""
    pointer += set_index * strides[0]
    return tl.load(pointer + (d[:, None] * strides[1] + n[None, :] * strides[2]), mask=exists, other=0.0).to(tl.float32)


@triton.jit
def shift_tile(x, exists, log_q0):
    """A tile less the largest entry in every row of samples that are not masked, zero elsewhere, and that entry."""
    seen = exists & (log_q0 > float('-inf'))[None, :]
    peak = tl.max(tl.where(seen, x, float('-inf')), 1)
    peak = tl.where(peak == float('-inf'), 0.0, peak)
    return tl.where(seen, x - peak[:, None], 0.0), peak


@triton.jit
def store_tile(pointer, values, set_index, d, n, strides, exists):
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
def to_mass_one(row):
    """A softmax along the samples, made with a saved log-sum-exp, with rows of mass one to the last bit.

    The log-sum-exp is rounded, and what is off would leak the mean of a gradient. Beyond D it is infinite: zero rows.
    """
    total = tl.sum(row, 1)
    return row / tl.where(total == 0.0, 1.0, total)[:, None]


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
    """Gradients of the coefficients of module k, of which row by row there are (4, T)."""
    tl.store(slope + k, d_beta)
    tl.store(slope + num_modules + k, d_kappa)
    tl.store(slope + 2 * num_modules + k, d_rho)
    tl.store(slope + 3 * num_modules + k, d_rough)
