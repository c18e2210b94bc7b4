"""Batches whose order and augmentation are functions of (seed, epoch, index) alone.

Nothing here has state that belongs in a checkpoint: batch `step` of epoch `epoch` is the same in a resumed run and for
any number of data workers, and the images of a step are the same for any number of processes.

Data workers live as long as a stage: the epoch of an image comes with its index. They ship images as bytes, a quarter
of their size in float32; the images are normalised on the device of the network.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from rotp_vision.data.config import DataConfig
from rotp_vision.data.sources import Source
from rotp_vision.data.transforms import TrainTransform, ValTransform
from rotp_vision.data.workers import iterate, loading, seeded
from rotp_vision.images import UnreadableImage


class Sample(NamedTuple):
    """An image, or None if it could not be read and is not replaced."""

    image: Tensor | None  # (H, W, 3), uint8
    label: int
    broken: list[str]  # names of the images that could not be read


class Batch(NamedTuple):
    """A batch of images, or of their feature maps."""

    images: Tensor  # (B, 3, H, W) uint8 in channels_last, or (B, C, H, W) float16 maps; float32 on the device
    labels: Tensor  # (B,)
    broken: list[str]  # names of the images that could not be read


class Shard(NamedTuple):
    """Rank of a process and number of processes."""

    rank: int
    processes: int


class TrainImages(Dataset):
    """Augmented images by (epoch, index). An unreadable one is reported and replaced by the next readable one."""

    def __init__(self, source: Source, transform: TrainTransform, seed: int):
        self.source, self.transform, self.seed = source, transform, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        broken: list[str] = []
        for other in range(index, index + len(self)):
            with seeded(self.seed, epoch, index):
                try:
                    image, label = self.source.read(other % len(self), self.transform.decode)
                except UnreadableImage as error:
                    broken.append(error.name)
                    continue
                return Sample(self.transform(image), label, broken)
        raise RuntimeError(f'no readable image in the training split; the last was {broken[-1]}')


class ValImages(Dataset):
    """Images with the evaluation transform. An unreadable one is reported and left out, not replaced by another.

    With a `filler` it is replaced by that image with label -1, for callers that need one entry per image.
    """

    def __init__(self, source: Source, transform: ValTransform, filler: Tensor | None = None):
        self.source, self.transform, self.filler = source, transform, filler

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        try:
            image, label = self.source.read(index, self.transform.decode)
        except UnreadableImage as error:
            return Sample(self.filler, -1, [error.name])
        return Sample(self.transform(image), label, [])


def collate(samples: list[Sample]) -> Batch:
    """Collates the samples that have an image; in a data worker straight into shared memory."""
    kept = [sample for sample in samples if sample.image is not None]
    images = default_collate([sample.image for sample in kept]).permute(0, 3, 1, 2) if kept else torch.empty(0)
    broken = [name for sample in samples for name in sample.broken]
    return Batch(images, torch.tensor([sample.label for sample in kept], dtype=torch.int64), broken)


def steps_per_epoch(length: int, global_batch: int) -> int:
    """Number of global batches in an epoch; the remaining images of the permutation are dropped."""
    if length < global_batch:
        raise ValueError(f'global_batch_size must be at most the {length} training images, got {global_batch}')
    return length // global_batch


def split_batch(global_batch: int, processes: int, accumulation: int) -> int:
    """Number of images of one forward pass on one process."""
    size, rest = divmod(global_batch, processes * accumulation)
    if rest:
        raise ValueError(
            f'global_batch_size must be a multiple of processes × accumulation = {processes} × {accumulation}, '
            f'got {global_batch}'
        )
    return size


@dataclass(frozen=True)
class Schedule:
    """The images of each forward pass of one process, from a point of a stage to its end.

    Args:
        length: number of training images.
        global_batch: images of a step over all processes.
        accumulation: forward passes of a step.
        shard: the process.
        seed: seed of the order.
        epochs: the epochs that are left.
        start: number of steps of the first of them that are done.
    """

    length: int
    global_batch: int
    accumulation: int
    shard: Shard
    seed: int
    epochs: range
    start: int = 0

    def passes(self) -> Iterator[tuple[int, list[int]]]:
        """Yields epoch and indices of the images of each forward pass.

        A step takes the next `global_batch` images of the epoch's permutation; its forward passes and the processes
        divide them, so that a step's images do not depend on the number of processes.
        """
        size = split_batch(self.global_batch, self.shard.processes, self.accumulation)
        steps = steps_per_epoch(self.length, self.global_batch)
        for epoch in self.epochs:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.length)[: steps * self.global_batch]
            mine = order.reshape(steps, self.accumulation, self.shard.processes, size)[:, :, self.shard.rank]
            first = self.start if epoch == self.epochs.start else 0
            for indices in mine[first:].reshape(-1, size).tolist():
                yield epoch, indices


def train_batches(source: Source, transform: TrainTransform, config: DataConfig, schedule: Schedule) -> Iterator[Batch]:
    """Yields the batches of the forward passes of a schedule."""
    keys = ([(epoch, index) for index in indices] for epoch, indices in schedule.passes())
    yield from chosen_batches(TrainImages(source, transform, schedule.seed), config.workers, keys)


def val_loader(
    source: Source, transform: ValTransform, config: DataConfig, batch_size: int, shard: Shard
) -> DataLoader[Batch]:
    """Returns a loader of one process's share of the images; every image belongs to exactly one process.

    Its workers live as long as the loader: iterate over it by `iterate`.
    """
    return DataLoader(
        ValImages(source, transform),
        batch_sampler=shard_indices(len(source), batch_size, shard),
        collate_fn=collate,
        persistent_workers=config.workers > 0,
        **loading(config.workers),
    )


def shard_indices(length: int, batch_size: int, shard: Shard) -> list[list[int]]:
    """Returns the indices rank, rank + processes, rank + 2 · processes, … in batches."""
    mine = range(shard.rank, length, shard.processes)
    return [list(mine[first : first + batch_size]) for first in range(0, len(mine), batch_size)]


def chosen_batches(dataset: TrainImages | ValImages, workers: int, keys: Iterable[Sequence[Any]]) -> Iterator[Batch]:
    """Returns the batches of the images with given keys."""
    return iterate(DataLoader(dataset, batch_sampler=keys, collate_fn=collate, **loading(workers)))  # type: ignore
