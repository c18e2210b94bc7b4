from dataclasses import asdict

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

import rotp_vision
from rotp_vision.training.checkpoint import Progress, save_checkpoint
from rotp_vision.training.config import ModelConfig, PoolConfig, RunConfig, to_dict
from rotp_vision.training.model import (
    build_model,
    convert_model,
    load_for_evaluation,
    map_shape,
    normalization,
)

TINY = ModelConfig('test_resnet', kwargs={'drop_rate': 0.1})
IMAGES = torch.linspace(-1, 1, 3 * 64 * 64).view(1, 3, 64, 64)


@pytest.fixture(scope='module')
def trained():
    torch.manual_seed(0)
    return build_model(TINY, 5).eval()


def test_weights_from_every_kind_of_file(tmp_path, trained):
    expected = trained(IMAGES)
    state = trained.state_dict()
    save_file(state, tmp_path / 'a.safetensors')
    torch.save({'state_dict': {f'module.{key}': value for key, value in state.items()}, 'epoch': 3}, tmp_path / 'b.pth')
    directory = save_checkpoint(tmp_path, Progress(), to_dict(RunConfig(model=TINY)), state)
    for path in (tmp_path / 'a.safetensors', tmp_path / 'b.pth', directory):
        model = build_model(ModelConfig(TINY.name, checkpoint=str(path), kwargs=TINY.kwargs), 5)
        assert model.eval()(IMAGES).equal(expected)
        assert load_for_evaluation(str(path), TINY, PoolConfig(), 5).eval()(IMAGES).equal(expected)


def test_converted_models_are_evaluated_from_checkpoint_and_export(tmp_path, trained):
    model = convert_model(build_model(TINY, 5), PoolConfig())
    model.load_state_dict(trained.state_dict() | {k: v for k, v in model.state_dict().items() if 'pool' in k})
    expected = model.eval()(IMAGES)
    directory = save_checkpoint(tmp_path, Progress(stage=2), to_dict(RunConfig(model=TINY)), model.state_dict())
    rotp_vision.save_pretrained(model, tmp_path / 'export', model_args=TINY.kwargs)
    for path in (directory, tmp_path / 'export'):
        assert load_for_evaluation(str(path), ModelConfig('resnet18'), PoolConfig(), 5).eval()(IMAGES).equal(expected)


def test_a_checkpoint_knows_the_pooling_that_calibration_chose(tmp_path):
    chosen = PoolConfig({'solver': 'sinkhorn', 'feature_scale': 'log', 'gain': 'scalar', 'smoothness': 0.5})
    model = convert_model(build_model(TINY, 5), chosen).eval()
    pools = {path: asdict(pool.options) for path, pool in rotp_vision.rot_pools(model).items()}
    config = to_dict(RunConfig(model=TINY))  # whose pooling has another feature scale
    directory = save_checkpoint(tmp_path, Progress(stage=2, pools=pools), config, model.state_dict())
    assert load_for_evaluation(str(directory), TINY, PoolConfig(), 5).eval()(IMAGES).equal(model(IMAGES))


def test_a_weights_file_of_a_converted_model_has_the_configured_pooling(tmp_path):
    pool = PoolConfig({'solver': 'badmm-e', 'feature_scale': 'rms', 'gain': 'channel'})
    model = convert_model(build_model(TINY, 5), pool).eval()
    save_file(model.state_dict(), tmp_path / 'a.safetensors')
    path = str(tmp_path / 'a.safetensors')
    assert load_for_evaluation(path, TINY, pool, 5).eval()(IMAGES).equal(model(IMAGES))
    for config, other, classes in (
        (TINY, PoolConfig(), 5),
        (TINY, pool, 6),
        (ModelConfig('resnet18'), pool, 5),
        (ModelConfig('test_vit'), pool, 5),  # whose class token is not converted
    ):
        with pytest.raises(ValueError, match=r'(?s)does not fit the configured .*give the settings of its run'):
            load_for_evaluation(path, config, other, classes)


def test_the_moving_average_is_what_is_evaluated(tmp_path, trained):
    ema = {key: value + 1 if value.is_floating_point() else value for key, value in trained.state_dict().items()}
    config = to_dict(RunConfig(model=TINY))
    directory = save_checkpoint(tmp_path, Progress(), config, trained.state_dict(), ema)
    found = load_for_evaluation(str(directory), TINY, PoolConfig(), 5)
    assert found.fc.weight.equal(ema['fc.weight'])


@pytest.mark.parametrize('name', ['test_resnet', 'test_efficientnet', 'torchvision:shufflenet_v2_x0_5'])
def test_weights_of_other_classes_start_a_network_with_a_new_classifier(tmp_path, name):
    config = ModelConfig(name, checkpoint=str(tmp_path / 'mine.safetensors'))
    trained = build_model(ModelConfig(name), 5).state_dict()
    save_file(trained, tmp_path / 'mine.safetensors')
    with pytest.raises(ValueError, match=r'mine.safetensors has 5 classes, the data 3: .*pool\+classifier'):
        build_model(config, 3)
    said: list[str] = []
    torch.manual_seed(1)
    model = build_model(config, 3, new_classifier=True, notify=said.append)
    assert said == ['mine.safetensors has 5 classes, the data 3: the classifier is new']
    torch.manual_seed(1)
    untrained = build_model(ModelConfig(name), 3).state_dict()
    for key, value in model.state_dict().items():
        kept = trained[key].shape == value.shape and 'classifier' not in key and key != 'fc.bias'
        assert value.equal(trained[key] if kept else untrained[key]), key
    # As many classes as there are: nothing to say.
    said.clear()
    build_model(config, 5, new_classifier=True, notify=said.append)
    assert not said


def test_published_weights_of_torchvision_can_have_another_classifier(monkeypatch):
    published = build_model(ModelConfig('torchvision:resnet18'), 5)
    get_model = torchvision.models.get_model
    monkeypatch.setattr(
        torchvision.models,
        'get_model',
        lambda name, weights=None, **kwargs: published if weights else get_model(name, **kwargs),
    )
    config = ModelConfig('torchvision:resnet18', pretrained=True)
    assert build_model(config, 5) is published
    with pytest.raises(ValueError, match='torchvision:resnet18 has 5 classes, the data 3'):
        build_model(config, 3)
    said: list[str] = []
    model = build_model(config, 3, new_classifier=True, notify=said.append)
    assert said == ['torchvision:resnet18 has 5 classes, the data 3: the classifier is new']
    assert model.fc.out_features == 3
    assert model.conv1.weight.equal(published.conv1.weight)


def test_other_weights_are_refused_in_a_few_lines(tmp_path, trained):
    save_file(trained.state_dict(), tmp_path / 'mine.safetensors')
    with pytest.raises(ValueError, match=r'(?s)mine.safetensors does not fit resnet18:.*choose the network') as info:
        build_model(ModelConfig('resnet18', checkpoint=str(tmp_path / 'mine.safetensors')), 5)
    assert len(str(info.value)) < 1100
    assert str(info.value).count('\n') < 7


def test_unknown_names_are_refused_with_near_ones():
    with pytest.raises(ValueError, match=r"'resnet81' is neither a model of timm .close matches: .*resnet"):
        build_model(ModelConfig('resnet81'), 5)
    with pytest.raises(ValueError, match='there is no checkpoint'):
        build_model(ModelConfig('test_resnet', checkpoint='/nowhere.pth'), 5)


def test_torchvision_models_have_their_name_in_front():
    model = build_model(ModelConfig('torchvision:shufflenet_v2_x0_5'), 5)
    assert model.fc.out_features == 5
    assert normalization(model) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_map_shape_and_what_has_none(trained):
    assert map_shape(trained.train(), 96) == (96, 3, 3)
    assert trained.training
    trained.eval()
    with pytest.raises(ValueError, match='needs a timm model'):
        map_shape(torch.nn.Linear(2, 2), 32)
    with pytest.raises(ValueError, match=r'needs maps \(B, C, H, W\)'):
        map_shape(timm.create_model('test_vit'), 160)
