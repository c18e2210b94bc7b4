"""The front door and the objective."""

import pytest
import torch

from rotp_vision.core import objective, rot_problem
from tests.core import oracle
from tests.core.variants import random, varied_problem


def test_priors_are_normalised_and_uniform_by_default():
    x = random(2, 3, 4)
    problem = rot_problem(x)
    torch.testing.assert_close(problem.log_feature_prior.exp(), torch.full((1, 3), 1 / 3, dtype=x.dtype))
    torch.testing.assert_close(problem.log_sample_prior.exp(), torch.full((1, 4), 1 / 4, dtype=x.dtype))
    logits = random(2, 4, seed=1)
    problem = rot_problem(x, log_sample_prior=logits)
    torch.testing.assert_close(problem.log_sample_prior.exp(), logits.softmax(1))


def test_mask_takes_mass_from_missing_samples_only():
    logits, mask = random(2, 4), torch.tensor([[True, False, True, True], [False, True, False, False]])
    problem = rot_problem(random(2, 3, 4), log_sample_prior=logits, mask=mask)
    for b in range(2):
        torch.testing.assert_close(problem.log_sample_prior[b, mask[b]].exp(), logits[b, mask[b]].softmax(0))
    assert problem.mask is not None
    assert torch.equal(problem.features == 0, ~mask.unsqueeze(1).expand(2, 3, 4))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_computes_in_float32_or_wider(dtype):
    problem = rot_problem(torch.ones(1, 2, 3, dtype=dtype), log_sample_prior=torch.zeros(1, 3, dtype=torch.float16))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert problem.features.dtype == dtype
    assert {problem.scaled_features().dtype, problem.log_feature_prior.dtype, problem.log_sample_prior.dtype} == {
        expected
    }


def test_channels_last_maps_are_not_copied():
    maps = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert rot_problem(maps.flatten(2)).features.data_ptr() == maps.data_ptr()


@pytest.mark.parametrize('regularizer', ['entropic', 'quadratic'])
@pytest.mark.parametrize('alpha0', [0.0, 0.7])
@pytest.mark.parametrize('masked', [False, True])
def test_objective_equals_transcription(regularizer, alpha0, masked):
    problem = varied_problem(2, 3, 5)
    mask = (
        torch.tensor([[True] * 5, [True, False, True, False, True]]) if masked else torch.ones(2, 5, dtype=torch.bool)
    )
    if masked:
        problem = rot_problem(
            problem.features,
            log_feature_prior=problem.log_feature_prior,
            log_sample_prior=problem.log_sample_prior,
            mask=mask,
        )
    # Not of mass one: the objective is that of any positive plan.
    log_plan = random(2, 3, 5, seed=5).masked_fill(~mask.unsqueeze(1), -torch.inf)
    values = objective(
        problem,
        log_plan,
        smoothness=0.3,
        feature_penalty=0.5,
        sample_penalty=0.4,
        structure=alpha0 or None,
        regularizer=regularizer,
    )
    expected = [
        oracle.objective(
            problem.features[b][:, mask[b]],
            log_plan[b][:, mask[b]].exp(),
            problem.log_feature_prior[b].exp(),
            problem.log_sample_prior[b, mask[b]].exp(),
            (alpha0, 0.3, 0.5, 0.4),
            regularizer,
        )
        for b in range(2)
    ]
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_objective_is_finite_where_the_plan_has_no_mass():
    log_plan = torch.tensor([[[0.0, -torch.inf], [-torch.inf, -torch.inf]]])
    problem = rot_problem(torch.tensor([[[2.0, 1.0], [0.0, 0.0]]]))
    value = objective(problem, log_plan, smoothness=0.5, feature_penalty=1.0, sample_penalty=1.0)
    # <-X, P> = -2, R = -1, and both KL are log 2.
    torch.testing.assert_close(value, -2.0 - 0.5 + 2 * torch.tensor([2.0]).log())
