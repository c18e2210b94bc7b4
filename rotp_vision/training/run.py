"""The state that all parts of a run share, and evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rotp_vision.data.loading import Batch, Shard, val_loader
from rotp_vision.data.sources import Source
from rotp_vision.data.transforms import TrainTransform, ValTransform, normalized
from rotp_vision.data.workers import iterate
from rotp_vision.training.checkpoint import Checkpoint, Progress
from rotp_vision.training.config import RunConfig
from rotp_vision.training.processes import exit_status, fail_once, gather


@dataclass
class Run:
    """A run, in one of its processes."""

    config: RunConfig
    stored_config: dict[str, Any]  # as stored in checkpoints
    accelerator: Accelerator
    train: Source
    val: Source
    held: Source | None  # training images held out for calibration; None to calibrate on any of `train`
    train_transform: TrainTransform
    val_transform: ValTransform
    norm: tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of the network's input
    progress: Progress
    checkpoint: Checkpoint | None  # to continue from
    trained: bool  # whether stage 2 starts from a network whose classifier is trained
    stop: list[str]  # names of the signals received

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

    def say(self, text: object) -> None:
        """Prints text on the main process."""
        if self.main:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """Prints a warning on the main process."""
        self.say(f'warning: {text}')

    def leave(self) -> NoReturn:
        """Ends the run after a signal and a checkpoint."""
        cause = next(name for names in gather(self.stop) for name in names)
        self.say(
            f'stopped by {cause} and saved as {self.progress.name}; continue by the same command and --resume auto'
        )
        self.accelerator.end_training()
        raise SystemExit(exit_status(cause))

    def to_device(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device and memory format of the run."""
        model.to(self.accelerator.device)
        if self.config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def prepare(self, batch: Batch) -> Batch:
        """Returns a batch of images, or of maps, on that device, in that format and in float32; images normalised."""
        images, labels = (
            tensor.to(self.accelerator.device, non_blocking=True) for tensor in (batch.images, batch.labels)
        )
        if images.dtype == torch.uint8:
            images = normalized(images, *self._norm_on_device)
        layout = torch.channels_last if self.config.channels_last else torch.contiguous_format
        images = images.float().contiguous(memory_format=layout) if images.dim() == 4 else images
        return batch._replace(images=images, labels=labels)

    @cached_property
    def _norm_on_device(self) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(values, device=self.accelerator.device) for values in self.norm)
        return mean, std

    def sum(self, *values: float) -> list[float]:
        """Returns each value summed over the processes."""
        return [float(sum(column)) for column in zip(*gather(values), strict=True)]

    def note_broken(self, names: list[str]) -> None:
        """Records and warns about new unreadable images of all processes; too many of them end the run."""
        known, limit = self.progress.broken, self.config.data.max_broken
        new = {name for some in gather(names) for name in some} - set(known)
        for name in sorted(new):
            known.append(name)
            self.warn(f'unreadable image {name} ({len(known)} so far)')
        if len(known) > limit:
            fail_once(f'{len(known)} unreadable images are more than data.max_broken = {limit}; the last: {known[-1]}')

    def val_images(self) -> Iterator[Batch]:
        """Returns this process's share of the validation images."""
        return iterate(self._val_loader)

    @cached_property
    def _val_loader(self) -> DataLoader[Batch]:
        return val_loader(self.val, self.val_transform, self.config.data, self.local_batch, self.shard)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterator[Batch], expected: int) -> dict[str, float]:
        """Returns loss and accuracy over the images of all processes, each of which must be counted exactly once."""
        model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self.accelerator.device)
        broken: list[str] = []
        for batch in map(self.prepare, batches):
            broken += batch.broken
            labels = batch.labels
            if not len(labels):
                continue
            with self.accelerator.autocast():
                logits = model(batch.images)
            logits = logits.float()
            hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction='sum')
            sums += torch.stack([loss, hits[:, 0].sum(), hits.sum(), torch.ones_like(labels).sum()]).double()
        loss, top1, top5, count, lost = self.sum(*sums.tolist(), len(broken))
        self.note_broken(broken)
        if count + lost != expected or count == 0:
            raise RuntimeError(f'evaluation saw {count:.0f} images, and {lost:.0f} unreadable ones, of {expected}')
        return {'loss': loss / count, 'top1': 100 * top1 / count, 'top5': 100 * top5 / count, 'images': int(count)}
