"""Conversion changes the pooling and nothing else, and can be undone."""

import contextlib
import copy
import importlib
import logging
import pickle
from collections import OrderedDict

import pytest
import timm
import torch
from safetensors.torch import load, save
from timm.layers.pool2d_same import AvgPool2dSame, MaxPool2dSame
from torch import nn
from torchvision.models import squeezenet1_1

from rotp_vision import (
    LocalROTPool2d,
    PoolOptions,
    convert,
    describe,
    fold_gain,
    pool_options,
    revert,
    rot_pools,
)
from tests.surgery.networks import CASES, NAMES, Own, make


def sharpen(model):
    """Weights that a training could have found: not a start, and not the mean."""
    for pool in rot_pools(model).values():
        pool.set_weights(smoothness=0.7)


def distance(x, y):
    return float((x - y).detach().norm() / y.detach().norm())


@pytest.mark.parametrize('name', NAMES)
def test_every_kind_of_network(name):
    model, x = make(name)
    with torch.no_grad():
        native = model(x)
        kind, keys = type(model), list(model.state_dict())
        modules = [path for path, _ in model.named_modules()]

        assert convert(model, example_input=x) is model
        assert list(rot_pools(model)) == [CASES[name].path]
        assert isinstance(model, kind)
        assert [key for key in model.state_dict() if not key.startswith(CASES[name].path)] == keys
        (pool,) = rot_pools(model).values()
        assert not pool.training
        assert all(parameter.requires_grad for parameter in pool.parameters())
        assert model(x).shape == native.shape

        # In the limit it is the network that it was: the pool reads the right axes of the right tensor.
        pool.set_weights(smoothness=1e7)
        torch.testing.assert_close(model(x), native, rtol=1e-3, atol=1e-4 * float(native.abs().max()))

        sharpen(model)
        trained = model(x)
        assert distance(trained, native) > 1e-3
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(copied) is type(model)
            assert torch.equal(copied(x), trained)
            assert torch.equal(revert(copied)(x), native)

        fresh = convert(CASES[name].make().eval(), example_input=x)
        state = OrderedDict(load(save(model.state_dict())))
        state._metadata = model.state_dict()._metadata  # torchvision's MNASNet reads its version there
        fresh.load_state_dict(state)
        assert torch.equal(fresh(x), trained)

        assert revert(model) is model
        assert type(model) is kind
        assert list(model.state_dict()) == keys
        assert [path for path, _ in model.named_modules()] == modules
        assert torch.equal(model(x), native)


@pytest.mark.parametrize('name', ['resnet', 'mambaout', 'vit', 'tv_densenet', 'own'])
def test_gradients_reach_the_pool_and_what_is_before_it(name):
    model, x = make(name)
    convert(model, PoolOptions('sinkhorn', feature_scale='rms', gain='channel'), example_input=x)
    model(x).square().mean().backward()
    assert all(parameter.grad.any() for pool in rot_pools(model).values() for parameter in pool.parameters())
    assert next(model.parameters()).grad.any()


@pytest.mark.parametrize('name', ['resnet', 'swin', 'repvit', 'vit'])
def test_channels_are_known_to_the_pool(name):
    model, x = make(name)
    convert(model, {'solver': 'badmm-e', 'prior': 'attention', 'gain': 'channel'}, example_input=x)
    (pool,) = rot_pools(model).values()
    assert pool.gain().shape == (model.num_features,)
    assert model(x).isfinite().all()


@pytest.mark.parametrize(
    ('pool', 'smoothness'),
    [
        (None, 50.0),
        ('paper', 0.6931),
        ('badmm-e', 50.0),
        (PoolOptions('sinkhorn', feature_scale='raw'), 1000.0),
        ({'solver': 'sinkhorn', 'smoothness': 4.0}, 4.0),
    ],
)
def test_start(pool, smoothness):
    model, x = make('own')
    convert(model, pool, example_input=x)
    assert model.squash.options == pool_options(pool)
    assert float(model.squash.named_weights()['smoothness'].flatten()[0]) == pytest.approx(smoothness, rel=1e-3)


class Head(nn.Module):
    """A network whose head is a method that pools by itself."""

    def __init__(self, head, width=8):
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(3, 8, 3), nn.Linear(width, 4), head

    def forward_head(self, x):
        return self.fc(self.head(x))

    def forward(self, x):
        return self.forward_head(self.conv(x))


@pytest.mark.parametrize(
    ('head', 'width', 'reason'),
    [
        (lambda x: torch.cat([x.mean((2, 3)), x.std((2, 3))], 1), 16, 'uses the map for more than this pooling'),
        (lambda x: x.mean((2, 3)) * (x.shape[2] * x.shape[3]) ** 0.5, 8, 'uses the map for more than this pooling'),
        (lambda x: x.mean((2, 3)) + x.relu().mean((2, 3)), 8, 'uses the map for more than this pooling'),
        (lambda x: x.relu_().mean((2, 3)), 8, 'uses the map for more than this pooling'),
        (lambda x: nn.functional.avg_pool2d(x, 62).flatten(1), 8, 'does not run with it'),
    ],
)
@pytest.mark.filterwarnings('ignore:std')
def test_a_method_that_makes_more_of_the_map_is_refused_and_left_as_it_was(head, width, reason):
    torch.manual_seed(0)
    model, x = Head(head, width).eval(), torch.randn(2, 3, 64, 64)
    before = model(x)
    with pytest.raises(ValueError, match=reason):
        convert(model, example_input=x)
    assert not rot_pools(model)
    assert torch.equal(model(x), before)


def test_a_pool_that_cannot_serve_twice_is_refused_and_put_back():
    class Reused(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.pool = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.MaxPool2d(2)

        def forward(self, x):
            return self.pool(self.two(self.pool(self.one(x)))).mean((2, 3))

    model = Reused()
    with pytest.raises(ValueError, match='does not run with it'):
        convert(model, {'gain': 'channel'}, where='local')
    assert type(model.pool) is nn.MaxPool2d


def test_hooks_and_other_references_stay():
    model, x = make('resnet')
    seen = []
    handle = model.global_pool.register_forward_hook(lambda *_: seen.append('pool'))
    model.layer4.register_forward_hook(lambda *_: seen.append('layer4'))
    model.register_forward_pre_hook(lambda *_: seen.append('model'))
    layer4, fc = model.layer4, model.fc
    convert(model, example_input=x)
    assert seen == []
    model(x)
    assert seen == ['model', 'layer4', 'pool']
    assert model.layer4 is layer4
    assert model.fc is fc
    revert(model)(x)
    assert seen[3:] == ['model', 'layer4', 'pool']
    handle.remove()
    convert(model, example_input=x)(x)
    assert seen[6:] == ['model', 'layer4']


def test_dtype_memory_format_training_and_requires_grad_stay():
    model, x = make('mambaout')
    model.to(torch.bfloat16, memory_format=torch.channels_last).train()
    model.stem.requires_grad_(False)
    strides = [parameter.stride() for parameter in model.parameters()]
    convert(model)
    (pool,) = rot_pools(model).values()
    assert pool.training
    assert {parameter.dtype for parameter in pool.parameters()} == {torch.bfloat16}
    assert [p.stride() for name, p in model.named_parameters() if 'rot_pool' not in name] == strides
    assert not any(parameter.requires_grad for parameter in model.stem.parameters())
    assert model(x.bfloat16()).dtype == torch.bfloat16
    model.eval()
    assert not revert(model).training


def test_the_classifier_stays_last():
    for name in ('repvit', 'mambaout', 'vit', 'tv_densenet'):
        model, x = make(name)
        last = [key for key, _ in model.named_parameters()][-2:]
        convert(model, example_input=x)
        assert [key for key, _ in model.named_parameters()][-2:] == last


def test_a_native_checkpoint_loads_strictly_and_starts_the_pool():
    model, x = make('convnext')
    state = model.state_dict()
    other = convert(CASES['convnext'].make().eval(), example_input=x)
    sharpen(other)
    other.load_state_dict(state)
    assert float(rot_pools(other)['head.global_pool'].named_weights()['smoothness']) == 50.0
    assert torch.equal(revert(other)(x), model(x))


@pytest.mark.parametrize('name', ['resnet', 'vit'])
def test_compile_without_breaks(name):
    model, x = make(name)
    convert(model, example_input=x)
    sharpen(model)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
        torch.testing.assert_close(compiled(x), model(x))


def test_an_alias_of_a_pool_is_replaced_with_it():
    model = Own()
    model.other_name = model.squash
    convert(model, example_input=torch.randn(2, 3, 16, 16))
    assert model.other_name is model.squash
    revert(model)
    assert model.other_name is model.squash
    assert type(model.squash) is nn.AdaptiveAvgPool2d


def test_it_says_what_it_changed(caplog):
    model, x = make('own')
    with caplog.at_level(logging.INFO, 'rotp_vision'):
        convert(model, example_input=x)
    assert str(describe(model)) in caplog.text
    model.squash.set_weights(gain=2.0)
    fold_gain(model, x).squash.requires_grad_(False)
    model.unused = copy.deepcopy(model.squash).requires_grad_(True)
    squash, unused = describe(model, x)
    assert squash[:3] == ('squash', 'AdaptiveAvgPool2d(output_size=1)', 'GlobalROTPool2d(sinkhorn, rms)')
    assert (squash.trainable, squash.folded, squash.input_shape, squash.called) == (0, True, (8, 8, 8), 1)
    assert unused.trainable == unused.parameters
    assert unused.called == 0


def test_registered_models_are_described():
    stem, pool = describe(timm.create_model('resnet18_rotp_local'))
    assert (stem.native[:9], stem.input_shape, stem.called) == ('MaxPool2d', (64, 112, 112), None)
    assert (pool.native[:20], pool.input_shape) == ('SelectAdaptivePool2d', (512, 7, 7))


# Local pools


class Stem(Own):
    def __init__(self, pool: nn.Module):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), pool)


LOCAL = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 2, 1),
    nn.MaxPool2d(3, 2, 0, ceil_mode=True),
    nn.MaxPool2d(3, 1, 1),
    nn.MaxPool2d(2, 2, 1, dilation=2),
    MaxPool2dSame(3, 2),
    nn.AvgPool2d(2),
    nn.AvgPool2d(2, 2, 0, ceil_mode=True, count_include_pad=False),
    nn.AvgPool2d(3, 2, 1),
    nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    AvgPool2dSame(3, 2),
    AvgPool2dSame(2, 1, count_include_pad=False),
]


@pytest.mark.parametrize('solver', ['sinkhorn', 'badmm-e'])
@pytest.mark.parametrize('pool', LOCAL, ids=repr)
def test_local_pools_start_next_to_what_they_replace(pool, solver):
    torch.manual_seed(0)
    model, x = Stem(copy.deepcopy(pool)).eval(), torch.randn(2, 3, 13, 18)
    features = nn.Sequential(*model.features)  # the children, native
    native = features(x).detach()
    convert(model, {'solver': solver, 'feature_scale': 'rms'}, where='local', example_input=x)
    assert isinstance(model.features[2], LocalROTPool2d)
    assert isinstance(model.squash, nn.AdaptiveAvgPool2d)
    assert model.features(x).shape == native.shape
    assert distance(model.features(x), native) < (0.001 if isinstance(pool, nn.MaxPool2d) else 0.02)
    assert repr(revert(model).features[2]) == repr(pool)


def test_all_pools_of_a_network():
    model, x = make('tv_resnet')
    native = model(x)
    convert(model, where='all', example_input=x)
    assert list(rot_pools(model)) == ['maxpool', 'avgpool']
    assert distance(model(x), native) < 0.05
    revert(model)
    convert(model, where=['maxpool'], example_input=x)
    convert(model, where='global', example_input=x)
    assert list(rot_pools(model)) == ['maxpool', 'avgpool']
    assert torch.equal(revert(model)(x), native)


@pytest.mark.parametrize(
    ('where', 'paths'),
    [
        (['re:max.*'], ['maxpool']),
        ('re:.*pool', ['maxpool', 'avgpool']),
        (['avgpool', 're:m.x+pool'], ['maxpool', 'avgpool']),
    ],
)
def test_pools_by_regular_expressions(where, paths):
    model, x = make('tv_resnet')
    assert list(rot_pools(convert(model, where=where, example_input=x))) == paths


def test_a_global_max_pool_starts_next_to_the_maximum():
    model, x = Own(nn.AdaptiveMaxPool2d(1)).eval(), torch.randn(2, 3, 16, 16)
    native = model(x)
    assert distance(convert(model, example_input=x)(x), native) < 0.01


@pytest.mark.parametrize(
    ('make', 'where', 'path', 'message'),
    [
        (
            lambda: Stem(nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
            'local',
            'features.2',
            r'found no local pool to replace\. Left out: features\.2: .* mixes tokens',
        ),
        (squeezenet1_1, 'global', 'classifier.3', r"pools class maps.*where=\['classifier.3'\]"),
    ],
)
def test_what_is_left_alone_can_be_named(make, where, path, message):
    model, x = make().eval(), torch.randn(2, 3, 64, 64)
    with pytest.raises(ValueError, match=message):
        convert(model, where=where, example_input=x)
    convert(model, where=[path], example_input=x)
    assert list(rot_pools(model)) == [path]
    assert model(x).isfinite().all()


# Errors


@pytest.mark.parametrize(
    ('maker', 'arguments', 'message'),
    [
        (lambda: timm.create_model('test_vit'), {}, r'class token.*global_pool="avg"'),
        (lambda: timm.create_model('test_resnet'), {'where': 'everything'}, r"where must be 'global', 'local', 'all'"),
        (lambda: timm.create_model('test_resnet'), {'where': ['fc']}, r'where must name pools of the model \(.*global'),
        (lambda: timm.create_model('test_resnet'), {'where': []}, 'name pools, got no name'),
        (
            lambda: timm.create_model('test_resnet'),
            {'where': ['global_pool', 're:pool']},
            "where must name pools .* 're:pool' matches none",
        ),
        (
            lambda: nn.AdaptiveAvgPool2d(1),
            {'example_input': torch.zeros(2, 3, 8, 8)},
            r'wrap it, nn\.Sequential\(pool\)',
        ),
        (lambda: timm.create_model('test_resnet', global_pool='avgmax'), {}, 'neither the mean nor the maximum'),
        (lambda: timm.create_model('test_mambaout'), {'where': 'local'}, 'found no local pool to replace'),
        (lambda: timm.create_model('resnet18_rotp'), {}, 'cannot replace global_pool .* ROT pool already'),
        (lambda: convert(timm.create_model('test_resnet')), {}, 'ROT pool already; revert'),
        (lambda: convert(timm.create_model('test_mambaout')), {}, 'ROT pool already; revert'),
        (lambda: timm.create_model('test_resnet'), {'pool': 'sinkhom'}, 'solver must be one of'),
        (lambda: timm.create_model('test_resnet'), {'pool': {'start': 'min'}}, 'start must be one of'),
        (lambda: nn.DataParallel(Own()), {}, 'before it is wrapped'),
        (lambda: torch.compile(Own()), {}, 'before it is wrapped or compiled'),
    ],
)
def test_errors_name_what_to_do(maker, arguments, message):
    model = maker()
    kind, keys = type(model), list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        convert(model, **arguments)
    assert type(model) is kind
    assert list(model.state_dict()) == keys


class Elsewhere(Own):
    def __init__(self):
        super().__init__()
        self.pools = (self.squash,)

    def forward(self, x):
        return self.classify(self.pools[0](self.features(x)).flatten(1))


def test_a_pool_that_is_called_by_another_reference():
    model, x = Elsewhere(), torch.randn(2, 3, 16, 16)
    with pytest.raises(ValueError, match=r'cannot replace squash: .* another reference'):
        convert(model, example_input=x)
    assert type(model.squash) is nn.AdaptiveAvgPool2d


def test_nothing_to_revert():
    with pytest.raises(ValueError, match='no converted pool'):
        revert(timm.create_model('resnet18_rotp'))


@pytest.mark.parametrize('moment', ['place', '_why_not', 'change', '_move_before', '_new_pool'])
@pytest.mark.parametrize(
    ('name', 'where'), [('test_resnet', 'all'), ('test_vit_relpos', 'global'), ('test_convnext', 'all')]
)
def test_a_conversion_that_is_interrupted_leaves_the_network_as_it_was(name, where, moment, monkeypatch):
    model = timm.create_model(name, num_classes=3).eval()
    before = [(path, type(module), id(module)) for path, module in model.named_modules()]
    x = torch.randn(1, 3, *model.pretrained_cfg['input_size'][1:])
    expected = model(x)
    home = 'classes' if moment in ('change', '_move_before') else 'convert'
    surgery = importlib.import_module(f'rotp_vision.surgery.{home}')  # `rotp_vision.surgery.convert` is a function too
    done = getattr(surgery, moment)
    calls = 0

    def interrupted(*args, **kwargs):
        nonlocal calls
        calls += 1
        result = done(*args, **kwargs)
        if calls == last:
            raise KeyboardInterrupt
        return result

    for last in (1, 2, 3):
        calls = 0
        monkeypatch.setattr(surgery, moment, interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            convert(model, where=where)
        monkeypatch.undo()
        if calls >= last:
            assert [(path, type(module), id(module)) for path, module in model.named_modules()] == before
            assert model(x).equal(expected)
        elif rot_pools(model):
            revert(model)
    assert rot_pools(convert(model, where=where))
