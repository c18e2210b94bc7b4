"""Bregman ADMM for entropic and quadratic smoothness."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rotp_vision.core.problem import Regularizer, ROTProblem, hide_masked, log_normalize, zero_masked
from rotp_vision.core.solver import MAX_START, PAPER_START, PENALTY, SOLVERS, FormulaOnly, Start, Weights, split_weights
from rotp_vision.core.structure import Similarity, apply_factors, check_similarity, similarity_factors


@dataclass(frozen=True)
class BregmanADMM(FormulaOnly):
    """Bregman ADMM (paper, Algorithm 2), as published or with coupled marginals.

    The plan is held twice, as P with its row marginal and as S with its column marginal, tied by the dual Z.
    From log S = log p0 + log q0, Z = 0, an iteration does

        Y = (X + α0 Σ1 S Σ2ᵀ - Z) / ρ + log S                      entropic; quadratic: α1 S is taken off X
        log P = log softmax_n(Y) + log μ
        Y = (Z + α0 Σ1 P Σ2ᵀ + ρ log P) / (α1 + ρ)                 quadratic: (Z + α0 … - α1 P) / ρ + log P
        log S = log softmax_d(Y) + log η
        Z = Z + ρ (P - S)

    **As published**, P's rows are held to μ and S's columns to η before μ and η are updated, so their own duals
    never leave zero, μ = p0 and η = q0 for ever, and α2, α3 have no effect at all: this is a *balanced* solver.
    They are not read.

    **Coupled**, the penalties ρ KL(P1 | μ) and ρ KL(Sᵀ1 | η) stay inside the two steps, which keeps them closed form;
    the marginals of P and S become, each to mass one,

        log P1  = ½ (LSE_n(Y) + log μ + z1 / ρ)
        log Sᵀ1 = (LSE_d(Y) + κ (log η + z2 / ρ)) / (1 + κ)        κ = ρ / (α1 + ρ); quadratic: 1
        log μ = (α2 log p0 + ρ log P1 - z1) / (α2 + ρ)             and likewise η with α3, q0, Sᵀ1, z2

    and the duals step by the *logarithmic* residual, Z += ρ (log P - log S), z1 += ρ (log μ - log P1), z2 likewise.
    That has the same fixed point as the residual itself but does not shrink with the entries of the plan (1 / DN):
    it is the Newton step of the dual under the KL geometry.

    Attributes:
        regularizer: R(P) of the objective, 'entropic' or 'quadratic'.
        coupled: whether the marginal penalties act.
        num_iters: K, iterations; coupled penalties need three to act.
        structure: whether there is a structural term.
        similarity: of the structural term, see `structural_force`.
    """

    regularizer: Regularizer = 'entropic'
    coupled: bool = False
    num_iters: int = 4
    structure: bool = False
    similarity: Similarity | None = None

    def __post_init__(self):
        check_similarity(self.structure, self.similarity)
        if self.coupled and self.num_iters < 3:
            raise ValueError(
                f'num_iters of {self.name} must be at least 3 for its penalties to act, got {self.num_iters}'
            )

    @property
    def name(self) -> str:
        return f'badmm-{self.regularizer[0]}' + ('-coupled' if self.coupled else '')

    @property
    def num_weight_sets(self) -> int:
        """Sets of weights: one for each iteration."""
        return self.num_iters

    def starts(self, start: Start, temperature: float) -> dict[str, float]:
        """The weights that are read and their starting values; `temperature` is next to the mean."""
        smoothness, step, penalty = {
            # Each iteration moves the plan by X / ρ: to end next to the mean, ρ grows with their number.
            'mean': (temperature, temperature * self.num_iters, temperature * PENALTY),
            # The sample marginal is freed by a smoothness that leaves the other half of the plan flat.
            'max': (temperature, MAX_START, MAX_START / 100),
            'paper': (PAPER_START, PAPER_START, PAPER_START),
        }[start]
        starts = {'smoothness': smoothness, 'step': step}
        if self.regularizer == 'entropic' and self.num_iters == 1:
            del starts['smoothness']  # one iteration is softmax pooling at temperature ρ
        if self.coupled:
            starts |= {'feature_penalty': PAPER_START if start == 'paper' else 1.0, 'sample_penalty': penalty}
        return starts | ({'structure': 1.0} if self.structure else {})

    def log_plan(self, problem: ROTProblem, weights: Weights) -> Tensor:
        """(B, D, N) log plan P of mass one, -inf on masked samples; differentiable by unrolling."""
        x, log_p0, log_q0, mask = problem.scaled_features(), *problem[1:4]
        steps, quadratic = split_weights(weights, self.num_weight_sets), self.regularizer == 'quadratic'
        factors = similarity_factors(x, mask, self.similarity or 'covariance') if self.structure else None

        interacts = quadratic or factors is not None  # P and S act on each other through more than their logarithms
        log_p0, log_q0 = log_p0.unsqueeze(2), log_q0.unsqueeze(1)  # (B, D, 1), (B, 1, N)
        log_mu, log_eta = log_p0, log_q0
        log_s = log_p0 + log_q0
        s = hide_masked(log_s, mask).exp() if interacts else log_s  # only read if they interact
        # Duals divided by ρ, which costs a pass over the plan less than the duals themselves; None while zero.
        u = u1 = u2 = None
        for k, step in enumerate(steps):
            rho, alpha0 = step['step'], step.get('structure')
            alpha1 = step.get('smoothness', rho)  # one entropic iteration does not read it
            if k:
                rescale = steps[k - 1]['step'] / rho
                u, u1, u2 = (None if dual is None else dual * rescale for dual in (u, u1, u2))

            # P-step
            gain = x + _interaction(s, alpha0, alpha1, factors, quadratic) if interacts else x
            y = hide_masked(gain * (1 / rho) + (log_s if u is None else log_s - u), mask)
            log_row = log_mu  # log P1
            if self.coupled:
                pull, total = log_mu if u1 is None else log_mu + u1, y.logsumexp(2, keepdim=True)
                log_row = (0.5 * (total + pull)).log_softmax(1)
                log_p = y + (log_row - total)
            else:
                log_p = log_normalize(y, 2) + log_row
            if k + 1 == len(steps):
                return log_p

            # S-step
            p = log_p.exp()
            log_p = zero_masked(log_p, mask)
            y = log_p if u is None else log_p + u
            if interacts:
                y = y + _interaction(p, alpha0, alpha1, factors, quadratic) * (1 / rho)
            kappa = 1.0 if quadratic else rho / (alpha1 + rho)
            y = y if quadratic else kappa * y
            log_column = log_eta  # log Sᵀ1
            if self.coupled:
                pull, total = log_eta if u2 is None else log_eta + u2, y.logsumexp(1, keepdim=True)
                log_column = hide_masked((total + kappa * pull) / (1 + kappa), mask)
                log_column = zero_masked(log_column.log_softmax(2), mask)
                log_s = y + (log_column - total)
            else:
                log_s = log_normalize(y, 1) + log_column
            if interacts or not self.coupled:
                s = hide_masked(log_s, mask).exp()

            # Marginals and duals
            if self.coupled:
                log_mu, u1 = _marginal_step(log_p0, log_row, u1, step['feature_penalty'], rho, None)
                log_eta, u2 = _marginal_step(log_q0, log_column, u2, step['sample_penalty'], rho, mask)
                residual = zero_masked(log_p - log_s, mask)
            else:
                residual = p - s
            u = residual if u is None else u + residual
        raise AssertionError('there is at least one iteration')


for coupled in (False, True):
    for regularizer in ('entropic', 'quadratic'):
        name = BregmanADMM(regularizer, coupled).name
        SOLVERS[name] = partial(BregmanADMM, regularizer, coupled)


def _interaction(
    plan: Tensor, alpha0: Tensor | None, alpha1: Tensor, factors: tuple[Tensor, Tensor] | None, quadratic: bool
) -> Tensor:
    """What one half of the plan adds to the force on the other: α0 Σ1 P Σ2ᵀ, and if quadratic -α1 P."""
    if alpha0 is None or factors is None:
        return -alpha1 * plan
    force = alpha0 * apply_factors(*factors, plan)
    return force - alpha1 * plan if quadratic else force


def _marginal_step(log_prior: Tensor, log_marginal: Tensor, dual: Tensor | None, penalty: Tensor, rho: Tensor, mask):
    """The next log μ (or log η), a vector of mass one, and its dual divided by ρ; zero on masked samples."""
    target = log_marginal if dual is None else log_marginal - dual
    target = (penalty * log_prior + rho * target) / (penalty + rho)
    dim = 2 if log_prior.shape[1] == 1 else 1
    log_mu = zero_masked(hide_masked(target, mask).log_softmax(dim), mask)
    residual = log_mu - log_marginal
    return log_mu, residual if dual is None else dual + residual
