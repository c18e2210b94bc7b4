"""Whole runs of the script: stages, processes, evaluation, broken data."""

import csv
import os
import re
import shutil
import signal
import socket

import pytest
import timm
import torch
from accelerate.tracking import get_available_trackers
from PIL import Image

import rotp_vision
from rotp_vision.training.checkpoint import load_checkpoint
from rotp_vision.training.config import PoolStageConfig
from rotp_vision.training.optimize import learning_rates, make_optimizer, make_scheduler
from rotp_vision.training.processes import hold
from tests.training.runs import TINY, Run, Stop, changed, images

# Without batch statistics (group norm; frozen in stage 2) a step does not depend on how its images are divided.
GROUP_NORM = changed(
    TINY,
    model={
        'name': 'resnet10t',
        'kwargs': {'channels': [32] * 4, 'output_stride': 8, 'norm_layer': 'groupnorm', 'stem_type': ''},
    },
    stage1={'epochs': 1, 'lr': 0.05, 'clip_norm': 1.0, 'ema_decay': 0.9},
    stage2={'epochs': 1, 'pool_lr': 0.05, 'cache_features': True},
)


def losses(run):
    return [float(row['loss']) for row in csv.DictReader((run.output / 'steps.csv').open())]


def metrics(run):
    return list(csv.DictReader((run.output / 'metrics.csv').open()))


@pytest.fixture(scope='module')
def single(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp('single'), GROUP_NORM)
    # The variable must not divide the gradients: the losses are compared with those of a run without it.
    assert run.run(environment={'ACCELERATE_GRADIENT_ACCUMULATION_STEPS': '4'}) == 0, run.text
    return run


def test_two_processes_follow_the_same_curve(tmp_path, single):
    run = Run(tmp_path, GROUP_NORM)
    assert run.run_together(2, '--data.workers', '1') == [0, 0], run.text
    assert '8 = 2 processes × 1 × 4' in run.text
    assert run.text.count('Learned weights') == 1  # one process speaks
    # Stage 2 reads maps from the cache, in float16: of such a map any value may be rounded the other way.
    assert losses(run)[:4] == pytest.approx(losses(single)[:4], abs=2e-6)
    assert losses(run)[4:] == pytest.approx(losses(single)[4:], abs=1e-4)
    assert [row['images'] for row in metrics(run)] == ['19', '19']  # 10 and 9, none twice
    for ours, theirs in zip(metrics(run), metrics(single), strict=True):
        assert float(ours['loss']) == pytest.approx(float(theirs['loss']), abs=1e-4)
    # Each process evaluates a half of the images: with another pooling on one of them, other losses would come out.
    rows = table(run.text)
    assert list(rows)[:2] == ['native pooling', 'average + gain']
    assert rows == pytest.approx(table(single.text), abs=2e-4)


def table(text):
    """Rows of the last table of a run: title → loss."""
    lines = text.split('\nValidation\n')[-1].split('\n\n')[0].splitlines()[2:]
    return {row[0]: float(row[3]) for row in (re.split(' {2,}', line) for line in lines)}


def test_a_finished_run_has_all_it_promises(single):
    for name in ('curves.png', 'weights.png', 'looked.png'):
        assert min(Image.open(single.output / name).size) > 100
    assert 'native pooling' in single.text
    assert 'ROTP sinkhorn' in single.text
    assert 'global_pool.gain' in single.text
    assert re.search(r'The plan uses 1[\d.]+ of 16 positions', single.text)
    model = rotp_vision.load_pretrained(single.output / 'export')
    state = single.weights
    refitted = {name for name, value in model.state_dict().items() if not value.equal(state[name])}
    assert refitted == {'global_pool.gain.beta', 'global_pool.gain.start'}  # to the images held out
    # Stage 2 trained the pooling alone.
    stage1 = next(path for path in single.checkpoints if path.name.startswith('stage1'))
    ema = load_checkpoint(stage1).state_dict_ema
    assert all(state[name].equal(ema[name]) for name in ema)
    rows = list(csv.DictReader((single.output / 'weights.csv').open()))
    assert rows[0]['value'] != rows[len(rows) // 2]['value']


def test_evaluate_alone_on_checkpoint_export_and_file(single):
    (*_, final), size = table(single.text).values(), len(single.text)
    checkpoint = single.checkpoints[-1]
    # Training could not take such a batch: more than its images, and odd.
    batch = ('--global_batch_size', '63', '--stage1.accumulation', '2', '--stage1.mixup', '0.2')
    for target in (single.output / 'export', checkpoint, single.output / 'export/model.safetensors'):
        assert single.run('--evaluate', str(target), *batch) == 0, single.text
        assert [*table(single.text[size:]).values()] == [final]
        size = len(single.text)
    assert single.run('--evaluate', str(single.output / 'nowhere')) == 1
    assert 'there is no checkpoint' in single.text[size:]


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    run = Run(tmp_path, GROUP_NORM)
    assert run.run('--dry-run') == 0, run.text
    assert run.text.count('s a step, about') == 2
    assert 'maps in float16' in run.text
    assert not run.output.exists()
    assert run.run('--dry-run', '--global_batch_size', '32', '--data.workers', '1024') == 0, run.text
    assert run.text.count('s a step, about') == 4  # one step an epoch
    assert 'data workers instead of 1024' in run.text
    assert not run.output.exists()


def test_stage_2_by_itself_from_a_checkpoint_with_broken_images(tmp_path, single):
    data = images(tmp_path / 'images')
    (data / 'train/0/1.png').write_bytes(b'broken')
    (data / 'val/2/3.png').write_bytes(b'broken')
    settings = changed(GROUP_NORM, data={'path': str(data), 'image_size': 32, 'workers': 0}, stage1={'epochs': 0})
    settings['model']['checkpoint'] = str(next(p for p in single.checkpoints if p.name.startswith('stage1')))
    settings['stage2'] = {'epochs': 2, 'train': 'pool+classifier', 'lr': 0.01}
    run = Run(tmp_path / 'a', settings)
    assert run.run() == 0, run.text
    assert run.text.count('unreadable image') == 2  # each is named once
    assert str(data / 'train/0/1.png') in run.text
    assert [row['images'] for row in metrics(run)] == ['19', '19']
    assert run.text.count('native pooling') == 1  # evaluated before it was replaced

    run = Run(tmp_path / 'b', changed(settings, data__max_broken=0))
    assert run.run() == 1
    assert 'more than data.max_broken = 0' in run.text


def test_a_second_run_in_a_directory_is_refused(tmp_path):
    run = Run(tmp_path, changed(TINY, stage1__epochs=1, stage2__epochs=0))
    run.output.mkdir()
    hold(run.output)
    assert run.run('--resume', 'auto') == 1
    assert f'{run.output} is in use by process {os.getpid()} on ' in run.text
    assert not run.checkpoints
    assert run.run('--dry-run') == 0, run.text  # which writes nothing


def test_a_continued_run_notices_other_data(tmp_path):
    data = images(tmp_path / 'images')
    settings = changed(TINY, data={'path': str(data), 'image_size': 32, 'workers': 0}, stage2={'epochs': 0})
    settings['stage1'] = {'epochs': 1}
    run = Run(tmp_path, settings)
    assert run.run() == 0, run.text
    moved = data.rename(tmp_path / 'elsewhere')
    resume = ('--resume', 'auto', '--data.path', str(moved))
    assert run.run(*resume) == 0, run.text

    for split in ('train', 'val'):
        (moved / split / '0').rename(moved / split / 'z')
    assert run.run(*resume) == 1
    assert 'train: classes without 0 and with z' in run.text
    for split in ('train', 'val'):
        (moved / split / 'z').rename(moved / split / '0')
    (moved / 'train/1/3.png').rename(moved / 'train/1/7.png')
    assert run.run(*resume) == 1
    assert 'train: other files, or other contents, as many as before' in run.text
    (moved / 'train/1/7.png').rename(moved / 'train/1/3.png')
    (moved / 'val/1/3.png').unlink()
    assert run.run(*resume) == 1
    assert 'val: 20 → 19 images' in run.text
    assert 'Traceback' not in run.text
    assert run.run(*resume, '--allow-changed-data') == 0, run.text


def test_names_are_no_formulas_and_no_picture_costs_the_export(tmp_path):
    data = images(tmp_path / 'images')
    for split in ('train', 'val'):
        (data / split / '0').rename(data / split / '$_$')
    settings = changed(TINY, data={'path': str(data), 'image_size': 32, 'workers': 0})
    settings['stage1'], settings['stage2'] = {'epochs': 1}, {'epochs': 1}
    run = Run(tmp_path, settings)
    run.output.mkdir()
    (run.output / 'curves.png').mkdir()
    assert run.run() == 1
    assert 'Is a directory' in run.text
    assert rotp_vision.load_pretrained(run.output / 'export').num_classes == 4
    (run.output / 'curves.png').rmdir()
    assert run.run('--resume', 'auto') == 0, run.text
    assert (run.output / 'looked.png').is_file()


def test_checkpoints_come_by_time(tmp_path):
    settings = changed(TINY, data__train_images=32, stage1__epochs=1, stage2__epochs=0, checkpoint_steps=0)
    run = Run(tmp_path, settings)
    assert run.run('--keep', '9', '--checkpoint_minutes', '1e-9') == 0, run.text
    assert [path.stem[-4:] for path in run.checkpoints] == ['0001', '0002', '0003', '0004', '0000']


def test_one_process_that_fails_is_heard_and_what_all_share_is_said_once(tmp_path):
    data = images(tmp_path / 'images')
    settings = changed(TINY, data={'path': str(data), 'image_size': 32, 'workers': 0})
    nowhere = ('--data.path', '/nowhere')
    for failing, said in (
        ({'last': nowhere}, f'error: process 1 on {socket.gethostname()}: data.path'),
        ({}, 'error: data.path'),
    ):
        run = Run(tmp_path / str(len(failing)), settings)
        assert 0 not in run.run_together(2, *(() if failing else nowhere), **failing)
        assert run.text.count(f"{said} must be an existing directory, got '/nowhere'") == 1, run.text
        assert run.text.count('/nowhere') == 1
    other = shutil.copytree(data, tmp_path / 'other')
    Image.new('RGB', (40, 40), (1, 2, 3)).save(other / 'train/0/0.png')
    run = Run(tmp_path / 'c', settings)
    assert 0 not in run.run_together(2, last=('--data.path', str(other)))
    assert f'error: process 1 on {socket.gethostname()}: the images are not those of process 0:\n  train: ' in run.text


def test_four_processes_with_workers_train_both_stages(tmp_path):
    run = Run(tmp_path, changed(TINY, data__workers=1, stage1__epochs=1, stage2__epochs=1, stage2__cache_features=True))
    assert run.run_together(4) == [0] * 4, run.text
    assert '8 = 4 processes × 1 × 2' in run.text
    assert [row['images'] for row in metrics(run)] == ['19', '19']
    assert len(losses(run)) == 8
    assert not [path for path in (run.output / 'cache').iterdir() if path.name.startswith('.')]


@pytest.mark.parametrize('compiler', ['aot_eager', pytest.param('inductor', marks=pytest.mark.slow)])
def test_two_processes_compile_in_low_precision(tmp_path, compiler):
    """From scratch with ROTP; the slow one has a first stage too."""
    epochs = int(compiler == 'inductor')
    settings = changed(TINY, compile=True, mixed_precision='bf16', stage1__epochs=epochs, data__train_images=8)
    run = Run(tmp_path, changed(settings, stage2={'epochs': 1, 'train': 'all', 'lr': 0.05, 'calibrate': 0}))
    assert run.run_together(2, environment={'COMPILER': compiler}) == [0, 0], run.text
    assert len(losses(run)) == 1 + epochs
    assert re.search(r'precision +bf16', run.text)


def test_a_cache_that_not_all_processes_see_is_refused_before_any_work(tmp_path):
    run = Run(tmp_path, changed(TINY, stage2__cache_features=True, stage2__cache_dir=str(tmp_path / 'here')))
    assert 0 not in run.run_together(2, last=('--stage2.cache_dir', str(tmp_path / 'there')))
    for rank, other in ((0, 1), (1, 0)):
        assert f'process {rank} on {socket.gethostname()}: does not see what process {other} writes' in run.text
    assert 'storage that all nodes share' in run.text
    assert 'Traceback' not in run.text
    assert 'Stage 1' not in run.text


def test_processes_that_cannot_reach_each_other_say_what_to_set(tmp_path):
    run = Run(tmp_path, TINY)
    assert 0 not in run.run_together(2, environment={'GLOO_SOCKET_IFNAME': 'nowhere0'})
    assert 'as in GLOO_SOCKET_IFNAME=eth0' in run.text
    assert 'Traceback' not in run.text


def test_wrong_beginnings_end_with_a_message(tmp_path):
    run = Run(tmp_path, TINY)
    assert run.run('--stage1.epochs', '0') == 2
    assert 'needs a trained network' in run.text
    assert run.run('--global-batch-size', '64') == 1
    assert 'at most the 32 training images, got 64; 8 more are held out by stage2.calibrate' in run.text
    assert run.run('--data.source', 'folder', '--data.path', str(tmp_path / 'nowhere')) == 1
    assert 'data.path must be an existing directory' in run.text
    assert run.run('--model.name', 'resnet81') == 1
    assert 'close matches: ' in run.text
    # What only stage 2 would meet.
    assert run.run('--stage2.optimizer', 'adamww') == 1
    assert "stage2.optimizer 'adamww' cannot be created" in run.text
    assert run.run('--output', '/proc/nowhere') == 1  # where not even root may write
    assert 'cannot write into /proc/nowhere' in run.text
    missing = next(name for name in ('aim', 'dvclive', 'swanlab', 'clearml') if name not in get_available_trackers())
    assert run.run('--trackers', f'[{missing}]') == 1
    assert f'tracker {missing} is not installed: pip install {missing}' in run.text
    assert 'Traceback' not in run.text
    for model, message in (
        ({'name': 'test_vit', 'kwargs': {'img_size': 32}}, 'class token'),
        ({'name': 'torchvision:resnet18'}, 'has no forward_features'),
        ({'name': 'resnet18', 'kwargs': {'chanels': 3}}, "unexpected keyword argument 'chanels'"),
    ):
        run = Run(tmp_path / model['name'], changed(TINY, model=model, stage2__cache_features=True))
        assert run.run() == 1
        assert message in run.text
        assert 'Traceback' not in run.text
        assert not run.output.exists()


def test_an_evaluation_ends_with_a_signal(single, tmp_path):
    data = images(tmp_path / 'images')
    run = Run(tmp_path, changed(GROUP_NORM, data={'path': str(data), 'image_size': 32, 'workers': 0}))
    stop = Stop(signal.SIGTERM, data / 'val/2/3.png')
    assert run.run('--evaluate', str(single.output / 'export'), stop=stop) == -signal.SIGTERM, run.text
    assert 'Validation' not in run.text


@pytest.mark.parametrize('train', ['pool', 'pool+classifier', 'all'])
def test_the_pooling_has_a_learning_rate_of_its_own(train):
    options = {'solver': 'badmm-e', 'gain': 'channel', 'prior': 'attention', 'prior_width': 4}
    model = rotp_vision.freeze(rotp_vision.convert(timm.create_model('test_resnet', num_classes=3), options), train)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    settings = PoolStageConfig(
        lr=0.2, pool_lr=0.05, train=train, weight_decay=0.1, schedule='cosine', min_lr=0.02, warmup_epochs=1, epochs=3
    )
    optimizer = make_optimizer(model, settings)
    parameters = dict(model.named_parameters())
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group['params']}
    assert len(groups) == sum(len(group['params']) for group in optimizer.param_groups) == len(names)
    for name in names:
        group = groups[id(parameters[name])]
        pooling = name.startswith('global_pool.')
        assert group.get('pooling', False) == pooling
        assert group['weight_decay'] == (0.1 if parameters[name].dim() > 1 and not pooling else 0.0), name

    def curves(optimizer):
        scheduler = make_scheduler(optimizer, settings, steps=10)
        for update in range(30):
            scheduler.step_update(update)
            yield learning_rates(optimizer)

    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.05 if train == 'pool' else 0.2)
    for rates, expected in zip(curves(optimizer), curves(plain), strict=True):
        if train == 'pool':
            assert rates == {'lr': None, 'pool_lr': expected['lr']}
        else:
            assert rates == {'lr': expected['lr'], 'pool_lr': 0.25 * expected['lr']}
