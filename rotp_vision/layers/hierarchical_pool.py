"""Hierarchical pooling: several poolings of one map fused by one more, and pooling of sets of sets."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from rotp_vision.layers.base import ROTPool
from rotp_vision.layers.global_pool import MapPool
from rotp_vision.layers.options import PoolOptions, pool_options
from rotp_vision.layers.tracing import OneNode

Options = PoolOptions | Mapping[str, Any] | str

# The limits of Proposition 1 as numbers, in their order: a strict marginal outweighs a dominant smoothness, which
# outweighs any feature. In float32 larger values give the same plan.
_STRICT, _DOMINANT, _NONE = 1e16, 1e8, 1e-6
MEAN_POOL = PoolOptions.paper(
    'sinkhorn', learn='fixed', smoothness=_DOMINANT, feature_penalty=_STRICT, sample_penalty=_STRICT
)
MAX_POOL = PoolOptions.paper(
    'sinkhorn', learn='fixed', smoothness=_NONE, feature_penalty=_STRICT, sample_penalty=_NONE * 1e-6
)


class MixedROTPool2d(MapPool):
    """M different poolings of a map, fused by one more (paper, eq. "mrotp").

        f = f_rot([f_rot(X; θ_1), …, f_rot(X; θ_M)]; θ_{M+1})

    The fusing pooling pools a set of M samples, the heads, whose prior q0 = softmax(ω) is learned: one vector ω for
    all images, or, gated, a linear function of the image's mean feature. `MixedROTPool2d.mean_max()` is the paper's
    mixed mean-max pooling, `mean_max(gated=True, num_features=…)` its gated mean-max pooling.

    Args:
        heads: options of each head, at least two.
        fusion: options of the fusing pooling. By default the heads are weighted by their prior alone.
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
        input_fmt: Literal['NCHW', 'NHWC'] = 'NCHW',
    ):
        fusion = pool_options(fusion)
        super().__init__(fusion, num_features, flatten=flatten, input_fmt=input_fmt)
        if isinstance(heads, str) or len(heads) < 2:
            raise ValueError(f'heads must be at least two pooling options, got {heads!r}')
        if gated and num_features is None:
            raise ValueError('num_features must be given for a gated pooling, got None')
        if fusion.prior != 'uniform':
            raise ValueError(f"the fusing pooling learns its own prior: prior must be 'uniform', got {fusion.prior!r}")
        parts = [ROTPool(head, num_features) for head in heads]
        for part in parts:
            part.is_part = True
        self.heads = nn.ModuleList(parts)
        self.omega = None if gated else nn.Parameter(torch.zeros(len(heads)))
        self.gate = nn.Linear(num_features, len(heads)) if gated and num_features is not None else None
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)

    @classmethod
    def mean_max(cls, *, gated: bool = False, num_features: int | None = None, flatten: bool = True):
        """ω · mean + (1 - ω) · max, ω learned (paper, Proposition 2); gated: ω a sigmoid of the mean feature."""
        return cls([MEAN_POOL, MAX_POOL], MEAN_POOL, num_features, gated=gated, flatten=flatten)

    def forward(self, x: Tensor) -> Tensor:
        sets = self.sets(x)
        return self.shaped(self.pool_sets(self._pool_heads(sets), log_sample_prior=self._head_logits(sets)))

    def map_log_plan(self, x: Tensor) -> Tensor:
        """(B, D, N) log plan of mass one under which this layer averages: the heads' plans, fused row by row."""
        sets = self.sets(x)
        fusion = self.log_plan(self._pool_heads(sets), log_sample_prior=self._head_logits(sets)).log_softmax(2)
        rows = torch.stack([cast(ROTPool, head).log_plan(sets).log_softmax(2) for head in self.heads], 2)
        # fusion (B, D, M), rows (B, D, M, N)
        return (fusion.unsqueeze(3) + rows).logsumexp(2) - math.log(sets.shape[1])

    def _pool_heads(self, sets: Tensor) -> Tensor:
        """(B, D, M) pooled features of each head."""
        return torch.stack([cast(ROTPool, head).pool_sets(sets) for head in self.heads], 2)

    def _head_logits(self, sets: Tensor) -> Tensor:
        if self.gate is not None:
            return self.gate(sets.mean(2))
        assert self.omega is not None
        return self.omega.unsqueeze(0)


class ROTSetFusion(OneNode):
    """Pooling of sets of sets (paper, eq. "hrotp"): views, crops or tiles of an image, bags of graphs.

        f = f_rot([g(f_rot(X_1; θ_1)), …, g(f_rot(X_M; θ_1))]; θ_2)

    Args:
        within: options of the pooling inside each set.
        between: options of the pooling over the sets.
        network: g, from D to D' features; identity if None.
        num_features: D; needed only for attention priors and a gain per channel inside the sets.
        num_fused: D', the same for the pooling over the sets; None means D.

    Shapes:
        Maps (B, M, C, H, W), or sets (B, M, N, D) with an optional mask (B, M, N), to (B, D'). A set whose samples are
        all masked is masked itself.

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

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
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
        pooled = self.network(self.within.pool_sets(sets.flatten(0, 1), mask))  # (B M, D')
        return self.between.pool_sets(pooled.unflatten(0, (batch, num_sets)).transpose(1, 2), present)
