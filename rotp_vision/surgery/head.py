"""The input of the global pool of a model, and the head after it as a function.

Calibration, evaluation and probing fit a pooling to these instead of running the whole network again.
"""

from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rotp_vision.layers import GlobalROTPool2d, ROTSetPool
from rotp_vision.layers.global_pool import MapPool
from rotp_vision.surgery.fold import run_layers
from rotp_vision.surgery.pools import rot_pools

CHUNK = 64  # images that a head or a pool processes at a time

GlobalPool = GlobalROTPool2d | ROTSetPool


def find_global_pool(model: nn.Module) -> tuple[str, GlobalPool]:
    """Path and module of the only global ROT pool of a model; a mixed pool is refused."""
    path, pool = find_any_global_pool(model)
    if not isinstance(pool, GlobalPool):
        raise ValueError(f'{path} must be a single pooling (GlobalROTPool2d or ROTSetPool), got {type(pool).__name__}')
    return path, pool


def find_any_global_pool(model: nn.Module) -> tuple[str, MapPool | ROTSetPool]:
    """Path and module of the only global ROT pool of a model, of maps or of tokens."""
    pools = [(path, pool) for path, pool in rot_pools(model).items() if isinstance(pool, (MapPool, ROTSetPool))]
    if len(pools) != 1:
        found = f': {", ".join(path for path, _ in pools)}' if pools else '; rotp_vision.convert(model) makes one'
        raise ValueError(f'the model must have one global ROT pool, got {len(pools)}{found}')
    return pools[0]


def sets_of(pool: MapPool | ROTSetPool, x: Tensor) -> Tensor:
    """The input of the pool, or its plan, as sets (B, D, N)."""
    return x.transpose(1, 2) if isinstance(pool, ROTSetPool) else pool.sets(x)


@contextmanager
def evaluating(model: nn.Module):
    """Evaluation mode without gradients; afterwards every module has its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class Collected(NamedTuple):
    """The inputs of a pool for some images, and the logits of the model for them."""

    sets: list[Tensor]  # (b, D, N) chunks
    targets: Tensor  # (images,)
    logits: Tensor  # (images, classes)
    example: Any  # an image (1, C, H, W) of zeros, or a list with one for each size of a multi-scale loader


def collect(model: nn.Module, pool: GlobalPool, loader: Iterable[tuple[Tensor, Tensor]], max_images: int) -> Collected:
    """Run a model in eval mode on at most `max_images` of a loader; large sets are kept in float16."""
    device = next(model.parameters()).device
    seen: list[tuple] = []
    hook = pool.register_forward_pre_hook(lambda _, args: seen.append(args))
    sets, targets, logits, shapes, example = [], [], [], None, None
    count = 0
    try:
        for batch in loader:
            images, labels = checked_batch(model, batch)
            now = [tuple(image.shape[1:]) for image in tree_leaves(images)]
            shapes = shapes or now
            if shapes != now:
                raise ValueError(f'loader must give images of one size, got {shapes[0]} and {now[0]}')
            keep = min(len(labels), max_images - count)
            images = tree_map(lambda x: x[:keep].to(device), images)  # noqa: B023
            logits.append(model(images).float())
            example = tree_map(lambda x: torch.zeros_like(x[:1]), images)
            features, *others = seen.pop()
            if any(other is not None for other in others):
                raise ValueError('the model calls its pool with a mask, which is not supported here')
            features = sets_of(pool, features)
            large = features[0].numel() * max_images > 2**27 and features.abs().max() < 6e4
            sets.extend((features.half() if large else features).split(CHUNK))
            targets.append(labels[:keep].to(device))
            num_classes = logits[-1].shape[1]
            if not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
                raise ValueError(
                    f'labels of the loader must be class indices from 0 to {num_classes - 1}, as the model has '
                    f'{num_classes} classes, got {int(labels.min())} to {int(labels.max())}'
                )
            count += keep
            if count >= max_images:
                break
    finally:
        hook.remove()
    if example is None:
        raise ValueError('loader must give at least one batch of (images, class indices), got none')
    return Collected(sets, torch.cat(targets), torch.cat(logits), example)


def checked_batch(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    """Images, or a list of them at several sizes, and class indices; raises if the model cannot take them."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f'loader must give batches of (images, class indices), got {type(batch).__name__}')
    images, labels = batch
    images = list(images) if isinstance(images, (tuple, list)) else images
    for x in images if isinstance(images, list) and images else [images]:
        if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
            got = f'{x.dtype} {tuple(x.shape)}' if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                "images of the loader must be floating point (B, C, H, W), as the model's transform makes them, got "
                f'{got}'
            )
    first, dtype = tree_leaves(images)[0], next(model.parameters()).dtype
    count = len(first)
    if not count:
        raise ValueError('a batch of the loader holds no image; leave empty batches out')
    if first.dtype != dtype:
        raise ValueError(f'images of the loader are {first.dtype}, but the model is {dtype}: convert one of them')
    labels = torch.as_tensor(labels)
    if labels.shape != (count,) or labels.is_floating_point():
        raise ValueError(
            f'labels of the loader must be class indices ({count},), got {labels.dtype} {tuple(labels.shape)}'
        )
    return images, labels.long()


class Head:
    """The part of a model after its pool, as a function of the pooled features (B, D).

    It calls the modules that run after the pool one after the other. If that does not reproduce the logits, because
    `forward` does something in between, it runs the whole model with the output of the pool replaced.

    Attributes:
        affine: whether the logits are an affine function of the pooled features, so that one pass gives them for all
            gains.
        scale_free: whether the logits do not depend on a gain, as before a layer norm.
    """

    def __init__(self, model: nn.Module, pool: GlobalPool, collected: Collected):
        self.model, self.pool, self.example = model, pool, collected.example
        self.dtype = next(model.parameters()).dtype
        ran, _ = run_layers(model, (self._images(1),))
        pools = [index for index, call in enumerate(ran) if call.module is pool]
        self.modules = [call.module for call in ran[pools[-1] + 1 :]]
        with torch.no_grad():
            self._examine(pool.pool_sets(collected.sets[0].float()), collected.logits)

    def _examine(self, pooled: Tensor, known: Tensor) -> None:
        """Find how to compute the known logits from pooled features, and whether the head is affine or scale-free."""
        logits = known[: len(pooled)]
        tolerance = 1e-2 * float(logits.nan_to_num().std()) + 1e-6

        def same(a: Tensor, b: Tensor) -> bool:
            return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True)

        try:
            fits = same(self(pooled), logits)
        except (RuntimeError, TypeError):
            fits = False
        if not fits:
            self.modules = []
            fits = same(self(pooled), logits)
        if not fits:
            raise ValueError(
                'the logits must depend on the last map or tokens only through the global pool, but this model uses '
                'them elsewhere too'
            )
        some = pooled[:8]
        self.zero = self(torch.zeros_like(some[:1]))
        once, twice = self(some), self(2 * some)
        self.affine = same(twice - once, once - self.zero)
        self.scale_free = same(twice, once)

    def __call__(self, pooled: Tensor) -> Tensor:
        return torch.cat([self._run(chunk.to(self.dtype)) for chunk in pooled.split(CHUNK)]).float()

    def _run(self, pooled: Tensor) -> Tensor:
        if not self.modules:
            hook = self.pool.register_forward_hook(lambda *_: self._shaped(pooled))
            try:
                return self.model(self._images(len(pooled)))
            finally:
                hook.remove()
        x = self._shaped(pooled)
        for module in self.modules:
            x = module(x.flatten(1) if isinstance(module, nn.Linear) else x)
        return x.flatten(1)

    def _images(self, count: int) -> Any:
        return tree_map(lambda x: x.new_zeros(count, *x.shape[1:], dtype=self.dtype), self.example)

    def _shaped(self, pooled: Tensor) -> Tensor:
        return self.pool.shaped(pooled) if isinstance(self.pool, GlobalROTPool2d) else pooled
