"""No moment of being killed may change the weights a run ends with."""

import csv
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.training.runs import ROOT, TINY, Run, Stop, changed, images

# Data workers, shuffling, augmentation, dropout, mixup, accumulation and a moving average: all that has a state.
BUSY = changed(
    TINY,
    data__workers=2,
    model__kwargs={'channels': [8, 8, 16, 16], 'output_stride': 8, 'drop_rate': 0.2},
    stage1={'epochs': 2, 'lr': 0.05, 'mixup': 0.3, 'accumulation': 2, 'ema_decay': 0.9},
    stage2={'epochs': 2, 'lr': 0.05, 'train': 'pool+classifier'},
)

TIMED = {'seconds', 'images_per_second', 'data_time_share'}  # columns that differ from run to run


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp('whole'), BUSY)
    assert run.run() == 0, run.text
    return run


def killed(directory, moments, settings=BUSY):
    """A run killed when it has touched one place after the other so many times, then finished."""
    run = Run(directory, settings)
    for place, count in moments:
        stop = Stop(signal.SIGKILL, run.output / place, count)
        assert run.run('--resume', 'auto', stop=stop) == -signal.SIGKILL, run.text
    assert run.run('--resume', 'auto') == 0, run.text
    return run


def assert_same(run, other):
    ours, theirs = run.weights, other.weights
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours), [n for n in ours if not ours[n].equal(theirs[n])]
    # Killed before it removed what the last checkpoint made superfluous, a run keeps that.
    assert {path.name for path in run.checkpoints} >= {path.name for path in other.checkpoints}
    assert run.checkpoints[-1].name == other.checkpoints[-1].name
    assert files_beside_checkpoints(run) == files_beside_checkpoints(other)
    for name in ('metrics.csv', 'steps.csv', 'weights.csv'):
        assert without_time(run, name) == without_time(other, name)


def files_beside_checkpoints(run):
    """Hidden ones are among them: nothing half made is left behind."""
    paths = (str(path.relative_to(run.output)) for path in run.output.rglob('*'))
    return sorted(path for path in paths if not path.startswith('checkpoints/stage'))


def without_time(run, name):
    with (run.output / name).open() as file:
        return [{key: value for key, value in row.items() if key not in TIMED} for row in csv.DictReader(file)]


def test_killed_six_times_ends_with_the_same_weights(tmp_path, uninterrupted):
    moments = [
        ('checkpoints/.stage1-epoch0001-step000002.pt', 1),  # written, without its digest
        ('checkpoints/stage1-epoch0001-step000002.pt', 1),  # no longer needed, about to be removed
        ('weights.csv', 4),  # the first lines of stage 2
        ('checkpoints/.stage2-epoch0001-step000002.pt', 2),  # with its digest, not yet renamed
        ('.rotp_vision.', 3),
        ('export/.config.json.', 2),  # the temporary file
    ]
    assert_same(killed(tmp_path, moments), uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize('cached', [False, True])
def test_killed_ten_times_ends_with_the_same_weights(tmp_path, cached):
    settings = changed(BUSY, stage1__epochs=4, stage2__epochs=3, stage2__cache_features=cached, stage2__cache_repeats=2)
    whole = Run(tmp_path / 'whole', settings)
    assert whole.run() == 0, whole.text
    rng = random.Random(1)
    assert_same(killed(tmp_path, [('', rng.randint(15, 60)) for _ in range(10)], settings), whole)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_at_any_moment_ends_with_the_same_weights(tmp_path, uninterrupted):
    """Every one of them, until the run is over before the moment comes."""
    for count in itertools.count(1):
        run = Run(tmp_path / f'{count}', BUSY)
        status = run.run(stop=Stop(signal.SIGKILL, run.output, count))
        if status == 0:
            break
        assert status == -signal.SIGKILL, run.text
        assert run.run('--resume', 'auto') == 0, run.text
        assert_same(run, uninterrupted)
        shutil.rmtree(run.output)
    assert count > 200


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_end_with_the_same_weights(tmp_path):
    """In stage 1, while a checkpoint is written, between the stages, in the cache and in stage 2."""
    data = images(tmp_path / 'images')
    settings = changed(TINY, data={'path': str(data), 'image_size': 32, 'workers': 1}, stage2__cache_features=True)
    whole, run = Run(tmp_path / 'whole', settings), Run(tmp_path / 'killed', settings)
    assert whole.run_together(2) == [0, 0], whole.text
    checkpoints = run.output / 'checkpoints'
    for victim, rank, place, count in (
        (1, 1, data / 'train', 26),  # 25 are for the list of images
        (0, 0, checkpoints / '.stage1-epoch0000-step000002.pt', 1),
        (1, 0, checkpoints / '.stage1-epoch0000-step000002.pt', 2),
        (1, 0, run.output / 'metrics.csv', 1),
        (0, 0, checkpoints / '.stage1-epoch0001-step000002.pt', 2),
        (1, 0, checkpoints / '.stage1-epoch0002-step000000.pt', 1),
        (0, 0, run.output / 'weights.csv', 2),
        (1, 0, run.output / 'weights.csv', 2),
        (1, 1, run.output / 'cache', 3),
        (0, 0, run.output / 'cache', 4),
        (1, 0, checkpoints / '.stage2-epoch0000-step000002.pt', 1),
        (0, 0, checkpoints / '.stage2-epoch0001-step000002.pt', 2),
        (1, 0, checkpoints / '.stage2-epoch0002-step000000.pt', 1),
        (1, 0, run.output / '.rotp_vision.', 2),
        (0, 0, run.output / 'export/.config.json.', 1),
    ):
        size, started = len(run.text), time.monotonic()
        stop = Stop(signal.SIGKILL, place, count, rank=rank, victim=victim)
        statuses = run.run_together(2, '--resume', 'auto', stop=stop)
        print(f'process {victim} killed at {place.name} {count}: {statuses} after {time.monotonic() - started:.1f} s')
        assert statuses == ([1, -9] if victim else [-9, 1]), run.text[size:]
        assert time.monotonic() - started < 60
        assert 'the connection to another process is lost' in run.text[size:]
        assert 'Traceback' not in run.text[size:]
    assert run.run_together(2, '--resume', 'auto') == [0, 0], run.text
    assert_same(run, whole)


def test_signal_saves_and_resume_continues_bit_exactly(tmp_path, uninterrupted):
    run = Run(tmp_path, BUSY)
    stop = Stop(signal.SIGTERM, run.output / 'metrics.csv', 2, group=True)
    assert run.run(stop=stop) == 128 + signal.SIGTERM, run.text
    assert 'stopped by SIGTERM' in run.text
    assert '--resume auto' in run.text
    assert not run.output.joinpath('export').exists()

    assert run.run() == 1  # without --resume it will not touch a run
    assert 'holds a run' in run.text
    assert run.run('--resume', 'auto', '--stage1.lr', '0.06') == 1
    assert 'stage1.lr: 0.05 → 0.06' in run.text

    # The last checkpoint is damaged: the one before it is taken.
    run.checkpoints[-1].write_bytes(b'half')
    assert run.run('--resume', 'auto', '--data.workers', '0') == 0, run.text
    assert 'skipped a damaged checkpoint' in run.text
    assert_same(run, uninterrupted)


def test_a_finished_run_can_be_made_longer(tmp_path):
    """Its end is that of a run of so many epochs from the beginning, where the learning rate does not depend on it."""
    settings = changed(TINY, stage1__epochs=1, stage2__epochs=1, stage2__schedule='constant')
    run, long = Run(tmp_path / 'a', settings), Run(tmp_path / 'b', changed(settings, stage2__epochs=2))
    assert run.run() == 0, run.text
    assert run.run('--resume', 'auto', '--stage2.epochs', '2') == 0, run.text
    assert 'stage2.epochs: 1 → 2; the learning rate now follows the schedule of 2 epochs' in run.text
    assert long.run() == 0, long.text
    assert_same(run, long)
    size = len(run.text)
    assert run.run('--resume', 'auto', '--stage1.epochs', '2', '--stage2.epochs', '2') == 1
    assert 'stage 1 is over' in run.text[size:]
    assert run.run('--resume', 'auto') == 1  # the configuration's 1 epoch
    assert 'stage2.epochs must be at least 2' in run.text[size:]
    assert 'Traceback' not in run.text


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGHUP])
def test_every_signal_that_ends_a_group_saves(tmp_path, number):
    """In the middle of an epoch, while data workers are at work, and of writing a checkpoint."""
    run = Run(tmp_path, BUSY)
    stop = Stop(number, run.output / 'checkpoints/.stage1-epoch0000-step000002.pt', group=True)
    assert run.run(stop=stop) == 128 + number, run.text
    assert f'stopped by {number.name} and saved as stage1-epoch0000-step000003' in run.text
    assert run.checkpoints[-1].stem == 'stage1-epoch0000-step000003'
    assert 'Traceback' not in run.text


def test_a_signal_to_a_group_that_reads_the_cache_saves(tmp_path):
    run = Run(tmp_path, changed(BUSY, stage2__cache_features=True))
    stop = Stop(signal.SIGTERM, run.output / 'cache', 1, group=True)
    assert run.run(stop=stop) == 128 + signal.SIGTERM, run.text
    assert 'stopped by SIGTERM while feature maps were computed' in run.text
    stop = Stop(signal.SIGTERM, run.output / 'checkpoints/.stage2-epoch0000-step000002.pt', group=True)
    assert run.run('--resume', 'auto', stop=stop) == 128 + signal.SIGTERM, run.text
    assert run.checkpoints[-1].stem == 'stage2-epoch0000-step000003'
    assert 'Traceback' not in run.text
    assert run.run('--resume', 'auto') == 0, run.text


def test_a_signal_to_the_launcher_saves(tmp_path):
    run = Run(tmp_path, changed(BUSY, stage1__epochs=500))
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2']
    command += ['train_imagenet.py', '--config', str(run.config), '--output', str(run.output)]
    command += ['--checkpoint_minutes', '1e-9']  # the processes agree on when
    environment = os.environ | {'ACCELERATE_USE_CPU': 'true', 'OMP_NUM_THREADS': '1'}
    with run.log.open('w') as log, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as both:
        while len(run.checkpoints) < 2:
            assert both.poll() is None, run.text
            time.sleep(0.05)
        both.terminate()
        both.wait(100)
    assert run.text.count('stopped by SIGTERM and saved as') == 1, run.text
    saved = run.text.split('and saved as ')[1].split(';')[0]
    assert run.checkpoints[-1].stem == saved
    assert 'DataLoader worker' not in run.text


def test_a_last_step_that_broke_the_network_is_said(tmp_path):
    """Whose loss nobody trains on any more."""
    run = Run(tmp_path, changed(TINY, stage1__lr=1e30, stage1__epochs=1, stage2__epochs=0, global_batch_size=32))
    assert run.run() == 0, run.text
    assert 'the validation loss is not finite' in run.text


@pytest.mark.parametrize('processes', [1, 2])
def test_a_non_finite_loss_updates_and_saves_nothing(tmp_path, processes):
    # The learning rate explodes after the first checkpoint, and the second step from there has no finite loss.
    settings = changed(TINY, stage1={'epochs': 2, 'lr': 1e30, 'warmup_epochs': 1, 'warmup_lr': 0.0}, stage2__epochs=0)
    run = Run(tmp_path, settings | {'checkpoint_steps': 1})
    assert run.run_together(processes) == [1] * processes if processes > 1 else run.run() == 1
    assert run.text.count('the loss is not finite') == 1
    assert f'The last checkpoint is {run.checkpoints[-1]}' in run.text
    assert all(value.isfinite().all() for value in run.weights.values())
