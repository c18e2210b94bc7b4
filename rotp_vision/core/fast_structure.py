"""The structural term inside an operator: its force on a plan, and the way back."""

from typing import NamedTuple

import torch
from torch import Tensor

from rotp_vision.core.ops import Inputs
from rotp_vision.core.problem import ROTProblem
from rotp_vision.core.scratch import Scratch
from rotp_vision.core.structure import Similarity, length_scale, similarity_factors


class Applied(NamedTuple):
    """What is kept of one application to a plan P: all (b, M, M), M = min(D, N)."""

    projected: Tensor  # Aᵀ P
    mixed: Tensor  # Aᵀ P Bᵀ B
    mixing: Tensor  # W with it


class AppliedToProduct(NamedTuple):
    """What is kept of the application to a plan p q: as it has rank one, so has all that comes of it."""

    tall: Tensor  # (b, L, 1) the longer of p and q, L = max(D, N)
    wide: Tensor  # (b, 1, M) the other
    projected: Tensor  # (b, M, 1) Aᵀ tall
    mixed: Tensor  # (b, 1, M) wide Bᵀ B
    pushed: Tensor  # (b, L, 1) A Aᵀ tall
    mixing: Tensor  # (b, M, M) W, of nothing else


class Structure:
    """The force A W of a chunk, whose W (b, M, M) gathers what the plans add to it; see `structural_force`.

    Where D ≥ N = M, a plan adds Σ1 P Σ2 = A (Aᵀ P Bᵀ B) with A = L, B = R, that is Aᵀ P Bᵀ B to W. Where D < N the
    same is done to the transpose, Σ2 Pᵀ Σ1 with A = Rᵀ, B = Lᵀ.
    """

    def __init__(self, inputs: Inputs, x: Tensor, similarity: Similarity) -> None:
        self._x = x
        self._mask = inputs.log_q0 > -torch.inf
        self._similarity: Similarity = similarity
        self._transposed = x.shape[1] < x.shape[2]
        problem = ROTProblem(x, inputs.log_p0.squeeze(2), inputs.log_q0.squeeze(1), self._mask)
        left, right = similarity_factors(problem, similarity)
        self._a, self._b = (right.mT, left.mT) if self._transposed else (left, right)
        self._gram = self._b.mT @ self._b
        # With its shorter axis contiguous, beside a plan's contiguous features: the fastest of the ways to multiply, the
        # more so if its rows begin where vectors of a processor do.
        num_sets, length, width = self._a.shape
        self._twin = self._a.new_empty(num_sets, length, -(-width // 16) * 16)[..., :width].copy_(self._a)

    def largest(self) -> Tensor:
        """A bound on |Σ1 P Σ2|, P of mass one: the entries of both are below the largest on their diagonals."""
        return self._a.square().sum(2).amax() * self._gram.diagonal(dim1=1, dim2=2).amax()

    def _tall(self, values: Tensor) -> Tensor:
        """From (b, D, N) to what has more rows than columns, and back."""
        return values.mT if self._transposed else values

    def _project(self, tall: Tensor) -> Tensor:
        """(b, M, M) Aᵀ · tall."""
        return torch.bmm(tall.mT, self._twin).mT

    def _add_product(
        self, onto: Tensor, first: Tensor, second: Tensor, out: Tensor | None, beta: float = 1.0
    ) -> Tensor:
        """beta · onto + first @ second, all tall but the second, in the order in which they are contiguous."""
        if self._transposed:
            return torch.baddbmm(onto, first, second, beta=beta, out=out)
        return torch.baddbmm(onto.mT, second.mT, first.mT, beta=beta, out=None if out is None else out.mT).mT

    def push(self, mixing: Tensor | None, plan: Tensor, weight: Tensor) -> Applied:
        """Add weight · Σ1 plan Σ2 to the force A W, where W = `mixing`."""
        projected = self._project(self._tall(plan))
        mixed = projected @ self._gram
        added = weight * mixed
        return Applied(projected, mixed, added if mixing is None else mixing + added)

    def act(self, onto: Tensor, mixing: Tensor, scratch: Scratch) -> Tensor:
        """`onto` + A W, written over `onto`."""
        tall = self._tall(onto)
        return self._tall(self._add_product(tall, self._a, mixing, scratch.over(tall)))

    def push_product(self, p: Tensor, q: Tensor, weight: Tensor) -> AppliedToProduct:
        """As `push`, the first of all, to the plan p q of p (b, D, 1) and q (b, 1, N)."""
        tall, wide = (q.mT, p.mT) if self._transposed else (p, q)
        projected, mixed = self._twin.mT @ tall, wide @ self._gram
        return AppliedToProduct(tall, wide, projected, mixed, self._a @ projected, projected * (weight * mixed))

    def act_product(self, onto: Tensor, applied: AppliedToProduct, weight: Tensor, scratch: Scratch) -> Tensor:
        """As `act` with the W of `applied`."""
        tall = self._tall(onto)
        return self._tall(torch.addcmul(tall, applied.pushed, weight * applied.mixed, out=scratch.over(tall)))

    def start_back(self, scratch: Scratch, needs_x: bool) -> None:
        self._d_a = self._tall(scratch.buffer().zero_()) if needs_x else None
        self._d_gram = torch.zeros_like(self._gram)
        self.d_mixing = torch.zeros_like(self._gram)

    def act_back(self, grad: Tensor, mixing: Tensor) -> None:
        """Back through `act`: `grad` (b, D, N) is the gradient of its result."""
        tall = self._tall(grad)
        self.d_mixing += self._project(tall)
        if self._d_a is not None:
            self._add_product(self._d_a, tall, mixing.mT, self._d_a)

    def push_back(self, plan: Tensor, weight: Tensor, applied: Applied, out: Tensor) -> Tensor:
        """Back through `push`: the gradient of the plan goes to `out`, that of weight is returned."""
        slope = (self.d_mixing * applied.mixed).sum()
        d_mixed = weight * self.d_mixing
        d_projected = d_mixed @ self._gram
        tall = self._tall(out)
        self._add_product(tall, self._a, d_projected, tall, beta=0.0)
        if self._d_a is not None:
            self._add_product(self._d_a, self._tall(plan), d_projected.mT, self._d_a)
            self._d_gram.baddbmm_(applied.projected.mT, d_mixed)
        return slope

    def product_back(
        self, grad: Tensor, weight: Tensor, applied: AppliedToProduct
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Back through `act_product`, whose result has the gradient `grad` (b, D, N), and `push_product`.

        Returns:
            The gradients of weight, of log p (b, D, 1) and of log q (b, 1, N).
        """
        # What `act_back` and `push_back` do, where their d_mixing, here D = d_mixing + Aᵀ grad, is never needed but
        # between two vectors.
        grad = self._tall(grad)
        moved = grad @ applied.mixed.mT
        right = self.d_mixing @ applied.mixed.mT + self._twin.mT @ moved  # D mixedᵀ
        left = applied.projected.mT @ self.d_mixing + applied.pushed.mT @ grad  # projectedᵀ D
        slope = (applied.projected * right).sum()
        right, left, moved = weight * right, weight * left, weight * moved
        if self._d_a is not None:
            self._d_a.addcmul_(moved, applied.projected.mT).addcmul_(applied.tall, right.mT)
            self._d_gram.addcmul_(applied.wide.mT, left)
        d_tall, d_wide = applied.tall * (self._a @ right), applied.wide * (left @ self._gram)
        return slope, *((d_wide.mT, d_tall.mT) if self._transposed else (d_tall, d_wide))

    def dx(self) -> Tensor:
        """(b, D, N) what all applications that were gone back through add to the gradient of X."""
        assert self._d_a is not None
        d_a, d_b = self._tall(self._d_a), self._tall(self._b @ (self._d_gram + self._d_gram.mT))
        d_left, d_right = (d_b, d_a) if self._transposed else (d_a, d_b)
        if self._similarity == 'cosine':
            return _normalize_back(self._x, d_left, 2) + _normalize_back(self._x, d_right, 1)
        count = self._mask.sum(2, keepdim=True, dtype=d_left.dtype)
        d_left = d_left * self._mask * count**-0.5
        d_left -= d_left.sum(2, keepdim=True) / count
        d_right = d_right - d_right.mean(1, keepdim=True)
        return d_left.add_(d_right, alpha=d_right.shape[1] ** -0.5)


def _normalize_back(x: Tensor, grad: Tensor, dim: int) -> Tensor:
    """Through x / |x| along `dim`."""
    scale = length_scale(x, dim)
    return scale * (grad - x * scale.square() * (x * grad).sum(dim, keepdim=True))
