"""The published Bregman ADMM with its backward written out: one operator pair that keeps nothing but its inputs.

Substituting log P into the S-step cancels Z there, and whatever is constant along a softmax drops out of it. What is
left of `badmm`'s module k is, with κ = ρ / (α1 + ρ), β = 1/ρ + κ' β' (the dash marks the module before), and
κ = 1 if the smoothness is quadratic,

    M = κ' M' + Φ(S')                   Φ(S) = α0/ρ Σ1 S Σ2 - α1/ρ S (the latter if quadratic); M = 0 without either
    Q = softmax_n(β X + M - Z' / ρ + v')        r its log-sum-exp; P = p0 Q
    M = M + Φ(P)
    u = log p0 - r
    V = softmax_d(κ (β X + M + u))              c its log-sum-exp; S = q0 V
    v = log q0 - c
    Z = Z' + ρ (p0 Q - q0 V)

from v = log q0, Z = 0, S = p0 q0; the last module ends at Q, whose rows are the weights of the pooling. A masked
sample has log q0 = -inf and needs no other care. Backward runs the modules again, keeps what they leave behind for the
chunk at hand, and goes through them in reverse.

Time is passes over memory. So Q and V stay as exponentials and their sums, of which P and S are made in the pass that
reads them; on the way back the gradients of their logits are written over them, and as they lie one after the other in
memory, all their shares in the gradient of X are one product of matrices. And as adding a feature vector to X changes
nothing (u takes it up), X is shifted to a maximum of zero in every row: where its spread is moderate, no softmax needs
a maximum of its own.
"""

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from rotp_vision.core.explicit.ops import Gradients, Inputs, Needs, Slopes, register
from rotp_vision.core.explicit.scratch import (
    ChunkSize,
    Exponents,
    Scratch,
    balance_rows,
    exponent_limit,
    exponentials,
    shift_rows,
)
from rotp_vision.core.explicit.structure import Applied, AppliedToProduct, Structure
from rotp_vision.core.explicit.view import Seen
from rotp_vision.core.structure import Similarity
from rotp_vision.core.weights import StepWeights

FORCES = 3  # kinds of coefficients are β, κ, ρ, and from here on α1/ρ if quadratic, α0/ρ if structural


class _Scalars(NamedTuple):
    """Of one module; with their negatives and products, so that no chunk has to make them again."""

    beta: Tensor
    kappa: Tensor
    rho: Tensor
    kappa_beta: Tensor
    minus_step: Tensor  # -1/ρ
    roughness: Tensor | None  # -α1/ρ
    structure: Tensor | None  # α0/ρ


class _Modules(NamedTuple):
    """What all chunks have in common, made once."""

    each: list[_Scalars]
    betas: tuple[Tensor, ...]  # (1, D, 1) β as a feature vector, see `_run`
    p0: Tensor  # (B, D, 1) of the whole batch
    q0: Tensor  # (B, 1, N)
    rho_p0: Tensor  # (T, B, D, 1) ρ p0
    rho_q0: Tensor  # (T, B, 1, N) ρ q0
    of_x: Tensor  # (2T - 1) β, κβ, β, κβ, ...: how X enters the logits of Q, V, Q, V, ...
    slope: float  # max β, or infinity if values may not be read
    slack: float  # how far exponents may lie apart for other reasons than the spread of X, see `_Chunk._room`
    pushes: float  # Σ α0/ρ over all Φ
    any_masked: bool  # whether some sample may be


def _prepare(
    features: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    coefficients: Tensor,
    eager: bool,
    quadratic: bool,
    similarity: str,
) -> _Modules:
    beta, kappa, rho, *forces = coefficients
    columns = [row.unbind() for row in (beta, kappa, rho, kappa * beta, -rho.reciprocal())]
    none = [None] * len(columns[0])
    roughness = (-forces[0]).unbind() if quadratic else none
    structure = forces[-1].unbind() if similarity else none
    each = [_Scalars(*column) for column in zip(*columns, roughness, structure, strict=True)]
    betas = beta.view(-1, 1, 1, 1).expand(-1, 1, features.shape[1], 1).contiguous().unbind()
    of_x = torch.stack([beta, kappa * beta], 1).flatten()[:-1]
    p0, q0, rhos = log_p0.exp().unsqueeze(2), log_q0.exp().unsqueeze(1), rho.view(-1, 1, 1, 1)
    common = each, betas, p0, q0, rhos * p0, rhos * q0, of_x
    kept = log_q0[log_q0 != -torch.inf] if eager else None
    if kept is None or not kept.numel():
        return _Modules(*common, math.inf, 0.0, 0.0, True)

    drift = float(((rho.cumsum(0) - rho) / rho).amax())
    drift += 2 * float(forces[0].sum()) if quadratic else 0.0
    (p0_least, p0_most), (q0_least, q0_most) = (torch.stack(log.aminmax()).tolist() for log in (log_p0, kept))
    slack = 4 * drift * math.exp(max(p0_most, q0_most)) + math.log(features[0].numel())
    slack += p0_most - p0_least + q0_most - q0_least
    pushes = 2 * float(forces[-1].sum()) if similarity else 0.0
    return _Modules(*common, float(beta.amax()), slack, pushes, kept.numel() < log_q0.numel())


class _Plan(NamedTuple):
    """ρ P or ρ S as it lies in memory: exponentials · scale, with scale = ρ prior / their sum."""

    exponentials: Tensor  # (b, D, N)
    total: Tensor  # (b, D, 1) or (b, 1, N)
    scale: Tensor  # likewise


class _Module(NamedTuple):
    """What one module leaves behind for backward; the last one ends at P and has no more than that."""

    p: _Plan
    dual: Tensor | None  # (b, D, N) Z', None where zero
    from_s: Applied | None  # of Φ(S'), but for the first
    s: _Plan | None = None
    from_p: Applied | None = None  # of Φ(P)
    u: Tensor | None = None  # (b, D, 1) up to a constant


class _Pull(NamedTuple):
    """A part of the gradient of a plan: that of exponentials · weight is grad, times factor if there is one."""

    grad: Tensor  # (b, D, N)
    weight: Tensor  # (b, D, 1) or (b, 1, N)
    factor: Tensor | None
    out: Tensor  # (b, D, N) for grad · exponentials · weight; may be grad itself


class _Chunk:
    """The inputs of a chunk ready to run, and Φ."""

    def __init__(self, inputs: Inputs, scratch: Scratch, quadratic: bool, similarity: str) -> None:
        self.scratch = scratch
        self.all: _Modules = inputs.modules
        eager = self.all.slope < math.inf
        self.masked = inputs.log_q0 == -torch.inf if self.all.any_masked else None
        self.seen = seen = Seen(inputs.features, inputs.view, self.masked, scratch, eager)
        self.x, spread = seen.x, seen.spread
        self.log_p0, self.log_q0 = inputs.log_p0, inputs.log_q0
        sets = inputs.sets
        self.p0, self.q0 = self.all.p0[sets], self.all.q0[sets]
        self.rho_p0, self.rho_q0 = self.all.rho_p0[:, sets].unbind(), self.all.rho_q0[:, sets].unbind()
        self.modules = self.all.each
        self.forced = quadratic or similarity != ''
        self._rough: Tensor | None = None  # (b, D, N) what the plans have added to M, if quadratic,
        self._mixing: Tensor | None = None  # and by the structural term, which see
        self.first: AppliedToProduct | None = None  # of Φ(p0 q0)
        self.structure = None
        if similarity:
            self.structure = Structure(self.x, self.masked, cast(Similarity, similarity), scratch)
        # Nothing changes if X is shifted to a maximum of zero in every row, but exponents and slopes get smaller.
        ours = seen.may_overwrite and similarity != 'cosine'  # which reads X to the end
        self.x, self.peak = shift_rows(self.x, self.masked, scratch.over(self.x) if ours else scratch.take())
        room = self._room() if eager else 0.0
        self.bounded = eager and ((self.masked is None and spread < room) or -float(self.x.amin()) < room)
        self.features = self.x if seen.averaged is None else seen.averaged

    def _room(self) -> float:
        """How far the rows of X, with a maximum of zero, may reach so that no sum of exponentials needs one taken off.

        Let R be how far they reach and F a bound on |M - Z/ρ|: no entry of a plan exceeds its prior. A column's sum
        varies by a factor of D exp(β R + 2 F) at most, so v, whose maximum is made zero, reaches as far down, and
        further by the spread of log q0. A row has its maximum somewhere, so its sum is between exp(-F) times this and N
        exp(F). So far goes u, and the spread of log p0 further, and what it adds to a column is damped by κ. (u
        contains log ρ as well, which matters to no ρ that anybody would take.)
        """
        # Extremes that hardly ever meet are added up here: the limit may be nearer to underflow than elsewhere.
        room = 1.2 * exponent_limit(self.x.dtype) - self.all.slack
        if self.structure is not None:
            room -= 4 * self.all.pushes * float(self.structure.largest())
        return room / self.all.slope

    def softmax(self, y: Tensor, dim: int, weighted_prior: Tensor) -> tuple[_Plan, Tensor | None]:
        """ρ · prior · softmax of y along `dim`, over y, and the maximum that was taken off y."""
        exponents = Exponents(summable=self.bounded, may_underflow=not self.bounded)
        y, total, top = exponentials(y, dim, self.scratch, exponents, self.masked if dim == 2 else None)
        return _Plan(y, total, weighted_prior / total), top

    def vector(self, plan: _Plan, top: Tensor | None, log_prior: Tensor) -> Tensor:
        """log prior - the log-sum-exp of what `softmax` was made of, up to a constant."""
        return plan.scale.log() if top is None else log_prior - (plan.total.log() + top)

    def push(
        self, y: Tensor, k: int, exponentials: Tensor, weight: Tensor, *, damped: bool
    ) -> tuple[Tensor, Applied | None]:
        """y + M, over y, once Φ(exponentials · weight) of module k has come to M; and once κ has, if `damped`."""
        module, scratch, applied = self.modules[k], self.scratch, None
        if module.roughness is not None:
            # Then κ is one.
            weighted = module.roughness * weight
            if self._rough is None:
                self._rough = torch.mul(exponentials, weighted, out=scratch.take())
            else:
                self._rough = torch.addcmul(self._rough, exponentials, weighted, out=scratch.over(self._rough))
            y = torch.add(y, self._rough, out=scratch.over(y))
        if self.structure is not None and module.structure is not None:
            if self._mixing is None:
                self.first = self.structure.push_product(exponentials, weight, module.structure)
                self._mixing = self.first.mixing
                return self.structure.act_product(y, self.first, module.structure, scratch), None
            damping = module.kappa if damped else None
            applied = self.structure.push(self._mixing, exponentials, weight, module.structure, damping)
            self._mixing = applied.mixing
            y = self.structure.act(y, self._mixing, scratch)
        return y, applied

    def pull(
        self,
        dm: Tensor | None,
        k: int,
        plan: _Plan,
        weight: Tensor,
        applied: Applied | None,
        slopes: Slopes,
        forces: list[Tensor],
    ) -> list[_Pull]:
        """Back through Φ(plan) in module k, the plan being exponentials · weight; `forces` are buffers."""
        module, pulls = self.modules[k], []
        if self.structure is not None and applied is not None and module.structure is not None:
            slope = self.structure.push_back(plan.exponentials, weight, module.structure, applied, forces[0])
            if slopes.wanted:
                slopes.add(('structure', k), slope)
            pulls.append(_Pull(forces[0], weight, None, forces[0]))
        if dm is not None and module.roughness is not None:
            pulls.append(_Pull(dm, weight, module.roughness, forces[-1]))
        return pulls


def _run(chunk: _Chunk, kept: list[_Module] | None, stack: tuple[Tensor, ...] = ()) -> _Module:
    """Run the modules and return the last; with `kept` the others are left there, their exponentials in the stack."""
    x, scratch, over = chunk.x, chunk.scratch, chunk.scratch.over
    v, z = chunk.log_q0, None
    p = s = None
    for k, module in enumerate(chunk.modules):
        # P-step
        if chunk.bounded:
            v = v - v.amax(2, keepdim=True)
            v = v if chunk.masked is None else v.masked_fill(chunk.masked, 0.0)
        # β as a feature vector, not a scalar: v is constant along the contiguous axis, and torch would not vectorise a
        # second constant beside it.
        out = stack[2 * k] if stack else scratch.take() if p is None else over(p.exponentials)
        row = torch.addcmul(v, x, chunk.all.betas[k], out=out)
        if z is not None:
            row = torch.addcmul(row, z, module.minus_step, out=over(row))
        from_s = from_p = None
        if chunk.forced:
            # S', at first p0 q0.
            before, weight = (chunk.p0, chunk.q0) if s is None else (s.exponentials, s.scale / chunk.modules[k - 1].rho)
            row, from_s = chunk.push(row, k, before, weight, damped=False)
        p, top = chunk.softmax(row, 2, chunk.rho_p0[k])
        if k + 1 == len(chunk.modules):
            return _Module(p, z, from_s)
        u = chunk.vector(p, top, chunk.log_p0)
        # S-step
        out = stack[2 * k + 1] if stack else scratch.take() if s is None else over(s.exponentials)
        column = torch.addcmul(module.kappa * u, x, module.kappa_beta, out=out)
        if chunk.forced:
            column, from_p = chunk.push(column, k, p.exponentials, p.scale / module.rho, damped=True)
        s, top = chunk.softmax(column, 1, chunk.rho_q0[k])
        v = chunk.vector(s, top, chunk.log_q0)
        # Dual
        dual, out = z, scratch.take() if z is None or kept is not None else over(z)
        if z is None:
            z = torch.mul(p.exponentials, p.scale, out=out)
        else:
            z = torch.addcmul(z, p.exponentials, p.scale, out=out)
        z = torch.addcmul(z, s.exponentials, s.scale, value=-1, out=over(z))
        if kept is not None:
            kept.append(_Module(p, dual, from_s, s, from_p, u))
    raise AssertionError('there is at least one module')


def _forward(inputs: Inputs, scratch: Scratch, quadratic: bool, similarity: str) -> Tensor:
    chunk = _Chunk(inputs, scratch, quadratic, similarity)
    row, total, _ = _run(chunk, None).p
    pooled = torch.mul(row, chunk.features, out=scratch.over(row)).sum(2, keepdim=True) / total
    return chunk.seen.pooled(pooled + chunk.peak if chunk.seen.averaged is None else pooled)


def _softmax_back(plan: _Plan, dim: int, pulls: list[_Pull], grad: Tensor) -> list[Tensor]:
    """Back through `_Chunk.softmax`: the gradient of the logits is written over the plan's exponentials.

    Args:
        plan: what the softmax has left.
        dim: along which it is.
        pulls: the gradient of the plan: by Z, by the structural term and by the roughness, if there are.
        grad: of `log prior - log-sum-exp`; that of log prior is written over it.

    Returns:
        Of each pull but the structural, without its factor, Σ grad · exponentials · weight along `dim`.
    """
    first, *others = pulls
    for pull in pulls:
        torch.mul(pull.grad, plan.exponentials, out=pull.out).mul_(pull.weight)
    moved = [pull.out.sum(dim, keepdim=True) for pull in pulls if pull is first or pull.factor is not None]
    # Weighted and added up before it is summed: then the two terms of a softmax with one entry cancel to the last bit,
    # which matters where the structural term has made them large.
    for pull in others:
        _add_scaled(first.out, pull.out, pull.factor)
    grad.add_(first.out.sum(dim, keepdim=True) if others else moved[0])
    torch.addcmul(first.out, plan.exponentials, grad / plan.total, value=-1, out=plan.exponentials)
    return moved


def _add_scaled(total: Tensor, more: Tensor, factor: Tensor | None) -> Tensor:
    return total.add_(more) if factor is None else total.addcmul_(more, factor)


def _backward(
    grad: Tensor, inputs: Inputs, scratch: Scratch, needs: Needs, slopes: Slopes, quadratic: bool, similarity: str
) -> Gradients:
    chunk = _Chunk(inputs, scratch, quadratic, similarity)
    x, structure, num_modules = chunk.x, chunk.structure, len(chunk.modules)
    kept: list[_Module] = []
    # The exponentials of Q, V, Q, V, ..., and then dy, dt, dy, dt, ...
    gradients, stack = scratch.stack(2 * num_modules - 1)
    last = _run(chunk, kept, stack)
    d_log_p0 = torch.zeros_like(inputs.log_p0) if needs.log_p0 else None
    d_log_q0 = torch.zeros_like(inputs.log_q0) if needs.log_q0 else None
    spare = scratch.buffer()
    forces = [scratch.buffer() for _ in range(quadratic + (structure is not None))]

    # f = Σ_n features Q
    row, total, _ = last.p
    grad, separate = chunk.seen.pooled(grad), chunk.seen.averaged is not None
    d_features = torch.mul(row, grad / total, out=scratch.buffer())
    moved = torch.mul(d_features, chunk.features, out=spare).sum(2, keepdim=True)
    torch.addcmul(spare, row, moved / total, value=-1, out=row)
    if structure is not None or separate:
        # X itself is next to zero where it weighs most, so that little is rounded.
        balance_rows(row, d_features, grad)
    dx = None
    if needs.features:
        dx = scratch.buffer() if separate else d_features
    if structure is not None:
        structure.start_back(dx if dx is None or not separate else dx.zero_(), scratch)
    dz = dm = None
    for k in reversed(range(num_modules)):
        # dy is the gradient of the logits of Q in module k.
        module, step = last if k == len(kept) else kept[k], chunk.modules[k]
        dy = module.p.exponentials
        if k == 0 and d_log_q0 is None and not chunk.forced:
            break
        dv = dy.sum(1, keepdim=True)
        if quadratic:
            dm = scratch.buffer().copy_(dy) if dm is None else dm.add_(dy)
        if structure is not None and module.from_s is not None:
            structure.act_back(dy, module.from_s.mixing)
        if k == 0:
            # S' = p0 q0
            if dm is not None and step.roughness is not None:
                torch.mul(dm, chunk.p0, out=spare).mul_(chunk.q0)
                by_sample = spare.sum(1, keepdim=True)
                if slopes.wanted:
                    slopes.add(('roughness of s', 0), by_sample)
                if d_log_p0 is not None:
                    d_log_p0.addcmul_(spare.sum(2, keepdim=True), step.roughness)
                dv.addcmul_(by_sample, step.roughness)
            if structure is not None and chunk.first is not None and step.structure is not None:
                slope, d_log_p, d_log_q = structure.product_back(dy, step.structure, chunk.first)
                if slopes.wanted:
                    slopes.add(('structure', 0), slope)
                if d_log_p0 is not None:
                    d_log_p0 += d_log_p
                dv += d_log_q
            if d_log_q0 is not None:
                d_log_q0 += dv
            break
        if slopes.wanted:
            assert module.dual is not None
            slopes.add(('dual', k), scratch.inner(dy, module.dual))
        if dz is None:
            dz = torch.mul(dy, step.minus_step, out=scratch.buffer())
        else:
            dz.addcmul_(dy, step.minus_step)

        # S of the module before: read by its Z and by this module's M.
        p, _, _, s, from_p, u = kept[k - 1]
        assert s is not None
        assert u is not None
        before = chunk.modules[k - 1]
        pulls = chunk.pull(dm, k, s, s.scale / before.rho, module.from_s, slopes, forces) if chunk.forced else []
        s_moved = _softmax_back(s, 1, [_Pull(dz, -s.scale, None, spare), *pulls], dv)
        if d_log_q0 is not None:
            d_log_q0 += dv
        # dt is the gradient of the logits of V.
        dt = s.exponentials
        du = dt.sum(2, keepdim=True)
        if slopes.wanted:
            slopes.add(('u', k - 1), du * u)
        if dm is not None:
            dm += dt
        if structure is not None and from_p is not None:
            structure.act_back(dt, from_p.mixing)
            slope = structure.damp_back(before.kappa, from_p)
            if slopes.wanted:
                slopes.add(('damping', k - 1), slope)
        du.mul_(before.kappa)

        # P of the module before: read by its Z and by its M.
        pulls = chunk.pull(dm, k - 1, p, p.scale / before.rho, from_p, slopes, forces) if chunk.forced else []
        p_moved = _softmax_back(p, 2, [_Pull(dz, p.scale, None, spare), *pulls], du)
        if d_log_p0 is not None:
            d_log_p0 += du
        if slopes.wanted:
            slopes.add(('rho of p', k - 1), p_moved[0])
            slopes.add(('rho of s', k - 1), s_moved[0])
            if dm is not None:
                slopes.add(('roughness of s', k), s_moved[-1])
                slopes.add(('roughness of p', k - 1), p_moved[-1])
    if structure is not None:
        structure.end_back()
    if slopes.wanted:
        slopes.add(('x',), torch.mv(gradients, scratch.flat(x)))
    if dx is not None:
        blank = separate and structure is None
        scratch.flat(dx).addmv_(gradients.t(), chunk.all.of_x, beta=0 if blank else 1)
        dx = chunk.seen.back(dx, d_features, x, chunk.peak, grad, moved, spare)
    return Gradients(dx, d_log_p0, d_log_q0)


def _collect(sums: dict[tuple, Tensor], coefficients: Tensor) -> Tensor:
    """The gradient of the coefficients, of what `_backward` has added up."""
    if not sums:
        return torch.zeros_like(coefficients)  # of an empty batch
    beta, kappa, rho = coefficients[:FORCES]
    zero = coefficients.new_zeros(())

    def by_module(*names: str) -> Tensor:
        each = [[sums.get((name, k), zero) for k in range(coefficients.shape[1])] for name in names]
        return torch.stack([torch.stack(values) for values in each]).sum(0)

    by_row, by_column = torch.cat([sums['x',], zero.view(1)]).view(-1, 2).unbind(1)
    kinds = [by_row + kappa * by_column, beta * by_column + by_module('u') + by_module('damping') / kappa]
    kinds.append(by_module('dual') / rho.square() + by_module('rho of p', 'rho of s') / rho)
    if ('roughness of s', 0) in sums:
        kinds.append(-by_module('roughness of p', 'roughness of s'))
    if ('structure', 0) in sums:
        kinds.append(by_module('structure'))
    return torch.stack(kinds)


def _chunk_size(quadratic: bool, similarity: str) -> ChunkSize:
    """As many parts as a forward has plan-sized tensors: X, Q, V, Z, M; a plan, factors, small matrices."""
    return ChunkSize(parts=14, multiplies=True) if similarity else ChunkSize(parts=8)


register('badmm_pool', _forward, _backward, ', bool quadratic, str similarity', _prepare, _collect, _chunk_size)


def badmm_pool(
    features: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    weights: StepWeights,
    view: str,
    quadratic: bool,
    similarity: str,
) -> Tensor:
    """(B, D) `features` pooled by the published Bregman ADMM. Can be scripted.

    Args:
        features: (B, D, N), zero on masked samples.
        log_p0: (B, D).
        log_q0: (B, N), -inf on masked samples.
        weights: smoothness, step and structure are read.
        view: what the plan sees of the features, see `view_of`.
        quadratic: whether the smoothness is quadratic.
        similarity: of the structural term, see `structural_force`.
    """
    coefficients = badmm_coefficients(weights, quadratic).to(log_p0.dtype)
    if weights.structure is None:
        similarity = ''
    return torch.ops.rotp_vision.badmm_pool(features, log_p0, log_q0, coefficients, view, quadratic, similarity)


def badmm_coefficients(weights: StepWeights, quadratic: bool) -> Tensor:
    """(kinds, T) what the operators take for weights: β, κ, ρ, then α1/ρ if quadratic, α0/ρ if structural."""
    smoothness, step = weights.smoothness, weights.step
    assert step is not None
    kappas = torch.ones_like(step) if quadratic else step / (smoothness + step)
    betas = [step[0].reciprocal()]
    for k in range(1, step.shape[0]):
        betas.append(step[k].reciprocal() + kappas[k - 1] * betas[k - 1])
    kinds = [torch.stack(betas), kappas, step]
    if quadratic:
        kinds.append(smoothness / step)
    structure = weights.structure
    if structure is not None:
        kinds.append(structure / step)
    return torch.stack(kinds)
