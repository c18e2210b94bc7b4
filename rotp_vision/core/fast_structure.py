"""The structural term inside an operator: its force on a plan, and the way back."""

from typing import NamedTuple

import torch
from torch import Tensor

from rotp_vision.core.ops import Inputs
from rotp_vision.core.problem import ROTProblem
from rotp_vision.core.scratch import Scratch
from rotp_vision.core.structure import Similarity, length_scale, similarity_factors


class Applied(NamedTuple):
    """What is kept of one application to a plan P: both (b, N, N), small."""

    projected: Tensor  # Lᵀ P
    mixed: Tensor  # Lᵀ P Rᵀ R


class Structure:
    """Σ1 P Σ2 = L (Lᵀ P Rᵀ R) of a chunk, in the order that suits D > N; see `structural_force`."""

    def __init__(self, inputs: Inputs, x: Tensor, similarity: Similarity) -> None:
        self._x = x
        self._mask = inputs.log_q0 > -torch.inf
        self._similarity: Similarity = similarity
        problem = ROTProblem(x, inputs.log_p0.squeeze(2), inputs.log_q0.squeeze(1), self._mask)
        self._left, self._right = similarity_factors(problem, similarity)
        self._gram = self._right.mT @ self._right
        # With contiguous samples, beside the plan's contiguous features: the fastest of the ways to multiply them.
        self._twin = self._left.contiguous()

    def _project(self, plan: Tensor) -> Tensor:
        """(b, N, N) Lᵀ plan."""
        return torch.bmm(plan.mT, self._twin).mT

    def push(self, onto: Tensor, plan: Tensor, weight: Tensor, scratch: Scratch) -> tuple[Tensor, Applied]:
        """`onto` + weight · Σ1 plan Σ2, written over `onto`."""
        projected = self._project(plan)
        mixed = projected @ self._gram
        out = scratch.over(onto)
        # Transposed, so that all matrices are contiguous.
        result = torch.baddbmm(onto.mT, (weight * mixed).mT, self._left.mT, out=None if out is None else out.mT)
        return result.mT, Applied(projected, mixed)

    def start_back(self, scratch: Scratch) -> None:
        self._d_left = scratch.buffer().zero_()
        self._d_gram = torch.zeros_like(self._gram)

    def back(self, grad: Tensor, plan: Tensor, weight: Tensor, applied: Applied, out: Tensor) -> Tensor:
        """The gradient of weight, where `grad` is that of the sum `push` makes; that of the plan goes to `out`."""
        d_mixed = self._project(grad)
        slope = (d_mixed * applied.mixed).sum()
        d_mixed = weight * d_mixed
        d_projected = d_mixed @ self._gram
        torch.bmm(d_projected.mT, self._left.mT, out=out.mT)
        self._d_left.mT.baddbmm_((weight * applied.mixed), grad.mT)
        self._d_left.mT.baddbmm_(d_projected, plan.mT)
        self._d_gram.baddbmm_(applied.projected.mT, d_mixed)
        return slope

    def dx(self) -> Tensor:
        """(b, D, N) what all applications that were gone back through add to the gradient of X."""
        d_left, d_right = self._d_left, self._right @ (self._d_gram + self._d_gram.mT)
        if self._similarity == 'cosine':
            return _normalize_back(self._x, d_left, 2) + _normalize_back(self._x, d_right, 1)
        count = self._mask.sum(2, keepdim=True, dtype=d_left.dtype)
        d_left = d_left * self._mask * count**-0.5
        d_left -= d_left.sum(2, keepdim=True) / count
        d_right -= d_right.mean(1, keepdim=True)
        return d_left.add_(d_right, alpha=d_right.shape[1] ** -0.5)


def _normalize_back(x: Tensor, grad: Tensor, dim: int) -> Tensor:
    """Through x / |x| along `dim`."""
    scale = length_scale(x, dim)
    return scale * (grad - x * scale.square() * (x * grad).sum(dim, keepdim=True))
