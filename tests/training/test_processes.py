import os
import signal
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, LoggerType

from rotp_vision.training import processes
from rotp_vision.training.processes import (
    check_launch,
    check_trackers,
    fail,
    hold,
    precision,
    stop_signals,
    together,
)
from tests.training.runs import FORKS


def test_several_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    alone = SimpleNamespace(num_processes=1, distributed_type=DistributedType.NO)
    monkeypatch.delenv('WORLD_SIZE', raising=False)
    check_launch(alone)
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(RuntimeError, match=r'each believes it is alone; .*ACCELERATE_USE_CPU=true'):
        check_launch(alone)
    monkeypatch.delenv('WORLD_SIZE')
    # As `accelerate launch --cpu --num_processes 2` leaves it.
    monkeypatch.setenv('MASTER_ADDR', '127.0.0.1')
    monkeypatch.setenv('ACCELERATE_DYNAMO_BACKEND', 'NO')
    with pytest.raises(RuntimeError, match=r'started one process only; .*ACCELERATE_USE_CPU=true'):
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
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_signals() as caught:
        os.kill(os.getpid(), signal.SIGHUP)
        assert caught == []  # as under nohup


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
    here, others = socket.gethostname(), []
    monkeypatch.setattr(processes, 'gather', lambda value: [value, *others])

    def said(*problems):
        others[:] = problems[1:]
        with pytest.raises(SystemExit), together():  # noqa: PT012
            if problems[0]:
                raise ValueError(problems[0])
        return capsys.readouterr().err

    with pytest.raises(SystemExit):
        fail('the disk is full')
    assert capsys.readouterr().err == 'error: the disk is full\n'
    assert said('a', ('a', 'process 1 on n1')) == 'error: a\n'
    assert said('', ('b', 'process 1 on n1'), None) == 'error: process 1 on n1: b\n'
    others[:] = [None]
    with together():  # no process fails
        pass
    monkeypatch.setenv('WORLD_SIZE', '3')
    monkeypatch.setenv('RANK', '2')
    assert said('a', None) == ''  # process 0 says it
    monkeypatch.setattr(os, '_exit', sys.exit)
    with pytest.raises(SystemExit):
        fail('the disk is full')
    assert capsys.readouterr().err == f'error: process 2 on {here}: the disk is full\n'


def test_auto_is_bf16_on_a_gpu_that_has_it(monkeypatch):
    for name in ('ACCELERATE_MIXED_PRECISION', 'ACCELERATE_USE_CPU'):
        monkeypatch.delenv(name, raising=False)
    assert precision('bf16') == 'bf16'
    for gpu, native, expected in ((False, True, None), (True, False, None), (True, True, 'bf16')):
        monkeypatch.setattr(torch.cuda, 'is_available', lambda gpu=gpu: gpu)
        monkeypatch.setattr(
            torch.cuda, 'is_bf16_supported', lambda including_emulation, native=native: including_emulation or native
        )
        assert precision('auto') == expected
    monkeypatch.setenv('ACCELERATE_MIXED_PRECISION', 'fp16')
    assert precision('auto') is None  # the launcher's
