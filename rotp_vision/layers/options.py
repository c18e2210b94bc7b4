"""Options of a pooling layer: one frozen object, used by layers, models, surgery, YAML and JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch

from rotp_vision.core import SOLVERS, Backend, FeatureScale, Similarity, Solver, make_solver

Start = Literal['auto', 'train', 'mean', 'max', 'paper']
Gain = Literal['off', 'scalar', 'channel']
Prior = Literal['uniform', 'norm', 'attention']
Learn = Literal['per-iteration', 'shared', 'fixed']

# Temperatures at which pooling is close to average pooling, large compared with the spread of the scaled features: raw
# features of a trained network reach a few hundred, x / rms at most sqrt(N), and log x spans about ten.
MEAN_START: dict[FeatureScale, float] = {'raw': 1000.0, 'rms': 50.0, 'log': 100.0}
# Where a network learns along with its pooling: temperature and power of the norm prior (benchmarks/STARTS.md). Chosen
# on the feature scale 'rms'.
TRAIN_START, TRAIN_POWER = 5.0, 2.0
FLOAT32 = torch.finfo(torch.float32)
# The largest number of iterations, width or image side: beyond any use, and still cheap to build.
LARGEST = 2**14
_WEIGHTS = ('smoothness', 'feature_penalty', 'sample_penalty', 'step', 'proximal')
_CHOICES: dict[str, tuple[str, ...]] = {
    'start': get_args(Start),
    'learn': get_args(Learn),
    'prior': get_args(Prior),
    'feature_scale': get_args(FeatureScale),
    'gain': get_args(Gain),
    'backend': get_args(Backend),
    'similarity': get_args(Similarity),
}
_RENAMED = {
    'view': "feature_scale, whose value 'identity' is now 'raw'",
    'num_modules': 'num_iters of Bregman ADMM, num_outer of Sinkhorn',
    'num_inner': 'num_iters',
    'coupled': "part of the solver's name, as in 'badmm-e-coupled'",
}


@dataclass(frozen=True)
class PoolOptions:
    """Options of a ROT pooling layer. The defaults are the recommended pooling of layers, models and `convert`.

    `PoolOptions.paper()` is the published layer, `PoolOptions.embedding()` the one for feature vectors. Weights are
    given by their positive starting values; None takes the value from `start`. docs/options.md shows the objective.

    Attributes:
        solver: 'sinkhorn'; 'badmm-e' or 'badmm-q', Bregman ADMM with entropic or quadratic smoothness as published;
            'badmm-e-coupled' or 'badmm-q-coupled', in which the marginal penalties act; or a solver registered with
            `register_solver`.
        num_iters: K, iterations of the solver; None means 4, or the number given to `register_solver`.
        num_outer: Sinkhorn's proximal steps of num_iters iterations each; None means 1, or 4 with a structural term.
        start: 'train' suits a network that is trained along with its pooling: temperature 5 and the norm prior with
            β = 2. 'mean' starts close to average pooling, 'max' close to max pooling ('badmm-q' stays further away, as
            its sample marginal is fixed to q0), 'paper' starts every weight at softplus(0). 'auto' is 'train' in
            `GlobalROTPool2d`, until weights of a network with another pooling are loaded into it: then it starts at
            'mean', so that the network predicts as before. In other layers 'auto' is 'mean'.
        learn: weights 'per-iteration' (Bregman ADMM; Sinkhorn has one set for each outer step), 'shared', or 'fixed'.
        structure: α0, weight of the structural term; 0 leaves it out.
        smoothness: α1.
        feature_penalty: α2.
        sample_penalty: α3.
        step: ρ of Bregman ADMM.
        proximal: τ of Sinkhorn's outer loop.
        weights: starting values of a registered solver's weights that have no option above.
        similarity: of the structural term, 'covariance' or 'cosine'.
        prior: 'uniform'; 'norm': q0_n ∝ ‖x_n‖^β with the norm of the unscaled features and a learned β; or
            'attention': q0 = softmax(wᵀ tanh(V X)), p0 = softmax(U X 1). None means 'norm' in `GlobalROTPool2d`,
            from start 'train', and if norm_power is given; otherwise 'uniform'.
        norm_power: β of the norm prior at the start, any finite number; None means 2 from start 'train', otherwise 0,
            the uniform prior.
        prior_width: rows of V, and the inner width of U = U2 U1, of the attention prior; None means num_features.
        feature_scale: scale on which the plan is computed: 'raw' (the paper), 'rms' (each feature divided by its root
            mean square over the samples) or 'log' (log(max(x, 0) + 0.001)). The unscaled features are averaged.
        gain: learned positive factor on the output: 'off', 'scalar' or 'channel'.
        backend: 'auto', or 'reference' for the formula under plain autograd, which has second derivatives.

    Example:
        >>> from rotp_vision import PoolOptions
        >>> PoolOptions(prior='norm').to_dict()
        {'prior': 'norm'}
        >>> PoolOptions.paper().to_dict()
        {'solver': 'badmm-e', 'start': 'paper', 'prior': 'uniform', 'feature_scale': 'raw', 'gain': 'off'}
    """

    solver: str = 'sinkhorn'
    num_iters: int | None = None
    num_outer: int | None = None
    start: Start = 'auto'
    learn: Learn = 'per-iteration'
    structure: float = 0.0
    smoothness: float | Sequence[float] | None = None
    feature_penalty: float | Sequence[float] | None = None
    sample_penalty: float | Sequence[float] | None = None
    step: float | Sequence[float] | None = None
    proximal: float | Sequence[float] | None = None
    weights: Mapping[str, float | Sequence[float]] | None = None
    similarity: Similarity | None = None
    prior: Prior | None = None
    norm_power: float | None = None
    prior_width: int | None = None
    feature_scale: FeatureScale = 'rms'
    gain: Gain = 'scalar'
    backend: Backend = 'auto'

    def __post_init__(self):
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value is None and name in ('prior', 'similarity'):
                continue
            if not isinstance(value, str) or value not in allowed:
                raise ValueError(f'{name} must be one of {", ".join(allowed)}, got {value!r}')
        for name in ('num_iters', 'num_outer', 'prior_width'):
            value = getattr(self, name)
            if value is not None:
                self._set(name, positive_integer(name, value, LARGEST))
        if not _is_number(self.structure) or not self.structure >= 0:
            raise ValueError(f'structure must be a number that is positive, or zero for none, got {self.structure!r}')
        self._set('structure', _float('structure', self.structure))
        for name in _WEIGHTS:
            value = getattr(self, name)
            if value is not None:
                self._set(name, _numbers(name, value))
        if self.weights is not None:
            self._set('weights', {name: _numbers(name, value) for name, value in self.weights.items()} or None)
        if self.norm_power is not None:
            self._set('norm_power', finite_number('norm_power', self.norm_power))
        for name, prior in (('norm_power', 'norm'), ('prior_width', 'attention')):
            implied = name == 'norm_power' and self.prior is None
            if self.prior != prior and not implied and getattr(self, name) is not None:
                raise ValueError(
                    f'{name} has no effect with prior={self.prior or "uniform"!r}; leave it out, or use prior={prior!r}'
                )
        solver, starting = self.to_solver(), self.starting_weights()
        unread = [name for name in self._given() if name not in starting]
        if unread:
            raise ValueError(
                f'{", ".join(unread)} has no effect with {solver}, which reads {", ".join(starting)}; leave it out, or '
                'choose a solver that reads it'
            )
        for name, value in starting.items():
            _check_weight(name, value, 1 if self.learn == 'shared' else solver.num_weight_sets)

    @classmethod
    def paper(cls, solver: str = 'badmm-e', **changes: Any) -> 'PoolOptions':
        """The published layer (raw features, no gain, every weight from softplus(0)) with some options changed."""
        published = {'solver': solver, 'start': 'paper', 'prior': 'uniform', 'feature_scale': 'raw', 'gain': 'off'}
        return cls(**{**published, **changes})  # pyright: ignore[reportArgumentType]

    @classmethod
    def embedding(cls, **changes: Any) -> 'PoolOptions':
        """The pooling for feature vectors, with fixed weights and no gain, with some options changed."""
        chosen: dict[str, Any] = {'smoothness': 4.0, 'sample_penalty': 12.0, 'prior': 'norm', 'norm_power': 2.0}
        chosen |= {'learn': 'fixed', 'gain': 'off'}
        return cls(**(chosen | changes))

    def _set(self, name: str, value: Any):
        """Set a field of this frozen object to a normalized value."""
        object.__setattr__(self, name, value)

    def to_solver(self) -> Solver:
        """The solver that these options describe."""
        given = {name: getattr(self, name) for name in ('num_iters', 'num_outer', 'similarity')}
        given['structure'] = True if self.structure else None
        return make_solver(self.solver, **{name: value for name, value in given.items() if value is not None})

    def starting_weights(self) -> dict[str, float | list[float]]:
        """The starting values of the weights that the solver reads; those of start 'auto' are next to the mean."""
        solver = self.to_solver()
        if self.start == 'train':
            starts = solver.starts('mean', TRAIN_START)
        else:
            starts = solver.starts('mean' if self.start == 'auto' else self.start, MEAN_START[self.feature_scale])
        return starts | {name: value for name, value in self._given().items() if name in starts}

    def of_layer(self, auto: Literal['train', 'mean'] = 'mean', prior: Prior = 'uniform') -> 'PoolOptions':
        """These options with the start, the prior and its power that a layer has where they leave it open.

        Args:
            auto: the layer's start for 'auto'.
            prior: the layer's prior for None.
        """
        start = auto if self.start == 'auto' else self.start
        if self.prior is not None:
            prior = self.prior
        elif start == 'train' or self.norm_power is not None:
            prior = 'norm'
        power = self.norm_power
        if prior == 'norm' and power is None:
            power = TRAIN_POWER if start == 'train' else 0.0
        return replace(self, start=start, prior=prior, norm_power=power)

    def _given(self) -> dict[str, Any]:
        """The starting values that the options give; a list of one is a number."""
        given = {name: getattr(self, name) for name in _WEIGHTS if getattr(self, name) is not None}
        given |= {'structure': self.structure} if self.structure else {}
        given |= self.weights or {}
        single = {name: value[0] for name, value in given.items() if isinstance(value, list) and len(value) == 1}
        return given | single

    def to_dict(self) -> dict[str, Any]:
        """The options that differ from the defaults, ready for JSON or YAML; `pool_options` reads them back."""
        defaults = asdict(PoolOptions())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


_PRESETS: dict[str, Callable[..., PoolOptions]] = {
    'train': partial(PoolOptions, start='train'),
    'paper': PoolOptions.paper,
    'embedding': PoolOptions.embedding,
}


def pool_options(options: PoolOptions | Mapping[str, Any] | str | None = None, **changes: Any) -> PoolOptions:
    """`PoolOptions` from options, a mapping (JSON, YAML), a name, or None for the defaults, updated with `changes`.

    A name is that of a solver, 'train' for the recommended pooling with that start, 'paper' for the published layer, or
    'embedding' for feature vectors. In a mapping, `preset: paper` and the like start from these.

    >>> pool_options('sinkhorn', feature_scale='log').feature_scale
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
        given = {'preset' if options in _PRESETS else 'solver': options}
    else:
        raise ValueError(
            'pooling options must be PoolOptions, a mapping of its fields, a solver '
            f"({', '.join(SOLVERS)}), 'train', 'paper' or 'embedding', got {type(options).__name__}"
        )
    given |= changes
    preset = given.pop('preset', None)
    if preset is not None and preset not in tuple(_PRESETS):
        raise ValueError(f"preset must be 'train', 'paper' or 'embedding', or left out, got {preset!r}")
    _refuse_unknown(given)
    return (PoolOptions if preset is None else _PRESETS[preset])(**given)


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy; bool does not count."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def positive_integer(name: str, value: Any, largest: int = 2**31 - 1) -> int:
    """`value` as an int, or an error that names it."""
    if not is_integer(value) or not 1 <= value <= largest:
        limit = '' if largest == 2**31 - 1 else f' up to {largest}'
        raise ValueError(f'{name} must be a positive integer{limit}, got {_shown(value)}')
    return int(value)


def finite_number(name: str, value: Any) -> float:
    """`value` as a float within float32's range, or an error that names it."""
    if not _is_number(value) or not abs(value) <= FLOAT32.max:
        raise ValueError(f'{name} must be a finite number, got {_shown(value)}')
    return float(value)


def positive_number(name: str, value: Any) -> float:
    """`value` as a positive float within float32's range, or an error that names it."""
    number = finite_number(name, value)
    _check_weight(name, number, 1)
    return number


def _check_weight(name: str, value: float | Sequence[float], num_weight_sets: int):
    values = value if isinstance(value, Sequence) else [value]
    if not all(0 < v < float('inf') for v in values):
        raise ValueError(f'{name} must be positive and finite, got {value!r}')
    if not all(FLOAT32.tiny <= v <= FLOAT32.max for v in values):
        raise ValueError(
            f'{name} must be a normal float32 number, {FLOAT32.tiny:.3g} to {FLOAT32.max:.3g}, got {value!r}'
        )
    if isinstance(value, Sequence) and len(value) != num_weight_sets:
        lists = f'or a list of {num_weight_sets}' if num_weight_sets > 1 else 'no list'
        raise ValueError(f'{name} must be one number, {lists}, with this solver, num_iters and learn; got {value!r}')


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _numbers(name: str, value: Any) -> float | list[float]:
    """The value given for a weight as a float, or as a list of floats, one for each iteration."""
    if _is_number(value):
        return _float(name, value)
    if not isinstance(value, Sequence) or not all(_is_number(v) for v in value):
        raise ValueError(f'{name} must be a number, or a list of numbers, got {value!r}')
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
        now = ''.join(f'; {name} is now {_RENAMED[name]}' for name in unknown if name in _RENAMED)
        raise ValueError(f'unknown pooling option(s) {", ".join(unknown)}{now}; known are {", ".join(known)}')


# The limits of the paper's Proposition 1 as numbers. A strict marginal outweighs a dominant smoothness, which outweighs
# any feature. In float32 larger values give the same plan.
_STRICT, _DOMINANT, _NONE = 1e16, 1e8, 1e-6
MEAN_POOL = PoolOptions.paper(
    'sinkhorn', learn='fixed', smoothness=_DOMINANT, feature_penalty=_STRICT, sample_penalty=_STRICT
)
"""Options that make a ROT pool average pooling; with `log_sample_prior=`, the mean weighted by that prior."""
MAX_POOL = PoolOptions.paper(
    'sinkhorn', learn='fixed', smoothness=_NONE, feature_penalty=_STRICT, sample_penalty=_NONE * 1e-6
)
"""Options that make a ROT pool max pooling."""
