"""The Gromov-Wasserstein structural term."""

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from rotp_vision.core.chunks import device_type

if TYPE_CHECKING:
    from rotp_vision.core.problem import ROTProblem

Similarity = Literal['covariance', 'cosine']


def structural_force(problem: 'ROTProblem', plan: Tensor, similarity: Similarity = 'covariance') -> Tensor:
    """Σ1 P Σ2ᵀ = -C(X, P) (paper, eq. "cov"), without ever forming the larger of Σ1 (D, D) and Σ2 (N, N).

    Both are Gram matrices of the centred (or normalised) set, Σ1 = L Lᵀ and Σ2 = Rᵀ R with L, R of shape (D, N), so

        Σ1 P Σ2 = L (Lᵀ P Rᵀ R)   if D > N, else   (L Lᵀ P Rᵀ) R

    which costs O(D N min(D, N)) instead of O(D² N + D N²).

    Args:
        problem: the batch of problems.
        plan: (B, D, N) P, zero on masked samples.
        similarity: 'covariance' (the paper's: Σ1 over samples, Σ2 over features) or 'cosine' (of rows, of columns).

    Returns:
        (B, D, N), zero on masked samples.
    """
    left, right = similarity_factors(problem.scaled_features(), problem.mask, similarity)
    return apply_factors(left, right, plan)


def similarity_factors(x: Tensor, mask: Tensor | None, similarity: Similarity) -> tuple[Tensor, Tensor]:
    """L and R, both (B, D, N), with Σ1 = L Lᵀ and Σ2 = Rᵀ R; zero on masked samples, as is `x` (B, D, N)."""
    num_features, num_samples = x.shape[1:]
    if similarity == 'covariance':
        count = num_samples if mask is None else mask.sum(-1, keepdim=True, dtype=x.dtype)
        left = x - x.sum(-1, keepdim=True) / count
        if mask is not None:
            left = left * mask
        return left * count**-0.5, (x - x.mean(1, keepdim=True)) * num_features**-0.5
    if similarity == 'cosine':
        return x * length_scale(x, 2), x * length_scale(x, 1)
    raise ValueError(f"similarity must be 'covariance' or 'cosine', got {similarity!r}")


def length_scale(x: Tensor, dim: int) -> Tensor:
    """What scales `x` to length one along `dim`; what has no length has no direction: zero, with zero slope."""
    square = x.square().sum(dim, keepdim=True)
    # The slope of rsqrt is its cube, which must not overflow either.
    return square.masked_fill(square < torch.finfo(x.dtype).tiny ** 0.5, torch.inf).rsqrt()


def check_similarity(structure: bool, similarity: Similarity | None) -> None:
    """Raise if `similarity` is unknown, or given without a structural term."""
    if similarity not in (None, *get_args(Similarity)):
        raise ValueError(f'similarity must be one of {", ".join(get_args(Similarity))}, got {similarity!r}')
    if similarity is not None and not structure:
        raise ValueError('similarity has no effect without structural term; leave it out, or give structure')


def apply_factors(left: Tensor, right: Tensor, plan: Tensor) -> Tensor:
    """L Lᵀ P Rᵀ R for factors and plan (B, D, N), in the order that needs no matrix larger than min(D, N)²."""
    # Half-precision matrix products would lose the plan's small entries.
    with torch.autocast(device_type(plan), enabled=False):
        if plan.shape[1] > plan.shape[2]:
            return left @ ((left.mT @ plan) @ (right.mT @ right))
        return ((left @ left.mT) @ (plan @ right.mT)) @ right
