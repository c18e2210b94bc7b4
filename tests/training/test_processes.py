import math
import os
import signal
import socket
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate.utils import DistributedType, LoggerType
from torch.utils._python_dispatch import TorchDispatchMode

from rotp_vision.training import processes
from rotp_vision.training.context import fail, fail_once, fail_together
from rotp_vision.training.processes import (
    HostGroup,
    KeptBuffers,
    LossWatch,
    check_launch,
    check_trackers,
    hold,
    precision,
    stop_signals,
)
from tests.training.runs import FORKS


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


def hold_and_say(place, said, killed=False):
    try:
        hold(place)
    except ValueError as error:
        said.put(str(error))
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_directory_is_held_until_the_process_ends(tmp_path):
    hold(tmp_path)
    hold(tmp_path)  # by this process: nothing new
    said = FORKS.SimpleQueue()
    other = FORKS.Process(target=hold_and_say, args=(tmp_path, said))
    other.start()
    assert f'is in use by process {os.getpid()} on {socket.gethostname()} since 2' in said.get()
    other.join()
    place = tmp_path / 'other'
    place.mkdir()
    other = FORKS.Process(target=hold_and_say, args=(place, said, True))
    other.start()
    other.join()
    assert other.exitcode == -signal.SIGKILL
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


def test_buffers_are_copied_at_once_for_each_type():
    calls = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append((function, {tensor.dtype for tensor in args[0]}))
            return function(*args, **(kwargs or {}))

    kept = KeptBuffers(timm.create_model('resnet18', channels=[8] * 4))
    with Count():
        kept.keep()
    copy = torch.ops.aten._foreach_copy_.default
    assert calls == [(copy, {torch.float32}), (copy, {torch.int64})]


def test_auto_is_bf16_on_a_gpu_that_has_it(monkeypatch):
    for name in ('ACCELERATE_MIXED_PRECISION', 'ACCELERATE_USE_CPU'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert (precision('auto'), precision('bf16')) == (None, 'bf16')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation: including_emulation)
    assert precision('auto') is None  # which only imitates it
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation: True)
    assert (precision('auto'), precision('no')) == ('bf16', 'no')
    monkeypatch.setenv('ACCELERATE_MIXED_PRECISION', 'fp16')
    assert precision('auto') is None  # the launcher's
    monkeypatch.delenv('ACCELERATE_MIXED_PRECISION')
    monkeypatch.setenv('ACCELERATE_USE_CPU', 'true')
    assert precision('auto') is None


def test_a_process_that_cannot_be_reached_is_said_with_the_cure(monkeypatch):
    """As where gloo takes another network than NCCL."""

    def barrier(*args, **kwargs):
        raise RuntimeError('Ranks 1 failed to pass monitoredBarrier in 120000 ms')

    monkeypatch.setattr(processes, '_gloo', lambda timeout=None: None)
    monkeypatch.setattr(processes.dist, 'monitored_barrier', barrier)
    with pytest.raises(RuntimeError, match=r'(?s)over gloo: Ranks 1 failed.*as in GLOO_SOCKET_IFNAME=eth0'):
        HostGroup(SimpleNamespace(num_processes=2))


def test_one_process_agrees_with_itself(tmp_path):
    host = HostGroup(SimpleNamespace(num_processes=1))
    assert host.start(1.5, True).wait() == host.sum(1.5, True) == [1.5, 1.0]
    host.check_shared(tmp_path / 'cache', 'stage2.cache_dir')
    assert not any((tmp_path / 'cache').iterdir())
