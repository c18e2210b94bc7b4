"""The state that all parts of a run share, evaluation, and ending a run with an error message."""

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from rich.console import Console
from rich.markup import escape
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rotp_vision.training.checkpoint import Progress
from rotp_vision.training.config import RunConfig
from rotp_vision.training.data import Batch, Shard, TrainTransform, ValTransform, normalized, on_device, val_loader
from rotp_vision.training.processes import HostGroup, iterate
from rotp_vision.training.sources import Source, StreamSource


@dataclass
class Run:
    """A run, in one of its processes."""

    config: RunConfig
    stored_config: dict[str, Any]  # as stored in checkpoints
    accelerator: Accelerator
    host: HostGroup
    console: Console
    stop: list[str]  # names of the signals received
    train: Source | StreamSource
    val: Source | StreamSource
    held: Source | None  # training images that nothing trains on, for calibration; None for any of `train`
    train_transform: TrainTransform
    val_transform: ValTransform
    norm: tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of the network's input
    progress: Progress
    trained: bool  # whether stage 2 starts from a network whose classifier is trained

    @property
    def shard(self) -> Shard:
        return Shard(self.accelerator.process_index, self.accelerator.num_processes)

    @property
    def output(self) -> Path:
        return Path(self.config.output)

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def local_batch(self) -> int:
        """Images per process of a batch in evaluation."""
        return max(self.config.global_batch_size // self.shard.processes, 1)

    def place(self, model: nn.Module) -> nn.Module:
        """Move the model to the device and memory format of the run."""
        model.to(self.accelerator.device)
        if self.config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def prepare(self, batch: Batch) -> Batch:
        """A batch of images, or of maps, on that device, in that format and in float32; images are normalised."""
        device, images, erased = self.accelerator.device, batch.images, batch.erased
        images = images.to(device, non_blocking=True)
        if images.dtype == torch.uint8:
            erased = erased if erased is None else erased.to(device, non_blocking=True)
            images = normalized(images, *self._norm_on_device, erased)
        layout = torch.channels_last if self.config.channels_last else torch.contiguous_format
        images = images.float().contiguous(memory_format=layout) if images.dim() == 4 else images
        return Batch(images, batch.labels.to(device, non_blocking=True), batch.broken)

    @cached_property
    def _norm_on_device(self) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(values, device=self.accelerator.device) for values in self.norm)
        return mean, std

    def note_broken(self, names: list[str]) -> None:
        """Warn about new unreadable images of all processes and record them; too many of them end the run."""
        known, limit = self.progress.broken, self.config.data.max_broken
        new = {name for some in self.host.gather(names) for name in some} - set(known)
        for name in sorted(new):
            known.append(name)
            self.console.print(
                f'[yellow]warning:[/] unreadable image {escape(name)} ({len(known)} so far)', soft_wrap=True
            )
        if len(known) > limit:
            fail_once(f'{len(known)} unreadable images are more than data.max_broken = {limit}; the last: {known[-1]}')

    def val_images(self) -> Iterator[Batch]:
        """This process's share of the validation images."""
        return iterate(self._val_loader)

    @cached_property
    def _val_loader(self) -> DataLoader[Batch]:
        return val_loader(self.val, self.val_transform, self.config.data, self.local_batch, self.shard)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterator[Batch], expected: int) -> dict[str, float]:
        """Loss and accuracy over the images of all processes, each of which must be counted exactly once."""
        model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self.accelerator.device)
        broken: list[str] = []
        for images, labels, names, _ in on_device(batches, self.prepare, self.accelerator.device):
            broken += names
            if not len(labels):
                continue
            with self.accelerator.autocast():
                logits = model(images)
            logits = logits.float()
            hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction='sum')
            sums += torch.stack([loss, hits[:, 0].sum(), hits.sum(), torch.ones_like(labels).sum()]).double()
        loss, top1, top5, count, lost = self.host.sum(*sums.tolist(), len(broken))
        self.note_broken(broken)
        if count + lost != expected or count == 0:
            raise RuntimeError(
                f'evaluation saw {count:.0f} images, and {lost:.0f} unreadable ones, of {expected}. The size of a '
                'stream is what data.val_images says: start anew with the right one, if you like with the last '
                'checkpoint as --model.checkpoint'
            )
        return {'loss': loss / count, 'top1': 100 * top1 / count, 'top5': 100 * top5 / count, 'images': int(count)}


def num_launched() -> int:
    """Number of processes that the launcher started, known before they are connected."""
    return int(os.environ.get('WORLD_SIZE', '1'))


def is_first_process() -> bool:
    """Whether this is the main process, known before they are connected."""
    return os.environ.get('RANK', '0') == '0'


def fail(error: object) -> NoReturn:
    """End the process with a message instead of a traceback; with several processes it says which one failed."""
    who = ''
    if num_launched() > 1:
        who = f'process {os.environ.get("RANK")} on {socket.gethostname()}: '
    print(f'error: {who}{error}', file=sys.stderr, flush=True)
    raise SystemExit(1)


def fail_once(error: object) -> NoReturn:
    """End the process because of an error that all processes have; only the main one prints it."""
    if is_first_process():
        print(f'error: {error}', file=sys.stderr, flush=True)
    raise SystemExit(1)


def fail_together(host: HostGroup, problem: Exception | None) -> None:
    """End all processes if any has a problem; the main one prints each distinct problem once."""
    problems = host.gather(None if problem is None else (str(problem), socket.gethostname()))
    reports: dict[str, list[str]] = {}
    for rank, found in enumerate(problems):
        if found is not None:
            reports.setdefault(found[0], []).append(f'process {rank} on {found[1]}')
    if not reports:
        return
    if len(reports) == 1 and None not in problems:
        fail_once(*reports)
    fail_once('\n'.join(f'{", ".join(who)}: {text}' for text, who in reports.items()))
