"""The Triton kernels as `torch.library` operators, the same signatures as the torch ones; imports triton on first use.

Unlike those, an operator here also returns the vectors that it has at hand anyway and backward needs: T · (D + N)
numbers per set. It computes in float32, whatever the dtypes.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rotp_vision.core.ops import INPUTS, Pair, define

MAX_SAMPLES = 256  # a tile holds all samples of a set
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INSTALLED = find_spec('triton') is not None
INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'  # then kernels run on CPU, slowly, to be tested


def require_triton(x: Tensor) -> None:
    """Raise if the kernels cannot run on sets (B, D, N), or windows of maps (B, C, H, W), saying why and what to do."""
    reason = None
    if not INSTALLED:
        reason = 'needs the package triton (pip install triton), which is not installed'
    elif not (x.is_cuda or INTERPRETED):
        reason = f'needs tensors on a GPU, got features on {x.device}'
    elif x.dtype not in DTYPES:
        reason = f'computes in float32, got features of {x.dtype}'
    elif x.dim() == 3 and x.shape[2] > MAX_SAMPLES:
        reason = f'takes sets of at most {MAX_SAMPLES} samples, got {x.shape[2]}'
    if reason is not None:
        raise ValueError(f"backend 'triton' {reason}; use backend 'auto' or 'torch'")


class Launches(NamedTuple):
    """What the launchers of `triton_tiles` take."""

    forward: Any  # kernel
    backward: Any
    size: int  # modules or steps
    flags: dict[str, bool]


def is_channels_last(x: Tensor) -> bool:
    """Which axis of a map (B, C, H, W) is read along memory."""
    return x.stride(1) == 1


def _badmm(coefficients: Tensor, quadratic: bool) -> Launches:
    from rotp_vision.core.triton_badmm import badmm_backward, badmm_forward

    return Launches(badmm_forward, badmm_backward, coefficients.shape[1], {'QUADRATIC': quadratic})


def _sinkhorn(coefficients: Tensor, num_inner: int) -> Launches:
    from rotp_vision.core.triton_sinkhorn import sinkhorn_backward, sinkhorn_forward

    return Launches(sinkhorn_forward, sinkhorn_backward, num_inner, {})


def _badmm_launches(coefficients: Tensor, quadratic: bool) -> int:
    return coefficients.shape[1]


def _sinkhorn_launches(coefficients: Tensor, num_inner: int) -> int:
    return num_inner + 1


def _register(name: str, kernels: Callable[..., Launches], num_launches: Callable[..., int], options: str) -> None:
    """Make `torch.ops.rotp_vision.triton_name(features, x, log_p0, log_q0, coefficients, *options)`.

    It returns (B, D) pooled features, and for backward rows (B, L, D) and columns (B, L - 1, N).

    Args:
        name: of the torch operator.
        kernels: from coefficients and options; imports triton.
        num_launches: L from the same; does not.
        options: what else the operator takes, as in a schema: ', int num_inner'.
    """

    def run_forward(features, x, log_p0, log_q0, coefficients, *extra) -> tuple[Tensor, Tensor, Tensor]:
        from rotp_vision.core.triton_tiles import launch_forward

        forward, _, count, flags = kernels(coefficients, *extra)
        launches = num_launches(coefficients, *extra)
        inputs = features, x, log_p0, log_q0, coefficients.contiguous()
        return launch_forward(forward, *inputs, count, launches, **flags)

    def run_backward(
        grad, features, x, log_p0, log_q0, coefficients, rows, columns, needs, *extra
    ) -> tuple[Tensor, ...]:
        from rotp_vision.core.triton_tiles import launch_backward

        d_features, d_x = make_maps(features, x, needs)
        _, backward, count, flags = kernels(coefficients, *extra)
        inputs = features, x, log_p0, log_q0, coefficients.contiguous()
        rest = launch_backward(backward, grad, *inputs, rows, columns, d_features, d_x, count, **flags)
        return *(x.new_empty(0) if d is None else d for d in (d_features, d_x)), *rest

    def make_maps(features, x, needs) -> tuple[Tensor | None, Tensor | None]:
        d_features = torch.empty_like(features) if features is not None and needs[0] else None
        return d_features, torch.empty_like(x) if needs[1] else None

    def fake_forward(features, x, log_p0, log_q0, coefficients, *extra) -> tuple[Tensor, Tensor, Tensor]:
        size = num_launches(coefficients, *extra)
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

    define(
        f'triton_{name}',
        Pair(run_forward, run_backward, fake_forward, fake_backward),
        f'({INPUTS}{options}) -> (Tensor, Tensor, Tensor)',
        f'(Tensor grad, {INPUTS}, Tensor rows, Tensor columns, bool[] needs{options}) '
        '-> (Tensor, Tensor, Tensor, Tensor, Tensor)',
    )


def _local_badmm(coefficients: Tensor, quadratic: bool) -> Launches:
    from rotp_vision.core.triton_local import local_badmm_backward, local_badmm_forward

    return Launches(local_badmm_forward, local_badmm_backward, coefficients.shape[1], {'QUADRATIC': quadratic})


def _local_sinkhorn(coefficients: Tensor, num_inner: int) -> Launches:
    from rotp_vision.core.triton_local import local_sinkhorn_backward, local_sinkhorn_forward

    return Launches(local_sinkhorn_forward, local_sinkhorn_backward, num_inner, {})


def _register_local(
    name: str, kernels: Callable[..., Launches], num_launches: Callable[..., int], options: str
) -> None:
    """Make `torch.ops.rotp_vision.triton_local_name(x, coefficients, windows, view, floor, *options)`.

    It takes maps (B, C, H, W) and the fields of `Windows`, and returns the pooled map in the memory format of x, and
    for backward the vectors (B, H' W', L - 1, taps). Arguments as those of `_register`.
    """

    def run_forward(x, coefficients, windows, view, floor, *extra) -> tuple[Tensor, Tensor]:
        from rotp_vision.core.triton_windows import launch_windows_forward

        pooled, saved = fake_forward(x, coefficients, windows, view, floor, *extra)
        forward, _, count, flags = kernels(coefficients, *extra)
        launch_windows_forward(
            forward, x, coefficients.contiguous(), pooled, saved, windows, view, floor, count, **flags
        )
        return pooled, saved

    def run_backward(grad, x, coefficients, saved, needs, windows, view, floor, *extra) -> tuple[Tensor, Tensor]:
        from rotp_vision.core.triton_windows import launch_windows_backward

        d_x = torch.empty_like(x) if needs[0] else None
        _, backward, count, flags = kernels(coefficients, *extra)
        d_coefficients = launch_windows_backward(
            backward, grad, x, coefficients.contiguous(), saved, d_x, windows, view, floor, count, **flags
        )
        return x.new_empty(0) if d_x is None else d_x, d_coefficients

    def fake_forward(x, coefficients, windows, view, floor, *extra) -> tuple[Tensor, Tensor]:
        *_, rows, columns = windows
        layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
        vectors = num_launches(coefficients, *extra) - 1
        return (
            torch.empty(*x.shape[:2], rows, columns, dtype=x.dtype, device=x.device, memory_format=layout),
            x.new_empty(x.shape[0], rows * columns, vectors, windows[0] * windows[1], dtype=torch.float32),
        )

    def fake_backward(grad, x, coefficients, saved, needs, windows, view, floor, *extra) -> tuple[Tensor, Tensor]:
        d_x = torch.empty_like(x) if needs[0] else x.new_empty(0)
        return d_x, x.new_empty(coefficients.shape, dtype=torch.float32)

    inputs, chosen = 'Tensor x, Tensor coefficients', f'SymInt[] windows, str view, float floor{options}'
    define(
        f'triton_local_{name}',
        Pair(run_forward, run_backward, fake_forward, fake_backward),
        f'({inputs}, {chosen}) -> (Tensor, Tensor)',
        f'(Tensor grad, {inputs}, Tensor saved, bool[] needs, {chosen}) -> (Tensor, Tensor)',
        num_inputs=2,
    )


_register('badmm_pool', _badmm, _badmm_launches, ', bool quadratic')
_register('sinkhorn_pool', _sinkhorn, _sinkhorn_launches, ', int num_inner')
_register_local('badmm_pool', _local_badmm, _badmm_launches, ', bool quadratic')
_register_local('sinkhorn_pool', _local_sinkhorn, _sinkhorn_launches, ', int num_inner')
