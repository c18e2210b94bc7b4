"""Real networks and labelled images from a data directory, and the networks' maps of the images.

The directory holds `images/*.parquet` (Hugging Face image layout), `weights/*.safetensors` and `builders.py`, which
builds the networks. Its path is an argument of every command that needs it.
"""

import argparse
import csv
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import load_dataset
from PIL import Image, ImageFilter
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchvision import transforms
from tqdm import tqdm

from rotp_vision.files import replacing

SHARD = 50  # images per shard of the cached maps
BATCH = 10  # images per forward pass, so that activations stay in the processor's cache
NEAR = 0.985  # two images whose average features have a larger cosine are in one group


class Network(NamedTuple):
    """A network, images that it was not trained on, and their preprocessing."""

    name: str
    builder: str
    images: str
    label: str
    resize: int
    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


HALF = (0.5, 0.5, 0.5)
NETWORKS = [
    Network(
        'ResNet-50', 'resnet50_v1_in1k', 'in1k_dev', 'imagenet_index', 256, 224,
        (123.68 / 255, 116.779 / 255, 103.939 / 255), (0.229, 0.224, 0.225),
    ),
    Network('EfficientNet-Lite0', 'efficientnet_lite0_in1k', 'in1k_dev', 'imagenet_index', 256, 224, HALF, HALF),
    Network('ResNet-18 (Tiny-ImageNet)', 'resnet18_tiny200', 'tiny200_val_even', 'label', 64, 64, HALF, HALF),
]  # fmt: skip


def add_data_arguments(parser: argparse.ArgumentParser):
    parser.add_argument('--data', type=Path, required=True, help='directory with images/, weights/ and builders.py')
    parser.add_argument('--cache', type=Path, default=Path('runs/maps'), help='where maps are kept between commands')
    parser.add_argument('--limit', type=int, help='use only so many images')
    parser.add_argument('--threads', type=int, default=2)


def build(network: Network, data: Path) -> nn.Module:
    spec = importlib.util.spec_from_file_location('builders', data / 'builders.py')
    if spec is None or spec.loader is None or not (data / 'builders.py').exists():
        raise SystemExit(f'--data must hold builders.py, found none in {data}')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, network.builder)().eval()


def _rows(network: Network, data: Path):
    path = str(data / 'images' / f'{network.images}.parquet')
    return load_dataset('parquet', data_files=path, split='train').shuffle(seed=0)


def images_of(network: Network, data: Path, limit: int | None = None, columns: tuple[str, ...] = ()):
    """The network's images in a fixed shuffled order, transformed, with labels: a map-style data set."""
    transform = transforms.Compose(
        [
            transforms.Resize(network.resize),
            transforms.CenterCrop(network.size),
            transforms.ToTensor(),
            transforms.Normalize(network.mean, network.std),
        ]
    )
    images = _rows(network, data)
    images = images.select(range(min(limit or len(images), len(images))))
    images.set_transform(
        lambda rows: {
            'x': [transform(image.convert('RGB')) for image in rows['image']],
            'y': rows[network.label],
            **{column: rows[column] for column in columns},
        }
    )
    return images


def column_of(network: Network, data: Path, column: str, limit: int | None = None) -> list[Any]:
    """A column of the network's images, in the order of `images_of`."""
    return _rows(network, data).select_columns([column])[:limit][column]


def groups_of(images: str, names: Sequence[str], features: Tensor) -> Tensor:
    """(images,) numbers of the groups that must not be divided, by name or, for tiles, by similarity of features."""
    if images != 'magnetic_tile6':
        return torch.from_numpy(np.unique(names, return_inverse=True)[1])
    unit = F.normalize(features.float())
    return torch.from_numpy(connected_components((unit @ unit.T > NEAR).numpy(), directed=False)[1]).long()


def areas_of(network: Network, data: Path, limit: int | None) -> Tensor:
    """(images,) share of each image that the largest box of an object covers; NaN without a box."""
    areas: dict[str, float] = {}
    with (data / 'images' / f'{network.images}_boxes.csv').open() as lines:
        for row in csv.DictReader(lines):
            width, height, x0, y0, x1, y1 = (float(row[key]) for key in ('width', 'height', 'x0', 'y0', 'x1', 'y1'))
            area = (x1 - x0) * (y1 - y0) / (width * height)
            areas[row['file']] = max(area, areas.get(row['file'], 0.0))
    return torch.tensor([areas.get(file, float('nan')) for file in column_of(network, data, 'file', limit)])


class SmallObjects(Dataset):
    """Photos shrunk to a part of their side and pasted at a random position of another photo, blurred or sharp."""

    def __init__(self, network: Network, data: Path, count: int, parts: int, blur: int):
        self.label, self.size, self.count, self.blur = network.label, network.size, count, blur
        self.images = _rows(network, data)
        self.crop = transforms.Compose([transforms.Resize(network.resize), transforms.CenterCrop(network.size)])
        self.finish = transforms.Compose([transforms.ToTensor(), transforms.Normalize(network.mean, network.std)])
        self.side = network.size // parts
        self.corners = np.random.default_rng(1).integers(0, network.size - self.side + 1, (count, 2)).tolist()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, other = self.images[index], self.images[(self.count + index) % len(self.images)]
        canvas = self.crop(other['image'].convert('RGB')).filter(ImageFilter.GaussianBlur(self.blur))
        small = self.crop(row['image'].convert('RGB')).resize((self.side,) * 2, Image.Resampling.BICUBIC)
        canvas.paste(small, tuple(self.corners[index]))
        return {'x': self.finish(canvas), 'y': row[self.label]}


BLUR = {'blurred': 8, 'sharp': 0}
PARTS = {'half': 2, 'third': 3}
SMALL = [f'{part}-{background}' for part in PARTS for background in BLUR]


def task_images(network: Network, data: Path, limit: int | None, task: str):
    """The images of a task as a map-style data set of 'x' and 'y'.

    Args:
        network: whose images and transform.
        data: the data directory.
        limit: use only so many images.
        task: 'plain'; a side in pixels, '384', with a resize in proportion; '384 whole' for the whole shorter side at
            that size; one of `SMALL` for `SmallObjects`; or the name of an image file with a column 'label', also with
            a side, 'cub25 320'.
    """
    if task in SMALL:
        part, background = task.split('-')
        return SmallObjects(network, data, limit or 1500, PARTS[part], BLUR[background])
    if task == 'plain':
        return images_of(network, data, limit)
    number, _, whole = task.partition(' ')
    if not number.isdigit():
        network, number, whole = network._replace(images=number, label='label'), whole, ''
    side = int(number or network.size)
    resize = side if whole else round(side * network.resize / network.size)
    return images_of(network._replace(resize=resize, size=side), data, limit)


def maps_of(
    network: Network, model: nn.Module, data: Path, cache: Path, limit: int | None, task: str = 'plain'
) -> tuple[Tensor, Tensor]:
    """(images, C, H, W) float16 maps before the global pooling, memory-mapped from `cache`, and labels.

    Missing maps are computed first; an interrupted computation resumes. Tasks: see `task_images`.
    """
    images = task_images(network, data, limit, task)
    directory = cache / f'{network.builder}-{network.images if task == "plain" else task}-{len(images)}'
    path, partial = directory / 'maps.npy', directory / 'partial.npy'
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        done = sorted(int(shard.stem) for shard in directory.glob('*.pt'))
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        for begin in tqdm(range(0, len(images), SHARD), desc=f'{network.name}, {task}', unit=f'{SHARD} images'):
            if begin in done:
                continue
            batch = [images[index] for index in range(begin, min(begin + SHARD, len(images)))]
            x = torch.stack([row['x'] for row in batch]).contiguous(memory_format=torch.channels_last)
            with torch.inference_mode():
                maps = torch.cat([model.forward_features(part).half() for part in x.split(BATCH)])  # pyright: ignore
                maps = maps.contiguous()
            mode = 'r+' if partial.exists() else 'w+'
            shape = (len(images), *maps.shape[1:])
            kept = np.lib.format.open_memmap(partial, mode, dtype=np.float16, shape=shape if mode == 'w+' else None)
            kept[begin : begin + len(maps)] = maps.numpy()
            kept.flush()
            with replacing(directory / f'{begin}.pt') as temporary:  # a shard counts once its labels are written
                torch.save(torch.tensor([row['y'] for row in batch]), temporary)
        partial.rename(path)
    shards = sorted(directory.glob('*.pt'), key=lambda shard: int(shard.stem))
    labels = torch.cat([torch.load(shard, weights_only=True) for shard in shards])
    return torch.from_numpy(np.load(path, mmap_mode='c')), labels
