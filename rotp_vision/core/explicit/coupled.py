"""The coupled Bregman ADMM as an operator that keeps nothing but its inputs.

With logarithmic dual steps the dual Z of `badmm` is α1 log S - Φ(P) along the features and ρ (v' - v) along the
samples, and the dual of μ is α2 (log p0 - log μ), each up to what a softmax does not see (a dash marks the module
before). Φ(P) is what a plan does to the other but by its logarithm, α0 Σ1 P Σ2; if the smoothness is quadratic -α1 P
comes to it, and α1 is zero in all other places. So the log plans never leave `scale · X + matrix + u + v`;
log S = s X + M + u + v does, in a module,

    F = Φ(S)
    w = v + ρ'/ρ (v - v')
    r = LSE_n(c X + L + w)          c = 1/ρ + (1 - α1'/ρ) s,  L = (1 - α1'/ρ) M + (F + Φ'(P')) / ρ
    log P1 = log softmax_d(½ ((1 - α1'/ρ) u + r + (1 - α2'/ρ) log μ + α2'/ρ log p0))
    log P = c X + L + log P1 - r + w
    u = κ (log P1 - r) + α1'/(α1 + ρ) u                   κ = ρ / (α1 + ρ)
    l = LSE_d(s X + M + u)          s = κ c + α1'/(α1 + ρ) s,  M = κ (M + (F + Φ(P)) / ρ)
    log Sᵀ1 = log softmax_n((κ v + l + κ (1 - α3'/ρ) log η + κ α3'/ρ log q0) / (1 + κ))
    v = log Sᵀ1 - l
    log μ = log softmax_d(((α2 - α2') log p0 + α2' log μ + ρ log P1) / (α2 + ρ))      likewise η with α3, q0, Sᵀ1

from s = M = 0, u = log μ = log p0, v = log η = log q0 and dashed weights zero. The last module ends at the weights of
the pooling, softmax_n(c X + L + w). Without Φ there are no matrices. Where the tape has taken peaks off X, u is what it
is for X plus s · peaks, and so c · peaks less in r; of both only peaks / ρ is left, in log P1.
"""

from collections import namedtuple

import torch
from torch import Tensor

from rotp_vision.core.explicit.ops import register
from rotp_vision.core.explicit.scratch import ChunkSize
from rotp_vision.core.explicit.tape import Logits, Plan, Tape, Variable
from rotp_vision.core.weights import StepWeights

# The coefficients of a module, the values of what is assigned to them below.
_Kinds = namedtuple(
    '_Kinds',
    'scale_p scale_s w_now w_before row_u row_mu row_p0 row_peaks kappa keep_u column_v column_lse column_eta '
    'column_q0 mu_p0 mu_mu mu_row eta_q0 eta_eta eta_column keep_m rough_p rough_before rough_s force_p '
    'force_before force_s',
)


def _run(tape: Tape, quadratic: bool) -> tuple[Logits, Variable]:
    """c X + L and w of the last module."""
    forced = quadratic or tape.similarity != ''

    def parts(plan: Plan) -> list[Plan | Variable]:
        """What Φ is made of: one for each weight."""
        return [*([plan] if quadratic else []), *([tape.force(plan)] if tape.similarity else [])]

    u = log_mu = tape.log_p0
    v = v_before = log_eta = tape.log_q0
    of_s, of_p, matrices = parts(tape.prior_plan()) if forced else [], [], []
    for k, module in enumerate(map(_Kinds._make, tape.modules)):
        kinds = [*([module[-6:-3]] if quadratic else []), *([module[-3:]] if tape.similarity else [])]
        matrices_p = []
        for i, (to_p, to_next, _) in enumerate(kinds):
            before = [(to_next, of_p[i]), (module.keep_m, matrices[i])] if k else []
            matrices_p.append((1.0, tape.combine((to_p, of_s[i]), *before)))
        of_p.clear()  # whose memory the next plan may have
        logits = Logits(module.scale_p, *matrices_p)
        w = tape.combine((module.w_now, v), (module.w_before, v_before))
        if k + 1 == len(tape.modules):
            return logits, w
        r = tape.lse(logits, w)
        pulls = [(module.row_u, u), (0.5, r), (module.row_mu, log_mu), (module.row_p0, tape.log_p0)]
        pulls += [] if tape.peaks is None else [(module.row_peaks, tape.peaks)]
        log_row = tape.log_softmax(tape.combine(*pulls))
        row = tape.combine((1.0, log_row), (-1.0, r))
        if forced:
            of_p = parts(tape.plan(logits, w, log_row)[0])
            for i, (_, _, to_s) in enumerate(kinds):
                before = [(module.kappa, matrices[i])] if k else []
                matrices[i : i + 1] = [tape.combine((to_s, of_s[i]), (to_s, of_p[i]), *before)]
        of_s.clear()
        u = tape.combine((module.kappa, row), (module.keep_u, u))
        logits = Logits(module.scale_s, *((1.0, matrix) for matrix in matrices))
        column = tape.lse(logits, u)
        pulls = [(module.column_v, v), (module.column_lse, column)]
        pulls += [(module.column_eta, log_eta), (module.column_q0, tape.log_q0)]
        log_column = tape.log_softmax(tape.combine(*pulls))
        if forced:
            of_s = parts(tape.plan(logits, u, log_column)[0])
        v_before, v = v, tape.combine((1.0, log_column), (-1.0, column))
        pulls = [(module.mu_p0, tape.log_p0), (module.mu_mu, log_mu), (module.mu_row, log_row)]
        log_mu = tape.log_softmax(tape.combine(*pulls))
        pulls = [(module.eta_q0, tape.log_q0), (module.eta_eta, log_eta), (module.eta_column, log_column)]
        log_eta = tape.log_softmax(tape.combine(*pulls))
    raise AssertionError('there is at least one module')


def _chunk_size(similarity: str, quadratic: bool) -> ChunkSize:
    """As many parts as a forward has plan-sized tensors: X, two sweeps; matrices; factors."""
    parts = 15 if similarity else 8 if quadratic else 4
    return ChunkSize(enlarge=2, parts=parts, multiplies=similarity != '')


register('coupled_badmm_pool', _run, ', bool quadratic', _chunk_size)


def coupled_coefficients(weights: StepWeights, quadratic: bool) -> Tensor:
    """(kinds, T) what the operator takes for weights, see `_Kinds`. Can be scripted."""
    alpha1, alpha2, alpha3, rho = weights.smoothness, weights.feature_penalty, weights.sample_penalty, weights.step
    assert alpha2 is not None
    assert alpha3 is not None
    assert rho is not None
    structure = weights.structure
    structure = torch.zeros_like(rho) if structure is None else structure
    rough = -alpha1
    if quadratic:
        alpha1 = torch.zeros_like(alpha1)
    before1, before2, before3 = _shift(alpha1), _shift(alpha2), _shift(alpha3)
    kappa, keep_u, speed = rho / (alpha1 + rho), before1 / (alpha1 + rho), _shift(rho) / rho
    scales_p, scales_s = [rho[0].reciprocal()], [kappa[0] / rho[0]]
    for k in range(1, rho.shape[0]):
        scales_p.append(rho[k].reciprocal() + (1 - before1[k] / rho[k]) * scales_s[k - 1])
        scales_s.append(kappa[k] * scales_p[k] + keep_u[k] * scales_s[k - 1])
    share = kappa / (1 + kappa)
    kinds = _Kinds(
        scale_p=torch.stack(scales_p),
        scale_s=torch.stack(scales_s),
        w_now=1 + speed,
        w_before=-speed,
        row_u=0.5 - 0.5 * before1 / rho,
        row_mu=0.5 - 0.5 * before2 / rho,
        row_p0=0.5 * before2 / rho,
        row_peaks=0.5 / rho,
        kappa=kappa,
        keep_u=keep_u,
        column_v=share,
        column_lse=1 / (1 + kappa),
        column_eta=share * (1 - before3 / rho),
        column_q0=share * before3 / rho,
        mu_p0=(alpha2 - before2) / (alpha2 + rho),
        mu_mu=before2 / (alpha2 + rho),
        mu_row=rho / (alpha2 + rho),
        eta_q0=(alpha3 - before3) / (alpha3 + rho),
        eta_eta=before3 / (alpha3 + rho),
        eta_column=rho / (alpha3 + rho),
        keep_m=1 - before1 / rho,
        rough_p=rough / rho,
        rough_before=_shift(rough) / rho,
        rough_s=kappa * rough / rho,
        force_p=structure / rho,
        force_before=_shift(structure) / rho,
        force_s=kappa * structure / rho,
    )
    return torch.stack(kinds)


def _shift(values: Tensor) -> Tensor:
    """(T,) what the module before has, zero for the first."""
    return torch.cat([torch.zeros_like(values[:1]), values[:-1]])
