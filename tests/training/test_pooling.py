"""Where stage 2 starts."""

from pathlib import Path

import pytest

from rotp_vision.data.config import DataConfig
from rotp_vision.data.sources import hold_out, open_sources
from tests.training.runs import TINY, Run, changed, images
from tests.training.test_train import table


@pytest.fixture
def folder(tmp_path):
    return images(tmp_path / 'images')


def settings_of(folder, **stage2):
    """Plain images of four colours, which a network soon knows by heart."""
    data = {'path': str(folder), 'image_size': 64, 'workers': 0, 'scale': [1.0, 1.0]}
    model = {'name': 'test_resnet'}
    stage1 = {'epochs': 20, 'optimizer': 'adamw', 'lr': 0.01, 'schedule': 'cosine'}
    return changed(TINY, data=data, model=model, stage1=stage1, stage2={'epochs': 1, **stage2})


def test_images_that_the_network_knows_by_heart_calibrate_nothing(tmp_path, folder):
    run = Run(tmp_path, settings_of(folder, calibrate=0))
    assert run.run() == 0, run.text
    assert 'not calibrated: the network is right on 100.0 % of its training images' in run.text
    assert list(table(run.text)) == ['native pooling', 'ROTP sinkhorn before training', 'ROTP sinkhorn trained']


def test_the_pooling_is_calibrated_on_images_that_are_held_out(tmp_path, folder):
    """An unreadable one is named in calibration, which alone reads it."""
    source, _ = open_sources(DataConfig(path=str(folder)), 0)
    train, held = hold_out(source, 4, 0)
    broken = source.files[held.indices[1]]
    Path(broken).write_bytes(b'broken')
    settings = changed(settings_of(folder), stage1={'epochs': 1}, data__workers=1)
    run = Run(tmp_path, settings)
    assert run.run() == 0, run.text
    assert '16 for training, 4 for calibration, 20 for validation' in ' '.join(run.text.split())
    first, calibrated = run.text.split('Stage 2')
    assert 'unreadable' not in first
    assert f'unreadable image {broken}' in calibrated
    assert len(train) == 16


def test_a_new_classifier_calibrates_nothing(tmp_path, folder):
    first = Run(tmp_path / 'first', changed(TINY, stage1__epochs=1, stage2__epochs=0))  # another four classes
    assert first.run() == 0, first.text
    for extra in range(3):
        (folder / 'train' / f'more{extra}').mkdir()
        (folder / 'val' / f'more{extra}').mkdir()
        for split in ('train', 'val'):
            (folder / split / f'more{extra}' / '0.png').write_bytes((folder / split / '1' / '0.png').read_bytes())
    settings = changed(TINY, data={'path': str(folder), 'image_size': 32, 'workers': 0}, stage1={'epochs': 0})
    settings['model']['checkpoint'] = str(first.checkpoints[-1])
    run = Run(tmp_path, changed(settings, stage2={'epochs': 1, 'train': 'pool+classifier'}))
    assert run.run() == 0, run.text
    assert f'{first.checkpoints[-1].name} has 4 classes, the data 7: the classifier is new' in run.text
    assert 'not calibrated: the classifier is not trained yet' in run.text
    assert list(table(run.text)) == ['ROTP sinkhorn trained']
    run = Run(tmp_path / 'pool', changed(settings, stage2={'epochs': 1, 'train': 'pool'}))
    assert run.run() == 1
    assert 'to train a new classifier' in run.text
    assert 'Traceback' not in run.text
