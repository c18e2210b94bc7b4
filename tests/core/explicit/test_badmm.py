"""The coefficients of the published Bregman ADMM."""

import pytest
import torch

from rotp_vision.core import StepWeights
from rotp_vision.core.explicit.badmm import _Kinds, badmm_coefficients


@pytest.mark.parametrize('quadratic', [True, False])
def test_coefficients_are_those_of_the_logits(quadratic):
    """β is what X is multiplied with in the P-step once Z has cancelled: Σ_j (Π_{j ≤ i < k} κ_i) / ρ_j."""
    smoothness, step, structure = torch.rand(3, 4, dtype=torch.float64).add(0.3).unbind()
    kinds = _Kinds(*badmm_coefficients(StepWeights(smoothness, structure=structure, step=step), quadratic))
    expected = torch.ones(4, dtype=torch.float64) if quadratic else step / (smoothness + step)
    torch.testing.assert_close(kinds.kappa, expected)
    for k in range(4):
        terms = [expected[j:k].prod() / step[j] for j in range(k + 1)]
        torch.testing.assert_close(kinds.beta[k], torch.stack(terms).sum())
    assert torch.equal(kinds.step, step)
    torch.testing.assert_close(kinds.roughness, -smoothness / step)
    torch.testing.assert_close(kinds.structure, structure / step)
