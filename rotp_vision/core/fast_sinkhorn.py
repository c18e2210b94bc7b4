"""Sinkhorn scaling without structural term, its backward written out: an operator that keeps nothing but its inputs.

Modules without proximal term do not see each other, so the last one is the solution, and a cancels in the pooling:

    a = α2 / (α1 + α2) · (log p0 - LSE_n(X / α1 + b))
    b = α3 / (α1 + α3) · (log q0 - LSE_d(X / α1 + a))            K times from b = 0
    f = Σ_n features softmax_n(X / α1 + b)
"""

import torch
from torch import Tensor

from rotp_vision.core.ops import Gradients, Inputs, Needs, register
from rotp_vision.core.scratch import Scratch
from rotp_vision.core.tape import Tape, Vector
from rotp_vision.core.weights import StepWeights, require


def _run(tape: Tape, num_inner: int) -> Vector:
    """The final b."""
    scale, feature_rate, sample_rate = tape.module(0)
    b = tape.zeros_like(tape.log_q0)
    for _ in range(num_inner):
        gap = tape.combine((1.0, tape.log_p0), (-1.0, tape.lse(scale, b)))
        a = tape.combine((feature_rate, gap))
        gap = tape.combine((1.0, tape.log_q0), (-1.0, tape.lse(scale, a)))
        b = tape.combine((sample_rate, gap))
    return b


def _forward(inputs: Inputs, scratch: Scratch, num_inner: int) -> Tensor:
    tape = Tape(inputs, scratch)
    return tape.pool(tape.module(0)[0], _run(tape, num_inner))


def _backward(grad: Tensor, inputs: Inputs, scratch: Scratch, needs: Needs, num_inner: int) -> Gradients:
    tape = Tape(inputs, scratch, needs)
    return tape.gradients(tape.module(0)[0], _run(tape, num_inner), grad)


register('sinkhorn_pool', _forward, _backward, ', int num_inner')


def sinkhorn_pool(
    features: Tensor | None, x: Tensor, log_p0: Tensor, log_q0: Tensor, weights: StepWeights, num_inner: int
) -> Tensor:
    """(B, D) `features` pooled by Sinkhorn scaling. Can be scripted.

    Args:
        features: (B, D, N) what is averaged; None where it is x.
        x: (B, D, N) what the plan sees.
        log_p0: (B, D).
        log_q0: (B, N), -inf on masked samples.
        weights: smoothness, feature_penalty and sample_penalty are read.
        num_inner: K.
    """
    if not torch.jit.is_scripting():
        require(
            'sinkhorn',
            smoothness=weights.smoothness,
            feature_penalty=weights.feature_penalty,
            sample_penalty=weights.sample_penalty,
        )
    if num_inner < 1:
        raise ValueError(f'num_inner must be at least 1, got {num_inner}')
    feature_penalty, sample_penalty = weights.feature_penalty, weights.sample_penalty
    assert feature_penalty is not None and sample_penalty is not None
    alpha1, alpha2, alpha3 = weights.smoothness[-1:], feature_penalty[-1:], sample_penalty[-1:]
    rows = [alpha1.reciprocal(), alpha2 / (alpha1 + alpha2), alpha3 / (alpha1 + alpha3)]
    coefficients = torch.stack(rows).to(x.dtype)
    return torch.ops.rotp_vision.sinkhorn_pool(features, x, log_p0, log_q0, coefficients, num_inner)
