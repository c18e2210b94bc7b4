"""What the coupled Bregman ADMM alone can meet."""

import pytest
import torch

from tests.core.explicit.operators import OPERATORS, assert_same, leaves


@pytest.mark.parametrize(
    ('dtype', 'spread'), [(torch.float32, 1.0), (torch.float32, 10.0), (torch.float64, 10.0), (torch.float64, 80.0)]
)
def test_coupled_plans_whose_scale_is_below_zero(dtype, spread):
    """c = 1/ρ + (1 - α1'/ρ) s, where the smoothness before is larger than the step."""
    operator = OPERATORS['coupled badmm-e']
    tensors = leaves(operator, 2, 16, 4, dtype=dtype)
    tensors['x'] = (spread * tensors['x'].detach()).requires_grad_()
    tensors['step'] = torch.tensor([0.5, 4.0, 0.4], dtype=dtype, requires_grad=True)
    tensors['smoothness'] = torch.tensor([0.1, 6.0, 0.3], dtype=dtype, requires_grad=True)
    assert_same(operator, tensors, tolerance={torch.float64: 1e-9, torch.float32: 1e-4})
