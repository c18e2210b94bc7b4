"""Options of a pooling layer: one frozen object for layers, models, surgery, YAML and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch

from rotp_vision.core import BACKENDS, SOLVERS, Backend, Similarity, Solver, View

Start = Literal['mean', 'max', 'paper']
Gain = Literal['off', 'scalar', 'channel']
Prior = Literal['uniform', 'norm', 'attention']
Learn = Literal['per-module', 'shared', 'fixed']

# softplus(0), where the published code starts every weight.
PAPER_START = 0.6931471805599453
# Temperatures at which pooling is close to average pooling: large against the spread of the view. A raw map of a
# trained network reaches a few hundred, x / rms at most sqrt(N), and log x spans about ten.
MEAN_START: dict[View, float] = {'identity': 1000.0, 'rms': 50.0, 'log': 100.0}
# α3 over the temperature: the plan's samples stay near their prior, whatever the temperature.
PENALTY = 3.0
# The temperature at which pooling is close to the maximum, for values whose spread is about one.
MAX_START = 0.003
FLOAT32 = torch.finfo(torch.float32)
_WEIGHTS = ('smoothness', 'feature_penalty', 'sample_penalty', 'step', 'proximal')


@dataclass(frozen=True)
class PoolOptions:
    """Options of an ROTP layer. The defaults are the recommended pooling, for layers, models and conversion alike.

    `PoolOptions.paper()` is the published layer. A weight is given by its positive initial value; None leaves that to
    `start`. The objective is in docs/options.md.

    Attributes:
        solver: 'sinkhorn', 'badmm-e' (Bregman ADMM, entropic smoothness), 'badmm-q' (quadratic), or the name of one
            that you registered, see `register_solver`.
        num_modules: T; None means 4, or 1 for Sinkhorn without structural term, which needs no outer loop.
        num_inner: K, Sinkhorn steps in a module.
        coupled: Bregman ADMM only: whether the marginal penalties act (as published they do not).
        start: 'mean' starts next to average pooling, 'max' next to max pooling (as near as the solver's marginals
            allow: 'badmm-q' holds its samples to q0), 'paper' starts every weight at softplus(0).
        learn: weights 'per-module', 'shared' over modules, or 'fixed'.
        structure: α0, weight of the structural term; 0 leaves it out.
        smoothness: α1.
        feature_penalty: α2.
        sample_penalty: α3.
        step: ρ of Bregman ADMM.
        proximal: τ of Sinkhorn's outer loop.
        weights: of a registered solver, starting values of its weights that have no option above.
        similarity: of the structural term, 'covariance' or 'cosine'.
        prior: 'uniform'; 'norm': q0_n ∝ ‖x_n‖^β over the features that are averaged, β learned from 0; or
            'attention': q0 = softmax(wᵀ tanh(V X)), p0 = softmax(U X 1).
        prior_width: rows of V, and the inner width of U = U2 U1; None means as many as there are features.
        view: what the plan is computed from: 'identity' (the paper), 'rms' (each feature over its root mean square
            across the samples) or 'log' (log(max(x, 0) + 0.001)). The plan always averages the features themselves.
        gain: learned positive factor on the output: 'off', 'scalar' or 'channel'.
        backend: the implementation; 'auto' is 'triton' on CUDA where that applies and has passed a check at first use,
            and else the operators of 'torch'.

    Example:
        >>> from rotp_vision import PoolOptions
        >>> PoolOptions(prior='norm').to_dict()
        {'prior': 'norm'}
        >>> PoolOptions.paper().to_dict()
        {'solver': 'badmm-e', 'start': 'paper', 'view': 'identity', 'gain': 'off'}
    """

    solver: str = 'sinkhorn'
    num_modules: int | None = None
    num_inner: int = 4
    coupled: bool = False
    start: Start = 'mean'
    learn: Learn = 'per-module'
    structure: float = 0.0
    smoothness: float | Sequence[float] | None = None
    feature_penalty: float | Sequence[float] | None = None
    sample_penalty: float | Sequence[float] | None = None
    step: float | Sequence[float] | None = None
    proximal: float | Sequence[float] | None = None
    weights: Mapping[str, float | Sequence[float]] | None = None
    similarity: Similarity = 'covariance'
    prior: Prior = 'uniform'
    prior_width: int | None = None
    view: View = 'rms'
    gain: Gain = 'scalar'
    backend: Backend = 'auto'

    def __post_init__(self):
        choices = {
            'solver': SOLVERS,
            'start': get_args(Start),
            'learn': get_args(Learn),
            'similarity': get_args(Similarity),
            'prior': get_args(Prior),
            'view': get_args(View),
            'gain': get_args(Gain),
            'backend': BACKENDS,
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                hint = '; register_solver makes one of your own known' if name == 'solver' else ''
                raise ValueError(f'{name} must be one of {", ".join(allowed)}, got {value!r}{hint}')
        for name in ('num_modules', 'num_inner', 'prior_width'):
            value = getattr(self, name)
            if value is not None or name == 'num_inner':
                self._set(name, positive_integer(name, value))
        if not isinstance(self.coupled, bool):
            raise ValueError(f'coupled must be true or false, got {self.coupled!r}')
        if not _is_number(self.structure) or not self.structure >= 0:
            raise ValueError(f'structure must be a number that is positive, or zero for none, got {self.structure!r}')
        self._set('structure', _float('structure', self.structure))
        for name in _WEIGHTS:
            value = getattr(self, name)
            if value is not None:
                self._set(name, _numbers(name, value))
        if self.coupled and self.solver not in ('badmm-e', 'badmm-q'):
            raise ValueError("coupled is an option of 'badmm-e' and 'badmm-q'; 'sinkhorn' always couples its marginals")
        if self.coupled and self.modules < 3:
            raise ValueError(f'coupled needs num_modules of at least 3 for its penalties to act, got {self.modules}')
        declared = self._declared
        if declared is not None and self.start != 'mean':
            raise ValueError(f'solver {self.solver!r} starts where it was registered to, got start={self.start!r}')
        if self.weights is not None:
            self._set('weights', {name: _numbers(name, value) for name, value in self.weights.items()} or None)
        own = set() if declared is None else set(declared) - set(_WEIGHTS)
        foreign = sorted(set(self.weights or ()) - own)
        if foreign:
            has = f'{self.solver!r} has {", ".join(sorted(own)) or "none"} there'
            raise ValueError(f'weights takes those that a registered solver declares; {has}, got {", ".join(foreign)}')
        starting = self.starting_weights()
        unread = [name for name in _WEIGHTS if getattr(self, name) is not None and name not in starting]
        if self.solver != 'sinkhorn' and self.num_inner != PoolOptions.num_inner:
            unread.append('num_inner')
        if declared is not None and self.structure:
            unread.append('structure')
        if unread:
            raise ValueError(
                f'{", ".join(unread)} has no effect with solver={self.solver!r}, coupled={self.coupled}, '
                f'{self.modules} module(s); leave it out, or choose a solver that reads it'
            )
        if self.structure == 0 and self.similarity != PoolOptions.similarity:
            raise ValueError('similarity has no effect without structural term; leave it out, or give structure')
        if self.prior != 'attention' and self.prior_width is not None:
            raise ValueError(
                f"prior_width has no effect with prior={self.prior!r}; leave it out, or use prior='attention'"
            )
        for name, value in starting.items():
            values = value if isinstance(value, Sequence) else [value]
            if not all(0 < v < float('inf') for v in values):
                raise ValueError(f'{name} must be positive and finite, got {value!r}')
            if not all(FLOAT32.tiny <= v <= FLOAT32.max for v in values):
                raise ValueError(
                    f'{name} must be a normal float32 number, {FLOAT32.tiny:.3g} to {FLOAT32.max:.3g}, got {value!r}'
                )
            if isinstance(value, Sequence) and (self.learn == 'shared' or len(value) != self.modules):
                raise ValueError(
                    f'{name} must be one number, or a list of {self.modules}, one per module, when learn is not '
                    f"'shared'; got {value!r} with learn={self.learn!r}"
                )

    @classmethod
    def paper(cls, solver: str = 'badmm-e', **changes: Any) -> 'PoolOptions':
        """The published layer: raw features, no gain, every weight from softplus(0); `changes` are further options."""
        published: dict[str, Any] = {'solver': solver, 'start': 'paper', 'view': 'identity', 'gain': 'off'}
        return cls(**(published | changes))

    def _set(self, name: str, value: Any):
        """Set a field of this frozen object to its normalized value, a plain Python type."""
        object.__setattr__(self, name, value)

    @property
    def modules(self) -> int:
        """T, the number of modules."""
        if self.num_modules is not None:
            return self.num_modules
        if self._declared is not None:
            return SOLVERS[self.solver].num_modules
        return 1 if self.solver == 'sinkhorn' and self.structure == 0 else 4

    @property
    def _declared(self) -> Mapping[str, float] | None:
        """The weights that a registered solver declares; None for the solvers of this package."""
        return SOLVERS[self.solver].weights

    def to_solver(self) -> Solver:
        return Solver(self.solver, self.coupled, self.num_inner, self.similarity, self.backend)

    def starting_weights(self) -> dict[str, float | Sequence[float]]:
        """The weights that this solver reads, and their initial values."""
        declared = self._declared
        if declared is not None:
            given = {name: getattr(self, name) for name in _WEIGHTS} | dict(self.weights or {})
            return {name: start if given.get(name) is None else given[name] for name, start in declared.items()}
        mean = MEAN_START[self.view]
        smoothness, step, feature_penalty, sample_penalty = {
            'paper': (PAPER_START,) * 4,
            # Each module of Bregman ADMM moves the plan by X / ρ: to end next to the mean, ρ grows with their number.
            'mean': (mean, mean * self.modules, 1.0, mean * PENALTY),
            # The sample marginal has to be free: in Sinkhorn by its penalty, in Bregman ADMM by a smoothness that
            # leaves the other half of the plan flat.
            'max': (MAX_START if self.solver == 'sinkhorn' else mean, MAX_START, 1.0, MAX_START / 100),
        }[self.start]
        starts: dict[str, float] = {}
        if not (self.solver == 'badmm-e' and self.modules == 1):  # which is softmax pooling at temperature ρ
            starts['smoothness'] = smoothness
        if self.solver != 'sinkhorn':
            starts['step'] = step
        elif self.modules > 1:
            starts['proximal'] = smoothness
        if self.solver == 'sinkhorn' or self.coupled:
            starts |= {'feature_penalty': feature_penalty, 'sample_penalty': sample_penalty}
        weights: dict[str, float | Sequence[float]] = {}
        for name, start in starts.items():
            given = getattr(self, name)
            weights[name] = start if given is None else given
        if self.structure > 0:
            weights['structure'] = self.structure
        return weights

    def to_dict(self) -> dict[str, Any]:
        """The options that differ from the defaults, ready for JSON or YAML; `pool_options` reads them back."""
        defaults = asdict(PoolOptions())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


def pool_options(options: PoolOptions | Mapping[str, Any] | str | None = None, **changes: Any) -> PoolOptions:
    """Options from options, a mapping of them (JSON, YAML), a name or None (the defaults), then `changes`.

    A name is a solver's, or 'paper' for the published layer; in a mapping, `preset: paper` starts from the latter.

    >>> pool_options('sinkhorn', view='log').view
    'log'
    >>> pool_options({'preset': 'paper', 'solver': 'sinkhorn'}) == PoolOptions.paper('sinkhorn')
    True
    """
    if isinstance(options, PoolOptions):
        _refuse_unknown(changes)
        return replace(options, **changes)
    if options is None or isinstance(options, Mapping):
        given: dict[str, Any] = dict(options or {})
    elif isinstance(options, str):
        given = {'preset' if options == 'paper' else 'solver': options}
    else:
        raise ValueError(
            'pooling options must be PoolOptions, a mapping of its fields, a solver '
            f"({', '.join(SOLVERS)}) or 'paper', got {type(options).__name__}"
        )
    given |= changes
    preset = given.pop('preset', None)
    if preset not in (None, 'paper'):
        raise ValueError(f"preset must be 'paper', or left out for the recommended pooling, got {preset!r}")
    _refuse_unknown(given)
    return PoolOptions(**given) if preset is None else PoolOptions.paper(**given)


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy; bool does not count."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def positive_integer(name: str, value: Any) -> int:
    if not is_integer(value) or not 1 <= value < 2**31:
        raise ValueError(f'{name} must be a positive integer, got {_shown(value)}')
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _numbers(name: str, value: Any) -> float | list[float]:
    """The number given for a weight, or its numbers by module."""
    if _is_number(value):
        return _float(name, value)
    if not isinstance(value, Sequence) or not all(_is_number(v) for v in value):
        raise ValueError(f'{name} must be a number, or a list of numbers, one per module, got {value!r}')
    return [_float(name, v) for v in value]


def _float(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f'{name} must be a normal float32 number, got {_shown(value)}') from error


def _shown(value: Any) -> str:
    """The repr of a value; long integers are abbreviated."""
    return repr(value) if not is_integer(value) or abs(value) < 2**64 else f'one of {value.bit_length()} bits'


def _refuse_unknown(names: Mapping[str, Any]):
    known = [field.name for field in fields(PoolOptions)]
    unknown = sorted(str(name) for name in names if name not in known)
    if unknown:
        raise ValueError(f'unknown pooling option(s) {", ".join(unknown)}; known are {", ".join(known)}')


# The limits of the paper's Proposition 1 as numbers, in their order: a strict marginal outweighs a dominant smoothness,
# which outweighs any feature. In float32 larger values give the same plan.
_STRICT, _DOMINANT, _NONE = 1e16, 1e8, 1e-6
MEAN_POOL = PoolOptions.paper(
    'sinkhorn', learn='fixed', smoothness=_DOMINANT, feature_penalty=_STRICT, sample_penalty=_STRICT
)
"""Average pooling as options of a ROT pool. With a prior of your own, `log_sample_prior=`, the mean that it weights."""
MAX_POOL = PoolOptions.paper(
    'sinkhorn', learn='fixed', smoothness=_NONE, feature_penalty=_STRICT, sample_penalty=_NONE * 1e-6
)
"""Max pooling as options of a ROT pool."""
