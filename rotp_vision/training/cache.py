"""Feature maps of the frozen backbone, computed once and kept as float16 memory-mapped shards.

Every process computes the maps of its share of the images and writes them to its own files; all processes then read
all of them, so that batches are composed exactly as without the cache.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.markup import escape
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from rotp_vision.files import force_to_disk, write_atomically
from rotp_vision.surgery import rot_pools
from rotp_vision.training.checkpoint import digest_of
from rotp_vision.training.config import DataConfig, RunConfig
from rotp_vision.training.context import Run, fail_together
from rotp_vision.training.data import (
    Batch,
    Schedule,
    Shard,
    TrainImages,
    ValImages,
    check_shared_memory,
    chosen_batches,
    loading,
    on_device,
    shard_places,
)
from rotp_vision.training.model import map_shape, normalization
from rotp_vision.training.processes import exit_status, iterate
from rotp_vision.training.sources import FolderSource, HubSource, PartSource, StreamSource


class PoolAndClassifier(nn.Module):
    """The part of a model that stage 2 trains, as a module so that DDP wraps its forward pass."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, maps: Tensor) -> Tensor:
        return self.model.forward_head(maps)  # type: ignore[operator]


@dataclass(frozen=True)
class CachePlan:
    """What a cache will hold.

    Args:
        shape: (C, H, W) of one map.
        train_images: number of training images.
        val_images: number of validation images.
        views: number of augmented views of a training image; 0 for one with the evaluation transform.
    """

    shape: tuple[int, int, int]
    train_images: int
    val_images: int
    views: int

    @property
    def bytes(self) -> int:
        """Size on disk over all processes."""
        return (max(self.views, 1) * self.train_images + self.val_images) * self.map_bytes

    @property
    def map_bytes(self) -> int:
        """Size of one map."""
        return int(np.prod(self.shape)) * 2

    def check_disk(self, directory: Path) -> None:
        """Raise an OSError if the cache would not fit on the disk."""
        place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free
        if self.bytes * 1.02 > free:
            raise OSError(
                f'the feature cache needs {self.bytes / 2**30:.2f} GiB in {directory} but {free / 2**30:.2f} GiB are '
                'free: choose another stage2.cache_dir, fewer stage2.cache_views, or stage2.cache_features false'
            )


def fingerprint(model: nn.Module, data: DataConfig, seed: int, views: int, others: object = None) -> str:
    """Digest of everything that a map depends on: frozen weights, data, augmentation and `others` (plain values)."""
    digest = hashlib.sha256()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    pools = tuple(f'{path}.' for path in rot_pools(model))  # maps do not depend on the pools
    for name, tensor in sorted(model.state_dict().items()):
        if name not in trained and not name.startswith(pools):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().double().numpy().tobytes())
    settings = {key: value for key, value in asdict(data).items() if key not in ('workers', 'max_broken')}
    digest.update(json.dumps([settings, seed, views, others], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def images_of(source: object) -> object:
    """A value that changes when images are added, removed or modified; None if that cannot be known."""
    if isinstance(source, PartSource):
        return [images_of(source.whole), hashlib.sha256(source.indices.tobytes()).hexdigest()]
    if isinstance(source, FolderSource):
        digest = hashlib.sha256()
        for file in source.files:
            known = os.stat(file)
            digest.update(f'{file}\n{known.st_size}\n{known.st_mtime_ns}\n'.encode())
        return digest.hexdigest()
    return source.dataset._fingerprint if isinstance(source, HubSource) else None


def shard_file(directory: Path, part: str, shard: Shard) -> Path:
    """Maps of one part ('val', 'train0', 'train1', …) written by one process."""
    return directory / f'{part}-{shard.rank}of{shard.processes}.npy'


def labels_file(file: Path) -> Path:
    """Labels of a shard; -1 for an image that could not be read."""
    return file.with_name(f'{file.stem}-labels.npy')


def _digests_file(file: Path) -> Path:
    return file.with_name(f'{file.stem}-digests.json')


def _digests(file: Path, maps: Path) -> dict[str, str]:
    """Digests that identify a shard: its path, its maps (`maps` is the file that holds them now) and its labels."""
    place = f'{file.parent.name}/{file.name}'
    return {'place': place, 'maps': digest_of(maps), 'labels': digest_of(labels_file(file))}


def is_whole(file: Path) -> bool:
    """Whether a shard is complete and unchanged since it was written."""
    try:
        return json.loads(_digests_file(file).read_text()) == _digests(file, file)
    except (OSError, ValueError, RecursionError):
        return False


def write_shard(file: Path, batches: Iterator[Batch], compute: Callable[[Tensor], Tensor], length: int) -> list[str]:
    """Compute one shard of `length` maps, which gets its name when it is complete; returns names of broken images.

    Args:
        file: the shard.
        batches: the images, in the order of the shard; unreadable ones carry label -1.
        compute: images to maps (B, C, H, W).
        length: number of images of the shard.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f'.{file.name}.tmp')
    maps, done, broken = None, 0, []
    labels = np.empty(length, np.int64)
    for batch in batches:
        values = compute(batch.images)
        half = values.half()
        if not bool(half.isfinite().all()):
            raise ValueError(
                f'a feature of size {values.abs().max():.3g} does not fit float16: set cache_features false'
            )
        if maps is None:
            maps = np.lib.format.open_memmap(temporary, 'w+', np.float16, (length, *values.shape[1:]))
        maps[done : done + len(half)] = half.cpu().numpy()
        labels[done : done + len(half)] = batch.labels.cpu().numpy()
        done += len(half)
        broken += batch.broken
    assert maps is not None
    assert done == length
    maps.flush()
    force_to_disk(temporary)
    with labels_file(file).open('wb') as stream:
        np.save(stream, labels)
    force_to_disk(labels_file(file))
    write_atomically(_digests_file(file), json.dumps(_digests(file, temporary)))
    temporary.rename(file)
    force_to_disk(file.parent)
    return broken


class CachedMaps(Dataset):
    """Batches of maps of one part, read from the shards of all processes."""

    def __init__(self, directory: Path, part: str, processes: int):
        files = [shard_file(directory, part, Shard(rank, processes)) for rank in range(processes)]
        self.shards = [np.load(file, mmap_mode='r') for file in files]
        self.labels = [np.load(labels_file(file)) for file in files]

    def __len__(self) -> int:
        return sum(map(len, self.labels))

    @property
    def readable(self) -> int:
        """Number of images that could be read."""
        return sum(int((labels >= 0).sum()) for labels in self.labels)

    def __getitem__(self, indices: list[int]) -> Batch:
        """The float16 maps of those `indices` whose image could be read."""
        places = [divmod(index, len(self.shards)) for index in indices]
        labels = [int(self.labels[shard][row]) for row, shard in places]
        rows = [self.shards[shard][row] for (row, shard), label in zip(places, labels, strict=True) if label >= 0]
        maps = torch.from_numpy(np.stack(rows)) if rows else torch.empty(0)
        return Batch(maps, torch.tensor([label for label in labels if label >= 0]), [])


class FeatureCache(Dataset):
    """All parts of a cache; as a dataset, its training maps by (epoch, indices)."""

    def __init__(self, directory: Path, views: int, processes: int):
        self.train = [CachedMaps(directory, f'train{view}', processes) for view in range(max(views, 1))]
        self.val = CachedMaps(directory, 'val', processes)

    def __getitem__(self, place: tuple[int, list[int]]) -> Batch:
        epoch, indices = place
        return self.train[epoch % len(self.train)][indices]  # epochs use the views in turn

    def train_batches(self, schedule: Schedule, workers: int) -> Iterator[Batch]:
        """The maps of the images of `data.train_batches`."""
        yield from iterate(DataLoader(self, None, sampler=schedule.passes(), **loading(workers)))  # type: ignore[arg-type]

    def val_batches(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """The maps of the images of `data.val_loader`."""
        return (self.val[indices] for indices in shard_places(len(self.val), batch_size, shard))


def _until_stopped(run: Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches; a signal ends the process between two of them, as computing all may take hours."""
    for batch in batches:
        if run.stop:
            print(
                f'stopped by {run.stop[0]} while feature maps were computed; finished parts are kept, continue with '
                '--resume auto',
                file=sys.stderr,
                flush=True,
            )
            raise SystemExit(exit_status(run.stop[0]))
        yield batch


def cache_directory(config: RunConfig) -> Path:
    """Where the caches of a run are."""
    return Path(config.stage2.cache_dir) if config.stage2.cache_dir else Path(config.output) / 'cache'


def build_cache(run: Run, model: nn.Module) -> FeatureCache:
    """The maps of all images by the frozen backbone of `model`; those that are not cached yet are computed."""
    config, data, shard = run.config, run.config.data, run.shard
    assert not isinstance(run.train, StreamSource)  # the configuration does not allow it
    assert not isinstance(run.val, StreamSource)
    views = config.stage2.cache_views
    name = ''
    if run.main:  # on other machines the copies of the images may have other modification times
        # Besides the weights, maps depend on the network, the normalization, the precision and the images.
        others = [config.model.name, config.model.kwargs, normalization(model), run.accelerator.mixed_precision]
        others += [len(run.train), len(run.val), images_of(run.train), images_of(run.val)]
        name = fingerprint(model, data, config.seed, views, others)
    directory = cache_directory(config) / run.host.gather(name)[0]
    filler = torch.zeros(data.image_size, data.image_size, 3, dtype=torch.uint8)
    parts: dict[str, TrainImages | ValImages] = {'val': ValImages(run.val, run.val_transform, filler)}
    if views == 0:
        parts['train0'] = ValImages(run.train, run.val_transform, filler)
    else:
        parts |= dict.fromkeys(
            (f'train{view}' for view in range(views)), TrainImages(run.train, run.train_transform, config.seed)
        )

    mine = {part: shard_file(directory, part, shard) for part in parts}
    missing = [part for part, file in mine.items() if not is_whole(file)]
    damaged = [mine[part].name for part in missing if mine[part].exists()]
    damaged = [name for names in run.host.gather(damaged) for name in names]
    if damaged:
        message = f'{", ".join(damaged)} in {directory} are damaged and are computed again'
        run.console.print(f'[yellow]warning:[/] {escape(message)}', soft_wrap=True)
    plan, problem = CachePlan(map_shape(model, data.image_size), len(run.train), len(run.val), views), None
    try:
        check_shared_memory(data.workers, run.local_batch * plan.map_bytes)
        if missing:
            plan.check_disk(directory)
    except OSError as error:
        problem = error
    fail_together(run.host, problem)
    if any(run.host.gather(missing)):
        message = f'computing {plan.bytes / 2**20:.0f} MiB of feature maps into {directory}'
        run.console.print(message, soft_wrap=True, markup=False)

    @torch.no_grad()
    def compute(images: Tensor) -> Tensor:
        with run.accelerator.autocast():
            return model.forward_features(images).float()  # type: ignore[operator]

    model.eval()
    for part, dataset in parts.items():
        broken: list[str] = []
        if part in missing:
            places = shard_places(len(dataset), run.local_batch, shard)
            length = sum(map(len, places))
            if isinstance(dataset, TrainImages):
                view = int(part.removeprefix('train'))
                places = [[(view, index) for index in indices] for indices in places]
            batches = on_device(chosen_batches(dataset, data, places), run.prepare, run.accelerator.device)
            broken = write_shard(mine[part], _until_stopped(run, batches), compute, length)
        run.note_broken(broken)
    run.host.wait()
    return FeatureCache(directory, views, shard.processes)
