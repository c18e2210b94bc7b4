"""Other people's tools around a converted network: what they wrap, move, quantise or save keeps the pooling."""

import copy
import warnings

import pytest
import timm
import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

import rotp_vision

# Every kind of layer that a pool can have: weights per layer and per channel, and matrices.
OPTIONS = {'feature_scale': 'log', 'prior': 'attention', 'prior_width': 4, 'gain': 'channel', 'smoothness': 2.0}
PRIOR = ['sample_hidden', 'sample_score', 'feature_hidden', 'feature_score']
x = torch.linspace(-2, 2, 2 * 3 * 64 * 64).sin().view(2, 3, 64, 64)


def converted():
    torch.manual_seed(0)
    model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3), OPTIONS).eval()
    for parameter in model.global_pool.prior.parameters():
        nn.init.normal_(parameter, 0, 0.1)
    return model


@pytest.fixture(scope='module')
def model():
    return converted()


@pytest.mark.filterwarnings('ignore::UserWarning', 'ignore::DeprecationWarning')
def test_quantize_dynamic(model):
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    assert not isinstance(quantised.global_pool.prior.sample_hidden, nn.Linear)
    torch.testing.assert_close(quantised(x), model(x), rtol=0.1, atol=0.02)


def test_cpu_offload_of_accelerate(model):
    accelerate = pytest.importorskip('accelerate')
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device('cpu'))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert torch.equal(offloaded(x), model(x))


def test_adapters_of_peft(model, tmp_path):
    peft = pytest.importorskip('peft')
    # Adapters on the matrices of the prior, which peft calls; the rest of the pool as a module to save.
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=PRIOR, init_lora_weights=False))
    assert not torch.equal(adapted(x), model(x))
    adapted(x).square().sum().backward()
    assert all(parameter.grad.any() for parameter in adapted.parameters() if parameter.requires_grad)
    config = peft.LoraConfig(target_modules=['layer4.0.conv1'], modules_to_save=['global_pool'])
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    adapted.base_model.model.global_pool.modules_to_save['default'].set_weights(gain=2.0)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
    assert not torch.equal(again(x), model(x))
    assert torch.equal(again(x), adapted(x))


@pytest.mark.parametrize('name', ['converted', 'registered'])
def test_transformers_loads_what_was_saved_and_saves_it_again(name, model, tmp_path):
    transformers = pytest.importorskip('transformers')
    if name == 'registered':
        model = timm.create_model('resnet18_rotp', num_classes=3, rotp=OPTIONS).eval()
    path = rotp_vision.save_pretrained(model, tmp_path / 'ours')
    for i in range(2):
        wrapper = transformers.AutoModelForImageClassification.from_pretrained(path)
        assert torch.equal(wrapper(x).logits, model(x))
        path = tmp_path / f'theirs{i}'
        wrapper.save_pretrained(path)
    assert torch.equal(rotp_vision.load_pretrained(path)(x), model(x))
    with pytest.raises(ValueError, match=r'rotp_vision\.save_pretrained\(model\.timm_model, directory\)'):
        rotp_vision.save_pretrained(wrapper, tmp_path / 'wrapper')
    again = rotp_vision.save_pretrained(wrapper.timm_model, tmp_path / 'again')
    assert torch.equal(rotp_vision.load_pretrained(again)(x), model(x))


def test_swin_of_transformers():
    """It pools features (B, C, N) by an AdaptiveAvgPool1d."""
    transformers = pytest.importorskip('transformers')
    sizes = {'image_size': 32, 'patch_size': 2, 'embed_dim': 8, 'depths': [1], 'num_heads': [2], 'window_size': 4}
    swin = transformers.SwinForImageClassification(transformers.SwinConfig(**sizes)).eval()
    image = torch.randn(2, 3, 32, 32)
    native = swin(image).logits
    rotp_vision.convert(swin, example_input=image)
    torch.testing.assert_close(swin(image).logits, native, rtol=0.05, atol=0.01)
    assert list(rotp_vision.rot_pools(swin)) == ['swin.pooler']


def sharded_step(rank, place, expected):
    dist.init_process_group('gloo', init_method=f'file://{place}', rank=rank, world_size=2)
    try:
        warnings.simplefilter('ignore')
        model = converted()
        fully_shard(model.global_pool)
        fully_shard(model)
        for act in (rotp_vision.freeze, rotp_vision.revert, lambda m: m.reset_classifier(7)):
            with pytest.raises(ValueError, match='sharded by FSDP'):
                act(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for logits in expected:
            torch.testing.assert_close(model(x), logits, rtol=1e-4, atol=1e-5)
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()


def test_fully_sharded_by_two_processes(tmp_path):
    model, expected = converted(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        expected.append(model(x).detach())
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    mp.spawn(sharded_step, (str(tmp_path / 'group'), expected), nprocs=2)
