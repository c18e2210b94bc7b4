"""Processes of a run: the launch, agreement between them, stop signals, and ending them with an error message."""

import os
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, LoggerType, broadcast, gather_object, parse_flag_from_env
from filelock import FileLock, Timeout
from torch import nn
from torch.distributed import DistError

from rotp_vision.data.cache import DamagedMaps
from rotp_vision.data.workers import STOP_SIGNALS

ON_CPU = 'ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2'  # two processes


def this_process() -> str:
    """Returns the rank and the machine of this process, for messages."""
    return f'process {os.environ.get("RANK", "0")} on {socket.gethostname()}'


def fail(error: object) -> NoReturn:
    """Ends the process with a message instead of a traceback; with several processes it says which one failed."""
    print(f'error: {this_process()}: {error}' if _several() else f'error: {error}', file=sys.stderr, flush=True)
    if _several():
        _end_at_once()
    raise SystemExit(1)


def fail_once(error: object) -> NoReturn:
    """Ends the process because of an error that all processes have; only the main one prints it."""
    if os.environ.get('RANK', '0') == '0':
        print(f'error: {error}', file=sys.stderr, flush=True)
    raise SystemExit(1)


@contextmanager
def together(errors: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Runs a block in all processes and ends them all if it raises in any; each distinct error is printed once.

    Args:
        errors: the expected errors.
    """
    found = None
    try:
        yield
    except errors as error:
        found = str(error), this_process()
    problems = gather(found)
    reports: dict[str, list[str]] = {}
    for text, who in filter(None, problems):
        reports.setdefault(text, []).append(who)
    if len(reports) == 1 and None not in problems:
        fail_once(*reports)
    if reports:
        fail_once('\n'.join(f'{", ".join(who)}: {text}' for text, who in reports.items()))


@contextmanager
def expected_errors() -> Iterator[None]:
    """Ends this process with a message if cached maps are damaged or another process has ended.

    After any other error, one of several processes ends at once, so that the others notice.
    """
    try:
        yield
    except DamagedMaps as error:  # a data worker adds its traceback to the message
        fail(str(error).strip().split('DamagedMaps: ')[-1])
    except Exception as error:
        if isinstance(error, DistError) or 'third_party/gloo' in str(error):
            fail(
                'the connection to another process is lost. If that process was killed (for want of memory, for '
                'example), continue with --resume auto; otherwise its own message says what to do'
            )
        if _several():
            traceback.print_exc()
            _end_at_once()
        raise


def _several() -> bool:
    """Whether a launcher has started several processes."""
    return int(os.environ.get('WORLD_SIZE', '1')) > 1


def _end_at_once() -> NoReturn:
    """Ends the process without taking the process group down, which could wait for processes that wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def gather(value: Any) -> list[Any]:
    """Returns the values of all processes, in the order of their ranks, on every process."""
    return gather_object([value])


def check_launch(accelerator: Accelerator) -> None:
    """Raises if fewer processes run together than the launcher was asked for, or if it shards the model."""
    world = int(os.environ.get('WORLD_SIZE', '1'))
    # `accelerate launch --cpu --num_processes 2` sets an address for several processes and starts one.
    asked_for_more = os.environ.get('MASTER_ADDR') == '127.0.0.1' and 'ACCELERATE_DYNAMO_BACKEND' in os.environ
    if accelerator.num_processes == 1 and (world > 1 or (asked_for_more and 'WORLD_SIZE' not in os.environ)):
        what = f'started {world} processes but each believes it is alone' if world > 1 else 'started one process only'
        raise RuntimeError(f'the launcher {what}; several on a CPU: {ON_CPU} train_imagenet.py …')
    plain = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in plain:
        raise RuntimeError(
            f'this script runs on one process or data parallel (DDP); {accelerator.distributed_type.value} shards the '
            'model, which its checkpoints do not cover. Use a file of configs/accelerate/'
        )


def check_shared(directory: Path, name: str) -> None:
    """Raises a ValueError unless every process can write to a directory and sees what the others write."""
    problem, token = None, directory / f'.{uuid.uuid4().hex}.tmp'
    try:
        directory.mkdir(parents=True, exist_ok=True)
        token.touch()
    except OSError as error:
        problem = f'cannot write to {name} {directory}: {error}'
    tokens = gather(None if problem else token.name)
    missing = [who for who, other in enumerate(tokens) if other and not (directory / other).exists()]
    if missing and problem is None:
        problem = (
            f'does not see what process {", ".join(map(str, missing))} writes to {name} {directory}: it must be on '
            'storage that all nodes share'
        )
    gather(None)  # until all processes have looked
    token.unlink(missing_ok=True)
    if problem:
        raise ValueError(problem)


def check_trackers(names: Sequence[str]) -> None:
    """Raises a ValueError for a tracker that is not installed, which Accelerate would ignore."""
    known, there = LoggerType.list(), [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in known:
            raise ValueError(f'trackers must be some of {", ".join(known)}, got {name!r}')
        if name != 'all' and name not in there:
            raise ValueError(f'tracker {name} is not installed: pip install {name.replace("_", "-")}')


_locks: dict[Path, FileLock] = {}


def hold(directory: Path) -> None:
    """Locks a directory against other runs until this process ends; a ValueError names the run that holds the lock."""
    if directory in _locks:
        return
    lock, owner = FileLock(directory / '.lock', blocking=False), directory / '.owner'
    try:
        lock.acquire()
    except Timeout as error:
        who = owner.read_text() if owner.is_file() else 'another run'
        raise ValueError(f'{directory} is in use by {who}: wait for it, stop it or choose another --output') from error
    owner.write_text(f'process {os.getpid()} on {socket.gethostname()} since {time.strftime("%Y-%m-%d %H:%M:%S")}')
    _locks[directory] = lock


def precision(setting: str) -> str | None:
    """Returns Accelerate's argument for `mixed_precision`; None leaves the choice to the launcher."""
    if setting != 'auto':
        return setting
    if 'ACCELERATE_MIXED_PRECISION' in os.environ or parse_flag_from_env('ACCELERATE_USE_CPU'):
        return None
    return 'bf16' if torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False) else None


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """A list to which SIGTERM, SIGINT and SIGHUP append their names instead of ending the process.

    A SIGINT after another signal does end it. Signals that the process ignores, as under nohup, stay ignored.
    """
    caught: list[str] = []

    def remember(number: int, frame: object) -> None:
        if number == signal.SIGINT and caught:
            raise KeyboardInterrupt
        caught.append(signal.Signals(number).name)

    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, remember) for number in heard}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_status(name: str) -> int:
    """Exit status of a process that a signal stopped, by the convention of shells."""
    return 128 + signal.Signals[name]


def share_buffers(module: nn.Module) -> None:
    """Broadcasts the buffers of the main process, as DDP does before a forward pass in training."""
    broadcast(list(module.buffers()))
