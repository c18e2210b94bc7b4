"""The Triton kernels as `torch.library` operators, the same signatures as the torch ones; imports triton on first use.

Unlike those, an operator here also returns the vectors that it has at hand anyway and backward needs: T · (D + N)
numbers per set. It computes in float32, whatever the dtypes.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rotp_vision.core.ops import INPUTS, connect

MAX_SAMPLES = 256  # a tile holds all samples of a set
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INSTALLED = find_spec('triton') is not None
INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'  # then kernels run on CPU, slowly, to be tested


def require_triton(x: Tensor) -> None:
    """Raise if the kernels cannot run on `x` (B, D, N), saying why and what to do."""
    reason = None
    if not INSTALLED:
        reason = 'needs the package triton (pip install triton), which is not installed'
    elif not (x.is_cuda or INTERPRETED):
        reason = f'needs tensors on a GPU, got features on {x.device}'
    elif x.dtype not in DTYPES:
        reason = f'computes in float32, got features of {x.dtype}'
    elif x.shape[2] > MAX_SAMPLES:
        reason = f'takes sets of at most {MAX_SAMPLES} samples, got {x.shape[2]}'
    if reason is not None:
        raise ValueError(f"backend 'triton' {reason}; use backend 'auto' or 'torch'")


def _badmm() -> Any:
    from rotp_vision.core import triton_badmm

    return triton_badmm


def _sinkhorn() -> Any:
    from rotp_vision.core import triton_sinkhorn

    return triton_sinkhorn


def _num_modules(coefficients: Tensor, quadratic: bool) -> int:
    return coefficients.shape[1]


def _num_launches(coefficients: Tensor, num_inner: int) -> int:
    return num_inner + 1


def _register(name: str, kernels: Callable[[], Any], num_rows: Callable[..., int], options: str) -> None:
    """Make `torch.ops.rotp_vision.triton_name(features, x, log_p0, log_q0, coefficients, *options)`.

    It returns (B, D) pooled features, and for backward rows (B, R, D) and columns (B, R - 1, N).

    Args:
        name: of the torch operator.
        kernels: the module with `forward` and `backward`.
        num_rows: R from coefficients and options.
        options: what else the operator takes, as in a schema: ', int num_inner'.
    """

    def run_forward(features, x, log_p0, log_q0, coefficients, *extra) -> tuple[Tensor, Tensor, Tensor]:
        return kernels().forward(features, x, log_p0, log_q0, coefficients.contiguous(), *extra)

    def run_backward(
        grad, features, x, log_p0, log_q0, coefficients, rows, columns, needs, *extra
    ) -> tuple[Tensor, ...]:
        d_features, d_x = make_maps(features, x, needs)
        rest = kernels().backward(
            grad, features, x, log_p0, log_q0, coefficients.contiguous(), rows, columns, d_features, d_x, *extra
        )
        return *(x.new_empty(0) if d is None else d for d in (d_features, d_x)), *rest

    def make_maps(features, x, needs) -> tuple[Tensor | None, Tensor | None]:
        d_features = torch.empty_like(features) if features is not None and needs[0] else None
        return d_features, torch.empty_like(x) if needs[1] else None

    def fake_forward(features, x, log_p0, log_q0, coefficients, *extra) -> tuple[Tensor, Tensor, Tensor]:
        size = num_rows(coefficients, *extra)
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

    op = torch.library.custom_op(
        f'rotp_vision::triton_{name}',
        run_forward,
        mutates_args=(),
        schema=f'({INPUTS}{options}) -> (Tensor, Tensor, Tensor)',
    )
    op_backward = torch.library.custom_op(
        f'rotp_vision::triton_{name}_backward',
        run_backward,
        mutates_args=(),
        schema=f'(Tensor grad, {INPUTS}, Tensor rows, Tensor columns, bool[] needs{options}) '
        '-> (Tensor, Tensor, Tensor, Tensor, Tensor)',
    )
    op.register_fake(fake_forward)
    op_backward.register_fake(fake_backward)

    connect(op, op_backward, f'triton_{name}')


_register('badmm_pool', _badmm, _num_modules, ', bool quadratic')
_register('sinkhorn_pool', _sinkhorn, _num_launches, ', int num_inner')
