"""The cached feature maps of a run: stage 2 trains from the maps of the frozen backbone.

The processes divide the missing shards; then all of them read all shards, so that batches are composed exactly as
without the cache.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from rotp_vision.data.cache import CachedMaps, fingerprint
from rotp_vision.data.loading import Batch, Schedule, Shard, TrainImages, ValImages, chosen_batches, shard_indices
from rotp_vision.data.workers import check_shared_memory, iterate, loading
from rotp_vision.files import check_disk
from rotp_vision.training.config import RunConfig
from rotp_vision.training.model import map_shape, normalization
from rotp_vision.training.processes import exit_status, gather, together
from rotp_vision.training.run import Run


class PoolAndClassifier(nn.Module):
    """The part of a model that stage 2 trains, as a module so that DDP wraps its forward pass."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, maps: Tensor) -> Tensor:
        return self.model.forward_head(maps)  # type: ignore[operator]


class FeatureCache(Dataset):
    """The maps of all images; as a dataset, those of training images by (epoch, indices).

    Args:
        directory: directory of the shards.
        shape: (C, H, W) of one map.
        train_images: number of training images.
        val_images: number of validation images.
        repeats: number of augmented copies of a training image; 0 for one copy with the evaluation transform.
    """

    def __init__(self, directory: Path, shape: tuple[int, ...], train_images: int, val_images: int, repeats: int):
        self.directory = directory
        self.train = [CachedMaps(directory, f'train{i}', train_images, shape) for i in range(max(repeats, 1))]
        self.val = CachedMaps(directory, 'val', val_images, shape)

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(2 * len(maps) * torch.Size(maps.shape).numel() for maps in (*self.train, self.val))

    def __getitem__(self, key: tuple[int, list[int]]) -> Batch:
        epoch, indices = key
        return self.train[epoch % len(self.train)][indices]  # epochs use the repeats in turn

    def train_batches(self, schedule: Schedule, workers: int) -> Iterator[Batch]:
        """Yields the maps of the images of `data.loading.train_batches`."""
        yield from iterate(DataLoader(self, None, sampler=schedule.passes(), **loading(workers)))  # type: ignore[arg-type]

    def val_batches(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Returns the maps of the images of `data.loading.val_loader`."""
        return (self.val[indices] for indices in shard_indices(len(self.val), batch_size, shard))


def cache_directory(config: RunConfig) -> Path:
    """Directory of the caches of a run."""
    return Path(config.stage2.cache_dir) if config.stage2.cache_dir else Path(config.output) / 'cache'


def open_cache(run: Run, model: nn.Module, name: str = '') -> FeatureCache:
    """Returns the cache of a run, of which no shard needs to exist, in the subdirectory `name`."""
    shape = map_shape(model, run.config.data.image_size)
    repeats = run.config.stage2.cache_repeats
    return FeatureCache(cache_directory(run.config) / name, shape, len(run.train), len(run.val), repeats)


def build_cache(run: Run, model: nn.Module) -> FeatureCache:
    """Computes the maps of all images by the frozen backbone of `model` that are not cached yet."""
    config, data = run.config, run.config.data
    name = ''
    if run.main:  # other machines may have copies of the images with other modification times
        settings = {key: value for key, value in asdict(data).items() if key not in ('workers', 'max_broken')}
        network = [config.model.name, config.model.kwargs, normalization(model), run.accelerator.mixed_precision]
        images = [len(run.train), len(run.val), run.train.digests(), run.val.digests()]
        name = fingerprint(model, settings, config.seed, config.stage2.cache_repeats, network, images)
    cache = open_cache(run, model, gather(name)[0])
    filler = torch.zeros(data.image_size, data.image_size, 3, dtype=torch.uint8)
    val = ValImages(run.val, run.val_transform, filler)
    if config.stage2.cache_repeats:
        train: Any = TrainImages(run.train, run.train_transform, config.seed)
    else:
        train = ValImages(run.train, run.val_transform, filler)

    states = _states(run, cache)
    for state in ('damaged', 'of another version'):
        files = [file for file, found in states.items() if found == state]
        if files:
            more = f' and {len(files) - 3} more' if len(files) > 3 else ''
            run.warn(f'{", ".join(files[:3])}{more} in {cache.directory} are {state} and are computed again')
    with together():
        map_bytes = 2 * torch.Size(cache.val.shape).numel()
        check_shared_memory(data.workers, run.local_batch * map_bytes)
        if states and run.main:
            cure = 'choose another stage2.cache_dir, fewer stage2.cache_repeats, or stage2.cache_features false'
            parts = (*cache.train, cache.val)
            missing = sum(len(p.indices(i)) for p in parts for i in range(p.num_shards) if p.file(i).name in states)
            check_disk(cache.directory, missing * map_bytes, 'the feature cache needs', cure)
    if states:
        run.say(f'computing {len(states)} files of {cache.bytes / 2**20:.0f} MiB of feature maps in {cache.directory}')

    @torch.no_grad()
    def compute(images: Tensor) -> Tensor:
        with run.accelerator.autocast():
            return model.forward_features(images).float()  # type: ignore[operator]

    model.eval()
    for maps, dataset, repeat in (
        (cache.val, val, None),
        *((maps, train, i if config.stage2.cache_repeats else None) for i, maps in enumerate(cache.train)),
    ):
        missing = [shard for shard in range(maps.num_shards) if maps.file(shard).name in states]
        mine = missing[run.shard.rank :: run.shard.processes]
        keys: list[list[Any]] = [indices for shard in mine for indices in maps.batches(shard, run.local_batch)]
        if repeat is not None:
            keys = [[(repeat, index) for index in indices] for indices in keys]
        broken: list[str] = []
        batches = map(run.prepare, chosen_batches(dataset, data.workers, keys)) if keys else iter(())
        for batch in maps.write(mine, run.local_batch, batches, compute):
            broken += batch.broken
            _check_stop(run)
        run.note_broken(broken)  # also waits for the other processes
    return cache


def validate(run: Run, model: nn.Module, cache: FeatureCache | None) -> dict[str, float]:
    """Returns loss and accuracy on the validation images, from their maps if these are cached."""
    if cache is None:
        return run.evaluate(model, run.val_images(), len(run.val))
    return run.evaluate(PoolAndClassifier(model), cache.val_batches(run.local_batch, run.shard), cache.val.readable)


def _states(run: Run, cache: FeatureCache) -> dict[str, str]:
    """Returns what is wrong with shards, by the names of their files; the processes divide the work."""
    wrong = {}
    for maps in (*cache.train, cache.val):
        for shard in range(run.shard.rank, maps.num_shards, run.shard.processes):
            if (state := maps.state(shard)) != 'ready':
                wrong[maps.file(shard).name] = state
    return dict(sorted(item for some in gather(wrong) for item in some.items()))


def _check_stop(run: Run) -> None:
    """Ends the process after a signal, because computing all maps may take hours."""
    if run.stop:
        print(
            f'stopped by {run.stop[0]} while feature maps were computed; finished files are kept, continue with '
            '--resume auto',
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(exit_status(run.stop[0]))
