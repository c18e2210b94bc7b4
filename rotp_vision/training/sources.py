"""Sources of images: a folder, Hugging Face datasets, or the generated set, all checked before training starts."""

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from rotp_vision.images import UnreadableImage, open_image, to_rgb
from rotp_vision.training.config import DataConfig
from rotp_vision.training.generated import CLASSES, generate

Decode = Callable[[Image.Image], Image.Image]

MOST_CLASSES = 1_000_000  # for labels without names: a larger label is taken for an error


class Source(Protocol):
    """A split with random access."""

    classes: list[str]  # names, by label

    def __len__(self) -> int: ...

    def read(self, index: int, decode: Decode = to_rgb) -> tuple[Image.Image, int]:
        """The image, as `decode` makes it of the opened one, and its label; raises UnreadableImage."""
        ...


class FolderSource:
    """Class directories with images in them."""

    def __init__(self, directory: Path):
        from torchvision.datasets.folder import IMG_EXTENSIONS

        if not directory.is_dir():
            raise ValueError(f'data.path must hold the split as a directory, but there is no {directory}')
        self.directory = directory
        self.classes = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
        self.files: list[str] = []
        self.labels: list[int] = []
        for label, name in enumerate(self.classes):
            found = sorted(
                os.path.join(folder, file)
                for folder, _, files in os.walk(directory / name, followlinks=True)
                for file in files
                if file.lower().endswith(IMG_EXTENSIONS)
            )
            if not found:
                raise ValueError(f'class directory {directory / name} holds no image')
            self.files += found
            self.labels += [label] * len(found)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, decode: Decode = to_rgb) -> tuple[Image.Image, int]:
        return open_image(self.files[index], decode=decode), self.labels[index]


class GeneratedSource:
    """Small objects on textured backgrounds, generated on access."""

    def __init__(self, seed: int, split: int, length: int, size: int, num_classes: int):
        if not 2 <= num_classes <= len(CLASSES):
            raise ValueError(f'data.num_classes must be 2 to {len(CLASSES)} for generated images, got {num_classes}')
        self.seed, self.split, self.length, self.size = seed, split, length, size
        self.classes: list[str] = list(CLASSES[:num_classes])

    def __len__(self) -> int:
        return self.length

    def read(self, index: int, decode: Decode = to_rgb) -> tuple[Image.Image, int]:
        image, label = generate(self.seed, self.split, index, self.size, len(self.classes))
        return decode(image), label


def decode_row(
    row: dict[str, Any], config: DataConfig, num_classes: int, name: str, decode: Decode = to_rgb
) -> tuple[Image.Image, int]:
    """Image and label of a row whose image is still {bytes, path}."""
    image, label = row[config.image_key], row[config.label_key]
    if label is None or not 0 <= label < num_classes:
        raise UnreadableImage(f'{name} (of {config.label_key} {label})', f'classes are 0 to {num_classes - 1}')
    if image is None or (image.get('bytes') is None and not image.get('path')):
        raise UnreadableImage(name, 'there is none')
    name = image.get('path') or name
    file = image['path'] if image.get('bytes') is None else io.BytesIO(image['bytes'])
    return open_image(file, name, decode), int(label)


class HubSource:
    """A split of a Hugging Face dataset on disk."""

    def __init__(self, dataset: Any, config: DataConfig, split: str):
        self.dataset, self.config, self.split = dataset, config, split
        self.classes = class_names(dataset, config, split)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int, decode: Decode = to_rgb) -> tuple[Image.Image, int]:
        return decode_row(self.dataset[index], self.config, len(self.classes), f'{self.split}[{index}]', decode)


class PartSource:
    """Some of the images of a split."""

    def __init__(self, whole: Source, indices: np.ndarray):
        self.whole, self.indices, self.classes = whole, indices, whole.classes

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, decode: Decode = to_rgb) -> tuple[Image.Image, int]:
        return self.whole.read(int(self.indices[index]), decode)


def hold_out(source: Source, count: int, seed: int) -> tuple[PartSource, PartSource]:
    """A split in two: all but `count` of its images, and those; the same ones for the same seed."""
    order = np.random.default_rng((seed, len(source))).permutation(len(source))
    return PartSource(source, np.sort(order[count:])), PartSource(source, order[:count])


class StreamSource:
    """A split of a Hugging Face dataset as a stream, one part of it per process."""

    def __init__(self, dataset: Any, config: DataConfig, split: str, length: int):
        self.dataset, self.config, self.split, self.length = dataset, config, split, length
        self.classes = class_names(dataset, config, split)

    def __len__(self) -> int:
        return self.length

    def rows(self, rank: int, processes: int, *, shuffle_seed: int | None, epoch: int) -> Iterator[dict[str, Any]]:
        """Rows of one process (and data worker), in an order that depends on the arguments alone."""
        from datasets.distributed import split_dataset_by_node

        part = split_dataset_by_node(self.dataset, rank=rank, world_size=processes)
        if shuffle_seed is not None:
            part = part.shuffle(seed=shuffle_seed, buffer_size=self.config.shuffle_buffer)
            part.set_epoch(epoch)
        return iter(part)


def class_names(dataset: Any, config: DataConfig, split: str) -> list[str]:
    """Names of the classes of a Hugging Face dataset, from its features or, for plain integers, from the labels."""
    features = dataset.features
    if features is None:
        raise ValueError(f'{config.path} ({split}) does not publish its columns; download it instead of streaming')
    for key, name in ((config.image_key, 'data.image_key'), (config.label_key, 'data.label_key')):
        if key not in features:
            raise ValueError(f'{name} must be one of the columns {", ".join(features)}, got {key!r}')
    names: list[str] = list(getattr(features[config.label_key], 'names', None) or [])
    if config.streaming:
        if names:
            return names
        if config.num_classes is None:
            raise ValueError('data.num_classes must be given for a stream whose labels have no names')
        return [str(number) for number in range(config.num_classes)]
    labels = set(dataset.unique(config.label_key))
    top = len(names) or MOST_CLASSES
    wrong = [label for label in labels if not isinstance(label, int) or not 0 <= label < top]
    if wrong:
        raise ValueError(
            f'data.label_key must hold class numbers from 0 to {top - 1}, got {", ".join(sorted(map(str, wrong))[:5])} '
            f'in {split}; dataset.class_encode_column makes them of names'
        )
    return names or [str(number) for number in range(max(labels, default=-1) + 1)]


def _load_hub(config: DataConfig, split: str, given_length: int | None) -> HubSource | StreamSource:
    import datasets

    assert config.path is not None
    path = Path(config.path)
    dataset: Any
    if path.is_dir() and any(path.rglob('*.parquet')):
        files = sorted(str(file) for file in path.rglob('*.parquet') if file.name.startswith(split))
        if not files:
            raise ValueError(f'{path} holds no parquet file whose name begins with {split!r}')
        dataset = datasets.load_dataset('parquet', data_files={split: files}, split=split, streaming=config.streaming)
    elif path.is_dir():
        loaded: Any = datasets.load_from_disk(str(path))
        if isinstance(loaded, datasets.Dataset):
            raise ValueError(
                f'{path} holds one set of images, not several: save datasets.DatasetDict({config.train_split}=…, '
                f'{config.val_split}=…)'
            )
        if split not in loaded:
            raise ValueError(f'{path} has no split {split!r}; it has {", ".join(loaded)}')
        dataset = loaded[split].to_iterable_dataset(min(64, len(loaded[split]))) if config.streaming else loaded[split]
    else:
        dataset = datasets.load_dataset(config.path, split=split, streaming=config.streaming)
    if dataset.features is not None and config.image_key in dataset.features:
        dataset = dataset.cast_column(config.image_key, datasets.Image(decode=False))
    if not config.streaming:
        return HubSource(dataset, config, split)
    published = dataset.info.splits.get(split) if dataset.info.splits else None
    length = given_length or (published.num_examples if published else None)
    if length is None:
        raise ValueError(f'the size of split {split!r} is not published: give data.train_images and data.val_images')
    return StreamSource(dataset, config, split, length)


def inventory(source: Source | StreamSource) -> dict[str, Any]:
    """Plain values that change when classes or images of a split are added, removed or renamed."""
    digest = None
    if isinstance(source, FolderSource):
        prefix = len(str(source.directory)) + 1  # the folder may move
        digest = hashlib.sha256('\n'.join(file[prefix:] for file in source.files).encode()).hexdigest()
    elif isinstance(source, HubSource):
        digest = source.dataset._fingerprint
    return {'classes': source.classes, 'images': len(source), 'digest': digest}


def data_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """How the splits differ from what they were, one line per difference; both are {split: inventory}."""
    lines = []
    for split, new in now.items():
        old = before.get(split, {})
        removed = [name for name in old.get('classes', ()) if name not in set(new['classes'])]
        added = [name for name in new['classes'] if name not in set(old.get('classes', ()))]
        if removed or added:
            parts = [
                f'{word} {", ".join(names[:5])}' for word, names in (('without', removed), ('with', added)) if names
            ]
            lines.append(f'{split}: classes {" and ".join(parts)}')
        elif old['classes'] != new['classes']:
            lines.append(f'{split}: classes in another order')
        if old.get('images') != new['images']:
            lines.append(f'{split}: {old.get("images")} → {new["images"]} images')
        elif old['digest'] != new['digest']:
            lines.append(f'{split}: other files, as many as before')
    return lines


def open_sources(config: DataConfig, seed: int) -> tuple[Source | StreamSource, Source | StreamSource]:
    """Training and validation split; raises if one is missing or empty, or if their classes differ."""
    if config.source == 'folder':
        root = Path(config.path or '')
        if not root.is_dir():
            raise ValueError(f'data.path must be an existing directory, got {config.path!r}')
        train, val = FolderSource(root / config.train_split), FolderSource(root / config.val_split)
    elif config.source == 'hf':
        train = _load_hub(config, config.train_split, config.train_images)
        val = _load_hub(config, config.val_split, config.val_images)
    else:
        classes = len(CLASSES) if config.num_classes is None else config.num_classes
        train = GeneratedSource(seed, 0, config.train_images or 4096, config.image_size, classes)
        val = GeneratedSource(seed, 1, config.val_images or 1024, config.image_size, classes)
    for name, source in ((config.train_split, train), (config.val_split, val)):
        if len(source) == 0:
            raise ValueError(f'split {name!r} of {config.path} is empty')
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        # Classes without names are counted by their labels, and a small validation split may lack the last ones.
        numbered = config.source == 'hf' and train.classes[: len(val.classes)] == val.classes
        if odd and not numbered:
            raise ValueError(f'the splits must have the same classes; only one of them has {", ".join(odd[:5])}')
        if not numbered:
            raise ValueError(
                f'the splits must have the same classes in the same order, got {", ".join(train.classes[:5])} and '
                f'{", ".join(val.classes[:5])}'
            )
    if config.num_classes is not None and len(train.classes) != config.num_classes:
        raise ValueError(f'data.num_classes is {config.num_classes} but {len(train.classes)} classes were found')
    return train, val
