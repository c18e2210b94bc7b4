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
sample has log q0 = -inf and needs no other care. Backward runs the modules again, keeps Q, V, Z of each for the chunk
at hand, and goes through them in reverse.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from rotp_vision.core.fast_structure import Applied, Structure
from rotp_vision.core.ops import Gradients, Inputs, Needs, register
from rotp_vision.core.scratch import Scratch, exponentials, inner
from rotp_vision.core.structure import Similarity
from rotp_vision.core.weights import StepWeights


class _Module(NamedTuple):
    """What one module leaves behind for backward; the last one ends at Q and has nothing after `u`."""

    row: Tensor  # (b, D, N) Q
    dual: Tensor | None  # (b, D, N) Z', None where zero
    from_s: Applied | None  # of Φ(S')
    u: Tensor  # (b, D, 1)
    column: Tensor | None = None  # (b, D, N) V
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
        self.modules = inputs.coefficients.unbind(1)
        # β as a row, not a scalar: v is constant along the contiguous axis, and a second constant beside it would
        # not be vectorised.
        self.betas = inputs.coefficients[0].view(-1, 1, 1, 1).expand(-1, 1, self.x.shape[1], 1).contiguous()
        self.structure = Structure(inputs, self.x, cast(Similarity, similarity)) if similarity else None
        self._plan = scratch.take() if similarity else None
        self.forced = quadratic or self.structure is not None

    def push(
        self, m: Tensor, weights: Sequence[Tensor], factor: Tensor, prior: Tensor
    ) -> tuple[Tensor, Applied | None]:
        """M + Φ(prior · factor), written over M."""
        if self.quadratic:
            m = torch.addcmul(m, factor, -weights[0] * prior, out=self.scratch.over(m))
        if self.structure is None:
            return m, None
        plan = torch.mul(factor, prior, out=self._plan)
        return self.structure.push(m, plan, weights[-1], self.scratch)

    def pull(
        self,
        dm: Tensor,
        weights: Sequence[Tensor],
        factor: Tensor,
        prior: Tensor,
        applied: Applied | None,
        slopes: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Back through `push`: factor · gradient of (prior · factor) into `out`; those of weights add to `slopes`."""
        if self.structure is None or applied is None:
            torch.mul(dm, factor, out=out)
            slopes[0] -= (out.sum(1, keepdim=True) * prior if prior.shape[1] == 1 else out * prior).sum()
            return out.mul_(-weights[0])
        plan = torch.mul(factor, prior, out=self._plan)
        slopes[-1] += self.structure.back(dm, plan, weights[-1], applied, out)
        if self.quadratic:
            slopes[0] -= inner(dm, plan)
            out.addcmul_(dm, -weights[0])
        return out.mul_(factor)


def _run(chunk: _Chunk, kept: list[_Module] | None) -> _Module:
    """Run the modules and return the last; with `kept` the others are left there, in buffers of their own."""
    x, scratch, over = chunk.x, chunk.scratch, chunk.scratch.over
    v, z, m, from_s = chunk.log_q0, None, None, None
    row = column = None
    for k, (beta, kappa, rho, *weights) in enumerate(chunk.modules):
        # P-step
        row = torch.addcmul(v, x, chunk.betas[k], out=scratch.take() if row is None or kept is not None else over(row))
        if z is not None:
            row = torch.addcmul(row, z, -rho.reciprocal(), out=over(row))
        if chunk.forced:
            if m is None or column is None:
                m = torch.mul(x, 0.0, out=scratch.take())
                m, from_s = chunk.push(m, weights, chunk.p0.expand_as(x), chunk.q0)
            else:
                m, from_s = chunk.push(m, weights, column, chunk.q0)
            row = torch.add(row, m, out=over(row))
        row, lse = _softmax(row, 2, scratch)
        u = chunk.log_p0 - lse
        if k + 1 == len(chunk.modules):
            return _Module(row, z, from_s, u)
        # S-step
        out = scratch.take() if column is None or kept is not None else over(column)
        column = torch.addcmul(kappa * u, x, kappa * beta, out=out)
        forces = from_p = None
        if m is not None:
            m, from_p = chunk.push(m, weights, row, chunk.p0)
            if not chunk.quadratic:
                forces, m = m, torch.mul(m, kappa, out=over(m) if kept is None else scratch.take())
            column = torch.add(column, m, out=over(column))
        column, lse = _softmax(column, 1, scratch)
        v = chunk.log_q0 - lse
        # Dual
        before = z
        if z is None:
            z = torch.mul(row, rho * chunk.p0, out=scratch.take())
        else:
            z = torch.addcmul(z, row, rho * chunk.p0, out=over(z) if kept is None else scratch.take())
        z = torch.addcmul(z, column, -rho * chunk.q0, out=over(z))
        if kept is not None:
            kept.append(_Module(row, before, from_s, u, column, from_p, forces))
    raise AssertionError('there is at least one module')


def _softmax(y: Tensor, dim: int, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """The softmax over y along `dim`, and the log-sum-exp, `dim` kept."""
    y, top, total = exponentials(y, dim, scratch)
    return torch.mul(y, total.reciprocal(), out=scratch.over(y)), top + total.log()


def _forward(inputs: Inputs, scratch: Scratch, quadratic: bool, similarity: str) -> Tensor:
    chunk = _Chunk(inputs, scratch, quadratic, similarity)
    row = _run(chunk, None).row
    return torch.mul(row, chunk.features, out=scratch.over(row)).sum(2, keepdim=True)


def _backward(
    grad: Tensor, inputs: Inputs, scratch: Scratch, needs: Needs, quadratic: bool, similarity: str
) -> Gradients:
    chunk = _Chunk(inputs, scratch, quadratic, similarity)
    x, p0, q0 = chunk.x, chunk.p0, chunk.q0
    kept: list[_Module] = []
    last = _run(chunk, kept)
    if chunk.structure is not None:
        chunk.structure.start_back(scratch)
    d_coefficients = torch.zeros_like(inputs.coefficients)
    d_log_p0, d_log_q0 = torch.zeros_like(inputs.log_p0), torch.zeros_like(inputs.log_q0)
    dy, dt, spare = scratch.buffer(), scratch.buffer(), scratch.buffer()

    # f = Σ_n features Q
    d_features = torch.mul(last.row, grad, out=scratch.buffer())
    mean = torch.mul(d_features, chunk.features, out=dy).sum(2, keepdim=True)  # f · grad
    torch.addcmul(-mean, chunk.features, grad, out=dy).mul_(last.row)
    dx = None
    if needs.x:
        dx = d_features if inputs.features is None else scratch.buffer().zero_()
    dz = dm = None
    for k in reversed(range(len(chunk.modules))):
        # dy is the gradient of the logits of Q in module k.
        beta, _, rho, *weights = chunk.modules[k]
        module = last if k == len(kept) else kept[k]
        slopes = d_coefficients[:, k]
        dv = dy.sum(1, keepdim=True)
        if dx is not None:
            dx.addcmul_(dy, beta)
        if needs.coefficients:
            slopes[0] += inner(dy, x)
        if chunk.forced:
            dm = scratch.buffer().copy_(dy) if dm is None else dm.add_(dy)
        if k == 0:
            d_log_q0 += dv
            if dm is not None:
                # S' = p0 q0
                chunk.pull(dm, weights, p0.expand_as(x), q0, module.from_s, slopes[3:], spare).mul_(q0)
                d_log_p0 += spare.sum(2, keepdim=True)
                d_log_q0 += spare.sum(1, keepdim=True)
            break
        if needs.coefficients:
            assert module.dual is not None
            slopes[2] += inner(dy, module.dual) / rho.square()
        if dz is None:
            dz = torch.mul(dy, -rho.reciprocal(), out=scratch.buffer())
        else:
            dz.addcmul_(dy, -rho.reciprocal())

        # S = q0 V of the module before: read by its Z and by this module's M.
        row, _, _, u, column, from_p, forces = kept[k - 1]
        assert column is not None
        before = d_coefficients[:, k - 1]
        torch.mul(dz, column, out=dt)
        s_moved = dt.sum(1, keepdim=True)
        from_s = None
        if dm is not None:
            from_s = chunk.pull(dm, weights, column, q0, module.from_s, slopes[3:], spare)
        beta, kappa, rho, *weights = chunk.modules[k - 1]
        dt.mul_(-rho)
        if from_s is not None:
            dt.add_(from_s)
        dv += q0 * dt.sum(1, keepdim=True)
        d_log_q0 += dv
        dt.mul_(q0).addcmul_(column, -dv)
        # dt is the gradient of the logits of V.
        du = dt.sum(2, keepdim=True)
        if dx is not None:
            dx.addcmul_(dt, kappa * beta)
        if needs.coefficients:
            slope = inner(dt, x)
            before[0] += kappa * slope
            before[1] += beta * slope + (du * u).sum()
        du = kappa * du

        # P = p0 Q of the module before: read by its Z and by its M.
        torch.mul(dz, row, out=dy)
        p_moved = dy.sum(2, keepdim=True)
        before[2] += (p0 * p_moved).sum() - (q0 * s_moved).sum()
        dy.mul_(rho)
        if dm is not None:
            dm.add_(dt)
            if forces is not None:
                before[1] += inner(dm, forces)
                dm.mul_(kappa)
            dy.add_(chunk.pull(dm, weights, row, p0, from_p, before[3:], spare))
        du += p0 * dy.sum(2, keepdim=True)
        d_log_p0 += du
        dy.mul_(p0).addcmul_(row, -du)
    if dx is not None and chunk.structure is not None:
        dx.add_(chunk.structure.dx())
    return Gradients(
        d_features if inputs.features is not None and needs.features else None,
        dx,
        d_log_p0,
        d_log_q0,
        d_coefficients,
    )


register('badmm_pool', _forward, _backward, ', bool quadratic, str similarity')


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
    coefficients = badmm_coefficients(weights, quadratic).to(x.dtype)
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
