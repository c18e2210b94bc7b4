import copy
import pickle
import warnings

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import load_checkpoint
from timm.optim import param_groups_weight_decay
from timm.utils import ModelEmaV3

from rotp_vision import GlobalROTPool2d, LocalROTPool2d, PoolOptions

NAMES = [
    f'resnet{depth}_{kind}' for depth in (18, 34, 50, 101, 152) for kind in ('rotp', 'rotp_e', 'rotp_q', 'rotp_local')
]
SMALL = {'num_classes': 5, 'in_chans': 3}
x = torch.linspace(-2, 2, 2 * 3 * 64 * 64).sin().view(2, 3, 64, 64)


def small(name='resnet18_rotp', **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **(SMALL | kwargs)).eval()


@pytest.fixture(scope='module')
def native():
    torch.manual_seed(0)
    return timm.create_model('resnet18', num_classes=5).eval()


@pytest.fixture(scope='module')
def model():
    return small()


def test_every_name_is_registered_with_the_native_weights_tags():
    assert sorted(timm.list_models('*rotp*')) == sorted(NAMES)  # without rotp_converted
    for name in NAMES:
        native_name = name.split('_')[0]
        tags = {full.split('.')[1] for full in timm.list_pretrained(f'{native_name}.*')}
        assert {full.split('.')[1] for full in timm.list_pretrained(f'{name}.*')} == tags
        ours, theirs = timm.models.get_pretrained_cfg(name), timm.models.get_pretrained_cfg(native_name)
        assert tags
        assert (ours.hf_hub_id, ours.tag, ours.mean) == (theirs.hf_hub_id, theirs.tag, theirs.mean)


@pytest.mark.parametrize('name', NAMES)
def test_every_name_builds_what_it_says(name):
    with torch.device('meta'):
        model = timm.create_model(name)
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 1000)
    solver = {'rotp_e': 'badmm-e', 'rotp_q': 'badmm-q'}.get(name.split('_', 1)[1], 'sinkhorn')
    assert isinstance(model.global_pool, GlobalROTPool2d)
    assert model.global_pool.options == PoolOptions(solver)
    assert isinstance(model.maxpool, LocalROTPool2d) == name.endswith('local')


def test_native_weights_load_with_only_the_pooling_missing(native, tmp_path):
    state = native.state_dict()
    overlay = {'state_dict': state, 'num_classes': 5}
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model = timm.create_model('resnet18_rotp', pretrained=True, num_classes=5, pretrained_cfg_overlay=overlay)
    assert 'state_dict' not in model.pretrained_cfg
    mine = model.state_dict()
    assert all(torch.equal(mine[key], value) for key, value in state.items())
    assert {key.split('.')[0] for key in set(mine) - set(state)} == {'global_pool'}
    assert mine['global_pool.weights.smoothness.beta'].abs().max() == 0

    incomplete = {key: value for key, value in state.items() if not key.startswith('layer4')}
    overlay = {'state_dict': incomplete, 'num_classes': 5}
    with pytest.raises(RuntimeError, match=r'Missing key.*layer4'):
        timm.create_model('resnet18_rotp', pretrained=True, num_classes=5, pretrained_cfg_overlay=overlay)

    path = tmp_path / 'native.safetensors'
    save_file(state, path)
    from_file = timm.create_model('resnet18_rotp', num_classes=5, checkpoint_path=str(path))
    assert torch.equal(from_file.fc.weight, native.fc.weight)


def test_options_reach_the_pool():
    model = small(rotp={'solver': 'sinkhorn', 'feature_scale': 'log', 'gain': 'channel', 'smoothness': 4.0})
    assert model.global_pool.options == PoolOptions('sinkhorn', feature_scale='log', gain='channel', smoothness=4.0)
    assert model.global_pool.gain.beta.shape == (512,)
    with pytest.raises(ValueError, match='unknown pooling option'):
        small(rotp={'solvr': 'sinkhorn'})
    with pytest.raises(ValueError, match='rotp_stem replaces a max pooling'):
        small(rotp_stem='sinkhorn', replace_stem_pool=True)


@pytest.mark.parametrize(
    ('name', 'rotp', 'options'),
    [
        ('resnet18_rotp_q', {'feature_scale': 'log'}, PoolOptions('badmm-q', feature_scale='log')),
        ('resnet18_rotp_e', 'badmm-q', PoolOptions('badmm-q')),
        ('resnet18_rotp', 'paper', PoolOptions.paper()),
        ('resnet18_rotp_q', {'preset': 'paper', 'gain': 'scalar'}, PoolOptions.paper('badmm-q', gain='scalar')),
        ('resnet18_rotp_q', PoolOptions(), PoolOptions()),
    ],
)
def test_a_mapping_changes_the_options_of_a_variant_and_a_solver_replaces_them(name, rotp, options):
    assert timm.create_model(name, rotp=rotp).global_pool.options == options


def test_options_of_the_stem():
    stem = timm.create_model('resnet18_rotp_local', rotp_stem={'feature_scale': 'log'}).maxpool.options
    assert stem == PoolOptions(feature_scale='log', start='max')
    assert timm.create_model('resnet18_rotp', rotp_stem='paper').maxpool.options == PoolOptions.paper()


def test_reset_classifier_keeps_the_trained_pool():
    model = small().double().train()
    model.global_pool.set_weights(smoothness=3.0)
    pool = model.global_pool
    model.reset_classifier(7)
    assert model.global_pool is pool
    assert model(x.double()).shape == (2, 7)
    assert model.fc.weight.dtype == torch.float64
    model.reset_classifier(7, 'rotp')
    assert model.global_pool is pool
    model.reset_classifier(0)
    assert model(x.double()).shape == (2, 512)
    model.reset_classifier(3, 'avg')
    assert not isinstance(model.global_pool, GlobalROTPool2d)
    model.reset_classifier(3)
    assert model.global_pool.pool_type == 'avg'
    model.reset_classifier(0, '')
    assert model(x.double()).shape == (2, 512, 2, 2)
    model.reset_classifier(3)
    assert isinstance(model.global_pool, GlobalROTPool2d)
    assert model.global_pool.weights.smoothness.beta.dtype == torch.float64
    assert model.global_pool.training
    assert model.get_classifier() is model.fc


def test_timm_methods(model):
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, 512)
    last, stages = model.forward_intermediates(x)
    assert last.shape == stages[-1].shape == (2, 512, 2, 2)
    assert small(global_pool='', num_classes=0)(x).shape == (2, 512, 2, 2)
    assert small(num_classes=0)(x).shape == (2, 512)
    assert small(in_chans=1)(x[:, :1]).shape == (2, 5)
    assert small(output_stride=8).forward_features(x).shape == (2, 512, 8, 8)
    assert small(drop_rate=0.5).train()(x).shape == (2, 5)
    features = small(features_only=True)
    assert [f.shape[1] for f in features(x)] == [64, 64, 128, 256, 512]
    assert not [name for name, _ in features.named_parameters() if 'pool' in name]


def test_every_parameter_learns_with_grad_checkpointing():
    model = small('resnet18_rotp_local').train()
    model.set_grad_checkpointing(True)
    model(x).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    assert model.global_pool.weights.smoothness.beta.grad.abs().max() > 0
    assert model.maxpool.weights.smoothness.beta.grad.abs().max() > 0


def test_weight_decay_exempts_the_pooling_weights_but_not_matrices_of_its_prior():
    model = small(rotp={'prior': 'attention', 'prior_width': 8})
    decayed = {
        id(p) for group in param_groups_weight_decay(model, 0.1) if group['weight_decay'] for p in group['params']
    }
    pool = model.global_pool
    assert decayed.isdisjoint(map(id, [*pool.weights.parameters(), *pool.gain.parameters()]))
    assert id(pool.prior.sample_hidden.weight) in decayed


def test_formats_precisions_and_copies(model):
    expected = model(x)
    torch.testing.assert_close(
        copy.deepcopy(model).to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last)),
        expected,
        rtol=1e-3,
        atol=1e-4,
    )
    with torch.autocast('cpu', torch.bfloat16):
        torch.testing.assert_close(model(x).float(), expected, rtol=0.1, atol=0.05)
    assert torch.equal(ModelEmaV3(model).module(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)


def test_trained_weights_come_back(model, tmp_path):
    trained = copy.deepcopy(model)
    trained.global_pool.set_weights(sample_penalty=2.5, smoothness=0.3)
    save_file(trained.state_dict(), tmp_path / 'model.safetensors')
    fresh = small()
    load_checkpoint(fresh, str(tmp_path / 'model.safetensors'))
    assert torch.equal(fresh(x), trained(x))


def test_compile_and_export(model):
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend='aot_eager')(x), expected)
    batch = torch.export.Dim('batch', min=2)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},)).module()
    more = torch.cat([x, x.flip(3)])
    torch.testing.assert_close(exported(more), model(more))


@pytest.mark.parametrize('name', ['resnet18_rotp', 'resnet18_rotp_local'])
def test_onnx_file_runs_as_the_model(name, tmp_path):
    onnxruntime = pytest.importorskip('onnxruntime')
    model = small(name)
    path = tmp_path / 'model.onnx'
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', ['resnet18_rotp', 'resnet18_rotp_e', 'resnet18_rotp_q', 'resnet18_rotp_local'])
def test_torchscript(name):
    model = small(name)
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x))
    wide = torch.cat([x, x.flip(2)], 3)
    torch.testing.assert_close(scripted(wide), model(wide))
