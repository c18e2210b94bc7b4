"""For solvers whose log plan is never anything but `scale · X + matrix + feature vector + sample vector`.

Such a solver is a chain of vectors, tied by log-sum-exps ("sweeps"). Without matrix only the sweeps touch anything
plan-sized; there is a matrix where plans act on each other by more than their logarithms, and it is made of plans.
A solver is written once, forwards, on a `Tape`, which goes back through it by itself: autograd cannot run inside an
operator.

Where values may be read (on CPU, and not in a trace), the maximum of every row of X, its peak, is taken off it. What
all entries of a row have in common would otherwise be rounded in every sum and every gradient. The feature vectors of a
solver are then those of the shifted X; its docstring says where it has to add the peaks again.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from rotp_vision.core.explicit.ops import Gradients, Inputs, Needs, Slopes
from rotp_vision.core.explicit.scratch import (
    Exponents,
    Scratch,
    balance_rows,
    exponent_limit,
    exponentials,
    shift_rows,
    store,
)
from rotp_vision.core.explicit.structure import Structure
from rotp_vision.core.explicit.view import Seen
from rotp_vision.core.structure import Similarity

BOTH, FEATURES, SAMPLES = 0, 1, 2  # the axes of (b, D, N)


class Coefficient(NamedTuple):
    """One scalar of the coefficients (kinds, T)."""

    value: Tensor
    kind: int
    module: int


class Variable:
    """A vector (b, D, 1) or (b, 1, N), or along both axes a matrix (b, D, N), with its gradient on the way back.

    It is finite on masked samples, where nobody reads it.
    """

    __slots__ = ('axis', 'grad', 'value')

    def __init__(self, value: Tensor, axis: int) -> None:
        self.value = value
        self.axis = axis
        self.grad: Tensor | None = None

    def add_grad(self, grad: Tensor, factor: Tensor | float = 1.0) -> None:
        if self.grad is None:
            self.grad = grad * factor
        elif isinstance(factor, Tensor):
            self.grad.addcmul_(grad, factor)
        else:
            self.grad.add_(grad, alpha=factor)


class Logits(NamedTuple):
    """scale · X + matrix."""

    scale: Coefficient
    matrix: Variable | None = None


class _Sweep:
    """exp(logits + vector - shift), with the gradient of the logits on the way back."""

    __slots__ = ('exponentials', 'grad', 'logits', 'shift', 'total', 'vector')

    def __init__(self, logits: Logits, vector: Variable, exponentials: Tensor, total: Tensor, shift: Tensor) -> None:
        self.logits, self.vector = logits, vector
        self.exponentials = exponentials  # (b, D, N)
        self.total = total  # their sum along the vector's axis, kept
        self.shift = shift  # like total
        self.grad: Tensor | None = None  # (b, D, N)


class _Shared(NamedTuple):
    """For many sweeps of the same logits; a sweep's gradient is `exponentials` times a matrix of rank one."""

    exponentials: Tensor  # (b, D, N) exp(logits - top)
    twin: Tensor  # (b, D, N) the same with contiguous samples: sums along features are then products of matrices, too
    top: Tensor | None  # (b, D, 1) max_n(logits), None: zero
    left: list[Tensor]  # (b, D, 1) each: the columns ...
    right: list[Tensor]  # (b, 1, N) ... and rows of those matrices

    def sum(self, weights: Tensor, axis: int) -> Tensor:
        """Sum of exponentials · weights along `axis`, kept."""
        if axis == SAMPLES:
            return torch.bmm(weights, self.exponentials.mT).mT
        return torch.bmm(weights.mT, self.twin)


class Tape:
    """Vectors made from vectors; recorded if `needs` and `slopes` say which gradients are wanted.

    With a `similarity` there is a structural term.
    """

    def __init__(
        self,
        inputs: Inputs,
        scratch: Scratch,
        needs: Needs | None = None,
        slopes: Slopes | None = None,
        similarity: str = '',
    ) -> None:
        self._modules: list[tuple[Tensor, ...]] = inputs.modules.each
        self._masked = inputs.log_q0 == -torch.inf
        self._any_masked = bool(self._masked.any()) if inputs.modules.eager else True
        masked = self._masked if self._any_masked else None
        self._seen = seen = Seen(inputs.features, inputs.view, masked, scratch, inputs.modules.eager)
        self._spread = seen.spread  # of the rows of X, at most
        self._x = seen.x
        self._needs = needs
        self._slopes = slopes
        self.recording = needs is not None  # off, vectors are constants of what follows
        self._scratch = scratch
        self._shared: dict[tuple[int, int], _Shared] = {}
        self._back: list[Callable[[], None]] = []
        self.log_p0 = Variable(inputs.log_p0, FEATURES)
        self.log_q0 = Variable(inputs.log_q0.masked_fill(self._masked, 0.0), SAMPLES)
        self._peak: Tensor | None = None  # (b, D, 1) what is taken off X, so that the maximum of every row is zero
        self.peaks: Variable | None = None  # the same up to a constant; whatever is taken off, the result is the same
        self._structure: Structure | None = None
        if similarity:
            self._structure = Structure(self._x, masked, cast(Similarity, similarity), scratch)
        if inputs.modules.eager:
            ours = seen.may_overwrite and (similarity != 'cosine' or needs is None)  # whose way back reads X
            out = self._x if ours else scratch.take()
            self._x, self._peak = shift_rows(self._x, masked, out)
            self.peaks = Variable(self._peak - self._peak.amax(FEATURES, keepdim=True), FEATURES)
            if self._any_masked or not self._spread * inputs.modules.steepest < exponent_limit(self._x.dtype):
                self._spread = -float(self._x.amin())
        self._buffer: Tensor | None = None  # one for all sweeps, where none is kept
        self._last: _Sweep | None = None  # the sweep whose exponentials were made last
        self._free: list[Tensor] = []  # (b, D, N) buffers that are needed no more on the way back
        self._spare: Tensor | None = None  # for the gradients of sweeps

    def module(self, index: int) -> list[Coefficient]:
        """The coefficients of a module, one of each kind."""
        return [Coefficient(value, kind, index) for kind, value in enumerate(self._modules[index])]

    def combine(self, *terms: tuple[Coefficient | float, Variable]) -> Variable:
        """Σ coefficient · vector, of vectors along the same axis, or of matrices."""
        (first, vector), *others = terms
        out = self._room() if vector.axis == BOTH else None
        value = vector.value if first == 1.0 else torch.mul(vector.value, _number(first), out=out)
        for factor, other in others:
            out = out if value is vector.value else self._scratch.over(value)
            if isinstance(factor, Coefficient):
                value = torch.addcmul(value, other.value, factor.value, out=out)
            else:
                value = torch.add(value, other.value, alpha=factor, out=out)
        result = Variable(value, vector.axis)

        def back() -> None:
            if result.grad is None:
                return
            for factor, vector in terms:
                self._add_grad(vector, result.grad, _number(factor))
                if isinstance(factor, Coefficient):
                    self._add_slope(factor, lambda grad=result.grad, value=vector.value: _inner(grad, value))
            if result.axis == BOTH:
                self._free.append(result.grad)
                if result.value is not terms[0][1].value:
                    self._free.append(result.value)

        return self._record(result, back)

    def log_softmax(self, vector: Variable) -> Variable:
        """log softmax of a vector along its axis."""
        samples = vector.axis == SAMPLES
        logits = vector.value.masked_fill(self._masked, -torch.inf) if samples else vector.value
        value = logits.log_softmax(vector.axis)
        result = Variable(value.masked_fill(self._masked, 0.0) if samples else value, vector.axis)

        def back() -> None:
            if result.grad is not None:
                grad = result.grad.masked_fill(self._masked, 0.0) if samples else result.grad
                vector.add_grad(grad - value.exp() * grad.sum(vector.axis, keepdim=True))

        return self._record(result, back)

    def plan(self, logits: Logits, vector: Variable, log_marginal: Variable) -> Variable:
        """exp(log_marginal) · softmax(logits + vector) along the vector's axis, a matrix; zero on masked samples."""
        sweep = self._swept(logits, vector)
        value = torch.mul(sweep.exponentials, log_marginal.value.exp() / sweep.total, out=self._room())
        if vector.axis == FEATURES and self._any_masked:
            value = value.masked_fill(self._masked, 0.0)
        result = Variable(value, BOTH)

        def back() -> None:
            if result.grad is None:
                return
            # Weighted before it is summed up: then the two terms of a softmax with one entry cancel to the last bit,
            # which matters where the structural term has made them large.
            assert sweep.grad is None  # there is one plan of a sweep, made after its log-sum-exp
            sweep.grad = result.grad.mul_(result.value)
            moved = sweep.grad.sum(vector.axis, keepdim=True)
            log_marginal.add_grad(moved)
            sweep.grad.addcmul_(sweep.exponentials, moved / sweep.total, value=-1)
            self._free.append(result.value)

        return self._record(result, back)

    def product(self, features: Variable, samples: Variable) -> Variable:
        """The plan exp(features + samples), a matrix; zero on masked samples."""
        exponents = (samples.value.mT + features.value.mT).mT  # which lie in memory like a plan
        value = torch.exp(exponents, out=self._scratch.over(exponents))
        result = Variable(value.masked_fill(self._masked, 0.0) if self._any_masked else value, BOTH)

        def back() -> None:
            if result.grad is not None:
                grad = result.grad.mul_(result.value)
                features.add_grad(grad.sum(SAMPLES, keepdim=True))
                samples.add_grad(grad.sum(FEATURES, keepdim=True))
                self._free += [grad, result.value]

        return self._record(result, back)

    def force(self, plan: Variable) -> Variable:
        """Σ1 P Σ2 of a plan P, a matrix: the structural force, see `structural_force`."""
        structure = self._structure
        assert structure is not None
        value, applied = structure.force(plan.value)
        result = Variable(value, BOTH)

        def back() -> None:
            if result.grad is not None:
                d_plan = structure.force_back(result.grad, plan.value, applied, self._free_buffer())
                self._free += [result.grad, result.value]
                if plan.grad is None:
                    plan.grad = d_plan
                else:
                    self._free.append(d_plan)
                    plan.grad.add_(d_plan)

        return self._record(result, back)

    def share(self, logits: Logits) -> None:
        """Say that many sweeps are of these logits: they then need one exponential, where none of it can underflow.

        With E = exp(logits - top) the sweep is top + log Σ_n E exp(vector), and along the features likewise. The sum
        is at least the entry of E where the vector is largest, so a bound on E is all that is needed. Reading it
        synchronises a device other than the CPU, and a trace cannot branch on it: those do without.
        """
        scale, matrix = logits
        limit = exponent_limit(self._x.dtype)
        if self._peak is None or (matrix is None and not self._spread * float(scale.value) < limit):
            return
        exponents, top = self._x, None
        if matrix is not None:
            exponents = torch.addcmul(matrix.value, self._x, scale.value)
            exponents, top = shift_rows(exponents, self._masked if self._any_masked else None, exponents)
            if not -float(exponents.amin()) < limit:
                return
        if self._needs is None and self._shared:
            # Nobody goes back to the modules before.
            _, (before, twin, *_) = self._shared.popitem()
        else:
            before, out = self._scratch.buffer(), self._scratch.buffer()
            twin = out.mT.view(out.shape)
        if matrix is None:
            torch.mul(exponents, scale.value, out=before).exp_()
        else:
            torch.exp(exponents, out=before)
        store(before, twin)
        shared = self._shared[scale.kind, scale.module] = _Shared(before, twin, top, [], [])
        if self._needs is not None:
            self._back.append(lambda: self._add_shared(shared, logits))

    def lse(self, logits: Logits, vector: Variable) -> Variable:
        """LSE(logits + vector) along the vector's axis: a vector along the other."""
        shared = self._shared_of(logits)
        if shared is not None:
            return self._shared_lse(shared, vector)
        sweep = self._swept(logits, vector)
        result = Variable(sweep.total.log() + sweep.shift, 3 - vector.axis)

        def back() -> None:
            if result.grad is None:
                return
            slope = result.grad / sweep.total
            if sweep.grad is None:
                # Nobody else needs the exponentials any more.
                sweep.grad = sweep.exponentials.mul_(slope)
            else:
                sweep.grad.addcmul_(sweep.exponentials, slope)

        return self._record(result, back)

    def fixed_point(self, logits: Logits, before: Variable, between: Variable, after: Variable, rate: Tensor) -> None:
        """Say that `after` = F(`before`) is where F ends, a step of Sinkhorn scaling by way of `between`.

        The gradient of the end solves w = Jᵀ w + its own, where J = dF/d before = rate · softmax_dᵀ softmax_n has rows
        that sum to rate < 1; going back through the one step with w in place of the gradient is all that is left.
        """

        def back() -> None:
            if after.grad is None:
                return
            rows, columns = self._sweep(logits, before), self._sweep(logits, between)
            softmax = rows.exponentials.div_(rows.total)
            step = torch.bmm(columns.exponentials.mT, softmax) / columns.total.mT * rate  # (b, N, N)
            system = torch.eye(step.shape[1], dtype=step.dtype, device=step.device) - step.mT
            after.grad = torch.linalg.solve_ex(
                system, after.grad.mT
            ).result.mT  # unlike `solve` it does not synchronise

        self._record(after, back)

    def _shared_lse(self, shared: _Shared, vector: Variable) -> Variable:
        weights, shift = self._shared_weights(shared, vector)
        total = shared.sum(weights, vector.axis)
        result = Variable(total.log() + shift, 3 - vector.axis)

        def back() -> None:
            if result.grad is None:
                return
            grad = result.grad / total
            vector.add_grad(shared.sum(grad, 3 - vector.axis), weights)
            left, right = (grad, weights) if vector.axis == SAMPLES else (weights, grad)
            shared.left.append(left)
            shared.right.append(right)

        return self._record(result, back)

    def _shared_of(self, logits: Logits) -> _Shared | None:
        return self._shared.get((logits.scale.kind, logits.scale.module))

    def _shared_weights(self, shared: _Shared, vector: Variable) -> tuple[Tensor, Tensor]:
        """What E is weighted with in a sweep, largest one, and what the logarithm of the sum lacks."""
        if vector.axis == SAMPLES:
            values = vector.value.masked_fill(self._masked, -torch.inf) if self._any_masked else vector.value
            largest = values.amax(SAMPLES, keepdim=True)
            return (values - largest).exp_(), largest if shared.top is None else shared.top + largest
        values = vector.value if shared.top is None else vector.value + shared.top
        largest = values.amax(FEATURES, keepdim=True)
        return (values - largest).exp_(), largest

    def pool(self, logits: Logits, vector: Variable) -> Tensor:
        """(b, D, 1) features averaged by softmax_n(logits + vector)."""
        features = self._x if self._seen.averaged is None else self._seen.averaged
        shared = self._shared_of(logits)
        if shared is None:
            sweep = self._sweep(logits, vector)
            products = torch.mul(sweep.exponentials, features, out=self._scratch.over(sweep.exponentials))
            pooled = products.sum(SAMPLES, keepdim=True) / sweep.total
        else:
            weights, _ = self._shared_weights(shared, vector)
            products = torch.mul(shared.exponentials, features, out=self._scratch.take())
            pooled = torch.bmm(weights, products.mT).mT / shared.sum(weights, SAMPLES)
        if self._seen.averaged is None and self._peak is not None:
            pooled = pooled + self._peak
        return self._seen.pooled(pooled)

    def gradients(self, logits: Logits, vector: Variable, grad: Tensor) -> Gradients:
        """The gradients of everything that led to `pool(logits, vector)`, whose own is `grad` (b, D, 1)."""
        assert self._needs is not None
        needs, spare = self._needs, self._scratch.buffer()
        self._spare = spare
        grad = self._seen.pooled(grad)
        sweep = self._sweep(logits, vector)
        features = self._x if self._seen.averaged is None else self._seen.averaged
        mean = torch.mul(sweep.exponentials, features, out=spare).sum(SAMPLES, keepdim=True) / sweep.total
        d_features = sweep.exponentials.mul_(grad / sweep.total)
        logits_grad = torch.sub(features, mean, out=spare).mul_(d_features)
        balance_rows(logits_grad, d_features, grad)
        self._dx: Tensor | None = None
        if needs.features:
            self._dx = d_features if self._seen.averaged is None else self._scratch.buffer()
        self._dx_is_blank = self._seen.averaged is not None
        if self._structure is not None:
            if self._dx is not None and self._dx_is_blank:
                self._dx.zero_()
                self._dx_is_blank = False
            self._structure.start_back(self._dx, self._scratch)
        sweep.grad = logits_grad
        self._sweep_back(sweep)
        while self._back:
            self._back.pop()()  # which holds the tape: once dropped, its memory is free without the garbage collector
        if self._structure is not None:
            self._structure.end_back()
        if self._dx is not None:
            self._dx = self._seen.back(self._dx, d_features, self._x, self._peak, grad, mean * grad, spare)
        return Gradients(
            self._dx,
            self._grad_of(self.log_p0) if needs.log_p0 else None,
            self._grad_of(self.log_q0) if needs.log_q0 else None,
        )

    def _grad_of(self, vector: Variable) -> Tensor:
        return torch.zeros_like(vector.value) if vector.grad is None else vector.grad

    def _record(self, result: Variable, back: Callable[[], None]) -> Variable:
        if self._needs is not None and self.recording:
            self._back.append(back)
        return result

    def _room(self) -> Tensor | None:
        """A buffer for a matrix that is kept for the way back; where nothing is kept it has memory of its own."""
        return self._scratch.take() if self._needs is not None and self.recording else None

    def _swept(self, logits: Logits, vector: Variable) -> _Sweep:
        """The sweep of these, recorded; if they were those of the last one, that."""
        sweep = self._last
        if sweep is None or sweep.logits is not logits or sweep.vector is not vector:
            sweep = self._sweep(logits, vector)
            if self._needs is not None and self.recording:
                self._back.append(lambda sweep=sweep: self._end_sweep(sweep))
        return sweep

    def _end_sweep(self, sweep: _Sweep) -> None:
        self._sweep_back(sweep)
        self._free.append(sweep.exponentials)
        if sweep.grad is not None and sweep.grad is not sweep.exponentials:
            self._free.append(sweep.grad)

    def _sweep(self, logits: Logits, vector: Variable) -> _Sweep:
        self._last = _Sweep(logits, vector, *self._exponentials(logits, vector))
        return self._last

    def _exponentials(self, logits: Logits, vector: Variable) -> tuple[Tensor, Tensor, Tensor]:
        """exp(logits + vector - shift), their sum along the vector's axis, and the shift."""
        if self._needs is not None and self.recording:
            out = self._scratch.take()
        else:
            out = self._buffer = self._scratch.take() if self._buffer is None else self._buffer
        scale, matrix = logits
        shared = self._shared_of(logits)
        if shared is not None:
            weights, shift = self._shared_weights(shared, vector)
            y = torch.mul(shared.exponentials, weights, out=out)
            return y, y.sum(vector.axis, keepdim=True), shift
        exponents, masked = self._exponents(logits, vector), None
        if vector.axis == SAMPLES:
            values = vector.value.masked_fill(self._masked, -torch.inf) if self._any_masked else vector.value
            largest = values.amax(SAMPLES, keepdim=True)
            if self._any_masked and self._peak is not None:
                masked = self._masked
                values = values.masked_fill(masked, 0.0) if exponents.summable else values
            # The scale as a feature vector: beside one that is constant along the contiguous axis torch would not
            # vectorise a second constant.
            factor = scale.value.expand(1, self._x.shape[1], 1).contiguous()
            y = torch.addcmul(values - largest, self._x, factor, out=out)
        else:
            largest = vector.value.amax(FEATURES, keepdim=True)
            y = torch.addcmul(vector.value - largest, self._x, scale.value, out=out)
        if matrix is not None:
            y = torch.add(y, matrix.value, out=self._scratch.over(y))
        y, total, top = exponentials(y, vector.axis, self._scratch, exponents, masked)
        return y, total, largest if top is None else largest + top

    def _exponents(self, logits: Logits, vector: Variable) -> Exponents:
        """What is known of the exponents of a sweep.

        A row of X has its maximum, zero, somewhere, so the exponents of a sweep along the samples have one within the
        vector's spread of zero; along the features, where the vector has its maximum. A scale below zero, which the
        coupled ADMM may have, turns that round: then they reach as far above zero. So does a matrix.
        """
        scale, matrix = logits
        if self._peak is None:
            return Exponents(False, True)
        limit = exponent_limit(self._x.dtype)
        if matrix is not None:
            limit -= 2 * float(torch.stack(matrix.value.mT.aminmax()).abs().amax())
        number, of_vector = float(scale.value), float(vector.value.amax() - vector.value.amin())
        of_x = abs(number) * self._spread
        may_underflow = of_x + of_vector >= limit
        if number < 0 or (matrix is not None and may_underflow):
            return Exponents(not may_underflow, may_underflow)
        below = of_x if vector.axis == FEATURES else of_vector
        return Exponents(below < (limit / 2 if may_underflow else limit), may_underflow)

    def _sweep_back(self, sweep: _Sweep) -> None:
        """On from a sweep."""
        if sweep.grad is not None:
            sweep.vector.add_grad(sweep.grad.sum(3 - sweep.vector.axis, keepdim=True))
            self._logits_back(sweep.grad, sweep.logits)

    def _logits_back(self, grad: Tensor, logits: Logits) -> None:
        """On from logits, whose gradient this is, to what they are made of."""
        scale, matrix = logits
        if self._dx is not None and self._dx_is_blank:
            torch.mul(grad, scale.value, out=self._dx)
            self._dx_is_blank = False
        elif self._dx is not None:
            self._dx.addcmul_(grad, scale.value)
        self._add_slope(scale, lambda: _inner(grad, self._x))
        if matrix is not None:
            self._add_grad(matrix, grad, 1.0)

    def _add_grad(self, variable: Variable, grad: Tensor, factor: Tensor | float) -> None:
        if variable.grad is None and variable.axis == BOTH:
            variable.grad = torch.mul(grad, factor, out=self._free_buffer())
        else:
            variable.add_grad(grad, factor)

    def _free_buffer(self) -> Tensor:
        """(b, D, N) memory for a gradient; who has one gives it back to `_free`."""
        return self._free.pop() if self._free else self._scratch.buffer()

    def _add_shared(self, shared: _Shared, logits: Logits) -> None:
        """Add up the gradients of all sweeps of the same logits."""
        if shared.left:
            spare = self._spare
            assert spare is not None
            torch.bmm(torch.cat(shared.right, 1).mT, torch.cat(shared.left, 2).mT, out=spare.mT)
            spare.mul_(shared.exponentials)
            self._logits_back(spare, logits)

    def _add_slope(self, factor: Coefficient, slope: Callable[[], Tensor]) -> None:
        assert self._slopes is not None
        if self._slopes.wanted:
            self._slopes.add((factor.kind, factor.module), slope())


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a · b over everything; without copies where both lie in memory like a plan."""
    return torch.dot(a.mT.reshape(-1), b.mT.reshape(-1))


def _number(factor: Coefficient | float) -> Tensor | float:
    return factor.value if isinstance(factor, Coefficient) else factor
