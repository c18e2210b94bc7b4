import csv

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import rotp_vision
from rotp_vision.training import report


def rows_of(path):
    return list(csv.DictReader(path.open()))


def test_csv_grows_and_starts_anew_from_kept_rows(tmp_path):
    path = tmp_path / 'metrics.csv'
    log = report.CsvLog(path, [])
    for step in range(3):
        log.append({'step': step, 'loss': 0.5})
    assert [row['step'] for row in rows_of(path)] == ['0', '1', '2']
    kept = log.rows[:1]  # a checkpoint from before the other rows
    report.CsvLog(path, kept).append({'step': 1, 'loss': 0.4})
    assert [(row['step'], row['loss']) for row in rows_of(path)] == [('0', '0.5'), ('1', '0.4')]
    report.CsvLog(path, [])
    assert not path.exists()


@pytest.fixture(scope='module')
def converted():
    torch.manual_seed(0)
    options = {'solver': 'sinkhorn', 'feature_scale': 'rms', 'gain': 'scalar', 'smoothness': 1.0}
    return rotp_vision.convert(timm.create_model('test_resnet', num_classes=3).eval(), options)


def test_pictures_and_tables(tmp_path, converted):
    epochs = [
        {'stage': stage, 'epoch': epoch, 'train_loss': 1.0, 'loss': 1.1, 'top1': 50.0}
        for stage, epoch in ((1, 0), (1, 1), (2, 0))
    ]
    report.plot_curves(tmp_path / 'curves.png', epochs)
    assert np.asarray(Image.open(tmp_path / 'curves.png')).std() > 1

    learned = report.learned_weights(rotp_vision.rot_pools(converted))
    assert learned['global_pool.smoothness'] == pytest.approx([1.0])
    text = report.summary({'native pooling': {'top1': 61.5, 'top5': 99.0, 'loss': 1.0, 'images': 7}}, learned, 20)
    assert '61.50' in text
    assert 'global_pool.smoothness' in text
