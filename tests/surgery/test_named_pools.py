"""Poolings by name, from conversion to loading."""

import pytest
import timm
import torch

import rotp_vision
from rotp_vision.cli import main
from rotp_vision.layers import any_pool_options
from rotp_vision.surgery.convert import replace_pool

X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
NAMED = ['avg', 'max', 'avgmax', {'pool': 'gem', 'power': 4.0, 'norm_power': 2.0}, 'embedding']
GEM = {'pool': 'gem', 'norm_power': 2.0}


def small(name='test_resnet', **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=5, **kwargs).eval()


@pytest.mark.parametrize('pool', NAMED, ids=str)
def test_converts_saves_and_loads(pool, tmp_path):
    model = rotp_vision.convert(small(), pool)
    features = model.forward_features(X)
    torch.testing.assert_close(model(X), model.fc(model.global_pool(features)))
    model.reset_classifier(3)
    rotp_vision.save_pretrained(model, tmp_path / 'saved')
    for again in (
        rotp_vision.load_pretrained(tmp_path / 'saved'),
        timm.create_model(f'local-dir:{tmp_path / "saved"}', pretrained=True).eval(),
    ):
        assert torch.equal(again(X), model(X))
        assert again.global_pool.options == model.global_pool.options
    model.load_state_dict(timm.create_model('test_resnet', num_classes=3).state_dict())


@pytest.mark.parametrize('name', ['test_convnext', 'test_vit'])
def test_axes_kept_and_tokens(name):
    kwargs = {'global_pool': 'avg'} if name == 'test_vit' else {}
    native, images = small(name, **kwargs), X if name != 'test_vit' else torch.randn(2, 3, 160, 160)
    expected = native(images)
    model = rotp_vision.convert(native, 'avg')
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    assert rotp_vision.describe(model)[0].new == 'GeMPool2d(pool=avg)'
    assert torch.equal(rotp_vision.revert(model)(images), expected)
    assert not torch.allclose(rotp_vision.convert(model, GEM)(images), expected)


def test_a_resnet_of_timm_with_a_name(tmp_path):
    model = timm.create_model('resnet18_rotp', rotp=GEM, num_classes=5).eval()
    model.reset_classifier(3)
    rotp_vision.save_pretrained(model, tmp_path / 'saved')
    again = rotp_vision.load_pretrained(tmp_path / 'saved')
    assert torch.equal(again(X), model(X))
    assert again.global_pool.options.norm_power == 2.0
    assert timm.create_model('resnet18_rotp_e', rotp='embedding').global_pool.options.prior == 'norm'


@pytest.mark.parametrize('network', ['test_resnet', 'resnet18_rotp'])
def test_one_pool_in_place_of_another(network, tmp_path):
    model = small(network)
    if network == 'test_resnet':
        rotp_vision.convert(model)
    for options in map(any_pool_options, (GEM, None, 'max')):
        replace_pool(model, 'global_pool', options)
        assert model.global_pool.options == options
    rotp_vision.save_pretrained(model, tmp_path / 'saved')
    assert torch.equal(rotp_vision.load_pretrained(tmp_path / 'saved')(X), model(X))
    if network == 'test_resnet':
        assert torch.equal(rotp_vision.revert(model)(X), small()(X))


def test_learned_exponents_train_and_local_pools_are_refused():
    model = rotp_vision.convert(small(), GEM | {'learn': True})
    rotp_vision.freeze(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ['global_pool.power', 'global_pool.prior.power']
    with pytest.raises(ValueError, match="'gem' can replace a global pool, not the local maxpool"):
        rotp_vision.convert(small('resnet18'), 'gem', 'local')


def test_command_line(tmp_path, capsys):
    arguments = ['convert', '--model', 'test_resnet', '--random-weights', '--output', str(tmp_path / 'saved')]
    assert main([*arguments, '--pool', 'gem', '--set', 'power=4', '--set', 'norm_power=2']) == 0
    assert main(['inspect', '--model', str(tmp_path / 'saved')]) == 0
    shown = capsys.readouterr().out
    assert 'GeMPool2d(pool=gem, power=4.0, norm_power=2.0)' in shown
    assert 'power            4\n' in shown
