"""Where a pooling starts: as for training, or next to the mean beside the weights of a native network."""

import pytest
import timm
import torch
from safetensors.torch import save_file

from rotp_vision import GlobalROTPool2d, PoolOptions, ROTSetPool, convert, pool_options, register_solver
from rotp_vision.surgery import rot_pools

TRAIN, MEAN = (5.0, 15.0, 2.0), (50.0, 150.0, 0.0)
ARGS = {'num_classes': 5, 'channels': [8, 8, 8, 16]}


def start_of(pool):
    weights = pool.named_weights()
    return tuple(weights[name].item() for name in ('smoothness', 'sample_penalty', 'norm_power'))


@pytest.fixture(scope='module')
def native():
    return timm.create_model('resnet18', **ARGS).eval()


@pytest.mark.parametrize('options', [None, 'train', {'start': 'train'}, PoolOptions(start='train')])
def test_a_global_pool_of_its_own_starts_as_for_training(options):
    assert start_of(GlobalROTPool2d(options)) == TRAIN
    assert start_of(timm.create_model('resnet18_rotp', rotp=options, **ARGS).global_pool) == TRAIN


def test_other_layers_start_so_by_name_only():
    assert list(ROTSetPool().named_weights()) == ['smoothness', 'feature_penalty', 'sample_penalty', 'gain']
    assert ROTSetPool().named_weights()['smoothness'] == 50
    assert start_of(ROTSetPool('train')) == TRAIN


def test_names():
    assert pool_options('train') == PoolOptions(start='train')
    assert timm.create_model('resnet18_rotp_e', rotp='train', **ARGS).global_pool.options.solver == 'badmm-e'
    assert GlobalROTPool2d({'norm_power': 1.0, 'start': 'mean'}).named_weights()['norm_power'] == 1
    assert GlobalROTPool2d({'start': 'train', 'prior': 'uniform'}).prior is None
    GlobalROTPool2d({'start': 'mean', 'prior': 'norm'}).load_state_dict(GlobalROTPool2d().state_dict())
    with pytest.raises(ValueError, match='name must be'):
        register_solver('train', lambda problem, weights: problem.features, {'pull': 1.0})


@pytest.mark.parametrize(('given', 'start'), [({}, MEAN), ({'rotp': 'train'}, TRAIN)])
def test_weights_of_a_native_network(native, given, start, tmp_path):
    """They start the pool next to the mean, so that the network predicts as before; an explicit start stays."""
    state, path = native.state_dict(), tmp_path / 'native.safetensors'
    save_file(state, path)
    overlay = {'state_dict': state, 'num_classes': 5}
    loaded = timm.create_model('resnet18_rotp', **ARGS, **given)
    loaded.load_state_dict(state)
    with torch.device('meta'):
        empty = timm.create_model('resnet18_rotp', **ARGS, **given)
    empty.load_state_dict(state, assign=True)
    models = [
        loaded,
        empty,
        timm.create_model('resnet18_rotp', pretrained=True, pretrained_cfg_overlay=overlay, **ARGS, **given),
        timm.create_model('resnet18_rotp', checkpoint_path=str(path), **ARGS, **given),
        convert(timm.create_model('resnet18', checkpoint_path=str(path), **ARGS), given.get('rotp')),
    ]
    x = torch.randn(2, 3, 64, 64)
    for model in models:
        (pool,) = rot_pools(model).values()
        assert start_of(pool) == start
        assert pool.state_dict().keys() == GlobalROTPool2d().state_dict().keys()
        if start == MEAN:
            torch.testing.assert_close(model.eval()(x), native(x), rtol=0.02, atol=0.01)
        pool.reset_parameters()
        assert start_of(pool) == start
    again = timm.create_model('resnet18_rotp', **ARGS)
    again.load_state_dict(models[-1].state_dict())  # with the pool's weights
    assert start_of(again.global_pool) == start


def test_local_pools_keep_their_start_with_train(native):
    pools = rot_pools(convert(timm.create_model('resnet18', **ARGS), 'train', 'all'))
    assert (pools['maxpool'].options.start, pools['global_pool'].options.start) == ('max', 'train')
    assert pools['maxpool'].prior is None


def test_a_power_of_zero_changes_nothing():
    x = torch.randn(2, 8, 5, 5)
    plain = GlobalROTPool2d({'start': 'mean', 'prior': 'uniform', 'smoothness': 2.0})
    torch.testing.assert_close(GlobalROTPool2d({'start': 'mean', 'smoothness': 2.0})(x), plain(x))


def test_a_solver_of_your_own_starts_where_it_was_registered_to():
    register_solver('pulled', lambda problem, weights: weights['pull'] * problem.features, {'pull': 3.0})
    assert GlobalROTPool2d('pulled').named_weights()['pull'] == 3
