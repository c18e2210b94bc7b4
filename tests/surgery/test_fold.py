"""The gain of a pool moves into the layer that reads it."""

import copy
import warnings

import pytest
import timm
import torch
from torch import nn

from rotp_vision import PoolOptions, convert, fold_gain, load_pretrained, revert, rot_pools, save_pretrained
from tests.surgery.networks import Own, make


@pytest.mark.parametrize('gain', ['scalar', 'channel'])
@pytest.mark.parametrize('name', ['resnet', 'mobilenetv3', 'tv_mobilenet', 'vit', 'own'])
def test_output_stays_and_the_gain_is_one(name, gain):
    model, x = make(name)
    if name == 'vit':
        model.fc_norm = nn.Identity()
    convert(model, PoolOptions('sinkhorn', gain=gain), example_input=x)
    (pool,) = rot_pools(model).values()
    pool.set_weights(gain=torch.rand(pool.gain().shape) + 0.5)
    before = model(x)
    assert fold_gain(model, x) is model
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4 * float(before.detach().abs().max()))
    assert (pool.named_weights()['gain'] == 1).all()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_reverting_says_that_the_gain_stays(tmp_path):
    model = convert(timm.create_model('test_resnet', num_classes=3))
    fold_gain(model)  # of a gain of one nothing stays
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        revert(copy.deepcopy(model))
    model.global_pool.set_weights(gain=2.0)
    fold_gain(model)
    loaded = load_pretrained(save_pretrained(model, tmp_path / 'folded'))
    for folded in (model, copy.deepcopy(model), loaded):
        with pytest.warns(UserWarning, match='the layers after global_pool keep the gain'):
            revert(folded)


class TwoReaders(Own):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(8, 5)

    def forward(self, x):
        x = self.drop(self.squash(self.features(x)).flatten(1))
        return self.classify(x) + self.second(x)


class Skipping(Own):
    def forward(self, x):
        x = self.squash(self.features(x)).flatten(1)
        return self.classify(x) + x[:, :5]


def test_two_layers_read_it():
    model, x = TwoReaders().eval(), torch.randn(2, 3, 16, 16)
    convert(model, example_input=x)
    model.squash.set_weights(gain=2.0)
    before = model(x)
    torch.testing.assert_close(fold_gain(model, x)(x), before)


def headless():
    return timm.create_model('test_resnet', num_classes=0)


@pytest.mark.parametrize(
    ('maker', 'message'),
    [
        (lambda: timm.create_model('test_convnext'), r'head\.norm \(LayerNorm2d\) reads it'),
        (headless, 'no linear layer reads the output of global_pool'),
        (Skipping, 'folding would change the output'),
    ],
)
def test_what_cannot_be_folded_is_left_as_it_was(maker, message):
    model, x = maker().eval(), torch.randn(2, 3, 64, 64)
    convert(model, example_input=x)
    (pool,) = rot_pools(model).values()
    pool.set_weights(gain=2.0)
    before = model(x)
    with pytest.raises(ValueError, match=message):
        fold_gain(model, x)
    assert torch.equal(model(x), before)
    assert float(pool.named_weights()['gain']) == 2.0


def test_no_gain_and_no_values():
    with pytest.raises(ValueError, match='no ROT pool with a gain'):
        fold_gain(convert(timm.create_model('test_resnet'), 'paper'))
    with torch.device('meta'):
        model = convert(timm.create_model('test_resnet'))
    with pytest.raises(ValueError, match='meta device'):
        fold_gain(model)
