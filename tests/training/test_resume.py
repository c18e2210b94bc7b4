"""No moment of being killed may change the weights a run ends with."""

import random
import signal

import pytest
from safetensors.torch import load_file

from tests.training.runs import TINY, Run, changed

# Data workers, shuffling, augmentation, dropout, mixup, accumulation and a moving average: all that has a state.
BUSY = changed(
    TINY,
    data__workers=2,
    model__kwargs={'channels': [8, 8, 16, 16], 'output_stride': 8, 'drop_rate': 0.2},
    stage1={'epochs': 2, 'lr': 0.05, 'mixup': 0.3, 'accumulation': 2, 'ema_decay': 0.9},
    stage2={'epochs': 2, 'lr': 0.05, 'train': 'pool+classifier'},
)


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp('whole'), BUSY)
    assert run.run() == 0, run.text
    return run


def killed_often(directory, times, seed, delay, settings=BUSY):
    """A run killed `times` times, each at a random moment within `delay` seconds of new progress, then finished."""
    rng = random.Random(seed)
    run = Run(directory, settings)
    kills = 0
    for _ in range(3 * times):
        before = set(run.checkpoints)
        process = run.start('--resume', 'auto')
        run.wait_for(lambda: set(run.checkpoints) - before, process)  # noqa: B023
        process.join(rng.uniform(0.0, delay))
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        if kills == times:
            break
    assert run.run('--resume', 'auto') == 0, run.text
    return run, kills


def assert_same(run, other):
    ours, theirs = (load_file(side.checkpoints[-1] / 'model.safetensors') for side in (run, other))
    assert run.checkpoints[-1].name == other.checkpoints[-1].name
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours), [n for n in ours if not ours[n].equal(theirs[n])]


def test_killed_three_times_ends_with_the_same_weights(tmp_path, uninterrupted):
    run, kills = killed_often(tmp_path, 3, seed=0, delay=0.5)
    assert kills == 3, run.text
    assert_same(run, uninterrupted)
    lines = [(side.output / 'metrics.csv').read_text().splitlines() for side in (run, uninterrupted)]
    without_time = [[line.rsplit(',', 1)[0] for line in side] for side in lines]
    assert without_time[0] == without_time[1]


@pytest.mark.slow
@pytest.mark.parametrize('cached', [False, True])
def test_killed_ten_times_ends_with_the_same_weights(tmp_path, cached):
    settings = changed(BUSY, stage1__epochs=4, stage2__epochs=3, stage2__cache_features=cached, stage2__cache_views=2)
    whole = Run(tmp_path / 'whole', settings)
    assert whole.run() == 0, whole.text
    run, kills = killed_often(tmp_path, 10, seed=1, delay=0.2, settings=settings)
    assert kills == 10, run.text
    assert_same(run, whole)


def test_signal_saves_and_resume_continues_bit_exactly(tmp_path, uninterrupted):
    run = Run(tmp_path, BUSY)
    process = run.start()
    run.wait_for(lambda: run.checkpoints, process)
    process.terminate()
    process.join(60)
    assert process.exitcode == 0, run.text
    assert 'stopped by SIGTERM' in run.text
    assert '--resume auto' in run.text
    assert not run.output.joinpath('export').exists()

    assert run.run() == 1  # without --resume it will not touch a run
    assert 'holds a run' in run.text
    assert run.run('--resume', 'auto', '--stage1.lr', '0.06') == 1
    assert 'stage1.lr: 0.05 → 0.06' in run.text

    # The last checkpoint is damaged: the one before it is taken.
    (run.checkpoints[-1] / 'state.pt').write_bytes(b'half')
    assert run.run('--resume', 'auto', '--data.workers', '0') == 0, run.text
    assert 'passed over a damaged checkpoint' in run.text
    assert_same(run, uninterrupted)


def test_a_last_step_that_broke_the_network_is_said(tmp_path):
    """Whose loss nobody trains on any more."""
    run = Run(tmp_path, changed(TINY, stage1__lr=1e30, stage1__epochs=1, stage2__epochs=0, global_batch_size=32))
    assert run.run() == 0, run.text
    assert 'the validation loss is not finite' in run.text


def test_non_finite_loss_stops_with_the_last_good_state(tmp_path):
    run = Run(tmp_path, changed(TINY, stage1__lr=1e30, stage2__epochs=0))
    assert run.run() == 1
    assert 'the loss is not finite' in run.text
    state = load_file(run.checkpoints[-1] / 'model.safetensors')
    assert run.checkpoints[-1].name in run.text
    assert all(value.isfinite().all() for name, value in state.items() if 'running' in name)
