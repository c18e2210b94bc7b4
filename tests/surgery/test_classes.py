"""Converted networks survive what timm does to networks."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from torch import nn
from torch.distributed.fsdp import fully_shard

from rotp_vision import GlobalROTPool2d, convert, freeze, revert, rot_pools
from tests.surgery.networks import CASES, NAMES, make

TIMM = [name for name in NAMES if not name.startswith('tv_') and name != 'own']


@pytest.mark.parametrize('name', TIMM)
def test_a_new_classifier_keeps_the_trained_pool(name):
    model, x = make(name)
    native = type(model)
    convert(model, example_input=x)
    (pool,) = rot_pools(model).values()
    for reset in (lambda m: m.reset_classifier(7), lambda m: m.reset_classifier(5, global_pool='rotp')):
        reset(model)
        assert rot_pools(model) == {CASES[name].path: pool}
        assert not pool.training
        assert model(x).shape == (2, model.num_classes)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    again.reset_classifier(3)
    assert list(rot_pools(again)) == [CASES[name].path]
    assert again(x).shape == (2, 3)

    model.reset_classifier(7, global_pool='avg')
    assert type(model) is native
    assert not rot_pools(model)
    assert model(x).shape == (2, 7)
    assert 'rotp' not in repr(model)


@pytest.mark.parametrize('name', ['resnet', 'convnext', 'repvit'])
def test_no_classifier_and_no_pool(name):
    model, x = make(name)
    convert(model, example_input=x)
    model.reset_classifier(0)
    assert model(x).shape == (2, model.num_features)
    assert rot_pools(model)
    model.reset_classifier(0, '')
    assert model(x).dim() == 4
    assert not rot_pools(model)


def test_revert_after_a_new_classifier():
    model, x = make('resnet')
    native = type(model.global_pool)
    convert(model, example_input=x).reset_classifier(7)
    revert(model)
    assert type(model.global_pool) is native
    assert model(x).shape == (2, 7)


def test_patches_that_do_not_exist_are_not_pooled():
    torch.manual_seed(0)
    cfg = NaFlexVitCfg(patch_size=16, embed_dim=16, depth=1, num_heads=2, reg_tokens=2, global_pool='avg')
    model = NaFlexVit(cfg, num_classes=3).eval()
    tokens, valid = torch.randn(2, 12, 16), torch.arange(10).expand(2, 10) < torch.tensor([[6], [10]])
    native = model.forward_head(tokens, patch_valid=valid)
    convert(model, example_input=torch.randn(2, 3, 64, 64))
    model.rot_pool.set_weights(smoothness=1e7)
    torch.testing.assert_close(model.forward_head(tokens, patch_valid=valid), native, rtol=1e-4, atol=1e-5)
    model.rot_pool.set_weights(smoothness=0.7)
    once = model.forward_head(tokens, patch_valid=valid)
    torch.testing.assert_close(model.forward_head(tokens[:1, :8]), once[:1])
    tokens[0, 8:] = 1e6
    assert torch.equal(model.forward_head(tokens, False, valid), once)


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


@pytest.mark.parametrize('name', ['resnet', 'mambaout', 'vit'])
def test_a_network_inside_another(name):
    inner, x = make(name)
    native, keys = inner(x), list(inner.state_dict())
    wrapper = convert(Wrapper(inner), example_input=x)
    path = CASES[name].path
    assert list(rot_pools(wrapper)) == [f'model.{path}']
    inner.reset_classifier(inner.num_classes)
    assert list(rot_pools(wrapper)) == [f'model.{path}']
    inner.reset_classifier(7)
    assert wrapper(x).shape == (2, 7)
    assert list(revert(inner).state_dict()) == keys
    assert native.shape == (2, 1000)


def test_a_converted_network_is_reverted_inside_a_wrapper():
    model, x = make('repvit')
    native = model(x)
    convert(model, example_input=x)
    assert torch.equal(revert(nn.DataParallel(model))(x), native)


def test_changes_are_independent():
    model, x = make('repvit')
    native = type(model)
    convert(model, example_input=x)
    freeze(model)
    model.reset_classifier(7)
    assert isinstance(model.rot_pool, GlobalROTPool2d)
    assert not model.train().stages.training
    freeze(model, 'all')
    assert model.train().training
    assert rot_pools(model)
    assert type(revert(model)) is native


def test_a_sharded_network_is_refused_and_keeps_its_class(tmp_path):
    """fully_shard gives modules a class of its own, which conversion and freezing would replace."""
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/group', rank=0, world_size=1)
    try:
        model = make('resnet')[0]
        convert(model)
        fully_shard(model)
        kind = type(model)
        for act in (freeze, revert, convert, lambda m: m.reset_classifier(7)):
            with pytest.raises(ValueError, match='sharded by FSDP'):
                act(model)
        assert type(model) is kind
    finally:
        dist.destroy_process_group()
