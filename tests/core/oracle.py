"""Plain, slow transcriptions of the paper's equations for one set X (D, N): what the solvers are measured against.

Nothing here is clever and nothing is shared with the library: full covariance matrices, every variable of the paper
kept and updated as printed, no mask (the sets that exist are cut out before).
"""

import numpy as np
import torch
from torch import Tensor


def covariances(x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ1 (D, D) over samples and Σ2 (N, N) over features, centred (text before eq. "cov")."""
    num_features, num_samples = x.shape
    mu1 = x @ torch.ones(num_samples, dtype=x.dtype) / num_samples
    mu2 = x.T @ torch.ones(num_features, dtype=x.dtype) / num_features
    over_samples = x - torch.outer(mu1, torch.ones(num_samples, dtype=x.dtype))
    over_features = x - torch.outer(torch.ones(num_features, dtype=x.dtype), mu2)
    return over_samples @ over_samples.T / num_samples, over_features.T @ over_features / num_features


def cosines(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine similarity of every pair of rows (D, D) and of every pair of columns (N, N)."""

    def pairs(rows: Tensor) -> Tensor:
        return torch.stack([torch.stack([(u @ v) / (u.norm() * v.norm()) for v in rows]) for u in rows])

    return pairs(x), pairs(x.T)


SIMILARITIES = {'covariance': covariances, 'cosine': cosines}


def structural_force(x: Tensor, plan: Tensor, similarity: str = 'covariance') -> Tensor:
    """Σ1 P Σ2ᵀ = -C(X, P), eq. "cov"."""
    sigma1, sigma2 = SIMILARITIES[similarity](x)
    return sigma1 @ plan @ sigma2.T


def objective(
    x: Tensor, plan: Tensor, p0: Tensor, q0: Tensor, alpha: tuple[float, float, float, float], regularizer: str
) -> float:
    """The ROT objective, eq. "uot", for α = (α0, α1, α2, α3), entry by entry in numpy."""

    def kl(a: np.ndarray, b: np.ndarray) -> float:
        return sum(ai * (np.log(ai) - np.log(bi)) - (ai - bi) for ai, bi in zip(a, b, strict=True))

    structural = -np.trace(structural_force(x, plan).numpy() @ plan.numpy().T)
    p, entries = plan.numpy(), plan.numpy().ravel()
    if regularizer == 'entropic':
        smoothness = sum(e * (np.log(e) - 1) for e in entries)
    else:
        smoothness = sum(e**2 for e in entries)
    transport = -sum(xi * pi for xi, pi in zip(x.numpy().ravel(), entries, strict=True))
    penalties = alpha[2] * kl(p.sum(1), p0.numpy()) + alpha[3] * kl(p.sum(0), q0.numpy())
    return transport + alpha[0] * structural + alpha[1] * smoothness + penalties


def objective_gradient(x: Tensor, plan: Tensor, p0: Tensor, q0: Tensor, alpha: tuple, regularizer: str) -> Tensor:
    """Slope of the objective without structural term at every entry of the plan, by hand; α = (α1, α2, α3)."""
    row, column = plan.sum(1), plan.sum(0)
    smooth = plan.log() if regularizer == 'entropic' else 2 * plan
    return -x + alpha[0] * smooth + alpha[1] * (row / p0).log()[:, None] + alpha[2] * (column / q0).log()[None, :]


def published_badmm(
    x: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    alphas: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    rhos: list[Tensor],
    regularizer: str,
    similarity: str = 'covariance',
) -> tuple[Tensor, Tensor, Tensor]:
    """log P, log μ, log η after Algorithm 2, iteration t with (α0, α1, α2, α3) = alphas[t] and ρ = rhos[t].

    μ, η, z1 and z2 are kept and updated as eq. "update_mu", "update_eta" and "zs" print them.
    """
    log_s = log_p = log_p0[:, None] + log_q0[None, :]
    log_mu, log_eta = log_p0, log_q0
    z, z1, z2 = torch.zeros_like(x), torch.zeros_like(log_p0), torch.zeros_like(log_q0)
    sigma1, sigma2 = SIMILARITIES[similarity](x)
    for (alpha0, alpha1, alpha2, alpha3), rho in zip(alphas, rhos, strict=True):
        s = log_s.exp()
        y = x + alpha0 * sigma1 @ s @ sigma2.T - z + rho * log_s  # eq. "deriveP"
        if regularizer == 'quadratic':
            y = y - alpha1 * s
        y = y / rho
        log_p = (log_mu - y.logsumexp(1))[:, None] + y

        p = log_p.exp()
        y = z + alpha0 * sigma1.T @ p @ sigma2 + rho * log_p  # eq. "deriveS"
        y = y / (alpha1 + rho) if regularizer == 'entropic' else (y - alpha1 * p) / rho
        log_s = (log_eta - y.logsumexp(0))[None, :] + y

        y = (rho * log_mu + alpha2 * log_p0 - z1) / (rho + alpha2)  # eq. "update_mu"
        log_mu = y - y.logsumexp(0)
        y = (rho * log_eta + alpha3 * log_q0 - z2) / (rho + alpha3)  # eq. "update_eta"
        log_eta = y - y.logsumexp(0)

        s = log_s.exp()  # eq. "zs"
        z = z + rho * (p - s)
        z1 = z1 + rho * (log_mu.exp() - p.sum(1))
        z2 = z2 + rho * (log_eta.exp() - s.sum(0))
    return log_p, log_mu, log_eta


def proximal_sinkhorn(
    x: Tensor,
    log_p0: Tensor,
    log_q0: Tensor,
    alphas: list[tuple[float, float, float, float]],
    taus: list[float],
    num_iters: int,
    similarity: str = 'covariance',
) -> Tensor:
    """Plan after Algorithm 1, corrected, outer step t with (α0, α1, α2, α3) = alphas[t] and τ = taus[t].

    Corrected: the duals, held divided by α1', lose the printed extra 1/α1'; b is updated after a and from it; every
    outer step ends on the constraint set, mass one. Not in the log domain.
    """
    p0, q0 = log_p0.exp(), log_q0.exp()
    plan = torch.outer(p0, q0)
    sigma1, sigma2 = SIMILARITIES[similarity](x)
    for (alpha0, alpha1, alpha2, alpha3), tau in zip(alphas, taus, strict=True):
        alpha1_prime = alpha1 + tau
        cost = -x - alpha0 * sigma1 @ plan @ sigma2.T - tau * plan.log()
        kernel = (-cost / alpha1_prime).exp()
        u, v = torch.ones_like(p0), torch.ones_like(q0)  # exp(a), exp(b)
        for _ in range(num_iters):
            u = (p0 / (kernel @ v)) ** (alpha2 / (alpha1_prime + alpha2))
            v = (q0 / (kernel.T @ u)) ** (alpha3 / (alpha1_prime + alpha3))
        plan = u[:, None] * kernel * v[None, :]
        plan = plan / plan.sum()
    return plan
