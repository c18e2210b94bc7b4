"""Sinkhorn: optimal for the stated objective, equal to another library, equal to the corrected Algorithm 1."""

import ot
import pytest
import torch

from rotp_vision.core import make_solver, objective, solve
from tests.core import oracle
from tests.core.variants import VARIANTS, constant, varied_problem, varied_weights

# (α1, α2, α3); the last contracts slowest, by (100/105)² = 0.907 an iteration, and 400 leave 1e-17.
GRID = [(0.3, 0.5, 0.5), (0.1, 10.0, 0.01), (5.0, 100.0, 100.0)]
ENOUGH = 400


def solved(problem, alpha, num_iters=ENOUGH):
    weights = constant(smoothness=alpha[0], feature_penalty=alpha[1], sample_penalty=alpha[2])
    return solve(problem, weights, make_solver('sinkhorn', num_iters=num_iters))


@pytest.mark.parametrize('alpha', GRID)
def test_slope_of_the_objective_is_constant_on_the_simplex(alpha):
    problem = varied_problem(2, 6, 5)
    log_plan = solved(problem, alpha)
    torch.testing.assert_close(log_plan.exp().sum((1, 2)), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-12)

    plan = log_plan.exp().requires_grad_()
    value = objective(problem, plan.log(), smoothness=alpha[0], feature_penalty=alpha[1], sample_penalty=alpha[2])
    (by_autograd,) = torch.autograd.grad(value.sum(), plan)
    for b in range(2):
        by_hand = oracle.objective_gradient(
            problem.features[b],
            log_plan[b].exp(),
            problem.log_feature_prior[b].exp(),
            problem.log_sample_prior[b].exp(),
            alpha,
            'entropic',
        )
        for slope in (by_hand, by_autograd[b]):
            assert slope.max() - slope.min() < 1e-8


@pytest.mark.filterwarnings('ignore:If reg_type = entropy')
@pytest.mark.parametrize('alpha', GRID)
def test_equals_pot(alpha):
    """POT's unconstrained optimum, scaled to mass one, is ours: scaling shifts every slope by the same constant."""
    problem = varied_problem(2, 6, 5)
    log_plan = solved(problem, alpha)
    for b in range(2):
        plan = ot.unbalanced.sinkhorn_unbalanced(
            problem.log_feature_prior[b].exp().numpy(),
            problem.log_sample_prior[b].exp().numpy(),
            -problem.features[b].numpy(),
            reg=alpha[0],
            reg_m=alpha[1:],
            reg_type='entropy',  # <P, log P - 1>, not KL to the product of the priors
            numItermax=5000,
            stopThr=1e-14,
        )
        torch.testing.assert_close(log_plan[b].exp(), torch.from_numpy(plan / plan.sum()), rtol=1e-6, atol=0)


def test_four_iterations_are_within_1e_minus_4_of_the_optimal_objective():
    """At (0.3, 0.5, 0.5), D = 64, N = 49: the published update is off by more than 1 there."""
    problem = varied_problem(2, 64, 49)
    value = {
        k: objective(problem, solved(problem, GRID[0], k), smoothness=0.3, feature_penalty=0.5, sample_penalty=0.5)
        for k in (4, ENOUGH)
    }
    excess = value[4] - value[ENOUGH]
    assert (excess > 0).all()
    assert (excess < 1e-4).all()


@pytest.mark.parametrize('similarity', ['covariance', 'cosine'])
@pytest.mark.parametrize('shape', [(6, 4), (3, 5)])
def test_outer_steps_equal_corrected_algorithm_1(similarity, shape):
    problem, solver = varied_problem(2, *shape), VARIANTS[f'sinkhorn {similarity}']
    weights = varied_weights(solver)
    log_plan = solve(problem, weights, solver)
    alphas = [weights[name].tolist() for name in ('structure', 'smoothness', 'feature_penalty', 'sample_penalty')]
    for b in range(2):
        plan = oracle.proximal_sinkhorn(
            problem.features[b],
            problem.log_feature_prior[b],
            problem.log_sample_prior[b],
            list(zip(*alphas, strict=True)),
            weights['proximal'].tolist(),
            solver.num_iters,
            similarity,
        )
        torch.testing.assert_close(log_plan[b].exp(), plan, rtol=1e-10, atol=0)


def test_outer_steps_reach_the_optimum_without_structure():
    """Without α0 the proximal loop has the same optimum; the proximal term only slows it down."""
    problem = varied_problem(1, 4, 5)
    weights = constant(smoothness=0.3, feature_penalty=0.5, sample_penalty=0.5, proximal=0.5)
    log_plan = solve(problem, weights, make_solver('sinkhorn', num_iters=20, num_outer=60))
    torch.testing.assert_close(log_plan, solved(problem, GRID[0]), rtol=0, atol=1e-8)


def test_structure_at_the_fixed_point_is_stationary():
    """Where the outer loop stands still, -X - α0 Σ1 P Σ2ᵀ + α1 log P + ... is constant: the proximal term is gone."""
    problem = varied_problem(1, 4, 5)
    weights = constant(smoothness=0.5, feature_penalty=0.6, sample_penalty=0.4, structure=0.3, proximal=0.5)
    plan = solve(problem, weights, make_solver('sinkhorn', num_iters=20, num_outer=300, structure=True))[0].exp()
    x, p0, q0 = problem.features[0], problem.log_feature_prior[0].exp(), problem.log_sample_prior[0].exp()
    slope = oracle.objective_gradient(x, plan, p0, q0, (0.5, 0.6, 0.4), 'entropic')
    slope = slope - 0.3 * oracle.structural_force(x, plan)
    assert slope.max() - slope.min() < 1e-8
