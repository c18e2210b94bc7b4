"""Runs of train_imagenet.py in processes of their own that can be killed, without paying for imports each time."""

import itertools
import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import yaml
from PIL import Image
from torch import Tensor

from rotp_vision.data.workers import STOP_SIGNALS
from rotp_vision.training.checkpoint import list_checkpoints, load_checkpoint

ROOT = Path(__file__).resolve().parents[2]

# The server imports once; every run is a fork of it.
os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH', '')]))
FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload(['train_imagenet'])

TINY = {
    'global_batch_size': 8,
    'log_every': 1,
    'checkpoint_steps': 2,
    'data': {
        # Of the 40 images a fifth is held out for calibration.
        **{'source': 'generated', 'image_size': 32, 'train_images': 40, 'val_images': 19, 'num_classes': 4},
        **{'workers': 0, 'scale': [0.5, 1.0], 'color_jitter': 0.2, 'auto_augment': 'rand-m5-inc1'},
    },
    'model': {'name': 'resnet10t', 'kwargs': {'channels': [8, 8, 16, 16], 'output_stride': 8}},
    'pool': {
        'options': {'solver': 'sinkhorn', 'feature_scale': 'rms', 'gain': 'scalar', 'start': 'mean', 'smoothness': 4.0}
    },
    'stage1': {'epochs': 2, 'lr': 0.05},
    'stage2': {'epochs': 2, 'pool_lr': 0.05},
}


class Stop(NamedTuple):
    """A signal that a run sends itself before it touches a path beginning with `place` for the `count`th time.

    No machine is fast or slow enough to move this moment. Weights are written by compiled code and are not counted;
    reading them again for their digests is.
    """

    signal: signal.Signals
    place: Path
    count: int = 1
    group: bool = False  # the data workers get it too, as from a scheduler or a terminal
    rank: int = 0  # of the process that touches the path
    victim: int | None = None  # rank of the process that gets the signal; by default the same one

    def install(self, pids: Path) -> None:
        process, place, touched = os.getpid(), str(self.place), 0
        if self.group:
            os.setpgrp()

        def hook(event: str, args: tuple) -> None:
            nonlocal touched
            # Data workers inherit the hook and are not meant.
            if event.startswith(('open', 'os.', 'shutil.')) and args and os.getpid() == process:
                touched += str(args[0]).startswith(place)
                if touched == self.count:
                    touched += 1
                    victim = process if self.victim is None else int((pids / f'pid{self.victim}').read_text())
                    (os.killpg if self.group else os.kill)(victim, self.signal)

        sys.addaudithook(hook)


def _child(args: list[str], log: Path, stop: Stop | None, environment: dict[str, str]) -> None:
    import torch

    for number in STOP_SIGNALS:  # a job in the background would inherit ignored signals
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    os.environ.update(environment)
    if (backend := environment.get('COMPILER')) is not None:
        torch.compiler.set_default_backend(backend)
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    torch.set_num_threads(1)
    # A fork of the server would start a server of its own, imports and all, for its data workers.
    multiprocessing.set_start_method('fork', force=True)
    sys.argv = ['train_imagenet.py', *args]
    from train_imagenet import main

    rank = environment.get('RANK', '0')
    (log.parent / f'pid{rank}').write_text(str(os.getpid()))
    if stop is not None and stop.rank == int(rank):
        stop.install(log.parent)
    main()


class Run:
    """One output directory and the runs in it."""

    def __init__(self, directory: Path, settings: dict | None = None):
        directory.mkdir(parents=True, exist_ok=True)
        self.output, self.log = directory / 'run', directory / 'log.txt'
        self.config = directory / 'config.yaml'
        self.config.write_text(yaml.safe_dump(TINY if settings is None else settings))

    def run(self, *args: str, stop: Stop | None = None, environment: dict[str, str] | None = None) -> int | None:
        """Runs to the end, or until `stop`; returns the exit status."""
        (status,) = self._run([args], stop, [environment or {}])
        return status

    def run_together(
        self,
        processes: int,
        *args: str,
        last: tuple[str, ...] = (),
        stop: Stop | None = None,
        environment: dict[str, str] | None = None,
    ) -> list[int | None]:
        """Runs several processes, connected over gloo as torchrun does it; `last` are arguments of the last alone."""
        with socket.socket() as probe:
            probe.bind(('127.0.0.1', 0))
            port = probe.getsockname()[1]
        shared = {'WORLD_SIZE': processes, 'LOCAL_WORLD_SIZE': processes, 'MASTER_ADDR': '127.0.0.1'}
        shared |= {'MASTER_PORT': port, 'ACCELERATE_USE_CPU': 'true', 'OMP_NUM_THREADS': 1} | (environment or {})
        places = [
            {key: str(value) for key, value in (shared | {'RANK': rank, 'LOCAL_RANK': rank}).items()}
            for rank in range(processes)
        ]
        return self._run([*[args] * (processes - 1), (*args, *last)], stop, places)

    def _run(
        self, args: list[tuple[str, ...]], stop: Stop | None, environments: list[dict[str, str]]
    ) -> list[int | None]:
        common = ['--config', str(self.config), '--output', str(self.output)]
        children = [
            FORKS.Process(target=_child, args=([*common, *some], self.log, stop, environment))
            for some, environment in zip(args, environments, strict=True)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(300)
        statuses = [child.exitcode for child in children]
        for child in children:
            child.kill()  # one that hangs is not to run beside other tests
        assert None not in statuses, f'still running:\n{self.text}'
        return statuses

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ''

    @property
    def checkpoints(self) -> list[Path]:
        return list_checkpoints(self.output / 'checkpoints')

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights of the last checkpoint."""
        return load_checkpoint(self.checkpoints[-1]).model


def changed(settings: dict, **changes) -> dict:
    """`settings` with dotted (double underscore) keys changed."""
    result = yaml.safe_load(yaml.safe_dump(settings))
    for key, value in changes.items():
        *path, last = key.split('__')
        place = result
        for part in path:
            place = place[part]
        place[last] = value
    return result


def images(data):
    """A folder with 20 images of 4 classes for training and as many for validation."""
    for split, label in itertools.product(('train', 'val'), range(4)):
        (data / split / f'{label}').mkdir(parents=True)
        for number in range(5):
            Image.new('RGB', (40, 40), (40 * label, 9 * number, 0)).save(data / split / f'{label}' / f'{number}.png')
    return data
