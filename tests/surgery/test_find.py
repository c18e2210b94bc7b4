"""Pools are found by what they do."""

import copy
import re

import pytest
import timm
import torch
import torchvision
from torch import nn

from rotp_vision import convert, find_pools, revert
from tests.surgery.networks import CASES, NAMES, Own, make


def outer(model, x=None):
    return [pool for pool in find_pools(model, x) if pool.kind != 'local']


@pytest.mark.parametrize('name', NAMES)
def test_the_pool_before_the_classifier(name):
    model, x = make(name)
    case = CASES[name]
    (pool,) = outer(model, x)
    assert (pool.path, pool.kind, pool.layout, pool.output) == (case.path, case.kind, case.layout, case.output)
    assert (pool.replaceable, pool.reason, pool.reduction) == (True, '', 'mean')


def test_models_on_the_meta_device_headless_and_of_their_own_input_size():
    with torch.device('meta'):
        assert outer(timm.create_model('test_resnet', num_classes=0))[0].reason == ''
        model = timm.create_model('efficientnet_b1', in_chans=1)
    (pool,) = outer(model)  # its squeeze-and-excitation blocks hold global pools too
    assert (pool.path, pool.input_shape) == ('global_pool', (2, 1280, 8, 8))


def test_an_own_network_says_its_channels_by_its_first_convolution():
    assert outer(nn.Sequential(nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1)))[0].path == '1'


class Squeezing(Own):
    """Squeeze-and-excitation right before the pool, in the network's own forward pass."""

    def __init__(self):
        super().__init__()
        self.squeeze = nn.AdaptiveAvgPool2d(1)
        self.unused = nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        x = self.features(x)
        return self.classify(self.squash(x * self.squeeze(x).sigmoid()).flatten(1))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


class Both(Own):
    def __init__(self):
        super().__init__()
        self.most = nn.AdaptiveMaxPool2d(1)
        self.classify = nn.Linear(16, 5)

    def forward(self, x):
        x = self.features(x)
        return self.classify(torch.cat([self.squash(x), self.most(x)], 1).flatten(1))


class TwoScales(Both):
    def forward(self, x):
        x = self.features(x)
        y = x[:, :, ::2, ::2]
        return self.classify(torch.cat([self.squash(x), self.most(y)], 1).flatten(1))


@pytest.mark.parametrize(
    ('model', 'paths', 'reductions'),
    [
        (Squeezing(), ['squash'], ['mean']),
        (Own(Mean()), ['squash'], ['mean']),
        (Own(nn.Sequential(nn.ReLU(), nn.AvgPool2d(8))), ['squash.1'], ['mean']),
        (Own(nn.AdaptiveMaxPool2d(1)), ['squash'], ['max']),
        (Both(), ['squash', 'most'], ['mean', 'max']),
        (TwoScales(), ['squash', 'most'], ['mean', 'max']),
    ],
    ids=['squeeze and excitation', 'own module', 'full window', 'max', 'two of one map', 'two maps'],
)
def test_pools_of_own_models(model, paths, reductions):
    pools = outer(model, torch.randn(2, 3, 16, 16))
    assert [pool.path for pool in pools] == paths
    assert [pool.reduction for pool in pools] == reductions
    assert all(pool.replaceable for pool in pools)


class Functional(Own):
    def forward(self, x):
        return self.classify(self.features(x).mean((2, 3)))


class Headed(Own):
    def forward(self, x):
        return self.head(self.features(x))

    def head(self, x):
        return self.classify(x.mean((2, 3)))


class Arranging(Headed):
    def head(self, x):
        return self.classify(x.permute(0, 2, 3, 1).flatten(1, -2).mean(1))


class NormFirst(Headed):
    def head(self, x):
        return self.classify(x.relu().mean((2, 3)))


class TwoWays(Headed):
    def head(self, x):
        return self.classify(x.mean((2, 3)) + x.amax((2, 3)))


class Twice(Own):
    def forward(self, x):
        x = self.features(x)
        return self.classify((self.squash(x.relu()) + self.squash(x)).flatten(1))


class OneAxis(Own):
    def forward(self, x):
        return self.classify(self.squash(self.features(x).flatten(2)).flatten(1))


class TokenMean(nn.Module):
    """Of tokens (B, N, C)."""

    def forward(self, x):
        return x.mean(1)


class Median(nn.Module):
    def forward(self, x):
        return x.flatten(2).median(2).values


@pytest.mark.parametrize('pool', [None, 'gem', lambda channels: TokenMean()])
def test_a_pool_of_features_along_one_axis(pool):
    model, x = OneAxis(nn.AdaptiveAvgPool1d(1)).eval(), torch.randn(2, 3, 16, 16)
    native = model(x)
    assert outer(model, x)[0][:2] + outer(model, x)[0][4:7] == ('squash', 'tokens', 'NCL', 'keep dims', True)
    options = {'pool': 'gem', 'power': 1.0} if pool == 'gem' else pool
    convert(model, options, example_input=x)
    if pool is None:
        model.squash.set_weights(smoothness=1e7)
        assert model.squash.plan(torch.rand(2, 8, 5)).shape == (2, 8, 5)
    torch.testing.assert_close(model(x), native, rtol=1e-4, atol=1e-4)
    assert torch.equal(revert(model)(x), native)


@pytest.mark.parametrize('network', [Headed, Arranging])
def test_a_method_that_pools_its_argument(network):
    model, x = network().eval(), torch.randn(2, 3, 16, 16)
    (pool,) = outer(model, x)
    assert (pool.path, pool.replaceable, pool.old) == ('rot_pool', True, f'mean in {network.__name__}.head')
    assert (pool.kind, pool.layout, pool.input_shape) == ('global', 'NCHW', (2, 8, 8, 8))
    native = model(x)
    convert(model, example_input=x)
    model.rot_pool.set_weights(smoothness=1e7)
    torch.testing.assert_close(model(x), native, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ('model', 'old', 'reason'),
    [
        (Functional(), 'mean in Functional.forward', r'self\.pool = nn\.AdaptiveAvgPool2d\(1\)'),
        (NormFirst(), 'mean in NormFirst.head', 'pools a result of the same method'),
        (TwoWays(), r'amax in TwoWays\.head|mean in TwoWays\.head', 'one of 2 poolings'),
        (Twice(), 'AdaptiveAvgPool2d', 'runs 2 times'),
        (Own(Median()), 'Median', 'neither the mean nor the maximum'),
    ],
    ids=['in the middle', 'after something else', 'two ways', 'run twice', 'neither'],
)
def test_what_cannot_be_replaced_is_found_with_the_reason(model, old, reason):
    pool = outer(model, torch.randn(2, 3, 16, 16))[-1]
    assert not pool.replaceable
    assert pool.old.startswith(tuple(old.replace('\\', '').split('|')))
    assert re.search(reason, pool.reason)


@pytest.mark.parametrize(
    ('maker', 'reason'),
    [
        (lambda: timm.create_model('test_vit'), 'class token: nothing is pooled. Create .* global_pool="avg"'),
        (lambda: timm.create_model('deit_tiny_distilled_patch16_224'), 'class token: a model .* no pooling to replace'),
        (lambda: timm.create_model('volo_d1_224'), 'class token: a model .* no pooling to replace'),
        (lambda: torchvision.models.vit_b_32(), 'class token: a model .* no pooling to replace'),
        (lambda: timm.create_model('test_vit3'), 'by attention'),
        (lambda: timm.create_model('resnet50_clip'), 'by attention'),
        (lambda: torchvision.models.vgg11(), 'fixed grid'),
        (lambda: timm.create_model('vgg11'), 'one pixel'),
        (lambda: timm.create_model('test_resnet', num_classes=0, global_pool=''), 'no pooled output'),
        (lambda: timm.create_model('test_resnet', global_pool='avgmax'), 'neither the mean nor the maximum'),
        (lambda: timm.create_model('resnet18_rotp'), 'ROT pool already'),
    ],
)
def test_models_without_a_pool_say_why(maker, reason):
    with torch.device('meta'):
        model = maker()
    (pool,) = outer(model)
    assert not pool.replaceable
    assert re.search(reason, pool.reason)


def test_class_maps_are_replaceable_by_name_only():
    with torch.device('meta'):
        (pool,) = outer(torchvision.models.squeezenet1_1())
    assert pool.replaceable
    assert "where=['classifier.3']" in pool.reason


def test_local_pools_and_what_is_left_alone():
    model = Own()
    model.features = nn.Sequential(
        nn.MaxPool2d(3, 2, 1),
        nn.AvgPool2d(1, 2),
        nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        nn.AvgPool2d(2, divisor_override=3),
        nn.Conv2d(3, 8, 1),
    )
    pools = find_pools(model, torch.randn(2, 3, 32, 32))
    assert [(pool.path, pool.kind, pool.replaceable) for pool in pools] == [
        ('features.0', 'local', True),
        ('features.1', 'local', False),
        ('features.2', 'local', True),
        ('features.3', 'local', False),
        ('squash', 'global', True),
    ]
    assert [bool(pool.reason) for pool in pools] == [False, True, True, True, False]


def test_an_input_that_does_not_fit_is_named():
    with pytest.raises(
        ValueError, match=r'example of shape \(2, 3, 224, 224\); pass an input that it takes as example_input'
    ):
        find_pools(nn.Sequential(nn.Linear(7, 7), nn.Flatten(), nn.Linear(3, 3)))


def test_a_traced_network_is_refused():
    model, x = Own().eval(), torch.randn(2, 3, 16, 16)
    with pytest.warns(FutureWarning, match='deprecated'):
        traced = torch.jit.trace(model, x)
    with pytest.raises(ValueError, match='TorchScript has traced'):
        find_pools(traced, x)


class This(Own):
    def forward(this, x):
        return this.head(this.features(x))

    def head(this, x):
        return this.classify(x.mean((2, 3)))


def test_methods_may_name_their_first_argument_as_they_like():
    model, x = This().eval(), torch.randn(2, 3, 16, 16)
    assert outer(model, x)[0].old == 'mean in This.head'
    assert convert(model, example_input=x)(x).shape == (2, 5)


@pytest.mark.parametrize('name', ['own', 'repvit', 'vit_token'])  # a module, a method, and a class token
def test_watching_leaves_everything_as_it_was(name):
    model, x = make(name) if name in CASES else (timm.create_model('test_vit'), None)
    model.train()
    next(model.children()).eval()
    fired = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: fired.append(1))
        module.register_forward_pre_hook(lambda *_: fired.append(1))
    attributes = [{**vars(module)} for module in model.modules()]
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    find_pools(model, x)
    with pytest.raises(ValueError, match='did not run'):
        find_pools(model, torch.zeros(2, 5, 16, 16))
    assert fired == []
    assert [{**vars(module)} for module in model.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
