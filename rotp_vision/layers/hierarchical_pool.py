"""Hierarchical pooling: several poolings of one map, fused by another one, and pooling of sets of sets."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rotp_vision.layers.base import InputFormat, OneNode, ROTPool
from rotp_vision.layers.global_pool import MapPool
from rotp_vision.layers.options import MAX_POOL, MEAN_POOL, PoolOptions

Options = PoolOptions | Mapping[str, Any] | str


class FusionPlans(NamedTuple):
    """The two plans, or log plans, of a `ROTSetFusion`."""

    within: Tensor  # of each set, of mass one, with the axes of the input; a masked set counts as a set of zeros
    between: Tensor  # (B, M, D') over the sets, of mass one


class MixedROTPool2d(MapPool):
    """M different poolings of a map, fused by another one (paper, eq. "mrotp").

        f = f_rot([f_rot(X; θ_1), …, f_rot(X; θ_M)]; θ_{M+1})

    The fusing pooling takes the M pooled vectors as a set, with a learned prior q0 = softmax(ω): one vector ω for all
    images or, if gated, a linear function of the image's mean feature. `MixedROTPool2d.mean_max()` is the paper's
    mixed mean-max pooling, `mean_max(gated=True, num_features=…)` its gated mean-max pooling.

    Args:
        heads: options of each head, at least two.
        fusion: options of the fusing pooling. The default is the mean of the heads, weighted by their prior.
        num_features: channels; needed for a gate, attention priors and a gain per channel.
        gated: whether ω depends on the image.
        flatten, input_fmt: as in `GlobalROTPool2d`.

    Example:
        >>> import torch
        >>> from rotp_vision.layers import MixedROTPool2d
        >>> pool = MixedROTPool2d(['sinkhorn', 'badmm-e', 'badmm-q'])
        >>> pool(torch.rand(2, 8, 7, 7)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        heads: Sequence[Options],
        fusion: Options = MEAN_POOL,
        num_features: int | None = None,
        *,
        gated: bool = False,
        flatten: bool = True,
        input_fmt: InputFormat = 'NCHW',
    ):
        super().__init__(fusion, num_features, flatten=flatten, input_fmt=input_fmt)
        if isinstance(heads, str) or len(heads) < 2:
            raise ValueError(f'heads must be at least two pooling options, got {heads!r}')
        if gated and num_features is None:
            raise ValueError('num_features must be given for a gated pooling, got None')
        if self.prior is not None:
            prior = self.options.of_layer().prior
            raise ValueError(f"the fusing pooling learns its own prior: prior must be 'uniform', got {prior!r}")
        parts = [ROTPool(head, num_features) for head in heads]
        for part in parts:
            part.is_part = True
        self.heads = nn.ModuleList(parts)
        self.omega = None if gated else nn.Parameter(torch.empty(len(heads)))
        self.gate = nn.Linear(num_features, len(heads)) if gated and num_features is not None else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset every weight to the start that the options give, and all heads to the same share."""
        super().reset_parameters()
        for parameter in (self.omega, *([] if self.gate is None else self.gate.parameters())):
            if parameter is not None:
                nn.init.zeros_(parameter)

    @classmethod
    def mean_max(cls, *, gated: bool = False, num_features: int | None = None, flatten: bool = True):
        """ω · mean + (1 - ω) · max (paper, Proposition 2); ω is learned or, if gated, depends on the mean feature."""
        return cls([MEAN_POOL, MAX_POOL], MEAN_POOL, num_features, gated=gated, flatten=flatten)

    def forward(self, x: Tensor, log_sample_prior: Tensor | None = None) -> Tensor:
        """Pool the map; `log_sample_prior` (B or 1, H, W) goes to every head, see `GlobalROTPool2d`."""
        sets, prior = self.sets(x), self.sample_prior(x, log_sample_prior)
        return self.shaped(self.pool_sets(self._pool_heads(sets, prior), log_sample_prior=self._head_logits(sets)))

    def log_plan(self, x: Tensor, log_sample_prior: Tensor | None = None) -> Tensor:
        """The heads' log plans fused row by row, with the axes of `x`: the layer averages under this plan."""
        sets, prior = self.sets(x), self.sample_prior(x, log_sample_prior)
        pooled = self._pool_heads(sets, prior)
        fusion = self.solve_sets(pooled, log_sample_prior=self._head_logits(sets)).log_softmax(2)  # (B, D, M)
        heads = [cast(ROTPool, head).solve_sets(sets, log_sample_prior=prior) for head in self.heads]
        rows = torch.stack(heads, 2).log_softmax(3)  # (B, D, M, N)
        return self.map_of((fusion.unsqueeze(3) + rows).logsumexp(2) - math.log(sets.shape[1]), x)

    def _pool_heads(self, sets: Tensor, log_sample_prior: Tensor | None) -> Tensor:
        """(B, D, M) pooled features of each head."""
        pooled = [cast(ROTPool, head).pool_sets(sets, log_sample_prior=log_sample_prior) for head in self.heads]
        return torch.stack(pooled, 2)

    def _head_logits(self, sets: Tensor) -> Tensor:
        if self.gate is not None:
            return self.gate(sets.mean(2))
        assert self.omega is not None
        return self.omega.unsqueeze(0)


class ROTSetFusion(OneNode):
    """Pooling of sets of sets (paper, eq. "hrotp"): sizes, crops or tiles of an image, bags of graphs.

        f = f_rot([g(f_rot(X_1; θ_1)), …, g(f_rot(X_M; θ_1))]; θ_2)

    Args:
        within: options of the pooling inside each set.
        between: options of the pooling over the sets.
        network: g, from D to D' features; identity if None.
        num_features: D; needed only for attention priors and a gain per channel inside the sets.
        num_fused: D', needed in the same cases for the pooling over the sets; None means D.

    Shapes:
        Maps (B, M, C, H, W), or sets (B, M, N, D) with an optional mask (B, M, N), to (B, D'). A set without any
        unmasked sample is left out.

    Example:
        >>> import torch
        >>> from rotp_vision.layers import ROTSetFusion
        >>> fuse = ROTSetFusion(network=torch.nn.Linear(8, 4))
        >>> fuse(torch.rand(2, 3, 8, 7, 7)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        within: Options | None = None,
        between: Options | None = None,
        network: nn.Module | None = None,
        num_features: int | None = None,
        num_fused: int | None = None,
    ):
        super().__init__()
        self.within = ROTPool(within, num_features)
        self.network = nn.Identity() if network is None else network
        self.between = ROTPool(between, num_features if num_fused is None else num_fused)

    def forward(self, x: Tensor, mask: Tensor | None = None, log_sample_prior: Tensor | None = None) -> Tensor:
        """Pool sets of sets to (B, D').

        Args:
            x: maps (B, M, C, H, W) or sets (B, M, N, D).
            mask: (B, M, N), True where a sample exists; None if all do.
            log_sample_prior: (B, M, N) logits of q0 inside each set, or (B, M, H, W) of maps; None for uniform.
        """
        sets, inside, present, prior = self._sets(x, mask, log_sample_prior)
        pooled = self._pool_within(sets, inside, prior, x.shape[1])
        return self.between.pool_sets(pooled, present)

    def log_plan(self, x: Tensor, mask: Tensor | None = None, log_sample_prior: Tensor | None = None) -> FusionPlans:
        """The log plans within the sets and between them; arguments as in `forward`."""
        sets, inside, present, prior = self._sets(x, mask, log_sample_prior)
        within = self.within.solve_sets(sets, inside, prior).unflatten(0, x.shape[:2])  # (B, M, D, N)
        between = self.between.solve_sets(self._pool_within(sets, inside, prior, x.shape[1]), present)
        within = within.unflatten(3, x.shape[3:]) if x.dim() == 5 else within.transpose(2, 3)
        return FusionPlans(within, between.transpose(1, 2))

    def plan(self, x: Tensor, mask: Tensor | None = None, log_sample_prior: Tensor | None = None) -> FusionPlans:
        """The plans within the sets and between them; arguments as in `forward`."""
        within, between = self.log_plan(x, mask, log_sample_prior)
        return FusionPlans(within.exp(), between.exp())

    def _pool_within(self, sets: Tensor, mask: Tensor | None, prior: Tensor | None, num_sets: int) -> Tensor:
        """(B, D', M) features of each set, after the network."""
        pooled = self.network(self.within.pool_sets(sets, mask, prior))  # (B M, D')
        return pooled.unflatten(0, (-1, num_sets)).transpose(1, 2)

    def _sets(
        self, x: Tensor, mask: Tensor | None, log_sample_prior: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """All sets (B M, D, N), their mask and prior (B M, N), and which of the sets exist (B, M)."""
        if x.dim() == 5:
            sets = x.flatten(3)  # (B, M, D, N)
        elif x.dim() == 4:
            sets = x.transpose(2, 3)
        else:
            raise ValueError(f'x must be maps (B, M, C, H, W) or sets (B, M, N, D), got {tuple(x.shape)}')
        batch, num_sets, _, num_samples = sets.shape
        present = None
        if mask is not None:
            if mask.shape != (batch, num_sets, num_samples) or mask.dtype != torch.bool:
                raise ValueError(
                    f'mask must be a bool tensor of shape ({batch}, {num_sets}, {num_samples}), '
                    f'got {mask.dtype} of shape {tuple(mask.shape)}'
                )
            present = mask.any(2)  # (B, M)
            sets = sets.masked_fill(~mask.unsqueeze(2), 0.0)
            # A set without samples is pooled as a set of zeros and then masked in the pooling over sets.
            mask = (mask | ~present.unsqueeze(2)).flatten(0, 1)
        if log_sample_prior is not None:
            shape = (batch, num_sets, *(x.shape[3:] if x.dim() == 5 else (num_samples,)))
            if log_sample_prior.shape != shape:
                raise ValueError(f'log_sample_prior must have shape {shape}, got {tuple(log_sample_prior.shape)}')
            log_sample_prior = log_sample_prior.flatten(2).flatten(0, 1)
        return sets.flatten(0, 1), mask, present, log_sample_prior
