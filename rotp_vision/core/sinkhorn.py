"""Sinkhorn scaling for entropic smoothness: the formula, and one operator for the default pooling."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotp_vision.core.chunks import device_type, reads_values, set_chunks
from rotp_vision.core.problem import (
    FLOOR,
    SQUARE_SCALE,
    ROTProblem,
    hide_masked,
    normalize_mass,
    zero_masked,
)
from rotp_vision.core.solver import MAX_START, PAPER_START, PENALTY, SOLVERS, Start, Weights, split_weights
from rotp_vision.core.structure import Similarity, apply_factors, check_similarity, similarity_factors


@dataclass(frozen=True)
class Sinkhorn:
    """Sinkhorn with an optional outer proximal loop, which a structural term needs.

    An outer step (paper, Algorithm 1, with its dual scaling put right and its two updates made one after the other, so
    that each is exact block ascent on the dual) holds P, the plan so far, and solves

        min_Q  <-X + α0 C(X, P), Q> + α1 R(Q) + α2 KL(Q1 | p0) + α3 KL(Qᵀ1 | q0) + τ KL(Q | P)

    by, with α1' = α1 + τ, G = (X + α0 Σ1 P Σ2ᵀ + τ log P) / α1', b = 0, and duals already divided by α1':

        a = α2 / (α1' + α2) · (log p0 - LSE_n(G + b))
        b = α3 / (α1' + α3) · (log q0 - LSE_d(G + a))            K times
        log P = G + a + b, to mass one

    Without a structural term the problem is convex and one outer step without proximal term solves it as K grows, at
    the rate α2 α3 / ((α1 + α2) (α1 + α3)) an iteration.

    Attributes:
        num_iters: K, Sinkhorn iterations in an outer step.
        num_outer: outer proximal steps; None means 1, or 4 with a structural term.
        structure: whether there is a structural term.
        similarity: of the structural term, see `structural_force`.
    """

    num_iters: int = 4
    num_outer: int | None = None
    structure: bool = False
    similarity: Similarity | None = None

    def __post_init__(self):
        check_similarity(self.structure, self.similarity)

    @property
    def name(self) -> str:
        return 'sinkhorn'

    @property
    def num_weight_sets(self) -> int:
        """Sets of weights: one for each outer step."""
        return self.num_outer or (4 if self.structure else 1)

    def starts(self, start: Start, temperature: float) -> dict[str, float]:
        """The weights that are read and their starting values; `temperature` is next to the mean."""
        smoothness, penalty = {
            'mean': (temperature, temperature * PENALTY),
            'max': (MAX_START, MAX_START / 100),  # the maximum needs a free sample marginal
            'paper': (PAPER_START, PAPER_START),
        }[start]
        feature_penalty = PAPER_START if start == 'paper' else 1.0
        starts = {'smoothness': smoothness, 'feature_penalty': feature_penalty, 'sample_penalty': penalty}
        starts |= {'proximal': smoothness} if self.num_weight_sets > 1 else {}
        return starts | ({'structure': 1.0} if self.structure else {})

    def log_plan(self, problem: ROTProblem, weights: Weights) -> Tensor:
        """(B, D, N) log plan of mass one, -inf on masked samples; differentiable by unrolling."""
        x, log_p0, log_q0, mask = problem.scaled_features(), *problem[1:4]
        factors = similarity_factors(x, mask, self.similarity or 'covariance') if self.structure else None
        log_p0, log_q0 = log_p0.unsqueeze(2), log_q0.unsqueeze(1)  # (B, D, 1), (B, 1, N)
        log_plan = log_p0 + log_q0
        for step in split_weights(weights, self.num_weight_sets):
            gain, alpha1 = x, step['smoothness']
            if factors is not None:
                gain = gain + step['structure'] * apply_factors(*factors, hide_masked(log_plan, mask).exp())
            if 'proximal' in step:
                gain, alpha1 = gain + step['proximal'] * log_plan, alpha1 + step['proximal']
            rates = (step[name] / (alpha1 + step[name]) for name in ('feature_penalty', 'sample_penalty'))
            g, a, b = self._alternate(gain * (1 / alpha1), log_p0, log_q0, mask, *rates)
            log_plan = zero_masked(normalize_mass(g + a + b), mask)
        return hide_masked(log_plan, mask)

    def _alternate(self, g: Tensor, log_p0: Tensor, log_q0: Tensor, mask: Tensor | None, rate2: Tensor, rate3: Tensor):
        """G with -inf on masked samples, a and b after K iterations; the rates are α2 / (α1 + α2), α3 / (α1 + α3)."""
        g_rows = hide_masked(g, mask)
        a, b = torch.zeros_like(log_p0), torch.zeros_like(log_q0)
        for _ in range(self.num_iters):
            a = rate2 * (log_p0 - (g_rows + b).logsumexp(2, keepdim=True))
            b = rate3 * (log_q0 - (g + a).logsumexp(1, keepdim=True))
        return g_rows, a, b

    def operator(self, problem: ROTProblem, weights: Weights) -> Tensor | None:
        """(B, D) pooled features by one operator, or None where only the formula applies."""
        if not self._has_operator(problem):
            return None
        dtype = problem.log_feature_prior.dtype
        alpha1, alpha2 = weights['smoothness'].to(dtype), weights['feature_penalty'].to(dtype)
        alpha3 = weights['sample_penalty'].to(dtype)
        rates = 1 / alpha1, alpha2 / (alpha1 + alpha2), alpha3 / (alpha1 + alpha3)
        x, log_p0, log_q0, mask, feature_scale, power, _ = problem
        inputs = x, log_p0, log_q0, None if power is None else power.to(dtype), *rates
        pooled, clamped = _SinkhornPool.apply(*inputs, mask, self.num_iters, feature_scale == 'rms')  # pyright: ignore
        return None if clamped else pooled

    def refusal(self, problem: ROTProblem, starts: Mapping[str, float | list[float]]) -> str | None:
        """Why the operator cannot start there where values are not read, as text, or None."""
        if reads_values(problem.features) or not self._has_operator(problem):
            return None
        smoothness, feature_penalty = (starts[name] for name in ('smoothness', 'feature_penalty'))
        assert isinstance(smoothness, float)
        assert isinstance(feature_penalty, float)
        num_samples = problem.features.shape[2]
        least = math.sqrt(num_samples) / 20  # below it u may underflow in float32
        if smoothness + feature_penalty >= least:
            return None
        return f'smoothness + feature_penalty must be at least {least:.3g} for sets of {num_samples} samples'

    def _has_operator(self, problem: ROTProblem) -> bool:
        if self.num_weight_sets > 1 or self.structure or problem.feature_scale == 'log':
            return False
        # Raw features of any size, and priors of any size, may need the log domain, which only a look at values shows.
        safe = problem.feature_scale == 'rms' and not problem.has_priors
        return safe or reads_values(problem.features)


SOLVERS['sinkhorn'] = Sinkhorn


class _SinkhornPool(torch.autograd.Function):
    """y = Σ_n P x / Σ_n P of the plan after K Sinkhorn iterations, in float32 or wider, with one exponential an entry.

    With τ = 1/α1, ρ2 = α2/(α1+α2), ρ3 = α3/(α1+α3), and log q0 with the norm prior β log‖x_n‖:

        s = τ / sqrt(mean_n x² + ε)                                          raw scale: s = τ
        m = max_n x,  c = max_d s (x - m)                                    zero where |s x| ≤ 12 everywhere
        E = exp(s (x - m) - c),  v = exp(c)
        K times:
            R = Σ_n v E      u = exp(ρ2 (log p0 - log R) + (1 - ρ2) s m)
            C = Σ_d u E      v = exp(ρ3 (log q0 - log C) + (1 - ρ3) c)
        y = m + Σ_n v E (x - m) / Σ_n v E

    A constant of an image in log u, log v or log q0 changes neither y nor a gradient, so u and v have sum one.
    Backward makes E again from the kept s, R, C and y - m: K (D + N) + 2 D numbers an image. From g = ∂L/∂y,
    with gn = g / Σ_n v E and F = E ∘ gn (x - y):

        gv = Σ_d F      left = [gn]      right = [v]
        for k = K … 1:
            gC = -ρ3 gv v_k / C_k      ∂log q0 += ρ3 gv v_k      ∂ρ3 += Σ gv v_k (log q0 - log C_k - c)
            gu = Σ_n gC E              ∂log p0 += ρ2 gu u_k      ∂ρ2 += Σ gu u_k (log p0 - log R_k - s m)
            gR = -ρ2 gu u_k / R_k      left += [s u_k, s gR]     right += [gC, v_{k-1}]      gv = Σ_d gR E
        A = E ∘ (rightᵀ left) + s F ∘ v
        h = Σ_n A (x - m) - g (y - m) + (1 - ρ2) s m Σ_k gu_k u_k
        ∂τ = Σ_d h / τ      ∂x = A - x h / (N (mean_n x² + ε)) + β ∂log q0 x / ‖x_n‖²      ∂β = Σ_n ∂log q0 log‖x_n‖

    Returns:
        (B, D) in the dtype of x, and whether a sum was clamped on a CPU: such sums need the log domain.
    """

    @staticmethod
    def forward(ctx, x, log_p0, log_q0, power, tau, rho2, rho3, mask, num_iters, rms):
        (batch, num_features, num_samples), dtype, tiny = x.shape, tau.dtype, torch.finfo(tau.dtype).tiny
        # The root mean square bounds s x by sqrt(N) τ. Raw features are looked at: they are on a CPU, see `operator`.
        largest = math.sqrt(num_samples)
        if not rms:
            largest = torch.stack(x.aminmax()).abs().amax().to(dtype) if batch else tau.new_zeros(1)
        warm = largest * tau <= 12
        warm = bool(warm) if reads_values(x) else warm
        scale = x.new_empty([batch, 1, num_features], dtype=dtype)
        centre = torch.empty_like(scale)
        rows = x.new_empty([batch, num_iters, num_features], dtype=dtype)
        columns = x.new_empty([batch, num_iters, num_samples], dtype=dtype)
        norms = None if power is None else x.new_empty([batch, 1, num_samples], dtype=dtype)
        # Without a maximum taken off, y is what backward keeps.
        keeps_pooled = warm is True and x.dtype == dtype
        pooled = centre.squeeze(1) if keeps_pooled else x.new_empty([batch, num_features])
        ctx.chunks, ctx.warm, ctx.rms = set_chunks(x, 'operator'), warm, rms
        multiply = _exact_product(dtype)
        with torch.autocast(device_type(x), enabled=False):
            for sets in ctx.chunks:
                # Squares come before the transposition, which is faster once the features are in the cache.
                square = (x[sets].to(dtype) * SQUARE_SCALE).square_() if rms or norms is not None else x
                if norms is not None:
                    norm_square = square.sum(1, keepdim=True).clamp_min_((FLOOR * SQUARE_SCALE) ** 2)
                    norms[sets] = 0.5 * norm_square.log_() - math.log(SQUARE_SCALE)
                square_sum = square.sum(2).unsqueeze(1) if rms else None
                del square  # free memory before the exponentials
                part, exists, count, log_p, log_q = _chunk(sets, x, mask, log_p0, log_q0, dtype)
                if norms is not None:
                    log_q = log_q + power * norms[sets]
                if square_sum is None:
                    scale[sets] = tau
                else:
                    inverse = (square_sum / count + (FLOOR * SQUARE_SCALE) ** 2).rsqrt_()
                    torch.mul(inverse, tau * SQUARE_SCALE, out=scale[sets])
                centred, exps, peak, column, v = _exponentials(part, exists, scale[sets], warm)
                log_p, log_q = torch.lerp(scale[sets] * peak, log_p, rho2), torch.lerp(column, log_q, rho3)
                for k in range(num_iters):
                    row = torch.clamp_min(multiply(v, exps), tiny, out=rows[sets, k : k + 1])
                    u = torch.addcmul(log_p, row.log(), rho2, value=-1).softmax(2)
                    total = torch.clamp_min(multiply(u, exps.mT), tiny, out=columns[sets, k : k + 1])
                    v = torch.addcmul(log_q, total.log(), rho3, value=-1).softmax(2)
                mass = multiply(v, exps).clamp_min_(tiny)
                torch.div(multiply(v, exps.mul_(centred)), mass, out=centre[sets])
                if not keeps_pooled:
                    pooled[sets] = (centre[sets] + peak).squeeze(1)
        kept = scale, centre, rows, columns, norms
        ctx.save_for_backward(x, log_p0, log_q0, power, tau, rho2, rho3, mask, *kept)
        # What is divided by sums that are hardly larger would overflow.
        least = tiny * 2**27
        clamped = warm is False and reads_values(x) and bool(rows.amin() <= least or columns.amin() <= least)
        return pooled, clamped

    @staticmethod
    def backward(ctx, grad, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        given = ctx.chunks, ctx.warm, ctx.rms, ctx.needs_input_grad
        gradients = _SinkhornGradients.apply(*given, grad, *ctx.saved_tensors)
        return *gradients, None, None, None  # pyright: ignore[reportGeneralTypeIssues]


class _SinkhornGradients(torch.autograd.Function):
    """The gradients of the first seven inputs of `_SinkhornPool`, whose docstring holds the formulas."""

    @staticmethod
    def forward(ctx, chunks, warm, rms, needed, grad, *saved):
        x, log_p0, log_q0, power, tau, rho2, rho3, mask, scale, centre, rows, columns, norms = saved
        num_iters, dtype, tiny = rows.shape[1], tau.dtype, torch.finfo(tau.dtype).tiny
        d_x, d_tau, d_rho2, d_rho3 = torch.empty_like(x), 0.0, 0.0, 0.0
        d_log_p = torch.empty_like(rows[:, 0]) if needed[1] else None
        d_log_q = torch.empty_like(columns[:, 0]) if needed[2] or norms is not None else None
        multiply = _exact_product(dtype)
        with torch.autocast(device_type(x), enabled=False):
            for sets in chunks:
                part, exists, count, log_p, log_q = _chunk(sets, x, mask, log_p0, log_q0, dtype)
                if norms is not None:
                    log_q = log_q + power * norms[sets]
                s, y0, row, total = scale[sets], centre[sets], rows[sets], columns[sets]
                centred, exps, peak, column, v0 = _exponentials(part, exists, s, warm)
                shift, log_p, log_q = s * peak, log_p - row.log(), log_q - total.log()
                u = torch.lerp(shift, log_p, rho2).softmax(2)
                v = torch.cat([v0, torch.lerp(column, log_q, rho3).softmax(2)], 1)
                u_row, v_total = u / row * -rho2, v[:, 1:] / total * -rho3

                g = grad[sets].to(dtype).unsqueeze(1)
                gn = g / multiply(v[:, -1:], exps).clamp_min_(tiny)
                weighted = torch.addcmul(-gn * y0, centred, gn).mul_(exps)
                gv = weighted.sum(2).unsqueeze(1)
                gvs, gcs, gus, grs = [], [], [], []
                for k in reversed(range(num_iters)):
                    gvs.insert(0, gv)
                    gcs.insert(0, gv * v_total[:, k : k + 1])
                    gus.insert(0, multiply(gcs[0], exps))
                    grs.insert(0, gus[0] * u_row[:, k : k + 1])
                    gv = multiply(grs[0], exps.mT)
                left = torch.cat([gn, s * torch.cat([u, *grs], 1)], 1)
                right = torch.cat([v[:, -1:], *gcs, v[:, :-1]], 1)
                d_part = multiply(right.mT, left).mul_(exps).addcmul_(weighted.mul_(s), v[:, -1:].mT)

                ga, hb = torch.cat(gus, 1).mul_(u), torch.cat(gvs, 1).mul_(v[:, 1:])
                h = torch.mul(d_part, centred, out=weighted).sum(1, keepdim=True) - g * y0
                h += (1 - rho2) * shift * ga.sum(1, keepdim=True)
                d_tau = d_tau + h.sum() / tau
                d_rho2 = d_rho2 + (ga * (log_p - shift)).sum().view(1)
                d_rho3 = d_rho3 + (hb * (log_q - column)).sum().view(1)
                if d_log_p is not None:
                    d_log_p[sets] = rho2 * ga.sum(1)
                if d_log_q is not None:
                    d_log_q[sets] = rho3 * hb.sum(1)
                if rms:
                    inverse = s / tau  # of the root mean square, whose square may underflow
                    d_part.addcmul_(part, h * inverse * inverse / count, value=-1)
                if norms is not None and d_log_q is not None:
                    inverse = (-2 * norms[sets]).exp_().masked_fill_(norms[sets] <= math.log(FLOOR), 0.0)
                    d_part.addcmul_(part, (power * d_log_q[sets].unsqueeze(1) * inverse).mT)
                d_x[sets].mT.copy_(d_part)
        d_power = None if norms is None or d_log_q is None else (d_log_q * norms.squeeze(1)).sum().view(1)
        d_log_p = None if d_log_p is None else d_log_p.sum_to_size(log_p0.shape)
        d_log_q = None if d_log_q is None else d_log_q.sum_to_size(log_q0.shape)
        return d_x, d_log_p, d_log_q, d_power, d_tau, d_rho2, d_rho3

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("this pooling has no second derivative; construct it with backend='reference' for one")


def _chunk(sets: slice, x: Tensor, mask: Tensor | None, log_p0: Tensor, log_q0: Tensor, dtype: torch.dtype):
    """Some sets: features (b, N, D), mask (b, 1, N), its count, log priors (b or 1, 1, D) and (b or 1, 1, N)."""
    part = x[sets].mT.to(dtype).contiguous()
    log_p = (log_p0 if log_p0.shape[0] == 1 else log_p0[sets]).unsqueeze(1)
    log_q = (log_q0 if log_q0.shape[0] == 1 else log_q0[sets]).unsqueeze(1)
    if mask is None:
        return part, None, x.shape[2], log_p, log_q
    exists = mask[sets]
    return part, exists, exists.sum(2, keepdim=True), log_p, log_q.masked_fill(~exists, -1e30)


def _exponentials(x: Tensor, exists: Tensor | None, scale: Tensor, warm: Tensor | bool):
    """x - m and E (b, N, D), m (b, 1, D), c and the first v (b, 1, N), as `_SinkhornPool` has them."""
    if warm is True:
        zero, v = x.new_zeros([1, 1, 1]), x.new_ones([x.shape[0], 1, x.shape[1]])
        return x, (x * scale).exp_(), zero, zero, v if exists is None else v * exists
    peak = (x if exists is None else x.masked_fill(~exists.mT, -torch.inf)).amax(1, keepdim=True)
    peak = peak if warm is False else peak.masked_fill_(warm, 0.0)
    centred = x - peak if exists is None else (x - peak).masked_fill_(~exists.mT, 0.0)
    exps = centred * scale
    column = exps.amax(2, keepdim=True)
    column = column if warm is False else column.masked_fill_(warm, 0.0)
    exps, column = (exps - column).exp_(), column.mT
    v = column.softmax(2)
    return centred, exps, peak, column, v if exists is None else v * exists


def _exact_product(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Batched matrix product at the precision of `dtype`, also where modes such as TensorFloat-32 reduce it."""
    exact = dtype == torch.float64 or torch.get_float32_matmul_precision() == 'highest'
    return torch.bmm if exact else _summed_product


def _summed_product(left: Tensor, right: Tensor) -> Tensor:
    """(b, I, K) product of (b, I, J) and (b, J, K) without matrix multiplication."""
    if left.shape[1] == 1:
        return (left.mT * right).sum(1, keepdim=True)
    total = left[:, :, :1] * right[:, :1]
    for j in range(1, left.shape[2]):
        total.addcmul_(left[:, :, j : j + 1], right[:, j : j + 1])
    return total
