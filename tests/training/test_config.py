import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from rotp_vision import PoolOptions, pool_options
from rotp_vision.training import script
from rotp_vision.training.config import RunConfig, changed_epochs, changes, check_config, parse_config, to_dict

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
    assert config.data.scale == (0.5, 1.0)
    assert config.dry_run
    assert (config.stage2.lr, config.stage2.train, config.stage2.epochs) == (0.3, 'all', 10)  # defaults of stage 2 stay
    assert config.stage1.epochs == 90


def test_unknown_keys_are_refused_with_the_nearest_name(tmp_path, capsys):
    assert "unknown key 'stage1.epoch'" in (error := refused(capsys, '--stage1.epoch', '3'))
    assert "'stage1.epochs'" in error
    file = tmp_path / 'run.yaml'
    file.write_text('data: {sourse: generated}\n')
    assert "did you mean 'data.source'" in refused(capsys, '--config', str(file))
    for wrong, right in (
        ('stage2.learning_rate', 'stage2.lr'),
        ('stage1.learning_rate', 'stage1.lr'),
        ('cache_dir', 'stage2.cache_dir'),
    ):
        assert f"did you mean '{right}'" in refused(capsys, f'--{wrong}', '1')
    # Keys below a mapping are the model's business.
    assert (
        parse_config(['--data.source=generated', '--model.kwargs', '{drop_rate: 0.1}']).model.kwargs['drop_rate'] == 0.1
    )


def test_wrong_values_are_refused_by_name(capsys):
    assert 'stage1.lr' in refused(capsys, '--data.source=generated', '--stage1.lr', 'fast')
    assert 'data.path must be given' in refused(capsys)
    cached = ['--data.source=generated', '--stage2.cache_features', 'true']
    assert 'stage2.train must be' in refused(capsys, *cached, '--stage2.train', 'all')
    for name, value, message in (
        ('data.val_images', '0', 'data.val_images must be at least 1'),
        ('data.scale', '[1.0, 0.5]', 'data.scale must be'),
        ('seed', '-1', 'seed must be at least 0'),
        ('stage2.label_smoothing', '2', 'stage2.label_smoothing must be'),
        ('stage1.mixup', '-1', 'stage1.mixup must be'),
        ('pool.options', '{feature_scale: rsm}', 'feature_scale must be one of'),
        ('output', __file__, 'output must be a directory'),
    ):
        assert message in refused(capsys, '--data.source=generated', f'--{name}', value)


def test_a_file_that_is_no_yaml_is_named(tmp_path, capsys):
    (tmp_path / 'bad.yaml').write_text('stage1: {lr: 0.1')
    assert 'bad.yaml is not YAML' in refused(capsys, '--config', str(tmp_path / 'bad.yaml'))


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


@pytest.mark.parametrize(
    ('name', 'value'),
    [('keep', 1), ('global_batch_size', 0), ('log_every', 0), ('checkpoint_minutes', -1), ('checkpoint_steps', -1)],
)
def test_check_names_the_setting(name, value):
    config = RunConfig()
    config.data.source = 'generated'
    check_config(config)
    setattr(config, name, value)
    with pytest.raises(ValueError, match=rf'{name} must be .*, got {value}'):
        check_config(config)


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit):
        parse_config(['--help'])
    text = ' '.join(capsys.readouterr().out.split())
    missing = [line for line in text.split(' --')[1:] if '(type:' in line and line.split('(type:')[0].count(' ') < 3]
    assert not missing


def test_changes_names_what_a_continued_run_may_not_change():
    old, new = to_dict(RunConfig()), to_dict(RunConfig())
    new['stage1']['lr'] = 0.2
    new['data']['workers'] = 3  # changes no number
    new['output'] = 'elsewhere'
    assert changes(old, new) == ['stage1.lr: 0.1 → 0.2']
    old['data']['streaming'] = new['data']['streaming'] = True  # the order of a stream depends on its workers
    assert changes(old, new) == ['data.workers: 8 → 3', 'stage1.lr: 0.1 → 0.2']


def test_a_continued_run_may_have_other_epochs_where_they_are_still_to_come():
    old, new = to_dict(RunConfig()), to_dict(RunConfig())
    assert changed_epochs(old, new, 2, 10) == []
    new['stage2']['epochs'] = 20
    assert changes(old, new) == []
    said = 'stage2.epochs: 10 → 20; the learning rate follows the schedule of 20 epochs from here on'
    assert changed_epochs(old, new, 2, 10) == changed_epochs(old, new, 1, 90) == [said]
    new['stage2']['epochs'] = 4
    assert len(changed_epochs(old, new, 2, 4)) == 1
    with pytest.raises(ValueError, match=r'stage2.epochs must be at least 5, .*, got 4'):
        changed_epochs(old, new, 2, 5)
    new['stage1']['epochs'] = 100
    assert len(changed_epochs(old, new, 1, 90)) == 2
    with pytest.raises(ValueError, match='stage 1 is over after its 90 epochs'):
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


def test_the_commands_of_the_readme_are_complete(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = re.findall(r'^.*train_imagenet\.py (--.*)$', Path('README.md').read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        parse_config(shlex.split(command, comments=True))
