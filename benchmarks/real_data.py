"""Real networks and labelled images from a data directory, and the maps that the networks make of them.

The directory holds `images/*.parquet` (Hugging Face image layout), `weights/*.safetensors` and `builders.py`, which
builds the networks. Its path is an argument of every command that needs it.
"""

import argparse
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import load_dataset
from PIL import Image, ImageFilter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from tqdm import tqdm


class Network(NamedTuple):
    """A network, the images that it has not seen in training, and how it wants them."""

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


class SmallObjects(Dataset):
    """Photos shrunk to half the side of what a network sees, each at a random place of another, blurred or not."""

    def __init__(self, network: Network, data: Path, count: int, blur: int):
        self.label, self.size, self.count, self.blur = network.label, network.size, count, blur
        self.images = _rows(network, data)
        self.crop = transforms.Compose([transforms.Resize(network.resize), transforms.CenterCrop(network.size)])
        self.finish = transforms.Compose([transforms.ToTensor(), transforms.Normalize(network.mean, network.std)])
        self.places = np.random.default_rng(1).integers(0, network.size // 2 + 1, (count, 2)).tolist()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, other = self.images[index], self.images[(self.count + index) % len(self.images)]
        canvas = self.crop(other['image'].convert('RGB')).filter(ImageFilter.GaussianBlur(self.blur))
        small = self.crop(row['image'].convert('RGB')).resize((self.size // 2,) * 2, Image.Resampling.BICUBIC)
        canvas.paste(small, tuple(self.places[index]))
        return {'x': self.finish(canvas), 'y': row[self.label]}


def maps_of(
    network: Network, model: nn.Module, data: Path, cache: Path, limit: int | None, task: str = 'plain'
) -> tuple[Tensor, Tensor]:
    """(images, C, H, W) float16 maps before the global pooling, and labels; made once and kept in `cache`.

    The task 'small' (or 'small-sharp') has `SmallObjects` on a blurred (or sharp) photo, 1,500 unless limited.
    """
    path = cache / f'{network.builder}-{network.images}{"" if task == "plain" else f"-{task}"}-{limit or "all"}.pt'
    if path.exists():
        kept = torch.load(path, weights_only=True)
        return kept['maps'], kept['labels']
    if task == 'plain':
        images = images_of(network, data, limit)
    else:
        images = SmallObjects(network, data, limit or 1500, blur=8 if task == 'small' else 0)
    maps, labels = [], []
    with torch.inference_mode():
        for batch in tqdm(DataLoader(images, batch_size=50), desc=f'maps of {network.name}'):  # pyright: ignore
            maps.append(model.forward_features(batch['x']).half())  # pyright: ignore[reportCallIssue]
            labels.append(batch['y'])
    kept = {'maps': torch.cat(maps), 'labels': torch.cat(labels)}
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(kept, path)
    return kept['maps'], kept['labels']
