"""The structural term inside an operator: its force on a plan, and the way back."""

from typing import NamedTuple

import torch
from torch import Tensor

from rotp_vision.core.ops import Inputs
from rotp_vision.core.problem import ROTProblem
from rotp_vision.core.scratch import Scratch
from rotp_vision.core.structure import Similarity, length_scale, similarity_factors


class Applied(NamedTuple):
    """What is kept of one application to a plan P: all (b, N, N), small."""

    projected: Tensor  # Lᵀ P
    mixed: Tensor  # Lᵀ P Rᵀ R
    mixing: Tensor  # W with it


class Structure:
    """The force L W of a chunk, whose W (b, N, N) gathers what the plans add to it; see `structural_force`.

    A plan adds Σ1 P Σ2 = L (Lᵀ P Rᵀ R), that is Lᵀ P Rᵀ R to W: the order that suits D > N.
    """

    def __init__(self, inputs: Inputs, x: Tensor, similarity: Similarity) -> None:
        self._x = x
        self._mask = inputs.log_q0 > -torch.inf
        self._similarity: Similarity = similarity
        problem = ROTProblem(x, inputs.log_p0.squeeze(2), inputs.log_q0.squeeze(1), self._mask)
        self._left, self._right = similarity_factors(problem, similarity)
        self._gram = self._right.mT @ self._right
        # With contiguous samples, beside the plan's contiguous features: the fastest of the ways to multiply them.
        self._twin = self._left.contiguous()

    def largest(self) -> Tensor:
        """A bound on |Σ1 P Σ2|, P of mass one: the entries of both are below the largest on their diagonals."""
        return self._left.square().sum(2).amax() * self._gram.diagonal(dim1=1, dim2=2).amax()

    def _project(self, plan: Tensor) -> Tensor:
        """(b, N, N) Lᵀ plan."""
        return torch.bmm(plan.mT, self._twin).mT

    def push(self, mixing: Tensor | None, plan: Tensor, weight: Tensor) -> Applied:
        """Add weight · Σ1 plan Σ2 to the force L W, where W = `mixing`."""
        projected = self._project(plan)
        mixed = projected @ self._gram
        added = weight * mixed
        return Applied(projected, mixed, added if mixing is None else mixing + added)

    def act(self, onto: Tensor, mixing: Tensor, scratch: Scratch) -> Tensor:
        """`onto` + L W, written over `onto`."""
        out = scratch.over(onto)
        # Transposed, so that all matrices are contiguous.
        return torch.baddbmm(onto.mT, mixing.mT, self._left.mT, out=None if out is None else out.mT).mT

    def start_back(self, scratch: Scratch) -> None:
        self._d_left = scratch.buffer().zero_()
        self._d_gram = torch.zeros_like(self._gram)
        self.d_mixing = torch.zeros_like(self._gram)

    def act_back(self, grad: Tensor, mixing: Tensor) -> None:
        """Back through `act`: `grad` (b, D, N) is the gradient of its result."""
        self.d_mixing += self._project(grad)
        self._d_left.mT.baddbmm_(mixing, grad.mT)

    def push_back(self, plan: Tensor, weight: Tensor, applied: Applied, out: Tensor) -> Tensor:
        """Back through `push`: the gradient of the plan goes to `out`, that of weight is returned."""
        slope = (self.d_mixing * applied.mixed).sum()
        d_mixed = weight * self.d_mixing
        d_projected = d_mixed @ self._gram
        torch.bmm(d_projected.mT, self._left.mT, out=out.mT)
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
