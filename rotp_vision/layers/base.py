"""Shared by the layers: options, learnable weights, pooling of sets (B, D, N), and shapes of feature maps."""

import copy
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, fx, nn

from rotp_vision.core import ROTProblem, rot_pool, rot_problem, solve
from rotp_vision.layers.options import PoolOptions, Prior, pool_options, positive_integer
from rotp_vision.layers.parameters import AttentionPrior, NormPrior, PositiveWeight


class OneNode(nn.Module):
    """A module that every tracer of `torch.fx` keeps as one `call_module` node, as it does with torch's own modules.

    A forward that reads shapes in Python cannot be traced symbolically, and by default tracers look into modules that
    are not torch's. `torch.jit.trace` warns of every such read. Here they check shapes and choose between equal
    orders of computation, so a trace is right for maps of any batch and size, and the warnings are silenced.
    """

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            with warnings.catch_warnings():
                warnings.simplefilter('ignore', torch.jit.TracerWarning)  # pyright: ignore[reportPrivateImportUsage]
                return super().__call__(x, *args, **kwargs)
        if not isinstance(x, fx.Proxy):
            return super().__call__(x, *args, **kwargs)
        tracer: Any = x.tracer

        def node(*args: Any, **kwargs: Any) -> fx.Proxy:
            return tracer.create_proxy('call_module', tracer.path_of_module(self), args, kwargs)

        return tracer.call_module(self, node, (x, *args), kwargs)


# Feature maps, or 'NCL': features along one axis, as nn.AdaptiveAvgPool1d takes them.
InputFormat = Literal['NCHW', 'NHWC', 'NCL']


class MapShape:
    """Mixin for pools of feature maps in every format: their shapes, and timm's pool protocol."""

    flatten: bool
    input_fmt: str  # TorchScript knows no Literal

    def set_shape(self, flatten: bool, input_fmt: InputFormat) -> None:
        """Set the format of the input, and whether the output drops its spatial axes."""
        if input_fmt not in get_args(InputFormat):
            raise ValueError(f"input_fmt must be 'NCHW', 'NHWC' or 'NCL', got {input_fmt!r}")
        self.flatten = flatten
        self.input_fmt = input_fmt

    def sets(self, x: Tensor) -> Tensor:
        """The feature map as sets (B, D, N), without a copy in either memory format."""
        if x.dim() != len(self.input_fmt):
            axes = f'{len(self.input_fmt)} axes ({self.input_fmt})'
            raise ValueError(f'x must be a feature map with {axes}, got {list(x.shape)}')
        if self.input_fmt == 'NHWC':
            return x.flatten(1, 2).transpose(1, 2)
        return x.flatten(2)

    def shaped(self, pooled: Tensor) -> Tensor:
        """Pooled features (B, D) in the shape that this layer returns."""
        if self.flatten:
            return pooled
        if self.input_fmt == 'NHWC':
            return pooled[:, None, None, :]
        return pooled[:, :, None] if self.input_fmt == 'NCL' else pooled[:, :, None, None]

    def feat_mult(self) -> int:
        """Ratio of output to input channels (timm's pool protocol)."""
        return 1

    def is_identity(self) -> bool:
        """Whether this pool does nothing (timm's pool protocol)."""
        return False

    def shape_repr(self) -> str:
        """The part of `extra_repr` that tells the shapes."""
        return f'flatten={self.flatten}, input_fmt={self.input_fmt!r}'


_SCRIPTED: dict[int, 'ROTPool'] = {}


class ROTPool(OneNode):
    """Base of all ROT poolings: pools sets with the plan of a regularized optimal transport problem.

    Args:
        options: `PoolOptions`, a mapping of its fields, or a name, see `pool_options`.
        num_features: D; needed only for attention priors and a gain per channel.

    Example:
        >>> import torch
        >>> from rotp_vision.layers import ROTPool
        >>> ROTPool().pool_sets(torch.rand(2, 8, 49)).shape
        torch.Size([2, 8])
    """

    auto_start: Literal['train', 'mean'] = 'mean'
    auto_prior: ClassVar[Prior] = 'uniform'

    def __init__(self, options: PoolOptions | Mapping[str, Any] | str | None = None, num_features: int | None = None):
        super().__init__()
        if num_features is not None:
            num_features = positive_integer('num_features', num_features)
        self.num_features = num_features
        self.number = 0  # identifies a scripted layer
        self.is_part = False  # part of another pool, which then handles loading of native weights
        self.gain_folded = False  # set by `fold_gain` when it moves a gain into the next layer
        self._make(pool_options(options))

    def _make(self, options: PoolOptions) -> None:
        num_features = self.num_features
        self.options = options
        begun = self._begun()
        if num_features is None and (begun.prior == 'attention' or begun.gain == 'channel'):
            raise ValueError("num_features must be given for prior='attention' and for gain='channel', got None")
        self.solver = begun.to_solver()
        size, learn = 1 if begun.learn == 'shared' else self.solver.num_weight_sets, begun.learn != 'fixed'
        self._starts = begun.starting_weights()
        weights = {name: PositiveWeight(start, size, learn) for name, start in self._starts.items()}
        self.weights = nn.ModuleDict(weights)
        self.prior = None
        if begun.prior == 'attention':
            assert num_features is not None
            self.prior = AttentionPrior(num_features, begun.prior_width, begun.start != 'paper')
        elif begun.prior == 'norm':
            self.prior = NormPrior(begun.norm_power or 0.0, learn)
        self.gain = None
        if begun.gain != 'off':
            self.gain = PositiveWeight(1.0, num_features if begun.gain == 'channel' and num_features else 1)

    def set_options(self, options: PoolOptions | Mapping[str, Any] | str) -> None:
        """Change the options and reset the weights; the prior is kept if its options stay the same."""
        old, prior = self._prior_options(), self.prior
        like = next(value for name, value in self.weights.state_dict().items() if name.endswith('.beta'))
        for name in ('weights', 'prior', 'gain'):
            delattr(self, name)  # register them in the order of a new layer, which optimizers rely on
        self._make(pool_options(options))
        self.to(like.device, like.dtype).train(self.training)
        if self._prior_options() == old:
            self.prior = prior

    def _begun(self) -> PoolOptions:
        """The options with the start and the prior of this layer where they leave them open."""
        return self.options.of_layer(self.auto_start, self.auto_prior)

    def _prior_options(self) -> tuple[Any, ...]:
        """The options that determine the prior."""
        begun = self._begun()
        fixed = begun.prior == 'norm' and begun.learn == 'fixed'
        return begun.prior, begun.prior_width, begun.norm_power, fixed

    def reset_parameters(self) -> None:
        """Reset every weight to the start that the options give."""
        for module in self.modules():
            if isinstance(module, PositiveWeight | NormPrior | AttentionPrior):
                module.reset_parameters()

    def auto_is_mean(self) -> None:
        """Let start 'auto' be 'mean' from now on; `reset_parameters` then starts the pool there."""
        self.auto_start = 'mean'
        begun = self._begun()
        self._starts = begun.starting_weights()
        for name, start in self._starts.items():
            cast(PositiveWeight, self.weights[name]).initial = start
        if isinstance(self.prior, NormPrior):
            self.prior.initial = begun.norm_power or 0.0

    def pool_sets(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        log_sample_prior: Tensor | None = None,
        *,
        recompute: bool = True,
    ) -> Tensor:
        """Pool sets (B, D, N) to features (B, D), in the dtype of `x`.

        Args:
            x: (B, D, N).
            mask: (B, N), True where a sample exists; None if all do.
            log_sample_prior: (B or 1, N) logits of q0, added to those of the layer's own prior; None for uniform.
            recompute: as in `rot_pool`.
        """
        problem = self._problem(x, mask, log_sample_prior)
        refusal = self.solver.refusal(problem, self._starts) if self.options.backend == 'auto' else None
        if refusal is not None:
            raise ValueError(f"on {x.device.type} {refusal}; change them, or use backend='reference'")
        weights = {name: weight() for name, weight in self.weights.items()}
        gain = None if self.gain is None else self.gain()
        return rot_pool(problem, weights, self.solver, gain, backend=self.options.backend, recompute=recompute)

    def solve_sets(self, x: Tensor, mask: Tensor | None = None, log_sample_prior: Tensor | None = None) -> Tensor:
        """(B, D, N) log plan of `pool_sets`, of mass one, with -inf on masked samples."""
        weights = {name: weight() for name, weight in self.weights.items()}
        return solve(self._problem(x, mask, log_sample_prior), weights, self.solver)

    def __prepare_scriptable__(self):
        # TorchScript, which timm's test suite still uses, calls the layer in Python and finds it by this number. A
        # scripted network runs but cannot be saved; trace or export it instead.
        self.number = id(self)
        _SCRIPTED[self.number] = self
        return self

    @torch.jit.ignore  # pyright: ignore[reportArgumentType]
    def run_unscripted(self, x: Tensor, log_sample_prior: Tensor | None) -> Tensor:
        """`forward` in Python."""
        return _SCRIPTED[self.number](x, log_sample_prior)

    def _problem(self, x: Tensor, mask: Tensor | None, log_sample_prior: Tensor | None) -> ROTProblem:
        log_feature_prior, norm_power = None, None
        if isinstance(self.prior, NormPrior):
            norm_power = self.prior()
        elif self.prior is not None:
            # Masked samples may contain NaN.
            visible = x if mask is None else x.masked_fill(~mask.unsqueeze(1), 0.0)
            log_feature_prior, log_prior = self.prior(visible)
            log_sample_prior = log_prior if log_sample_prior is None else log_sample_prior + log_prior
        return rot_problem(x, log_feature_prior, log_sample_prior, mask, self.options.feature_scale, norm_power)

    def log_plan(self, *args: Any, **kwargs: Any) -> Any:
        """The log plan for an input of this layer, with the axes of that input."""
        raise NotImplementedError(f'{type(self).__name__} has no forward and no log_plan; use pool_sets and solve_sets')

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """The plan for an input of this layer, with the arguments and the axes of `log_plan`."""
        return self.log_plan(*args, **kwargs).exp()

    def _weights_by_name(self) -> dict[str, PositiveWeight | NormPrior]:
        known: dict[str, Any] = dict(self.weights.items())
        if isinstance(self.prior, NormPrior):
            known['norm_power'] = self.prior
        if self.gain is not None:
            known['gain'] = self.gain
        return known

    def named_weights(self) -> dict[str, Tensor]:
        """The current values of the weights by name, detached: 'smoothness', 'step', …, 'gain'."""
        return {name: weight().detach() for name, weight in self._weights_by_name().items()}

    def set_weights(self, **values: Tensor | float | Sequence[float]) -> None:
        """Set weights by the names of `named_weights`; all but norm_power must be positive."""
        known = self._weights_by_name()
        for name, value in values.items():
            if name not in known:
                raise ValueError(f'this layer has no weight {name!r}; it has {", ".join(known)}')
            known[name].set(value)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if not self.is_part:
            start_where_absent(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def get_extra_state(self) -> Tensor:
        """The options that decide what the weights compute, as JSON in a tensor, which safetensors can hold."""
        return torch.tensor(list(json.dumps(self._function()).encode()), dtype=torch.uint8, device='cpu')

    def set_extra_state(self, state: Tensor) -> None:
        """Raise a ValueError unless the loaded weights belong to a pooling that computes the same."""
        if state.is_meta:
            return
        theirs, mine = json.loads(bytes(state.to(torch.uint8).tolist())), self._function()
        if theirs != mine:
            other = {name: value for name, value in theirs.items() if mine.get(name) != value}
            here = {name: mine.get(name) for name in other}
            raise ValueError(f'these weights need a pooling with the options {other}, but it has {here}')

    def _function(self) -> dict[str, Any]:
        """The options that change what is computed from given weights."""
        begun, names = self._begun(), ('solver', 'feature_scale', 'prior', 'gain')
        made = {name: getattr(begun, name) for name in names} | {'structure': float(self.options.structure > 0)}
        return made | {name: getattr(self.solver, name, None) for name in ('num_iters', 'num_outer', 'similarity')}

    def extra_repr(self) -> str:
        given = {'solver': self.options.solver} | self.options.to_dict()
        return ', '.join(f'{name}={value!r}' for name, value in given.items())


def start_where_absent(pool: Any, state_dict: dict[str, Tensor], prefix: str) -> None:
    """Reset a pool that replaced a native one if `state_dict` has none of its keys; for `_load_from_state_dict`.

    Such a file holds the native network. If it has some of the keys, torch reports the missing ones.
    """
    mine = [value for key, value in state_dict.items() if key.startswith(prefix)]
    if not mine:
        if isinstance(pool, ROTPool):
            pool.auto_is_mean()
        fresh = copy.deepcopy(pool).to_empty(device='cpu')
        fresh.reset_parameters()
        # state_dict is torch's own copy, from which the children load next.
        state_dict.update({prefix + key: value for key, value in fresh.state_dict().items()})
    elif any(value.dim() == 0 for value in mine):
        raise ValueError(
            f'the weights of {prefix.rstrip(".")} were saved by rotp_vision 0.2, whose scalars had no axis; '
            'convert the network and train or calibrate it again, or load them with rotp_vision 0.2'
        )
