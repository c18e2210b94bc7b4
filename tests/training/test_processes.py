import math
import os
import signal
import socket
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, LoggerType

from rotp_vision.training import processes
from rotp_vision.training.processes import (
    HostCopy,
    check_launch,
    check_shared,
    check_trackers,
    fail,
    fail_once,
    fail_together,
    gather,
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


@pytest.fixture
def default_signals():
    """As in a terminal: under nohup and in the background some signals are ignored."""
    handlers = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_are_remembered_and_a_second_interrupt_ends(default_signals):
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals() as caught:
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == ['SIGTERM']
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_signal_stays_ignored(default_signals):
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_signals() as caught:
        os.kill(os.getpid(), signal.SIGHUP)
        assert caught == []


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

    monkeypatch.setattr(processes, 'gather', lambda value: [value, *others])
    others = [('a', 'n1'), ('a', 'n1')]
    assert said(fail_together, ValueError('a')) == 'error: a\n'
    others = [None, ('b', 'n1')]
    assert said(fail_together, None) == 'error: process 2 on n1: b\n'
    others = [None, None]
    fail_together(None)


def test_a_host_copy_reads_what_was_recorded():
    copy, values = HostCopy(torch.device('cpu')), torch.tensor([0.25, math.nan], requires_grad=True)
    copy.record(values)
    with torch.no_grad():
        values += 1  # as the next step does; the recorded values stay
    first, second = copy.read()
    assert first == 0.25
    assert math.isnan(second)


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


def test_one_process_agrees_with_itself(tmp_path):
    assert gather('a') == ['a']
    check_shared(tmp_path / 'cache', 'stage2.cache_dir')
    assert not any((tmp_path / 'cache').iterdir())
