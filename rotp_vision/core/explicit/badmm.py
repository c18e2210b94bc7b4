"""The published Bregman ADMM as an operator that keeps nothing but its inputs.

Substituting log P into the S-step cancels Z there, and whatever is constant along a softmax drops out of it. What is
left of `badmm`'s module k is, with κ = ρ / (α1 + ρ), β = 1/ρ + κ' β' (the dash marks the module before), and
κ = 1 if the smoothness is quadratic,

    M = M' + Φ(S')                          Φ(S) = α0/ρ Σ1 S Σ2 - α1/ρ S (the latter if quadratic)
    P = p0 softmax_n(β X + M + v' - Z' / ρ)         r its log-sum-exp
    u = log p0 - r
    M = κ (M + Φ(P))
    S = q0 softmax_d(κ β X + M + κ u)               c its log-sum-exp
    v = log q0 - c
    Z = Z' + ρ (P - S)

from v = log q0, Z = M = 0, S = p0 q0. The last module ends at the weights of the pooling, P without p0. Without Φ there
is no M. As adding a feature vector to X changes nothing (u takes it up), the tape's peaks do not matter.
"""

from collections import namedtuple

import torch
from torch import Tensor

from rotp_vision.core.explicit.ops import register
from rotp_vision.core.explicit.scratch import ChunkSize
from rotp_vision.core.explicit.tape import Logits, Tape, Variable
from rotp_vision.core.weights import StepWeights

# The coefficients of a module, the values of what is assigned to them below.
_Kinds = namedtuple('_Kinds', 'beta kappa kappa_beta step minus_step minus_inverse roughness structure kappa_structure')


def _run(tape: Tape, quadratic: bool) -> tuple[Logits, Variable]:
    """The logits and v' of the last module."""
    tape.expect(2 * len(tape.modules) - 1)
    structural = tape.similarity != ''
    v, z, rough, force = tape.log_q0, [], [], []  # the latter three no or one term of a sum
    s = tape.prior_plan()
    for k, module in enumerate(map(_Kinds._make, tape.modules)):
        if quadratic:
            rough = [(1.0, tape.combine(*rough, (module.roughness, s)))]
        if structural:
            force = [(1.0, tape.combine((module.structure, tape.force(s)), *force))]
        del s  # whose memory the next plan may have
        logits = Logits(module.beta, *((module.minus_inverse, total) for _, total in z), *rough, *force)
        if k + 1 == len(tape.modules):
            return logits, v
        p, u = tape.plan(logits, v, tape.log_p0)
        if quadratic:
            rough = [(1.0, tape.combine(*rough, (module.roughness, p)))]
        if structural:
            damped = tape.combine((module.kappa_structure, tape.force(p)), *((module.kappa, w) for _, w in force))
            force = [(1.0, damped)]
        damped_u = tape.combine((module.kappa, u))
        s, v = tape.plan(Logits(module.kappa_beta, *rough, *force), damped_u, tape.log_q0)
        z = [(1.0, tape.combine(*z, (module.step, p), (module.minus_step, s)))]
        del p
    raise AssertionError('there is at least one module')


def _chunk_size(similarity: str, quadratic: bool) -> ChunkSize:
    """As many parts as a forward has plan-sized tensors: X, two sweeps, Z, M; a plan, factors, small matrices."""
    return ChunkSize(parts=14, multiplies=True) if similarity else ChunkSize(enlarge=2, parts=8)


register('badmm_pool', _run, ', bool quadratic', _chunk_size)


def badmm_coefficients(weights: StepWeights, quadratic: bool) -> Tensor:
    """(kinds, T) what the operator takes for weights, see `_Kinds`. Can be scripted."""
    smoothness, step, structure = weights.smoothness, weights.step, weights.structure
    assert step is not None
    structure = torch.zeros_like(step) if structure is None else structure
    kappa = torch.ones_like(step) if quadratic else step / (smoothness + step)
    betas = [step[0].reciprocal()]
    for k in range(1, step.shape[0]):
        betas.append(step[k].reciprocal() + kappa[k - 1] * betas[k - 1])
    beta = torch.stack(betas)
    kinds = _Kinds(
        beta=beta,
        kappa=kappa,
        kappa_beta=kappa * beta,
        step=step,
        minus_step=-step,
        minus_inverse=-step.reciprocal(),
        roughness=-smoothness / step,
        structure=structure / step,
        kappa_structure=kappa * structure / step,
    )
    return torch.stack(kinds)
