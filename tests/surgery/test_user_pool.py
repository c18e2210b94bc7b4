"""Poolings of a user's own, and solvers of a user's own, through the same surgery as ours."""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import SimPool2d
from torch import nn

import rotp_vision
from rotp_vision.core import SOLVERS, register_solver


class GeM(nn.Module):
    def __init__(self, power: float = 3.0):
        super().__init__()
        self.power = nn.Parameter(torch.tensor(power))

    def forward(self, x):
        return x.clamp(min=1e-6).pow(self.power).mean((2, 3)).pow(1 / self.power)


class Decoder(nn.Module):
    """A query that attends to all pixels or tokens, as in ML-Decoder."""

    def __init__(self, channels: int):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(1, 1, channels))
        self.attend = nn.MultiheadAttention(channels, 1, batch_first=True)

    def forward(self, x, mask=None):
        tokens = x.flatten(2).mT if x.dim() == 4 else x
        query = self.query.expand(len(x), -1, -1)
        return self.attend(query, tokens, tokens, key_padding_mask=None if mask is None else ~mask)[0].squeeze(1)


class Mean(nn.Module):
    """(B, C, 1, 1), as torch's own pools."""

    def forward(self, x):
        return x.mean((2, 3), keepdim=True)


class Wide(nn.Module):
    def forward(self, x):
        return torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1)


def small(name, **kwargs):
    return timm.create_model(name, num_classes=5, **kwargs).eval()


X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
# A module before a linear layer, axes kept before a norm layer, NHWC.
NETWORKS = {'test_resnet': {}, 'test_convnext': {}, 'swin_tiny_patch4_window7_224': {'img_size': 64, 'depths': (1, 1)}}


@pytest.mark.parametrize(('name', 'kwargs'), NETWORKS.items(), ids=NETWORKS)
def test_mean_of_ones_own_changes_nothing_and_every_pool_trains(name, kwargs):
    native = small(name, **kwargs)
    expected = native(X)
    model = rotp_vision.convert(native, Mean())
    torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-4)
    assert rotp_vision.describe(model)[0].new == 'Mean'
    assert torch.equal(rotp_vision.revert(model)(X), expected)
    for make in (GeM, Decoder, SimPool2d):
        model = rotp_vision.convert(
            small(name, **kwargs), lambda channels, make=make: make() if make is GeM else make(channels)
        )
        model(X).sum().backward()
        (pool,) = [module for module in model.modules() if type(module).__name__ == 'UserPool']
        assert all(p.grad is not None and p.grad.isfinite().all() for p in pool.parameters())


def test_tokens_and_a_method_that_pools_by_itself():
    native = small('vit_tiny_patch16_224', img_size=64, depth=1, global_pool='avg')
    model = rotp_vision.convert(native, lambda channels: Decoder(channels))
    assert type(model.rot_pool.pool) is Decoder
    assert model(X).shape == (2, 5)
    rotp_vision.revert(model)
    assert 'rot_pool' not in dict(model.named_children())


def test_reset_freeze_copy_pickle_and_native_weights():
    model = rotp_vision.convert(small('test_resnet'), GeM(2.0))
    path = 'global_pool.pool.power'
    model.reset_classifier(7)
    assert model(X).shape == (2, 7)
    assert model.get_parameter(path).item() == 2.0
    rotp_vision.freeze(model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [path]
    assert model.train().global_pool.training
    assert not model.layer1.training
    rotp_vision.freeze(model, 'all').eval()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(X), model(X))
    native = timm.create_model('test_resnet', num_classes=7)
    model.load_state_dict(native.state_dict())
    assert model.get_parameter(path).item() == 2.0
    with pytest.raises(ValueError, match='already'):
        rotp_vision.convert(model)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(X), model(X))
    assert type(rotp_vision.revert(model).global_pool).__name__ == 'SelectAdaptivePool2d'


@pytest.mark.parametrize(
    ('pool', 'where', 'message'),
    [
        (GeM, 'global', r'got the class GeM; write GeM\(…\), or lambda channels'),
        (lambda channels: channels, 'global', 'must return a module'),
        (Wide(), 'global', r'it returned \(2, 192\) where \(2, 96\) is wanted'),
        (GeM(), 'all', 'not the local'),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(pool, where, message):
    model = small('test_resnet', stem_type='deep') if where == 'global' else timm.create_model('resnet18')
    kind = type(model.global_pool)
    with pytest.raises(ValueError, match=message):
        rotp_vision.convert(model, pool, where)
    assert type(model.global_pool) is kind


def test_saving_says_what_to_do(tmp_path):
    model = rotp_vision.convert(small('test_resnet'), GeM())
    with pytest.raises(ValueError, match=r'pool of your own.*save_model.*load_model'):
        rotp_vision.save_pretrained(model, tmp_path / 'saved')
    assert not (tmp_path / 'saved').exists()


def test_a_registered_solver_goes_everywhere(tmp_path):
    """convert, report of weights, save and load, maps to draw; without it loading says what is missing."""
    from rotp_vision.pictures.maps import pool_maps

    def softmax(problem, weights):
        return problem.scaled_features() / weights['smoothness']

    register_solver('by-softmax', softmax, {'smoothness': 50.0})
    try:
        model = rotp_vision.convert(small('test_resnet'), {'solver': 'by-softmax', 'smoothness': 3.0}, where='global')
        model.global_pool.set_weights(smoothness=2.5)
        assert rotp_vision.describe(model)[0].new == 'GlobalROTPool2d(by-softmax, rms)'
        rotp_vision.save_pretrained(model, tmp_path / 'saved')
        again = rotp_vision.load_pretrained(tmp_path / 'saved')
        assert torch.equal(again(X), model(X))
        assert float(again.global_pool.named_weights()['smoothness']) == 2.5
        torch.testing.assert_close(pool_maps(model, X).weight.sum((1, 2)), torch.ones(2))
        images = torch.utils.data.TensorDataset(torch.randn(32, 3, 64, 64), torch.arange(32) % 5)
        rotp_vision.calibrate(model, torch.utils.data.DataLoader(images, 16))
        local = rotp_vision.convert(timm.create_model('resnet18', num_classes=5), 'by-softmax', where='local')
        assert float(rotp_vision.rot_pools(local)['maxpool'].named_weights()['smoothness']) == 50.0
    finally:
        del SOLVERS['by-softmax']
    with pytest.raises(ValueError, match=r"got 'by-softmax'.*register_solver"):
        rotp_vision.load_pretrained(tmp_path / 'saved')
