"""First and second derivatives of every solver with respect to features, priors and every weight it reads."""

import pytest
import torch

from rotp_vision.core import rot_pool, rot_problem, solve
from tests.core.variants import VARIANTS, every, every_variant, random, varied_weights

FEW = {name: VARIANTS[name] for name in ('sinkhorn', 'badmm-e', 'badmm-q-coupled', 'sinkhorn covariance')}


def pooling(solver, mask=None, feature_scale='raw', **options):
    """A function of tensors that pools, and tensors for it: features, both priors, the norm's power, the weights."""
    weights = varied_weights(solver)

    def pooled(x, log_p0, log_q0, power, *values):
        problem = rot_problem(x, log_p0, log_q0, mask, feature_scale, power)
        return rot_pool(problem, dict(zip(weights, values, strict=True)), solver, **options)

    power = torch.tensor([0.7], dtype=torch.float64)
    inputs = [random(2, 3, 4), random(2, 3, seed=1), random(1, 4, seed=2), power, *weights.values()]
    return pooled, [value.requires_grad_() for value in inputs]


@every_variant
@pytest.mark.parametrize('masked', [False, True])
def test_gradients_equal_differences(solver, masked):
    mask = torch.tensor([[True, True, True, True], [True, False, True, False]]) if masked else None
    pooled, inputs = pooling(solver, mask)
    assert torch.autograd.gradcheck(pooled, inputs)
    # Everything that is read matters.
    assert all(grad.abs().max() > 1e-6 for grad in torch.autograd.grad(pooled(*inputs).sum(), inputs))


@every_variant
def test_gradients_of_the_plan_equal_differences(solver):
    weights = varied_weights(solver)

    def plan(x, *values):
        return solve(rot_problem(x), dict(zip(weights, values, strict=True)), solver).exp()

    inputs = [random(2, 3, 4), *weights.values()]
    assert torch.autograd.gradcheck(plan, [value.requires_grad_() for value in inputs])


@every(FEW)
@pytest.mark.parametrize('feature_scale', ['rms', 'log'])
def test_gradients_through_the_feature_scale_equal_differences(solver, feature_scale):
    pooled, inputs = pooling(solver, feature_scale=feature_scale)
    inputs[0] = random(2, 3, 4).exp().requires_grad_()  # away from the kink of log at zero
    assert torch.autograd.gradcheck(pooled, inputs)


@every(FEW)
def test_the_reference_has_second_derivatives(solver):
    pooled, inputs = pooling(solver, feature_scale='rms', backend='reference')
    assert torch.autograd.gradgradcheck(pooled, inputs)


@every({name: solver for name, solver in FEW.items() if name != 'sinkhorn'})
def test_a_formula_that_is_computed_again_has_second_derivatives(solver):
    pooled, inputs = pooling(solver, feature_scale='rms')
    assert torch.autograd.gradgradcheck(pooled, inputs)


def test_a_second_derivative_of_the_operator_is_refused():
    pooled, inputs = pooling(VARIANTS['sinkhorn'])
    grads = torch.autograd.grad(pooled(*inputs).sum(), inputs, create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match="no second derivative; construct it with backend='reference'"):
            torch.autograd.grad(grad.sum(), inputs, retain_graph=True)
