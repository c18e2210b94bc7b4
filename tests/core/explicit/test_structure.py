"""The structural force by small matrices, and its way back, against the formula under autograd."""

import pytest
import torch

from rotp_vision.core.explicit.scratch import Scratch
from rotp_vision.core.explicit.structure import Structure
from rotp_vision.core.structure import apply_factors, similarity_factors


@pytest.mark.parametrize('similarity', ['covariance', 'cosine'])
@pytest.mark.parametrize('shape', [(3, 8, 5), (3, 4, 9)])
@pytest.mark.parametrize('plan', ['weighted samples', 'weighted features', 'product'])
def test_force_and_its_gradients(similarity, shape, plan):
    """Σ1 P Σ2 of P = values · weight; gradients of X and P."""
    b, d, n = shape
    x = torch.randn(shape, dtype=torch.float64).mT.contiguous().mT.requires_grad_()
    values = torch.rand(b, n, 1 if plan == 'product' else d, dtype=torch.float64).mT
    weight = torch.rand((b, 1, n) if plan == 'weighted samples' else (b, d, 1), dtype=torch.float64)
    towards = torch.randn(shape, dtype=torch.float64).mT.contiguous().mT
    whole = (values * weight).requires_grad_()
    force = apply_factors(*similarity_factors(x, None, similarity), whole)
    d_x, d_plan = torch.autograd.grad(force, (x, whole), towards)

    with torch.no_grad():
        scratch, peak = Scratch(x, b, x.dtype), x.amax(2, keepdim=True)
        structure = Structure(x - peak, peak, None, similarity, scratch)
        mixing, projected = structure.push(values, weight)
        got = torch.zeros_like(x)
        structure.act(got, mixing)
        torch.testing.assert_close(got, force)
        assert got.abs().max() <= structure.largest() * whole.sum((1, 2)).max()

        dx, out = scratch.take().zero_(), scratch.take()
        structure.start_back(dx)
        structure.push_back(structure.act_back(towards, mixing, None), values, weight, projected, out)
        torch.testing.assert_close(out, d_plan)
        structure.end_back()
        torch.testing.assert_close(dx, d_x)
