"""Batches whose order and augmentation are functions of (seed, epoch, index) alone.

Nothing here has state that belongs in a checkpoint: batch `step` of epoch `epoch` is the same in a resumed run and for
any number of data workers, and the images of a step are the same for any number of processes.

Data workers live as long as a stage: the epoch of an image comes with its index. They ship images as bytes, a quarter
of their size in float32; `on_device` normalises them where the network is.
"""

import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform  # pyright: ignore[reportPrivateImportUsage]
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torchvision.transforms import Compose

from rotp_vision.images import UnreadableImage, to_rgb
from rotp_vision.training.config import DataConfig
from rotp_vision.training.processes import iterate, random_state, seed_all, set_random_state
from rotp_vision.training.sources import Source, StreamSource, decode_row

PREFETCHED = 2  # batches that each data worker prepares ahead
SHARED_MEMORY = Path('/dev/shm')  # where data workers put their batches on Linux

Box = tuple[int, int, int, int]  # top, left, bottom, right
NOTHING: Box = (0, 0, 0, 0)


class Sample(NamedTuple):
    """An image, or None where it could not be read and is not replaced."""

    image: Tensor | None  # (H, W, 3), uint8
    label: int
    broken: list[str]  # names of the images that could not be read
    erased: Box = NOTHING


class Batch(NamedTuple):
    """A batch of images, or of their feature maps."""

    images: Tensor  # (B, 3, H, W) uint8 in channels_last, or (B, C, H, W) float16 maps; float32 from `on_device`
    labels: Tensor  # (B,)
    broken: list[str]  # names of the images that could not be read
    erased: Tensor | None = None  # (B, 4) boxes to erase once the images are normalised


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


class ValTransform:
    """timm's evaluation transform up to bytes, unchanged."""

    decode = staticmethod(to_rgb)

    def __init__(self, config: DataConfig, mean: tuple[float, ...], std: tuple[float, ...]):
        *parts, _ = create_transform(**preprocessing(config, mean, std), use_prefetcher=True).transforms  # type: ignore
        self.parts = Compose(parts)  # without the conversion to a tensor

    def __call__(self, image: Image.Image) -> Tensor:
        """(H, W, 3) bytes of a decoded image."""
        return _bytes(self.parts(image))


class TrainTransform:
    """timm's training transform up to bytes, with the same random draws.

    The crop is drawn before the image is decoded. So only the crop is converted, a JPEG whose crop has at least twice
    the pixels that the network takes can be decoded at a fraction of its size (`data.draft`), and torch resizes the
    crop, which takes a quarter of Pillow's time and differs from it by rounding. Erasing is left to the device,
    because the erased box is 0 once it is normalised.
    """

    def __init__(self, config: DataConfig, mean: tuple[float, ...], std: tuple[float, ...]):
        parts: Any = create_transform(
            **preprocessing(config, mean, std),
            is_training=True,
            scale=config.scale,
            ratio=config.ratio,
            hflip=config.hflip,
            color_jitter=config.color_jitter or None,  # type: ignore[arg-type]  # a jitter of 0 takes time
            auto_augment=config.auto_augment,
            use_prefetcher=True,
            separate=True,
        )
        (self.crop, *flips), others, _ = (part.transforms for part in parts)
        self.augment = Compose([*flips, *others])
        self.erasing = RandomErasing(config.random_erasing, device='cpu') if config.random_erasing else None
        self.size, self.draft = config.image_size, config.draft

    def decode(self, image: Image.Image) -> Image.Image:
        """A random crop of an opened image."""
        top, left, height, width = self.crop.get_params(image, self.crop.scale, self.crop.ratio)
        factor = next((factor for factor in (8, 4, 2) if min(height, width) >= factor * self.size), 1)
        original, drafted = image.width, None
        if self.draft and factor > 1:
            drafted = image.draft(image.mode, (image.width // factor, image.height // factor))  # None if not a JPEG
        scale = 1 if drafted is None else drafted[1][2] / original
        edges = (left, top, left + width, top + height)
        return to_rgb(image.crop(tuple(round(scale * edge) for edge in edges)))  # type: ignore[arg-type]

    def __call__(self, crop: Image.Image) -> Tensor:
        """(H, W, 3) bytes of a crop."""
        if crop.size != (self.size, self.size):
            pixels = _bytes(crop)[None].permute(0, 3, 1, 2)  # in this order it is known as channels_last
            pixels = F.interpolate(pixels, (self.size, self.size), mode='bicubic', antialias=True)
            crop = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
        return _bytes(self.augment(crop))

    def erased(self) -> Box:
        """The box that timm's random erasing would erase."""
        if self.erasing is None:
            return NOTHING
        erased = _Erased(self.size)
        self.erasing(erased)
        return erased.box


class _Erased:
    """Takes the place of an image in timm's random erasing and remembers what it erases."""

    dtype = torch.float32

    def __init__(self, size: int):
        self.side, self.box = size, NOTHING

    def size(self) -> tuple[int, int, int]:
        return 1, self.side, self.side

    def __setitem__(self, place: tuple[slice, slice, slice], value: object) -> None:
        _, rows, columns = place
        self.box = (rows.start, columns.start, rows.stop, columns.stop)


def _bytes(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image))


def transforms(
    config: DataConfig, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[TrainTransform, ValTransform]:
    """The transforms for training and for evaluation."""
    return TrainTransform(config, mean, std), ValTransform(config, mean, std)


def normalized(images: Tensor, mean: Tensor, std: Tensor, erased: Tensor | None = None) -> Tensor:
    """Bytes (B, 3, H, W) as float32, normalised as torchvision's ToTensor and Normalize do, with boxes erased to 0."""
    images = (images / 255).sub_(mean[:, None, None]).div_(std[:, None, None])
    if erased is not None:
        rows = _between(erased[:, 0], erased[:, 2], images.shape[2])
        columns = _between(erased[:, 1], erased[:, 3], images.shape[3])
        images.masked_fill_(rows[:, None, :, None] & columns[:, None, None, :], 0)
    return images


def _between(first: Tensor, end: Tensor, length: int) -> Tensor:
    """(B, length): whether a place is in [first, end)."""
    places = torch.arange(length, device=first.device)
    return (first[:, None] <= places) & (places < end[:, None])


def on_device(batches: Iterable[Batch], prepare: Callable[[Batch], Batch], device: torch.device) -> Iterator[Batch]:
    """The batches as `prepare` puts them on the device; on CUDA the next one is copied while one is in use."""
    if device.type != 'cuda':
        yield from map(prepare, batches)
        return
    side, ready = torch.cuda.Stream(device), None
    for batch in batches:
        with torch.cuda.stream(side):
            following = prepare(batch)
        if ready is not None:
            yield ready
        # What the network queues from here on waits for the copy, and the memory is not reused before it is done.
        stream = torch.cuda.current_stream(device)
        stream.wait_stream(side)
        for tensor in (following.images, following.labels):
            tensor.record_stream(stream)
        ready = following
    if ready is not None:
        yield ready


@contextmanager
def seeded(*seeds: int) -> Iterator[None]:
    """Random draws inside are functions of the seeds; the random state of the process does not change."""
    state = random_state() if get_worker_info() is None else None  # nothing else draws in a data worker
    seed_all(*seeds)
    try:
        yield
    finally:
        if state is not None:
            set_random_state(state)


class TrainImages(Dataset):
    """Augmented images by (epoch, index). An unreadable one is reported and replaced by the next readable one."""

    def __init__(self, source: Source, transform: TrainTransform, seed: int):
        self.source, self.transform, self.seed = source, transform, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, place: tuple[int, int]) -> Sample:
        epoch, index = place
        broken: list[str] = []
        for other in range(index, index + len(self)):
            with seeded(self.seed, epoch, index):
                try:
                    image, label = self.source.read(other % len(self), self.transform.decode)
                except UnreadableImage as error:
                    broken.append(error.name)
                    continue
                return Sample(self.transform(image), label, broken, self.transform.erased())
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


class StreamImages(IterableDataset):
    """Images of a stream, for training (endless, augmented, shuffled) or evaluation (once, in order).

    In training an unreadable row is replaced by the next readable one, so that the position in the stream determines
    which images came before it: the first `skip` rows, those before an interruption, are skipped without decoding.
    """

    def __init__(
        self,
        source: StreamSource,
        transform: TrainTransform | ValTransform,
        shard: Shard,
        seed: int = 0,
        epoch: int = 0,
        skip: int = 0,
    ):
        self.source, self.transform, self.shard = source, transform, shard
        self.seed, self.epoch, self.skip = seed, epoch, skip

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        where = (*self.shard, worker.id if worker else 0)
        training = isinstance(self.transform, TrainTransform)
        broken: list[str] = []
        for place, row in enumerate(self._rows(training)):
            if place < self.skip:
                yield Sample(None, -1, [])
                continue
            name = f'{self.source.split} {where}[{place}]'
            earlier = range(place - len(broken), place)  # the places that this row replaces
            try:
                samples = [self._sample(row, name, (*where, number)) for number in (*earlier, place)]
            except UnreadableImage as error:
                broken.append(error.name)
                if not training:
                    yield Sample(None, -1, broken)
                    broken = []
                continue
            for sample in samples:
                yield sample._replace(broken=broken)
                broken = []

    def _sample(self, row: dict[str, Any], name: str, seeds: tuple[int, ...]) -> Sample:
        transform = self.transform
        read = (row, self.source.config, len(self.source.classes), name, transform.decode)
        if not isinstance(transform, TrainTransform):
            image, label = decode_row(*read)
            return Sample(transform(image), label, [])
        with seeded(self.seed, self.epoch, *seeds):
            image, label = decode_row(*read)
            return Sample(transform(image), label, [], transform.erased())

    def _rows(self, training: bool) -> Iterator[dict[str, Any]]:
        if not training:
            yield from self.source.rows(*self.shard, shuffle_seed=None, epoch=0)
            return
        # Shards differ in length: a process that reaches the end of its own starts again.
        for lap in itertools.count():
            epoch = self.epoch + 1_000_000 * lap
            yield from self.source.rows(*self.shard, shuffle_seed=self.seed, epoch=epoch)


def collate(samples: list[Sample]) -> Batch:
    """Collate the samples that have an image; in a data worker straight into shared memory."""
    kept = [sample for sample in samples if sample.image is not None]
    images = default_collate([sample.image for sample in kept]).permute(0, 3, 1, 2) if kept else torch.empty(0)
    erased = torch.tensor([sample.erased for sample in kept]) if any(any(s.erased) for s in kept) else None
    broken = [name for sample in samples for name in sample.broken]
    return Batch(images, torch.tensor([sample.label for sample in kept], dtype=torch.int64), broken, erased)


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
    """Which images the forward passes of one process take, from a point of a stage to its end.

    Args:
        length: number of training images.
        global_batch: images of a step over all processes.
        accumulation: forward passes of a step.
        shard: the process.
        seed: of the order.
        epochs: the epochs that are left.
        start: steps of the first of them that are done.
    """

    length: int
    global_batch: int
    accumulation: int
    shard: Shard
    seed: int
    epochs: range
    start: int = 0

    @property
    def size(self) -> int:
        """Images of one forward pass of this process."""
        return split_batch(self.global_batch, self.shard.processes, self.accumulation)

    def passes(self) -> Iterator[tuple[int, list[int]]]:
        """Epoch and indices of the images of each forward pass.

        A step takes the next `global_batch` images of the epoch's permutation; its forward passes and the processes
        divide them, so that a step's images do not depend on the number of processes.
        """
        steps = steps_per_epoch(self.length, self.global_batch)
        for epoch in self.epochs:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.length)[: steps * self.global_batch]
            mine = order.reshape(steps, self.accumulation, self.shard.processes, self.size)[:, :, self.shard.rank]
            first = self.start if epoch == self.epochs.start else 0
            for indices in mine[first:].reshape(-1, self.size).tolist():
                yield epoch, indices


def train_batches(
    source: Source | StreamSource, transform: TrainTransform, config: DataConfig, schedule: Schedule
) -> Iterator[Batch]:
    """Batches of the forward passes of a schedule."""
    if isinstance(source, StreamSource):
        for epoch in schedule.epochs:
            start = schedule.start if epoch == schedule.epochs.start else 0
            yield from _stream_batches(source, transform, config, schedule, epoch, start)
        return
    places = ([(epoch, index) for index in indices] for epoch, indices in schedule.passes())
    dataset = TrainImages(source, transform, schedule.seed)
    yield from iterate(DataLoader(dataset, batch_sampler=places, collate_fn=collate, **loading(config.workers)))


def _stream_batches(
    source: StreamSource, transform: TrainTransform, config: DataConfig, schedule: Schedule, epoch: int, start: int
) -> Iterator[Batch]:
    done, workers = start * schedule.accumulation, max(config.workers, 1)
    total = steps_per_epoch(schedule.length, schedule.global_batch) * schedule.accumulation
    # Workers yield batches in turn, so each skips as many rows unread as the one with the fewest batches yielded.
    skip = done // workers * schedule.size
    dataset = StreamImages(source, transform, schedule.shard, schedule.seed, epoch, skip)
    loader = DataLoader(dataset, schedule.size, collate_fn=collate, drop_last=True, **loading(config.workers))
    yield from itertools.islice(iterate(loader), done, total)


def val_loader(
    source: Source | StreamSource, transform: ValTransform, config: DataConfig, batch_size: int, shard: Shard
) -> DataLoader[Batch]:
    """Batches of one process's share of the validation images; every image belongs to exactly one process.

    Its workers live as long as the loader: iterate over it by `processes.iterate`.
    """
    kept = {'collate_fn': collate, 'persistent_workers': config.workers > 0, **loading(config.workers)}
    if isinstance(source, StreamSource):
        return DataLoader(StreamImages(source, transform, shard), batch_size, **kept)
    places = shard_places(len(source), batch_size, shard)
    return DataLoader(ValImages(source, transform), batch_sampler=places, **kept)


def shard_places(length: int, batch_size: int, shard: Shard) -> list[list[int]]:
    """The indices rank, rank + processes, rank + 2 · processes, … in batches."""
    mine = range(shard.rank, length, shard.processes)
    return [list(mine[first : first + batch_size]) for first in range(0, len(mine), batch_size)]


def chosen_batches(
    dataset: TrainImages | ValImages, config: DataConfig, places: Sequence[Sequence[Any]]
) -> Iterator[Batch]:
    """Batches of the images at given places."""
    return iterate(DataLoader(dataset, batch_sampler=places, collate_fn=collate, **loading(config.workers)))  # type: ignore


def loading(workers: int) -> dict[str, Any]:
    """Arguments of every data loader."""
    # With its own generator the loader does not draw its base seed from the random state of the process.
    return {
        'num_workers': workers,
        'pin_memory': torch.cuda.is_available(),
        'generator': torch.Generator(),
        'prefetch_factor': PREFETCHED if workers else None,
    }


def check_shared_memory(workers: int, batch_bytes: int) -> None:
    """Raise an OSError if the batches that the data workers of this machine hold would not fit into shared memory.

    A worker that finds it full is killed by the system, which says nothing of the cause.
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
