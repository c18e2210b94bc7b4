import csv
import json

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.data import create_transform, resolve_model_data_config

import rotp_vision
from rotp_vision.data.sources import open_sources
from rotp_vision.training.config import DataConfig, ModelConfig, RunConfig
from rotp_vision.training.finish import export
from tests.training.runs import TINY, Run, changed


@pytest.mark.parametrize('epochs', [0, 1])  # of stage 2: exported by timm, and by rotp_vision
def test_an_export_sees_images_as_the_run_did(tmp_path, epochs):
    settings = changed(TINY, data__image_size=40, data__crop_pct=0.8, stage1__epochs=1, stage2__epochs=epochs)
    run = Run(tmp_path, settings)
    assert run.run() == 0, run.text
    model = rotp_vision.load_pretrained(run.output / 'export')
    assert model.pretrained_cfg['num_classes'] == 4
    transform = create_transform(**resolve_model_data_config(model))
    _, source = open_sources(DataConfig(**settings['data']), 0)
    pairs = [source.read(index) for index in range(len(source))]
    with torch.no_grad():
        logits = model(torch.stack([transform(image) for image, _ in pairs]))
    loss = F.cross_entropy(logits, torch.tensor([label for _, label in pairs])).item()
    *_, last = csv.DictReader((run.output / 'metrics.csv').open())
    assert loss == pytest.approx(float(last['loss']), rel=1e-4)


@pytest.mark.parametrize('converted', [False, True])
def test_an_export_says_nothing_of_other_weights(tmp_path, converted):
    data = DataConfig(image_size=96, crop_pct=1.0)
    terms = {'license': 'apache-2.0', 'origin_url': 'https://example.org', 'paper_ids': 'arXiv:1', 'paper_name': 'A'}
    others = {'tag': 'in1k', 'test_input_size': (3, 288, 288), 'test_crop_pct': 1.0, 'crop_mode': 'squash'}
    others |= {'label_offset': 1, 'description': 'B', 'pool_size': (7, 7), 'interpolation': 'bilinear'}
    expected = {'input_size': [3, 96, 96], 'crop_pct': 1.0, 'crop_mode': 'center', 'interpolation': 'bicubic'}
    expected |= {'mean': [0.5, 0.5, 0.5], 'std': [0.25, 0.25, 0.25], 'num_classes': 5, 'fixed_input_size': False}
    expected |= {'first_conv': 'conv1.0', 'classifier': 'fc', 'label_names': ['a', 'b', 'c', 'd', 'e']}
    norm = {'mean': (0.5, 0.5, 0.5), 'std': (0.25, 0.25, 0.25)}
    model = timm.create_model('test_resnet', num_classes=5, pretrained_cfg_overlay=terms | others | norm)
    if converted:
        rotp_vision.convert(model)
    for number, (config, kept) in enumerate(
        (
            (ModelConfig('test_resnet'), {}),
            (ModelConfig('test_resnet', pretrained=True), terms),  # which bind what was made of the weights too
            (ModelConfig('test_resnet', pretrained=True, checkpoint='mine.safetensors'), {}),
        )
    ):
        directory = tmp_path / f'{number}'
        export(model, RunConfig(model=config, data=data), directory, 'abcde')
        assert json.loads((directory / 'config.json').read_text())['pretrained_cfg'] == expected | kept
        found = rotp_vision.load_pretrained(directory)
        assert list(found.pretrained_cfg['label_names']) == ['a', 'b', 'c', 'd', 'e']
        assert all(value.equal(found.state_dict()[key]) for key, value in model.state_dict().items())
