"""Solvers that are registered by name: their formula in, a pooling with bounded memory out."""

import keyword
from collections import namedtuple
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rotp_vision.core.pool import pool
from rotp_vision.core.problem import ROTProblem, hide_masked

# Entries of the plans that are computed at a time: backward keeps what autograd saves for so many, and no more.
CHUNK_ELEMENTS = {'cpu': 2**20}
CHUNK_ELEMENTS_ELSEWHERE = 2**23
_TAKEN = ('gain', 'norm_power', 'num_modules', 'solver', 'training')  # names that layers use


class Formula(NamedTuple):
    """A solver by its formula."""

    solve: Callable[..., Tensor]  # (problem, weights, solver) -> (B, D, N) log plan
    # Its weights and their starting values, and how they are handed to it; None for the solvers of this package, whose
    # weights are `StepWeights` and depend on their options.
    weights: Mapping[str, float] | None = None
    weights_type: Callable[..., Any] | None = None
    num_modules: int = 1  # unless the options say otherwise


SOLVERS: dict[str, Formula] = {}


def register_solver(
    name: str,
    function: Callable[[ROTProblem, Any], Tensor],
    weights: Mapping[str, float],
    *,
    num_modules: int = 1,
) -> None:
    """Make a formula of your own a solver, for layers, `convert`, YAML and JSON options, reports and saved models.

    The layers learn its weights, see a view of the features, add priors and a gain, and mask, as with any solver. For
    backward nothing is kept but the inputs: it runs the formula again, some sets at a time.

    Args:
        name: by which options choose it. A name may be registered again, which replaces the formula.
        function: `function(problem, weights)` returns the log plan (B, D, N), up to a constant per set and whatever it
            likes on masked samples. `problem.seen()` (B, D, N) is what the plan sees of the features, zero on masked
            samples; `problem.log_feature_prior` (B or 1, D), `problem.log_sample_prior` (B or 1, N) and `problem.mask`
            (B, 1, N) or None are the rest of the data. `weights` has an attribute for each weight, (T,) for T modules.
            It runs in float32 or float64, whatever autocast says, and must not branch on values.
        weights: name and positive starting value of each weight. The layers learn them as positive numbers. A weight
            called 'smoothness' or 'step' is what `calibrate` takes for the temperature.
        num_modules: T, where the options do not say `num_modules`.

    Example:
        Softmax pooling with a learned temperature:

        >>> import torch
        >>> from rotp_vision import GlobalROTPool2d, register_solver
        >>> def softmax(problem, weights):
        ...     return problem.seen() / weights.temperature
        >>> register_solver('softmax', softmax, {'temperature': 50.0})
        >>> pool = GlobalROTPool2d({'solver': 'softmax', 'weights': {'temperature': 2.0}})
        >>> pool(torch.rand(2, 8, 7, 7)).shape, sorted(pool.named_weights())
        (torch.Size([2, 8]), ['gain', 'temperature'])
    """
    known = SOLVERS.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or not name or name == 'paper' or (known is not None and known.weights is None):
        raise ValueError(f'name must be a text that no solver of this package has, got {name!r}')
    if not callable(function):
        raise ValueError(f'function must take a problem and weights and return a log plan, got {function!r}')
    for weight, value in weights.items():
        good = isinstance(weight, str) and weight.isidentifier() and not keyword.iskeyword(weight)
        if not good or weight.startswith('_') or weight in _TAKEN or hasattr(torch.nn.Module, weight):
            raise ValueError(f'a weight must have a name of its own, such as temperature, got {weight!r}')
        if not isinstance(value, Real) or isinstance(value, bool) or not 0 < value < float('inf'):
            raise ValueError(f'the starting value of {weight} must be a positive number, got {value!r}')
    if num_modules < 1:
        raise ValueError(f'num_modules must be at least 1, got {num_modules}')

    def solve(problem: ROTProblem, values: Any, solver: Any = None) -> Tensor:
        device = problem.features.device.type
        with torch.autocast('cpu' if device == 'meta' else device, enabled=False):
            log_plan = function(problem, values)
        if not isinstance(log_plan, Tensor) or log_plan.shape != problem.features.shape:
            got = tuple(log_plan.shape) if isinstance(log_plan, Tensor) else type(log_plan).__name__
            raise ValueError(
                f'solver {name!r} must return a log plan of shape {tuple(problem.features.shape)}, got {got}'
            )
        return hide_masked(log_plan, problem.mask)

    starts = {weight: float(value) for weight, value in weights.items()}
    SOLVERS[name] = Formula(solve, starts, namedtuple('Weights', starts), num_modules)


def pool_in_chunks(problem: ROTProblem, weights: Any, solver: Any) -> Tensor:
    """(B, D) pooled features by a registered solver; backward runs the formula again, some sets at a time."""
    formula = SOLVERS[solver.name]
    features, log_p0, log_q0, mask, view = problem

    def pooled(x: Tensor, log_p0: Tensor, log_q0: Tensor, mask: Tensor | None) -> Tensor:
        return pool(x, formula.solve(ROTProblem(x, log_p0, log_q0, mask, view), weights))

    # A traced graph has one chunk, as the number of chunks must not depend on the batch size.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or transforms_active():  # pyright: ignore
        return pooled(features, log_p0, log_q0, mask)
    elements = CHUNK_ELEMENTS.get(features.device.type, CHUNK_ELEMENTS_ELSEWHERE)
    num_sets = max(1, elements // max(1, features.shape[1] * features.shape[2]))
    parts = []
    for first in range(0, max(1, features.shape[0]), num_sets):
        sets = slice(first, first + num_sets)
        part = [x if x is None or x.shape[0] == 1 else x[sets] for x in (features, log_p0, log_q0, mask)]
        if torch.is_grad_enabled():
            parts.append(checkpoint(pooled, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(pooled(*part))  # pyright: ignore[reportArgumentType]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def transforms_active() -> bool:
    """Whether a transform of `torch.func` runs: it differentiates formulas, but neither operators nor saved tensors."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
