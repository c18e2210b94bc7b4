"""The pool's weights carry the options that change its function, and are refused by a pool with others."""

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.utils import ModelEmaV3

from rotp_vision import GlobalROTPool2d, convert

LOG = {'feature_scale': 'log'}


def native(pool=None):
    model = timm.create_model('test_resnet', num_classes=3)
    return model if pool is None else convert(model, pool)


def saved(model, directory):
    save_file(model.state_dict(), directory / 'model.safetensors')
    return directory / 'model.safetensors'


@pytest.mark.parametrize(
    ('make', 'rebuild'),
    [
        (
            lambda: convert(timm.create_model('resnet18', num_classes=3), LOG),
            lambda path: timm.create_model('rotp_converted', num_classes=3, checkpoint_path=path),
        ),
        (
            lambda: timm.create_model('resnet18_rotp', num_classes=3, rotp=LOG),
            lambda path: timm.create_model('resnet18_rotp', num_classes=3, checkpoint_path=path),
        ),
    ],
)
def test_weights_are_refused_by_a_pool_that_computes_something_else(make, rebuild, tmp_path):
    path = saved(make(), tmp_path)
    with pytest.raises(ValueError, match=r"need a pooling with the options {'feature_scale': 'log'}, .*'rms'}"):
        rebuild(path)


@pytest.mark.parametrize(
    'other',
    [
        {'num_iters': 5},
        {'num_outer': 2},
        {'solver': 'badmm-e'},
        {'prior': 'uniform'},
        {'gain': 'off'},
        {'structure': 1.0},
    ],
)
def test_each_option_that_changes_the_function(other):
    state = GlobalROTPool2d(other).state_dict()
    GlobalROTPool2d(other).load_state_dict(state)
    with pytest.raises(ValueError, match=f'need a pooling with the options .*{next(iter(other))}'):
        GlobalROTPool2d().load_state_dict(state, strict=False)


@pytest.mark.parametrize('other', [{'smoothness': 3.0}, {'start': 'max'}, {'backend': 'reference'}, {'num_iters': 4}])
def test_starting_values_and_the_backend_do_not_matter(other):
    pool = GlobalROTPool2d()
    pool.load_state_dict(GlobalROTPool2d(other).state_dict())
    assert torch.equal(pool(x := torch.rand(2, 4, 3, 3)), GlobalROTPool2d(other)(x)) or 'backend' in other


@pytest.mark.parametrize('assign', [False, True])
def test_native_weights_load_without_any_of_its_keys(assign):
    with torch.device('meta'):
        model = native(LOG)
    model.to_empty(device='cpu').load_state_dict(native().state_dict(), assign=assign)
    assert float(model.global_pool.named_weights()['smoothness']) == pytest.approx(100.0)
    model.load_state_dict(native(LOG).state_dict(), assign=assign)


def test_the_state_is_kept_by_files_and_averages(tmp_path):
    model = native(LOG)
    average = ModelEmaV3(model)
    average.update(model)
    state = load_file(saved(average.module, tmp_path))
    native(LOG).load_state_dict({name: value.float() for name, value in state.items()})  # as timm's averages of files
    with pytest.raises(ValueError, match='feature_scale'):
        native('sinkhorn').load_state_dict(state)
