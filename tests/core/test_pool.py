"""Plan to pooled features."""

import pytest
import torch

from rotp_vision.core import VIEW_FLOOR, pool, rot_pool, rot_problem, solve
from tests.core.variants import VARIANTS, random, varied_weights


def test_equals_row_normalised_plan():
    """The printed formula, eq. "uotp": (X ⊙ diag⁻¹(P1) P) 1."""
    x, plan = random(2, 3, 4), random(2, 3, 4, seed=1).exp()
    for b in range(2):
        expected = (x[b] * (torch.diag(1 / plan[b].sum(1)) @ plan[b])).sum(1)
        torch.testing.assert_close(pool(x, plan.log())[b], expected, rtol=1e-12, atol=1e-12)


def test_mass_of_a_row_does_not_matter():
    x, log_plan, shift = random(2, 3, 4), random(2, 3, 4, seed=1), 50 * random(2, 3, 1, seed=2)
    torch.testing.assert_close(pool(x, log_plan + shift), pool(x, log_plan), rtol=1e-12, atol=1e-12)


def test_gradient():
    x, log_plan = random(2, 3, 4).requires_grad_(), random(2, 3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(pool, (x, log_plan))


def test_plan_may_see_other_features_than_are_averaged():
    x, solver = random(2, 3, 4).exp(), VARIANTS['badmm-e']
    weights = varied_weights(2, solver)
    plan = solve(rot_problem((x + VIEW_FLOOR).log()), weights, solver)
    torch.testing.assert_close(rot_pool(rot_problem(x, view='log'), weights, solver), pool(x, plan))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_returns_the_dtype_of_the_features(dtype):
    assert pool(torch.ones(1, 2, 3, dtype=dtype), torch.zeros(1, 2, 3)).dtype == dtype
