"""Several views of one image, such as two sizes of it, pooled as one set."""

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
from rotp_vision.layers.options import positive_integer
from rotp_vision.layers.parameters import PositiveWeight
from rotp_vision.surgery.convert import refuse_wrapped
from rotp_vision.surgery.find import example_inputs
from rotp_vision.surgery.head import find_any_global_pool
from rotp_vision.surgery.trace import undisturbed


def multi_scale(model: nn.Module, sizes: Sequence[int] = (224, 384), crop_pct: Sequence[float] | None = None) -> 'MultiScale':
    """A converted network that sees an image at several sizes and pools the maps of all as one set.

    `model.transform()` of the new network makes the views of a photo, each from the photo itself: a list, of which a
    loader makes a list of batches. The network, `calibrate` and `compare` take these. It also takes one batch of images
    as timm's transform for its data config makes them, from which it cuts and downscales the views, so that exports see
    a network like any other. It costs what the network costs at each of the sizes. `calibrate` it: the features of
    another size have another scale, and only a plan that is sharper than the mean makes use of the larger size.

    Args:
        model: a network with a global ROT pool (see `convert`) and timm's `forward_features` and `forward_head`. It
            is not copied.
        sizes: shorter sides of the images, the size at which the network was used so far first.
        crop_pct: share of the photo's shorter side that each view shows, as timm's. By default the first shows what the
            network has been shown (the `crop_pct` of its data config) and the others show all.

    Raises:
        ValueError: if the network does not take images of these sizes, or does more with a map than pool it.

    Example:
        >>> import PIL.Image, timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> model = rotp_vision.multi_scale(model, sizes=(64, 96))
        >>> [view.shape for view in model.transform()(PIL.Image.new('RGB', (200, 150)))]
        [torch.Size([3, 64, 64]), torch.Size([3, 96, 96])]
        >>> model(torch.rand(2, 3, 96, 96)).shape
        torch.Size([2, 3])
    """
    refuse_wrapped(model)
    if isinstance(model, MultiScale):
        raise ValueError(f'the model has views already, of {model.sizes}; multi_scale(model.model, sizes) makes others')
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or len(sizes) < 2:
        raise ValueError(f'sizes must be at least two sides of images in pixels, got {sizes!r}')
    _, pool = find_any_global_pool(model)
    missing = [name for name in ('forward_features', 'forward_head') if not hasattr(model, name)]
    if missing:
        raise ValueError(
            f'the model must have {" and ".join(missing)}, as those of timm have, got {type(model).__name__}: its '
            'forward is to be forward_head(forward_features(x))'
        )
    made = MultiScale(model, [positive_integer('sizes', size) for size in sizes], _checked_crops(model, sizes, crop_pct))
    _check(made, pool)
    return made


def _checked_crops(model: nn.Module, sizes: Sequence[int], crop_pct: Sequence[float] | None) -> list[float]:
    if crop_pct is None:
        return [resolve_data_config({}, model=model)['crop_pct'], *[1.0] * (len(sizes) - 1)]
    if isinstance(crop_pct, (str, float, int)) or len(crop_pct) != len(sizes) or not all(0 < c <= 1 for c in crop_pct):
        raise ValueError(f'crop_pct must be a share in (0, 1] for each of the sizes {tuple(sizes)}, got {crop_pct!r}')
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
    raise ValueError(f'the views of a {type(made.model).__name__} cannot be pooled as one set: {reason}')


class MultiScale(nn.Module):
    """A converted network that pools the maps of several sizes of an image as one set; made by `multi_scale`.

        f_d = Σ_vn g_v x_vdn P_dvn / Σ_vn P_dvn,   one plan P over the places n of all views v

    A large view has more places than a small one, and counts by that; what a place of each view counts is for the plan
    to decide, not for an average afterwards. The gains g_v are learned: the features of a network that sees images of
    another size than in training have another scale.

    Attributes:
        model: the converted network.
        sizes: shorter sides of the views.
        crop_pct: share of the photo's shorter side that each view shows.
        side: shorter side of one image from which all views can be cut without upscaling.
        gain: of each view.
    """

    def __init__(self, model: nn.Module, sizes: Sequence[int], crop_pct: Sequence[float]):
        super().__init__()
        self.model = model
        self.sizes, self.crop_pct = tuple(sizes), tuple(crop_pct)
        widest = max(crop_pct)
        # Shares are rounded: 384 / 0.96 · 0.96 is not to become 385.
        self.side = max(math.ceil(size * widest / crop - 1e-6) for size, crop in zip(sizes, crop_pct, strict=True))
        pool = find_any_global_pool(model)[1]
        self.channels_last = isinstance(pool, MapPool) and pool.input_fmt == 'NHWC'
        self.gain = PositiveWeight(1.0, (len(sizes),))
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
        """How many places the map of each view has, or how many tokens; `x` as in `forward`."""
        with undisturbed(self):
            features = [self.model.forward_features(view) for view in self.images_of(x)]  # pyright: ignore
        return [x[0, self.num_prefix_tokens :, 0].numel() if x.dim() == 3 else self.map_size(x) for x in features]

    def map_size(self, x: Tensor) -> int:
        """Number of places of a map."""
        return x.shape[1] * x.shape[2] if self.channels_last else x.shape[2] * x.shape[3]

    def scale_gains(self, factors: Sequence[float]):
        """Multiply the gains of the views."""
        self.gain.set(self.gain().detach() * torch.tensor(factors, device=self.gain.start.device))

    def transform(self) -> 'MultiScaleTransform':
        """From a photo to its views, each made from the photo, as timm's transforms for evaluation make them."""
        config = resolve_data_config({}, model=self)
        return MultiScaleTransform(
            [
                create_transform(**config | {'input_size': (*config['input_size'][:1], size, size), 'crop_pct': crop})
                for size, crop in zip(self.sizes, self.crop_pct, strict=True)
            ]
        )

    def forward(self, x: Tensor | Sequence[Tensor]) -> Tensor:
        """Logits of views, a list of batches (B, C, H, W), one for each of `sizes`, such as those of `transform`.

        They may be of any size, crops of your own for example. Or of one batch of images whose shorter side is `side`.
        """
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor | Sequence[Tensor]) -> Tensor:
        """The last maps, or tokens, of all views as one, as the network's head takes them."""
        return self.joined([self.model.forward_features(view) for view in self.images_of(x)])  # pyright: ignore

    def images_of(self, x: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """The views that are given, or those of images that are."""
        if isinstance(x, Tensor):
            return self.resized(x)
        if len(x) != len(self.sizes):
            raise ValueError(f'views must be {len(self.sizes)} batches of images, one for each size, got {len(x)}')
        return x

    def resized(self, x: Tensor) -> list[Tensor]:
        """The views of images that show as much as the widest view: cut out, and downscaled with antialiasing."""
        side, (height, width) = self.side, x.shape[-2:]
        if min(height, width) != side:
            raise ValueError(
                f'images for the views {self.sizes} must have a shorter side of {side}, as '
                f'timm.data.resolve_model_data_config(model) says, or be a list of views, got {height} × {width}'
            )
        # Half precision is widened, as not every device downscales it.
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()

        def view(size: int, crop: float) -> Tensor:
            cut = round(side * crop / max(self.crop_pct))
            inner = height * cut // side, width * cut // side
            top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
            shown = wide[..., top : top + inner[0], left : left + inner[1]]
            shape = inner[0] * size // cut, inner[1] * size // cut
            return (
                F.interpolate(shown, shape, mode='bilinear', antialias=True).to(x.dtype)
                if size != cut
                else shown.to(x.dtype)
            )

        return [view(*one) for one in zip(self.sizes, self.crop_pct, strict=True)]

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return self.model.forward_head(features, pre_logits=pre_logits)  # pyright: ignore[reportCallIssue]

    def joined(self, features: Sequence[Tensor]) -> Tensor:
        """Maps of the views, times their gains, as one map of all places in a row; tokens one after the other."""
        gains = self.gain().to(features[0].dtype).unbind()
        if features[0].dim() == 3:
            # Prefix tokens, which the head sets aside, are wanted once.
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
    """From a photo to a list of its views, tensors (C, H, W), by a transform for each; made by `MultiScale.transform`."""

    def __init__(self, transforms: Sequence[Any]):
        self.transforms = transforms

    def __call__(self, photo: Image.Image) -> list[Tensor]:
        return [transform(photo) for transform in self.transforms]

    def __repr__(self) -> str:
        return f'{type(self).__name__}({list(self.transforms)})'


def _config(model: nn.Module, side: int, crop_pct: float) -> dict[str, Any]:
    """The configuration of a timm model, for other images, so that timm's transforms make these."""
    config = dict(getattr(model, 'pretrained_cfg', None) or {})
    channels = config.get('input_size', (3,))[0]
    named = {key: _inside_model(config[key]) for key in ('classifier', 'first_conv') if config.get(key)}
    for key in ('test_input_size', 'test_crop_pct'):
        config.pop(key, None)
    return config | named | {'input_size': (channels, side, side), 'crop_pct': crop_pct}


def _inside_model(names: str | Sequence[str]) -> str | tuple[str, ...]:
    """A path in a network, or several, as paths in its wrapper."""
    return f'model.{names}' if isinstance(names, str) else tuple(f'model.{name}' for name in names)
