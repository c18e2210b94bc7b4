"""Several sizes of an image, pooled as one set."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn
from torch.nn import functional as F

from rotp_vision.layers.global_pool import MapPool
from rotp_vision.layers.options import LARGEST, positive_integer
from rotp_vision.layers.parameters import PositiveWeight
from rotp_vision.surgery.convert import refuse_wrapped
from rotp_vision.surgery.find import example_inputs
from rotp_vision.surgery.head import find_any_global_pool
from rotp_vision.surgery.trace import undisturbed


def multi_scale(
    model: nn.Module, sizes: Sequence[int] = (224, 384), crop_pct: Sequence[float] | None = None
) -> 'MultiScale':
    """A converted network that sees an image at several sizes and pools the maps of all as one set.

    `model.transform()` of the new network turns a photo into a list of images, one for each size, each made from the
    photo itself; a loader collates lists of batches. The network, `calibrate` and `compare` take these. The network
    also takes a single batch of images, as timm's transform for its data config makes them, and crops and downscales it
    to the sizes, so that it can be exported like any other network.

    It costs as much as the network costs at all sizes together. Run `calibrate` on it: features at another size have
    another scale, and the larger size pays only with a plan that is sharper than the mean.

    Args:
        model: a network with a global ROT pool (see `convert`) and timm's `forward_features` and `forward_head`. It
            is not copied.
        sizes: shorter sides of the images; first the size at which the network was used so far.
        crop_pct: share of the photo's shorter side that each image shows, as in timm. By default the `crop_pct` of the
            network's data config for the first, and the whole photo for the others.

    Raises:
        ValueError: if the network does not take images of these sizes, or does more with a map than pool it.

    Example:
        >>> import PIL.Image, timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> model = rotp_vision.multi_scale(model, sizes=(64, 96))
        >>> [image.shape for image in model.transform()(PIL.Image.new('RGB', (200, 150)))]
        [torch.Size([3, 64, 64]), torch.Size([3, 96, 96])]
        >>> model(torch.rand(2, 3, 96, 96)).shape
        torch.Size([2, 3])
    """
    refuse_wrapped(model)
    if isinstance(model, MultiScale):
        raise ValueError(f'the model is multi-scale already, with {model.sizes}; use multi_scale(model.model, sizes)')
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or len(sizes) < 2:
        raise ValueError(f'sizes must be two or more image sides in pixels, got {sizes!r}')
    _, pool = find_any_global_pool(model)
    missing = [name for name in ('forward_features', 'forward_head') if not hasattr(model, name)]
    if missing:
        raise ValueError(
            f'the model must have {" and ".join(missing)}, as timm models have, so that its forward is '
            f'forward_head(forward_features(x)), got {type(model).__name__}'
        )
    made = MultiScale(
        model, [positive_integer('sizes', size, LARGEST) for size in sizes], _checked_crops(model, sizes, crop_pct)
    )
    _check(made, pool)
    return made


def _checked_crops(model: nn.Module, sizes: Sequence[int], crop_pct: Sequence[float] | None) -> list[float]:
    if crop_pct is None:
        return [resolve_data_config({}, model=model)['crop_pct'], *[1.0] * (len(sizes) - 1)]
    if isinstance(crop_pct, (str, float, int)) or len(crop_pct) != len(sizes) or not all(0 < c <= 1 for c in crop_pct):
        raise ValueError(f'crop_pct must be one share in (0, 1] for each of the sizes {tuple(sizes)}, got {crop_pct!r}')
    return list(crop_pct)


def _check(made: 'MultiScale', pool: nn.Module) -> None:
    """Raise unless the network takes every size, and its pool reads the maps of all of them as one set."""
    image = example_inputs(made.model)[0][:1]
    seen: list[tuple[int, ...]] = []
    with undisturbed(made):
        pool.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
        features = []
        for size in made.sizes:
            try:
                features.append(made.model.forward_features(image.new_zeros(1, image.shape[1], size, size)))  # pyright: ignore
            except Exception as error:  # the model may raise anything
                raise ValueError(
                    f'the model does not take images of {size} × {size} ({type(error).__name__}: {error}); choose '
                    'sizes that it takes, or create a network of tokens with dynamic_img_size=True'
                ) from error
        reason = 'forward_features must return one map or one sequence of tokens'
        if all(isinstance(x, Tensor) and x.dim() in (3, 4) for x in features):
            joined = made.joined(features)
            reason = 'the head must do nothing to the map before its pool'
            try:
                made.forward_head(joined)
            except Exception as error:
                reason = f'{reason} ({type(error).__name__}: {error})'
            prefix = made.num_prefix_tokens if joined.dim() == 3 else 0
            if seen == [(1, joined.shape[1] - prefix, *joined.shape[2:])]:
                return
    raise ValueError(f'the sizes of an image cannot be pooled as one set by a {type(made.model).__name__}: {reason}')


class MultiScale(nn.Module):
    """A converted network that pools the maps of several sizes of an image as one set; made by `multi_scale`.

        f_d = Σ_sn g_s x_sdn P_dsn / Σ_sn P_dsn,   one plan P over the positions n of all sizes s

    A larger size has more positions and therefore more weight; the plan decides what each position counts. The gains
    g_s are learned, because features have another scale at sizes that were not used in training.

    Attributes:
        model: the converted network.
        sizes: shorter sides of the images.
        crop_pct: share of the photo's shorter side that each image shows.
        side: shorter side of a single image from which all sizes can be cut without upscaling.
        gain: of each size.
    """

    def __init__(self, model: nn.Module, sizes: Sequence[int], crop_pct: Sequence[float]):
        super().__init__()
        self.model = model
        self.sizes, self.crop_pct = tuple(sizes), tuple(crop_pct)
        widest = max(crop_pct)
        # The tolerance keeps 384 / 0.96 · 0.96 from becoming 385.
        self.side = max(math.ceil(size * widest / crop - 1e-6) for size, crop in zip(sizes, crop_pct, strict=True))
        pool = find_any_global_pool(model)[1]
        self.channels_last = isinstance(pool, MapPool) and pool.input_fmt == 'NHWC'
        self.gain = PositiveWeight(1.0, len(sizes))
        parameter = next(model.parameters())
        self.gain.to(parameter.device, parameter.dtype)
        self.pretrained_cfg = self.default_cfg = _config(model, self.side, widest)
        self.train(model.training)

    @property
    def num_prefix_tokens(self) -> int:
        return getattr(self.model, 'num_prefix_tokens', 0)

    @property
    def num_classes(self) -> int:
        return self.model.num_classes  # pyright: ignore[reportReturnType]

    @property
    def num_features(self) -> int:
        return self.model.num_features  # pyright: ignore[reportReturnType]

    def get_classifier(self) -> nn.Module:
        return self.model.get_classifier()  # pyright: ignore[reportCallIssue]

    def no_weight_decay(self) -> set[str]:
        inner: Any = getattr(self.model, 'no_weight_decay', set)
        return {'gain.beta', *(f'model.{name}' for name in inner())}

    def positions(self, x: Tensor | Sequence[Tensor]) -> list[int]:
        """Number of positions of the map at each size, or of tokens; `x` as in `forward`."""
        with undisturbed(self):
            features = [self.model.forward_features(image) for image in self.images_of(x)]  # pyright: ignore
        return [x[0, self.num_prefix_tokens :, 0].numel() if x.dim() == 3 else self.map_size(x) for x in features]

    def map_size(self, x: Tensor) -> int:
        """Number of positions of a map."""
        return x.shape[1] * x.shape[2] if self.channels_last else x.shape[2] * x.shape[3]

    def scale_gains(self, factors: Sequence[float]):
        """Multiply the gain of each size by a factor."""
        self.gain.set(self.gain().detach() * torch.tensor(factors, device=self.gain.start.device))

    def transform(self) -> 'MultiScaleTransform':
        """The transform from a photo to a list of images, one for each size, by timm's transforms for evaluation."""
        config = resolve_data_config({}, model=self)
        return MultiScaleTransform(
            [
                create_transform(**config | {'input_size': (*config['input_size'][:1], size, size), 'crop_pct': crop})
                for size, crop in zip(self.sizes, self.crop_pct, strict=True)
            ]
        )

    def forward(self, x: Tensor | Sequence[Tensor]) -> Tensor:
        """Logits of a list of batches (B, C, H, W), one for each of `sizes`, or of one batch with shorter side `side`.

        The batches of a list may have any height and width, such as crops of your own.
        """
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor | Sequence[Tensor]) -> Tensor:
        """The last maps, or tokens, of all sizes as one, in the form that the network's head takes."""
        return self.joined([self.model.forward_features(image) for image in self.images_of(x)])  # pyright: ignore

    def images_of(self, x: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """A list of batches as it is, or the images at all sizes of a single batch."""
        if isinstance(x, Tensor):
            return self.resized(x)
        if len(x) != len(self.sizes):
            raise ValueError(f'a list must hold {len(self.sizes)} batches of images, one for each size, got {len(x)}')
        return x

    def resized(self, x: Tensor) -> list[Tensor]:
        """A batch of images cropped and downscaled, with antialiasing, to each of the sizes."""
        side, (height, width) = self.side, x.shape[-2:]
        if min(height, width) != side:
            raise ValueError(
                f'images for the sizes {self.sizes} must have a shorter side of {side}, as '
                f'timm.data.resolve_model_data_config(model) says, or be a list of batches, got {height} × {width}'
            )
        # Not every device downscales half precision.
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()

        def resized(size: int, crop: float) -> Tensor:
            cut = round(side * crop / max(self.crop_pct))
            inner = height * cut // side, width * cut // side
            top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
            image = wide[..., top : top + inner[0], left : left + inner[1]]
            if size != cut:
                shape = inner[0] * size // cut, inner[1] * size // cut
                image = F.interpolate(image, shape, mode='bilinear', antialias=True)
            return image.to(x.dtype)

        return [resized(size, crop) for size, crop in zip(self.sizes, self.crop_pct, strict=True)]

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return self.model.forward_head(features, pre_logits=pre_logits)  # pyright: ignore[reportCallIssue]

    def joined(self, features: Sequence[Tensor]) -> Tensor:
        """Maps times their gains as one map with all positions in a column; tokens are concatenated."""
        gains = self.gain().to(features[0].dtype).unbind()
        if features[0].dim() == 3:
            # The head drops the prefix tokens, so one copy of them is enough.
            first, *others = features
            prefix = self.num_prefix_tokens
            parts = [first[:, :prefix], first[:, prefix:] * gains[0]]
            parts += [tokens[:, prefix:] * gain for tokens, gain in zip(others, gains[1:], strict=True)]
            return torch.cat(parts, 1)
        scaled = [x * gain for x, gain in zip(features, gains, strict=True)]
        if self.channels_last:
            return torch.cat([x.flatten(1, 2) for x in scaled], 1).unsqueeze(2)
        return torch.cat([x.flatten(2) for x in scaled], 2).unsqueeze(3)


class MultiScaleTransform:
    """Turns a photo into a list of tensors (C, H, W), one by each transform; made by `MultiScale.transform`."""

    def __init__(self, transforms: Sequence[Any]):
        self.transforms = transforms

    def __call__(self, photo: Image.Image) -> list[Tensor]:
        return [transform(photo) for transform in self.transforms]

    def __repr__(self) -> str:
        return f'{type(self).__name__}({list(self.transforms)})'


def _config(model: nn.Module, side: int, crop_pct: float) -> dict[str, Any]:
    """The pretrained configuration of a timm model for images of another size and crop."""
    config = dict(getattr(model, 'pretrained_cfg', None) or {})
    channels = config.get('input_size', (3,))[0]
    named = {key: _inside_model(config[key]) for key in ('classifier', 'first_conv') if config.get(key)}
    for key in ('test_input_size', 'test_crop_pct'):
        config.pop(key, None)
    return config | named | {'input_size': (channels, side, side), 'crop_pct': crop_pct}


def _inside_model(names: str | Sequence[str]) -> str | tuple[str, ...]:
    """A path in the network, or several, as paths in the wrapper."""
    return f'model.{names}' if isinstance(names, str) else tuple(f'model.{name}' for name in names)
