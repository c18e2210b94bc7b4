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
    takes a quarter of Pillow's time and differs from it by rounding. Random erasing fills with the mean color.
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
        self.mean = (255 * torch.tensor(mean)).round().short()
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
        pixels = _bytes(self.augment(crop))
        if self.erasing is not None:
            pixels = pixels.short() - self.mean  # timm erases to 0
            self.erasing(pixels.permute(2, 0, 1))
            pixels = (pixels + self.mean).byte()
        return pixels


def _bytes(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image))


def transforms(
    config: DataConfig, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[TrainTransform, ValTransform]:
    """Returns the transforms for training and for evaluation."""
    return TrainTransform(config, mean, std), ValTransform(config, mean, std)


def normalized(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Returns bytes (B, 3, H, W) in float32, normalised as by torchvision."""
    return (images / 255).sub_(mean[:, None, None]).div_(std[:, None, None])
