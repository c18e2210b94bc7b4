"""Bregman ADMM: as published against the paper's own equations; coupled against the optimum of the objective."""

import ot
import pytest
import torch

from rotp_vision.core import BregmanADMM, make_solver, objective, rot_problem, solve
from tests.core import oracle
from tests.core.variants import constant, random, varied_problem

REGULARIZERS = ['entropic', 'quadratic']
every_regularizer = pytest.mark.parametrize('regularizer', REGULARIZERS)


def solved(problem, num_iters, regularizer, alpha, rho, *, coupled=False):
    """The log plan, with (α1, α2, α3) and ρ the same in every iteration."""
    penalties = {'feature_penalty': alpha[1], 'sample_penalty': alpha[2]} if coupled else {}
    weights = constant(smoothness=alpha[0], step=rho, **penalties)
    return solve(problem, weights, BregmanADMM(regularizer, coupled, num_iters))


def entropic_optimum(problem, alpha):
    weights = constant(smoothness=alpha[0], feature_penalty=alpha[1], sample_penalty=alpha[2])
    return objective_of(problem, solve(problem, weights, make_solver('sinkhorn', num_iters=400)), alpha, 'entropic')


def objective_of(problem, log_plan, alpha, regularizer):
    return objective(
        problem,
        log_plan,
        smoothness=alpha[0],
        feature_penalty=alpha[1],
        sample_penalty=alpha[2],
        regularizer=regularizer,
    )


# As published


def oracle_inputs(num_iters, alpha0):
    """Weights that differ in every iteration: [(α0, α1, α2, α3)] and [ρ]."""
    values = random(5, num_iters, seed=7).exp()
    alphas = [(alpha0 * values[0, t], values[1, t], values[2, t], values[3, t]) for t in range(num_iters)]
    return alphas, list(values[4])


@every_regularizer
@pytest.mark.parametrize('similarity', [None, 'covariance', 'cosine'])
@pytest.mark.parametrize('num_iters', [1, 2, 5])
def test_published_equals_transcription(regularizer, similarity, num_iters):
    problem = varied_problem(2, 4, 5)
    alphas, rhos = oracle_inputs(num_iters, 0.0 if similarity is None else 0.5)
    alpha0, alpha1, _, _ = map(torch.stack, zip(*alphas, strict=True))
    weights = {'smoothness': alpha1, 'step': torch.stack(rhos)} | ({} if similarity is None else {'structure': alpha0})
    log_plan = solve(problem, weights, BregmanADMM(regularizer, False, num_iters, similarity is not None, similarity))
    for b in range(2):
        expected, log_mu, log_eta = oracle.published_badmm(
            problem.features[b],
            problem.log_feature_prior[b],
            problem.log_sample_prior[b],
            alphas,
            rhos,
            regularizer,
            similarity or 'covariance',
        )
        torch.testing.assert_close(log_plan[b].exp(), expected.exp(), rtol=1e-10, atol=0)
        torch.testing.assert_close(log_mu, problem.log_feature_prior[b], rtol=1e-12, atol=0)
        torch.testing.assert_close(log_eta, problem.log_sample_prior[b], rtol=1e-12, atol=0)


@every_regularizer
def test_penalties_are_dead_in_the_published_algorithm(regularizer):
    """In the paper's own equations, not only in ours, the slope in α2 and α3 is nil: it is a balanced solver."""
    problem = varied_problem(1, 4, 5)
    alphas, rhos = oracle_inputs(5, 0.5)
    penalties = [torch.stack([a[i] for a in alphas]).requires_grad_() for i in (2, 3)]
    smoothness = torch.stack([a[1] for a in alphas]).requires_grad_()
    tracked = [(a[0], smoothness[t], penalties[0][t], penalties[1][t]) for t, a in enumerate(alphas)]
    x = problem.features[0]
    log_plan, _, _ = oracle.published_badmm(
        x, problem.log_feature_prior[0], problem.log_sample_prior[0], tracked, rhos, regularizer
    )
    pooled = (x * log_plan.softmax(1)).sum()
    alive, *dead = torch.autograd.grad(pooled, [smoothness, *penalties])
    assert alive.abs().max() > 1e-3
    for slope in dead:
        assert slope.abs().max() < 1e-14


def test_published_entropic_limit_is_balanced_transport():
    """2000 iterations at α1 = ρ = 1 leave 1e-10: equal to POT's balanced plan at that α1, whose marginals are exact.

    The dual step is ρ (P - S), so an entry of the plan p gains at the rate of p; the plan's smallest entry here is
    about 1/100.
    """
    problem = rot_problem(
        0.5 * random(1, 3, 4),
        log_feature_prior=0.3 * random(1, 3, seed=1),
        log_sample_prior=0.3 * random(1, 4, seed=2),
    )
    p0, q0 = problem.log_feature_prior[0].exp(), problem.log_sample_prior[0].exp()
    plan = solved(problem, 2000, 'entropic', (1.0, 1.0, 1.0), 1.0)[0].exp()
    torch.testing.assert_close(plan.sum(1), p0, rtol=1e-10, atol=0)
    torch.testing.assert_close(plan.sum(0), q0, rtol=1e-10, atol=0)
    balanced = ot.sinkhorn(p0.numpy(), q0.numpy(), -problem.features[0].numpy(), reg=1.0, stopThr=1e-14)
    torch.testing.assert_close(plan, torch.from_numpy(balanced), rtol=1e-8, atol=0)


def test_published_quadratic_limit_is_balanced_transport():
    """On the balanced polytope the slope of <-X, P> + α1 ||P||² is that of the marginals: u_d + v_n."""
    problem = rot_problem(0.2 * random(1, 3, 4), log_sample_prior=0.3 * random(1, 4, seed=2))
    plan = solved(problem, 3000, 'quadratic', (2.0, 1.0, 1.0), 1.0)[0].exp()
    torch.testing.assert_close(plan.sum(1), problem.log_feature_prior[0].exp(), rtol=1e-8, atol=0)
    torch.testing.assert_close(plan.sum(0), problem.log_sample_prior[0].exp(), rtol=1e-8, atol=0)
    assert plan.min() > 1e-3  # inside, so that stationarity is an equality
    slope = -problem.features[0] + 2 * 2.0 * plan
    slope = slope - slope.mean(0, keepdim=True)
    assert (slope - slope.mean(1, keepdim=True)).abs().max() < 1e-8


# Coupled


@pytest.mark.parametrize(
    ('alpha', 'rho', 'within_one_percent'),
    [((0.3, 0.5, 0.5), 1.0, 8), ((0.1, 10.0, 0.01), 1.0, 16), ((5.0, 100.0, 100.0), 10.0, 3)],
)
def test_coupled_entropic_falls_to_the_sinkhorn_optimum(alpha, rho, within_one_percent):
    """D = 64, N = 49: within 1 % of the optimal objective from 8, 16 and 3 iterations on, and on it after 512."""
    problem = rot_problem(random(2, 64, 49))
    optimum = entropic_optimum(problem, alpha)

    def excess(num_iters):
        log_plan = solved(problem, num_iters, 'entropic', alpha, rho, coupled=True)
        return (objective_of(problem, log_plan, alpha, 'entropic') - optimum) / optimum.abs()

    counts = torch.tensor([3, 4, 8, 16])
    trail = torch.stack([excess(t) for t in counts.tolist()])  # (4, B)
    assert (trail > 0).all()
    assert (trail.diff(dim=0) < 0).all()
    assert torch.equal(trail < 0.01, (counts >= within_one_percent).unsqueeze(1).expand_as(trail))
    torch.testing.assert_close(excess(512), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-8)


def test_published_does_not_reach_the_optimum():
    """What `coupled` is for: the balanced solver stays above the optimum of the objective with weak penalties."""
    alpha = (0.3, 0.5, 0.5)
    problem = rot_problem(random(1, 3, 4))
    optimum = entropic_optimum(problem, alpha)
    published = objective_of(problem, solved(problem, 2000, 'entropic', alpha, 1.0), alpha, 'entropic')
    assert published - optimum > 0.01 * optimum.abs()


def mirror_descent(problem, alpha, regularizer, num_steps):
    """The optimum by a general convex solver: multiplicative updates along the slope, mass one.

    Relative to the entropy the objective is smooth with constant 2 α1 (as P <= 1) + α2 + α3, hence the step.
    """
    x, p0, q0 = problem.features[0], problem.log_feature_prior[0].exp(), problem.log_sample_prior[0].exp()
    log_plan = p0.log()[:, None] + q0.log()[None, :]
    step = 1 / (2 * alpha[0] + alpha[1] + alpha[2])
    for _ in range(num_steps):
        log_plan = log_plan - step * oracle.objective_gradient(x, log_plan.exp(), p0, q0, alpha, regularizer)
        log_plan = log_plan - log_plan.flatten().logsumexp(0)
    # Frank-Wolfe's certificate: the excess over the optimum of a convex objective on the simplex is at most this.
    slope = oracle.objective_gradient(x, log_plan.exp(), p0, q0, alpha, regularizer)
    gap = (log_plan.exp() * slope).sum() - slope.min()
    return log_plan, gap


@pytest.mark.parametrize(('alpha', 'rho'), [((0.3, 0.5, 0.5), 0.3), ((1.0, 1.0, 2.0), 1.0), ((10.0, 0.5, 0.5), 1.0)])
def test_coupled_quadratic_falls_to_the_optimum(alpha, rho):
    """D = 4, N = 5: within 1 % after 16 iterations, on the optimum after 512."""
    problem = varied_problem(1, 4, 5)
    best, gap = mirror_descent(problem, alpha, 'quadratic', 6000)
    assert gap < 1e-8
    optimum = objective_of(problem, best.unsqueeze(0), alpha, 'quadratic')

    def excess(num_iters):
        log_plan = solved(problem, num_iters, 'quadratic', alpha, rho, coupled=True)
        return (objective_of(problem, log_plan, alpha, 'quadratic') - optimum) / optimum.abs()

    trail = torch.cat([excess(t) for t in (3, 4, 16)])
    assert (trail.diff() < 0).all()
    assert trail[-1] < 0.01
    assert excess(512).abs() < 1e-7


def test_coupled_quadratic_wants_a_step_above_the_smoothness_of_the_plan():
    """Its quadratic term is linearised, so it needs about ρ > α1 max P: α1 = 10 on a tiny set fails at ρ = 0.1."""
    alpha, problem = (10.0, 0.5, 0.5), varied_problem(1, 4, 5)
    best, _ = mirror_descent(problem, alpha, 'quadratic', 6000)
    optimum = objective_of(problem, best.unsqueeze(0), alpha, 'quadratic')
    excess = {}
    for rho in (0.1, 1.0):
        log_plan = solved(problem, 256, 'quadratic', alpha, rho, coupled=True)
        assert not log_plan.isnan().any()
        excess[rho] = (objective_of(problem, log_plan, alpha, 'quadratic') - optimum).item()
    assert excess[0.1] > 1
    assert excess[1.0] < 1e-3


@every_regularizer
def test_coupled_penalties_act(regularizer):
    """Stronger penalties bring the marginals nearer to the priors; no penalty leaves them far."""
    problem = varied_problem(1, 4, 5)
    distance = []
    for penalty in (0.1, 1.0, 10.0):
        plan = solved(problem, 64, regularizer, (0.5, penalty, penalty), 1.0, coupled=True)[0].exp()
        distance.append(
            (
                (plan.sum(1) - problem.log_feature_prior[0].exp()).abs().sum(),
                (plan.sum(0) - problem.log_sample_prior[0].exp()).abs().sum(),
            )
        )
    distance = torch.tensor(distance)
    assert (distance.diff(dim=0) < 0).all()
    assert (distance[-1] < 0.1).all()
    assert (distance[0] > 0.2).all()
