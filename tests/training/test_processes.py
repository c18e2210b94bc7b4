import math
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, LoggerType

from rotp_vision.training import processes
from rotp_vision.training.context import fail, fail_once, fail_together
from rotp_vision.training.processes import KeptBuffers, LossWatch, check_launch, check_trackers, hold, stop_signals


def test_several_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    alone = SimpleNamespace(num_processes=1, distributed_type=DistributedType.NO)
    monkeypatch.delenv('WORLD_SIZE', raising=False)
    check_launch(alone)
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(RuntimeError, match='ACCELERATE_USE_CPU=true'):
        check_launch(alone)
    check_launch(SimpleNamespace(num_processes=2, distributed_type=DistributedType.MULTI_CPU))
    with pytest.raises(RuntimeError, match='FSDP shards'):
        check_launch(SimpleNamespace(num_processes=2, distributed_type=DistributedType.FSDP))


def test_signals_are_remembered_and_a_second_interrupt_ends():
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals() as caught:
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == ['SIGTERM']
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_the_process_was_told_to_ignore_stays_ignored():
    """As nohup tells it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as caught:
            os.kill(os.getpid(), signal.SIGHUP)
            assert caught == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_directory_is_held_until_the_process_ends(tmp_path):
    hold(tmp_path)
    hold(tmp_path)  # by this process: nothing new
    code = 'import sys; from pathlib import Path; from rotp_vision.training.processes import hold; hold(Path({!r}))'
    other = [sys.executable, '-c', code.format(str(tmp_path))]
    done = subprocess.run(other, capture_output=True, text=True)
    assert f'is in use by process {os.getpid()} on {socket.gethostname()} since 2' in done.stderr
    place = tmp_path / 'other'
    place.mkdir()
    killed = [*other[:2], code.format(str(place)) + '; import os; os.kill(os.getpid(), 9)']
    assert subprocess.run(killed).returncode == -signal.SIGKILL
    hold(place)


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(processes, 'get_available_trackers', lambda: [LoggerType.TENSORBOARD])
    check_trackers(['tensorboard', 'all'])
    with pytest.raises(ValueError, match='tracker comet_ml is not installed: pip install comet-ml'):
        check_trackers(['tensorboard', 'comet_ml'])
    with pytest.raises(ValueError, match=r"trackers must be some of .*, got 'tensorbord'"):
        check_trackers(['tensorbord'])


def test_a_process_that_fails_says_which_it_is(monkeypatch, capsys):
    def said(function, *args):
        with pytest.raises(SystemExit) as caught:
            function(*args)
        assert caught.value.code == 1
        return capsys.readouterr().err

    assert said(fail, 'the disk is full') == 'error: the disk is full\n'
    monkeypatch.setenv('WORLD_SIZE', '3')
    monkeypatch.setenv('RANK', '2')
    here = socket.gethostname()
    assert said(fail, 'the disk is full') == f'error: process 2 on {here}: the disk is full\n'
    assert said(fail_once, 'what all know') == ''
    monkeypatch.setenv('RANK', '0')
    assert said(fail_once, 'what all know') == 'error: what all know\n'

    gathered = SimpleNamespace(gather=lambda value: [value, *others])
    others = [('a', 'n1'), ('a', 'n1')]
    assert said(fail_together, gathered, ValueError('a')) == 'error: a\n'
    others = [None, ('b', 'n1')]
    assert said(fail_together, gathered, None) == 'error: process 2 on n1: b\n'
    others = [None, None]
    fail_together(gathered, None)


def test_loss_watch_reads_what_was_recorded():
    watch = LossWatch(torch.device('cpu'))
    loss = torch.tensor(0.25, requires_grad=True)
    watch.record(loss)
    with torch.no_grad():
        loss += 1  # as the next step does; what was recorded stays
    assert watch.read() == 0.25
    watch.record(torch.tensor(math.nan))
    assert math.isnan(watch.read())


def test_buffers_come_back():
    norm = torch.nn.BatchNorm1d(2)
    kept = KeptBuffers(norm)
    norm(torch.full((3, 2), 7.0))
    kept.keep()
    before = norm.running_mean.clone()
    norm(torch.full((3, 2), float('nan')))
    assert norm.running_mean.isnan().all()
    kept.restore()
    assert norm.running_mean.equal(before)
    KeptBuffers(torch.nn.Linear(2, 2)).keep()  # none to keep
