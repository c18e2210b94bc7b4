"""Only what is asked for trains, and everything else rests."""

import copy
import logging
import pickle

import pytest
import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rotp_vision import convert, freeze, revert, rot_pools
from tests.surgery.networks import Own, make


def frozen_network(train='pool'):
    return freeze(convert(timm.create_model('test_resnet', drop_rate=0.5, drop_path_rate=0.1)), train)


def trainable(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_a_reverted_network_stays_frozen_and_says_so(caplog):
    model = frozen_network()
    with caplog.at_level(logging.WARNING, 'rotp_vision'):
        revert(model)
    assert 'still frozen' in caplog.text
    assert trainable(model) == []
    freeze(model, 'all')
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_only_the_pool_trains(capsys):
    model = frozen_network()
    names = [name for name, _ in model.named_parameters() if name.startswith('global_pool.')]
    assert trainable(model) == names
    total = sum(parameter.numel() for parameter in model.parameters())
    assert f'trainable params: 5 || all params: {total:,} || trainable%: {500 / total:.4f}' in capsys.readouterr().out


def test_norm_and_dropout_rest_even_in_training_mode():
    model = frozen_network()
    x = torch.randn(2, 3, 64, 64)
    for network in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), nn.Sequential(model)):
        network.eval()
        state = {name: value.clone() for name, value in network.state_dict().items()}
        expected = network(x)
        network.train()
        assert torch.equal(network(x), expected)
        assert network.training
        assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
        assert next(iter(rot_pools(network).values())).training
    resting = (nn.BatchNorm2d, nn.Dropout, nn.Conv2d, nn.Linear)
    assert not any(module.training for module in model.modules() if isinstance(module, resting))


def test_a_step_changes_the_pool_only():
    model = frozen_network().train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=10.0)
    model(torch.randn(2, 3, 64, 64)).square().mean().backward()
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, state[name])}
    assert changed == set(trainable(model))


def test_compiled_in_training_mode():
    model, x = frozen_network().train(), torch.randn(2, 3, 64, 64)
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(x), model(x))
    assert model.training


@pytest.mark.parametrize(('name', 'classifier'), [('resnet', 'fc'), ('tv_mobilenet', 'classifier.1'), ('vit', 'head')])
def test_pool_and_classifier(name, classifier):
    model, x = make(name)
    convert(model, example_input=x)
    freeze(model, 'pool+classifier')
    assert [name for name in trainable(model) if 'pool' not in name] == [f'{classifier}.weight', f'{classifier}.bias']
    model.train()
    assert model.get_submodule(classifier).training


def test_all_undoes_it():
    model = convert(timm.create_model('test_resnet'))
    model.conv1.requires_grad_(False)
    model.train()
    kind, before = type(model), trainable(model)
    freeze(model)
    freeze(model, 'pool+classifier')
    assert trainable(freeze(model, 'all')) == before
    assert type(model) is kind
    assert all(module.training for module in model.modules())
    model.eval()
    assert not any(module.training for module in model.modules())
    assert not any(name.startswith('_rotp') for name in model.__dict__)


def test_data_parallel(tmp_path):
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/group', rank=0, world_size=1)
    try:
        model = frozen_network()
        parallel = DistributedDataParallel(model)
        parallel.train()
        assert model.training
        parallel(torch.randn(2, 3, 64, 64)).square().mean().backward()
        assert [name for name, p in model.named_parameters() if p.grad is not None] == trainable(model)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ('model', 'train', 'message'),
    [
        (Own(), 'pool', r'no ROT pool to train; convert\(model\) first'),
        (Own(), 'head', 'train must be one of pool, pool\\+classifier, all'),
        (convert(timm.create_model('test_resnet', num_classes=0)), 'pool+classifier', 'no classifier to train'),
        (nn.DataParallel(convert(timm.create_model('test_resnet'))), 'pool', 'before it is wrapped'),
        (convert(timm.create_model('test_resnet'), {'learn': 'fixed', 'gain': 'off'}), 'pool', "learn='fixed'"),
    ],
)
def test_errors(model, train, message):
    kind = type(model)
    with pytest.raises(ValueError, match=message):
        freeze(model, train)
    assert type(model) is kind
    assert not any(name.startswith('_rotp') for name in model.__dict__)
