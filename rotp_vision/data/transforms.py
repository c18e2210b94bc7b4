"""timm's transforms up to bytes; images are normalised on the device of the network."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform  # pyright: ignore[reportPrivateImportUsage]
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import Compose

from rotp_vision.data.config import DataConfig
from rotp_vision.images import to_rgb

Box = tuple[int, int, int, int]  # top, left, bottom, right
NOTHING: Box = (0, 0, 0, 0)


def preprocessing(config: DataConfig, mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, Any]:
    """Returns the evaluation transform in the keys of timm's `create_transform` and `pretrained_cfg`."""
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
        """Returns the (H, W, 3) bytes of a decoded image."""
        return _bytes(self.parts(image))


class TrainTransform:
    """timm's training transform up to bytes, with the same random draws.

    The crop is drawn before the image is decoded. So only the crop is converted, a JPEG whose crop has at least twice
    the network's resolution can be decoded at a fraction of its size (`data.draft`), and torch resizes the crop, which
    takes a quarter of Pillow's time and differs from it by rounding. Random erasing happens on the device, because the
    erased box is 0 after normalisation.
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
        """Returns a random crop of an opened image."""
        top, left, height, width = self.crop.get_params(image, self.crop.scale, self.crop.ratio)
        factor = next((factor for factor in (8, 4, 2) if min(height, width) >= factor * self.size), 1)
        original, drafted = image.width, None
        if self.draft and factor > 1:
            drafted = image.draft(image.mode, (image.width // factor, image.height // factor))  # None if not a JPEG
        scale = 1 if drafted is None else drafted[1][2] / original
        edges = (left, top, left + width, top + height)
        return to_rgb(image.crop(tuple(round(scale * edge) for edge in edges)))  # type: ignore[arg-type]

    def __call__(self, crop: Image.Image) -> Tensor:
        """Returns the (H, W, 3) bytes of a crop."""
        if crop.size != (self.size, self.size):
            pixels = _bytes(crop)[None].permute(0, 3, 1, 2)  # interpolate recognises this layout as channels_last
            pixels = F.interpolate(pixels, (self.size, self.size), mode='bicubic', antialias=True)
            crop = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
        return _bytes(self.augment(crop))

    def erased(self) -> Box:
        """Returns the box that timm's random erasing would erase."""
        if self.erasing is None:
            return NOTHING
        recorder = _ErasedBox(self.size)
        self.erasing(recorder)
        return recorder.box


class _ErasedBox:
    """Stands in for an image in timm's random erasing and records the erased box."""

    dtype = torch.float32

    def __init__(self, size: int):
        self.side, self.box = size, NOTHING

    def size(self) -> tuple[int, int, int]:
        return 1, self.side, self.side

    def __setitem__(self, key: tuple[slice, slice, slice], value: object) -> None:
        _, rows, columns = key
        self.box = (rows.start, columns.start, rows.stop, columns.stop)


def _bytes(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image))


def transforms(
    config: DataConfig, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[TrainTransform, ValTransform]:
    """Returns the transforms for training and for evaluation."""
    return TrainTransform(config, mean, std), ValTransform(config, mean, std)


def normalized(images: Tensor, mean: Tensor, std: Tensor, erased: Tensor | None = None) -> Tensor:
    """Returns bytes (B, 3, H, W) in float32, normalised as by torchvision, with boxes set to 0."""
    images = (images / 255).sub_(mean[:, None, None]).div_(std[:, None, None])
    if erased is not None:
        rows = _between(erased[:, 0], erased[:, 2], images.shape[2])
        columns = _between(erased[:, 1], erased[:, 3], images.shape[3])
        images.masked_fill_(rows[:, None, :, None] & columns[:, None, None, :], 0)
    return images


def _between(first: Tensor, end: Tensor, length: int) -> Tensor:
    """Returns a (B, length) mask of the positions in [first, end)."""
    positions = torch.arange(length, device=first.device)
    return (first[:, None] <= positions) & (positions < end[:, None])
