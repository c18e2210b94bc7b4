"""Implicit gradients of Sinkhorn scaling."""

import pytest
import torch

from rotp_vision.core import Solver
from rotp_vision.core.explicit import scratch as scratch_module
from rotp_vision.layers import PoolOptions
from tests.core.explicit.operators import leaves, results


@pytest.mark.parametrize('structure', [False, True])
@pytest.mark.parametrize('proximal', [False, True])
@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('spread', [1.0, 1e3])
def test_implicit_gradients_are_those_of_a_converged_sinkhorn(structure, proximal, masked, spread, monkeypatch):
    """At the fixed point unrolling gives the same, with exponentials shared or not (the spread)."""
    monkeypatch.setitem(scratch_module.CHUNK_ELEMENTS, 'cpu', 8 * 6)
    operator = Solver('sinkhorn', num_inner=200), structure, proximal
    mask = torch.arange(6) < torch.tensor([[1], [4], [6]]) if masked else None
    tensors = leaves(operator, 3, 8, 6, num_modules=2)
    tensors['x'] = (spread * tensors['x'].detach()).requires_grad_()
    expected = results(operator, tensors, 'torch', mask)
    got = results((operator[0]._replace(implicit=True), structure, proximal), tensors, 'torch', mask)
    for name, value in expected.items():
        size = value.abs().max().clamp_min(1e-2)
        assert ((got[name] - value).abs().max() / size).item() < 1e-9, name


def test_implicit_gradients_are_for_sinkhorn():
    operator = Solver('badmm-e', implicit=True), False, False
    with pytest.raises(ValueError, match='implicit is for sinkhorn'):
        results(operator, leaves(operator, 1, 6, 5), 'torch')
    with pytest.raises(ValueError, match="implicit is an option of solver 'sinkhorn'"):
        PoolOptions('badmm-q', implicit=True)
