"""What the Triton kernels share: how a plan is cut into tiles, and how programs pass vectors on to the next launch.

A program works on one set and on some channels, `sub_tiles` tiles of BLOCK_D features by *all* samples (padded to
BLOCK_N) one after the other. A sum over samples is then local to a tile; of a sum over features every program leaves
its part, a vector of N, and all programs of the next launch add the parts up. So nothing plan-sized is written but
results, there are no atomics, and results do not depend on the order in which programs run.

Imports triton: import it only where `triton_ops` has found one.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TILES = 16  # programs per set: every one of them reads the parts of all
FORWARD_ELEMENTS = 2048  # of a tile; what the kernels hold per element fits the registers
BACKWARD_ELEMENTS = 1024
NUM_WARPS = 4
# Left to itself NVIDIA's assembler takes fewer registers, for the sake of occupancy, and spills some.
MAX_REGISTERS = 255


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


def launch_options() -> dict[str, int]:
    """Of every kernel; a limit of registers exists on NVIDIA only."""
    options = {'num_warps': NUM_WARPS}
    return options if torch.version.hip else options | {'maxnreg': MAX_REGISTERS}


@triton.jit
def load_tile(pointer, set_index, d, n, stride_b, stride_d, stride_n, exists):
    """(BLOCK_D, BLOCK_N) of a (B, D, N) tensor in float32, zero where nothing exists."""
    pointer += set_index.to(tl.int64) * stride_b
    return tl.load(pointer + (d[:, None] * stride_d + n[None, :] * stride_n), mask=exists, other=0.0).to(tl.float32)


@triton.jit
def store_tile(pointer, values, set_index, d, n, stride_b, stride_d, stride_n, exists):
    pointer += set_index.to(tl.int64) * stride_b
    values = values.to(pointer.dtype.element_ty)
    tl.store(pointer + (d[:, None] * stride_d + n[None, :] * stride_n), values, mask=exists)


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
def combine_lse(parts, tiles, n, N, TILES: tl.constexpr):
    """(BLOCK_N,) log-sum-exp over features from the parts (tiles, 2, N) of all programs of a set; zero beyond N."""
    t = tl.arange(0, TILES)
    exists = (t < tiles)[:, None] & (n < N)[None, :]
    at = parts + t[:, None] * (2 * N) + n[None, :]
    tops = tl.load(at, mask=exists, other=float('-inf'))
    totals = tl.load(at + N, mask=exists, other=0.0)
    top = tl.where(n < N, tl.max(tops, 0), 0.0)
    total = tl.sum(totals * tl.exp(tops - top[None, :]), 0)
    return top + tl.log(tl.where(n < N, total, 1.0))


@triton.jit
def combine_sum(parts, tiles, n, N, TILES: tl.constexpr):
    """(BLOCK_N,) sum over features from the parts (tiles, N)."""
    t = tl.arange(0, TILES)
    exists = (t < tiles)[:, None] & (n < N)[None, :]
    return tl.sum(tl.load(parts + t[:, None] * N + n[None, :], mask=exists, other=0.0), 0)
