"""The structural term inside an operator: its force on a plan, and the way back."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rotp_vision.core.explicit.scratch import Scratch
from rotp_vision.core.structure import Similarity, length_scale


class Applied(NamedTuple):
    """What is kept of one application to a plan P: all (b, M, M), M = min(D, N)."""

    projected: Tensor  # Pᵀ A
    mixed: Tensor  # Bᵀ B Pᵀ A
    mixing: Tensor  # W with it, which acts


class AppliedToProduct(NamedTuple):
    """What is kept of the application to a plan p q: as it has rank one, so has all that comes of it."""

    tall: Tensor  # (b, L, 1) the longer of p and q, L = max(D, N)
    wide: Tensor  # (b, 1, M) the other
    projected: Tensor  # (b, 1, M) tallᵀ A
    mixed: Tensor  # (b, M, 1) Bᵀ B wideᵀ
    pushed: Tensor  # (b, L, 1) A Aᵀ tall
    mixing: Tensor  # (b, M, M) W, of nothing else


class Structure:
    """The force A Wᵀ of a chunk, whose W (b, M, M) gathers what the plans add to it; see `structural_force`.

    Where D ≥ N = M, a plan adds Σ1 P Σ2 = A (Aᵀ P Bᵀ B) with A = L, B = R, that is Bᵀ B Pᵀ A to W. Where D < N the
    same is done to the transpose, Σ2 Pᵀ Σ1 with A = Rᵀ, B = Lᵀ.
    """

    def __init__(self, x: Tensor, masked: Tensor | None, similarity: Similarity, scratch: Scratch) -> None:
        """Of X (b, D, N), zero on masked samples; `masked` (b, 1, N) says which are."""
        self._x, self._similarity = x, similarity
        self._transposed = x.shape[1] < x.shape[2]
        if similarity == 'covariance':
            count = x.shape[2] if masked is None else x.shape[2] - masked.sum(2, keepdim=True, dtype=x.dtype)
            left = torch.sub(x, x.sum(2, keepdim=True) / count, out=scratch.take())
            if masked is not None:
                left = torch.mul(left, ~masked, out=scratch.over(left))
            right = torch.sub(x, x.mean(1, keepdim=True), out=scratch.take())
            self._scale = 1 / (count * x.shape[1])
        else:
            left, right = (torch.mul(x, length_scale(x, dim), out=scratch.take()) for dim in (2, 1))
            self._scale = 1.0
        self._a, self._b = (right.mT, left.mT) if self._transposed else (left, right)
        self._gram = self._scale * (self._b.mT @ self._b)
        self._one = self._gram.new_ones(())
        # With its shorter axis contiguous, beside a plan's contiguous features: the fastest way to multiply, the
        # more so if its rows begin where vectors of a processor do.
        width = self._a.shape[2]
        self._twin = pad(self._a, (0, -width % 16)).contiguous()[..., :width]
        self._scratch = scratch
        self._buffer: Tensor | None = None

    def _spare(self) -> Tensor | None:
        """A tall buffer, one for all."""
        if self._buffer is None:
            buffer = self._scratch.take()
            self._buffer = None if buffer is None else self._tall(buffer)
        return self._buffer

    def largest(self) -> Tensor:
        """A bound on |Σ1 P Σ2|, P of mass one: the entries of both are below the largest on their diagonals."""
        squares = torch.mul(self._a, self._a, out=self._spare())
        return squares.sum(2).amax() * self._gram.diagonal(dim1=1, dim2=2).amax()

    def _tall(self, values: Tensor) -> Tensor:
        """From (b, D, N) to what has more rows than columns, and back."""
        return values.mT if self._transposed else values

    def _add_product(
        self, onto: Tensor, first: Tensor, second: Tensor, out: Tensor | None, beta: float = 1.0
    ) -> Tensor:
        """beta · onto + first @ second, all tall but the second, in the order in which they are contiguous."""
        if self._transposed:
            return torch.baddbmm(onto, first, second, beta=beta, out=out)
        return torch.baddbmm(onto.mT, second.mT, first.mT, beta=beta, out=None if out is None else out.mT).mT

    def _weigh(self, values: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """values · weight (b, D, N) as a tall matrix and what its columns are yet to be multiplied with."""
        tall = self._tall(values)
        if weight is None:
            return tall, None
        along = self._tall(weight)
        if along.shape[1] == 1:
            return tall, along
        return torch.mul(tall, along, out=self._spare()), None

    def push(
        self, mixing: Tensor, values: Tensor, weight: Tensor | None, strength: Tensor, damping: Tensor | None
    ) -> Applied:
        """Add strength · Σ1 P Σ2, where P = values · weight, to the force of W = `mixing`; then all is damped."""
        tall, columns = self._weigh(values, weight)
        projected = torch.bmm(tall.mT, self._twin)
        if columns is not None:
            projected = projected * columns.mT
        mixed = torch.bmm(self._gram, projected)
        mixing = torch.addcmul(mixing, mixed, strength)
        return Applied(projected, mixed, mixing if damping is None else mixing * damping)

    def act(self, onto: Tensor, mixing: Tensor, scratch: Scratch) -> Tensor:
        """`onto` + A Wᵀ, written over `onto`."""
        tall = self._tall(onto)
        return self._tall(self._add_product(tall, self._a, mixing.mT, scratch.over(tall)))

    def push_product(self, p: Tensor, q: Tensor, strength: Tensor) -> AppliedToProduct:
        """As `push`, the first of all, to the plan p q of p (b, D, 1) and q (b, 1, N)."""
        tall, wide = (q.mT, p.mT) if self._transposed else (p, q)
        projected, mixed = tall.mT @ self._twin, self._gram @ wide.mT
        return AppliedToProduct(tall, wide, projected, mixed, self._a @ projected.mT, (strength * mixed) * projected)

    def act_product(self, onto: Tensor, applied: AppliedToProduct, strength: Tensor, scratch: Scratch) -> Tensor:
        """As `act` with the W of `applied`."""
        tall = self._tall(onto)
        return self._tall(torch.addcmul(tall, applied.pushed, strength * applied.mixed.mT, out=scratch.over(tall)))

    def start_back(self, dx: Tensor | None, scratch: Scratch) -> None:
        """From now on the gradient of X is added to `dx` (b, D, N), if wanted: complete after `end_back`."""
        # Through the centring of A nothing changes: A and so W have rows of mean zero, which d_a takes over.
        self._dx, self._d_a = dx, None
        if dx is not None:
            self._d_a = self._tall(dx if self._similarity == 'covariance' else scratch.buffer().zero_())
        self._d_gram = torch.zeros_like(self._gram)
        self._d_mixing = torch.zeros_like(self._gram)

    def act_back(self, grad: Tensor, mixing: Tensor) -> None:
        """Back through `act`: `grad` (b, D, N) is the gradient of its result."""
        tall = self._tall(grad)
        self._d_mixing.baddbmm_(tall.mT, self._twin)
        if self._d_a is not None:
            self._add_product(self._d_a, tall, mixing, self._d_a)

    def damp_back(self, damping: Tensor, applied: Applied) -> Tensor:
        """Back through the damping of `push`: its slope, times itself, is returned."""
        slope = torch.dot(self._d_mixing.view(-1), applied.mixing.view(-1))
        self._d_mixing.mul_(damping)
        return slope

    def push_back(
        self, values: Tensor, weight: Tensor | None, strength: Tensor, applied: Applied, out: Tensor
    ) -> Tensor:
        """Back through the rest of `push`: the gradient of the plan goes to `out`, that of strength is returned."""
        slope = torch.dot(self._d_mixing.view(-1), applied.mixed.view(-1))
        d_mixed = strength * self._d_mixing
        d_projected = torch.bmm(self._gram, d_mixed)
        tall = self._tall(out)
        self._add_product(tall, self._a, d_projected.mT, tall, beta=0.0)
        if self._d_a is not None:
            tall, columns = self._weigh(values, weight)
            d_projected = d_projected if columns is None else d_projected.mul_(columns.mT)
            self._add_product(self._d_a, tall, d_projected, self._d_a)
            self._d_gram.baddbmm_(d_mixed, applied.projected.mT)
        return slope

    def product_back(self, grad: Tensor, strength: Tensor, applied: AppliedToProduct) -> tuple[Tensor, Tensor, Tensor]:
        """Back through `act_product`, whose result has the gradient `grad` (b, D, N), and `push_product`.

        Returns:
            The gradients of strength, of log p (b, D, 1) and of log q (b, 1, N).
        """
        # As `act_back` and `push_back` do. The gradient of W, d_mixing + gradᵀ A, is multiplied with vectors only, so
        # it is not formed.
        _, wide, projected, mixed, pushed, _ = applied
        grad = self._tall(grad)
        moved = grad @ mixed
        d_projected = mixed.mT @ self._d_mixing + moved.mT @ self._twin
        d_mixed = self._d_mixing @ projected.mT + grad.mT @ pushed
        slope = (d_projected * projected).sum()
        d_projected, d_mixed = strength * d_projected, strength * d_mixed
        if self._d_a is not None:
            self._d_a.addcmul_(strength * moved, projected).addcmul_(applied.tall, d_projected)
            self._d_gram.addcmul_(d_mixed, wide)
        d_log_tall, d_log_wide = applied.tall * (self._a @ d_projected.mT), wide * (d_mixed.mT @ self._gram)
        return slope, *((d_log_wide.mT, d_log_tall.mT) if self._transposed else (d_log_tall, d_log_wide))

    def force(self, plan: Tensor) -> tuple[Tensor, Applied]:
        """Σ1 P Σ2 of a plan P (b, D, N) by itself, and what `force_back` needs."""
        applied = self.push(torch.zeros_like(self._gram), plan, None, self._one, None)
        tall = self._tall(plan)
        return self._tall(self._add_product(tall, self._a, applied.mixing.mT, None, beta=0.0)), applied

    def force_back(self, grad: Tensor, plan: Tensor, applied: Applied, out: Tensor) -> Tensor:
        """Back through `force`: the gradient of the plan, in `out`."""
        self._d_mixing.zero_()
        self.act_back(grad, applied.mixing)
        self.push_back(plan, None, self._one, applied, out)
        return out

    def end_back(self) -> None:
        if self._dx is None or self._d_a is None:
            return
        dx, d_gram = self._tall(self._dx), self._scale * (self._d_gram + self._d_gram.mT)
        if self._similarity == 'covariance':
            self._add_product(dx, self._b, d_gram, dx)  # whose mean is zero for the same reason
            return
        d_left, d_right = self._tall(self._d_a), self._tall(self._b @ d_gram)
        if self._transposed:
            d_left, d_right = d_right, d_left
        self._dx.add_(_normalize_back(self._x, d_left, 2)).add_(_normalize_back(self._x, d_right, 1))


def _normalize_back(x: Tensor, grad: Tensor, dim: int) -> Tensor:
    """Through x / |x| along `dim`."""
    scale = length_scale(x, dim)
    return scale * (grad - x * scale.square() * (x * grad).sum(dim, keepdim=True))
