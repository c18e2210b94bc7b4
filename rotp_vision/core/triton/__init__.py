"""The backend 'triton': kernels for GPUs, in float32. Their files import triton, this one imports them at first use."""

import os
from collections.abc import Sequence
from functools import partial
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
    if solver.coupled or weights.structure is not None or weights.proximal is not None:
        return 'knows no coupled marginals, structural or proximal term'
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


def _takes_windows(maps: Tensor, windows: Windows) -> bool:
    return max(windows.kernel_h, windows.kernel_w) <= MAX_KERNEL and maps.shape[1] <= MAX_CHANNELS


def _pool(problem: ROTProblem, weights: StepWeights, solver: Solver, gain: Tensor | None) -> Tensor:
    from rotp_vision.core.triton import badmm, sinkhorn

    features, log_p0, log_q0, mask, view = problem
    if mask is not None:
        log_q0 = log_q0.masked_fill(~mask.squeeze(1), -torch.inf)
    log_p0, log_q0 = (prior.expand(features.shape[0], -1) for prior in (log_p0, log_q0))
    if solver.name == 'sinkhorn':
        return sinkhorn.sinkhorn_pool(features, log_p0, log_q0, weights, gain, view, solver.num_inner)
    return badmm.badmm_pool(features, log_p0, log_q0, weights, gain, view, solver.name == 'badmm-q')


def _pool_windows(
    maps: Tensor, weights: StepWeights, solver: Solver, windows: Windows, view: str, gain: Tensor | None
) -> Tensor | None:
    """Kept for backward besides the maps are some vectors of a window's size."""
    if not _takes_windows(maps, windows):
        return None
    from rotp_vision.core.triton import local_badmm, local_sinkhorn

    if solver.name == 'sinkhorn':
        return local_sinkhorn.sinkhorn_pool_windows(maps, weights, gain, windows, view, solver.num_inner)
    return local_badmm.badmm_pool_windows(maps, weights, gain, windows, view, solver.name == 'badmm-q')


def _softplus(betas: Sequence[Tensor], starts: Sequence[Tensor], checked: bool) -> tuple[Tensor, ...] | None:
    """`scaled_softplus` in one launch; None in a trace, which shall see plain operations."""
    if any(_lacks(beta) is not None for beta in betas):
        return None
    from rotp_vision.core.triton import check

    if check.is_traced(betas[0]):
        return None
    from rotp_vision.core.triton.coefficients import softplus

    if checked:
        configuration = check.Configuration('softplus', check.device_of(betas[0]), '', _dtypes(betas), '')
        tile = tuple(beta.dim() for beta in betas)
        if not check.trusted(configuration, tile, partial(check.softplus_results, softplus, betas, starts), betas[0]):
            return None
    return softplus(betas, starts)


def _dtypes(tensors: Sequence[Tensor]) -> str:
    return ' '.join(str(tensor.dtype) for tensor in tensors)


def _trusted(features: Tensor, weights: StepWeights, solver: Solver, view: str, windows: Windows | None) -> bool:
    from rotp_vision.core.triton import check

    kind = 'sets' if windows is None else 'windows'
    configuration = check.Configuration(kind, check.device_of(features), solver.name, str(features.dtype), view)
    if check.is_traced(features):
        fits = windows is None or _takes_windows(features, windows)
        return fits and check.known(*configuration)
    # What Triton makes variants of a kernel for: its constants, and strides of one.
    unit_strides = tuple(stride == 1 for stride in features.stride()[1:])
    if windows is None:
        from rotp_vision.core.triton.tiles import tiles_of_set

        tile, results = tiles_of_set(*features.shape[1:]), check.set_results
    elif _takes_windows(features, windows):
        from rotp_vision.core.triton.windows import tiles_of_windows

        tile, results = tiles_of_windows(features.shape[1], windows), check.window_results
    else:
        return False
    made = partial(results, features, weights, solver, view, windows)
    return check.trusted(configuration, (*tile, *unit_strides), made, features)


register_backend('triton', Implementation(_refuses, _lacks, _pool, _pool_windows, True, _trusted, _softplus, False))
