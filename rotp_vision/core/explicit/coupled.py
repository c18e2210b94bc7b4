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

import torch
from torch import Tensor

from rotp_vision.core.explicit.ops import Gradients, Inputs, Needs, Slopes, register
from rotp_vision.core.explicit.scratch import ChunkSize, Scratch
from rotp_vision.core.explicit.tape import Logits, Tape, Variable
from rotp_vision.core.weights import StepWeights


def _run(tape: Tape, num_modules: int, quadratic: bool, similarity: str) -> tuple[Logits, Variable]:
    """c X + L and w of the last module."""

    forced = quadratic or similarity != ''

    def forces(plan: Variable) -> list[Variable]:
        """What Φ is made of: one for each weight."""
        return [*([plan] if quadratic else []), *([tape.force(plan)] if similarity else [])]

    u = log_mu = tape.log_p0
    v = v_before = log_eta = tape.log_q0
    matrix, of_s, of_p = None, forces(tape.product(u, v)) if forced else [], []
    for k in range(num_modules):
        scale_p, scale_s, *rest = tape.module(k)
        now, before, row_u, row_mu, row_p0, kappa, keep_u, column_v, column_lse, column_eta, column_q0, *rest = rest
        mu_p0, mu_mu, mu_row, eta_q0, eta_eta, eta_column, keep_s, row_peaks, *weights = rest
        to_p, to_next, to_s = weights[::3], weights[1::3], weights[2::3]
        matrix_p = None
        if forced:
            kept = [] if matrix is None else [(keep_s, matrix)]
            matrix_p = tape.combine(*zip(to_p + to_next, of_s + of_p, strict=False), *kept)
            of_p = []  # plan-sized, so not kept longer than needed
        logits = Logits(scale_p, matrix_p)
        w = tape.combine((now, v), (before, v_before))
        if k + 1 == num_modules:
            return logits, w
        r = tape.lse(logits, w)
        pulls = [(row_u, u), (0.5, r), (row_mu, log_mu), (row_p0, tape.log_p0)]
        pulls += [] if tape.peaks is None else [(row_peaks, tape.peaks)]
        log_row = tape.log_softmax(tape.combine(*pulls))
        row = tape.combine((1.0, log_row), (-1.0, r))
        if forced:
            of_p = forces(tape.plan(logits, w, log_row))
            kept = [] if matrix is None else [(kappa, matrix)]
            matrix = tape.combine(*zip(to_s + to_s, of_s + of_p, strict=True), *kept)
            of_s = []
        u = tape.combine((kappa, row), (keep_u, u))
        logits = Logits(scale_s, matrix)
        column = tape.lse(logits, u)
        log_column = tape.combine((column_v, v), (column_lse, column), (column_eta, log_eta), (column_q0, tape.log_q0))
        log_column = tape.log_softmax(log_column)
        if forced:
            of_s = forces(tape.plan(logits, u, log_column))
        v_before, v = v, tape.combine((1.0, log_column), (-1.0, column))
        log_mu = tape.log_softmax(tape.combine((mu_p0, tape.log_p0), (mu_mu, log_mu), (mu_row, log_row)))
        log_eta = tape.combine((eta_q0, tape.log_q0), (eta_eta, log_eta), (eta_column, log_column))
        log_eta = tape.log_softmax(log_eta)
    raise AssertionError('there is at least one module')


def _forward(inputs: Inputs, scratch: Scratch, quadratic: bool, similarity: str) -> Tensor:
    tape = Tape(inputs, scratch, similarity=similarity)
    return tape.pool(*_run(tape, len(inputs.modules.each), quadratic, similarity))


def _backward(
    grad: Tensor, inputs: Inputs, scratch: Scratch, needs: Needs, slopes: Slopes, quadratic: bool, similarity: str
) -> Gradients:
    tape = Tape(inputs, scratch, needs, slopes, similarity)
    return tape.gradients(*_run(tape, len(inputs.modules.each), quadratic, similarity), grad)


def _chunk_size(quadratic: bool, similarity: str) -> ChunkSize:
    """As many parts as a forward has plan-sized tensors: X, a sweep; matrices and plans; factors and forces."""
    parts = 15 if similarity else 8 if quadratic else 4
    return ChunkSize(enlarge=2, parts=parts, multiplies=similarity != '')


_OPTIONS = ', bool quadratic, str similarity'
register('coupled_badmm_pool', _forward, _backward, _OPTIONS, chunk_size=_chunk_size)


def coupled_badmm_pool(
    features: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    weights: StepWeights,
    view: str,
    quadratic: bool,
    similarity: str,
) -> Tensor:
    """(B, D) `features` pooled by the coupled Bregman ADMM. Can be scripted.

    Args:
        features: (B, D, N), zero on masked samples.
        log_p0: (B, D).
        log_q0: (B, N), -inf on masked samples.
        weights: all but proximal are read.
        view: what the plan sees of the features, see `view_of`.
        quadratic: whether the smoothness is quadratic.
        similarity: of the structural term, see `structural_force`.
    """
    alpha1, alpha2, alpha3, rho = weights.smoothness, weights.feature_penalty, weights.sample_penalty, weights.step
    assert alpha2 is not None
    assert alpha3 is not None
    assert rho is not None
    forces = [-alpha1] if quadratic else []
    if quadratic:
        alpha1 = torch.zeros_like(alpha1)
    structure = weights.structure
    if structure is None:
        similarity = ''
    else:
        forces.append(structure)
    before1, before2, before3 = _shift(alpha1), _shift(alpha2), _shift(alpha3)
    kappa, keep_u, speed = rho / (alpha1 + rho), before1 / (alpha1 + rho), _shift(rho) / rho
    scales_p, scales_s = [rho[0].reciprocal()], [kappa[0] / rho[0]]
    for k in range(1, rho.shape[0]):
        scales_p.append(rho[k].reciprocal() + (1 - before1[k] / rho[k]) * scales_s[k - 1])
        scales_s.append(kappa[k] * scales_p[k] + keep_u[k] * scales_s[k - 1])
    share = kappa / (1 + kappa)
    kinds = [torch.stack(scales_p), torch.stack(scales_s), 1 + speed, -speed]
    kinds += [0.5 - 0.5 * before1 / rho, 0.5 - 0.5 * before2 / rho, 0.5 * before2 / rho, kappa, keep_u]
    kinds += [share, 1 / (1 + kappa), share * (1 - before3 / rho), share * before3 / rho]
    kinds += [(alpha2 - before2) / (alpha2 + rho), before2 / (alpha2 + rho), rho / (alpha2 + rho)]
    kinds += [(alpha3 - before3) / (alpha3 + rho), before3 / (alpha3 + rho), rho / (alpha3 + rho)]
    kinds += [1 - before1 / rho, 0.5 / rho]
    for force in forces:
        kinds += [force / rho, _shift(force) / rho, kappa * force / rho]
    coefficients = torch.stack(kinds).to(log_p0.dtype)
    options = quadratic, similarity
    return torch.ops.rotp_vision.coupled_badmm_pool(features, log_p0, log_q0, coefficients, view, *options)


def _shift(values: Tensor) -> Tensor:
    """(T,) what the module before has, zero for the first."""
    return torch.cat([torch.zeros_like(values[:1]), values[:-1]])
