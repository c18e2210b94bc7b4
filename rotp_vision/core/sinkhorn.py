"""Sinkhorn scaling for entropic smoothness."""

from torch import Tensor

from rotp_vision.core.problem import ROTProblem, hide_masked, normalize_mass, zero_masked
from rotp_vision.core.structure import Similarity, apply_factors, similarity_factors
from rotp_vision.core.weights import StepWeights, require


def sinkhorn(
    problem: ROTProblem, weights: StepWeights, num_inner: int, *, similarity: Similarity = 'covariance'
) -> Tensor:
    """Log plan after T proximal modules of K = `num_inner` alternating Sinkhorn steps each.

    A module (paper, Algorithm 1, with its dual scaling put right and its two updates made one after the other, so
    that each is exact block ascent on the dual) holds P, the plan so far, and solves

        min_Q  <-X + α0 C(X, P), Q> + α1 R(Q) + α2 KL(Q1 | p0) + α3 KL(Qᵀ1 | q0) + τ KL(Q | P)

    by, with α1' = α1 + τ, G = (X + α0 Σ1 P Σ2ᵀ + τ log P) / α1', b = 0, and duals already divided by α1':

        a = α2 / (α1' + α2) · (log p0 - LSE_n(G + b))
        b = α3 / (α1' + α3) · (log q0 - LSE_d(G + a))            K times
        log P = G + a + b, to mass one

    Without a structural term the problem is convex and one module without proximal term (τ = None) solves it as
    K grows, at the rate α2 α3 / ((α1 + α2) (α1 + α3)) a step.

    Args:
        problem: the batch of problems.
        weights: needs smoothness α1, feature_penalty α2, sample_penalty α3; takes structure α0, proximal τ.
        num_inner: K.
        similarity: what Σ1 and Σ2 are, see `structural_force`.

    Returns:
        (B, D, N) log plan of mass one, -inf on masked samples. Differentiable in features, priors and weights by
        unrolling.
    """
    if num_inner < 1:
        raise ValueError(f'num_inner must be at least 1, got {num_inner}')
    x, log_p0, log_q0, mask = problem.seen(), *problem[1:4]
    modules = require('sinkhorn', weights, 'smoothness', 'feature_penalty', 'sample_penalty')
    proximals = [None] * len(modules) if weights.proximal is None else weights.proximal.unbind()
    structures = [None] * len(modules) if weights.structure is None else weights.structure.unbind()
    factors = None if weights.structure is None else similarity_factors(x, mask, similarity)
    log_p0, log_q0 = log_p0.unsqueeze(2), log_q0.unsqueeze(1)  # (B, D, 1), (B, 1, N)
    log_plan = log_p0 + log_q0
    for (alpha1, alpha2, alpha3), alpha0, tau in zip(modules, structures, proximals, strict=True):
        gain = x
        if alpha0 is not None and factors is not None:
            gain = gain + alpha0 * apply_factors(*factors, hide_masked(log_plan, mask).exp())
        if tau is not None:
            gain = gain + tau * log_plan
            alpha1 = alpha1 + tau
        g = gain * (1 / alpha1)
        feature_rate, sample_rate = alpha2 / (alpha1 + alpha2), alpha3 / (alpha1 + alpha3)
        g_rows = hide_masked(g, mask)  # what sums over samples reads
        a = b = None
        for _ in range(num_inner):
            a = feature_rate * (log_p0 - (g_rows if b is None else g_rows + b).logsumexp(2, keepdim=True))
            b = sample_rate * (log_q0 - (g + a).logsumexp(1, keepdim=True))
        assert a is not None
        assert b is not None
        log_plan = zero_masked(normalize_mass(g_rows + a + b), mask)
    return hide_masked(log_plan, mask)
