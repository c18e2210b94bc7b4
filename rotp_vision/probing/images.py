"""Labelled images of a folder or a parquet file, and their maps by a frozen network, computed once."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow.parquet
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from rotp_vision.data.cache import CachedMaps, fingerprint
from rotp_vision.data.loading import Batch
from rotp_vision.data.sources import FolderSource, HubSource
from rotp_vision.data.workers import iterate, loading
from rotp_vision.evaluation import ImageFiles
from rotp_vision.files import check_disk
from rotp_vision.images import UnreadableImage
from rotp_vision.layers import GlobalROTPool2d
from rotp_vision.surgery.head import GlobalPool

FOLDER = 'folder'  # the one thing that images of a folder can be grouped by
_NAME = 'probe'  # of the cached maps


class LabelledImages(NamedTuple):
    """Images with classes and groups."""

    source: FolderSource | HubSource
    classes: list[str]  # names of those that have images
    targets: Tensor  # (n,) class indices
    groups: Tensor | None  # (n,)
    identity: Any  # changes when the images do


def open_images(path: Path, label: str, group_by: str | None) -> LabelledImages:
    """The images at `path`, a folder of class folders or a parquet file in the layout of Hugging Face datasets."""
    if path.is_dir():
        return _open_folder(path, group_by)
    if not path.is_file():
        raise ValueError(f'there is neither a folder of images nor a parquet file at {path}')
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise ValueError(f'{path} is neither a folder of images nor a parquet file: {error}') from error
    return _open_table(path, datasets.Dataset(table), label, group_by)


def _open_folder(path: Path, group_by: str | None) -> LabelledImages:
    files = ImageFiles(path, None)
    problem = files.why_no_labels(len(files.classes))
    if problem:
        raise ValueError(f'images must be in class folders, but {problem}')
    if group_by not in (None, FOLDER):
        raise ValueError(
            f'images of a folder can be grouped by {FOLDER!r} alone, the folder inside their class folder, got '
            f'{group_by!r}; a parquet file has other columns'
        )
    source = FolderSource(path)
    groups = _numbered([os.path.dirname(file) for file in source.files]) if group_by else None
    return LabelledImages(source, source.classes, torch.tensor(source.labels), groups, source.digests())


def _open_table(path: Path, table: Any, label: str, group_by: str | None) -> LabelledImages:
    columns = ', '.join(table.column_names)
    for name, column in (('image', 'image'), ('label', label), ('group-by', group_by)):
        if column is not None and column not in table.column_names:
            where = 'there must be a column' if name == 'image' else f'{name} must be'
            raise ValueError(f'{where} of {path.name} ({columns}), got {column!r}')
    if table.features[label].dtype == 'string':
        names, numbers = np.unique(np.asarray(table[label]), return_inverse=True)
        feature = datasets.ClassLabel(names=names.tolist())
        table = table.remove_columns(label).add_column(label, numbers.tolist(), feature=feature)
    source = HubSource(table, path.name, label_key=label)
    found, targets = np.unique(np.asarray(table[label]), return_inverse=True)
    classes = [source.classes[number] for number in found]
    groups = None if group_by is None else _numbered(table[group_by])
    known = path.stat()
    return LabelledImages(source, classes, torch.from_numpy(targets), groups, [known.st_size, known.st_mtime_ns])


def _numbered(values: Any) -> Tensor:
    return torch.from_numpy(np.unique(np.asarray([str(value) for value in values]), return_inverse=True)[1])


@torch.no_grad()
def cached_maps(
    model: nn.Module,
    pool: GlobalPool,
    images: LabelledImages,
    transform: Callable[[Any], Tensor],
    image_shape: tuple[int, ...],
    directory: Path,
    *,
    batch_size: int,
    workers: int,
    progress: bool,
) -> Tensor:
    """Float16 maps (n, C, H, W) or tokens (n, N, C), the input of the pool, from files; missing ones are computed.

    Args:
        model: frozen but for pool and classifier, in eval mode.
        pool: its global pool.
        images: n of them.
        transform: of an image to a tensor.
        image_shape: of that tensor.
        directory: where the maps are kept, in a folder for each network, transform and set of images.
        batch_size: images in a forward pass.
        workers: processes that read images.
        progress: whether to show a progress bar.
    """
    device, count, seen = next(model.parameters()).device, len(images.targets), []

    def compute(batch: Tensor) -> Tensor:
        model(batch.to(device))
        x = seen.pop()
        return x.permute(0, 3, 1, 2) if isinstance(pool, GlobalROTPool2d) and pool.input_fmt == 'NHWC' else x

    with pool.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        example = compute(torch.zeros(1, *image_shape))
        folder = directory / fingerprint(model, type(model).__name__, str(transform), images.identity)
        maps = CachedMaps(folder, _NAME, count, example.shape[1:])
        missing = [shard for shard in range(maps.num_shards) if maps.state(shard) != 'ready']
        left = sum(len(maps.indices(shard)) for shard in missing)
        check_disk(folder, 2 * example.numel() * left, 'the maps need', 'choose another cache directory')
        rows: Any = [batch for shard in missing for batch in maps.batches(shard, batch_size)]
        indices: Any = range(count)
        prepare = partial(_batch, images.source, transform, image_shape)
        loader = DataLoader(indices, batch_sampler=rows, collate_fn=prepare, **loading(workers))
        with tqdm(None, 'computing maps', count, unit='image', initial=count - left, disable=not progress) as bar:
            for batch in maps.write(missing, batch_size, iterate(loader), compute):
                bar.update(len(batch.labels))
    values, readable = maps.read(range(count))
    _refuse_unreadable(images.source, (readable < 0).nonzero()[0].tolist())
    return torch.from_numpy(values)


def remove_maps(directory: Path) -> None:
    """Remove the files that `cached_maps` wrote, and then the directories that are empty; nothing else."""
    folders = [folder for folder in directory.iterdir() if re.fullmatch('[0-9a-f]{16}', folder.name)]
    for folder in folders:
        for file in folder.glob(f'{_NAME}-*.safetensors'):
            file.unlink()
    for folder in (*folders, directory):
        with suppress(OSError):  # it holds files of others
            folder.rmdir()


def _batch(
    source: FolderSource | HubSource, transform: Callable[[Any], Tensor], shape: tuple[int, ...], indices: list[int]
) -> Batch:
    """Prepared images with label 0; zeros with label -1 take the place of an image that cannot be read."""
    images, labels = torch.zeros(len(indices), *shape), torch.zeros(len(indices), dtype=torch.int64)
    for row, index in enumerate(indices):
        try:
            images[row] = transform(source.read(index)[0])
        except UnreadableImage:
            labels[row] = -1
    return Batch(images, labels, [])


def _refuse_unreadable(source: FolderSource | HubSource, indices: list[int]) -> None:
    """Raise if some images cannot be read, with the names and the reasons of the first."""
    reasons = []
    for index in indices[:5]:
        try:
            source.read(index)
        except UnreadableImage as error:
            reasons.append(str(error))
    if indices:
        more = f'\n  and {len(indices) - 5} more' if len(indices) > 5 else ''
        lines = '\n  '.join(reasons)
        raise ValueError(
            f'remove or replace the images that cannot be read, {len(indices)} of {len(source)}:\n  {lines}{more}'
        )
