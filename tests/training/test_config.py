import runpy
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from rotp_vision import PoolOptions, pool_options
from rotp_vision.training import script
from rotp_vision.training.config import RunConfig, changed_epochs, changes, parse_config, to_dict

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / 'configs').glob('*.yaml'))


def refused(capsys, *args):
    with pytest.raises(SystemExit) as info:
        parse_config(args)
    assert info.value.code == 2
    return capsys.readouterr().err


def test_yaml_then_arguments_later_wins(tmp_path):
    file = tmp_path / 'run.yaml'
    file.write_text('global_batch_size: 8\ndata: {source: generated, scale: [0.5, 1.0]}\nstage2: {lr: 0.3}\n')
    config = parse_config(['--config', str(file), '--global-batch-size=16', '--stage2.train', 'all', '--dry-run'])
    assert config.global_batch_size == 16
    assert [*config.data.scale] == [0.5, 1.0]
    assert config.dry_run
    assert (config.stage2.lr, config.stage2.train, config.stage2.epochs) == (0.3, 'all', 10)  # defaults of stage 2 stay
    assert config.stage1.epochs == 90


def test_unknown_and_old_keys_are_refused_by_name(tmp_path, capsys):
    assert 'stage1.epoch' in refused(capsys, '--stage1.epoch', '3')
    file = tmp_path / 'run.yaml'
    file.write_text('data: {sourse: generated}\n')
    assert "'sourse'" in refused(capsys, '--config', str(file))
    file.write_text('stage2: {cache_views: 0}\n')
    for args in (('--config', str(file)), ('--stage2.cache_views', '0')):
        assert 'stage2.cache_views is now called stage2.cache_repeats' in refused(capsys, *args)
    file.write_text('stage1: {lr: 0.1')
    assert 'run.yaml' in refused(capsys, '--config', str(file))
    assert 'data.streaming is gone' in refused(capsys, '--data.streaming', 'true')
    # Keys below a mapping belong to the model.
    config = parse_config(['--data.source=generated', '--model.kwargs', '{drop_rate: 0.1}'])
    assert config.model.kwargs['drop_rate'] == 0.1


def test_wrong_values_are_refused_by_name(capsys):
    assert 'data.path must be given' in refused(capsys)
    cached = ['--data.source=generated', '--stage2.cache_features', 'true']
    assert 'stage2.train must be' in refused(capsys, *cached, '--stage2.train', 'all')
    for name, value, message in (
        ('stage1.lr', 'fast', 'stage1.lr'),
        ('stage1.lr', '0', 'stage1.lr'),
        ('data.val_images', '0', 'data.val_images must be at least 1'),
        ('data.scale', '[1.0, 0.5]', 'data.scale must be'),
        ('seed', '-1', 'v>=0'),
        ('keep', '1', 'v>=2'),
        ('data.image_size', '1000000000', 'data.image_size must be at most 4096'),
        ('global_batch_size', '0', 'v>0'),
        ('checkpoint_minutes', '-1', 'checkpoint_minutes'),
        ('stage2.label_smoothing', '2', 'stage2.label_smoothing'),
        ('stage1.mixup', '-1', 'stage1.mixup'),
        ('stage1.ema_decay', '1', 'stage1.ema_decay'),
        ('pool.options', '{feature_scale: rsm}', 'feature_scale must be one of'),
        ('output', __file__, 'output must be a directory'),
    ):
        assert message in refused(capsys, '--data.source=generated', f'--{name}', value)


def test_values_are_plain_so_that_checkpoints_can_store_them():
    config = to_dict(parse_config(['--data.source=generated', '--stage1.lr=0.5', '--seed=3']))
    assert [type(value) for value in (config['stage1']['lr'], config['seed'])] == [float, int]
    assert yaml.safe_load(yaml.safe_dump(config)) == config


def test_a_shipped_configuration_goes_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert parse_config(['--config', 'demo']) == parse_config(['--config', str(ROOT / 'configs/demo.yaml')])
    (tmp_path / 'demo').write_text('{data: {source: generated}, seed: 7}')
    assert parse_config(['--config=demo']).seed == 7  # a file is a file
    error = refused(capsys, '--config', 'paper_resnet50')
    assert "no configuration 'paper_resnet50': give a YAML file, or one of demo, finetune" in error


@pytest.mark.parametrize('installed', [False, True])
def test_the_script_is_found_beside_the_package_or_in_it(tmp_path, installed, monkeypatch, capsys):
    package = tmp_path / 'rotp_vision'
    (package / 'training').mkdir(parents=True)
    place = package if installed else tmp_path
    (place / 'configs').mkdir()
    (place / 'configs/small.yaml').touch()
    (place / 'train_imagenet.py').write_text('def main(args, program):\n    print(args, program)\n')
    found = runpy.run_path(shutil.copy(script.__file__, package / 'training'))
    monkeypatch.setitem(sys.modules, 'train_imagenet', None)  # is put back
    found['train'](['--x'])
    assert capsys.readouterr().out == "['--x'] rotp-vision train\n"
    assert found['config_file']('small') == str(place / 'configs/small.yaml')


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit):
        parse_config(['--help'])
    text = ' '.join(capsys.readouterr().out.split())
    missing = [line for line in text.split(' --')[1:] if '(type:' in line and line.split('(type:')[0].count(' ') < 3]
    assert not missing


def test_a_continued_run_keeps_its_settings_but_may_have_other_epochs_to_come():
    old, new = to_dict(RunConfig()), to_dict(RunConfig())
    new['data']['workers'], new['output'] = 3, 'elsewhere'  # which change no number
    new['stage2']['epochs'] = 20
    assert changes(old, new) == []
    new['stage1']['lr'] = 0.2
    assert changes(old, new) == ['stage1.lr: 0.1 → 0.2']
    assert changed_epochs(old, old, 2, 10) == []
    assert len(changed_epochs(old, new, 2, 10)) == len(changed_epochs(old, new, 1, 90)) == 1
    new['stage2']['epochs'] = 4
    assert len(changed_epochs(old, new, 2, 4)) == 1
    with pytest.raises(ValueError, match=r'stage2.epochs must be at least 5, .*, got 4'):
        changed_epochs(old, new, 2, 5)
    new['stage1']['epochs'] = 100
    assert len(changed_epochs(old, new, 1, 90)) == 2
    with pytest.raises(ValueError, match=r'stage 1 is over: leave stage1\.epochs at 90'):
        changed_epochs(old, new, 2, 0)


@pytest.mark.parametrize('file', CONFIGS, ids=lambda file: file.stem)
def test_shipped_configs_parse(file):
    config = parse_config(['--config', str(file), *([] if file.stem == 'demo' else ['--data.path', '/data'])])
    if file.stem == 'paper':
        assert (config.stage1.epochs, config.stage1.lr, config.stage1.weight_decay) == (90, 0.1, 1e-4)
        assert (config.stage2.epochs, config.stage2.pool_lr, config.stage2.train) == (10, 0.001, 'pool')
        assert (config.stage2.optimizer, config.stage2.calibrate) == ('sgd', 0)
        assert pool_options(config.pool.options) == PoolOptions.paper()
        assert config.global_batch_size == 256
        assert (config.model.name, config.mixed_precision) == ('resnet50', 'auto')
