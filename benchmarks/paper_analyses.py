"""The paper's analyses (its section "Further Analysis and Comparisons") as functions that return rows and plans."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper_published import linear_dual_trail, published_sinkhorn
from rotp_vision.core import ROTProblem, average, make_solver, objective, rot_problem, solve, structural_force
from rotp_vision.core.solver import PAPER_START
from rotp_vision.layers import ROTSetPool

Rows = list[dict[str, Any]]

PUBLISHED_SINKHORN = 'Sinkhorn, as printed'
ALPHA = ('smoothness', 'feature_penalty', 'sample_penalty')  # α1, α2, α3
SOLVERS = {
    'Sinkhorn': 'sinkhorn',
    'BADMM-E': 'badmm-e',
    'BADMM-Q': 'badmm-q',
    'coupled BADMM-E': 'badmm-e-coupled',
    'coupled BADMM-Q': 'badmm-q-coupled',
}
# Iterations that a solver needs at least, as powers of two; fewer than three leave coupled penalties without effect.
LEAST = {'coupled BADMM-E': 4, 'coupled BADMM-Q': 4}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plan_of(
    name: str,
    problem: ROTProblem,
    alpha: tuple[float, float, float],
    *,
    rho: float,
    num_iters: int,
    structure: float = 0.0,
    proximal: float | None = 0.1,
) -> Tensor:
    """(B, D, N) log plan of the named solver for α = (α1, α2, α3), after `num_iters` iterations.

    With a structural term Sinkhorn needs outer steps: a quarter as many, of four iterations, with τ = `proximal`.
    """
    weights: dict[str, Any] = dict(zip(ALPHA, alpha, strict=True))
    outer, inner = (max(num_iters // 4, 1), 4) if structure else (1, num_iters)
    if name == PUBLISHED_SINKHORN:
        tau = (proximal or 0.0) if structure else 0.0
        return published_sinkhorn(problem, outer, inner, structure=structure, proximal=tau, **weights)
    weights['structure'] = structure
    if name == 'Sinkhorn':
        weights['proximal'] = (proximal or 1e-30) if structure else None
        return log_plan_of(name, problem, weights, num_iters=inner, num_outer=outer)
    return log_plan_of(name, problem, weights | {'step': rho}, num_iters=num_iters)


def log_plan_of(name: str, problem: ROTProblem, weights: Mapping[str, float | None], **options: Any) -> Tensor:
    """(B, D, N) log plan of the named solver; weights that are None or zero are left out."""
    given = {key: torch.tensor([value], dtype=problem.features.dtype) for key, value in weights.items() if value}
    solver = make_solver(SOLVERS[name], structure='structure' in given, **options)
    return solve(problem, given, solver)


def objective_of(problem: ROTProblem, log_plan: Tensor, alpha: tuple[float, float, float], name: str = '') -> Tensor:
    """(B,) the objective that the named solver minimises."""
    weights = dict(zip(ALPHA, alpha, strict=True))
    return objective(problem, log_plan, **weights, regularizer='quadratic' if name.endswith('Q') else 'entropic')


def convergence(num_sets: int = 50, num_features: int = 100, num_samples: int = 500, most_iters: int = 32) -> Rows:
    """<-X, P> and objective, mean over the sets, against the number of iterations; every weight at softplus(0)."""
    problem = rot_problem(random(num_sets, num_features, num_samples))
    alpha = (PAPER_START,) * 3
    rows = []
    for name in (PUBLISHED_SINKHORN, *SOLVERS):
        num_iters = LEAST.get(name, 1)
        while num_iters <= most_iters:
            log_plan = plan_of(name, problem, alpha, rho=PAPER_START, num_iters=num_iters)
            rows.append(
                {
                    'solver': name,
                    'iterations': num_iters,
                    '⟨−X, P⟩': -(problem.features * log_plan.exp()).sum((1, 2)).mean().item(),
                    'objective': objective_of(problem, log_plan, alpha, name).mean().item(),
                    'mass': log_plan.exp().sum((1, 2)).mean().item(),
                }
            )
            num_iters *= 2
    return rows


def stability(exponents: Sequence[int] = range(-5, 5), num_iters: int = 16) -> tuple[Rows, dict[tuple, Tensor]]:
    """Counts over the grid α1 × (α2 = α3) in float32, and the masses behind them, by (solver, α0)."""
    problem = rot_problem(random(1, 5, 10))
    rows, masses = [], {}
    for name, structure in itertools.product((PUBLISHED_SINKHORN, *SOLVERS), (0.0, 0.1)):
        mass = _masses(name, problem, exponents, num_iters=num_iters, structure=structure)
        masses[name, structure] = mass
        rows.append({'solver': name, 'α0': structure} | _counts(mass))
    return rows, masses


def stability_settings(exponents: Sequence[int] = range(-5, 5), seeds: Sequence[int] = (0, 1, 2)) -> Rows:
    """The counts for Sinkhorn, as printed and ours, under other numbers of steps, τ and data."""
    settings = [(0.0, steps, None) for steps in (4, 16, 64)] + [(0.1, 16, tau) for tau in (None, 0.01, 0.1, 1.0)]
    rows = []
    for name, (structure, steps, tau), seed in itertools.product((PUBLISHED_SINKHORN, 'Sinkhorn'), settings, seeds):
        problem = rot_problem(random(1, 5, 10, seed=seed))
        mass = _masses(name, problem, exponents, num_iters=steps, structure=structure, proximal=tau)
        setting = {'solver': name, 'α0': structure, 'steps': steps, 'τ': tau or '', 'seed': seed}
        rows.append(setting | _counts(mass))
    return rows


def _masses(name: str, problem: ROTProblem, exponents: Sequence[int], **settings: Any) -> Tensor:
    """Mass of the plan for every α1 (rows) and α2 = α3 (columns)."""
    mass = torch.empty(len(exponents), len(exponents), dtype=torch.float64)
    for (i, smooth), (j, penalty) in itertools.product(enumerate(exponents), enumerate(exponents)):
        alpha = (10.0**smooth, 10.0**penalty, 10.0**penalty)
        mass[i, j] = plan_of(name, problem, alpha, rho=1.0, **settings).exp().double().sum()
    return mass


def _counts(mass: Tensor) -> dict[str, int]:
    right, nan = int(((mass - 1).abs() < 1e-3).sum()), int(mass.isnan().sum())
    return {'NaN': nan, 'wrong mass': mass.numel() - right - nan, 'mass one': right}


# (α1, α2, α3): the paper's setting, and numbers in the order that the limit of Proposition 1 needs.
LIMITS = {
    'mean': {'paper': (1e4, 1e4, 1e4), 'strict': (1e8, 1e16, 1e16)},
    'max': {'paper': (1e-2, 1e4, 1e-2), 'strict': (1e-6, 1e16, 1e-12)},
    'attention': {'paper': (1e4, 1e4, 1e4), 'strict': (1e8, 1e16, 1e16)},
}


def precision(num_iters: int = 16, rho: float | None = None) -> tuple[Rows, dict[tuple, Tensor]]:
    """Errors ‖P − P_true‖₁ of the plan and max |f − f_true| of the pooled features, and the plans; ρ = α1 if None.

    The truth is mean, max or attention pooling. Plans are keyed by (pooling, setting, solver), the truth by
    (pooling, setting, 'truth').
    """
    x = random(1, 5, 10)
    # Attention pooling as the paper has it: a = softmax(wᵀ tanh(V X)).
    logits = random(1, 5, seed=1) @ torch.tanh(random(5, 5, seed=2) @ x[0])
    truths = {
        'mean': torch.full((5, 10), 1 / 50),
        'max': torch.nn.functional.one_hot(x[0].argmax(1), 10) / 5,
        'attention': logits.softmax(1).expand(5, 10) / 5,
    }
    rows, plans = [], {}
    for pooling, settings in LIMITS.items():
        truth = truths[pooling]
        problem = rot_problem(x, log_sample_prior=logits if pooling == 'attention' else None)
        expected = (x[0] * truth).sum(1) / truth.sum(1)
        for setting, alpha in settings.items():
            plans[pooling, setting, 'truth'] = truth
            for name in (PUBLISHED_SINKHORN, *SOLVERS):
                log_plan = plan_of(name, problem, alpha, rho=rho or alpha[0], num_iters=num_iters)
                plans[pooling, setting, name] = log_plan[0].exp()
                errors = {
                    'plan error': (log_plan[0].exp() - truth).abs().sum().item(),
                    'pooled error': (average(x, log_plan)[0] - expected).abs().max().item(),
                }
                rows.append({'pooling': pooling, 'setting': setting, 'solver': name} | errors)
    return rows, plans


def precision_settings() -> Rows:
    """The same errors of the Bregman ADMM solvers under the paper's weights, for other ρ and T."""
    return [
        {'solver': row['solver'], 'T': num_iters, 'ρ': rho or 'α1'} | row
        for num_iters, rho in itertools.product((4, 16), (None, 1.0))
        for row in precision(num_iters, rho)[0]
        if 'BADMM' in row['solver'] and row['setting'] == 'paper'
    ]


def runtime(repeats: int = 20, iteration_counts: Sequence[int] = (5, 10, 20, 50), sample_counts=(50, 200, 800)) -> Rows:
    """Median CPU time of a forward pass on one thread over that of BADMM-E at the panel's first point; D = 5, K = 5.

    The panels are the paper's: against T at N = 50 and against N at T = 50, with and without the structural term;
    without it Sinkhorn needs no outer loop and does T iterations. Candidates take turns within a repeat.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for structure in (0.1, 0.0):
            for against, points in (
                ('T', [(t, 50) for t in iteration_counts]),
                ('N', [(iteration_counts[-1], n) for n in sample_counts]),
            ):
                calls = {}
                for (num_iters, num_samples), name in itertools.product(points, RUNTIME_SOLVERS):
                    call = _forward(name, num_iters, num_samples, structure)
                    calls[name, num_iters if against == 'T' else num_samples] = call
                medians = _medians(calls, repeats)
                unit = medians['BADMM-E', points[0][0] if against == 'T' else points[0][1]]
                panel = {'α0': structure, 'against': against}
                for (name, value), median in medians.items():
                    rows.append(panel | {'value': value, 'solver': name, 'relative time': median / unit})
    finally:
        torch.set_num_threads(threads)
    return rows


RUNTIME_SOLVERS = ('Sinkhorn', 'BADMM-E', 'BADMM-Q', 'coupled BADMM-E')


def _forward(name: str, num_iters: int, num_samples: int, structure: float) -> Callable[[], Tensor]:
    problem = rot_problem(random(1, 5, num_samples))
    weights = {'smoothness': 1.0, 'feature_penalty': 1.0, 'sample_penalty': 1.0, 'structure': structure}
    if name == 'Sinkhorn':
        weights['proximal'] = 1.0 if structure else 0.0
        options = {'num_iters': 5, 'num_outer': num_iters} if structure else {'num_iters': num_iters}
        return lambda: log_plan_of(name, problem, weights, **options)
    return lambda: log_plan_of(name, problem, weights | {'step': 1.0}, num_iters=num_iters)


def _medians(calls: dict[tuple[str, int], Callable[[], Tensor]], repeats: int) -> dict[tuple[str, int], float]:
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    with torch.inference_mode():
        for call in calls.values():
            call()
        for _ in range(repeats):
            for key, call in calls.items():
                start = time.thread_time()
                call()
                times[key].append(time.thread_time() - start)
    return {key: statistics.median(values) for key, values in times.items()}


# Where we differ


def _small_problem() -> tuple[ROTProblem, tuple[float, float, float], Tensor]:
    """D = 64, N = 49 in float64, α = (0.3, 0.5, 0.5), and the optimal objective."""
    problem, alpha = rot_problem(random(2, 64, 49, dtype=torch.float64)), (0.3, 0.5, 0.5)
    optimum = objective_of(problem, plan_of('Sinkhorn', problem, alpha, rho=1.0, num_iters=400), alpha)
    return problem, alpha, optimum


def sinkhorn_update(counts: Sequence[int] = (1, 2, 4, 8, 16, 32)) -> Rows:
    """Objective minus optimum, and mass, after K steps of the printed and of the corrected update."""
    problem, alpha, optimum = _small_problem()
    rows = []
    for count, name in itertools.product(counts, (PUBLISHED_SINKHORN, 'Sinkhorn')):
        log_plan = plan_of(name, problem, alpha, rho=1.0, num_iters=count)
        excess = (objective_of(problem, log_plan, alpha) - optimum).max().item()
        mass = log_plan.exp().sum((1, 2)).mean().item()
        rows.append({'update': name, 'steps': count, 'objective − optimum': excess, 'mass': mass})
    return rows


def dual_steps(most_iters: int = 4096) -> Rows:
    """Relative excess over the optimal objective by iterations, ρ = 1: published, and coupled with both dual steps."""
    problem, alpha, optimum = _small_problem()
    weights = dict(zip(ALPHA, alpha, strict=True))
    linear = linear_dual_trail(problem, most_iters, step=1.0, **weights)
    rows = []
    count = 1
    while count <= most_iters:
        objectives = {'coupled, Z += ρ (P − S)': linear[count - 1]}
        # The other two stand still long before.
        if count <= 256:
            both = {'coupled, Z += ρ (log P − log S)': 'coupled BADMM-E', 'published': 'BADMM-E'}
            for variant, name in both.items():
                if count >= LEAST.get(name, 1):
                    log_plan = plan_of(name, problem, alpha, rho=1.0, num_iters=count)
                    objectives[variant] = objective_of(problem, log_plan, alpha)
        for name, value in objectives.items():
            excess = ((value - optimum) / optimum.abs()).max().item()
            rows.append({'variant': name, 'iterations': count, 'relative excess': excess})
        count *= 2
    return rows


def structural_factor() -> Rows:
    """How far the slope of the objective at Sinkhorn's fixed point is from constant, with either structural force."""
    problem = rot_problem(random(1, 4, 5, dtype=torch.float64))
    alpha1, alpha2, alpha3, alpha0 = 0.5, 0.6, 0.4, 0.3
    weights = {'smoothness': alpha1, 'feature_penalty': alpha2, 'sample_penalty': alpha3}
    weights |= {'structure': alpha0, 'proximal': 0.5}
    plan = log_plan_of('Sinkhorn', problem, weights, num_iters=20, num_outer=300).exp()
    convex = plan.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective_of(problem, convex.log(), (alpha1, alpha2, alpha3)).sum(), convex)
    force = structural_force(problem, plan)
    rows = []
    for factor, meaning in ((1, 'the paper’s bilinear form, ours'), (2, 'gradient of the quadratic form')):
        total = slope - factor * alpha0 * force
        spread = (total.max() - total.min()).item()
        rows.append({'force': f'{factor} α0 Σ1 P Σ2ᵀ', 'meaning': meaning, 'spread of slopes': spread})
    return rows


def channel_scale(scales: Sequence[float] = (0.01, 0.1, 1.0, 10.0, 100.0)) -> Rows:
    """Samples that a channel's weights effectively use, and output over mean, against the scale of the features.

    The same rectified normal set, D = 64, N = 49, at several scales; Sinkhorn at α = (4, 1, 1). exp(entropy) of a
    row-normalised plan is N for mean pooling, 1 for max pooling.
    """
    base = random(64, 49, dtype=torch.float64).clamp(min=0)
    x = torch.stack([scale * base for scale in scales])  # (B, D, N), a set per scale
    rows = []
    weights = {'smoothness': 4.0, 'feature_penalty': 1.0, 'sample_penalty': 1.0}
    for feature_scale in ('raw', 'rms', 'log'):
        layer = ROTSetPool({'feature_scale': feature_scale, **weights}).double()
        with torch.inference_mode():
            share = layer.solve_sets(x).softmax(2)
            inflation = layer.pool_sets(x) / x.mean(2)
        effective = torch.special.entr(share).sum(2).exp()
        for i, scale in enumerate(scales):
            means = {'effective samples': effective[i].mean().item(), 'output / mean': inflation[i].mean().item()}
            rows.append({'feature scale': feature_scale, 'scale': scale} | means)
    return rows
