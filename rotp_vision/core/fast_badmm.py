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
reads them. And as adding a feature vector to X changes nothing (u takes it up), X may be shifted to a maximum of zero
in every row: where its spread is moderate, no softmax needs a maximum of its own.
"""

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from rotp_vision.core.fast_structure import Applied, Structure
from rotp_vision.core.ops import Gradients, Inputs, Needs, Slopes, register
from rotp_vision.core.scratch import Scratch, exponent_limit, exponentials
from rotp_vision.core.structure import Similarity
from rotp_vision.core.weights import StepWeights

BETA, KAPPA, RHO, FORCE = range(4)  # rows of the coefficients; after FORCE come α1/ρ if quadratic, and α0/ρ


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
    """The scalars of all modules, made once for all chunks."""

    each: list[_Scalars]
    betas: tuple[Tensor, ...]  # (1, D, 1) β as a row, see `_run`
    rhos: Tensor  # (T, 1, 1, 1) ρ
    slope: float  # max β
    drift: float  # |M - Z/ρ| is at most this times the largest entry of a plan


def _prepare(x: Tensor, coefficients: Tensor, eager: bool, quadratic: bool, similarity: str) -> _Modules:
    beta, kappa, rho, *forces = coefficients
    columns = [row.unbind() for row in (beta, kappa, rho, kappa * beta, -rho.reciprocal())]
    none = [None] * len(columns[0])
    roughness = (-forces[0]).unbind() if quadratic else none
    structure = forces[-1].unbind() if similarity else none
    each = [_Scalars(*column) for column in zip(*columns, roughness, structure, strict=True)]
    betas = beta.view(-1, 1, 1, 1).expand(-1, 1, x.shape[1], 1).contiguous().unbind()
    slope = drift = math.inf
    if eager and structure is none:
        slope, steps = float(beta.amax()), rho.tolist()
        drift = max(sum(steps[:k]) / step for k, step in enumerate(steps))
        drift += 2 * float(forces[0].sum()) if quadratic else 0.0
    return _Modules(each, betas, rho.view(-1, 1, 1, 1), slope, drift)


class _Plan(NamedTuple):
    """ρ P or ρ S as it lies in memory: exponentials · scale, with scale = ρ prior / their sum."""

    exponentials: Tensor  # (b, D, N)
    total: Tensor  # (b, D, 1) or (b, 1, N)
    scale: Tensor  # likewise


class _Module(NamedTuple):
    """What one module leaves behind for backward; the last one ends at P and has nothing after `u`."""

    p: _Plan
    dual: Tensor | None  # (b, D, N) Z', None where zero
    from_s: Applied | None  # of Φ(S')
    u: Tensor  # (b, D, 1) up to a constant
    s: _Plan | None = None
    from_p: Applied | None = None  # of Φ(P)
    forces: Tensor | None = None  # (b, D, N) M after Φ(P), where its slope is needed


class _Chunk:
    """The inputs of a chunk ready to run, and Φ."""

    def __init__(self, inputs: Inputs, scratch: Scratch, quadratic: bool, similarity: str) -> None:
        self.scratch = scratch
        self.quadratic = quadratic
        self.x = scratch.load(inputs.x)
        self.features = self.x if inputs.features is None else scratch.load(inputs.features)
        self.log_p0, self.log_q0 = inputs.log_p0, inputs.log_q0
        self.p0, self.q0 = inputs.log_p0.exp(), inputs.log_q0.exp()
        self.all: _Modules = inputs.modules
        self.modules = self.all.each
        self.structure = Structure(inputs, self.x, cast(Similarity, similarity)) if similarity else None
        self._plan = scratch.take() if similarity else None
        self.forced = quadratic or self.structure is not None
        self.bounded = False
        self.offset: Tensor | None = None  # (b, D, 1) what was taken off the features
        if self.all.slope < math.inf:
            self._bound(inputs)

    def _bound(self, inputs: Inputs) -> None:
        """Shift X to a maximum of zero in every row if then all sums of exponentials are within bounds.

        Let R be the spread of X and F a bound on |M - Z/ρ|: no entry of a plan exceeds its prior. A column's sum varies
        by a factor of D exp(β R + 2 F) at most, so v, whose maximum is made zero, reaches as far down, and further by
        the spread of log q0. A row has its maximum somewhere, so its sum is between exp(-F) times this and N exp(F),
        unless the maximum is masked. So far goes u, and the spread of log p0 further, and what it adds to a column is
        damped by κ.
        """
        peak = self.x.amax(2, keepdim=True)
        gone = self.log_q0 == -torch.inf
        log_q0 = self.log_q0.masked_fill(gone, 0.0)
        looked_at = [
            (peak - self.x.amin(2, keepdim=True)).amax(),
            self.log_p0.amax(),
            self.log_p0.amin(),
            log_q0.amax(),
            log_q0.masked_fill(gone, torch.inf).amin(),
            gone.any().to(self.x.dtype),
        ]
        spread, p0_most, p0_least, q0_most, q0_least, masked = torch.stack(looked_at).tolist()
        exponent = spread * self.all.slope * (2 if masked else 1)
        exponent += 4 * self.all.drift * math.exp(max(p0_most, q0_most))
        exponent += (p0_most - p0_least) + (q0_most - q0_least) + math.log(self.x[0].numel())
        self.bounded = exponent < exponent_limit(self.x.dtype)
        if self.bounded:
            self.x = torch.sub(self.x, peak, out=self.scratch.take() if self.x is inputs.x else self.x)
            if inputs.features is None:
                self.features, self.offset = self.x, peak

    def softmax(self, y: Tensor, dim: int, log_prior: Tensor, weighted_prior: Tensor) -> tuple[_Plan, Tensor]:
        """ρ · prior · softmax of y along `dim`, over y, and log prior - its log-sum-exp up to a constant."""
        y, total, top = exponentials(y, dim, self.scratch, self.bounded)
        scale = weighted_prior / total
        return _Plan(y, total, scale), scale.log() if top is None else log_prior - (total.log() + top)

    def push(self, m: Tensor, module: _Scalars, exponentials: Tensor, scale: Tensor) -> tuple[Tensor, Applied | None]:
        """M + Φ(exponentials · scale), written over M."""
        if module.roughness is not None:
            m = torch.addcmul(m, exponentials, module.roughness * scale, out=self.scratch.over(m))
        if self.structure is None or module.structure is None:
            return m, None
        plan = torch.mul(exponentials, scale, out=self._plan)
        return self.structure.push(m, plan, module.structure, self.scratch)

    def pull(
        self,
        dm: Tensor,
        k: int,
        exponentials: Tensor,
        scale: Tensor,
        applied: Applied | None,
        slopes: Slopes,
        out: Tensor,
    ) -> Tensor:
        """Back through `push` in module k: exponentials · gradient of the plan into `out`."""
        module = self.modules[k]
        if self.structure is None or applied is None:
            assert module.roughness is not None
            torch.mul(dm, exponentials, out=out)
            if slopes.wanted:
                axis = 1 if scale.shape[1] == 1 else 2
                slopes.add(FORCE, k, -(out.sum(axis, keepdim=True) * scale).sum())
            return out.mul_(module.roughness)
        assert module.structure is not None
        plan = torch.mul(exponentials, scale, out=self._plan)
        slopes.add(FORCE + self.quadratic, k, self.structure.back(dm, plan, module.structure, applied, out))
        if module.roughness is not None:
            slopes.add(FORCE, k, -self.scratch.inner(dm, plan))
            out.addcmul_(dm, module.roughness)
        return out.mul_(exponentials)


def _run(chunk: _Chunk, kept: list[_Module] | None) -> _Module:
    """Run the modules and return the last; with `kept` the others are left there, in buffers of their own."""
    x, scratch, over = chunk.x, chunk.scratch, chunk.scratch.over
    weighted_p0, weighted_q0 = (chunk.all.rhos * chunk.p0).unbind(), (chunk.all.rhos * chunk.q0).unbind()
    v, z, m, from_s = chunk.log_q0, None, None, None
    p = s = None
    for k, module in enumerate(chunk.modules):
        # P-step
        if chunk.bounded:
            v = v - v.amax(2, keepdim=True)
        # β as a row, not a scalar: v is constant along the contiguous axis, and a second constant beside it would not
        # be vectorised.
        out = scratch.take() if p is None or kept is not None else over(p.exponentials)
        row = torch.addcmul(v, x, chunk.all.betas[k], out=out)
        if z is not None:
            row = torch.addcmul(row, z, module.minus_step, out=over(row))
        if chunk.forced:
            if m is None or s is None:
                m = torch.mul(x, 0.0, out=scratch.take())
                m, from_s = chunk.push(m, module, chunk.p0.expand_as(x), chunk.q0)
            else:
                m, from_s = chunk.push(m, module, s.exponentials, s.scale / chunk.modules[k - 1].rho)
            row = torch.add(row, m, out=over(row))
        p, u = chunk.softmax(row, 2, chunk.log_p0, weighted_p0[k])
        if k + 1 == len(chunk.modules):
            return _Module(p, z, from_s, u)
        # S-step
        out = scratch.take() if s is None or kept is not None else over(s.exponentials)
        column = torch.addcmul(module.kappa * u, x, module.kappa_beta, out=out)
        forces = from_p = None
        if m is not None:
            m, from_p = chunk.push(m, module, p.exponentials, p.scale / module.rho)
            if not chunk.quadratic:
                forces, m = m, torch.mul(m, module.kappa, out=over(m) if kept is None else scratch.take())
            column = torch.add(column, m, out=over(column))
        s, v = chunk.softmax(column, 1, chunk.log_q0, weighted_q0[k])
        # Dual
        before = z
        if z is None:
            z = torch.mul(p.exponentials, p.scale, out=scratch.take())
        else:
            z = torch.addcmul(z, p.exponentials, p.scale, out=over(z) if kept is None else scratch.take())
        z = torch.addcmul(z, s.exponentials, s.scale, value=-1, out=over(z))
        if kept is not None:
            kept.append(_Module(p, before, from_s, u, s, from_p, forces))
    raise AssertionError('there is at least one module')


def _forward(inputs: Inputs, scratch: Scratch, quadratic: bool, similarity: str) -> Tensor:
    chunk = _Chunk(inputs, scratch, quadratic, similarity)
    row, total, _ = _run(chunk, None).p
    pooled = torch.mul(row, chunk.features, out=scratch.over(row)).sum(2, keepdim=True) / total
    return pooled if chunk.offset is None else pooled + chunk.offset


def _backward(
    grad: Tensor, inputs: Inputs, scratch: Scratch, needs: Needs, slopes: Slopes, quadratic: bool, similarity: str
) -> Gradients:
    chunk = _Chunk(inputs, scratch, quadratic, similarity)
    x, p0, q0 = chunk.x, chunk.p0, chunk.q0
    kept: list[_Module] = []
    last = _run(chunk, kept)
    if chunk.structure is not None:
        chunk.structure.start_back(scratch)
    d_log_p0 = torch.zeros_like(inputs.log_p0) if needs.log_p0 else None
    d_log_q0 = torch.zeros_like(inputs.log_q0) if needs.log_q0 else None
    dy, dt, spare = scratch.buffer(), scratch.buffer(), scratch.buffer()

    # f = Σ_n features Q
    grad = grad / last.p.total
    d_features = torch.mul(last.p.exponentials, grad, out=scratch.buffer())
    mean = torch.mul(d_features, chunk.features, out=dy).sum(2, keepdim=True)
    torch.addcmul(-mean / last.p.total, chunk.features, grad, out=dy).mul_(last.p.exponentials)
    dx = None
    if needs.x:
        dx = d_features if inputs.features is None else scratch.buffer().zero_()
    dz = dm = None
    for k in reversed(range(len(chunk.modules))):
        # dy is the gradient of the logits of Q in module k.
        module, step = last if k == len(kept) else kept[k], chunk.modules[k]
        dv = dy.sum(1, keepdim=True)
        if dx is not None:
            dx.addcmul_(dy, step.beta)
        if slopes.wanted:
            slopes.add(BETA, k, scratch.inner(dy, x))
        if chunk.forced:
            dm = scratch.buffer().copy_(dy) if dm is None else dm.add_(dy)
        if k == 0:
            if d_log_q0 is not None:
                d_log_q0 += dv
            if dm is not None:
                # S' = p0 q0
                chunk.pull(dm, k, p0.expand_as(x), q0, module.from_s, slopes, spare).mul_(q0)
                if d_log_p0 is not None:
                    d_log_p0 += spare.sum(2, keepdim=True)
                if d_log_q0 is not None:
                    d_log_q0 += spare.sum(1, keepdim=True)
            break
        if slopes.wanted:
            assert module.dual is not None
            slopes.add(RHO, k, scratch.inner(dy, module.dual) * step.minus_step.square())
        if dz is None:
            dz = torch.mul(dy, step.minus_step, out=scratch.buffer())
        else:
            dz.addcmul_(dy, step.minus_step)

        # S of the module before: read by its Z and by this module's M.
        p, _, _, u, s, from_p, forces = kept[k - 1]
        assert s is not None
        before = chunk.modules[k - 1]
        torch.mul(dz, s.exponentials, out=dt)
        s_moved = dt.sum(1, keepdim=True).mul_(s.scale)
        dv -= s_moved
        dt.mul_(-s.scale)
        if dm is not None:
            scale = s.scale / before.rho
            chunk.pull(dm, k, s.exponentials, scale, module.from_s, slopes, spare)
            dv += scale * spare.sum(1, keepdim=True)
            dt.addcmul_(spare, scale)
        if d_log_q0 is not None:
            d_log_q0 += dv
        dt.addcmul_(s.exponentials, dv.div_(s.total), value=-1)
        # dt is the gradient of the logits of V.
        du = dt.sum(2, keepdim=True)
        if dx is not None:
            dx.addcmul_(dt, before.kappa_beta)
        if slopes.wanted:
            slope = scratch.inner(dt, x)
            slopes.add(BETA, k - 1, before.kappa * slope)
            slopes.add(KAPPA, k - 1, before.beta * slope)
            slopes.add(KAPPA, k - 1, torch.dot(du.view(-1), u.view(-1)))
        du.mul_(before.kappa)

        # P of the module before: read by its Z and by its M.
        torch.mul(dz, p.exponentials, out=dy)
        p_moved = dy.sum(2, keepdim=True).mul_(p.scale)
        if slopes.wanted:
            slopes.add(RHO, k - 1, (p_moved.sum() - s_moved.sum()) / before.rho)
        du += p_moved
        dy.mul_(p.scale)
        if dm is not None:
            dm.add_(dt)
            if forces is not None:
                slopes.add(KAPPA, k - 1, scratch.inner(dm, forces))
                dm.mul_(before.kappa)
            scale = p.scale / before.rho
            chunk.pull(dm, k - 1, p.exponentials, scale, from_p, slopes, spare)
            du += scale * spare.sum(2, keepdim=True)
            dy.addcmul_(spare, scale)
        if d_log_p0 is not None:
            d_log_p0 += du
        dy.addcmul_(p.exponentials, du.div_(p.total), value=-1)
    if dx is not None and chunk.structure is not None:
        dx.add_(chunk.structure.dx())
    return Gradients(d_features if inputs.features is not None and needs.features else None, dx, d_log_p0, d_log_q0)


register('badmm_pool', _forward, _backward, ', bool quadratic, str similarity', _prepare)


def badmm_pool(
    features: Tensor | None,
    x: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    weights: StepWeights,
    quadratic: bool,
    similarity: str,
    triton: bool = False,
) -> Tensor:
    """(B, D) `features` pooled by the published Bregman ADMM. Can be scripted.

    Args:
        features: (B, D, N) what is averaged; None where it is x.
        x: (B, D, N) what the plan sees.
        log_p0: (B, D).
        log_q0: (B, N), -inf on masked samples.
        weights: smoothness, step and structure are read.
        quadratic: whether the smoothness is quadratic.
        similarity: of the structural term, see `structural_force`.
        triton: whether the Triton operator does it, which knows no structural term.
    """
    coefficients = badmm_coefficients(weights, quadratic).to(log_p0.dtype)
    if triton:
        return torch.ops.rotp_vision.triton_badmm_pool(features, x, log_p0, log_q0, coefficients, quadratic)[0]
    if weights.structure is None:
        similarity = ''
    return torch.ops.rotp_vision.badmm_pool(features, x, log_p0, log_q0, coefficients, quadratic, similarity)


def badmm_coefficients(weights: StepWeights, quadratic: bool) -> Tensor:
    """(rows, T) what the operators take for weights: β, κ, ρ, then α1/ρ if quadratic, α0/ρ if structural."""
    smoothness, step = weights.smoothness, weights.step
    assert step is not None
    kappas = torch.ones_like(step) if quadratic else step / (smoothness + step)
    betas = [step[0].reciprocal()]
    for k in range(1, step.shape[0]):
        betas.append(step[k].reciprocal() + kappas[k - 1] * betas[k - 1])
    rows = [torch.stack(betas), kappas, step]
    if quadratic:
        rows.append(smoothness / step)
    structure = weights.structure
    if structure is not None:
        rows.append(structure / step)
    return torch.stack(rows)
