"""Sinkhorn scaling without structural term, its backward written out: an operator that keeps nothing but its inputs.

The log plan of a module is `s X + u + v`, which the next one sees through its proximal term. With α1' = α1 + τ and
constants dropped that the pooling does not see, a module is, b from zero,

    a = α2 / (α1' + α2) · (log p0 - τ/α1' u - LSE_n(s X + τ/α1' v + b))         s = (1 + τ s) / α1'
    b = α3 / (α1' + α3) · (log q0 - τ/α1' v - LSE_d(s X + τ/α1' u + a))         K times
    u = τ/α1' u + a,   v = τ/α1' v + b

from s = 0, u = log p0, v = log q0. The last ends at the weights of the pooling, softmax_n(s X + v).

Where K is large enough for a module to converge, backward need not go through all its steps: with `implicit` it goes
through one step from the fixed point, by the implicit function theorem.
"""

import torch
from torch import Tensor

from rotp_vision.core.ops import Gradients, Inputs, Needs, Slopes, register
from rotp_vision.core.scratch import Scratch
from rotp_vision.core.tape import Coefficient, Tape, Vector
from rotp_vision.core.weights import StepWeights


def _run(tape: Tape, num_modules: int, num_inner: int, implicit: bool) -> tuple[Coefficient, Vector]:
    """s and v of the last module."""
    u, v = tape.log_p0, tape.log_q0
    scale = tape.module(0)[0]
    for k in range(num_modules):
        scale, keep, feature_rate, sample_rate = tape.module(k)
        tape.share(scale)
        u_kept, v_kept = tape.combine((keep, u)), tape.combine((keep, v))
        p0_left = tape.combine((1.0, tape.log_p0), (-1.0, u_kept))
        q0_left = tape.combine((1.0, tape.log_q0), (-1.0, v_kept))

        v = v_kept
        tape.recording = not implicit
        for _ in range(num_inner - implicit):
            u = _half_step(tape, scale, feature_rate, u_kept, p0_left, v)
            v = _half_step(tape, scale, sample_rate, v_kept, q0_left, u)
        tape.recording = True
        if implicit:
            before = Vector(v.value, v.axis)
            u = _half_step(tape, scale, feature_rate, u_kept, p0_left, before)
            v = _half_step(tape, scale, sample_rate, v_kept, q0_left, u)
            tape.fixed_point(scale, before, u, v, feature_rate.value * sample_rate.value)
            if k + 1 < num_modules:
                u = _half_step(tape, scale, feature_rate, u_kept, p0_left, v)  # as it depends on the fixed point
    return scale, v


def _half_step(tape: Tape, scale: Coefficient, rate: Coefficient, kept: Vector, left: Vector, other: Vector) -> Vector:
    """kept + rate · (left - LSE(s X + other))."""
    gap = tape.combine((1.0, left), (-1.0, tape.lse(scale, other)))
    return tape.combine((1.0, kept), (rate, gap))


def _forward(inputs: Inputs, scratch: Scratch, num_inner: int, implicit: bool) -> Tensor:
    tape = Tape(inputs, scratch)
    return tape.pool(*_run(tape, len(inputs.modules.each), num_inner, False))


def _backward(
    grad: Tensor, inputs: Inputs, scratch: Scratch, needs: Needs, slopes: Slopes, num_inner: int, implicit: bool
) -> Gradients:
    tape = Tape(inputs, scratch, needs, slopes)
    return tape.gradients(*_run(tape, len(inputs.modules.each), num_inner, implicit), grad)


register('sinkhorn_pool', _forward, _backward, ', int num_inner, bool implicit', enlarge=2)


def sinkhorn_pool(
    features: Tensor | None,
    x: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    weights: StepWeights,
    num_inner: int,
    implicit: bool,
    triton: bool = False,
) -> Tensor:
    """(B, D) `features` pooled by Sinkhorn scaling. Can be scripted.

    Args:
        features: (B, D, N) what is averaged; None where it is x.
        x: (B, D, N) what the plan sees.
        log_p0: (B, D).
        log_q0: (B, N), -inf on masked samples.
        weights: smoothness, feature_penalty, sample_penalty and proximal are read.
        num_inner: K.
        implicit: whether backward takes the result for converged.
        triton: whether the Triton operator does it, which knows no proximal term.
    """
    if num_inner < 1:
        raise ValueError(f'num_inner must be at least 1, got {num_inner}')
    coefficients = sinkhorn_coefficients(weights).to(log_p0.dtype)
    if triton:
        return torch.ops.rotp_vision.triton_sinkhorn_pool(features, x, log_p0, log_q0, coefficients, num_inner)[0]
    return torch.ops.rotp_vision.sinkhorn_pool(features, x, log_p0, log_q0, coefficients, num_inner, implicit)


def sinkhorn_coefficients(weights: StepWeights) -> Tensor:
    """(4, T) what the operators take for weights: s, τ/α1', α2/(α1' + α2), α3/(α1' + α3)."""
    feature_penalty, sample_penalty = weights.feature_penalty, weights.sample_penalty
    assert feature_penalty is not None
    assert sample_penalty is not None
    alpha1, alpha2, alpha3, tau = weights.smoothness, feature_penalty, sample_penalty, weights.proximal
    if tau is None:
        # Then the modules do not see each other, and only the last counts.
        alpha1, alpha2, alpha3 = alpha1[-1:], alpha2[-1:], alpha3[-1:]
        tau = torch.zeros_like(alpha1)
    alpha1 = alpha1 + tau
    scales = [alpha1[0].reciprocal()]
    for k in range(1, alpha1.shape[0]):
        scales.append((1 + tau[k] * scales[k - 1]) / alpha1[k])
    rows = [torch.stack(scales), tau / alpha1, alpha2 / (alpha1 + alpha2), alpha3 / (alpha1 + alpha3)]
    return torch.stack(rows)
