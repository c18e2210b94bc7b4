"""Which solver and which backend, and the front doors that every layer uses: the plan, and the pooled features."""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rotp_vision.core.badmm import badmm
from rotp_vision.core.pool import pool
from rotp_vision.core.problem import ROTProblem, normalize_mass
from rotp_vision.core.registered import SOLVERS, Formula, pool_in_chunks, transforms_active
from rotp_vision.core.sinkhorn import sinkhorn
from rotp_vision.core.structure import Similarity
from rotp_vision.core.weights import StepWeights, require

Backend = Literal['auto', 'torch', 'triton', 'reference']
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class Solver(NamedTuple):
    """Which algorithm solves the problems; how many modules it has is the length of the weights."""

    name: str = 'badmm-e'  # one of SOLVERS
    coupled: bool = False  # Bregman ADMM: whether the marginal penalties act
    num_inner: int = 4  # Sinkhorn steps in a module
    similarity: Similarity = 'covariance'  # of the structural term
    implicit: bool = False  # Sinkhorn: whether gradients take it for converged, which is cheaper for many steps
    backend: Backend = 'auto'  # of rot_pool: 'auto' is 'torch'


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
    height: int  # how many windows lie above each other: H'
    width: int  # and beside each other: W'


class Implementation(NamedTuple):
    """A backend of the front doors below. A reason is a clause that follows its name, None where there is none."""

    refuses: Callable[[StepWeights, Solver], str | None]  # the reason why it cannot solve this
    lacks: Callable[[Tensor], str | None]  # the reason why it cannot run on such features
    pool: Callable[[ROTProblem, StepWeights, Solver], Tensor]
    # As `rot_pool_windows`; None where it has nothing for windows.
    pool_windows: Callable[[Tensor, StepWeights, Solver, Windows, str], Tensor | None] | None = None


_IMPLEMENTATIONS: dict[str, Implementation] = {}


def register_backend(name: Backend, implementation: Implementation) -> None:
    """Let the front doors choose `implementation` where a solver's backend is `name`."""
    _IMPLEMENTATIONS[name] = implementation


def backend_lacks(name: Backend, features: Tensor) -> str | None:
    """The reason why a backend cannot run on such features, as a clause that follows its name; None where it can."""
    return _IMPLEMENTATIONS[name].lacks(features)


def solve(problem: ROTProblem, weights: StepWeights, solver: Solver) -> Tensor:
    """(B, D, N) log plan of mass one, -inf on masked samples, by the chosen solver."""
    formula = _formula(solver)
    log_plan = formula.solve(problem, weights, solver)
    return log_plan if formula.weights is None else normalize_mass(log_plan)


def _formula(solver: Solver) -> Formula:
    if solver.name not in SOLVERS:
        raise ValueError(f'solver must be one of {", ".join(SOLVERS)}, got {solver.name!r}')
    return SOLVERS[solver.name]


def _sinkhorn(problem: ROTProblem, weights: StepWeights, solver: Solver) -> Tensor:
    return sinkhorn(problem, weights, solver.num_inner, similarity=solver.similarity)


def _badmm(problem: ROTProblem, weights: StepWeights, solver: Solver) -> Tensor:
    regularizer = 'entropic' if solver.name == 'badmm-e' else 'quadratic'
    return badmm(problem, weights, regularizer=regularizer, coupled=solver.coupled, similarity=solver.similarity)


SOLVERS |= {'sinkhorn': Formula(_sinkhorn), 'badmm-e': Formula(_badmm), 'badmm-q': Formula(_badmm)}


def rot_pool(problem: ROTProblem, weights: StepWeights, solver: Solver) -> Tensor:
    """(B, D) pooled features of a problem, in their dtype: `pool(problem.features, solve(problem, weights, solver))`.

    The solver's backend 'torch' runs an operator with an explicit backward that keeps nothing but its inputs;
    'triton' runs the kernels of one for GPUs, in float32; 'reference' is the formula above under autograd; 'auto' is
    'torch', on every device.
    """
    return _implementation(problem.features, weights, solver).pool(problem, weights, solver)


def rot_pool_windows(
    maps: Tensor, weights: StepWeights, solver: Solver, windows: Windows, view: str = 'identity'
) -> Tensor | None:
    """(B, C, H', W') every window of `maps` (B, C, H, W) pooled with uniform priors, in their dtype and memory format.

    A window is a set of its pixels inside the map with all channels as features, and is pooled as `rot_pool` does.
    Every window has a pixel inside the map. None where the backend has no way to do it but to cut the windows out,
    which is then for the caller to do.
    """
    pool_windows = _implementation(maps, weights, solver).pool_windows
    return None if pool_windows is None else pool_windows(maps, weights, solver, windows, view)


def _implementation(features: Tensor, weights: StepWeights, solver: Solver) -> Implementation:
    """The backend that the solver chooses, once it is certain that it can run."""
    if solver.backend not in BACKENDS:
        raise ValueError(f'backend must be one of {", ".join(BACKENDS)}, got {solver.backend!r}')
    if _formula(solver).weights is not None:
        if solver.backend == 'triton':
            raise ValueError(f"backend 'triton' has no kernel of solver {solver.name!r}; use backend 'auto'")
        return _IMPLEMENTATIONS['reference' if solver.backend == 'reference' else 'registered']
    if solver.implicit and solver.name != 'sinkhorn':
        raise ValueError(f'implicit is for sinkhorn, got {solver}')
    if solver.num_inner < 1:
        raise ValueError(f'num_inner must be at least 1, got {solver.num_inner}')
    if solver.name == 'sinkhorn':
        require('sinkhorn', weights, 'smoothness', 'feature_penalty', 'sample_penalty')
    elif solver.coupled:
        require('coupled badmm', weights, 'smoothness', 'feature_penalty', 'sample_penalty', 'step')
    else:
        require('badmm', weights, 'smoothness', 'step')
    # ONNX knows no operator of ours, and torch.func has no derivatives of them: both see the formula itself.
    if torch.onnx.is_in_onnx_export() or (transforms_active() and not solver.implicit):
        return _IMPLEMENTATIONS['reference']
    chosen = _IMPLEMENTATIONS['torch' if solver.backend == 'auto' else solver.backend]
    reason = chosen.refuses(weights, solver) or chosen.lacks(features)
    if reason is not None:
        raise ValueError(f"backend '{solver.backend}' {reason}; use backend 'auto' or 'torch'")
    return chosen


def _pool_by_formula(problem: ROTProblem, weights: StepWeights, solver: Solver) -> Tensor:
    return pool(problem.features, solve(problem, weights, solver))


def _refuses(weights: StepWeights, solver: Solver) -> str | None:
    return 'has no implicit gradients' if solver.implicit else None


register_backend('reference', Implementation(_refuses, lambda features: None, _pool_by_formula))
# For solvers that are not of this package, whatever else they ask for.
_IMPLEMENTATIONS['registered'] = Implementation(lambda weights, solver: None, lambda features: None, pool_in_chunks)
