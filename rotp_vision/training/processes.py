"""Processes of a run: the launch check, communication between hosts, signals, random state."""

import errno
import fcntl
import os
import random
import signal
import socket
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, LoggerType, parse_flag_from_env
from torch import Tensor, nn
from torch.utils.data import DataLoader


def check_launch(accelerator: Accelerator) -> None:
    """Raise if a launcher started several processes that are not connected, or shards the model."""
    world = int(os.environ.get('WORLD_SIZE', '1'))
    if world > 1 and accelerator.num_processes == 1:
        raise RuntimeError(
            f'the launcher started {world} processes but each believes it is alone; on CPU set '
            f'ACCELERATE_USE_CPU=true, e.g. ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node {world} '
            'train_imagenet.py …'
        )
    plain = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in plain:
        raise RuntimeError(
            f'this script runs on one process or data parallel (DDP); {accelerator.distributed_type.value} shards the '
            'model, which its checkpoints do not cover. Use a file of configs/accelerate/'
        )


_held: dict[Path, TextIO] = {}


def hold(directory: Path) -> None:
    """Lock a directory against other runs until this process ends; a ValueError names the run that holds the lock."""
    if directory in _held:
        return
    file = (directory / '.lock').open('a+')
    try:
        # Not flock, whose lock the data workers of a killed process would hold for a while.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return  # a file system without locks
        file.seek(0)
        raise ValueError(
            f'{directory} is in use by {file.read() or "another run"}: wait for it, stop it or choose another --output'
        ) from error
    file.truncate(0)
    file.write(f'process {os.getpid()} on {socket.gethostname()} since {time.strftime("%Y-%m-%d %H:%M:%S")}')
    file.flush()
    _held[directory] = file


def precision(setting: str) -> str | None:
    """Accelerate's argument for `mixed_precision`; None leaves the choice to the launcher."""
    if setting != 'auto':
        return setting
    if 'ACCELERATE_MIXED_PRECISION' in os.environ or parse_flag_from_env('ACCELERATE_USE_CPU'):
        return None
    return 'bf16' if torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False) else None


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ValueError for a tracker that is not installed, which Accelerate would ignore."""
    known, there = LoggerType.list(), [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in known:
            raise ValueError(f'trackers must be some of {", ".join(known)}, got {name!r}')
        if name != 'all' and name not in there:
            raise ValueError(f'tracker {name} is not installed: pip install {name.replace("_", "-")}')


REACH_SECONDS = 120  # in which all processes must have reached each other


def unreachable(error: object) -> RuntimeError:
    """What to do where the processes of several nodes do not reach each other over gloo."""
    return RuntimeError(
        f'the processes do not all reach each other over gloo: {error}\nThis is {socket.gethostname()}. gloo uses the '
        'interface that the host name resolves to, which may be another one than that of NCCL: name the interface that '
        'connects the nodes (`ip addr` lists them) on each of them, as in GLOO_SOCKET_IFNAME=eth0'
    )


class HostGroup:
    """Communication between the hosts of all processes, over gloo: it does not synchronise with a GPU."""

    def __init__(self, accelerator: Accelerator):
        self.group: dist.ProcessGroup | None = None
        if accelerator.num_processes > 1:
            self._check_reach()
            self.group = _gloo()

    @staticmethod
    def _check_reach() -> None:
        """Raise a RuntimeError within two minutes, instead of half an hour, if a process cannot be reached."""
        limit = timedelta(seconds=REACH_SECONDS)
        try:
            group = _gloo(limit)
            dist.monitored_barrier(group, limit, wait_all_ranks=True)
            dist.destroy_process_group(group)
        except RuntimeError as error:
            raise unreachable(error) from error

    def start(self, *values: float) -> 'PendingSum':
        """Begin to sum each value over the processes."""
        total = torch.tensor(values, dtype=torch.float64)
        work = None if self.group is None else dist.all_reduce(total, group=self.group, async_op=True)
        return PendingSum(total, work)

    def sum(self, *values: float) -> list[float]:
        """Each value summed over the processes."""
        return self.start(*values).wait()

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of their ranks, on every process."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def wait(self) -> None:
        """Wait until every process has called this."""
        self.sum(0)

    def check_shared(self, directory: Path, name: str) -> None:
        """Raise a ValueError unless every process can write to a directory and sees what the others write."""
        rank, problem = (0 if self.group is None else dist.get_rank(self.group)), None
        token = directory / f'.{uuid.uuid4().hex}.token'
        try:
            directory.mkdir(parents=True, exist_ok=True)
            token.touch()
        except OSError as error:
            problem = f'cannot write to {name} {directory}: {error}'
        tokens = self.gather(None if problem else token.name)
        missing = [who for who, other in enumerate(tokens) if other and not (directory / other).exists()]
        if missing and problem is None:
            problem = (
                f'does not see what process {", ".join(map(str, missing))} writes to {name} {directory}: it must be on '
                'storage that all nodes share'
            )
        self.wait()  # until all have looked
        token.unlink(missing_ok=True)
        if problem:
            raise ValueError(f'process {rank} on {socket.gethostname()} {problem}')


def _gloo(timeout: timedelta | None = None) -> dist.ProcessGroup:
    group = dist.new_group(backend='gloo', timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


class PendingSum(NamedTuple):
    """A sum over the processes that is under way."""

    total: Tensor
    work: dist.Work | None

    def wait(self) -> list[float]:
        """The sums."""
        if self.work is not None:
            self.work.wait()
        return self.total.tolist()


class LossWatch:
    """Reads the loss on the host without stalling the device.

    Call `record` after queueing the forward pass and `read` after queueing the backward pass: `read` synchronises with
    the end of the forward pass, while the device is busy with the backward pass.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == 'cuda'
        self.host = torch.zeros((), pin_memory=self.cuda)
        self.done = torch.cuda.Event() if self.cuda else None

    def record(self, loss: Tensor) -> None:
        self.host.copy_(loss.detach(), non_blocking=self.cuda)
        if self.done is not None:
            self.done.record()

    def read(self) -> float:
        if self.done is not None:
            self.done.synchronize()
        return float(self.host)


class KeptBuffers:
    """Copies of a module's buffers from before a step, because a forward pass with NaN spoils batch statistics."""

    def __init__(self, module: nn.Module):
        buffers = [buffer for buffer in module.buffers() if buffer.numel()]
        # Lists of one type each: of mixed types torch copies tensor by tensor.
        self.buffers = [[b for b in buffers if b.dtype == dtype] for dtype in {b.dtype: None for b in buffers}]
        self.kept = [[buffer.clone() for buffer in some] for some in self.buffers]

    def keep(self) -> None:
        _copy(self.kept, self.buffers)

    def restore(self) -> None:
        _copy(self.buffers, self.kept)


def _copy(targets: list[list[Tensor]], sources: list[list[Tensor]]) -> None:
    for some, others in zip(targets, sources, strict=True):
        torch._foreach_copy_(some, others)  # pyright: ignore[reportPrivateImportUsage]


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
    """The exit status of a process that a signal stopped, by the convention of shells."""
    return 128 + signal.Signals[name]


def iterate(loader: DataLoader) -> Iterator[Any]:
    """The batches of a loader whose workers ignore stop signals.

    Schedulers and terminals signal a whole process group. A worker that died of that would end the main process while
    it writes its last checkpoint.
    """
    loader.worker_init_fn = _ignore_stop_signals
    # Signals are blocked until the workers ignore them.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    if loader.num_workers:
        # At exit a process sends its workers a SIGTERM, which these ignore, and waits for them. So the loader ends them
        # first, before their queues close (priority 10).
        Finalize(batches, _end_workers, (weakref.ref(batches),), exitpriority=20)
    return batches


def _ignore_stop_signals(worker: int) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end_workers(batches: weakref.ref[Any]) -> None:
    if (alive := batches()) is not None:
        alive._shutdown_workers()


def random_state() -> dict[str, Any]:
    """State of this process's generators, in types that `torch.load(weights_only=True)` reads."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 (timm's transforms and Mixup draw from it)
    state = {
        'python': random.getstate(),
        'numpy': (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        'torch': torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state['cuda'] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the generators to a state of `random_state`."""
    random.setstate(state['python'])
    name, keys, *rest = state['numpy']
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state['torch'])
    if 'cuda' in state:
        torch.cuda.set_rng_state(state['cuda'])


def seed_all(*numbers: int) -> None:
    """Seed Python, NumPy and torch from several non-negative numbers.

    NumPy's seed sequence mixes them, so that neighbouring numbers give unrelated streams. On CPU this costs some 20 µs
    (`torch.manual_seed`, which looks for every kind of device, 300 µs).
    """
    first, second = np.random.SeedSequence(numbers).generate_state(2, np.uint32)
    random.seed(int(first))
    np.random.seed(int(second))  # noqa: NPY002
    seed = int(first) << 31 ^ int(second)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def share_buffers(module: nn.Module, accelerator: Accelerator) -> None:
    """Broadcast the buffers of the main process, as DDP does before a forward pass in training."""
    if accelerator.num_processes > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)
