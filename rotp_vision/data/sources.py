"""Sources of labelled images: a folder, a Hugging Face dataset, or the generated set."""

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from rotp_vision.data.config import DataConfig
from rotp_vision.data.folders import read_folder
from rotp_vision.data.generated import CLASSES_OF, Question, generate
from rotp_vision.images import UnreadableImage, open_image, to_rgb

Decode = Callable[[Image.Image], Image.Image]

SMALL = 2**26  # bytes of all images of a set whose contents are compared, or that is kept in memory
MAX_CLASSES = 1_000_000  # bound on labels that have no names; a larger label is an error in the data


class Source(Protocol):
    """A split with random access."""

    classes: list[str]  # names by label

    def __len__(self) -> int: ...

    def read(self, index: int, decode: Decode = to_rgb) -> tuple[Image.Image, int]:
        """Returns the image, decoded by `decode`, and its label; raises UnreadableImage."""
        ...

    def digests(self) -> dict[str, str]:
        """Returns digests that change when images are added, removed, renamed or modified.

        `files`, if present, does not depend on where the files are or on when they were written.
        """
        ...


class FolderSource:
    """Class folders with images in them."""

    def __init__(self, directory: Path):
        if not directory.is_dir():
            raise ValueError(f'data.path must hold the split as a directory, but there is no {directory}')
        found = read_folder(directory)
        if found.empty:
            raise ValueError(f'class directory {directory / found.empty[0]} holds no image of its own: remove it')
        outside = found.labels.count(-1)
        if outside:
            raise ValueError(
                f'{directory} has {outside} images outside class folders, such as {found.files[0]}: move them into one'
            )
        self.directory, self.classes, self.files, self.labels = directory, found.classes, found.files, found.labels

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, decode: Decode = to_rgb) -> tuple[Image.Image, int]:
        return open_image(self.files[index], decode=decode), self.labels[index]

    def digests(self) -> dict[str, str]:
        """Returns digests of names and sizes, and of contents (up to 64 MiB in all) or else modification times."""
        files, times, total = hashlib.sha256(), hashlib.sha256(), 0
        for file in self.files:
            status = os.stat(file, follow_symlinks=os.path.exists(file))  # of the link itself if it is dangling
            name = os.path.relpath(file, self.directory).encode('utf-8', 'surrogateescape')
            files.update(b'%s\n%d\n' % (name, status.st_size))
            times.update(b'%d\n' % status.st_mtime_ns)
            total += status.st_size
        if total > SMALL:
            return {'files': files.hexdigest(), 'times': times.hexdigest()}
        for file in self.files:
            if os.path.exists(file):
                files.update(Path(file).read_bytes())
        return {'files': files.hexdigest()}


class GeneratedSource:
    """Small objects on textured backgrounds, generated on access; a small set is kept in memory."""

    def __init__(self, seed: int, split: int, length: int, size: int, question: Question, num_classes: int | None):
        known = CLASSES_OF[question]
        count = len(known) if num_classes is None else num_classes
        if not 2 <= count <= len(known) or (question == 'most frequent' and count != len(known)):
            allowed = len(known) if question == 'most frequent' else f'2 to {len(known)}'
            raise ValueError(f'data.num_classes must be {allowed} for data.question {question!r}, got {num_classes}')
        self.seed, self.split, self.length, self.size = seed, split, length, size
        self.question: Question = question
        self.classes: list[str] = list(known[:count])
        self._drawn: dict[int, tuple[Image.Image, int]] = {}

    def __len__(self) -> int:
        return self.length

    def read(self, index: int, decode: Decode = to_rgb) -> tuple[Image.Image, int]:
        drawn = self._drawn.get(index)
        if drawn is None:
            drawn = generate(self.seed, self.split, index, self.size, self.question, len(self.classes))
            if 3 * self.size**2 * self.length <= SMALL:
                self._drawn[index] = drawn
        return decode(drawn[0]), drawn[1]

    def digests(self) -> dict[str, str]:
        return {}


class HubSource:
    """A split of a Hugging Face dataset on disk.

    Args:
        dataset: a `datasets.Dataset`.
        split: its name, for messages.
        image_key: column of the images.
        label_key: column of the labels.
    """

    def __init__(self, dataset: Any, split: str, image_key: str = 'image', label_key: str = 'label'):
        import datasets

        for key, name in ((image_key, 'data.image_key'), (label_key, 'data.label_key')):
            if key not in dataset.features:
                raise ValueError(f'{name} must be one of the columns {", ".join(dataset.features)}, got {key!r}')
        self.dataset = dataset.cast_column(image_key, datasets.Image(decode=False))
        self.split, self.image_key, self.label_key = split, image_key, label_key
        self.classes = self._class_names()

    def _class_names(self) -> list[str]:
        """Names of the classes from the features or, for plain integers, the numbers themselves."""
        names: list[str] = list(getattr(self.dataset.features[self.label_key], 'names', None) or [])
        labels = set(self.dataset.unique(self.label_key))
        top = len(names) or MAX_CLASSES
        wrong = [label for label in labels if not isinstance(label, int) or not 0 <= label < top]
        if wrong:
            shown = ', '.join(sorted(map(str, wrong))[:5])
            raise ValueError(
                f'data.label_key must hold class numbers from 0 to {top - 1}, got {shown} in {self.split}; '
                'dataset.class_encode_column makes them of names'
            )
        return names or [str(number) for number in range(max(labels, default=-1) + 1)]

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int, decode: Decode = to_rgb) -> tuple[Image.Image, int]:
        row, name = self.dataset[index], f'{self.split}[{index}]'
        image = row[self.image_key]
        if image is None or (image.get('bytes') is None and not image.get('path')):
            raise UnreadableImage(name, 'the row has no image')
        name = image.get('path') or name
        file = image['path'] if image.get('bytes') is None else io.BytesIO(image['bytes'])
        return open_image(file, name, decode), int(row[self.label_key])

    def digests(self) -> dict[str, str]:
        return {'dataset': self.dataset._fingerprint}


class PartSource:
    """Some of the images of a source."""

    def __init__(self, whole: Source, indices: np.ndarray):
        self.whole, self.indices, self.classes = whole, indices, whole.classes

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, decode: Decode = to_rgb) -> tuple[Image.Image, int]:
        return self.whole.read(int(self.indices[index]), decode)

    def digests(self) -> dict[str, str]:
        return self.whole.digests() | {'indices': hashlib.sha256(self.indices.tobytes()).hexdigest()}


def hold_out(source: Source, count: int, seed: int) -> tuple[PartSource, PartSource]:
    """Splits a source in two: all but `count` of its images, and the `count` held out, chosen by the seed."""
    order = np.random.default_rng((seed, len(source))).permutation(len(source))
    return PartSource(source, np.sort(order[count:])), PartSource(source, order[:count])


def open_sources(config: DataConfig, seed: int) -> tuple[Source, Source]:
    """Returns the training and the validation split; raises if one is missing or empty, or if their classes differ."""
    train: Source
    val: Source
    if config.source == 'folder':
        root = Path(config.path or '')
        if not root.is_dir():
            raise ValueError(f'data.path must be an existing directory, got {config.path!r}')
        train, val = FolderSource(root / config.train_split), FolderSource(root / config.val_split)
    elif config.source == 'hf':
        train, val = (_load_hub(config, split) for split in (config.train_split, config.val_split))
    else:
        images = config.image_size, config.question, config.num_classes
        train = GeneratedSource(seed, 0, config.train_images, *images)
        val = GeneratedSource(seed, 1, config.val_images, *images)
    for name, source in ((config.train_split, train), (config.val_split, val)):
        if len(source) == 0:
            raise ValueError(f'split {name!r} of {config.path} is empty')
    # Unnamed classes are counted by their labels, and a small validation split may lack the last ones.
    numbered = config.source == 'hf' and train.classes[: len(val.classes)] == val.classes
    if train.classes != val.classes and not numbered:
        odd = sorted(set(train.classes) ^ set(val.classes))
        if odd:
            raise ValueError(f'the splits must have the same classes; only one of them has {", ".join(odd[:5])}')
        raise ValueError(
            f'the splits must have the same classes in the same order, got {", ".join(train.classes[:5])} and '
            f'{", ".join(val.classes[:5])}'
        )
    if config.num_classes is not None and len(train.classes) != config.num_classes:
        raise ValueError(f'data.num_classes is {config.num_classes} but {len(train.classes)} classes were found')
    return train, val


def _load_hub(config: DataConfig, split: str) -> HubSource:
    import datasets

    assert config.path is not None
    path = Path(config.path)
    dataset: Any
    if path.is_dir() and any(path.rglob('*.parquet')):
        files = sorted(str(file) for file in path.rglob('*.parquet') if file.name.startswith(split))
        if not files:
            raise ValueError(f'{path} holds no parquet file whose name begins with {split!r}')
        dataset = datasets.load_dataset('parquet', data_files={split: files}, split=split)
    elif path.is_dir():
        loaded: Any = datasets.load_from_disk(str(path))
        if isinstance(loaded, datasets.Dataset):
            raise ValueError(
                f'{path} holds one set of images, not several: save datasets.DatasetDict({config.train_split}=…, '
                f'{config.val_split}=…)'
            )
        if split not in loaded:
            raise ValueError(f'{path} has no split {split!r}; it has {", ".join(loaded)}')
        dataset = loaded[split]
    else:
        dataset = datasets.load_dataset(config.path, split=split)
    return HubSource(dataset, split, config.image_key, config.label_key)


def inventory(source: Source) -> dict[str, Any]:
    """Returns plain values that change when classes or images of a split are added, removed, renamed or modified."""
    return {'classes': source.classes, 'images': len(source), **source.digests()}


def data_changes(
    before: dict[str, Any], now: dict[str, Any], compared: Sequence[str] = ('files', 'times', 'dataset')
) -> list[str]:
    """Returns how splits differ from before, one line per difference.

    Args:
        before: inventories by split.
        now: the same of the present data.
        compared: names of the digests that are compared.
    """
    lines = []
    for split, new in now.items():
        old = before[split]
        removed = [name for name in old['classes'] if name not in set(new['classes'])]
        added = [name for name in new['classes'] if name not in set(old['classes'])]
        if removed or added:
            parts = [
                f'{word} {", ".join(names[:5])}' for word, names in (('without', removed), ('with', added)) if names
            ]
            lines.append(f'{split}: classes {" and ".join(parts)}')
        elif old['classes'] != new['classes']:
            lines.append(f'{split}: classes in another order')
        if old['images'] != new['images']:
            lines.append(f'{split}: {old["images"]} → {new["images"]} images')
        elif any(old.get(key) != new.get(key) for key in compared):
            lines.append(f'{split}: other files, or other contents, as many as before')
    return lines
