"""Two algorithms that are not in the library, for comparison: see PAPER.md, "Where we differ"."""

import torch
from torch import Tensor

from rotp_vision.core import ROTProblem, objective, structural_force


def published_sinkhorn(
    problem: ROTProblem,
    num_outer: int,
    num_iters: int,
    *,
    smoothness: float,
    feature_penalty: float,
    sample_penalty: float,
    structure: float = 0.0,
    proximal: float = 0.0,
) -> Tensor:
    """(B, D, N) log plan by Algorithm 1 exactly as the paper prints it.

    Nothing is corrected: the duals have their extra 1 / α1', both are updated from the same Y, the plan is not
    normalised to mass one, and it becomes NaN where the iteration diverges.
    """
    x, log_p0, log_q0, mask, *_ = problem
    if mask is not None:
        raise ValueError('problem must have no mask: the printed algorithm has none')
    log_p0, log_q0 = log_p0.unsqueeze(2), log_q0.unsqueeze(1)
    alpha1 = smoothness + proximal
    log_plan = (log_p0 + log_q0).expand_as(x)
    for _ in range(num_outer):
        # Line 3. Terms with a weight of zero are left out rather than multiplied by it: 0 · inf is NaN.
        cost = -x
        if structure:
            cost = cost - structure * structural_force(problem, log_plan.exp())
        if proximal:
            cost = cost - proximal * log_plan
        a, b = torch.zeros_like(log_p0), torch.zeros_like(log_q0)  # line 4
        y = -cost / alpha1
        for _ in range(num_iters):
            log_p, log_q = y.logsumexp(2, keepdim=True), y.logsumexp(1, keepdim=True)  # lines 6, 7
            a = feature_penalty / (alpha1 + feature_penalty) * (a / alpha1 + log_p0 - log_p)  # line 8
            b = sample_penalty / (alpha1 + sample_penalty) * (b / alpha1 + log_q0 - log_q)
            y = -cost / alpha1 + a + b  # line 9
        log_plan = y  # line 11
    return log_plan


def linear_dual_trail(
    problem: ROTProblem,
    num_iters: int,
    *,
    smoothness: float,
    feature_penalty: float,
    sample_penalty: float,
    step: float,
) -> Tensor:
    """(T, B) objective after every iteration of coupled BADMM-E with the usual dual steps.

    This is the library's coupled solver, except that the duals step by the residual itself, Z += ρ (P - S),
    z1 += ρ (μ - P1), z2 += ρ (η - Sᵀ1), and not by the residual of the logarithms.
    """
    alpha = {'smoothness': smoothness, 'feature_penalty': feature_penalty, 'sample_penalty': sample_penalty}
    x, log_p0, log_q0, *_ = problem
    log_p0, log_q0 = log_p0.unsqueeze(2), log_q0.unsqueeze(1)
    log_mu, log_eta, log_s = log_p0, log_q0, log_p0 + log_q0
    z = z1 = z2 = torch.zeros((), dtype=x.dtype)
    kappa = step / (smoothness + step)
    trail = []
    for _ in range(num_iters):
        y = (x - z) / step + log_s
        log_row = (0.5 * (y.logsumexp(2, keepdim=True) + log_mu + z1 / step)).log_softmax(1)
        log_p = y.log_softmax(2) + log_row
        trail.append(objective(problem, log_p, **alpha))

        y = (step * log_p + z) / (smoothness + step)
        log_column = (y.logsumexp(1, keepdim=True) + kappa * (log_eta + z2 / step)) / (1 + kappa)
        log_column = log_column.log_softmax(2)
        log_s = y.log_softmax(1) + log_column

        target = feature_penalty * log_p0 + step * log_row - z1
        log_mu = (target / (feature_penalty + step)).log_softmax(1)
        target = sample_penalty * log_q0 + step * log_column - z2
        log_eta = (target / (sample_penalty + step)).log_softmax(2)

        z = z + step * (log_p.exp() - log_s.exp())
        z1 = z1 + step * (log_mu.exp() - log_row.exp())
        z2 = z2 + step * (log_eta.exp() - log_column.exp())
    return torch.stack(trail)
