"""Several views of one image, such as two sizes of it, pooled as one set."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rotp_vision.layers.global_pool import MapPool
from rotp_vision.layers.options import positive_integer
from rotp_vision.layers.parameters import PositiveWeight
from rotp_vision.surgery.convert import refuse_wrapped
from rotp_vision.surgery.find import example_inputs
from rotp_vision.surgery.head import find_any_global_pool
from rotp_vision.surgery.trace import undisturbed


def views(model: nn.Module, sizes: Sequence[int] = (224, 384)) -> 'Views':
    """A converted network that sees an image at several sizes and pools the maps of all as one set.

    The new network takes images of the largest size, which it downscales to the others, so that loaders, timm's
    transforms, `calibrate`, `compare` and exports see a network like any other. Photos should be at least as large: one
    that is upscaled to the largest size and then down to the smallest is blurred. In place of images it also takes a
    list of views of your own, one batch for each size: crops, or sizes that were each made from the photo. It costs
    what the network costs at each of the sizes. `calibrate` it: the features of another size have another scale, and
    only a plan that is sharper than the mean makes use of the larger size.

    Args:
        model: a network with a global ROT pool (see `convert`) and timm's `forward_features` and `forward_head`. It
            is not copied.
        sizes: shorter sides of the images, the size at which the network was used so far first.

    Raises:
        ValueError: if the network does not take images of these sizes, or does more with a map than pool it.

    Example:
        >>> import timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> rotp_vision.views(model, sizes=(64, 96))(torch.rand(2, 3, 96, 96)).shape
        torch.Size([2, 3])
    """
    refuse_wrapped(model)
    if isinstance(model, Views):
        raise ValueError(f'the model has views already, of {model.sizes}; views(model.model, sizes) makes others')
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or len(sizes) < 2:
        raise ValueError(f'sizes must be at least two sides of images in pixels, got {sizes!r}')
    _, pool = find_any_global_pool(model)
    missing = [name for name in ('forward_features', 'forward_head') if not hasattr(model, name)]
    if missing:
        raise ValueError(
            f'the model must have {" and ".join(missing)}, as those of timm have, got {type(model).__name__}: its '
            'forward is to be forward_head(forward_features(x))'
        )
    made = Views(model, [positive_integer('sizes', size) for size in sizes])
    _check(made, pool)
    return made


def _check(made: 'Views', pool: nn.Module) -> None:
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


class Views(nn.Module):
    """A converted network that pools the maps of several sizes of an image as one set; made by `views`.

        f_d = Σ_vn g_v x_vdn P_dvn / Σ_vn P_dvn,   one plan P over the places n of all views v

    A large view has more places than a small one, and counts by that; what a place of each view counts is for the plan
    to decide, not for an average afterwards. The gains g_v are learned: the features of a network that sees images of
    another size than in training have another scale.

    Attributes:
        model: the converted network.
        sizes: shorter sides of the views.
        gain: of each view.
    """

    def __init__(self, model: nn.Module, sizes: Sequence[int]):
        super().__init__()
        self.model = model
        self.sizes = tuple(sizes)
        pool = find_any_global_pool(model)[1]
        self.channels_last = isinstance(pool, MapPool) and pool.input_fmt == 'NHWC'
        self.gain = PositiveWeight(1.0, (len(sizes),))
        parameter = next(model.parameters())
        self.gain.to(parameter.device, parameter.dtype)
        self.pretrained_cfg = self.default_cfg = _config(model, max(sizes))
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

    def places(self, x: Tensor | Sequence[Tensor]) -> list[int]:
        """How many places the map of each view has, or how many tokens; `x` as in `forward`."""
        with undisturbed(self):
            features = [self.model.forward_features(view) for view in self.views_of(x)]  # pyright: ignore
        return [x[0, self.num_prefix_tokens :, 0].numel() if x.dim() == 3 else self.map_size(x) for x in features]

    def map_size(self, x: Tensor) -> int:
        """Number of places of a map."""
        return x.shape[1] * x.shape[2] if self.channels_last else x.shape[2] * x.shape[3]

    def scale_views(self, factors: Sequence[float]):
        """Multiply the gains of the views."""
        self.gain.set(self.gain().detach() * torch.tensor(factors, device=self.gain.start.device))

    def forward(self, x: Tensor | Sequence[Tensor]) -> Tensor:
        """Logits of images (B, C, H, W) whose shorter side is the largest of `sizes`.

        Or of views of your own, such as crops: a list of such batches, one for each of `sizes`, in any size.
        """
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor | Sequence[Tensor]) -> Tensor:
        """The last maps, or tokens, of all views as one, as the network's head takes them."""
        return self.joined([self.model.forward_features(view) for view in self.views_of(x)])  # pyright: ignore

    def views_of(self, x: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """The views that are given, or those of images that are."""
        if isinstance(x, Tensor):
            return self.resized(x)
        if len(x) != len(self.sizes):
            raise ValueError(f'views must be {len(self.sizes)} batches of images, one for each size, got {len(x)}')
        return x

    def resized(self, x: Tensor) -> list[Tensor]:
        """The views of images: the images at each size, downscaled with antialiasing."""
        largest, (height, width) = max(self.sizes), x.shape[-2:]
        if min(height, width) != largest:
            raise ValueError(
                f'images must come at the largest of the sizes {self.sizes}, a shorter side of {largest}, as '
                f'timm.data.resolve_model_data_config(model) says, got {height} × {width}'
            )
        # Half precision is widened, as not every device downscales it.
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()

        def at(size: int) -> Tensor:
            shape = (height * size // largest, width * size // largest)
            return F.interpolate(wide, shape, mode='bilinear', antialias=True).to(x.dtype)

        return [x if size == largest else at(size) for size in self.sizes]

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


def _config(model: nn.Module, size: int) -> dict[str, Any]:
    """The configuration of a timm model, for images of another size, so that timm's transforms make these."""
    config = dict(getattr(model, 'pretrained_cfg', None) or {})
    channels = config.get('input_size', (3,))[0]
    named = {key: _inside_model(config[key]) for key in ('classifier', 'first_conv') if config.get(key)}
    return config | named | {'input_size': (channels, size, size)}


def _inside_model(names: str | Sequence[str]) -> str | tuple[str, ...]:
    """A path in a network, or several, as paths in its wrapper."""
    return f'model.{names}' if isinstance(names, str) else tuple(f'model.{name}' for name in names)
