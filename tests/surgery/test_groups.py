import pytest
import timm
import torch

import rotp_vision


def converted():
    options = {'solver': 'sinkhorn', 'prior': 'attention', 'prior_width': 4}
    return rotp_vision.convert(timm.create_model('test_resnet', num_classes=3), options)


@pytest.fixture
def ddp_of_one():
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.nn.parallel.DistributedDataParallel
    torch.distributed.destroy_process_group()


def test_the_pooling_has_its_own_rate_and_no_decay_also_in_wrappers(ddp_of_one):
    model = converted()
    model.conv1[0].weight.requires_grad_(False)
    pooling = {id(parameter) for parameter in model.global_pool.parameters()}
    plain = rotp_vision.param_groups(model, lr=1e-3, weight_decay=0.1, pool_lr=0.2)
    trained = [parameter for group in plain for parameter in group['params']]
    assert {*map(id, trained)} == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert len(trained) == len({*map(id, trained)})
    for group in plain:
        for parameter in group['params']:
            ours = id(parameter) in pooling
            assert group['lr'] == (0.2 if ours else 1e-3)
            assert group['weight_decay'] == (0.1 if parameter.dim() > 1 and not ours else 0.0)
    for wrapped in (torch.compile(model), ddp_of_one(model), torch.compile(ddp_of_one(model))):
        groups = rotp_vision.param_groups(wrapped, lr=1e-3, weight_decay=0.1, pool_lr=0.2)
        assert [[*map(id, group['params'])] for group in groups] == [[*map(id, group['params'])] for group in plain]


def test_a_model_without_a_new_pool_is_refused():
    with pytest.raises(ValueError, match='has no ROT pool to train'):
        rotp_vision.param_groups(timm.create_model('test_resnet'), lr=1e-3)
