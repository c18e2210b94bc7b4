"""The backend 'triton': kernels for GPUs, in float32. Their files import triton, this one imports them at first use."""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from rotp_vision.core.problem import ROTProblem
from rotp_vision.core.solver import Implementation, Solver, Windows, register_backend
from rotp_vision.core.weights import StepWeights

MAX_SAMPLES = 256  # a tile holds all samples of a set
MAX_KERNEL = 3  # taps along an axis: all taps of a window are in registers,
MAX_CHANNELS = 256  # and all channels of it in one program
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INSTALLED = find_spec('triton') is not None
INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'  # then kernels run on CPU, slowly, to be tested


def _refuses(weights: StepWeights, solver: Solver) -> str | None:
    if solver.coupled or solver.implicit or weights.structure is not None or weights.proximal is not None:
        return 'knows no coupled marginals, structural or proximal term and no implicit gradients'
    return None


def _lacks(features: Tensor) -> str | None:
    """Of sets (B, D, N), or maps (B, C, H, W) with windows."""
    if not INSTALLED:
        return 'needs the package triton (pip install triton), which is not installed'
    if not (features.is_cuda or INTERPRETED):
        return f'needs tensors on a GPU, got features on {features.device}'
    if features.dtype not in DTYPES:
        return f'computes in float32, got features of {features.dtype}'
    if features.dim() == 3 and features.shape[2] > MAX_SAMPLES:
        return f'takes sets of at most {MAX_SAMPLES} samples, got {features.shape[2]}'
    return None


def _pool(problem: ROTProblem, weights: StepWeights, solver: Solver) -> Tensor:
    from rotp_vision.core.triton import badmm, sinkhorn

    features, log_p0, log_q0, mask, view = problem
    if mask is not None:
        log_q0 = log_q0.masked_fill(~mask.squeeze(1), -torch.inf)
    log_p0, log_q0 = (prior.expand(features.shape[0], -1) for prior in (log_p0, log_q0))
    # Kernels widen what they read: features that the plan sees as they are need no copy.
    averaged, x = (None, features) if view == 'identity' else (features, problem.seen())
    if solver.name == 'sinkhorn':
        return sinkhorn.sinkhorn_pool(averaged, x, log_p0, log_q0, weights, solver.num_inner)
    return badmm.badmm_pool(averaged, x, log_p0, log_q0, weights, solver.name == 'badmm-q')


def _pool_windows(maps: Tensor, weights: StepWeights, solver: Solver, windows: Windows, view: str) -> Tensor | None:
    """Kept for backward besides the maps are some vectors of a window's size."""
    if max(windows.kernel_h, windows.kernel_w) > MAX_KERNEL or maps.shape[1] > MAX_CHANNELS:
        return None
    from rotp_vision.core.triton import local_badmm, local_sinkhorn

    if solver.name == 'sinkhorn':
        return local_sinkhorn.sinkhorn_pool_windows(maps, weights, windows, view, solver.num_inner)
    return local_badmm.badmm_pool_windows(maps, weights, windows, view, solver.name == 'badmm-q')


register_backend('triton', Implementation(_refuses, _lacks, _pool, _pool_windows))
