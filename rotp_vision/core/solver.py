"""Which solver, and the two front doors that every layer uses: the plan, and the pooled features."""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rotp_vision.core.badmm import badmm
from rotp_vision.core.fast_badmm import badmm_pool
from rotp_vision.core.fast_coupled import coupled_badmm_pool
from rotp_vision.core.fast_sinkhorn import sinkhorn_pool
from rotp_vision.core.pool import pool
from rotp_vision.core.problem import ROTProblem, zero_masked
from rotp_vision.core.sinkhorn import sinkhorn
from rotp_vision.core.structure import Similarity
from rotp_vision.core.triton_ops import require_triton
from rotp_vision.core.weights import StepWeights, require

SolverName = Literal['sinkhorn', 'badmm-e', 'badmm-q']
Backend = Literal['auto', 'torch', 'triton', 'reference']
SOLVERS: tuple[SolverName, ...] = get_args(SolverName)
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class Solver(NamedTuple):
    """Which algorithm solves the problems; how many modules it has is the length of the weights."""

    name: SolverName = 'badmm-e'
    coupled: bool = False  # Bregman ADMM: whether the marginal penalties act
    num_inner: int = 4  # Sinkhorn steps in a module
    similarity: Similarity = 'covariance'  # of the structural term
    implicit: bool = False  # Sinkhorn: whether gradients take it for converged, which is cheaper for many steps
    backend: Backend = 'auto'  # of rot_pool: 'auto' is 'torch'


def solve(problem: ROTProblem, weights: StepWeights, solver: Solver) -> Tensor:
    """(B, D, N) log plan of mass one, -inf on masked samples, by the chosen solver."""
    if solver.name == 'sinkhorn':
        return sinkhorn(problem, weights, solver.num_inner, similarity=solver.similarity)
    if solver.name not in SOLVERS:
        raise ValueError(f'solver must be one of {", ".join(SOLVERS)}, got {solver.name!r}')
    regularizer = 'entropic' if solver.name == 'badmm-e' else 'quadratic'
    return badmm(problem, weights, regularizer=regularizer, coupled=solver.coupled, similarity=solver.similarity)


def rot_pool(features: Tensor, problem: ROTProblem, weights: StepWeights, solver: Solver) -> Tensor:
    """(B, D) pooled `features` (B, D, N), in their dtype: `pool(features, solve(problem, weights, solver))`.

    `problem.features` is what the plan sees, `features` what is averaged; hand over the same tensor where they are one.
    Masked samples may hold anything, even NaN.

    The solver's backend 'torch' runs an operator with an explicit backward that keeps nothing but its inputs;
    'triton' runs the kernels of one for GPUs, in float32; 'reference' is the formula above under autograd; 'auto' is
    'torch', on every device.
    """
    if solver.backend not in BACKENDS:
        raise ValueError(f'backend must be one of {", ".join(BACKENDS)}, got {solver.backend!r}')
    if solver.implicit and (solver.name != 'sinkhorn' or solver.backend == 'reference'):
        raise ValueError(f'implicit is for sinkhorn and by its operator, got {solver}')
    # ONNX knows no operator of ours: while a model is exported to it, the formula itself is what is written.
    exporting = torch.onnx.is_in_onnx_export()
    triton = solver.backend == 'triton' and not exporting
    if triton:
        check_triton(problem.features, weights, solver)
    if solver.backend == 'reference' or exporting:
        return pool(zero_masked(features, problem.mask), solve(problem, weights, solver))
    if features.shape != problem.features.shape:
        raise ValueError(
            'features must have the shape of the features of the problem, '
            f'got {tuple(features.shape)} and {tuple(problem.features.shape)}'
        )
    check_weights(weights, solver)
    averaged = None if features is problem.features else zero_masked(features, problem.mask)
    name, coupled, num_inner, similarity, implicit, _ = solver
    return explicit_pool(averaged, problem, weights, name, coupled, num_inner, similarity, implicit, triton)


def check_triton(x: Tensor, weights: StepWeights, solver: Solver) -> None:
    """Raise if the Triton kernels do not solve this, or cannot run on `x`."""
    if solver.coupled or solver.implicit or weights.structure is not None or weights.proximal is not None:
        raise ValueError(
            "backend 'triton' knows no coupled marginals, structural or proximal term and no implicit gradients; "
            "use backend 'auto'"
        )
    require_triton(x)


def check_weights(weights: StepWeights, solver: Solver) -> None:
    """Raise if a weight is missing that the solver's operator reads."""
    if solver.name == 'sinkhorn':
        require('sinkhorn', weights, 'smoothness', 'feature_penalty', 'sample_penalty')
    elif solver.coupled:
        require('coupled badmm', weights, 'smoothness', 'feature_penalty', 'sample_penalty', 'step')
    else:
        require('badmm', weights, 'smoothness', 'step')


def explicit_pool(
    features: Tensor | None,
    problem: ROTProblem,
    weights: StepWeights,
    name: str,
    coupled: bool,
    num_inner: int,
    similarity: str,
    implicit: bool,
    triton: bool = False,
) -> Tensor:
    """`rot_pool` by its operator. Can be scripted, unlike `rot_pool`.

    Args:
        features: (B, D, N) what is averaged; None where it is `problem.features`.
        problem: the batch of problems.
        weights: of the modules.
        name: the solver; this and the rest are the fields of `Solver`.
        coupled: see `Solver`.
        num_inner: see `Solver`.
        similarity: see `Solver`.
        implicit: see `Solver`.
        triton: whether the Triton operator does it.
    """
    x, log_p0, log_q0, mask = problem
    if mask is not None:
        log_q0 = log_q0.masked_fill(~mask.squeeze(1), float('-inf'))
    log_p0, log_q0 = log_p0.expand(x.shape[0], -1), log_q0.expand(x.shape[0], -1)
    if name == 'sinkhorn':
        pooled = sinkhorn_pool(features, x, log_p0, log_q0, weights, num_inner, implicit, similarity, triton)
    elif coupled:
        pooled = coupled_badmm_pool(features, x, log_p0, log_q0, weights, name == 'badmm-q', similarity)
    else:
        pooled = badmm_pool(features, x, log_p0, log_q0, weights, name == 'badmm-q', similarity, triton)
    return pooled
