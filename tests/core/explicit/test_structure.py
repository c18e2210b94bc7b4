"""The structural force by small matrices, and its way back, against the formula under autograd."""

import pytest
import torch

from rotp_vision.core.explicit.scratch import Scratch
from rotp_vision.core.explicit.structure import Structure
from rotp_vision.core.structure import apply_factors, similarity_factors


@pytest.mark.parametrize('similarity', ['covariance', 'cosine'])
@pytest.mark.parametrize('shape', [(3, 8, 5), (3, 4, 9)])
@pytest.mark.parametrize('product', [True, False])
def test_force_and_its_gradients(similarity, shape, product):
    """Σ1 P Σ2 of P = values · weight, or of a product of vectors; gradients of X and of log P's factors."""
    b, d, n = shape
    x = torch.randn(shape, dtype=torch.float64).mT.contiguous().mT.requires_grad_()
    values = torch.rand(b, d, 1 if product else n, dtype=torch.float64).requires_grad_()
    weight = torch.rand(b, 1, n, dtype=torch.float64).requires_grad_()
    towards = torch.randn(shape, dtype=torch.float64).mT.contiguous().mT
    force = apply_factors(*similarity_factors(x, None, similarity), values * weight)
    d_x, d_values, d_weight = torch.autograd.grad(force, (x, values, weight), towards)

    with torch.no_grad():
        scratch, peak = Scratch(x, b, x.dtype), x.amax(2, keepdim=True)
        structure = Structure(x - peak, peak, None, similarity, scratch)
        if product:
            mixing, projected = structure.push_product(values, weight), None
        else:
            mixing, projected = structure.push(values, weight)
        got = structure.act(torch.zeros_like(x), mixing)
        torch.testing.assert_close(got, force)
        assert got.abs().max() <= structure.largest() * (values * weight).sum((1, 2)).max()

        dx = scratch.buffer().zero_()
        structure.start_back(dx)
        d_mixing = structure.act_back(towards, mixing, None)
        if projected is None:
            d_log_p, d_log_q = structure.push_product_back(d_mixing, values, weight)
            torch.testing.assert_close(d_log_p, d_values * values)
            torch.testing.assert_close(d_log_q, d_weight * weight)
        else:
            out = scratch.buffer()
            structure.push_back(d_mixing, values, weight, projected, out)
            torch.testing.assert_close(out * weight, d_values)
        structure.end_back()
        torch.testing.assert_close(dx, d_x)
