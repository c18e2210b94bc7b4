"""Sinkhorn scaling with its backward written out: an operator that keeps nothing but its inputs.

The log plan of a module is `s X + M + u + v`, which the next one sees through its proximal and its structural term.
With α1' = α1 + τ and constants dropped that the pooling does not see, a module is, b from zero,

    M = α0/α1' Σ1 P Σ2 + τ/α1' M                            of P = exp(s X + M + u + v), first brought to mass one
    a = α2 / (α1' + α2) · (log p0 - τ/α1' u - LSE_n(s X + M + τ/α1' v + b))     s = (1 + τ s) / α1'
    b = α3 / (α1' + α3) · (log q0 - τ/α1' v - LSE_d(s X + M + τ/α1' u + a))     K times
    u = τ/α1' u + a,   v = τ/α1' v + b

from s = 0, M = 0, u = log p0, v = log q0; without structural term M stays zero and is not made. The last ends at the
weights of the pooling, softmax_n(s X + M + v). Where the tape has taken peaks off X, u is what it is for X plus
s · peaks; a then has (s - τ/α1' s') α1' / (α1' + α2) of them, which is peaks / (α1' + α2).
"""

from collections import namedtuple

import torch
from torch import Tensor

from rotp_vision.core.explicit.ops import register
from rotp_vision.core.explicit.scratch import ChunkSize
from rotp_vision.core.explicit.tape import Coefficient, Logits, Tape, Variable
from rotp_vision.core.weights import StepWeights

# The coefficients of a module, the values of what is assigned to them below.
_Kinds = namedtuple('_Kinds', 'scale keep feature_rate sample_rate lift structure')


def _run(tape: Tape, num_inner: int) -> tuple[Logits, Variable]:
    """s X + M and v of the last module."""
    u, v = tape.log_p0, tape.log_q0
    logits, force = None, None
    for module in map(_Kinds._make, tape.modules):
        if tape.similarity:
            if logits is None or force is None:
                force = tape.combine((module.structure, tape.force(tape.prior_plan())))
            else:
                log_row = tape.log_softmax(tape.combine((1.0, u), (1.0, tape.lse(logits, v))))
                plan, _ = tape.plan(logits, v, log_row)
                force = tape.combine((module.structure, tape.force(plan)), (module.keep, force))
        logits = Logits(module.scale) if force is None else Logits(module.scale, (1.0, force))
        tape.share(logits)
        u_kept, v_kept = tape.combine((module.keep, u)), tape.combine((module.keep, v))
        p0_left = tape.combine((1.0, tape.log_p0), (-1.0, u_kept))
        q0_left = tape.combine((1.0, tape.log_q0), (-1.0, v_kept))
        if tape.peaks is not None:
            u_kept = tape.combine((1.0, u_kept), (module.lift, tape.peaks))

        v = v_kept
        for _ in range(num_inner):
            u = _half_step(tape, logits, module.feature_rate, u_kept, p0_left, v)
            v = _half_step(tape, logits, module.sample_rate, v_kept, q0_left, u)
    assert logits is not None
    return logits, v


def _half_step(
    tape: Tape, logits: Logits, rate: Coefficient, kept: Variable, left: Variable, other: Variable
) -> Variable:
    """kept + rate · (left - LSE(logits + other))."""
    gap = tape.combine((1.0, left), (-1.0, tape.lse(logits, other)))
    return tape.combine((1.0, kept), (rate, gap))


def _chunk_size(similarity: str, num_inner: int) -> ChunkSize:
    """As many parts as a forward has plan-sized tensors: X, exponentials twice, a product; plan, factors."""
    return ChunkSize(enlarge=2, parts=15 if similarity else 5, multiplies=similarity != '')


register('sinkhorn_pool', _run, ', int num_inner', _chunk_size)


def sinkhorn_coefficients(weights: StepWeights) -> Tensor:
    """(kinds, T) what the operator takes for weights, see `_Kinds`. Can be scripted."""
    feature_penalty, sample_penalty, structure = weights.feature_penalty, weights.sample_penalty, weights.structure
    assert feature_penalty is not None
    assert sample_penalty is not None
    alpha1, alpha2, alpha3, tau = weights.smoothness, feature_penalty, sample_penalty, weights.proximal
    if tau is None:
        if structure is None:
            # Then the modules do not see each other, and only the last counts.
            alpha1, alpha2, alpha3 = alpha1[-1:], alpha2[-1:], alpha3[-1:]
        tau = torch.zeros_like(alpha1)
    alpha1 = alpha1 + tau
    scales = [alpha1[0].reciprocal()]
    for k in range(1, alpha1.shape[0]):
        scales.append((1 + tau[k] * scales[k - 1]) / alpha1[k])
    kinds = _Kinds(
        scale=torch.stack(scales),
        keep=tau / alpha1,
        feature_rate=alpha2 / (alpha1 + alpha2),
        sample_rate=alpha3 / (alpha1 + alpha3),
        lift=1 / (alpha1 + alpha2),
        structure=torch.zeros_like(alpha1) if structure is None else structure / alpha1,
    )
    return torch.stack(kinds)
