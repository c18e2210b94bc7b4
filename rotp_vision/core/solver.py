"""Solvers by name, and the front door that every layer uses."""

import keyword
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from numbers import Real
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rotp_vision.core.chunks import device_type, set_chunks
from rotp_vision.core.problem import ROTProblem, hide_masked, log_normalize, normalize_mass

Start = Literal['mean', 'max', 'paper']
Backend = Literal['auto', 'reference']
Weights = Mapping[str, Tensor]  # positive, by name: (1,), or a number for each of the solver's sets of weights

# softplus(0), where the published code starts every weight.
PAPER_START = 0.6931471805599453
# α3 over the temperature next to the mean: the plan's samples stay near their prior, whatever the temperature.
PENALTY = 3.0
_RESERVED = ('train', 'paper', 'embedding', 'avg', 'max', 'avgmax', 'gem')  # names of other poolings, in the layers
# The temperature at which pooling is close to the maximum, for values whose spread is about one.
MAX_START = 0.003


class Solver(Protocol):
    """An algorithm with its options: a frozen object that tells layers, options and reports all they need to know."""

    @property
    def name(self) -> str: ...

    @property
    def num_weight_sets(self) -> int:
        """How many sets of weights it can have."""
        ...

    def starts(self, start: Start, temperature: float) -> dict[str, float]:
        """The weights that it reads and their starting values; 'mean' starts at `temperature`, next to the mean."""
        ...

    def log_plan(self, problem: ROTProblem, weights: Weights) -> Tensor:
        """(B, D, N) log plan up to a constant per set, -inf on masked samples."""
        ...

    def operator(self, problem: ROTProblem, weights: Weights) -> Tensor | None:
        """(B, D) pooled features by an operator of its own; None where the formula is to be used."""
        ...

    def refusal(self, problem: ROTProblem, starts: Mapping[str, float | list[float]]) -> str | None:
        """Why the operator cannot start there where values are not read, as text, or None."""
        ...


class FormulaOnly:
    """What a solver without an operator inherits."""

    def operator(self, problem: ROTProblem, weights: Weights) -> None:
        return None

    def refusal(self, problem: ROTProblem, starts: Mapping[str, float | list[float]]) -> None:
        return None


SOLVERS: dict[str, Callable[..., Solver]] = {}


def make_solver(name: str, **options: Any) -> Solver:
    """The solver of that name with the options that are given; those that it does not take are refused."""
    if not isinstance(name, str) or name not in SOLVERS:
        raise ValueError(
            f'solver must be one of {", ".join(SOLVERS)}, got {name!r}; register_solver makes one of your own known'
        )
    known = signature(SOLVERS[name]).parameters
    for option in options:
        if option not in known:
            raise ValueError(
                f'{option} has no effect with solver={name!r}, which takes {", ".join(known)}; leave it out'
            )
    return SOLVERS[name](**options)


def rot_pool(
    problem: ROTProblem,
    weights: Weights,
    solver: Solver,
    gain: Tensor | None = None,
    *,
    backend: Backend = 'auto',
    recompute: bool = True,
) -> Tensor:
    """(B, D) pooled features of a problem, in their dtype: `gain · average(problem.features, solve(problem, …))`.

    Args:
        problem: the batch of problems.
        weights: of the solver, each (1,) or (T,).
        solver: the algorithm and its options.
        gain: (1,) or (D,) a factor on the result; None for one.
        backend: 'reference' is the formula under autograd, which can be differentiated twice. 'auto' is the solver's
            operator, or its formula computed again in backward, some images at a time, so that little is kept.
            Compilers, exporters, traces and `torch.func` always see the formula.
        recompute: whether 'auto' may compute the formula again; False if the caller does that.
    """
    if backend not in get_args(Backend):
        raise ValueError(f'backend must be one of {", ".join(get_args(Backend))}, got {backend!r}')
    check_weights(solver, weights)
    pooled = None
    if backend == 'auto' and not sees_formula():
        pooled = solver.operator(problem, weights)
        if pooled is None and recompute:
            pooled = _pool_in_chunks(problem, weights, solver)
    if pooled is None:
        pooled = average(problem.features, _log_plan(problem, weights, solver))
    return pooled if gain is None else pooled * gain.to(pooled.dtype)


def solve(problem: ROTProblem, weights: Weights, solver: Solver) -> Tensor:
    """(B, D, N) log plan of mass one, -inf on masked samples, by the solver's formula."""
    check_weights(solver, weights)
    return normalize_mass(_log_plan(problem, weights, solver))


def _log_plan(problem: ROTProblem, weights: Weights, solver: Solver) -> Tensor:
    with torch.autocast(device_type(problem.features), enabled=False):
        return solver.log_plan(problem.with_norm_prior(), weights)


def average(features: Tensor, log_plan: Tensor) -> Tensor:
    """Each feature's mean under its row of the plan (paper, eq. "uotp").

        f_d = Σ_n x_dn P_dn / Σ_n P_dn = Σ_n x_dn softmax_n(log P_dn)

    so that neither the mass of the plan nor that of a row matters.

    Args:
        features: (B, D, N) X, any floating dtype; finite on masked samples.
        log_plan: (B, D, N) log P up to a constant per row, -inf on masked samples.

    Returns:
        (B, D) in the dtype of `features`.
    """
    if features.shape != log_plan.shape:
        raise ValueError(
            f'features and log_plan must have the same shape, got {tuple(features.shape)} and {tuple(log_plan.shape)}'
        )
    return (features.to(log_plan.dtype) * log_normalize(log_plan, 2).exp()).sum(2).to(features.dtype)


def _pool_in_chunks(problem: ROTProblem, weights: Weights, solver: Solver) -> Tensor:
    """`average` under the solver's plan; backward computes the formula again, some images at a time."""
    features, log_p0, log_q0, mask, feature_scale, power, _ = problem

    def pooled(x: Tensor, log_p0: Tensor, log_q0: Tensor, mask: Tensor | None) -> Tensor:
        return average(x, _log_plan(ROTProblem(x, log_p0, log_q0, mask, feature_scale, power), weights, solver))

    parts = []
    for sets in set_chunks(features, 'formula'):
        part = [x if x is None or x.shape[0] == 1 else x[sets] for x in (features, log_p0, log_q0, mask)]
        if torch.is_grad_enabled():
            parts.append(checkpoint(pooled, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(pooled(*part))  # pyright: ignore[reportArgumentType]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sees_formula() -> bool:
    """Whether plain operations are wanted: by a compiler, an exporter, a trace or a transform of `torch.func`."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return True
    if torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
        return True
    return torch._C._are_functorch_transforms_active()


def check_weights(solver: Solver, weights: Weights) -> None:
    """Raise unless the weights that the solver reads are given in the right shapes."""
    missing = sorted(set(solver.starts('mean', 1.0)) - set(weights))
    if missing:
        raise ValueError(f'solver {solver.name!r} needs the weight(s) {", ".join(missing)}, got {", ".join(weights)}')
    for name, value in weights.items():
        if value.shape not in ((1,), (solver.num_weight_sets,)):
            raise ValueError(
                f'weight {name} of solver {solver.name!r} must have shape (1,) or ({solver.num_weight_sets},), '
                f'got {tuple(value.shape)}'
            )


def split_weights(weights: Weights, num_weight_sets: int) -> list[dict[str, Tensor]]:
    """The weights of each iteration or outer step, as scalars."""
    columns = {name: value.expand(num_weight_sets).unbind() for name, value in weights.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(num_weight_sets)]


@dataclass(frozen=True)
class _Formula(FormulaOnly):
    """A solver made by `register_solver`."""

    name: str
    function: Callable[[ROTProblem, Weights], Tensor]
    declared: Mapping[str, float]
    num_iters: int

    @property
    def num_weight_sets(self) -> int:
        return self.num_iters

    def starts(self, start: Start, temperature: float) -> dict[str, float]:
        if start != 'mean':
            raise ValueError(f'solver {self.name!r} starts where it was registered to, got start={start!r}')
        return dict(self.declared)

    def log_plan(self, problem: ROTProblem, weights: Weights) -> Tensor:
        log_plan = self.function(problem, {name: value.expand(self.num_iters) for name, value in weights.items()})
        if not isinstance(log_plan, Tensor) or log_plan.shape != problem.features.shape:
            got = tuple(log_plan.shape) if isinstance(log_plan, Tensor) else type(log_plan).__name__
            raise ValueError(
                f'solver {self.name!r} must return a log plan of shape {tuple(problem.features.shape)}, got {got}'
            )
        return hide_masked(log_plan, problem.mask)


def register_solver(
    name: str,
    function: Callable[[ROTProblem, Weights], Tensor],
    weights: Mapping[str, float],
    *,
    num_iters: int = 1,
) -> None:
    """Make a formula of your own a solver, for layers, `convert`, YAML and JSON options, reports and saved models.

    The layers learn its weights, scale the features, add priors and a gain, and mask, as with any solver. Backward
    computes the formula again, some images at a time, so that only the inputs are kept.

    Args:
        name: by which options choose it. A name may be registered again, which replaces the formula.
        function: `function(problem, weights)` returns the log plan (B, D, N), up to a constant per set; its values on
            masked samples do not matter. `problem.scaled_features()` (B, D, N) is what the plan is computed from, zero
            on masked samples; `problem.log_feature_prior` (B or 1, D), `problem.log_sample_prior` (B or 1, N) and
            `problem.mask` (B, 1, N) or None are the rest of the data. `weights['name']` is a tensor (K,) for K
            iterations. It runs in float32 or float64, whatever autocast says, and must not branch on values.
        weights: name and positive starting value of each weight. The layers learn them as positive numbers. A weight
            called 'smoothness' or 'step' is what `calibrate` takes for the temperature.
        num_iters: K, where the options do not say `num_iters`.

    Example:
        Softmax pooling with a learned temperature:

        >>> import torch
        >>> from rotp_vision import GlobalROTPool2d, register_solver
        >>> def softmax(problem, weights):
        ...     return problem.scaled_features() / weights['temperature']
        >>> register_solver('softmax', softmax, {'temperature': 50.0})
        >>> pool = GlobalROTPool2d({'solver': 'softmax', 'weights': {'temperature': 2.0}})
        >>> pool(torch.rand(2, 8, 7, 7)).shape, sorted(pool.named_weights())
        (torch.Size([2, 8]), ['gain', 'norm_power', 'temperature'])
    """
    if not isinstance(name, str) or not name or name in _RESERVED or (name in SOLVERS and name not in _REGISTERED):
        raise ValueError(f'name must be a string not used by a built-in solver, got {name!r}')
    if not callable(function):
        raise ValueError(f'function must take a problem and weights and return a log plan, got {function!r}')
    for weight, value in weights.items():
        good = isinstance(weight, str) and weight.isidentifier() and not keyword.iskeyword(weight)
        if not good or weight.startswith('_') or weight in _TAKEN or hasattr(torch.nn.ModuleDict, weight):
            raise ValueError(f'a weight must have a name of its own, such as temperature, got {weight!r}')
        if not isinstance(value, Real) or isinstance(value, bool) or not 0 < value < float('inf'):
            raise ValueError(f'the starting value of {weight} must be a positive number, got {value!r}')
    if num_iters < 1:
        raise ValueError(f'num_iters must be at least 1, got {num_iters}')
    declared, default = {weight: float(value) for weight, value in weights.items()}, num_iters

    def make(num_iters: int = default) -> Solver:
        return _Formula(name, function, declared, num_iters)

    SOLVERS[name] = make
    _REGISTERED.add(name)


_REGISTERED: set[str] = set()
_TAKEN = ('gain', 'norm_power', 'num_iters', 'solver', 'structure', 'training')  # names that layers use
