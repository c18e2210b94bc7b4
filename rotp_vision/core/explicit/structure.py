"""The structural term inside an operator: its force on a plan, and the way back."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from rotp_vision.core.explicit.scratch import Scratch
from rotp_vision.core.structure import Similarity, length_scale


class Structure:
    """The force A Wᵀ of a chunk, whose W (b, M, M), M = min(D, N), is linear in the plans; see `structural_force`.

    Where D ≥ N = M, a plan has the force Σ1 P Σ2 = A (Aᵀ P Bᵀ B) with A = L, B = R, that is W = Bᵀ B Pᵀ A. Where D < N
    the same is done to the transpose, Σ2 Pᵀ Σ1 with A = Rᵀ, B = Lᵀ. The longer axis, L = max(D, N), is the first of a
    matrix that is called tall.
    """

    def __init__(
        self, x: Tensor, peak: Tensor | None, masked: Tensor | None, similarity: Similarity, scratch: Scratch
    ) -> None:
        """Of X (b, D, N), given as `x` + `peak` (b, D, 1), and zero where `masked` (b, 1, N)."""
        if peak is not None:
            x = torch.add(x, peak, out=scratch.take())
            x = x if masked is None else x.masked_fill_(masked, 0.0)
        self._x, self._similarity = x, similarity
        self._transposed = x.shape[1] < x.shape[2]
        if similarity == 'covariance':
            count = x.shape[2] if masked is None else x.shape[2] - masked.sum(2, keepdim=True, dtype=x.dtype)
            left = torch.sub(x, x.sum(2, keepdim=True) / count, out=scratch.take())
            left = left if masked is None else left.masked_fill_(masked, 0.0)
            right = torch.sub(x, x.mean(1, keepdim=True), out=scratch.take() if peak is None else x)
            self._scale = 1 / (count * x.shape[1])
        else:
            left, right = (torch.mul(x, length_scale(x, dim), out=scratch.take()) for dim in (2, 1))
            self._scale = 1.0
        self._factors = left, right  # of which the next are views
        self._a, self._b = (right.mT, left.mT) if self._transposed else (left, right)
        self._gram = self._scale * (self._b.mT @ self._b)
        # With its shorter axis contiguous, beside a plan's contiguous features: the fastest way to multiply, the
        # more so if its rows begin where vectors of a processor do.
        width = self._a.shape[2]
        self._twin = pad(self._a, (0, -width % 16)).contiguous()[..., :width]
        self._scratch = scratch

    def largest(self) -> float:
        """A bound on |Σ1 P Σ2|, P of mass one: the entries of both are below the largest on their diagonals."""
        factor = self._factors[self._transposed]
        squares = torch.mul(factor, factor, out=self._scratch.take()).sum(1 if self._transposed else 2)
        return float(squares.amax() * self._gram.diagonal(dim1=1, dim2=2).amax())

    def _tall(self, values: Tensor) -> Tensor:
        """From (b, D, N) to a tall matrix, and back."""
        return values.mT if self._transposed else values

    def _add_product(self, onto: Tensor, first: Tensor, second: Tensor, beta: float = 1.0) -> None:
        """Make it beta · onto + first @ second, all tall but the second, in the order in which they are contiguous."""
        if self._transposed:
            onto.baddbmm_(first, second, beta=beta)
        else:
            onto.mT.baddbmm_(second.mT, first.mT, beta=beta)

    def _weigh(self, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """(b, D, N) values · weight, and what the columns of it as a tall matrix are yet to be multiplied with."""
        along = self._tall(weight)
        if along.shape[1] == 1 and values.shape[1] == self._x.shape[1]:
            return values, along
        return torch.mul(values, weight, out=self._scratch.take()), None

    def push(self, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """W of the plan P = values · weight, and Pᵀ A, which `push_back` needs."""
        weighed, columns = self._weigh(values, weight)
        projected = torch.bmm(self._tall(weighed).mT, self._twin)
        if columns is not None:
            projected = projected * columns.mT
        return torch.bmm(self._gram, projected), projected

    def act(self, onto: Tensor, mixing: Tensor) -> None:
        """Add A Wᵀ to `onto`."""
        self._add_product(self._tall(onto), self._a, mixing.mT)

    def start_back(self, dx: Tensor | None) -> None:
        """From now on the gradient of X is added to `dx` (b, D, N), if wanted: complete after `end_back`."""
        # Through the centring of A nothing changes: A and so W have rows of mean zero, which d_a takes over.
        self._dx, self._d_a = dx, None
        if dx is not None:
            self._d_factor = dx if self._similarity == 'covariance' else self._scratch.take().zero_()
            self._d_a = self._tall(self._d_factor)
        self._d_gram = torch.zeros_like(self._gram)

    def act_back(self, grad: Tensor, mixing: Tensor, d_mixing: Tensor | None) -> Tensor:
        """Back through `act`, whose result has the gradient `grad`: the gradient of W, added to `d_mixing`."""
        tall = self._tall(grad)
        if self._d_a is not None:
            self._add_product(self._d_a, tall, mixing)
        return torch.bmm(tall.mT, self._twin) if d_mixing is None else d_mixing.baddbmm_(tall.mT, self._twin)

    def push_back(self, d_mixing: Tensor, values: Tensor, weight: Tensor, projected: Tensor, out: Tensor) -> None:
        """Back through `push`: the gradient of the plan goes to `out`."""
        d_projected = torch.bmm(self._gram, d_mixing)
        self._add_product(self._tall(out), self._a, d_projected.mT, beta=0.0)
        if self._d_a is not None:
            weighed, columns = self._weigh(values, weight)
            d_projected = d_projected if columns is None else d_projected.mul_(columns.mT)
            self._add_product(self._d_a, self._tall(weighed), d_projected)
            self._d_gram.baddbmm_(d_mixing, projected.mT)

    def end_back(self) -> None:
        if self._dx is None or self._d_a is None:
            return
        dx, d_gram = self._tall(self._dx), self._scale * (self._d_gram + self._d_gram.mT)
        if self._similarity == 'covariance':
            self._add_product(dx, self._b, d_gram)  # whose mean is zero for the same reason
            return
        d_left, d_right = self._tall(self._d_a), self._tall(self._b @ d_gram)
        if self._transposed:
            d_left, d_right = d_right, d_left
        self._dx.add_(_normalize_back(self._x, d_left, 2)).add_(_normalize_back(self._x, d_right, 1))


def _normalize_back(x: Tensor, grad: Tensor, dim: int) -> Tensor:
    """Through x / |x| along `dim`."""
    scale = length_scale(x, dim)
    return scale * (grad - x * scale.square() * (x * grad).sum(dim, keepdim=True))
