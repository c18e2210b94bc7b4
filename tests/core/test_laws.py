"""What holds for every solver whatever the numbers: invariances and the poolings that are special cases."""

import pytest
import torch

from rotp_vision.core import make_solver, rot_pool, rot_problem, solve
from tests.core.variants import (
    PLAIN,
    PUBLISHED,
    VARIANTS,
    constant,
    every,
    every_variant,
    random,
    varied_problem,
    varied_weights,
)

# Covariances are centred, and the mass is fixed; cosine similarity does feel a constant.
SHIFT_INVARIANT = {name: solver for name, solver in VARIANTS.items() if 'cosine' not in name}


def assert_equal(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@every_variant
def test_order_of_the_samples_does_not_matter(solver):
    weights = varied_weights(solver)
    x, log_p0, log_q0, *_ = varied_problem(2, 4, 7)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    plans, pooled = [], []
    for index in (torch.arange(7), order):
        problem = rot_problem(x[..., index], log_feature_prior=log_p0, log_sample_prior=log_q0[:, index])
        plans.append(solve(problem, weights, solver))
        pooled.append(rot_pool(problem, weights, solver))
    assert_equal(plans[1], plans[0][..., order])
    assert_equal(pooled[1], pooled[0])


@every_variant
@pytest.mark.parametrize('padding', [0.0, 1e30, float('nan'), float('inf'), float('-inf')])
def test_padding_does_not_matter(solver, padding):
    """A padded set gives what the unpadded one gives, and nothing flows back to the padding."""
    weights = varied_weights(solver)
    x, log_p0, log_q0, *_ = varied_problem(2, 4, 7)
    mask = torch.tensor([[True, True, False, True, False, True, True], [False, False, True, True, False, True, False]])
    padded = x.masked_fill(~mask.unsqueeze(1), padding).requires_grad_()
    log_q0 = log_q0.detach().masked_fill(~mask, padding).requires_grad_()
    problem = rot_problem(padded, log_feature_prior=log_p0, log_sample_prior=log_q0, mask=mask)
    log_plan, pooled = solve(problem, weights, solver), rot_pool(problem, weights, solver)
    towards = random(2, 4, seed=9)
    grad_x, grad_q0 = torch.autograd.grad((pooled * towards).sum(), [padded, log_q0])
    assert (log_plan[~mask.unsqueeze(1).expand_as(log_plan)] == -torch.inf).all()
    assert (grad_x[~mask.unsqueeze(1).expand_as(grad_x)] == 0).all()
    assert (grad_q0[~mask] == 0).all()
    for b in range(2):
        alone = x[b : b + 1, :, mask[b]].clone().requires_grad_()
        small = rot_problem(
            alone, log_feature_prior=log_p0[b : b + 1], log_sample_prior=log_q0.detach()[b : b + 1, mask[b]]
        )
        expected = rot_pool(small, weights, solver)
        assert_equal(log_plan[b : b + 1, :, mask[b]], solve(small, weights, solver))
        assert_equal(pooled[b : b + 1], expected)
        (grad,) = torch.autograd.grad((expected * towards[b]).sum(), alone)
        assert_equal(grad_x[b : b + 1, :, mask[b]], grad)


@every_variant
def test_a_full_mask_changes_nothing(solver):
    weights = varied_weights(solver)
    x = random(2, 4, 5)
    full = rot_problem(x, mask=torch.ones(2, 5, dtype=torch.bool))
    assert_equal(solve(full, weights, solver), solve(rot_problem(x), weights, solver))


@every_variant
def test_sets_of_a_batch_do_not_see_each_other(solver):
    weights = varied_weights(solver)
    x, log_p0, log_q0, *_ = varied_problem(3, 4, 5)
    x[1] *= 1e3  # a neighbour that would be felt
    together = solve(rot_problem(x, log_feature_prior=log_p0, log_sample_prior=log_q0), weights, solver)
    for b in (0, 2):
        one = slice(b, b + 1)
        alone = rot_problem(x[one], log_feature_prior=log_p0[one], log_sample_prior=log_q0[one])
        assert_equal(together[one], solve(alone, weights, solver))


@every_variant
def test_plan_has_mass_one(solver):
    weights = varied_weights(solver)
    mass = solve(varied_problem(2, 4, 5), weights, solver).exp().sum((1, 2))
    assert_equal(mass, torch.ones(2, dtype=torch.float64))


@every(SHIFT_INVARIANT)
def test_one_constant_added_to_all_features_shifts_the_output_alone(solver):
    weights = varied_weights(solver)
    x = random(2, 4, 5)
    shifted = x + 7.0
    assert_equal(solve(rot_problem(shifted), weights, solver), solve(rot_problem(x), weights, solver), 1e-11)
    assert_equal(rot_pool(rot_problem(shifted), weights, solver), rot_pool(rot_problem(x), weights, solver) + 7.0)


@every(PLAIN)
def test_a_constant_per_feature_cancels_where_the_rows_are_pinned(solver):
    """The published Bregman ADMM pins the rows of the plan to p0; where penalties act, a larger feature gets mass."""
    weights, x = varied_weights(solver), random(2, 4, 5)
    change = solve(rot_problem(x + random(2, 4, 1, seed=3)), weights, solver) - solve(rot_problem(x), weights, solver)
    if solver in PUBLISHED.values():
        assert_equal(change, torch.zeros_like(change))
    else:
        assert change.abs().max() > 0.1


# Poolings that are special cases


def sinkhorn_pooled(x, alpha, log_sample_prior=None):
    weights = constant(smoothness=alpha[0], feature_penalty=alpha[1], sample_penalty=alpha[2])
    return rot_pool(rot_problem(x, log_sample_prior=log_sample_prior), weights, make_solver('sinkhorn', num_iters=8))


@pytest.mark.parametrize('prior', ['uniform', 'attention'])
def test_sinkhorn_becomes_mean_or_attention_pooling(prior):
    """Strict marginals and α1 = 1e4 err by cov_q0(x_d, x_d - x̄) / α1, x̄ the mean feature, to second order in 1 / α1."""
    x = random(2, 6, 9)
    logits = random(2, 9, seed=1) if prior == 'attention' else torch.zeros(2, 9, dtype=torch.float64)
    q0 = logits.softmax(1).unsqueeze(1)
    mean = (x * q0).sum(2)
    covariance = (x * (x - x.mean(1, keepdim=True)) * q0).sum(2) - mean * (mean - mean.mean(1, keepdim=True))
    error = sinkhorn_pooled(x, (1e4, 1e12, 1e12), logits) - mean
    assert (error.abs() < 1e-3).all()
    assert_equal(error, covariance / 1e4, 1e-7)


def test_sinkhorn_becomes_max_pooling():
    """α1 = 1e-3 with free columns errs by at most α1 log N: the gap of a softmax at temperature α1."""
    x = random(2, 6, 9)
    error = x.amax(2) - sinkhorn_pooled(x, (1e-3, 1e4, 1e-9))
    assert (error > -1e-12).all()
    assert (error < 1e-3 * torch.tensor(9.0).log() + 1e-5).all()


def test_sinkhorn_of_two_pooled_sets_becomes_mixed_pooling():
    """ω mean + (1 - ω) max: the two as the samples of a set with sample prior (ω, 1 - ω), within 1e-2."""
    x, omega = random(2, 6, 9), 0.3
    both = torch.stack([sinkhorn_pooled(x, (1e4, 1e10, 1e10)), sinkhorn_pooled(x, (1e-3, 1e4, 1e-9))], 2)
    mixed = sinkhorn_pooled(both, (1e4, 1e10, 1e10), torch.tensor([[omega, 1 - omega]], dtype=torch.float64).log())
    assert_equal(mixed, omega * x.mean(2) + (1 - omega) * x.amax(2), 1e-2)


@pytest.mark.parametrize('name', PUBLISHED)
def test_one_published_iteration_is_softmax_pooling(name):
    x, rho = random(2, 6, 9), 0.7
    weights = constant(smoothness=0.5, step=rho)
    pooled = rot_pool(rot_problem(x), weights, make_solver(name, num_iters=1))
    assert_equal(pooled, (x * (x / rho).softmax(2)).sum(2))


@pytest.mark.parametrize('name', PUBLISHED)
def test_one_sharp_published_iteration_is_max_pooling(name):
    """ρ = 1e-3 errs by at most ρ log N."""
    x = random(2, 6, 9)
    weights = constant(smoothness=1.0, step=1e-3)
    error = x.amax(2) - rot_pool(rot_problem(x), weights, make_solver(name, num_iters=1))
    assert (error >= 0).all()
    assert (error < 1e-3 * torch.tensor(9.0).log()).all()


@every(PLAIN)
@pytest.mark.parametrize('prior', ['uniform', 'attention'])
def test_every_solver_becomes_mean_or_attention_pooling(solver, prior):
    """Temperature 1e5 errs by less than 1e-3, and 1e6 by a tenth of that."""
    x = random(2, 6, 9)
    logits = random(2, 9, seed=1) if prior == 'attention' else torch.zeros(2, 9, dtype=torch.float64)
    expected = (x * logits.softmax(1).unsqueeze(1)).sum(2)
    errors = []
    for temperature in (1e5, 1e6):
        values = {'smoothness': temperature, 'feature_penalty': 1e14, 'sample_penalty': 1e14, 'proximal': 1.0}
        if 'step' in solver.starts('mean', 1.0):  # then the temperature is ρ, not α1
            values |= {'smoothness': 1.0, 'step': temperature}
        weights = constant(**{name: values[name] for name in solver.starts('mean', 1.0)})
        errors.append(rot_pool(rot_problem(x, log_sample_prior=logits), weights, solver) - expected)
    assert errors[0].abs().max() < 1e-3
    assert_equal(errors[1], errors[0] / 10, 1e-7)
