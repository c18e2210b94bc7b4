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

from typing import NamedTuple

import torch
from torch import Tensor

from rotp_vision.core.ops import Gradients, Inputs, Needs, register
from rotp_vision.core.scratch import Scratch, exponentials, inner
from rotp_vision.core.weights import StepWeights, require


class _Module(NamedTuple):
    """What one module leaves behind for backward."""

    row: Tensor  # (b, D, N) Q
    dual: Tensor | None  # (b, D, N) Z', None where zero
    column: Tensor  # (b, D, N) V
    u: Tensor  # (b, D, 1)


def _run(inputs: Inputs, x: Tensor, scratch: Scratch, quadratic: bool, kept: list[_Module] | None) -> _Module:
    """Run the modules and return the last, which ends at Q; with `kept` the others are left there."""
    _, _, log_p0, log_q0, coefficients = inputs
    over = scratch.over
    p0, q0 = log_p0.exp(), log_q0.exp()
    modules = coefficients.unbind(1)
    # β as a row, not a scalar: v is constant along the contiguous axis, and a second constant beside it would not
    # be vectorised.
    betas = coefficients[0].view(-1, 1, 1, 1).expand(-1, 1, x.shape[1], 1).contiguous()
    v, z, m = log_q0, None, None
    row = column = None
    for k, (beta, kappa, rho, *rest) in enumerate(modules):
        # P-step
        row = torch.addcmul(v, x, betas[k], out=scratch.take() if row is None or kept is not None else over(row))
        if z is not None:
            row = torch.addcmul(row, z, -rho.reciprocal(), out=over(row))
        if quadratic:
            if m is None or column is None:
                m = torch.mul(-rest[0] * p0, q0, out=scratch.take())
            else:
                m = torch.addcmul(m, column, -rest[0] * q0, out=over(m))
            row = torch.add(row, m, out=over(row))
        row, lse = _softmax(row, 2, scratch)
        u = log_p0 - lse
        if k + 1 == len(modules):
            return _Module(row, z, row, u)
        # S-step
        out = scratch.take() if column is None or kept is not None else over(column)
        column = torch.addcmul(kappa * u, x, kappa * beta, out=out)
        if m is not None:
            m = torch.addcmul(m, row, -rest[0] * p0, out=over(m))
            column = torch.add(column, m, out=over(column))
        column, lse = _softmax(column, 1, scratch)
        v = log_q0 - lse
        # Dual
        before = z
        if z is None:
            z = torch.mul(row, rho * p0, out=scratch.take())
        else:
            z = torch.addcmul(z, row, rho * p0, out=over(z) if kept is None else scratch.take())
        z = torch.addcmul(z, column, -rho * q0, out=over(z))
        if kept is not None:
            kept.append(_Module(row, before, column, u))
    raise AssertionError('there is at least one module')


def _softmax(y: Tensor, dim: int, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """The softmax over y along `dim`, and the log-sum-exp, `dim` kept."""
    y, top, total = exponentials(y, dim, scratch)
    return torch.mul(y, total.reciprocal(), out=scratch.over(y)), top + total.log()


def _forward(inputs: Inputs, scratch: Scratch, quadratic: bool) -> Tensor:
    x = scratch.load(inputs.x)
    last = _run(inputs, x, scratch, quadratic, None)
    features = x if inputs.features is None else scratch.load(inputs.features)
    return torch.mul(last.row, features, out=scratch.over(last.row)).sum(2, keepdim=True)


def _backward(grad: Tensor, inputs: Inputs, scratch: Scratch, needs: Needs, quadratic: bool) -> Gradients:
    x = scratch.load(inputs.x)
    features = x if inputs.features is None else scratch.load(inputs.features)
    _, _, log_p0, log_q0, coefficients = inputs
    p0, q0 = log_p0.exp(), log_q0.exp()
    modules = coefficients.unbind(1)
    d_coefficients = torch.zeros_like(coefficients)
    d_log_p0, d_log_q0 = torch.zeros_like(log_p0), torch.zeros_like(log_q0)

    kept: list[_Module] = []
    last = _run(inputs, x, scratch, quadratic, kept)
    # f = Σ_n features Q
    d_features = torch.mul(last.row, grad, out=scratch.take())
    spare = scratch.take()
    mean = torch.mul(d_features, features, out=spare).sum(2, keepdim=True)  # f · grad
    dy = torch.addcmul(-mean, features, grad, out=spare).mul_(last.row)
    spare = last.row
    dx = d_features if inputs.features is None else scratch.take().zero_() if needs.x else None
    dz = dm = None
    z = last.dual
    for k in reversed(range(len(modules))):
        # dy is the gradient of the logits of Q in module k.
        beta, _, rho, *rest = modules[k]
        d_module = d_coefficients[:, k]
        dv = dy.sum(1, keepdim=True)
        if dx is not None:
            dx.addcmul_(dy, beta)
        if needs.coefficients:
            d_module[0] += inner(dy, x)
        if quadratic:
            dm = dy.clone() if dm is None else dm.add_(dy)
        if k == 0:
            d_log_q0 += dv
            if quadratic:
                # S' = p0 q0
                ds = torch.mul(dm, p0, out=spare).mul_(q0)
                d_s0, d_s1 = ds.sum(2, keepdim=True), ds.sum(1, keepdim=True)
                d_log_p0 -= rest[0] * d_s0
                d_log_q0 -= rest[0] * d_s1
                d_module[3] -= d_s0.sum()
            break
        assert z is not None
        if needs.coefficients:
            d_module[2] += inner(dy, z) / rho.square()
        dz = dy.mul(-rho.reciprocal()) if dz is None else dz.addcmul_(dy, -rho.reciprocal())

        # S = q0 V of the module before: read by its Z, and by this module's M.
        row, z, column, u = kept[k - 1]
        roughness = rest
        d_before = d_coefficients[:, k - 1]
        beta, kappa, rho, *rest = modules[k - 1]
        dt = torch.mul(dz, column, out=spare)
        spare = dy
        moved_s = dt.sum(1, keepdim=True)
        ds = -rho * moved_s  # Σ_d V dS
        dt.mul_(-rho * q0)
        if quadratic:
            torch.mul(dm, column, out=spare)
            shrunk = spare.sum(1, keepdim=True)
            ds -= roughness[0] * shrunk
            d_module[3] -= (q0 * shrunk).sum()
            dt.addcmul_(spare, -roughness[0] * q0)
        dv += q0 * ds
        d_log_q0 += dv
        dt.addcmul_(column, -dv)
        # dt is the gradient of the logits of V.
        du = dt.sum(2, keepdim=True)
        if dx is not None:
            dx.addcmul_(dt, kappa * beta)
        if needs.coefficients:
            slope = inner(dt, x)
            d_before[0] += kappa * slope
            d_before[1] += beta * slope + (du * u).sum()
        if quadratic:
            dm.add_(dt)
        du = kappa * du

        # P = p0 Q of the module before: read by its Z and by its M.
        dy = torch.mul(dz, row, out=spare)
        spare = dt
        moved_p = dy.sum(2, keepdim=True)
        d_before[2] += (p0 * moved_p).sum() - (q0 * moved_s).sum()
        dp = rho * moved_p  # Σ_n Q dP
        dy.mul_(rho * p0)
        if quadratic:
            torch.mul(dm, row, out=spare)
            shrunk = spare.sum(2, keepdim=True)
            dp -= rest[0] * shrunk
            d_before[3] -= (p0 * shrunk).sum()
            dy.addcmul_(spare, -rest[0] * p0)
        du += p0 * dp
        d_log_p0 += du
        dy.addcmul_(row, -du)
    return Gradients(
        d_features if inputs.features is not None and needs.features else None,
        dx if needs.x else None,
        d_log_p0,
        d_log_q0,
        d_coefficients,
    )


register('badmm_pool', _forward, _backward, ', bool quadratic')


def badmm_pool(
    features: Tensor | None, x: Tensor, log_p0: Tensor, log_q0: Tensor, weights: StepWeights, quadratic: bool
) -> Tensor:
    """(B, D) `features` pooled by the published Bregman ADMM. Can be scripted.

    Args:
        features: (B, D, N) what is averaged; None where it is x.
        x: (B, D, N) what the plan sees.
        log_p0: (B, D).
        log_q0: (B, N), -inf on masked samples.
        weights: smoothness and step are read.
        quadratic: whether the smoothness is quadratic.
    """
    if not torch.jit.is_scripting():
        require('badmm', smoothness=weights.smoothness, step=weights.step)
    smoothness, step = weights.smoothness, weights.step
    assert step is not None
    kappas = torch.ones_like(step) if quadratic else step / (smoothness + step)
    betas = [step[0].reciprocal()]
    for k in range(1, step.shape[0]):
        betas.append(step[k].reciprocal() + kappas[k - 1] * betas[k - 1])
    rows = [torch.stack(betas), kappas, step]
    if quadratic:
        rows.append(smoothness / step)
    coefficients = torch.stack(rows).to(x.dtype)
    return torch.ops.rotp_vision.badmm_pool(features, x, log_p0, log_q0, coefficients, quadratic)
