"""Data workers that ignore stop signals, and the random state of a process."""

import os
import random
import shutil
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

PREFETCHED = 2  # batches that each data worker prepares ahead
SHARED_MEMORY = Path('/dev/shm')  # where data workers put their batches on Linux
# Windows has no SIGHUP.
STOP_SIGNALS = tuple(signal.Signals[n] for n in ('SIGTERM', 'SIGINT', 'SIGHUP') if n in signal.Signals.__members__)


def loading(workers: int) -> dict[str, Any]:
    """Returns the arguments of every data loader."""
    return {
        'num_workers': workers,
        'pin_memory': torch.cuda.is_available(),
        'generator': torch.Generator(),  # otherwise the loader draws its seed from the random state of the process
        'prefetch_factor': PREFETCHED if workers else None,
    }


def iterate(loader: DataLoader) -> Iterator[Any]:
    """Returns the batches of a loader whose workers ignore stop signals.

    Schedulers and terminals signal a whole process group. A worker killed by such a signal would end the main process
    while it writes its last checkpoint.
    """
    loader.worker_init_fn = _ignore_stop_signals
    with _blocked_signals():  # until the workers ignore them
        batches = iter(loader)
    if loader.num_workers:
        # At exit a process sends SIGTERM to its workers, which these ignore, and waits for them. So the loader ends
        # them first, before their queues close (priority 10).
        Finalize(batches, _end_workers, (weakref.ref(batches),), exitpriority=20)
    return batches


@contextmanager
def _blocked_signals() -> Iterator[None]:
    if not hasattr(signal, 'pthread_sigmask'):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_stop_signals(worker: int) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end_workers(batches: weakref.ref[Any]) -> None:
    if (alive := batches()) is not None:
        alive._shutdown_workers()


def check_shared_memory(workers: int, batch_bytes: int) -> None:
    """Raises an OSError if the batches that the data workers of this machine hold do not fit into shared memory.

    Otherwise the system kills a worker that finds it full and does not name the cause.
    """
    if not SHARED_MEMORY.is_dir() or not workers:
        return
    processes = int(os.environ.get('LOCAL_WORLD_SIZE', '1'))
    need, free = processes * workers * PREFETCHED * batch_bytes, shutil.disk_usage(SHARED_MEMORY).free
    if need > free:
        raise OSError(
            f'{processes} × {workers} data workers hold up to {need / 2**20:.0f} MiB in {SHARED_MEMORY}, which has '
            f'{free / 2**20:.0f} MiB free: give it more (docker run --shm-size=…, or --ipc=host), or lower '
            'data.workers; 0 needs none'
        )


def random_state() -> dict[str, Any]:
    """Returns the state of this process's generators in types that `torch.load(weights_only=True)` reads."""
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
    """Restores the generators to a state of `random_state`."""
    random.setstate(state['python'])
    name, keys, *rest = state['numpy']
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state['torch'])
    if 'cuda' in state:
        torch.cuda.set_rng_state(state['cuda'])


def seed_all(*numbers: int) -> None:
    """Seeds Python, NumPy and torch from several non-negative numbers.

    NumPy's seed sequence mixes them, so that neighbouring numbers give unrelated streams. This takes about 20 µs on a
    CPU; `torch.manual_seed`, which looks for every kind of device, takes 300 µs.
    """
    first, second = np.random.SeedSequence(numbers).generate_state(2, np.uint32)
    random.seed(int(first))
    np.random.seed(int(second))  # noqa: NPY002
    seed = int(first) << 31 ^ int(second)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


@contextmanager
def seeded(*seeds: int) -> Iterator[None]:
    """Makes random draws inside a function of the seeds; the random state of the process does not change."""
    state = random_state() if get_worker_info() is None else None  # nothing else draws in a data worker
    seed_all(*seeds)
    try:
        yield
    finally:
        if state is not None:
            set_random_state(state)
