import csv

import pytest

from rotp_vision.cli import main
from rotp_vision.data.config import DataConfig
from rotp_vision.data.sources import open_sources
from rotp_vision.hub import build
from rotp_vision.training import demo
from rotp_vision.training.config import parse_config
from rotp_vision.training.demo import EPOCHS, POOLINGS, Row, report

ROWS = [Row(question, pooling, 0) for question in EPOCHS for pooling in POOLINGS]


@pytest.mark.parametrize('row', ROWS, ids=str)
def test_every_row_is_a_run_of_the_script(row, tmp_path):
    config = parse_config(row.arguments(tmp_path))
    assert config.stage1.epochs + config.stage2.epochs == EPOCHS[row.question]
    assert (config.data.val_images, config.data.image_size) == (demo.NUM_VAL, demo.SIDE)
    classes = open_sources(DataConfig(source='generated', question=row.question), 0)[0].classes
    model = build(config.model.name, num_classes=len(classes), **config.model.kwargs)
    assert model.global_pool.pool_type == ('max' if row.pooling == 'max' else 'avg')


def test_rows_have_directories_of_their_own(tmp_path):
    assert len({row.directory(tmp_path) for row in ROWS}) == len(ROWS)


def test_the_report_has_standard_errors_of_images_or_of_seeds():
    top1 = dict.fromkeys(ROWS, 50.0)
    assert 'One ROTP layer learns both questions (50.0 ± 1.6 % and 50.0 ± 1.6 %)' in report(top1)
    top1 |= {row._replace(seed=1): 52.0 for row in ROWS}
    assert '(51.0 ± 1.0 % and 51.0 ± 1.0 %)' in report(top1)


def test_a_run_that_fails_shows_its_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Row, 'arguments', lambda row, output: ['--stage1.epochs=-1'])
    assert main(['demo', '--output', str(tmp_path)]) == 1
    assert 'stage1.epochs' in capsys.readouterr().err
    assert main(['demo', '--seeds', '0', '--output', str(tmp_path)]) == 1


def test_the_demo_writes_results_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, 'EPOCHS', dict.fromkeys(EPOCHS, 3))
    monkeypatch.setattr(demo, 'POOLINGS', ('average', 'max', 'ROTP'))
    small = ['--data.train_images=32', '--data.val_images=16']
    arguments = Row.arguments
    monkeypatch.setattr(Row, 'arguments', lambda row, output: [*arguments(row, output), *small])
    monkeypatch.setattr(demo, 'report', str)
    demo.demo(tmp_path)
    with (tmp_path / 'results.csv').open() as file:
        rows = list(csv.DictReader(file))
    assert [(row['question'], row['pooling'], row['seed']) for row in rows] == [
        (question, pooling, '0') for question in EPOCHS for pooling in ('average', 'max', 'ROTP')
    ]
    assert (tmp_path / 'looked.png').stat().st_size > 10_000
