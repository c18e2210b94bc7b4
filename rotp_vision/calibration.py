"""Choosing a pooling's starting temperature and view from data, before any training."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rotp_vision.core import view_of
from rotp_vision.layers import GlobalROTPool2d, PoolOptions
from rotp_vision.layers.options import View
from rotp_vision.surgery import rot_pools

# From near-mean to near-max, as multiples of the spread of what the plan sees.
TEMPERATURES = tuple(10 ** (2.5 - 0.25 * i) for i in range(15))
_CHUNK = 64


class Trial(NamedTuple):
    """One way of pooling, scored on the calibration images with its gain fitted on them."""

    view: View | None  # None for average pooling
    temperature: float
    gain: float
    loss: float  # cross-entropy with the gain
    raw_loss: float  # cross-entropy with gain one
    accuracy: float


class Calibration(NamedTuple):
    """What `calibrate` tried and what it chose.

    Example:
        >>> import timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> batch = torch.rand(4, 3, 64, 64), torch.randint(3, (4,))
        >>> report = rotp_vision.calibrate(model, [batch], temperatures=[1.0])
        >>> 'average' in report.table()
        True
    """

    path: str
    num_images: int
    average: Trial
    trials: list[Trial]
    best: Trial

    def table(self, limit: int | None = None) -> str:
        """Average pooling and the trials (the best `limit` of them), best first, as a Markdown table."""
        lines = [
            '| pooling | temperature | gain | cross-entropy | without gain | top-1 % |',
            '| --- | --- | --- | --- | --- | --- |',
        ]
        for trial in [self.average, *sorted(self.trials, key=lambda t: t.loss)[:limit]]:
            temperature = '' if trial.view is None else f'{trial.temperature:.4g}'
            name = (trial.view or 'average') + (' (chosen)' if trial == self.best else '')
            scores = f'{trial.gain:.3f} | {trial.loss:.4f} | {trial.raw_loss:.4f} | {100 * trial.accuracy:.1f}'
            lines.append(f'| {name} | {temperature} | {scores} |')
        return '\n'.join(lines)

    def plot(self, path: str | Path):
        """Draw cross-entropy against temperature for every view, to an image file."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout='constrained')
        axes = figure.subplots()
        for view in dict.fromkeys(trial.view for trial in self.trials):
            points = sorted((t.temperature, t.loss) for t in self.trials if t.view == view)
            axes.plot(*zip(*points, strict=True), marker='.', label=f'view {view}')
        axes.axhline(self.average.loss, color='grey', linestyle='--', label='average pooling')
        axes.plot(self.best.temperature, self.best.loss, 'k*', markersize=12, label='chosen')
        axes.set(xscale='log', xlabel='temperature', ylabel='cross-entropy, gain fitted')
        top = self.average.loss + 3 * max(self.average.loss - self.best.loss, 0.01)
        axes.set_ylim(top=min(top, max(t.loss for t in self.trials) * 1.02))
        axes.legend()
        axes.set_title(f'{self.num_images} images')
        figure.savefig(path, dpi=150)


def calibrate(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    views: Sequence[View] = ('identity', 'rms', 'log'),
    temperatures: Sequence[float] = TEMPERATURES,
    max_images: int = 512,
) -> Calibration:
    """Choose the view and starting temperature of a converted model's global pooling from labelled images.

    The backbone sees each image once; its maps are kept (in float16 if large), pooled at every view and temperature,
    and scored by cross-entropy with the output gain fitted to each. The pooling is left at the best trial.
    Its options must have a gain for that to take effect; without one, trials are scored without.

    Args:
        model: a model whose global pooling is a `GlobalROTPool2d` (see `convert`); its other parts are not changed.
        loader: batches of (images, class indices), on any device; a few hundred images are enough.
        views: what the plan may see.
        temperatures: multiples of the spread of the view over the images, tried as smoothness (and, for Bregman ADMM,
            as step times the number of modules).
        max_images: how many images to read.

    Returns:
        A `Calibration`: `.table()` and `.plot(path)` show it.

    Example:
        >>> import timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> batch = torch.rand(8, 3, 64, 64), torch.randint(3, (8,))
        >>> rotp_vision.calibrate(model, [batch], temperatures=[10.0, 1.0]).num_images
        8
    """
    path, pool = _global_pool(model)
    if not views or min(temperatures, default=0.0) <= 0:
        raise ValueError(
            f'views and temperatures must hold something to try, temperatures above zero, got {list(views)} and '
            f'{list(temperatures)}'
        )
    if max_images < 1:
        raise ValueError(f'max_images must be at least 1, got {max_images}')
    with _evaluation(model):
        maps, targets, logits, image_shape = _collect(model, pool, loader, max_images)
        spreads: dict[View, float] = {view: _spread(maps, view) for view in views}
        head = _Head(model, pool, maps, logits, image_shape)
        fit_gain = pool.gain is not None
        mean = torch.cat([m.float().mean((2, 3)) for m in maps])
        average = _score(None, math.inf, mean, head, targets, fit_gain)
        trials = []
        for view, spread in spreads.items():
            for multiple in temperatures:
                options = _at_temperature(pool.options, view, multiple * spread)
                layer = GlobalROTPool2d(options, maps[0].shape[1], flatten=True).to(maps[0].device)
                pooled = torch.cat([layer(m.float()) for m in maps])
                trials.append(_score(view, multiple * spread, pooled, head, targets, fit_gain))
    best = min(trials, key=lambda trial: trial.loss)
    view = best.view
    assert view is not None
    pool.set_view(view)
    pool.set_weights(**_at_temperature(pool.options, view, best.temperature).starting_weights())
    if pool.gain is not None:
        pool.set_weights(gain=best.gain)
    return Calibration(path, len(targets), average, trials, best)


def _global_pool(model: nn.Module) -> tuple[str, GlobalROTPool2d]:
    pools = {path: pool for path, pool in rot_pools(model).items() if isinstance(pool, GlobalROTPool2d)}
    if len(pools) != 1:
        raise ValueError(
            f'calibrate needs a model with one global ROT pooling, got {len(pools)}: convert the model first '
            "(rotp_vision.convert(model), where='global'); poolings of tokens have nothing to calibrate"
        )
    return next(iter(pools.items()))


def _at_temperature(options: PoolOptions, view: View, temperature: float) -> PoolOptions:
    """The options at one temperature, other weights as given or next to the mean, without what training adds."""
    times = {'smoothness': 1, 'step': options.modules, 'proximal': 1}
    weights = {name: temperature * times[name] for name in options.starting_weights() if name in times}
    return replace(options, start='mean', view=view, gain='off', prior='uniform', prior_width=None, **weights)


@contextmanager
def _evaluation(model: nn.Module):
    """The model in eval mode without gradients, every module's own mode restored afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _collect(model: nn.Module, pool: GlobalROTPool2d, loader: Iterable[tuple[Tensor, Tensor]], max_images: int):
    """The pool's input maps (NCHW, chunks), the targets, the model's logits with its pooling as it is, and an image's
    shape."""
    device = next(model.parameters()).device
    seen: list[Tensor] = []
    hook = pool.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    maps, targets, logits, shape = [], [], [], None
    count = 0
    try:
        for batch in loader:
            images, labels = _checked(batch)
            shape = shape or images.shape[1:]
            if images.shape[1:] != shape:
                raise ValueError(
                    f'loader must give images of one size, got {tuple(shape)} and {tuple(images.shape[1:])}'
                )
            keep = min(len(images), max_images - count)
            logits.append(model(images[:keep].to(device)))
            features = seen.pop()
            if pool.input_fmt == 'NHWC':
                features = features.permute(0, 3, 1, 2)
            large = features[0].numel() * max_images > 2**27 and features.abs().max() < 6e4
            maps.extend((features.half() if large else features).split(_CHUNK))
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
    if shape is None:
        raise ValueError('loader must give at least one batch of (images, class indices), got none')
    return maps, torch.cat(targets), torch.cat(logits), shape


def _checked(batch: Any) -> tuple[Tensor, Tensor]:
    """Images and class indices of a batch of the loader, if that is what it holds."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f'loader must give batches of (images, class indices), got {type(batch).__name__}')
    images, labels = batch
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        got = f'{images.dtype} {tuple(images.shape)}' if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(
            f"images of the loader must be floating point (B, C, H, W), as the model's transform makes them, got {got}"
        )
    labels = torch.as_tensor(labels)
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f'labels of the loader must be class indices ({len(images)},), got {labels.dtype} {tuple(labels.shape)}'
        )
    return images, labels.long()


class _Head:
    """What follows the pooling, as a function of the pooled features alone."""

    def __init__(self, model: Any, pool: GlobalROTPool2d, maps: list[Tensor], logits: Tensor, image_shape: torch.Size):
        self.model, self.pool, self.image_shape = model, pool, image_shape
        pooled = torch.cat([pool.pool_sets(m.float().flatten(2)) for m in maps])
        tolerance = 1e-2 * float(logits.float().std())

        def fits() -> bool:
            return torch.allclose(self(pooled), logits.float(), rtol=0, atol=tolerance)

        self.whole = not hasattr(model, 'forward_head')
        try:
            fitting = fits()
        except RuntimeError:
            # Then its head does more before it pools: only the whole model leads to the pool.
            self.whole = True
            fitting = fits()
        if not fitting:
            raise ValueError(
                'calibrate needs a network whose outputs depend on its last map through the global pooling alone; '
                'those of this one do not'
            )
        # After most poolings comes a linear layer: then one pass gives the logits at every gain.
        self.zero = self(torch.zeros_like(pooled[:1]))
        self.affine = torch.allclose(
            self(2 * pooled[:8]) - self(pooled[:8]), self(pooled[:8]) - self.zero, atol=tolerance
        )

    def __call__(self, pooled: Tensor) -> Tensor:
        return torch.cat([self._run(chunk) for chunk in pooled.split(_CHUNK)])

    def at_gain(self, pooled: Tensor, logits: Tensor, gain: float) -> Tensor:
        """Logits of `gain` times `pooled`, whose own logits are known."""
        return self.zero + gain * (logits - self.zero) if self.affine else self(gain * pooled)

    def _run(self, pooled: Tensor) -> Tensor:
        # The network runs on a stand-in; a hook puts the pooled features in the place of the pool's output.
        pooled = pooled.to(next(self.model.parameters()).dtype)
        hook = self.pool.register_forward_hook(lambda *_: self.pool.shaped(pooled))
        try:
            if self.whole:
                return self.model(pooled.new_zeros(len(pooled), *self.image_shape)).float()
            pixel = pooled[:, None, None, :] if self.pool.input_fmt == 'NHWC' else pooled[:, :, None, None]
            return self.model.forward_head(pixel).float()
        finally:
            hook.remove()


def _spread(maps: list[Tensor], view: View) -> float:
    """Root mean square deviation of what the plan sees from its mean over an image's samples."""
    seen = torch.cat([view_of(m.float().flatten(2), view) for m in maps])
    spread = float(seen.var(2, correction=0).mean().sqrt())
    if not 0 < spread < math.inf:
        raise ValueError(
            f'a map of {" × ".join(map(str, maps[0].shape[2:]))} with a spread of {spread:g} over its positions leaves '
            'nothing to calibrate; let the loader give larger images, with finite values'
        )
    return spread


def _score(
    view: View | None, temperature: float, pooled: Tensor, head: _Head, targets: Tensor, fit_gain: bool
) -> Trial:
    raw = head(pooled)

    def loss_at(log_gain: float) -> float:
        return float(F.cross_entropy(head.at_gain(pooled, raw, math.exp(log_gain)), targets))

    log_gain = _minimize(loss_at, math.log(0.1), math.log(4.0)) if fit_gain else 0.0
    correct = head.at_gain(pooled, raw, math.exp(log_gain)).argmax(1) == targets
    accuracy = float(correct.float().mean())
    return Trial(view, temperature, math.exp(log_gain), loss_at(log_gain), loss_at(0.0), accuracy)


def _minimize(function: Callable[[float], float], low: float, high: float, steps: int = 16) -> float:
    """Where a function with one minimum has it, by golden section."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2
