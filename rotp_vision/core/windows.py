"""Pooling of all windows of a map by kernels that read them where they are, in place of cutting them out."""

from typing import NamedTuple

import torch
from torch import Tensor

from rotp_vision.core.fast_badmm import badmm_coefficients
from rotp_vision.core.fast_sinkhorn import sinkhorn_coefficients
from rotp_vision.core.solver import Solver, check_triton, check_weights
from rotp_vision.core.weights import StepWeights

MAX_KERNEL = 3  # taps along an axis: all taps of a window are in registers,
MAX_CHANNELS = 256  # and all channels of it in one program


class Windows(NamedTuple):
    """Which windows a grid of pixels has. Padding is before the grid; what lies outside it does not exist."""

    kernel_h: int
    kernel_w: int
    stride_h: int
    stride_w: int
    padding_h: int
    padding_w: int
    dilation_h: int
    dilation_w: int
    rows: int  # of windows: H'
    columns: int  # W'


def has_window_kernel(windows: Windows, num_channels: int, solver: Solver) -> bool:
    """Whether `rot_pool_windows` takes such windows; the others must be cut out and go to `rot_pool`."""
    fits = max(windows.kernel_h, windows.kernel_w) <= MAX_KERNEL and num_channels <= MAX_CHANNELS
    # ONNX knows no operator of ours.
    return solver.backend == 'triton' and fits and not torch.onnx.is_in_onnx_export()


def rot_pool_windows(
    x: Tensor, weights: StepWeights, solver: Solver, windows: Windows, view: str = 'identity', floor: float = 0.0
) -> Tensor:
    """(B, C, H', W') every window of `x` (B, C, H, W) pooled with uniform priors, in the dtype and format of x.

    A window is a set of its pixels inside the map with all channels as features: what `rot_pool` gives for it, by
    Triton kernels in float32, see `has_window_kernel`. Kept for backward besides x are some vectors of a window's size.

    Args:
        x: what is averaged.
        weights: of the modules.
        solver: its backend is 'triton'.
        windows: where they are; every one has a pixel inside the map.
        view: what the plan sees: 'identity', 'rms', which is x / sqrt(mean over the window of x² + floor²), or 'log',
            which is log(max(x, 0) + floor).
        floor: of the view.
    """
    check_triton(x, weights, solver)
    check_weights(weights, solver)
    if solver.name == 'sinkhorn':
        if solver.num_inner < 1:
            raise ValueError(f'num_inner must be at least 1, got {solver.num_inner}')
        coefficients = sinkhorn_coefficients(weights)[:4].float()
        pool = torch.ops.rotp_vision.triton_local_sinkhorn_pool
        return pool(x, coefficients, list(windows), view, floor, solver.num_inner)[0]
    quadratic = solver.name == 'badmm-q'
    coefficients = badmm_coefficients(weights, quadratic).float()
    return torch.ops.rotp_vision.triton_local_badmm_pool(x, coefficients, list(windows), view, floor, quadratic)[0]
