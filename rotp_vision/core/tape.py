"""For solvers whose log plan is never anything but `scale · X + feature vector + sample vector`.

Such a solver is a chain of vectors, tied by log-sum-exps of X ("sweeps"); only the sweeps touch anything plan-sized.
It is written once, forwards, on a `Tape`, which goes back through it by itself: autograd cannot run inside an operator.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rotp_vision.core.ops import Gradients, Inputs, Needs
from rotp_vision.core.scratch import Scratch, exponentials, inner

FEATURES, SAMPLES = 1, 2  # the axes of (b, D, N)


class Coefficient(NamedTuple):
    """One scalar of the coefficients (rows, T)."""

    value: Tensor
    row: int
    module: int


class Vector:
    """(b, D, 1) or (b, 1, N), with its gradient on the way back; finite on masked samples, where nobody reads it."""

    __slots__ = ('axis', 'grad', 'value')

    def __init__(self, value: Tensor, axis: int) -> None:
        self.value = value
        self.axis = axis
        self.grad: Tensor | None = None

    def add_grad(self, grad: Tensor, factor: Tensor | float = 1.0) -> None:
        self.grad = grad * factor if self.grad is None else _add_scaled(self.grad, grad, factor)


class _Shared(NamedTuple):
    """For many sweeps with one scale; a sweep's gradient is `exponentials` times a matrix of rank one."""

    exponentials: Tensor  # (b, D, N) exp(scale · X - top)
    top: Tensor  # (b, D, 1) max_n(scale · X)
    scale: Coefficient
    left: list[Tensor]  # (b, D, 1) each: the columns ...
    right: list[Tensor]  # (b, 1, N) ... and rows of those matrices


class Tape:
    """Vectors made from vectors; recorded if `needs` says which gradients are wanted."""

    def __init__(self, inputs: Inputs, scratch: Scratch, needs: Needs | None = None) -> None:
        self._x = scratch.load(inputs.x)
        self._features = None if inputs.features is None else scratch.load(inputs.features)
        self._gone = inputs.log_q0 == -torch.inf
        self._coefficients = inputs.coefficients
        self._needs = needs
        self._scratch = scratch
        self._buffer = scratch.take() if needs is None else None  # one for all sweeps, where none is kept
        self._spare: Tensor | None = None
        self._shared: dict[tuple[int, int], _Shared] = {}
        self._back: list[Callable[[], None]] = []
        self.log_p0 = Vector(inputs.log_p0, FEATURES)
        self.log_q0 = Vector(inputs.log_q0.masked_fill(self._gone, 0.0), SAMPLES)
        if needs is not None:
            self._d_coefficients = torch.zeros_like(inputs.coefficients)

    def module(self, index: int) -> list[Coefficient]:
        """The coefficients of a module, by row."""
        return [Coefficient(value, row, index) for row, value in enumerate(self._coefficients[:, index].unbind())]

    def zeros_like(self, vector: Vector) -> Vector:
        return Vector(torch.zeros_like(vector.value), vector.axis)

    def combine(self, *terms: tuple[Coefficient | float, Vector]) -> Vector:
        """Σ coefficient · vector, of vectors along the same axis."""
        (first, vector), *others = terms
        value = vector.value * _number(first)
        for factor, vector in others:
            value = _add_scaled(value, vector.value, _number(factor))
        result = Vector(value, vector.axis)

        def back() -> None:
            if result.grad is None:
                return
            for factor, vector in terms:
                vector.add_grad(result.grad, _number(factor))
                if isinstance(factor, Coefficient):
                    self._add_slope(factor, result.grad, vector.value)

        return self._record(result, back)

    def log_softmax(self, vector: Vector) -> Vector:
        """log softmax of a vector along its axis."""
        samples = vector.axis == SAMPLES
        logits = vector.value.masked_fill(self._gone, -torch.inf) if samples else vector.value
        value = logits.log_softmax(vector.axis)
        result = Vector(value.masked_fill(self._gone, 0.0) if samples else value, vector.axis)

        def back() -> None:
            if result.grad is not None:
                grad = result.grad.masked_fill(self._gone, 0.0) if samples else result.grad
                vector.add_grad(grad - value.exp() * grad.sum(vector.axis, keepdim=True))

        return self._record(result, back)

    def share(self, scale: Coefficient) -> None:
        """Say that many sweeps have this scale: they then need one exponential, where none of it can underflow.

        With E = exp(scale · X - top) the sweep is top + log Σ_n E exp(vector), and along the features likewise. The sum
        is at least the entry of E where the vector is largest, so a bound on E is all that is needed. Looking at values
        stalls a device other than the CPU, and a trace cannot branch on them: those do without.
        """
        y = self._scratch.take()
        if y is None or self._x.device.type != 'cpu':
            return
        torch.mul(self._x, scale.value, out=y)
        top = y.amax(SAMPLES, keepdim=True)
        # Two thirds of the way to underflow: what then still vanishes beside the largest term is below rounding.
        if float(y.sub_(top).amin()) > 0.67 * math.log(torch.finfo(y.dtype).tiny):
            self._shared[scale.row, scale.module] = _Shared(y.exp_(), top, scale, [], [])

    def lse(self, scale: Coefficient, vector: Vector) -> Vector:
        """LSE(scale · X + vector) along the vector's axis: a vector along the other."""
        shared = self._shared.get((scale.row, scale.module))
        if shared is not None:
            return self._shared_lse(shared, vector)
        exponentials, top, total = self._sweep(scale, vector)
        result = Vector(total.log() + top, 3 - vector.axis)

        def back() -> None:
            if result.grad is not None:
                self._sweep_back(torch.mul(exponentials, result.grad / total, out=self._spare), scale, vector)

        return self._record(result, back)

    def _shared_lse(self, shared: _Shared, vector: Vector) -> Vector:
        if self._spare is None:
            self._spare = self._scratch.take() if self._buffer is None else self._buffer
        weights, shift = self._shared_weights(shared, vector)
        total = torch.mul(shared.exponentials, weights, out=self._spare).sum(vector.axis, keepdim=True)
        result = Vector(total.log() + shift, 3 - vector.axis)

        def back() -> None:
            if result.grad is None:
                return
            grad = result.grad / total
            pulled = torch.mul(shared.exponentials, grad, out=self._spare).sum(3 - vector.axis, keepdim=True)
            vector.add_grad(pulled, weights)
            left, right = (grad, weights) if vector.axis == SAMPLES else (weights, grad)
            shared.left.append(left)
            shared.right.append(right)

        return self._record(result, back)

    def _shared_weights(self, shared: _Shared, vector: Vector) -> tuple[Tensor, Tensor]:
        """What E is weighted with in a sweep, largest one, and what the logarithm of the sum lacks."""
        if vector.axis == SAMPLES:
            values = vector.value.masked_fill(self._gone, -torch.inf)
            largest = values.amax(SAMPLES, keepdim=True)
            return (values - largest).exp_(), shared.top + largest
        values = vector.value + shared.top
        largest = values.amax(FEATURES, keepdim=True)
        return (values - largest).exp_(), largest

    def pool(self, scale: Coefficient, vector: Vector) -> Tensor:
        """(b, D, 1) features averaged by softmax_n(scale · X + vector)."""
        weights, _, total = self._sweep(scale, vector)
        features = self._x if self._features is None else self._features
        return torch.mul(weights, features, out=self._scratch.over(weights)).sum(SAMPLES, keepdim=True) / total

    def gradients(self, scale: Coefficient, vector: Vector, grad: Tensor) -> Gradients:
        """The gradients of everything that led to `pool(scale, vector)`, whose own is `grad` (b, D, 1)."""
        assert self._needs is not None
        weights, _, total = self._sweep(scale, vector)
        features = self._x if self._features is None else self._features
        grad = grad / total
        d_features = torch.mul(weights, grad, out=self._scratch.buffer())
        self._spare = self._scratch.buffer()
        mean = torch.mul(d_features, features, out=self._spare).sum(SAMPLES, keepdim=True)
        logits_grad = torch.addcmul(-mean / total, features, grad, out=self._spare).mul_(weights)
        self._dx = None
        if self._needs.x:
            self._dx = d_features if self._features is None else weights.zero_()
        self._sweep_back(logits_grad, scale, vector)
        for back in reversed(self._back):
            back()
        for shared in self._shared.values():
            self._add_shared(shared)
        return Gradients(
            d_features if self._features is not None and self._needs.features else None,
            self._dx,
            torch.zeros_like(self.log_p0.value) if self.log_p0.grad is None else self.log_p0.grad,
            torch.zeros_like(self.log_q0.value) if self.log_q0.grad is None else self.log_q0.grad,
            self._d_coefficients,
        )

    def _record(self, result: Vector, back: Callable[[], None]) -> Vector:
        if self._needs is not None:
            self._back.append(back)
        return result

    def _sweep(self, scale: Coefficient, vector: Vector) -> tuple[Tensor, Tensor, Tensor]:
        """exp(scale · X + vector - top), the maximum `top` and the sum along the vector's axis."""
        out = self._scratch.take() if self._buffer is None else self._buffer
        shared = self._shared.get((scale.row, scale.module))
        if shared is not None:
            weights, shift = self._shared_weights(shared, vector)
            y = torch.mul(shared.exponentials, weights, out=out)
            return y, shift, y.sum(vector.axis, keepdim=True)
        if vector.axis == SAMPLES:
            # The scale as a row: beside a vector that is constant along the contiguous axis a second constant would
            # not be vectorised.
            row = scale.value.expand(1, self._x.shape[1], 1).contiguous()
            y = torch.addcmul(vector.value.masked_fill(self._gone, -torch.inf), self._x, row, out=out)
        else:
            y = torch.addcmul(vector.value, self._x, scale.value, out=out)
        return exponentials(y, vector.axis, self._scratch)

    def _sweep_back(self, logits_grad: Tensor, scale: Coefficient, vector: Vector) -> None:
        if self._dx is not None:
            self._dx.addcmul_(logits_grad, scale.value)
        self._add_slope(scale, logits_grad, self._x)
        vector.add_grad(logits_grad.sum(3 - vector.axis, keepdim=True))

    def _add_shared(self, shared: _Shared) -> None:
        """Add up the gradients of all sweeps of one scale."""
        assert self._spare is not None
        if shared.left:
            torch.bmm(torch.cat(shared.right, 1).mT, torch.cat(shared.left, 2).mT, out=self._spare.mT)
            self._spare.mul_(shared.exponentials)
            if self._dx is not None:
                self._dx.addcmul_(self._spare, shared.scale.value)
            self._add_slope(shared.scale, self._spare, self._x)

    def _add_slope(self, factor: Coefficient, grad: Tensor, values: Tensor) -> None:
        assert self._needs is not None
        if self._needs.coefficients:
            self._d_coefficients[factor.row, factor.module] += inner(grad, values)


def _number(factor: Coefficient | float) -> Tensor | float:
    return factor.value if isinstance(factor, Coefficient) else factor


def _add_scaled(total: Tensor, more: Tensor, factor: Tensor | float) -> Tensor:
    if isinstance(factor, Tensor):
        return torch.addcmul(total, more, factor)
    return total.add(more, alpha=factor)
