"""Batches whose order and augmentation are functions of (seed, epoch, index) alone.

Nothing here has state that belongs in a checkpoint: batch `step` of epoch `epoch` is the same in a resumed run and for
any number of data workers, and the images of a step are the same for any number of processes.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data import create_transform  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from rotp_vision.images import UnreadableImage
from rotp_vision.training.config import DataConfig
from rotp_vision.training.processes import iterate, random_state, seed_all, set_random_state
from rotp_vision.training.sources import Source, StreamSource, decode_row

Transform = Callable[[Any], Tensor]


class Batch(NamedTuple):
    """A batch of images."""

    images: Tensor  # (B, 3, H, W)
    labels: Tensor  # (B,)
    broken: list[str]  # names of the images that could not be read


class Shard(NamedTuple):
    """Rank of a process and number of processes."""

    rank: int
    processes: int


def preprocessing(config: DataConfig, mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, Any]:
    """The evaluation transform in the keys of timm's `create_transform` and `pretrained_cfg`."""
    return {
        'input_size': (3, config.image_size, config.image_size),
        'interpolation': 'bicubic',
        'crop_pct': config.crop_pct,
        'crop_mode': 'center',
        'mean': mean,
        'std': std,
    }


def transforms(config: DataConfig, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Transform, Transform]:
    """timm's transforms for training and for evaluation."""
    evaluation = preprocessing(config, mean, std)
    train = create_transform(
        **evaluation,
        is_training=True,
        scale=config.scale,
        ratio=config.ratio,
        hflip=config.hflip,
        color_jitter=config.color_jitter,
        auto_augment=config.auto_augment,
        re_prob=config.random_erasing,
    )
    return train, create_transform(**evaluation)  # type: ignore[return-value]


def apply_seeded(transform: Transform, image: Any, *seeds: int) -> Tensor:
    """`transform(image)` with its own random state; that of the process does not change."""
    state = random_state() if get_worker_info() is None else None  # nothing else draws in a data worker
    seed_all(*seeds)
    try:
        return transform(image)
    finally:
        if state is not None:
            set_random_state(state)


class TrainImages(Dataset):
    """Augmented images of one epoch. An unreadable one is reported and replaced by the next readable one."""

    def __init__(self, source: Source, transform: Transform, seed: int, epoch: int):
        self.source, self.transform, self.seed, self.epoch = source, transform, seed, epoch

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int, list[str]]:
        broken: list[str] = []
        for place in range(index, index + len(self)):
            try:
                image, label = self.source.read(place % len(self))
            except UnreadableImage as error:
                broken.append(error.name)
                continue
            return apply_seeded(self.transform, image, self.seed, self.epoch, index), label, broken
        raise RuntimeError(f'no readable image in the training split; the last was {broken[-1]}')


class ValImages(Dataset):
    """Images with the evaluation transform. An unreadable one is reported and left out, not replaced by another.

    With a `filler` it is replaced by that image with label -1, for callers that need one entry per image.
    """

    def __init__(self, source: Source, transform: Transform, filler: Tensor | None = None):
        self.source, self.transform, self.filler = source, transform, filler

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor | None, int, list[str]]:
        try:
            image, label = self.source.read(index)
        except UnreadableImage as error:
            return self.filler, -1, [error.name]
        return self.transform(image), label, []


class StreamImages(IterableDataset):
    """Images of a stream, for training (endless, augmented, shuffled) or evaluation (once, in order).

    In training an unreadable row is replaced by the next readable one, so that the position in the stream determines
    which images came before it: the first `skip` rows, those before an interruption, are skipped without decoding.
    """

    def __init__(
        self, source: StreamSource, transform: Transform, shard: Shard, seed: int | None, epoch: int, skip: int
    ):
        self.source, self.transform, self.shard = source, transform, shard
        self.seed, self.epoch, self.skip = seed, epoch, skip

    def __iter__(self) -> Iterator[tuple[Tensor | None, int, list[str]]]:
        worker = get_worker_info()
        where = (*self.shard, worker.id if worker else 0)
        broken: list[str] = []
        for place, row in enumerate(self._rows()):
            if place < self.skip:
                yield None, -1, []
                continue
            try:
                image, label = decode_row(
                    row, self.source.config, len(self.source.classes), f'{self.source.split} {where}[{place}]'
                )
            except UnreadableImage as error:
                broken.append(error.name)
                if self.seed is None:
                    yield None, -1, [error.name]
                continue
            if self.seed is None:
                yield self.transform(image), label, []
                continue
            for earlier in range(len(broken), -1, -1):
                sample = apply_seeded(self.transform, image, self.seed, self.epoch, *where, place - earlier)
                yield sample, label, broken
                broken = []

    def _rows(self) -> Iterator[dict[str, Any]]:
        # Shards differ in length: in training, a process that reaches the end of its own starts again.
        for lap in itertools.count():
            epoch = self.epoch + 1_000_000 * lap
            yield from self.source.rows(*self.shard, shuffle_seed=self.seed, epoch=epoch)
            if self.seed is None:
                return


def collate(samples: list[tuple[Tensor | None, int, list[str]]]) -> Batch:
    """Collate the samples that have an image."""
    kept = [(image, label) for image, label, _ in samples if image is not None]
    images = torch.stack([image for image, _ in kept]) if kept else torch.empty(0)
    broken = [name for _, _, names in samples for name in names]
    return Batch(images, torch.tensor([label for _, label in kept], dtype=torch.int64), broken)


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


def epoch_batches(
    length: int, global_batch: int, accumulation: int, shard: Shard, seed: int, epoch: int, start: int
) -> list[list[int]]:
    """Indices of the images of each forward pass of one process, from step `start` of an epoch on.

    A step takes the next `global_batch` images of the epoch's permutation; its forward passes and the processes divide
    them, so that a step's images do not depend on the number of processes.
    """
    size = split_batch(global_batch, shard.processes, accumulation)
    steps = steps_per_epoch(length, global_batch)
    order = np.random.default_rng((seed, epoch)).permutation(length)[: steps * global_batch]
    mine = order.reshape(steps, accumulation, shard.processes, size)[start:, :, shard.rank]
    return mine.reshape(-1, size).tolist()


def train_loader(
    source: Source | StreamSource,
    transform: Transform,
    config: DataConfig,
    *,
    global_batch: int,
    accumulation: int,
    shard: Shard,
    seed: int,
    epoch: int,
    start: int = 0,
) -> Iterator[Batch]:
    """Batches of the forward passes of one process in an epoch, from step `start` on."""
    size = split_batch(global_batch, shard.processes, accumulation)
    if isinstance(source, StreamSource):
        passes, workers = start * accumulation, max(config.workers, 1)
        # Workers yield batches in turn, so each skips as many rows unread as the one with the fewest batches yielded.
        dataset = StreamImages(source, transform, shard, seed=seed, epoch=epoch, skip=passes // workers * size)
        stream = iterate(DataLoader(dataset, size, collate_fn=collate, drop_last=True, **_loading(config)))
        for _ in range(passes):
            next(stream)
        return stream
    batches = epoch_batches(len(source), global_batch, accumulation, shard, seed, epoch, start)
    return chosen_loader(TrainImages(source, transform, seed, epoch), config, batches)


def val_loader(
    source: Source | StreamSource, transform: Transform, config: DataConfig, batch_size: int, shard: Shard
) -> Iterator[Batch]:
    """Batches of one process's share of the validation images; every image belongs to exactly one process."""
    if isinstance(source, StreamSource):
        dataset = StreamImages(source, transform, shard, seed=None, epoch=0, skip=0)
        return iterate(DataLoader(dataset, batch_size, collate_fn=collate, **_loading(config)))
    return shard_loader(ValImages(source, transform), config, batch_size, shard)


def shard_loader(
    dataset: TrainImages | ValImages, config: DataConfig, batch_size: int, shard: Shard
) -> Iterator[Batch]:
    """Batches of the images rank, rank + processes, rank + 2 · processes, … in order."""
    mine = range(shard.rank, len(dataset), shard.processes)
    batches = [list(mine[first : first + batch_size]) for first in range(0, len(mine), batch_size)]
    return chosen_loader(dataset, config, batches)


def chosen_loader(dataset: TrainImages | ValImages, config: DataConfig, batches: list[list[int]]) -> Iterator[Batch]:
    """Batches of the images at given indices."""
    return iterate(DataLoader(dataset, batch_sampler=batches, collate_fn=collate, **_loading(config)))


def _loading(config: DataConfig) -> dict[str, Any]:
    # With its own generator the loader does not draw its base seed from the random state of the process.
    return {
        'num_workers': config.workers,
        'pin_memory': torch.cuda.is_available(),
        'generator': torch.Generator(),
        'prefetch_factor': 4 if config.workers else None,
    }
