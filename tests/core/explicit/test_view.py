"""Views inside an operator, and masks, which every view has to see."""

import pytest
import torch

from rotp_vision.core import view_of
from rotp_vision.core.explicit.scratch import Scratch
from rotp_vision.core.explicit.view import Seen
from tests.core.explicit.operators import assert_same, every_operator, every_view, leaves, results


@every_operator
@every_view
@pytest.mark.parametrize('masked', [True, False])
def test_masks_and_views(operator, masked, view):
    mask = torch.arange(9) < torch.tensor([[1], [4], [9]]) if masked else None
    tensors = leaves(operator, 3, 16, 9)
    assert_same(operator, tensors, mask, view=view)
    if masked:
        gradient = results(operator, tensors, 'torch', mask, view)['x']
        assert torch.equal(gradient[0, :, 1:], torch.zeros(16, 8, dtype=torch.float64))


@every_operator
@pytest.mark.parametrize('view', ['rms', 'log'])
@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('size', [1e-6, 1.0, 1e3])
def test_views_in_float32(operator, view, masked, size):
    """Of features of any size, some of them zero as after a rectifier, and a channel that is silent.

    Near the floor a view is ill-conditioned: then no better than plain autograd.
    """
    mask = torch.arange(9) < torch.tensor([[1], [4], [9]]) if masked else None
    tensors = leaves(operator, 3, 16, 9, dtype=torch.float32)
    x = size * tensors['x'].detach().relu()
    x[:, 3] = 0.0
    tensors['x'] = x.requires_grad_()
    wide = {name: value.detach().double().requires_grad_() for name, value in tensors.items()}
    expected = results(operator, wide, 'reference', mask, view)
    got, plain = (results(operator, tensors, backend, mask, view) for backend in ('torch', 'reference'))
    for name, value in expected.items():
        error, plain_error = (
            (other[name] - value).abs().max() / value.abs().max().clamp_min(1e-2) for other in (got, plain)
        )
        assert error < max(1e-3, 2 * plain_error), (name, error, plain_error)


@every_operator
@pytest.mark.parametrize('backend', ['torch', 'reference'])
def test_rms_of_features_whose_squares_overflow(operator, backend):
    tensors = leaves(operator, 2, 6, 5, dtype=torch.float32)
    small = results(operator, tensors, backend, view='rms')
    tensors['x'] = (1e30 * tensors['x'].detach()).requires_grad_()
    large = results(operator, tensors, backend, view='rms')
    assert all(value.isfinite().all() for value in large.values())
    torch.testing.assert_close(large['output'] / 1e30, small['output'], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(large['x'], small['x'], rtol=1e-3, atol=1e-4)


@every_view
@pytest.mark.parametrize('largest', [9.0, 1e37])
@pytest.mark.parametrize('channels_last', [False, True])
def test_rows_are_shifted_to_the_maximum_of_what_is_left(view, largest, channels_last):
    """Whatever the features are, and without changing them."""
    x = torch.tensor([[[-50.0, -53.0, 0.0], [2.0, 7.0, 0.0], [0.5, largest, 0.0]]])
    x = x.mT.contiguous().mT if channels_last else x
    masked, given = torch.tensor([[[False, False, True]]]), x.clone()
    seen = Seen(x, view, masked, Scratch(x, 1, x.dtype), eager=True)
    assert torch.equal(x, given)
    assert seen.x[..., 2].tolist() == [[0.0, 0.0, 0.0]]
    expected = view_of(x, view, ~masked)[..., :2]
    torch.testing.assert_close(seen.peak, expected.amax(2, keepdim=True))
    torch.testing.assert_close(seen.x[..., :2], expected - seen.peak)
