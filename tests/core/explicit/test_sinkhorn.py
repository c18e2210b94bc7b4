"""The coefficients of Sinkhorn scaling."""

import torch

from rotp_vision.core import StepWeights
from rotp_vision.core.explicit.sinkhorn import _Kinds, sinkhorn_coefficients


def weights(**others) -> StepWeights:
    smoothness, feature_penalty, sample_penalty = torch.rand(3, 4, dtype=torch.float64).add(0.3).unbind()
    return StepWeights(smoothness, feature_penalty, sample_penalty, **others)


def test_scale_is_what_x_is_multiplied_with_after_all_modules():
    """A module adds X / α1' to τ / α1' of what there was: Σ_j (Π_{j < i ≤ k} τ_i / α1'_i) / α1'_j."""
    given = weights(proximal=torch.rand(4, dtype=torch.float64))
    kinds = _Kinds(*sinkhorn_coefficients(given))
    total = given.smoothness + given.proximal
    torch.testing.assert_close(kinds.keep, given.proximal / total)
    for k in range(4):
        terms = [kinds.keep[j + 1 : k + 1].prod() / total[j] for j in range(k + 1)]
        torch.testing.assert_close(kinds.scale[k], torch.stack(terms).sum())
    torch.testing.assert_close(kinds.feature_rate, given.feature_penalty / (total + given.feature_penalty))
    torch.testing.assert_close(kinds.sample_rate, given.sample_penalty / (total + given.sample_penalty))


def test_modules_that_the_last_does_not_see_are_left_out():
    given = weights()
    last = StepWeights(given.smoothness[-1:], given.feature_penalty[-1:], given.sample_penalty[-1:])
    assert torch.equal(sinkhorn_coefficients(given), sinkhorn_coefficients(last))
    structural = sinkhorn_coefficients(given._replace(structure=torch.ones(4, dtype=torch.float64)))
    assert structural.shape == (6, 4)
