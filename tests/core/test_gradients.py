"""gradcheck of every solver with respect to features, priors and every weight it reads."""

import pytest
import torch

from rotp_vision.core import StepWeights, rot_pool, rot_problem, solve
from tests.core.variants import every_structure, every_variant, random, varied_weights, with_similarity


@every_variant
@every_structure
@pytest.mark.parametrize('masked', [False, True])
def test_gradcheck(solver, similarity, masked):
    """Three modules, so that every dual is made, added to and read."""
    solver = with_similarity(solver, similarity)
    weights = varied_weights(3, solver, structure=similarity is not None)._asdict()
    read = [name for name, value in weights.items() if value is not None]
    mask = torch.tensor([[True, True, True, True], [True, False, True, False]]) if masked else None

    def plan_and_pooled(x, log_p0, log_q0, *values):
        problem = rot_problem(x, log_feature_prior=log_p0, log_sample_prior=log_q0, mask=mask)
        tensors = StepWeights(**dict(zip(read, values, strict=True)))
        return solve(problem, tensors, solver).exp(), rot_pool(problem, tensors, solver)

    inputs = [random(2, 3, 4), random(2, 3, seed=1), random(2, 4, seed=2), *(weights[name].clone() for name in read)]
    inputs = [value.requires_grad_() for value in inputs]
    assert torch.autograd.gradcheck(plan_and_pooled, inputs)
    # Not vacuous: everything that is read matters.
    grads = torch.autograd.grad(plan_and_pooled(*inputs)[1].sum(), inputs)
    assert all(grad.abs().max() > 1e-6 for grad in grads)
