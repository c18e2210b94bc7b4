"""Embedding a folder of images into files, in parts, so that an interrupted run continues where it stopped."""

import csv
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from rotp_vision.data.cache import fingerprint
from rotp_vision.data.folders import ImageFolder, read_folder
from rotp_vision.embedding.embedder import Embedder, prepared_batches
from rotp_vision.embedding.scores import METRICS, Choice, check_groups, choose, mean_over_groups, retrieval
from rotp_vision.embedding.sheet import neighbour_sheet
from rotp_vision.embedding.whitening import project
from rotp_vision.files import check_disk, open_by_umask, replacing, write_atomically
from rotp_vision.hub import native_of
from rotp_vision.layers import AnyPoolOptions, PoolOptions, any_pool_options
from rotp_vision.surgery.pools import described_pools, is_local
from rotp_vision.tables import text_table

PART = 1024  # images in a part, which a killed run computes again
BLOCK = 4096  # vectors in memory at a time
Metric = Literal['R@1', 'mAP']
PRESET, OWN = 'preset embedding', 'own pooling'
PEERS: dict[str, Any] = {'average': 'avg', 'GeM': 'gem'}
CANDIDATES: dict[str, Any] = PEERS | {
    'max': 'max',
    'average + max': 'avgmax',
    'GeM 2': {'pool': 'gem', 'power': 2.0},
    'GeM 5': {'pool': 'gem', 'power': 5.0},
    'mean, norm 1': {'pool': 'avg', 'norm_power': 1.0},
    'mean, norm 2': {'pool': 'avg', 'norm_power': 2.0},
    'GeM, norm 1': {'pool': 'gem', 'norm_power': 1.0},
    'GeM, norm 2': {'pool': 'gem', 'norm_power': 2.0},
    'ROTP, T = 2': {'preset': 'embedding', 'smoothness': 2.0, 'sample_penalty': 6.0},
    'ROTP, T = 8': {'preset': 'embedding', 'smoothness': 8.0, 'sample_penalty': 24.0},
    'ROTP, norm 1': {'preset': 'embedding', 'norm_power': 1.0},
}


class Embedded(NamedTuple):
    """What `embed_folder` did; `print` shows it.

    Attributes:
        output: the directory.
        num_images: number of images that were embedded.
        unreadable: why a file could not be read, by its path.
        scores: mean and standard error over groups, by pooling and metric; empty without class folders.
        kept: name of the embedder's own pooling.
        choice: of a pooling, if one was to be chosen.
    """

    output: Path
    num_images: int
    unreadable: dict[str, str]
    scores: dict[str, dict[str, tuple[float, float]]]
    kept: str
    choice: Choice | None

    def __str__(self) -> str:
        lines = []
        if self.scores:
            rows = [('pooling', *METRICS)]
            for name, row in self.scores.items():
                rows.append((name, *(f'{100 * mean:.1f} ± {100 * error:.1f}' for mean, error in row.values())))
            lines.append(text_table(rows))
        if self.choice is not None:
            gain = f'{100 * self.choice.gain:+.1f} ± {100 * self.choice.error:.1f} points'
            said = f'{self.kept} stays' if self.choice.name == self.kept else f'chosen: {self.choice.name}'
            lines.append(f'{said}; poolings that are chosen on other groups differ from {self.kept} by {gain}')
        if self.unreadable:
            lines.append(f'unreadable files: {len(self.unreadable)} (metadata.csv names all)')
            lines += [f'  {name}: {reason}' for name, reason in list(self.unreadable.items())[:5]]
        return '\n'.join([*lines, f'wrote {self.num_images} vectors to {self.output}'])


def embed_folder(
    embedder: Embedder,
    images: str | Path,
    output: str | Path,
    *,
    group_by: Literal['folder'] | None = None,
    whiten: bool = False,
    fit: Metric | None = None,
    neighbours: int = 0,
    batch_size: int = 32,
    workers: int = 2,
    force: bool = False,
    progress: bool = True,
) -> Embedded:
    """Embed the images in a folder, and in the folders below it, into files.

    It writes `embeddings.npy` (float32, a row for each readable image), `metadata.csv` (row, file, label and error of
    every image), `embedder/` (which `Embedder.load` reads) and `embeddings.json` (what was done; written last). With
    class folders it scores average pooling, GeM and the embedder's own pooling. An interrupted run, started again,
    continues, and ends with the same bytes.

    Args:
        embedder: not fitted yet.
        images: the folder. Its folders are taken as classes.
        output: the directory to write.
        group_by: 'folder' if images in one folder must not find each other in the scores (frames of a video).
        whiten: whether to fit mean and whitening to these images.
        fit: choose the pooling by this metric, with the classes as labels; the embedder then has that pooling.
        neighbours: nearest images to show for a few queries in the picture `neighbours.png`; 0 draws none.
        batch_size: images in a forward pass.
        workers: processes that read images.
        force: whether to replace what is in `output`.
        progress: whether to show a progress bar.

    Example:
        >>> import tempfile, numpy, rotp_vision, timm, torchvision
        >>> with tempfile.TemporaryDirectory() as place:
        ...     for k, (image, _) in enumerate(torchvision.datasets.FakeData(4, (3, 64, 64))):
        ...         image.save(f'{place}/{k}.png')
        ...     embedder = rotp_vision.Embedder(timm.create_model('test_resnet'))
        ...     result = rotp_vision.embed_folder(embedder, place, f'{place}/out', workers=0, progress=False)
        ...     numpy.load(f'{place}/out/embeddings.npy').shape
        (4, 96)
    """
    target = Path(output)
    if embedder.mean is not None:
        raise ValueError('the embedder is fitted already; make one that is not, and give whiten')
    found = read_folder(images)
    labelled = len(found.classes) > 1 and -1 not in found.labels
    if fit and not labelled:
        raise ValueError(f'choosing a pooling needs every image in one of several class folders of {images}')
    labels, groups = torch.tensor(found.labels), torch.arange(len(found.files))
    if group_by:
        groups = torch.from_numpy(np.unique([os.path.dirname(file) for file in found.files], return_inverse=True)[1])
    if fit:
        check_groups(labels, groups)
    own, poolings = _poolings(embedder, labelled, fit is not None, bool(neighbours))
    parts = _Parts(embedder, found, target, poolings, batch_size)
    if target.exists() and not parts.directory.exists():
        if not force:
            raise ValueError(
                f'{target} exists, and is not an interrupted run with these images and this network; choose another '
                'output, or overwrite it with force'
            )
        (target / 'embeddings.json').unlink(missing_ok=True)
    reasons = parts.compute(workers, progress)
    kept = [index for index, reason in enumerate(reasons) if reason is None]
    if not kept:
        raise ValueError(f'none of the {len(reasons)} images in {images} can be read: {reasons[0]}')
    files = [found.files[index] for index in kept]
    labels, groups = labels[kept], groups[kept]
    features = parts.assembled(len(kept))
    scored = {name: retrieval(features[name], labels, groups) for name in poolings} if labelled else {}
    choice, chosen = None, own
    if fit:
        choice = choose({name: getattr(one, METRICS[fit]) for name, one in scored.items()}, own, labels, groups)
        chosen = choice.name
        options = poolings[chosen]
        if options is not None:
            embedder.set_pool(options)
    if whiten:
        embedder.fit(features[chosen])
    vectors = _write_vectors(target / 'embeddings.npy', features[chosen], embedder)
    if whiten and labelled:
        scored[f'{chosen}, whitened'] = retrieval(vectors, labels, groups)
    _write_metadata(target / 'metadata.csv', found, reasons)
    embedder.save(target / 'embedder', force=True)
    if neighbours:
        tables = {'average pooling': features['average']} if 'average' in features else {}
        tables |= {f'this embedder ({chosen})': vectors}
        sheet = neighbour_sheet(files, tables, labels if labelled else None, groups, neighbours)
        with replacing(target / 'neighbours.png') as temporary:
            sheet.save(temporary, 'PNG')
    scores = {
        name: {metric: mean_over_groups(getattr(one, field), groups) for metric, field in METRICS.items()}
        for name, one in scored.items()
    }
    unreadable = {_name(found, index): reason for index, reason in enumerate(reasons) if reason is not None}
    result = Embedded(target, len(kept), unreadable, scores, own, choice)
    page: dict[str, Any] = {'network': native_of(target / 'embedder')[0], 'pooling': chosen, **parts.facts}
    page |= {'dimensions': vectors.shape[1], 'whitened': whiten, 'group_by': group_by, 'num_images': len(kept)}
    page |= {'unreadable': unreadable, 'scores': scores, 'choice': None if choice is None else choice._asdict()}
    write_atomically(target / 'embeddings.json', json.dumps(page, indent=2))
    parts.remove()
    return result


def _poolings(
    embedder: Embedder, labelled: bool, fit: bool, neighbours: bool
) -> tuple[str, dict[str, AnyPoolOptions | None]]:
    """The name of the embedder's own pooling, and the options of all that are computed, its own (None) first."""
    present = [pool.options for pool in described_pools(embedder.model).values() if not is_local(pool)]
    own = PRESET if present == [PoolOptions.embedding()] else OWN
    others = CANDIDATES if fit else PEERS if labelled else {'average': 'avg'} if neighbours else {}
    others = others if present else {}  # a network with its own pooling takes no other
    return own, {own: None} | {name: any_pool_options(options) for name, options in others.items()}


class _Parts:
    """Vectors of some thousand images each, in files that get their names when they are complete.

    A file holds `features` (poolings, n, D) of the readable images of a part, and in its metadata the reasons of the
    others by their number in the part.
    """

    def __init__(
        self,
        embedder: Embedder,
        found: ImageFolder,
        target: Path,
        poolings: dict[str, AnyPoolOptions | None],
        batch_size: int,
    ):
        self.embedder, self.found, self.poolings, self.batch_size = embedder, found, poolings, batch_size
        own = {path: pool.options.to_dict() for path, pool in described_pools(embedder.model).items()}
        self.facts = {
            'pools': own,
            'transform': embedder.image_config,
            'precision': embedder.precision,
            'batch_size': batch_size,
        }
        status = [os.stat(file, follow_symlinks=os.path.exists(file)) for file in found.files]
        known = [(_name(found, index), one.st_size, one.st_mtime_ns) for index, one in enumerate(status)]
        others = [None if options is None else options.to_dict() for options in poolings.values()]
        self.directory = target / f'parts-{fingerprint(embedder.model, self.facts, others, known)}'
        self.count = -(-len(found.files) // PART)

    def file(self, part: int) -> Path:
        return self.directory / f'{part:05d}.safetensors'

    def indices(self, part: int) -> range:
        return range(part * PART, min((part + 1) * PART, len(self.found.files)))

    def compute(self, workers: int, progress: bool) -> list[str | None]:
        """Embed the images of missing parts; returns why each image could not be read, None if it could."""
        missing = [part for part in range(self.count) if not self.file(part).exists()]
        left = sum(len(self.indices(part)) for part in missing)
        self.directory.mkdir(parents=True, exist_ok=True)
        needed = 4 * left * len(self.poolings) * int(getattr(self.embedder.model, 'num_features', 0))
        check_disk(self.directory, 2 * needed, 'the vectors need', 'choose another output')
        pools = self.embedder.pools_for(self.poolings.values()) if len(self.poolings) > 1 else []
        batches = {
            part: [list(indices)[i : i + self.batch_size] for i in range(0, len(indices), self.batch_size)]
            for part, indices in ((part, self.indices(part)) for part in missing)
        }
        rows = [row for part in missing for row in batches[part]]
        stream = prepared_batches(self.found.files, self.embedder.transform, self.batch_size, workers, rows)
        done = len(self.found.files) - left
        with tqdm(None, 'embedding', len(self.found.files), initial=done, unit='image', disable=not progress) as bar:
            for part in missing:
                features, reasons = [], list[str | None]()
                for _ in batches[part]:
                    images, errors = next(stream)
                    if len(images):
                        features.append(self._features(images, pools))
                    reasons += [None if error is None else error.reason for error in errors]
                    bar.update(len(errors))
                self._write(part, features, reasons)
        return [reason for part in range(self.count) for reason in self._reasons(part)]

    def _features(self, images: Tensor, pools: list[Any]) -> Tensor:
        """(poolings, n, D) normalised."""
        return F.normalize(torch.stack(self.embedder.features(images, pools=pools)[0]), dim=2).cpu()

    def _write(self, part: int, features: list[Tensor], reasons: list[str | None]) -> None:
        tensor = torch.cat(features, 1) if features else torch.empty(len(self.poolings), 0, 0)
        with replacing(self.file(part)) as temporary:
            save_file({'features': tensor.contiguous()}, temporary, {'reasons': json.dumps(reasons)})
            open_by_umask(temporary)

    def _reasons(self, part: int) -> list[str | None]:
        with safe_open(self.file(part), 'pt') as opened:
            return json.loads(opened.metadata()['reasons'])

    def assembled(self, count: int) -> dict[str, Tensor]:
        """(count, D) vectors by pooling, which stay on the disk."""
        tables: list[Any] = []
        row = 0
        for part in range(self.count):
            with safe_open(self.file(part), 'pt') as opened:
                features = opened.get_tensor('features').numpy()
            if not features.shape[1]:
                continue
            for index, vectors in enumerate(features):
                if index == len(tables):
                    path = self.directory / f'{index}.npy'
                    tables.append(np.lib.format.open_memmap(path, 'w+', np.float32, (count, vectors.shape[1])))
                tables[index][row : row + len(vectors)] = vectors
            row += features.shape[1]
        return dict(zip(self.poolings, map(torch.from_numpy, tables), strict=True))

    def remove(self) -> None:
        """Remove these parts, and those of other runs into the same directory."""
        for directory in self.directory.parent.iterdir():
            if re.fullmatch('parts-[0-9a-f]{16}', directory.name):
                shutil.rmtree(directory)


def _name(found: ImageFolder, index: int) -> str:
    return Path(os.path.relpath(found.files[index], found.root)).as_posix()


def _write_vectors(path: Path, features: Tensor, embedder: Embedder) -> Tensor:
    """Write what the embedder makes of normalised features; returns it, on the disk."""
    with replacing(path) as temporary:
        table = np.lib.format.open_memmap(temporary, 'w+', np.float32, tuple(features.shape))
        for begin in range(0, len(features), BLOCK):
            rows = project(features[begin : begin + BLOCK], embedder.mean, embedder.matrix)
            table[begin : begin + BLOCK] = rows.numpy()
        table.flush()
    return torch.from_numpy(np.load(path, mmap_mode='c'))


def _write_metadata(path: Path, found: ImageFolder, reasons: list[str | None]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(('row', 'file', 'label', 'error'))
    row = 0
    for index, (label, reason) in enumerate(zip(found.labels, reasons, strict=True)):
        name = found.classes[label] if label >= 0 else ''
        writer.writerow(('' if reason else row, _name(found, index), name, reason or ''))
        row += reason is None
    write_atomically(path, text.getvalue())
