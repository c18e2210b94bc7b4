"""Which solver and which backend, and the front doors that every layer uses: the plan, and the pooled features."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from rotp_vision.core.badmm import badmm
from rotp_vision.core.pool import pool
from rotp_vision.core.problem import ROTProblem, normalize_mass
from rotp_vision.core.registered import SOLVERS, Formula, pool_in_chunks, transforms_active
from rotp_vision.core.sinkhorn import sinkhorn
from rotp_vision.core.structure import Similarity
from rotp_vision.core.weights import StepWeights, require, scaled_softplus

Backend = Literal['auto', 'torch', 'triton', 'reference']
BACKENDS: tuple[Backend, ...] = get_args(Backend)
# The environment variable that, where it is set, chooses the backend in place of every solver's own choice.
OVERRIDE = 'ROTP_BACKEND'


class Solver(NamedTuple):
    """Which algorithm solves the problems; how many modules it has is the length of the weights."""

    name: str = 'sinkhorn'  # one of SOLVERS
    coupled: bool = False  # Bregman ADMM: whether the marginal penalties act
    num_inner: int = 4  # Sinkhorn steps in a module
    similarity: Similarity = 'covariance'  # of the structural term
    backend: Backend = 'auto'  # of rot_pool, which says what 'auto' is


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
    pool: Callable[..., Tensor]  # (problem, weights, solver), and the gain if `takes_gain`
    # (maps, weights, solver, windows, view), and the gain, as `rot_pool_windows`; None where it has nothing for them.
    pool_windows: Callable[..., Tensor | None] | None = None
    takes_gain: bool = False  # whether the two multiply what they return with a gain, one number
    # Whether 'auto' may choose it for such features (sets, or maps with windows), weights, solver and view.
    trusted: Callable[[Tensor, StepWeights, Solver, str, Windows | None], bool] = lambda *problem: False
    # `scaled_softplus`, once it is trusted if the last argument says so; returns None where it does not apply.
    softplus: Callable[[Sequence[Tensor], Sequence[Tensor], bool], tuple[Tensor, ...] | None] | None = None
    reads_masked: bool = True  # whether it reads masked samples, which then have to be zero


_IMPLEMENTATIONS: dict[str, Implementation] = {}


def register_backend(name: Backend, implementation: Implementation) -> None:
    """Let the front doors choose `implementation` where a solver's backend is `name`."""
    _IMPLEMENTATIONS[name] = implementation


def registered(name: Backend) -> Implementation:
    """The implementation of that name."""
    return _IMPLEMENTATIONS[name]


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


def rot_pool(problem: ROTProblem, weights: StepWeights, solver: Solver, gain: Tensor | None = None) -> Tensor:
    """(B, D) pooled features of a problem, in their dtype: `gain · pool(problem.features, solve(problem, weights))`.

    The solver's backend 'torch' runs an operator with an explicit backward that keeps nothing but its inputs;
    'triton' runs the kernels of one for GPUs, in float32; 'reference' is the formula above under autograd. 'auto' is
    'torch', but on CUDA it is 'triton' wherever that applies and has passed a check at its first use
    (`rotp_vision.core.triton.check`), and else, while a model is compiled there, 'reference', which a compiler fuses.
    `torch.export` sees 'reference' wherever it runs.
    The environment variable ROTP_BACKEND overrides the solver's choice.

    Args:
        problem: the batch of problems.
        weights: of the modules.
        solver: the algorithm and its backend.
        gain: () or (D,) a factor on the result; None for one.
    """
    chosen = _implementation(problem.features, weights, solver, problem.view)
    return _scaled(chosen.pool, chosen, (problem, weights, solver), gain)


def rot_pool_windows(
    maps: Tensor,
    weights: StepWeights,
    solver: Solver,
    windows: Windows,
    view: str = 'identity',
    gain: Tensor | None = None,
) -> Tensor | None:
    """(B, C, H', W') every window of `maps` (B, C, H, W) pooled with uniform priors, in their dtype and memory format.

    A window is a set of its pixels inside the map with all channels as features, and is pooled as `rot_pool` does.
    Every window has a pixel inside the map. None where the backend has no way to do it but to cut the windows out,
    which is then for the caller to do.
    """
    chosen = _implementation(maps, weights, solver, view, windows)
    if chosen.pool_windows is None:
        return None
    shaped = gain.view(-1, 1, 1) if gain is not None and gain.dim() else gain
    return _scaled(chosen.pool_windows, chosen, (maps, weights, solver, windows, view), shaped)


def reads_masked(features: Tensor, weights: StepWeights, solver: Solver, view: str) -> bool:
    """Whether `rot_pool` reads masked samples of such features (B, D, N), which then have to be zero."""
    return _implementation(features, weights, solver, view).reads_masked


def _scaled(pool: Callable[..., Any], chosen: Implementation, inputs: tuple, gain: Tensor | None) -> Any:
    """What `pool` returns, times the gain, which a backend takes itself where it can."""
    if chosen.takes_gain and (gain is None or gain.dim() == 0):
        return pool(*inputs, gain)
    pooled = pool(*inputs, None) if chosen.takes_gain else pool(*inputs)
    return pooled if gain is None or pooled is None else pooled * gain.to(pooled.dtype)


def positive_weights(betas: Sequence[Tensor], starts: Sequence[Tensor], solver: Solver) -> tuple[Tensor, ...]:
    """`scaled_softplus` of all the weights of a layer: one launch where the solver's backend is or means 'triton'."""
    backend, fused = backend_of(solver), _IMPLEMENTATIONS['triton'].softplus
    if fused is not None and (backend == 'triton' or (backend == 'auto' and on_gpu(betas[0]))):
        weights = fused(betas, starts, backend == 'auto')
        if weights is not None:
            return weights
    return scaled_softplus(betas, starts)


def backend_of(solver: Solver) -> Backend:
    """The backend that a solver asks for, unless the environment says otherwise."""
    name = os.environ.get(OVERRIDE) or solver.backend
    if name not in BACKENDS:
        raise ValueError(f'{_source(solver)} must be one of {", ".join(BACKENDS)}, got {name!r}')
    return cast(Backend, name)


def _source(solver: Solver) -> str:
    return f'the environment variable {OVERRIDE}' if os.environ.get(OVERRIDE) else 'backend'


def _implementation(
    features: Tensor, weights: StepWeights, solver: Solver, view: str, windows: Windows | None = None
) -> Implementation:
    """The backend that the solver chooses, once it is certain that it can run."""
    backend = backend_of(solver)
    if _formula(solver).weights is not None:
        if backend == 'triton':
            raise ValueError(f"backend 'triton' has no kernel of solver {solver.name!r}; use backend 'auto'")
        return _IMPLEMENTATIONS['reference' if backend == 'reference' else 'registered']
    if solver.num_inner < 1:
        raise ValueError(f'num_inner must be at least 1, got {solver.num_inner}')
    if solver.name == 'sinkhorn':
        require('sinkhorn', weights, 'smoothness', 'feature_penalty', 'sample_penalty')
    elif solver.coupled:
        require('coupled badmm', weights, 'smoothness', 'feature_penalty', 'sample_penalty', 'step')
    else:
        require('badmm', weights, 'smoothness', 'step')
    # ONNX knows no operator of ours, and torch.func has no derivatives of them: both see the formula itself.
    if torch.onnx.is_in_onnx_export() or transforms_active():
        return _IMPLEMENTATIONS['reference']
    if backend == 'auto':
        backend = _automatic(features, weights, solver, view, windows)
    chosen = _IMPLEMENTATIONS[backend]
    reason = chosen.refuses(weights, solver) or chosen.lacks(features)
    if reason is not None:
        by = f' (from {_source(solver)})' if backend != solver.backend else ''
        raise ValueError(f"backend '{backend}'{by} {reason}; use backend 'auto' or 'torch'")
    return chosen


def _automatic(
    features: Tensor, weights: StepWeights, solver: Solver, view: str, windows: Windows | None
) -> Literal['torch', 'triton', 'reference']:
    """What 'auto' is."""
    if torch.compiler.is_exporting():
        return 'reference'  # so that the program runs where our operators do not exist
    if not on_gpu(features):
        return 'torch'
    fast = _IMPLEMENTATIONS['triton']
    able = fast.refuses(weights, solver) is None and fast.lacks(features) is None
    if able and fast.trusted(features, weights, solver, view, windows):
        return 'triton'
    # To a compiler an operator is one opaque node, while what it sees it fuses.
    return 'reference' if torch.compiler.is_compiling() else 'torch'


def on_gpu(features: Tensor) -> bool:
    """Whether these are features for which 'auto' looks for GPU kernels."""
    return features.is_cuda


def _pool_by_formula(problem: ROTProblem, weights: StepWeights, solver: Solver) -> Tensor:
    return pool(problem.features, solve(problem, weights, solver))


register_backend('reference', Implementation(lambda weights, solver: None, lambda features: None, _pool_by_formula))
# For solvers that are not of this package, whatever else they ask for.
_IMPLEMENTATIONS['registered'] = Implementation(lambda weights, solver: None, lambda features: None, pool_in_chunks)
