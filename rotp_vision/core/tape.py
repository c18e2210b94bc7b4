"""For solvers whose log plan is never anything but `scale · X + feature vector + sample vector`.

Such a solver is a chain of vectors, tied by log-sum-exps of X ("sweeps"); only the sweeps touch anything plan-sized.
It is written once, forwards, on a `Tape`, which goes back through it by itself: autograd cannot run inside an operator.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rotp_vision.core.ops import Gradients, Inputs, Needs, Slopes
from rotp_vision.core.scratch import Exponents, Scratch, exponent_limit, exponentials, extent, shift_rows

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
    twin: Tensor  # (b, D, N) the same with contiguous samples: sums along features are then products of matrices, too
    top: Tensor  # (b, D, 1) max_n(scale · X)
    scale: Coefficient
    left: list[Tensor]  # (b, D, 1) each: the columns ...
    right: list[Tensor]  # (b, 1, N) ... and rows of those matrices

    def sum(self, weights: Tensor, axis: int) -> Tensor:
        """Sum of exponentials · weights along `axis`, kept."""
        if axis == SAMPLES:
            return torch.bmm(weights, self.exponentials.mT).mT
        return torch.bmm(weights.mT, self.twin)


class Tape:
    """Vectors made from vectors; recorded if `needs` and `slopes` say which gradients are wanted."""

    def __init__(
        self, inputs: Inputs, scratch: Scratch, needs: Needs | None = None, slopes: Slopes | None = None
    ) -> None:
        self._modules: list[tuple[Tensor, ...]] = inputs.modules.each
        self._given = inputs.x
        self._spread = extent(inputs.x) if inputs.modules.eager else math.inf  # of the rows of X, at most
        self._x = scratch.load(inputs.x)
        self._features = None if inputs.features is None else scratch.load(inputs.features)
        self._gone = inputs.log_q0 == -torch.inf
        self._needs = needs
        self._slopes = slopes
        self.recording = needs is not None  # off, vectors are constants of what follows
        self._scratch = scratch
        self._shared: dict[tuple[int, int], _Shared] = {}
        self._back: list[Callable[[], None]] = []
        self.log_p0 = Vector(inputs.log_p0, FEATURES)
        self.log_q0 = Vector(inputs.log_q0.masked_fill(self._gone, 0.0), SAMPLES)
        self._peak: Tensor | None = None  # (b, D, 1) what is taken off X, so that the maximum of every row is zero
        self._masked = True
        if inputs.modules.eager:
            self._masked = bool(self._gone.any())
            out = scratch.take() if self._x is inputs.x else self._x
            self._x, self._peak = shift_rows(self._x, self._gone if self._masked else None, out)
            if self._masked or not self._spread * inputs.modules.steepest < exponent_limit(self._x.dtype):
                self._spread = -float(self._x.amin())
        self._buffer: Tensor | None = None  # one for all sweeps, where none is kept
        self._spare = scratch.take()

    def module(self, index: int) -> list[Coefficient]:
        """The coefficients of a module, by row."""
        return [Coefficient(value, row, index) for row, value in enumerate(self._modules[index])]

    def zeros_like(self, vector: Vector) -> Vector:
        return Vector(torch.zeros_like(vector.value), vector.axis)

    def combine(self, *terms: tuple[Coefficient | float, Vector]) -> Vector:
        """Σ coefficient · vector, of vectors along the same axis."""
        (first, vector), *others = terms
        value = vector.value if first == 1.0 else vector.value * _number(first)
        for factor, vector in others:
            value = _add_scaled(value, vector.value, _number(factor))
        result = Vector(value, vector.axis)

        def back() -> None:
            if result.grad is None:
                return
            for factor, vector in terms:
                vector.add_grad(result.grad, _number(factor))
                if isinstance(factor, Coefficient):
                    self._add_slope(factor, lambda grad=result.grad, value=vector.value: (grad * value).sum())

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
        if self._peak is None or not self._spread * float(scale.value) < exponent_limit(self._x.dtype):
            return
        if self._needs is None and self._shared:
            # Nobody goes back to the modules before.
            _, (before, twin, *_) = self._shared.popitem()
        else:
            before, out = self._scratch.buffer(), self._scratch.buffer()
            twin = out.mT.view(out.shape)
        exponentials, top = torch.mul(self._x, scale.value, out=before).exp_(), self._peak * scale.value
        if self._given.is_contiguous() and not self._masked:
            # What was given lies like this already; the scale as a row, see `_sweep`.
            row = scale.value.expand(1, 1, twin.shape[2]).contiguous()
            torch.addcmul(-top, self._given, row, out=twin).exp_()
        else:
            twin.copy_(exponentials)
        self._shared[scale.row, scale.module] = _Shared(exponentials, twin, top, scale, [], [])

    def lse(self, scale: Coefficient, vector: Vector) -> Vector:
        """LSE(scale · X + vector) along the vector's axis: a vector along the other."""
        shared = self._shared.get((scale.row, scale.module))
        if shared is not None:
            return self._shared_lse(shared, vector)
        exponentials, total, shift = self._sweep(scale, vector)
        result = Vector(total.log() + shift, 3 - vector.axis)

        def back() -> None:
            if result.grad is not None:
                logits_grad = torch.mul(exponentials, result.grad / total, out=self._spare)
                # Softmaxes sum to one.
                row_sums = result.grad if vector.axis == SAMPLES else None
                self._sweep_back(logits_grad, scale, vector, row_sums)

        return self._record(result, back)

    def fixed_point(self, scale: Coefficient, before: Vector, between: Vector, after: Vector, rate: Tensor) -> None:
        """Say that `after` = F(`before`) is where F ends, a step of Sinkhorn scaling by way of `between`.

        The gradient of the end solves w = Jᵀ w + its own, where J = dF/d before = rate · softmax_dᵀ softmax_n has rows
        that sum to rate < 1; going back through the one step with w in place of the gradient is all that is left.
        """

        def back() -> None:
            if after.grad is None:
                return
            rows, row_totals, _ = self._sweep(scale, before)
            columns, column_totals, _ = self._sweep(scale, between)
            step = torch.bmm(columns.mT, rows.div_(row_totals)) / column_totals.mT * rate  # (b, N, N)
            system = torch.eye(step.shape[1], dtype=step.dtype, device=step.device) - step.mT
            after.grad = torch.linalg.solve_ex(system, after.grad.mT).result.mT  # without a look at the device

        self._record(after, back)

    def _shared_lse(self, shared: _Shared, vector: Vector) -> Vector:
        weights, shift = self._shared_weights(shared, vector)
        total = shared.sum(weights, vector.axis)
        result = Vector(total.log() + shift, 3 - vector.axis)

        def back() -> None:
            if result.grad is None:
                return
            grad = result.grad / total
            vector.add_grad(shared.sum(grad, 3 - vector.axis), weights)
            left, right = (grad, weights) if vector.axis == SAMPLES else (weights, grad)
            shared.left.append(left)
            shared.right.append(right)

        return self._record(result, back)

    def _shared_weights(self, shared: _Shared, vector: Vector) -> tuple[Tensor, Tensor]:
        """What E is weighted with in a sweep, largest one, and what the logarithm of the sum lacks."""
        if vector.axis == SAMPLES:
            values = vector.value.masked_fill(self._gone, -torch.inf) if self._masked else vector.value
            largest = values.amax(SAMPLES, keepdim=True)
            return (values - largest).exp_(), shared.top + largest
        values = vector.value + shared.top
        largest = values.amax(FEATURES, keepdim=True)
        return (values - largest).exp_(), largest

    def pool(self, scale: Coefficient, vector: Vector) -> Tensor:
        """(b, D, 1) features averaged by softmax_n(scale · X + vector)."""
        features = self._x if self._features is None else self._features
        shared = self._shared.get((scale.row, scale.module))
        if shared is None:
            weights, total, _ = self._sweep(scale, vector)
            pooled = torch.mul(weights, features, out=self._scratch.over(weights)).sum(SAMPLES, keepdim=True) / total
        else:
            weights, _ = self._shared_weights(shared, vector)
            products = torch.mul(shared.exponentials, features, out=self._spare)
            pooled = torch.bmm(weights, products.mT).mT / shared.sum(weights, SAMPLES)
        return pooled if self._features is not None or self._peak is None else pooled + self._peak

    def gradients(self, scale: Coefficient, vector: Vector, grad: Tensor) -> Gradients:
        """The gradients of everything that led to `pool(scale, vector)`, whose own is `grad` (b, D, 1)."""
        assert self._needs is not None
        needs, spare = self._needs, self._scratch.buffer()
        self._spare = spare
        weights, total, _ = self._sweep(scale, vector)
        features = self._x if self._features is None else self._features
        mean = torch.mul(weights, features, out=spare).sum(SAMPLES, keepdim=True) / total
        d_features = weights.mul_(grad / total)
        logits_grad = torch.sub(features, mean, out=spare).mul_(d_features)
        self._dx = None
        if needs.x:
            self._dx = d_features if self._features is None else self._scratch.buffer().zero_()
        self._sweep_back(logits_grad, scale, vector, None)
        for back in reversed(self._back):
            back()
        for shared in self._shared.values():
            self._add_shared(shared)
        return Gradients(
            d_features if self._features is not None and needs.features else None,
            self._dx,
            self._grad_of(self.log_p0) if needs.log_p0 else None,
            self._grad_of(self.log_q0) if needs.log_q0 else None,
        )

    def _grad_of(self, vector: Vector) -> Tensor:
        return torch.zeros_like(vector.value) if vector.grad is None else vector.grad

    def _record(self, result: Vector, back: Callable[[], None]) -> Vector:
        if self._needs is not None and self.recording:
            self._back.append(back)
        return result

    def _sweep(self, scale: Coefficient, vector: Vector) -> tuple[Tensor, Tensor, Tensor]:
        """exp(scale · X + vector - shift), their sum along the vector's axis, and the shift."""
        if self._needs is not None and self.recording:
            out = self._scratch.take()
        else:
            out = self._buffer = self._scratch.take() if self._buffer is None else self._buffer
        shared = self._shared.get((scale.row, scale.module))
        if shared is not None:
            weights, shift = self._shared_weights(shared, vector)
            y = torch.mul(shared.exponentials, weights, out=out)
            return y, y.sum(vector.axis, keepdim=True), shift
        top = None if self._peak is None else self._peak * scale.value
        exponents, gone = self._exponents(scale, vector), None
        if vector.axis == SAMPLES:
            values = vector.value.masked_fill(self._gone, -torch.inf) if self._masked else vector.value
            largest = values.amax(SAMPLES, keepdim=True)
            if self._masked and self._peak is not None:
                gone = self._gone
                values = values.masked_fill(gone, 0.0) if exponents.summable else values
            # The scale as a row: beside a vector that is constant along the contiguous axis a second constant would
            # not be vectorised.
            row = scale.value.expand(1, self._x.shape[1], 1).contiguous()
            y = torch.addcmul(values - largest, self._x, row, out=out)
            shift = largest if top is None else largest + top
        else:
            values = vector.value if top is None else vector.value + top
            shift = values.amax(FEATURES, keepdim=True)
            y = torch.addcmul(values - shift, self._x, scale.value, out=out)
        y, total, top = exponentials(y, vector.axis, self._scratch, exponents, gone)
        return y, total, shift if top is None else shift + top

    def _exponents(self, scale: Coefficient, vector: Vector) -> Exponents:
        """What is known of the exponents of a sweep.

        A row of X has its maximum, zero, somewhere, so the exponents of a sweep along the samples have one within the
        vector's spread of zero; along the features, where the vector has its maximum. A scale below zero, which the
        coupled ADMM may have, turns that round: then they reach as far above zero.
        """
        if self._peak is None:
            return Exponents(False, True)
        limit = exponent_limit(self._x.dtype)
        number, of_vector = float(scale.value), float(vector.value.amax() - vector.value.amin())
        of_x = abs(number) * self._spread
        deep = of_x + of_vector >= limit
        if number < 0:
            return Exponents(not deep, deep)
        below = of_x if vector.axis == FEATURES else of_vector
        return Exponents(below < (limit / 2 if deep else limit), deep)

    def _sweep_back(self, logits_grad: Tensor, scale: Coefficient, vector: Vector, row_sums: Tensor | None) -> None:
        """Back through a sweep; `row_sums` (b, D, 1) of the logits' gradient, None for zero or along the features."""
        if self._dx is not None:
            self._dx.addcmul_(logits_grad, scale.value)
        moved = logits_grad.sum(3 - vector.axis, keepdim=True)
        vector.add_grad(moved)
        self._add_slope(scale, lambda: self._scratch.inner(logits_grad, self._x))
        self._add_peak_slope(scale, moved if vector.axis == FEATURES else row_sums)

    def _add_shared(self, shared: _Shared) -> None:
        """Add up the gradients of all sweeps of one scale."""
        if shared.left:
            spare = self._spare
            assert spare is not None
            torch.bmm(torch.cat(shared.right, 1).mT, torch.cat(shared.left, 2).mT, out=spare.mT)
            spare.mul_(shared.exponentials)
            if self._dx is not None:
                self._dx.addcmul_(spare, shared.scale.value)
            self._add_slope(shared.scale, lambda: self._scratch.inner(spare, self._x))
            self._add_peak_slope(shared.scale, spare.sum(SAMPLES, keepdim=True))

    def _add_slope(self, factor: Coefficient, slope: Callable[[], Tensor]) -> None:
        assert self._slopes is not None
        if self._slopes.wanted:
            self._slopes.add((factor.row, factor.module), slope())

    def _add_peak_slope(self, scale: Coefficient, row_sums: Tensor | None) -> None:
        """The part of a scale's slope that X lacks by its peaks."""
        peak = self._peak
        if peak is not None and row_sums is not None:
            self._add_slope(scale, lambda: (row_sums * peak).sum())


def _number(factor: Coefficient | float) -> Tensor | float:
    return factor.value if isinstance(factor, Coefficient) else factor


def _add_scaled(total: Tensor, more: Tensor, factor: Tensor | float) -> Tensor:
    if isinstance(factor, Tensor):
        return torch.addcmul(total, more, factor)
    return total.add(more, alpha=factor)
