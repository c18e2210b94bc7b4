"""The engine of all operators: a solver is written once, forwards, on a `Tape`, which goes back through it by itself.

All that a solver ever makes are exponentials of `scale · X + matrices + vector`, a "sweep", sums of sweeps along an
axis, vectors made of these, plans and sums of plans. Autograd cannot run inside an operator, and would keep every one
of them. Time is passes over memory, so the tape knows what a pass need not be made for:

- a plan is lazy, exponentials and a vector that they are yet to be multiplied with, in the pass that reads them;
- the matrices of a sweep are added up in the sweep, each in one pass with its coefficient;
- where many sweeps have the same logits, `share` makes their exponentials once;
- the structural force of a plan is a matrix of the shorter axis, see `Structure`.

Vectors are known up to a constant in each set: whatever a solver does with one ends in a softmax.

Where values may be read (on CPU), the maximum of every row of X, its peak, is taken off it. What
all entries of a row have in common would otherwise be rounded in every sum and every gradient. The feature vectors of a
solver are then those of the shifted X; its docstring says where it has to add the peaks again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from rotp_vision.core.explicit.scratch import (
    Exponents,
    Scratch,
    balance_rows,
    exponent_limit,
    exponentials,
    store,
)
from rotp_vision.core.explicit.structure import Structure
from rotp_vision.core.explicit.view import Seen
from rotp_vision.core.structure import Similarity

BOTH, FEATURES, SAMPLES, MIXING = 0, 1, 2, 3  # the axes of (b, D, N), and of the matrices of `Structure`


@dataclass(eq=False, slots=True)
class Coefficient:
    """A scalar that a solver multiplies with, of one module, the same for all chunks; they add to its gradient."""

    value: Tensor
    number: float  # the value, NaN where it may not be read
    exponent: Tensor | None = None  # the value in the unit of exponents, once somebody has made it,
    along: Tensor | None = None  # (1, D, 1) and that as a feature vector
    slopes: list[Tensor] = field(default_factory=list)  # terms of its gradient

    def gradient(self) -> Tensor:
        return torch.stack(self.slopes).sum() if self.slopes else torch.zeros_like(self.value)


Factor = Coefficient | float


class Batch(NamedTuple):
    """What a solver reads."""

    features: Tensor  # (B, D, N) any dtype
    log_p0: Tensor  # (B, D)
    log_q0: Tensor  # (B, N), -inf on masked samples
    view: str  # what the plan sees of the features, see `view_of`
    similarity: str  # of the structural term; '' where there is none
    modules: list[list[Coefficient]]
    eager: bool  # whether values may be read, for which a GPU would wait
    any_masked: bool  # whether some sample may be


class Needs(NamedTuple):
    """Which gradients are wanted."""

    features: bool
    log_p0: bool
    log_q0: bool
    coefficients: bool


@dataclass(eq=False, slots=True)
class Variable:
    """A vector (b, D, 1) or (b, 1, N), a matrix (b, D, N) or that of a force (b, M, M), with its gradient.

    A vector is finite on masked samples, where nobody reads it.
    """

    value: Tensor
    axis: int
    reach: float = math.inf  # a bound on the size of the entries of a matrix
    wanted: bool = True  # whether its gradient is
    read_again: bool = False  # whether the way back needs the value, for the gradient of a coefficient
    grad: Tensor | None = None

    def add_grad(self, grad: Tensor) -> None:
        """Add to the gradient what nobody else writes to."""
        if self.wanted:
            self.grad = grad if self.grad is None else self.grad.add_(grad)


@dataclass(eq=False, slots=True)
class Plan:
    """exponentials · weight, with the parts of its gradient, each a matrix (b, D, N) and its factor."""

    exponentials: Tensor  # (b, D, N), of the product of the priors (b, 1, N)
    weight: Tensor  # (b, D, 1) or (b, 1, N)
    reach: float  # a bound on its entries
    pulls: list[tuple[Tensor, Factor]] = field(default_factory=list)


Terms = tuple[tuple[Factor, Variable | Plan], ...]
Recorded = TypeVar('Recorded', Variable, Plan)


class Logits:
    """scale · X + Σ factor · matrix; of forces the factor is one."""

    __slots__ = ('scale', 'shared', 'terms')

    def __init__(self, scale: Coefficient, *terms: tuple[Factor, Variable]) -> None:
        self.scale, self.terms = scale, terms
        self.shared: _Shared | None = None
        _note_reads(terms)

    def push(self) -> float:
        """A bound on the size of what the matrices add."""
        return sum(abs(_number(factor)) * matrix.reach for factor, matrix in self.terms)


@dataclass(eq=False, slots=True)
class _Sweep:
    """exp(logits + vector - top - a constant), with the gradient of the logits."""

    logits: Logits
    vector: Variable
    in_stack: bool
    exponentials: Tensor  # (b, D, N)
    total: Tensor  # their sum along the vector's axis, kept
    top: Tensor | None  # like total; None for zero
    grad: Tensor | None = None  # (b, D, N), over the exponentials once nobody needs them any more
    lse: Variable | None = None  # LSE(logits + vector), once somebody has asked for it

    def log_sum(self) -> Tensor:
        """LSE(logits + vector) but for the constant."""
        return self.total.log() if self.top is None else self.total.log() + self.top


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
    """Vectors, plans and matrices made from each other; recorded if `needs` says which gradients are wanted."""

    def __init__(self, batch: Batch, sets: slice, scratch: Scratch, needs: Needs | None = None) -> None:
        """Of the sets of a chunk."""
        log_p0, log_q0 = batch.log_p0[sets].unsqueeze(2), batch.log_q0[sets].unsqueeze(1)
        self._masked = log_q0 == -torch.inf if batch.any_masked else None
        self._seen = Seen(batch.features[sets], batch.view, self._masked, scratch, batch.eager)
        self._x, self._peak = self._seen.x, self._seen.peak
        self._spread, self._spread_was_read = self._seen.spread, False  # of the rows of X, at most
        self._eager, self._scratch, self._needs = batch.eager, scratch, needs
        self.modules = batch.modules  # each with one coefficient of every kind
        self._back: list[Callable[[], None]] = []
        wanted = needs or Needs(False, False, False, False)
        self._wants_slopes = wanted.coefficients
        self.log_p0 = Variable(log_p0, FEATURES, wanted=wanted.log_p0)
        self.log_q0 = Variable(self._fill(log_q0, 0.0), SAMPLES, wanted=wanted.log_q0)
        self._marginals = {id(v): self._exp(v) for v in (self.log_p0, self.log_q0)}
        # What is taken off X, up to a constant; whatever is taken off, the result is the same.
        self.peaks: Variable | None = None
        if self._peak is not None:
            self.peaks = Variable(self._peak - self._peak.amax(FEATURES, keepdim=True), FEATURES, wanted=False)
        self.similarity = batch.similarity
        self._structure: Structure | None = None
        self._force_reach = math.inf
        if batch.similarity:
            similarity = cast(Similarity, batch.similarity)
            self._structure = Structure(self._x, self._peak, self._masked, similarity, scratch)
            self._force_reach = self._structure.largest() if batch.eager else math.inf
        self._last: _Sweep | None = None  # the sweep whose exponentials were made last
        self._stack: Tensor | None = None  # (count, b·N·D) the exponentials of recorded sweeps, one after the other,
        self._rows: tuple[Tensor, ...] = ()  # the same as buffers (b, D, N),
        self._scales: list[Coefficient] = []  # and how X enters each

    def expect(self, num_sweeps: int) -> None:
        """Say how many sweeps there will be: all their shares in the gradient of X are then one product of matrices."""
        if self._needs is not None:
            self._stack, self._rows = self._scratch.stack(num_sweeps)

    # Vectors and matrices

    def combine(self, *terms: tuple[Factor, Variable | Plan]) -> Variable:
        """Σ factor · source, of vectors along the same axis, of matrices and plans, or of forces.

        A matrix that comes first with a factor of one is used up, unless the way back needs its value.
        """
        (first, source), *others = terms
        axis = source.axis if isinstance(source, Variable) else BOTH
        _note_reads(terms)
        if first == 1.0 and isinstance(source, Variable):
            value = source.value
            out = self._room(axis) if self._needs is not None and source.read_again else value
        else:
            out = value = torch.mul(*_product(first, source), out=self._room(axis))
        for factor, other in others:
            out = out if axis == BOTH else None
            if isinstance(other, Variable) and isinstance(factor, float):
                value = torch.add(value, other.value, alpha=factor, out=out)
            else:
                value = torch.addcmul(value, *_product(factor, other), out=out)
            out = value
        result = Variable(value, axis, sum(abs(_number(factor)) * other.reach for factor, other in terms))

        def back() -> None:
            grad, handed_on = result.grad, False
            if grad is None:
                return
            for factor, source in terms:
                if isinstance(source, Plan):
                    source.pulls.append((grad, factor))
                elif factor == 1.0 and source.grad is None and source.wanted and not handed_on:
                    source.grad, handed_on = grad, True  # which is not written to before the plans have read it
                else:
                    self._pull(source, grad, factor)

        return self._record(result, back)

    def _pull(self, source: Variable, grad: Tensor, factor: Factor) -> None:
        """Add factor · grad to the gradient of the source, and <grad, source> to that of the factor."""
        if isinstance(factor, Coefficient):
            self._add_slope(factor, grad, source.value)
        if not source.wanted:
            return
        value = _value(factor)
        if source.grad is None:
            source.grad = torch.mul(grad, value, out=self._room(source.axis))
        elif isinstance(value, Tensor):
            source.grad.addcmul_(grad, value)
        else:
            source.grad.add_(grad, alpha=value)

    def log_softmax(self, vector: Variable) -> Variable:
        """log softmax of a vector along its axis."""
        samples = vector.axis == SAMPLES
        value = (self._fill(vector.value, -torch.inf) if samples else vector.value).log_softmax(vector.axis)
        result = Variable(self._fill(value, 0.0) if samples else value, vector.axis)

        def back() -> None:
            if result.grad is not None:
                grad = self._fill(result.grad, 0.0) if samples else result.grad
                vector.add_grad(grad - value.exp() * grad.sum(vector.axis, keepdim=True))

        return self._record(result, back)

    # Sweeps and plans

    def lse(self, logits: Logits, vector: Variable) -> Variable:
        """LSE(logits + vector) along the vector's axis: a vector along the other."""
        if logits.shared is not None:
            return self._shared_lse(logits.shared, vector)
        sweep = self._swept(logits, vector)
        if sweep.lse is not None:
            return sweep.lse
        sweep.lse = result = Variable(sweep.log_sum(), 3 - vector.axis)

        def back() -> None:
            if result.grad is None:
                return
            slope = result.grad / sweep.total
            if sweep.grad is None:
                sweep.grad = sweep.exponentials.mul_(slope)
            else:
                sweep.grad = torch.addcmul(sweep.grad, sweep.exponentials, slope, out=sweep.exponentials)

        return self._record(result, back)

    def plan(self, logits: Logits, vector: Variable, log_marginal: Variable) -> tuple[Plan, Variable]:
        """exp(log_marginal) · softmax(logits + vector) along its axis, and log_marginal - LSE(logits + vector).

        The plan is zero on masked samples. A sweep has one plan, made after its log-sum-exp.
        """
        sweep = self._swept(logits, vector)
        marginal, reach = self._marginals.get(id(log_marginal)) or self._exp(log_marginal)
        weight = marginal / sweep.total
        if vector.axis == FEATURES:
            weight = self._fill(weight, 0.0)
        potential = Variable(log_marginal.value - sweep.log_sum(), 3 - vector.axis)
        plan = Plan(sweep.exponentials, weight, reach)

        def back() -> None:
            grad, slope = self._weighted_pulls(plan, vector.axis)
            if potential.grad is not None:
                slope = potential.grad if slope is None else slope.add_(potential.grad)
            if slope is None:
                return
            if grad is None:
                out = sweep.exponentials if sweep.lse is None else self._scratch.take()
                sweep.grad = torch.mul(sweep.exponentials, slope / -sweep.total, out=out)
            else:
                out = sweep.exponentials if sweep.lse is None else grad
                sweep.grad = torch.addcmul(grad, sweep.exponentials, slope / -sweep.total, out=out)
            log_marginal.add_grad(slope)

        return self._record(plan, back), potential

    def _weighted_pulls(self, plan: Plan, axis: int) -> tuple[Tensor | None, Tensor | None]:
        """(b, D, N) the gradient of a plan times the plan, and its sum along the axis of its softmax, kept."""
        total, moved = None, None
        for grad, factor in plan.pulls:
            weight = plan.weight * _value(factor)
            product = torch.mul(grad, plan.exponentials, out=self._scratch.take())
            sums = product.sum(axis, keepdim=True)
            if isinstance(factor, Coefficient):
                self._add_slope(factor, sums, plan.weight)
            total = product.mul_(weight) if total is None else total.addcmul_(product, weight)
            moved = sums.mul_(weight) if moved is None else moved.addcmul_(sums, weight)
        return total, moved

    def prior_plan(self) -> Plan:
        """The product of the priors, zero on masked samples."""
        (p, p_reach), (q, q_reach) = self._marginals.values()
        plan = Plan(self._fill(q, 0.0), p, p_reach * q_reach)

        def back() -> None:
            grad, by_feature = self._weighted_pulls(plan, SAMPLES)
            if grad is not None and by_feature is not None:
                self.log_p0.add_grad(by_feature)
                self.log_q0.add_grad(grad.sum(FEATURES, keepdim=True))

        return self._record(plan, back)

    def force(self, plan: Plan) -> Variable:
        """Σ1 P Σ2 of a plan P of mass one, see `structural_force`; as a matrix of `Structure`."""
        structure = self._structure
        assert structure is not None
        value, projected = structure.push(plan.exponentials, plan.weight)
        result = Variable(value, MIXING, self._force_reach)

        def back() -> None:
            if result.grad is None:
                return
            out = self._scratch.take()
            structure.push_back(result.grad, plan.exponentials, plan.weight, projected, out)
            plan.pulls.append((out, 1.0))

        return self._record(result, back)

    # Many sweeps of the same logits

    def share(self, logits: Logits) -> None:
        """Say that many sweeps are of these logits: they then need one exponential, where none of it can underflow.

        With E = exp(logits - top) the sweep is top + log Σ_n E exp(vector), and along the features likewise. The sum
        is at least the entry of E where the vector is largest, so a bound on E is all that is needed. Reading it
        synchronises a device other than the CPU: those do without.
        """
        limit = exponent_limit(self._x.dtype)
        if self._peak is None or (not logits.terms and not self._spread_within(limit / abs(logits.scale.number))):
            return
        exponents = self._scratch.take()
        torch.mul(self._x, self._exponent(logits.scale), out=exponents)
        top = None
        if logits.terms:
            self._add_terms(exponents, logits)
            hidden = exponents if self._masked is None else exponents.masked_fill(self._masked, -torch.inf)
            top = hidden.amax(SAMPLES, keepdim=True)
            exponents.sub_(top)
            if self._masked is not None:
                exponents.masked_fill_(self._masked, 0.0)
            if not -float(exponents.amin()) < limit * self._scratch.unit:
                return
            top = top / self._scratch.unit
        twin = self._scratch.take(samples_last=True)
        store(exponents.exp2_(), twin)
        shared = logits.shared = _Shared(exponents, twin, top, [], [])
        if self._needs is not None:
            self._back.append(lambda: self._add_shared(shared, logits))

    def _add_shared(self, shared: _Shared, logits: Logits) -> None:
        """Add up the gradients of all sweeps of the same logits."""
        if shared.left:
            grad = self._scratch.take()
            torch.bmm(torch.cat(shared.right, 1).mT, torch.cat(shared.left, 2).mT, out=grad.mT)
            self._logits_back(grad.mul_(shared.exponentials), logits, in_stack=False)

    def _shared_lse(self, shared: _Shared, vector: Variable) -> Variable:
        weights, top = self._shared_weights(shared, vector)
        total = shared.sum(weights, vector.axis)
        result = Variable(total.log() if top is None else total.log() + top, 3 - vector.axis)

        def back() -> None:
            if result.grad is None:
                return
            grad = result.grad / total
            vector.add_grad(shared.sum(grad, 3 - vector.axis).mul_(weights))
            left, right = (grad, weights) if vector.axis == SAMPLES else (weights, grad)
            shared.left.append(left)
            shared.right.append(right)

        return self._record(result, back)

    def _shared_weights(self, shared: _Shared, vector: Variable) -> tuple[Tensor, Tensor | None]:
        """What E is weighted with, largest one, and what the logarithm of the sum lacks but for a constant."""
        if vector.axis == SAMPLES:
            values = self._fill(vector.value, -torch.inf)
            return (values - values.amax(SAMPLES, keepdim=True)).exp_(), shared.top
        values = vector.value if shared.top is None else vector.value + shared.top
        return (values - values.amax(FEATURES, keepdim=True)).exp_(), None

    # The end

    def pool(self, logits: Logits, vector: Variable) -> Tensor:
        """(b, D, 1) features averaged by softmax_n(logits + vector)."""
        features = self._x if self._seen.averaged is None else self._seen.averaged
        shared = logits.shared
        if shared is None:
            sweep = self._sweep(logits, vector)
            pooled = sweep.exponentials.mul_(features).sum(SAMPLES, keepdim=True) / sweep.total
        else:
            weights, _ = self._shared_weights(shared, vector)
            products = torch.mul(shared.exponentials, features, out=self._scratch.take())
            pooled = torch.bmm(weights, products.mT).mT / shared.sum(weights, SAMPLES)
        if self._seen.averaged is None and self._peak is not None:
            pooled = pooled + self._peak
        return self._seen.pooled(pooled)

    def gradients(self, logits: Logits, vector: Variable, grad: Tensor) -> list[Tensor | None]:
        """The gradients of features, log p0 and log q0 by way of `pool(logits, vector)`, whose own is `grad` (b, D, 1).

        None where not wanted. Those of coefficients are added to them.
        """
        assert self._needs is not None
        spare = self._scratch.take()
        grad = self._seen.pooled(grad)
        sweep = self._sweep(logits, vector)
        separate = self._seen.averaged is not None
        features = self._x if self._seen.averaged is None else self._seen.averaged
        in_stack, exponentials = sweep.in_stack, sweep.exponentials
        mean = torch.mul(exponentials, features, out=spare).sum(SAMPLES, keepdim=True) / sweep.total
        d_features = torch.mul(exponentials, grad / sweep.total, out=self._scratch.take() if in_stack else exponentials)
        sweep.grad = torch.sub(features, mean, out=exponentials if in_stack else spare).mul_(d_features)
        if separate or self._structure is not None or not in_stack or self._peak is None:
            # Otherwise X is next to zero where it weighs most, so that little is rounded.
            balance_rows(sweep.grad, d_features, grad)
        self._dx: Tensor | None = None
        if self._needs.features:
            self._dx = self._scratch.take().zero_() if separate else d_features
        if self._structure is not None:
            self._structure.start_back(self._dx)
        self._sweep_back(sweep)
        del sweep
        while self._back:
            self._back.pop()()  # which holds the tape: once dropped, its memory is free without the garbage collector
        if self._structure is not None:
            self._structure.end_back()
        self._stack_back()
        if self._dx is not None:
            self._dx = self._seen.back(self._dx, d_features, grad, mean * grad, self._scratch.take())
        priors = self.log_p0, self.log_q0
        return [
            self._dx,
            *(v.grad if v.grad is not None or not v.wanted else torch.zeros_like(v.value) for v in priors),
        ]

    def _stack_back(self) -> None:
        """On from all sweeps in the stack, which has become their gradients, to X and its scales."""
        if self._stack is None:
            return
        if self._wants_slopes:
            slopes = torch.mv(self._stack, self._x.mT.reshape(-1)).unbind()
            for scale, slope in zip(self._scales, slopes, strict=True):
                scale.slopes.append(slope)
        if self._dx is not None:
            scales = torch.stack([scale.value for scale in self._scales])
            self._dx.mT.view(-1).addmv_(self._stack.t(), scales)

    # Inside

    def _fill(self, vector: Tensor, value: float) -> Tensor:
        """A sample vector with a number on masked samples."""
        return vector if self._masked is None else vector.masked_fill(self._masked, value)

    def _exp(self, log_marginal: Variable) -> tuple[Tensor, float]:
        """A marginal, and a bound on its entries."""
        marginal = log_marginal.value.exp()
        return marginal, float(marginal.amax()) if self._eager else math.inf

    def _record(self, result: Recorded, back: Callable[[], None]) -> Recorded:
        if self._needs is not None:
            self._back.append(back)
        return result

    def _room(self, axis: int) -> Tensor | None:
        """A buffer where a matrix goes; other results are small."""
        return self._scratch.take() if axis == BOTH else None

    def _swept(self, logits: Logits, vector: Variable) -> _Sweep:
        """The sweep of these, recorded; if they were those of the last one, that."""
        if self._last is not None and self._last.logits is logits and self._last.vector is vector:
            return self._last
        sweep = self._sweep(logits, vector)
        if self._needs is not None:
            self._back.append(lambda: self._sweep_back(sweep))
        return sweep

    def _sweep(self, logits: Logits, vector: Variable) -> _Sweep:
        self._last = None  # whose memory may be used again
        in_stack = self._stack is not None
        if in_stack:
            self._scales.append(logits.scale)
        out = self._rows[len(self._scales) - 1] if in_stack else self._scratch.take()
        self._last = _Sweep(logits, vector, in_stack, *self._exponentials(logits, vector, out))
        return self._last

    def _exponentials(self, logits: Logits, vector: Variable, out: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """exp(logits + vector - top - a constant), their sum along the vector's axis, and top."""
        axis = vector.axis
        if logits.shared is not None:
            weights, top = self._shared_weights(logits.shared, vector)
            y = torch.mul(logits.shared.exponentials, weights, out=out)
            return y, y.sum(axis, keepdim=True), top
        values = self._fill(vector.value, -torch.inf) if axis == SAMPLES else vector.value
        shifted = values - values.amax(axis, keepdim=True)
        exponents = self._exponents(logits, shifted, axis)
        if axis == SAMPLES and exponents.summable:
            shifted = self._fill(shifted, 0.0)
        scale, unit = self._exponent(logits.scale), self._scratch.unit
        if axis == SAMPLES:
            # As a feature vector: beside one that is constant along the contiguous axis torch would not vectorise a
            # second constant.
            if logits.scale.along is None:
                logits.scale.along = scale.expand(1, self._x.shape[1], 1).contiguous()
            scale = logits.scale.along
        y = torch.addcmul(shifted if unit == 1.0 else shifted * unit, self._x, scale, out=out)
        masked = self._masked if axis == SAMPLES else None
        self._add_terms(y, logits)
        y, total, top = exponentials(y, axis, self._scratch, exponents, masked)
        return y, total, top if top is None or unit == 1.0 else top / unit

    def _exponent(self, coefficient: Coefficient) -> Tensor:
        """A coefficient in the unit of exponents."""
        if self._scratch.unit == 1.0:
            return coefficient.value
        if coefficient.exponent is None:
            coefficient.exponent = coefficient.value * self._scratch.unit
        return coefficient.exponent

    def _add_terms(self, y: Tensor, logits: Logits) -> None:
        """Add Σ factor · matrix to y, in the unit of exponents."""
        unit = self._scratch.unit
        for factor, matrix in logits.terms:
            if matrix.axis == MIXING:
                assert self._structure is not None
                self._structure.act(y, matrix.value if unit == 1.0 else matrix.value * unit)
            elif isinstance(factor, Coefficient):
                y.addcmul_(matrix.value, self._exponent(factor))
            else:
                y.add_(matrix.value, alpha=factor * unit)

    def _spread_within(self, limit: float) -> bool:
        """Whether the entries of X lie no further apart; read only where what is known does not tell."""
        if not self._spread < limit and not self._spread_was_read:
            self._spread, self._spread_was_read = -float(self._x.amin()), True
        return self._spread < limit

    def _exponents(self, logits: Logits, shifted: Tensor, axis: int) -> Exponents:
        """What is known of the exponents of a sweep, whose vector is `shifted` to a maximum of zero.

        X and matrices are read only where bounds do not tell.
        """
        if self._peak is None:
            return Exponents(False, True)
        reach = -float((self._fill(shifted, 0.0) if axis == SAMPLES else shifted).amin())
        exponents = self._bounded(logits, reach, axis)
        if exponents.may_underflow:
            self._spread_within(-math.inf)
            for _, matrix in logits.terms:
                if matrix.axis == BOTH:
                    matrix.reach = float(torch.stack(matrix.value.mT.aminmax()).abs().amax())
            exponents = self._bounded(logits, reach, axis)
        return exponents

    def _bounded(self, logits: Logits, reach: float, axis: int) -> Exponents:
        """What bounds say of the exponents of a sweep along an axis, whose vector reaches from `-reach` to zero.

        A row of X has its maximum, zero, somewhere, so the exponents of a sweep along the samples have one within the
        vector's spread of zero; along the features, where the vector has its maximum. A scale below zero, which the
        coupled ADMM may have, turns that round: then they reach as far above zero. So do matrices.
        """
        limit, number = exponent_limit(self._x.dtype) - 2 * logits.push(), logits.scale.number
        of_x = abs(number) * self._spread
        if of_x + reach < limit:
            return Exponents(True, False)
        below = of_x if axis == FEATURES else reach
        return Exponents(number >= 0 and not logits.terms and below < limit / 2, True)

    def _sweep_back(self, sweep: _Sweep) -> None:
        """On from a sweep to what it is made of."""
        if sweep.grad is None:
            sweep.exponentials.zero_()  # as a row of the stack
            return
        if sweep.vector.wanted:
            sweep.vector.add_grad(sweep.grad.sum(3 - sweep.vector.axis, keepdim=True))
        self._logits_back(sweep.grad, sweep.logits, in_stack=sweep.in_stack)

    def _logits_back(self, grad: Tensor, logits: Logits, *, in_stack: bool) -> None:
        """On from logits, whose gradient this is, to what they are made of; that of a stack to X is left for later."""
        if not in_stack:
            if self._dx is not None:
                self._dx.addcmul_(grad, logits.scale.value)
            self._add_slope(logits.scale, grad, self._x)
        for factor, matrix in logits.terms:
            if matrix.axis == MIXING:
                assert self._structure is not None
                matrix.grad = self._structure.act_back(grad, matrix.value, matrix.grad)
            else:
                self._pull(matrix, grad, factor)

    def _add_slope(self, factor: Coefficient, a: Tensor, b: Tensor) -> None:
        """Add the sum of a · b to a coefficient's gradient; without copies where both lie in memory like a plan."""
        if self._wants_slopes:
            factor.slopes.append(torch.dot(a.mT.reshape(-1), b.mT.reshape(-1)))


def _note_reads(terms: Terms) -> None:
    """Mark the values that the way back reads."""
    for factor, source in terms:
        if isinstance(factor, Coefficient) and isinstance(source, Variable):
            source.read_again = True


def _product(factor: Factor, source: Variable | Plan) -> tuple[Tensor, Any]:
    """Two factors of factor · source."""
    if isinstance(source, Plan):
        return source.exponentials, source.weight * _value(factor)
    return source.value, _value(factor)


def _value(factor: Factor) -> Tensor | float:
    return factor.value if isinstance(factor, Coefficient) else factor


def _number(factor: Factor) -> float:
    return factor.number if isinstance(factor, Coefficient) else factor
