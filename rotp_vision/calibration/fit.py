"""Fitting the global pooling of a converted model to labelled images.

Poolings are fitted on one half of the images and judged on the other, then the other way round. Each image is thus
judged by a fit that has not seen it. Average pooling with a gain and GeM with a gain are fitted and judged alike.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from rotp_vision.calibration.report import Calibration, Row, Setting, verdict
from rotp_vision.calibration.scores import (
    Curve,
    Judged,
    cross_fit,
    exceeds,
    gain_curve,
    gem,
    judge_pooled,
    paired_difference,
)
from rotp_vision.core import FeatureScale, scale_features
from rotp_vision.layers import ROTPool
from rotp_vision.layers.options import MEAN_START
from rotp_vision.surgery.head import Collected, GlobalPool, Head, collect, evaluating, find_global_pool
from rotp_vision.surgery.multi_scale import MultiScale

Metric = Literal['loss', 'top1']
TriedPrior = Literal['uniform', 'norm']

# The coarse grid: temperatures in multiples of the spread of the scaled features, and powers of the norm prior.
_TEMPERATURES = (16.0, 5.0, 1.6, 0.5)
_POWERS = (0.0, 2.0, 6.0)
_GEM_POWERS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
# Steps of the local search, which then halves them: of the power, and of the logarithms of the other values.
_STEPS = {'temperature': 0.6, 'power': 1.0, 'penalty': 1.2, 'size': 0.3}
_MAX_STEPS = 6  # along one axis
_MIN_GAIN = 1e-3  # of cross-entropy: next to the mean, differences are small but so are their standard errors


def calibrate(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    feature_scales: Sequence[FeatureScale] = ('raw', 'rms', 'log'),
    priors: Sequence[TriedPrior] = ('uniform', 'norm'),
    metric: Metric = 'loss',
    label_smoothing: float = 0.0,
    max_images: int = 512,
) -> Calibration:
    """Fit a converted model's global pooling to labelled images, if any setting of it beats average pooling on them.

    The backbone runs once on each image. The feature scale, the temperature, α3 (where the solver reads it), the power
    of the norm prior and the gain are fitted on halves of the images, by a coarse grid and a local search, and judged
    on the other halves. The best setting, fitted on all images, is installed if it beats average pooling with a gain
    by a standard error plus 0.001 of cross-entropy, and if its top-1 is not more than a standard error below that of
    average pooling. Otherwise the pool is left at average pooling, with the gain alone. Nothing but the pooling
    changes. Of a network with several sizes (see `multi_scale`) it also fits the gain of each.

    Args:
        model: a model with one global ROT pooling, of maps or tokens (see `convert`).
        loader: batches of (images, class indices), on any device; a few hundred images in random order, of the size at
            which the model will be used. Instead of images, a list of sizes where `multi_scale` takes one.
        feature_scales: the feature scales to try.
        priors: 'uniform', 'norm' or both; a pool with an attention prior keeps it.
        metric: what decides, 'loss' or 'top1'. The pooling with the lowest loss may cost a little accuracy.
        label_smoothing: of the loss. Use some for images that the network was trained on: it is overconfident on
            them, and the gain would be too large for others.
        max_images: how many images to read.

    Returns:
        A `Calibration`; `print` shows it.

    Example:
        >>> import timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> batch = torch.rand(8, 3, 64, 64), torch.randint(3, (8,))
        >>> report = rotp_vision.calibrate(model, [batch])
        >>> report.num_images, report.average_gain.name
        (8, 'average + gain')
    """
    path, pool = find_global_pool(model)
    _check_choices('feature_scales', feature_scales, get_args(FeatureScale))
    _check_choices('priors', priors, get_args(TriedPrior))
    _check_choices('metric', [metric], get_args(Metric))
    if not 0 <= label_smoothing < 1:
        raise ValueError(f'label_smoothing must lie in [0, 1), got {label_smoothing}')
    if max_images < 4:
        raise ValueError(f'max_images must be at least 4, got {max_images}')
    if pool.options.prior == 'attention':
        priors = ('uniform',)
    with evaluating(model):
        collected = collect(model, pool, loader, max_images)
        _check_collected(model, collected)
        positions = model.positions(collected.example) if isinstance(model, MultiScale) else None
        search = Search(collected, Head(model, pool, collected), pool, metric, label_smoothing, positions)
        peers = {
            'average': search.judge_average(with_gain=False),
            'average + gain': search.judge_average(with_gain=True),
            'GeM + gain': search.judge_gem(),
        }
        tried = {f'ROTP, {prior} prior': search.judge_rotp(feature_scales, prior) for prior in priors}
    average, average_gain, gem_gain = peers.values()
    rows = {name: _row(name, judged, average, average_gain) for name, judged in (peers | tried).items()}
    best, chosen = average_gain, None
    for name, judged in tried.items():
        if is_better(judged, best, metric) and not exceeds(average.right, judged.right):
            best, chosen = judged, rows[name]
    helps = average_gain.loss.mean() < average.loss.mean()
    mean = Setting(pool.options.feature_scale, MEAN_START[pool.options.feature_scale])
    set_pool(pool, best.found or mean, best.gain if chosen or helps else 1.0)
    if isinstance(model, MultiScale) and chosen:
        model.scale_gains([math.exp(gain) for gain in best.found.size_gains])
    nearest = best if chosen else min(tried.values(), key=lambda judged: judged.loss.mean())
    compared = {'average pooling with a gain': average_gain} | ({'GeM with a gain': gem_gain} if chosen else {})
    return Calibration(
        path,
        len(collected.targets),
        *(rows[name] for name in peers),
        tried=tuple(rows[name] for name in tried),
        chosen=chosen,
        sentence=verdict(
            chosen is not None,
            [
                (name, paired_difference(nearest.right, peer.right), paired_difference(nearest.loss, peer.loss))
                for name, peer in compared.items()
            ],
            'images it was not fitted to',
        ),
        trials=tuple((setting, float(curve.loss.mean(1).min())) for setting, curve in search.known.items()),
    )


def fit_gain(model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], *, max_images: int = 512) -> float:
    """Fit the gain of a converted model's global pooling to labelled images, and nothing else.

    Networks are overconfident on their training images, so refit the gain on held-out ones after training. The gain
    stays as it is unless a gain that is fitted on half of the images lowers the loss on the other half.

    Args:
        model: a model with one global ROT pooling that has a gain.
        loader: batches of (images, class indices) that were not trained on.
        max_images: how many images to read.

    Returns:
        The factor by which the gain has changed.
    """
    path, pool = find_global_pool(model)
    if pool.gain is None:
        raise ValueError(f"{path} has no gain to fit; convert with gain='scalar'")
    with evaluating(model):
        collected = collect(model, pool, loader, max_images)
        _check_collected(model, collected)
        pooled = torch.cat([pool.pool_sets(sets.float()) for sets in collected.sets])
        head, targets = Head(model, pool, collected), collected.targets
        judged = judge_pooled(head, pooled, targets)
        if not judged.loss.mean() < nn.functional.cross_entropy(head(pooled), targets).cpu():
            return 1.0
    pool.set_weights(gain=judged.gain * pool.named_weights()['gain'])
    return judged.gain


def _check_choices(name: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    if isinstance(given, str) or not given or not set(given) <= set(allowed):
        raise ValueError(f'{name} must be of {", ".join(allowed)}, got {given!r}')
    if len(set(given)) < len(given):
        raise ValueError(f'{name} must name each of them once, got {given!r}')


def _check_collected(model: nn.Module, collected: Collected) -> None:
    """Raise if there is nothing to learn from the images; warn if they are sorted by class."""
    targets = collected.targets
    if len(targets) < 4:
        raise ValueError(f'loader must give at least 4 images, got {len(targets)}')
    check_finite(model, collected.logits)
    seen, blocks = len(targets.unique()), len(targets.unique_consecutive())
    if seen == blocks < collected.logits.shape[1] and 2 * seen <= len(targets):
        warnings.warn(
            f'the images are sorted by class: {seen} of {collected.logits.shape[1]} classes are among the first '
            f'{len(targets)} images. Shuffle the loader',
            stacklevel=3,
        )


def check_finite(model: nn.Module, logits: Tensor) -> None:
    """Raise if the network gives NaN or infinite logits because of its weights."""
    if not logits.isfinite().all():
        broken = [name for name, value in model.state_dict().items() if not value.isfinite().all()]
        if broken:
            raise ValueError(
                f'{", ".join(broken[:3])} of the model is not finite (NaN or infinity): load its weights again'
            )


def _row(name: str, judged: Judged, average: Judged, average_gain: Judged) -> Row:
    return Row(
        name,
        judged.gain,
        float(judged.loss.mean()),
        float(judged.right.mean()),
        paired_difference(judged.loss, average_gain.loss),
        paired_difference(judged.right, average.right),
        power=judged.found if isinstance(judged.found, float) else None,
        setting=judged.found if isinstance(judged.found, Setting) else None,
    )


def is_better(ours: Judged, theirs: Judged, metric: Metric) -> bool:
    """Whether the loss is lower by a standard error plus 0.001, or top-1 higher by a standard error."""
    return exceeds(ours.right, theirs.right) if metric == 'top1' else exceeds(theirs.loss - _MIN_GAIN, ours.loss)


def set_pool(pool: ROTPool, setting: Setting, gain: float = 1.0) -> None:
    """Change a pool to a setting and a gain. Other weights get the values in its options, or start next to the mean."""
    options = pool.options
    prior = options.prior if options.prior == 'attention' else 'norm' if setting.power else 'uniform'
    pool.set_options(replace(options, feature_scale=setting.feature_scale, prior=prior))
    searched = {
        'smoothness': setting.temperature,
        'step': setting.temperature * pool.solver.num_weight_sets,
        'proximal': setting.temperature,
        'sample_penalty': setting.temperature * setting.penalty,
    }
    weights = dict(replace(pool.options, start='mean').starting_weights())
    weights |= {name: value for name, value in searched.items() if name in weights}
    weights |= {'norm_power': setting.power} if prior == 'norm' else {}
    weights |= {'gain': gain} if pool.gain is not None else {}
    pool.set_weights(**weights)


class Search:
    """Fits poolings on halves of the images and judges them on the other halves."""

    def __init__(
        self,
        collected: Collected,
        head: Head,
        pool: GlobalPool,
        metric: Metric,
        label_smoothing: float,
        positions: Sequence[int] | None = None,
    ):
        self.sets, self.targets = collected.sets, collected.targets
        self.head, self.pool, self.metric, self.label_smoothing = head, pool, metric, label_smoothing
        self.images = torch.arange(len(self.targets), device=self.targets.device)
        self.positions = list(positions or [self.sets[0].shape[2]])  # of each size
        self.equal_gains = (0.0,) * len(self.positions) if positions else ()
        self.known: dict[Setting, Curve] = {}
        self.average = self._curve(torch.cat([sets.float().mean(2) for sets in self.sets]))

    def judge_average(self, with_gain: bool) -> Judged:
        curve = self.average
        if not with_gain:
            first = torch.cat([sets[:, :, : self.positions[0]].float().mean(2) for sets in self.sets])
            curve = self._curve(first, with_gain=False)
        return cross_fit(self.images, lambda images: None, lambda _: curve)

    def judge_gem(self) -> Judged:
        curves = {p: self._curve(torch.cat([gem(sets.float(), p) for sets in self.sets])) for p in _GEM_POWERS}
        return cross_fit(
            self.images, lambda images: min(curves, key=lambda p: self._cost(curves[p], images)), curves.__getitem__
        )

    def judge_rotp(self, feature_scales: Sequence[FeatureScale], prior: TriedPrior) -> Judged:
        spreads = self._spreads(feature_scales)
        powers = _POWERS if prior == 'norm' else (0.0,)
        coarse = [
            Setting(scale, multiple * spreads[scale], power, size_gains=self.equal_gains)
            for scale, multiple, power in product(feature_scales, _TEMPERATURES, powers)
            if multiple != _TEMPERATURES[0]
            or scale == feature_scales[0]  # at high temperature all scales give the mean
        ]
        self._try(coarse)

        def fit(images: Tensor) -> Setting:
            best = min(coarse, key=lambda setting: self._cost(self.known[setting], images))
            return self._refined(best, images, prior)

        return cross_fit(self.images, fit, self.known.__getitem__)

    def _refined(self, best: Setting, images: Tensor, prior: TriedPrior) -> Setting:
        """The result of a local search from `best`: along each axis as far as it helps, then again with half steps."""
        axes = ['temperature']
        axes += ['power'] if prior == 'norm' else []
        axes += ['penalty'] if 'sample_penalty' in self.pool.options.starting_weights() else []
        axes += [f'size {size}' for size in range(1, len(self.positions))]
        least = self._cost(self.known[best], images)
        for length, axis in product((1.0, 0.5), axes):
            for step in (length, -length):
                start = best
                for _ in range(_MAX_STEPS):
                    setting = _moved(best, axis, step * _STEPS[axis.split()[0]])
                    self._try([setting])
                    cost = self._cost(self.known[setting], images)
                    if cost >= least:
                        break
                    best, least = setting, cost
                if best != start:
                    break
        return self._mildest(best, images, prior)

    def _mildest(self, best: Setting, images: Tensor, prior: TriedPrior) -> Setting:
        """The setting nearest to average pooling among those within a standard error of the best.

        The loss is flat around its minimum, and a sharper pooling tends to cost accuracy. The gain tells how far a
        pooling is from the average, because pooling changes the size of the features.
        """
        if self.metric == 'top1':
            return best

        def loss(setting: Setting) -> Tensor:
            curve = self.known[setting].of(images)
            return curve.at(*curve.best())[0]

        def distance(setting: Setting) -> float:
            curve = self.known[setting].of(images)
            return abs(math.log(curve.gain(*curve.best()) / average))

        curve = self.average.of(images)
        least, average = loss(best), curve.gain(*curve.best())
        mild = [setting for setting in self.known if prior == 'norm' or setting.power == 0.0]
        mild = [setting for setting in mild if not exceeds(loss(setting), least)]
        return min([best, *mild], key=distance)

    def _cost(self, curve: Curve, images: Tensor) -> float:
        loss, right = (values.mean() for values in curve.of(images).at(*curve.of(images).best()))
        # Many settings have the same top-1: among those the loss decides.
        return float(loss) if self.metric == 'loss' else float(1e-4 * loss - right)

    def _try(self, settings: Sequence[Setting]) -> None:
        """Compute the curves of settings that have the same gains of sizes, where they are not known."""
        new = [setting for setting in settings if setting not in self.known]
        pools = [self._layer(setting) for setting in new]
        pooled: list[list[Tensor]] = [[] for _ in new]
        for sets in self.sets if new else ():
            x = self._scaled(sets, new[0].size_gains)
            for pool, parts in zip(pools, pooled, strict=True):
                parts.append(pool.pool_sets(x))
        for setting, parts in zip(new, pooled, strict=True):
            self.known[setting] = self._curve(torch.cat(parts), self.pool.gain is not None)

    def _layer(self, setting: Setting) -> ROTPool:
        """The layer as `calibrate` would leave it, with gain one."""
        layer = ROTPool(self.pool.options, self.pool.num_features).to(self.targets.device)
        if self.pool.options.prior == 'attention':
            layer.prior = self.pool.prior
        set_pool(layer, setting)
        return layer

    def _scaled(self, sets: Tensor, size_gains: tuple[float, ...]) -> Tensor:
        """Sets (b, D, N) in float32, the samples of each size times its gain."""
        if not any(size_gains):
            return sets.float()
        gains = torch.tensor(size_gains).exp().repeat_interleave(torch.tensor(self.positions))
        return sets.float() * gains.to(sets.device)

    def _curve(self, pooled: Tensor, with_gain: bool = True) -> Curve:
        return gain_curve(self.head, pooled, self.targets, with_gain, self.label_smoothing)

    def _spreads(self, feature_scales: Sequence[FeatureScale]) -> dict[FeatureScale, float]:
        """Root mean square deviation of the scaled features over the samples of an image, by feature scale."""
        spreads: dict[FeatureScale, float] = {}
        for scale in feature_scales:
            variances = [scale_features(sets.float(), scale).var(2, correction=0).mean(1) for sets in self.sets]
            spreads[scale] = float(torch.cat(variances).mean().sqrt())
            if not 0 < spreads[scale] < math.inf:
                raise ValueError(
                    f'maps of {self.sets[0].shape[2]} positions with a spread of {spreads[scale]:g} over them leave '
                    'nothing to calibrate; let the loader give larger images, with finite values'
                )
        return spreads


def _moved(setting: Setting, axis: str, amount: float) -> Setting:
    def rounded(value: float) -> float:
        return float(f'{value:.6g}')  # so that a step and a step back end at the same value

    if axis.startswith('size '):
        gains, size = list(setting.size_gains), int(axis.split()[1])
        gains[size] = rounded(gains[size] + amount)
        return setting._replace(size_gains=tuple(gains))
    value = getattr(setting, axis)
    value = value + amount if axis == 'power' else value * math.exp(amount)
    return setting._replace(**{axis: rounded(value)})
