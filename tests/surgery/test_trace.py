"""Watching a model does not disturb it."""

import pytest
import torch

from rotp_vision import find_pools
from tests.surgery.networks import Own, make


def test_watching_leaves_everything_as_it_was():
    model, x = Own().train(), torch.randn(2, 3, 16, 16)
    model.drop.eval()
    fired = []
    handles = [model.squash.register_forward_hook(lambda *_: fired.append(1)), model.register_forward_pre_hook(print)]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    training = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    find_pools(model, x)
    assert fired == []
    assert [module.training for module in model.modules()] == training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [len(module._forward_hooks) for module in (model.squash, model, model.features)] == [1, 0, 0]
    model(x)
    assert fired == [1]
    for handle in handles:
        handle.remove()


def test_a_model_that_fails_is_left_as_it_was():
    model = Own().train()
    with pytest.raises(ValueError, match='did not run'):
        find_pools(model, torch.randn(2, 4, 16, 16))
    assert all(module.training and not module._forward_hooks for module in model.modules())


def test_watching_a_method_leaves_no_patch():
    model, x = make('repvit')
    find_pools(model, x)
    assert 'forward_head' not in model.__dict__
