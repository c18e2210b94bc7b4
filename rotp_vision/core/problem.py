"""The data of a batch of regularized optimal transport (ROT) problems, and its objective.

Shapes, used everywhere in this package:

    B   sets in the batch (images)
    D   features of a sample (channels)
    N   samples of a set (pixels)
    K   iterations of a solver
    T   sets of weights of a solver: one, or one per iteration

One set is X of shape (D, N); a feature map (B, C, H, W) is (B, D, N) with its last two axes flattened.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rotp_vision.core.structure import Similarity, structural_force

Regularizer = Literal['entropic', 'quadratic']
FeatureScale = Literal['raw', 'rms', 'log']

# Channels and samples below this magnitude count as silent. It bounds the slope of the feature scales and of the norm
# prior, which would be infinite at zero.
FLOOR = 1e-3
# Squares of features from about 1e-5 to 1e30 stay in float32's range after this factor, a power of two.
SQUARE_SCALE = 2.0**-46


class ROTProblem(NamedTuple):
    """A checked batch of problems; make it with [`rot_problem`][rotp_vision.core.rot_problem]."""

    features: Tensor  # (B, D, N) what is averaged, in any floating dtype, zero on masked samples
    log_feature_prior: Tensor  # (B or 1, D) log p0
    log_sample_prior: Tensor  # (B or 1, N) log q0 without the norm prior; zero, not -inf, on masked samples
    mask: Tensor | None = None  # (B, 1, N) bool, True on the samples that exist
    feature_scale: str = 'raw'  # what the plan is computed from, see `scale_features`
    norm_power: Tensor | None = None  # (1,) β of the norm prior q0 ∝ ‖x_n‖^β; None for none
    has_priors: bool = False  # whether p0 or q0 were given, so that they may be of any size

    def scaled_features(self) -> Tensor:
        """(B, D, N) what the plan is computed from, in the dtype of the priors; zero on masked samples."""
        x = self.features.to(self.log_feature_prior.dtype)
        return (
            x
            if self.feature_scale == 'raw'
            else zero_masked(scale_features(x, self.feature_scale, self.mask), self.mask)
        )

    def with_norm_prior(self) -> 'ROTProblem':
        """The same problem with the norm prior made part of `log_sample_prior`."""
        if self.norm_power is None:
            return self
        log_q0 = self.log_sample_prior + self.norm_power.to(self.log_sample_prior.dtype) * log_norm(self.features)
        if self.mask is None:
            log_q0 = log_q0.log_softmax(-1)
        else:
            masked = ~self.mask.squeeze(1)
            log_q0 = log_q0.masked_fill(masked, -torch.inf).log_softmax(-1).masked_fill(masked, 0.0)
        return self._replace(log_sample_prior=log_q0, norm_power=None)


def rot_problem(
    features: Tensor,
    log_feature_prior: Tensor | None = None,
    log_sample_prior: Tensor | None = None,
    mask: Tensor | None = None,
    feature_scale: str = 'raw',
    norm_power: Tensor | None = None,
) -> ROTProblem:
    """The batch of problems for `features`, checked, with normalised priors in float32 or wider.

    Args:
        features: (B, D, N), any floating dtype; solvers compute in that of the priors. Strided views (channels_last
            maps) are not copied.
        log_feature_prior: (B, D) or (1, D) log p0 up to a constant (logits are welcome); uniform if None.
        log_sample_prior: (B, N) or (1, N) log q0 up to a constant; uniform if None.
        mask: (B, N) bool, True where a sample exists; None where all do. A set without any sample is an error
            on CPU; elsewhere the check would synchronise the device, and such a set pools to NaN.
        feature_scale: what the plan is computed from, 'raw', 'rms' or 'log', see `scale_features`.
        norm_power: (1,) β; multiplies q0 by ‖x_n‖^β, the norm over the features of each sample.
    """
    _check(features, log_feature_prior, log_sample_prior, mask, feature_scale)
    x, dtype = features, torch.promote_types(features.dtype, torch.float32)
    has_priors = log_feature_prior is not None or log_sample_prior is not None
    if log_feature_prior is None:
        # Not by math.log, whose value a trace would fix for maps of any size.
        log_p0 = x.new_zeros([1, x.shape[1]], dtype=dtype).log_softmax(-1)
    else:
        # A feature without prior mass still has a row in the plan, whose entries must stay finite.
        log_p0 = log_feature_prior.to(dtype).log_softmax(-1).clamp_min(-1e4)
    if log_sample_prior is None and mask is None:
        log_q0 = x.new_zeros([1, x.shape[2]], dtype=dtype).log_softmax(-1)
        return ROTProblem(x, log_p0, log_q0, None, feature_scale, norm_power, has_priors)
    log_q0 = x.new_zeros([1, x.shape[2]], dtype=dtype) if log_sample_prior is None else log_sample_prior.to(dtype)
    if mask is None:
        return ROTProblem(x, log_p0, _finite(log_q0.log_softmax(-1)), None, feature_scale, norm_power, has_priors)
    # The one place where the mask meets the data: a masked sample is zero, so nothing it held can reach a result.
    masked = ~mask
    log_q0 = _finite(log_q0.masked_fill(masked, -torch.inf).log_softmax(-1)).masked_fill(masked, 0.0)
    x = x.masked_fill(masked.unsqueeze(1), 0.0)
    return ROTProblem(x, log_p0, log_q0, mask.unsqueeze(1), feature_scale, norm_power, has_priors)


def scale_features(x: Tensor, feature_scale: str, mask: Tensor | None = None) -> Tensor:
    """The features `x` (B, D, N), zero on masked samples, on the scale on which the plan sees them, float32 or wider.

        raw   x
        rms   x / sqrt(mean_n x² + FLOOR²)
        log   log(max(x, 0) + FLOOR)

    Args:
        x: (B, D, N), any floating dtype.
        feature_scale: which of the three.
        mask: (B, 1, N) bool, True on the samples that exist; None where all do.
    """
    if feature_scale == 'raw':
        return x
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if feature_scale == 'log':
        return (x.relu() + FLOOR).log()
    square = (x * SQUARE_SCALE).square()
    if mask is None:
        mean_square = square.mean(2, keepdim=True)
    else:
        mean_square = square.sum(2, keepdim=True) / mask.sum(2, keepdim=True)
    # A tensor, because the ONNX exporter takes an added number below 1e-8 for zero and drops it.
    floor = torch.full_like(mean_square, (FLOOR * SQUARE_SCALE) ** 2)
    # Not by rsqrt, the slope of which overflows at a silent channel.
    return x * (SQUARE_SCALE / (mean_square + floor).sqrt())


def log_norm(x: Tensor) -> Tensor:
    """(B, N) log of the norm of each sample of `x` (B, D, N), in float32 or wider; at least log FLOOR."""
    square = (x.to(torch.promote_types(x.dtype, torch.float32)) * SQUARE_SCALE).square().sum(1)
    return 0.5 * square.clamp_min((FLOOR * SQUARE_SCALE) ** 2).log() - math.log(SQUARE_SCALE)


def hide_masked(log_values: Tensor, mask: Tensor | None) -> Tensor:
    """`log_values` (B, D, N) with -inf, the logarithm of no mass, on masked samples."""
    return log_values if mask is None else log_values.masked_fill(~mask, -torch.inf)


def zero_masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """`values` (B, D, N) with zero on masked samples: a finite placeholder, never read."""
    return values if mask is None else values.masked_fill(~mask, 0.0)


def log_normalize(log_values: Tensor, dim: int) -> Tensor:
    """`log_values` (B, D, N) shifted to mass one along `dim`."""
    if log_values.is_contiguous():
        return log_values.log_softmax(dim)
    return log_values - log_values.logsumexp(dim, keepdim=True)  # which copies no strided tensor


def normalize_mass(log_plan: Tensor) -> Tensor:
    """`log_plan` (B, D, N) shifted to mass one per set; exact where its values are large, as max goes first."""
    return log_plan.flatten(1).log_softmax(-1).view(log_plan.shape)


def objective(
    problem: ROTProblem,
    log_plan: Tensor,
    *,
    smoothness: Tensor | float,
    feature_penalty: Tensor | float,
    sample_penalty: Tensor | float,
    structure: Tensor | float | None = None,
    regularizer: Regularizer = 'entropic',
    similarity: Similarity = 'covariance',
) -> Tensor:
    """How good a plan is, per set: the ROT objective (paper, eq. for P*_rot), lower is better.

        <-X, P> + α0 <C(X, P), P> + α1 R(P) + α2 KL(P1 | p0) + α3 KL(Pᵀ1 | q0)

    with C(X, P) = -Σ1 P Σ2ᵀ, and R(P) = <P, log P - 1> (entropic) or ||P||² (quadratic).

    Args:
        problem: the batch of problems.
        log_plan: (B, D, N) log P, -inf on masked samples.
        smoothness: α1.
        feature_penalty: α2.
        sample_penalty: α3.
        structure: α0; None leaves the structural term out.
        regularizer: R.
        similarity: what Σ1 and Σ2 are, see `structural_force`.

    Returns:
        (B,) the objective of each set.

    Example:
        The plan of a layer against that of average pooling, under the objective that the layer's weights define:

        >>> import torch
        >>> from rotp_vision.core import objective, rot_problem
        >>> from rotp_vision.layers import MEAN_POOL, GlobalROTPool2d
        >>> weights = {'smoothness': 0.3, 'feature_penalty': 0.5, 'sample_penalty': 0.5}
        >>> pool = GlobalROTPool2d({'solver': 'sinkhorn', 'feature_scale': 'raw', 'num_iters': 50, **weights})
        >>> maps = torch.rand(2, 8, 7, 7)
        >>> problem = rot_problem(maps.flatten(2))
        >>> own = objective(problem, pool.log_plan(maps).flatten(2), **weights)
        >>> mean = objective(problem, GlobalROTPool2d(MEAN_POOL).log_plan(maps).flatten(2), **weights)
        >>> bool((own < mean).all())
        True
    """
    problem = problem.with_norm_prior()
    x, log_p0, log_q0, mask = problem.scaled_features(), *problem[1:4]
    log_plan = hide_masked(log_plan, mask)
    plan = log_plan.exp()
    gain = x if structure is None else x + structure * structural_force(problem, plan, similarity)
    if regularizer == 'entropic':
        roughness = plan * (log_plan.clamp(min=torch.finfo(log_plan.dtype).min) - 1)  # finite, so that 0 log 0 = 0
    elif regularizer == 'quadratic':
        roughness = plan.square()
    else:
        raise ValueError(f"regularizer must be 'entropic' or 'quadratic', got {regularizer!r}")
    value = (smoothness * roughness - gain * plan).sum((1, 2))
    return (
        value
        + feature_penalty * _kl(plan.sum(2), log_p0, None)
        + sample_penalty * _kl(plan.sum(1), log_q0, None if mask is None else mask.squeeze(1))
    )


def _kl(mass: Tensor, log_prior: Tensor, mask: Tensor | None) -> Tensor:
    """(B,) KL(mass | prior) = <mass, log mass - log prior> - <mass - prior, 1>."""
    prior = log_prior.exp() if mask is None else log_prior.exp() * mask
    return (torch.special.xlogy(mass, mass) - mass * log_prior).sum(-1) - mass.sum(-1) + prior.sum(-1)


def _finite(log_prior: Tensor) -> Tensor:
    """A log prior without -inf, whose product with a gradient of zero would not be a number."""
    return log_prior.clamp_min(-1e30)


def _check(
    features: Tensor,
    log_feature_prior: Tensor | None,
    log_sample_prior: Tensor | None,
    mask: Tensor | None,
    feature_scale: str,
) -> None:
    if features.dim() != 3:
        raise ValueError(f'features must have shape (B, D, N), got {tuple(features.shape)}')
    if not features.is_floating_point():
        raise ValueError(f'features must be floating point, got {features.dtype}')
    if feature_scale not in get_args(FeatureScale):
        raise ValueError(f'feature_scale must be one of {", ".join(get_args(FeatureScale))}, got {feature_scale!r}')
    batch, num_features, num_samples = features.shape
    if num_features == 0 or num_samples == 0:
        raise ValueError(f'features must have at least one feature and one sample, got {tuple(features.shape)}')
    for name, prior, size in (
        ('log_feature_prior', log_feature_prior, num_features),
        ('log_sample_prior', log_sample_prior, num_samples),
    ):
        if prior is not None and (prior.dim() != 2 or prior.shape[1] != size or prior.shape[0] not in (1, batch)):
            raise ValueError(f'{name} must have shape ({batch} or 1, {size}), got {tuple(prior.shape)}')
    if mask is None:
        return
    if mask.shape != (batch, num_samples) or mask.dtype != torch.bool:
        raise ValueError(
            f'mask must be a bool tensor of shape ({batch}, {num_samples}), True where a sample exists, '
            f'got {mask.dtype} of shape {tuple(mask.shape)}'
        )
    # Reading values waits for the device, and graphs and vmap cannot branch on them: only eager CPU tensors are read.
    if mask.device.type != 'cpu' or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    if not bool(mask.any(1).all()):
        empty = (~mask.any(1)).nonzero().flatten().tolist()
        raise ValueError(f'mask must leave at least one sample in every set, got none in set(s) {empty}')
