"""What every ROTP layer shares: options, learnable weights, and pooling of sets (B, D, N)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rotp_vision.core import SOLVERS, ROTProblem, StepWeights, explicit_pool, reads_masked, rot_pool, rot_problem, solve
from rotp_vision.layers.options import PoolOptions, pool_options, positive_integer
from rotp_vision.layers.parameters import AttentionPrior, ModuleWeights, NormPrior, PositiveWeight, RegisteredWeights
from rotp_vision.layers.tracing import OneNode


class ROTPool(OneNode):
    """Pooling of sets with the plan of a regularized optimal transport problem whose weights are learned.

    Args:
        options: `PoolOptions`, a mapping of its fields, or a solver's name.
        num_features: D; needed only for attention priors and a gain per channel.

    Example:
        >>> import torch
        >>> from rotp_vision.layers import ROTPool
        >>> ROTPool().pool_sets(torch.rand(2, 8, 49)).shape
        torch.Size([2, 8])
    """

    def __init__(self, options: PoolOptions | Mapping[str, Any] | str | None = None, num_features: int | None = None):
        super().__init__()
        if num_features is not None:
            num_features = positive_integer('num_features', num_features)
        self.num_features = num_features
        self.is_part = False  # whether it belongs to another pool, which then handles weights that a file lacks
        self.gain_folded = False  # whether `fold_gain` has moved a gain other than one into the next layer
        self._make(pool_options(options))

    def _make(self, options: PoolOptions):
        num_features = self.num_features
        if num_features is None and (options.prior == 'attention' or options.gain == 'channel'):
            raise ValueError("num_features must be given for prior='attention' and for gain='channel', got None")
        self.options = options
        self.solver = options.to_solver()
        self.view: str = options.view
        # TorchScript does not take the solver as one object, so its fields are attributes too.
        self._name, self._coupled, self._num_inner = str(self.solver.name), self.solver.coupled, self.solver.num_inner
        self._similarity = str(self.solver.similarity)
        built_in = SOLVERS[options.solver].weights is None
        self.weights = ModuleWeights(options) if built_in else RegisteredWeights(options)
        self.prior = None
        if options.prior == 'attention':
            assert num_features is not None
            self.prior = AttentionPrior(num_features, options.prior_width, options.start != 'paper')
        elif options.prior == 'norm':
            self.prior = NormPrior(options.learn != 'fixed')
        self.gain = None
        if options.gain != 'off':
            size = (num_features,) if options.gain == 'channel' and num_features is not None else ()
            self.gain = PositiveWeight(1.0, size)

    def set_options(self, options: PoolOptions | Mapping[str, Any] | str):
        """Change the options; the weights start anew, and a prior of the same kind is kept."""
        old, prior = self.options, self.prior
        like = next(value for name, value in self.weights.state_dict().items() if name.endswith('.beta'))
        for name in ('weights', 'prior', 'gain'):
            delattr(self, name)  # so that they are registered in the order of a new layer, which optimizers rely on
        self._make(pool_options(options))
        self.to(like.device, like.dtype).train(self.training)
        if (self.options.prior, self.options.prior_width) == (old.prior, old.prior_width):
            self.prior = prior

    def _problem(
        self, x: Tensor, mask: Tensor | None, log_sample_prior: Tensor | None, zeroed: bool = False
    ) -> ROTProblem:
        log_feature_prior: Tensor | None = None
        if self.prior is not None:
            log_feature_prior, log_prior = self.prior(x)
            log_sample_prior = log_prior if log_sample_prior is None else log_sample_prior + log_prior
        return rot_problem(
            x,
            log_feature_prior=log_feature_prior,
            log_sample_prior=log_sample_prior,
            mask=mask,
            view=self.view,
            zeroed=zeroed,
        )

    def pool_sets(self, x: Tensor, mask: Tensor | None = None, log_sample_prior: Tensor | None = None) -> Tensor:
        """Pooled features (B, D), in the dtype of `x`, of the sets `x` (B, D, N).

        Args:
            x: (B, D, N).
            mask: (B, N), True where a sample exists; None where all do.
            log_sample_prior: (B or 1, N) logits of q0, to which those of the layer's own prior are added; None for
                uniform.
        """
        weights, gain = self._weights_and_gain()
        zeroed = self.prior is not None
        if mask is not None and not torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            zeroed = zeroed or not reads_masked(x, weights, self.solver, self.view)
        return self._pool(self._problem(self._for_prior(x, mask), mask, log_sample_prior, zeroed), weights, gain)

    def _weights_and_gain(self) -> tuple[StepWeights, Tensor | None]:
        if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            return self.weights(), None if self.gain is None else self.gain()
        return self.weights.with_gain(self.gain, self.solver)

    def _pool(self, problem: ROTProblem, weights: StepWeights, gain: Tensor | None) -> Tensor:
        if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            pooled = explicit_pool(problem, weights, self._name, self._coupled, self._num_inner, self._similarity)
            return pooled if gain is None else pooled * gain.to(pooled.dtype)
        return rot_pool(problem, weights, self.solver, gain)

    def _for_prior(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """`x` (B, D, N) as a prior may read it: with masked samples set to zero, as they may hold anything, NaN too."""
        return x.masked_fill(~mask.unsqueeze(1), 0.0) if mask is not None and self.prior is not None else x

    def solve_sets(self, x: Tensor, mask: Tensor | None = None, log_sample_prior: Tensor | None = None) -> Tensor:
        """(B, D, N) log plan with which `pool_sets` pools; its mass is one, and -inf marks masked samples."""
        problem = self._problem(self._for_prior(x, mask), mask, log_sample_prior, self.prior is not None)
        return solve(problem, self.weights(), self.solver)

    def log_plan(self, *args: Any, **kwargs: Any) -> Any:
        """The logarithm of the plan for an input of this layer, with the axes of that input."""
        raise NotImplementedError(f'{type(self).__name__} has no input of its own; use solve_sets')

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """The plan for an input of this layer, with the arguments and the axes of `log_plan`."""
        return self.log_plan(*args, **kwargs).exp()

    def _weights_by_name(self) -> dict[str, PositiveWeight | NormPrior]:
        known: dict[str, PositiveWeight | NormPrior] = {}
        known |= {name: weight for name, weight in self.weights.named_children() if isinstance(weight, PositiveWeight)}
        if isinstance(self.prior, NormPrior):
            known['norm_power'] = self.prior
        if self.gain is not None:
            known['gain'] = self.gain
        return known

    def named_weights(self) -> dict[str, Tensor]:
        """The current values of the learned scalars by name, detached: 'smoothness', 'step', …, 'gain'."""
        return {
            name: (weight.power if isinstance(weight, NormPrior) else weight()).detach()
            for name, weight in self._weights_by_name().items()
        }

    def set_weights(self, **values: Tensor | float | Sequence[float]):
        """Set weights by the names of `named_weights`; all values but that of norm_power must be positive."""
        known = self._weights_by_name()
        for name, value in values.items():
            if name not in known:
                raise ValueError(f'this layer has no weight {name!r}; it has {", ".join(known)}')
            known[name].set(value)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters to exempt from weight decay: those behind `named_weights`."""
        return {name for name, _ in self.named_parameters() if name.endswith(('.beta', '.power'))}

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if not self.is_part:
            keep_values_if_absent(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        given = {'solver': self.options.solver, 'modules': self.options.modules} | self.options.to_dict()
        given.pop('num_modules', None)
        return ', '.join(f'{name}={value!r}' for name, value in given.items())


def keep_values_if_absent(module: nn.Module, state_dict: dict[str, Tensor], prefix: str):
    """For `_load_from_state_dict` of a pool that replaced a native one: keep its values if a file has none of its keys.

    That is a file of the native network. If it holds some of the keys, torch reports those that are missing.
    """
    # state_dict is torch's own copy, from which the children load next.
    if not any(key.startswith(prefix) for key in state_dict):
        state_dict.update({prefix + key: value for key, value in module.state_dict().items()})
