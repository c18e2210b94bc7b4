"""Which solver, and the two front doors that every layer uses: the plan, and the pooled features."""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from rotp_vision.core.badmm import badmm
from rotp_vision.core.pool import pool
from rotp_vision.core.problem import ROTProblem, zero_masked
from rotp_vision.core.sinkhorn import sinkhorn
from rotp_vision.core.structure import Similarity
from rotp_vision.core.weights import StepWeights

SolverName = Literal['sinkhorn', 'badmm-e', 'badmm-q']
SOLVERS: tuple[SolverName, ...] = get_args(SolverName)


class Solver(NamedTuple):
    """Which algorithm solves the problems; how many modules it has is the length of the weights."""

    name: SolverName = 'badmm-e'
    coupled: bool = False  # Bregman ADMM: whether the marginal penalties act
    num_inner: int = 4  # Sinkhorn steps in a module
    similarity: Similarity = 'covariance'  # of the structural term


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

    `problem.features` is what the plan sees, `features` what is averaged; masked samples may hold anything, even NaN.
    """
    return pool(zero_masked(features, problem.mask), solve(problem, weights, solver))
