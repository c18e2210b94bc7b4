"""Feature maps of images by a frozen network, computed once and kept in files."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from rotp_vision.data.loading import Batch
from rotp_vision.files import open_by_umask, replacing
from rotp_vision.surgery.pools import described_pools

VERSION = '1'  # of the layout of a shard
MAX_IMAGES, MAX_BYTES = 256, 2**26  # of one shard

State = Literal['ready', 'missing', 'damaged', 'of another version']


class DamagedMaps(ValueError):
    """A cached map is not what was written; its shard has been removed."""


class CachedMaps:
    """Float16 maps of a list of images and their labels, in shards of consecutive images.

    A shard is a safetensors file: `maps` (n, …), `labels` (n,), with -1 for an image that could not be read, and
    `checksums` (n,) of map, label and position. It gets its name when it is complete and on the disk, so that an
    interrupted computation continues with the next shard. A map is verified when it is read.

    Args:
        directory: directory of the shards.
        name: name of this list of images, for example 'val'.
        length: number of images.
        shape: shape of one map.
    """

    def __init__(self, directory: Path, name: str, length: int, shape: Sequence[int]):
        self.directory, self.name, self.length, self.shape = directory, name, length, tuple(shape)
        self.per_shard = max(1, min(MAX_IMAGES, MAX_BYTES // (2 * int(np.prod(self.shape)))))
        self.num_shards = -(-length // self.per_shard)
        self._opened: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.length

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {'_opened': {}}  # data workers open the files themselves

    def file(self, shard: int) -> Path:
        """Path of a shard."""
        return self.directory / f'{self.name}-{shard:05d}of{self.num_shards:05d}.safetensors'

    def indices(self, shard: int) -> range:
        """Indices of the images of a shard."""
        first = shard * self.per_shard
        return range(first, min(first + self.per_shard, self.length))

    def batches(self, shard: int, batch_size: int) -> list[list[int]]:
        """Indices of the images of a shard, in batches."""
        indices = self.indices(shard)
        return [list(indices[i : i + batch_size]) for i in range(0, len(indices), batch_size)]

    def state(self, shard: int) -> State:
        """Returns whether a shard can be read, without reading its maps."""
        try:
            with safe_open(self.file(shard), 'numpy') as opened:
                if (opened.metadata() or {}).get('version') != VERSION:
                    return 'of another version'
                count = len(self.indices(shard))
                expected = {'maps': [count, *self.shape], 'labels': [count], 'checksums': [count]}
                shapes = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118
                return 'ready' if shapes == expected else 'damaged'
        except FileNotFoundError:
            return 'missing'
        except (SafetensorError, OSError):
            return 'damaged'

    def write(
        self, shards: Sequence[int], batch_size: int, batches: Iterable[Batch], compute: Callable[[Tensor], Tensor]
    ) -> Iterator[Batch]:
        """Computes shards one after the other; yields each batch once its maps are computed.

        Args:
            shards: numbers of the shards.
            batch_size: number of images in a batch.
            batches: the images of `self.batches(shard, batch_size)` for each of the shards in turn. Unreadable images
                have label -1.
            compute: from images to maps.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        batches = iter(batches)
        for shard in shards:
            indices, done = self.indices(shard), 0
            maps = np.empty((len(indices), *self.shape), np.float16)
            labels = np.empty(len(indices), np.int64)
            for batch in islice(batches, len(self.batches(shard, batch_size))):
                values = compute(batch.images)
                half = values.half()
                if not bool(half.isfinite().all()):
                    raise ValueError(
                        f'a feature of size {values.abs().max():.3g} does not fit float16, the format of cached maps: '
                        'check the weights of the network, or set cache_features false in training'
                    )
                end = done + len(half)
                maps[done:end], labels[done:end] = half.cpu().numpy(), batch.labels.cpu().numpy()
                done = end
                yield batch
            assert done == len(indices)
            checksums = [self._checksum(*entry) for entry in zip(indices, maps, labels.tolist(), strict=True)]
            tensors = {'maps': maps, 'labels': labels, 'checksums': np.asarray(checksums, np.int64)}
            with replacing(self.file(shard)) as temporary:
                try:
                    save_file(tensors, temporary, {'version': VERSION})
                except SafetensorError as error:  # a full disk, for example
                    raise OSError(f'cannot write {self.file(shard)}: {error}') from error
                open_by_umask(temporary)

    def _checksum(self, index: int, values: np.ndarray, label: int) -> int:
        return zlib.crc32(values.tobytes(), zlib.crc32(f'{self.name} {index} {label}'.encode()))

    def _open(self, shard: int) -> tuple[Any, np.ndarray, np.ndarray]:
        """Returns the maps of a shard, which stay on the disk, its labels and its checksums."""
        if shard not in self._opened:
            opened = safe_open(self.file(shard), 'numpy')
            self._opened[shard] = opened.get_slice('maps'), opened.get_tensor('labels'), opened.get_tensor('checksums')
        return self._opened[shard]

    @property
    def readable(self) -> int:
        """Number of images that could be read."""
        return sum(int((self._open(shard)[1] >= 0).sum()) for shard in range(self.num_shards))

    def read(self, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns float16 maps and labels of images; raises DamagedMaps if they are not what was written."""
        rows, found = [], []
        for index in indices:
            shard, row = divmod(index, self.per_shard)
            try:
                maps, labels, checksums = self._open(shard)
                values, label = maps[row], int(labels[row])
                if self._checksum(index, values, label) != checksums[row]:
                    raise OSError('a checksum differs')
            except (SafetensorError, OSError) as error:
                self._opened.pop(shard, None)
                self.file(shard).unlink(missing_ok=True)
                raise DamagedMaps(
                    f'{self.file(shard)} was damaged and has been removed: run again to compute it, in training with '
                    '--resume auto'
                ) from error
            rows.append(values)
            found.append(label)
        maps = np.stack(rows) if rows else np.empty((0, *self.shape), np.float16)
        return maps, np.asarray(found, np.int64)

    def __getitem__(self, indices: list[int]) -> Batch:
        """Returns the maps of those `indices` whose image could be read."""
        maps, labels = map(torch.from_numpy, self.read(indices))
        return Batch(maps[labels >= 0], labels[labels >= 0], [])


def fingerprint(model: nn.Module, *facts: object) -> str:
    """Returns a digest of the frozen weights of a model, except those of pools, and of plain values."""
    digest = hashlib.sha256()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    pools = tuple(f'{path}.' for path in described_pools(model))  # maps do not depend on the pools
    for name, tensor in sorted(model.state_dict().items()):
        if name not in trained and not name.startswith(pools):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().double().numpy().tobytes())
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]
