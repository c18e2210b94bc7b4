"""Choosing the global pooling of a converted model on labelled images.

Each score is of images that were not fitted: see `rotp_vision.calibration.rule` and `scores`.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from rotp_vision.calibration.report import MEAN, TITLES, Calibration, Row, Setting, verdict
from rotp_vision.calibration.rule import MIN_GAIN, best_of_family, choose
from rotp_vision.calibration.scores import (
    Curves,
    Judged,
    cross_fit,
    exceeds,
    gain_curve,
    judge_pooled,
    promised_difference,
)
from rotp_vision.core import PENALTY, FeatureScale, scale_features
from rotp_vision.layers import PoolOptions, ROTPool, SimplePool
from rotp_vision.layers.options import MEAN_START
from rotp_vision.surgery.convert import replace_pool
from rotp_vision.surgery.head import Collected, GlobalPool, Head, collect, evaluating, find_global_pool
from rotp_vision.surgery.multi_scale import MultiScale
from rotp_vision.surgery.pools import described_pools

TriedPrior = Literal['uniform', 'norm']

# The grid: temperatures in multiples of the spread of the scaled features, and powers.
_TEMPERATURES = (16.0, 8.0, 4.0, 2.0, 1.0, 0.5)
_NORM_POWERS = (2.0, 4.0, 6.0)
_GEM_POWERS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
_SIZE_GAINS = (-0.6, -0.3, 0.3, 0.6, 1.2)  # logarithms


def calibrate(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    feature_scales: Sequence[FeatureScale] = ('raw', 'rms', 'log'),
    priors: Sequence[TriedPrior] = ('uniform', 'norm'),
    only: Literal['', 'rotp'] = '',
    label_smoothing: float = 0.0,
    max_images: int = 512,
) -> Calibration:
    """Choose a converted model's global pooling on labelled images: ours, a simpler one, or average pooling.

    The backbone runs once on each image. Candidates are a fixed grid: average pooling; ROTP by feature scale,
    temperature and power of the norm prior; GeM by its power and the power of its norm prior; the mean weighted by the
    norm prior; and the mean and the maximum. Each has a gain that is fitted with it. The rule:

    1. The smoothed top-1 of an image is the logistic of twice the margin of the right logit over the largest other, at
       the fitted gain. Candidates with a lower one than average pooling are discarded.
    2. Of the rest the mildest is taken whose cross-entropy is within a standard error of the least: the one whose
       losses differ least from those of average pooling.
    3. It is installed if its smoothed top-1 is above that of average pooling by two standard errors of the paired
       difference, and its cross-entropy below that of average pooling with a gain by a standard error plus 0.001.
       Otherwise the pool is left next to the mean, with the gain alone.

    What the report promises is the score of this whole rule by cross-fitting: the images are cut in random halves ten
    times, the rule chooses on each half and is judged on the other. Nothing but the pooling changes. Of a network with
    several sizes (see `multi_scale`) the gain of each size is tried too, around what is best with equal gains.

    Args:
        model: a model with one global ROT pooling, of maps or tokens (see `convert`).
        loader: batches of (images, class indices), on any device; 200 images or more in random order, of the size at
            which the model will be used. Instead of images, a list of sizes where `multi_scale` takes one.
        only: 'rotp' to choose among average pooling and ROTP alone; '' for all.
        feature_scales: the feature scales to try.
        priors: 'uniform', 'norm' or both; a pool with an attention prior keeps it.
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
    for path, pool in described_pools(model).items():
        if isinstance(pool, SimplePool):  # from an earlier calibration, or from `convert`
            replace_pool(model, path, PoolOptions())
    path, pool = find_global_pool(model)
    _check_choices('feature_scales', feature_scales, get_args(FeatureScale))
    _check_choices('priors', priors, get_args(TriedPrior))
    if only not in ('', 'rotp'):
        raise ValueError(f"only must be 'rotp', or '' for all poolings, got {only!r}")
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
        search = Search(collected, Head(model, pool, collected), pool, label_smoothing, positions)
        families = {name: search.sized(grid) for name, grid in search.families(feature_scales, priors).items()}
        average = search.judge_average()
        best = {name: search.judge(settings, best_of_family) for name, settings in families.items()}
        allowed = [s for grid in families.values() for s in grid if s.pool == 'rotp' or not only or _is_mean(s)]
        found, judged = search.judge(allowed, choose)
    average_gain = best['average + gain'][1]
    rows = {name: _row(name, *one, average, average_gain) for name, one in best.items()}
    pays = found != MEAN
    helps = average_gain.loss.mean() < average.loss.mean()
    if found.pool == 'rotp':
        set_pool(pool, found, judged.gain)
    elif not _is_mean(found):
        replace_pool(model, path, found.simple(judged.gain))
    else:
        scale = pool.options.feature_scale
        set_pool(pool, Setting('rotp', scale, MEAN_START[scale]), judged.gain if pays or helps else 1.0)
    if isinstance(model, MultiScale) and any(found.size_gains):
        model.scale_gains([math.exp(gain) for gain in found.size_gains])
    ours = [name for name, row in rows.items() if row.setting.pool == 'rotp']
    nearest = judged if pays else min((best[name][1] for name in ours), key=lambda one: float(one.loss.mean()))
    peers = {'average pooling with a gain': average_gain}
    if found.pool == 'rotp':
        peers['GeM with a gain'] = best['GeM + gain'][1]
    differences = [
        (name, promised_difference(nearest.right, peer.right), promised_difference(nearest.loss, peer.loss))
        for name, peer in peers.items()
    ]
    name = TITLES[found.pool if pays else 'rotp']
    return Calibration(
        path,
        len(collected.targets),
        _row('average', MEAN, average, average, average_gain),
        *(rows.pop(name) for name in ('average + gain', 'GeM + gain')),
        tried=tuple(rows.values()),
        chosen=_row(name, found, judged, average, average_gain) if pays else None,
        sentence=verdict(pays, differences, 'images it was not fitted to', name, len(collected.targets)),
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


def _row(name: str, setting: Setting, judged: Judged, average: Judged, average_gain: Judged) -> Row:
    return Row(
        name,
        setting,
        judged.gain,
        float(judged.loss.mean()),
        float(judged.right.mean()),
        promised_difference(judged.loss, average_gain.loss),
        promised_difference(judged.right, average.right),
    )


def _is_mean(setting: Setting) -> bool:
    """Whether a setting is average pooling, though its sizes may have gains."""
    return setting.pool == 'avg' and not setting.norm_power


def is_better(ours: Judged, theirs: Judged) -> bool:
    """Whether the loss is lower by a standard error plus 0.001."""
    return exceeds(theirs.loss - MIN_GAIN, ours.loss)


def set_pool(pool: ROTPool, setting: Setting, gain: float = 1.0) -> None:
    """Change a pool to a setting and a gain. Other weights get the values in its options, or start next to the mean."""
    options = pool.options
    prior = options.prior if options.prior == 'attention' else 'norm' if setting.norm_power else 'uniform'
    pool.set_options(replace(options, feature_scale=setting.feature_scale, prior=prior))
    searched = {
        'smoothness': setting.temperature,
        'step': setting.temperature * pool.solver.num_weight_sets,
        'proximal': setting.temperature,
        'sample_penalty': setting.temperature * PENALTY,
    }
    weights = dict(replace(pool.options, start='mean').starting_weights())
    weights |= {name: value for name, value in searched.items() if name in weights}
    weights |= {'norm_power': setting.norm_power} if prior == 'norm' else {}
    weights |= {'gain': gain} if pool.gain is not None else {}
    pool.set_weights(**weights)


class Search:
    """The curves of candidates on the collected images."""

    def __init__(
        self,
        collected: Collected,
        head: Head,
        pool: GlobalPool,
        label_smoothing: float,
        positions: Sequence[int] | None = None,
    ):
        self.sets, self.targets = collected.sets, collected.targets
        self.head, self.pool, self.label_smoothing = head, pool, label_smoothing
        self.positions = list(positions or [self.sets[0].shape[2]])  # of each size
        self.known: dict[Setting, Curves] = {}

    def families(
        self, feature_scales: Sequence[FeatureScale], priors: Sequence[TriedPrior]
    ) -> dict[str, list[Setting]]:
        """The grid, by the name of a row."""
        families = {
            'average + gain': [MEAN],
            'GeM + gain': [Setting('gem', power=power) for power in _GEM_POWERS],
            'average + max + gain': [Setting('avgmax')],
        }
        if 'norm' in priors:
            weighted = [Setting('avg', norm_power=power) for power in _NORM_POWERS]
            pairs = product((1.5, 2.0, 3.0, 4.0), _NORM_POWERS)
            weighted += [Setting('gem', power=power, norm_power=norm) for power, norm in pairs]
            families['norm-weighted mean or GeM + gain'] = weighted
        spreads = self._spreads(feature_scales)
        for prior in priors:
            families[f'ROTP, {prior} prior'] = [
                Setting('rotp', scale, multiple * spreads[scale], norm_power=power)
                for scale, multiple in product(feature_scales, _TEMPERATURES)
                for power in (_NORM_POWERS if prior == 'norm' else (0.0,))
                if multiple != _TEMPERATURES[0]
                or scale == feature_scales[0]  # at high temperature all scales give the mean
            ]
        return families

    def judge(self, settings: Sequence[Setting], rule: Callable[[Curves, Tensor], int]) -> tuple[Setting, Judged]:
        """What the rule finds on all images among average pooling and the settings, and its scores by cross-fitting."""
        candidates = list(dict.fromkeys([MEAN, *settings]))
        judged = cross_fit(self.stacked(candidates), rule)
        return candidates[judged.found], judged

    def sized(self, grid: list[Setting]) -> list[Setting]:
        """A family's grid; with several sizes also at the gains of the sizes that suit its best setting."""
        best, tried = self._least(grid), list(grid)
        for size in range(1, len(self.positions)):
            gains = best.size_gains or (0.0,) * len(self.positions)
            others = [best._replace(size_gains=(*gains[:size], gain, *gains[size + 1 :])) for gain in _SIZE_GAINS]
            best, tried = self._least([best, *others]), tried + others
        return tried + [setting._replace(size_gains=best.size_gains) for setting in grid if best.size_gains]

    def curve(self, setting: Setting) -> Curves:
        """The curves of a setting, computed once."""
        if setting not in self.known:
            pool_sets = self._pooling(setting)
            pooled = torch.cat([pool_sets(self._scaled(sets, setting.size_gains)) for sets in self.sets])
            self.known[setting] = self._curve(pooled, self.pool.gain is not None)
        return self.known[setting]

    def judge_average(self) -> Judged:
        """Average pooling as the network came, without a gain; with several sizes, of the first."""
        first = torch.cat([sets[:, :, : self.positions[0]].float().mean(2) for sets in self.sets])
        return cross_fit(self._curve(first, with_gain=False), lambda curves, images: 0)

    def _curve(self, pooled: Tensor, with_gain: bool) -> Curves:
        return gain_curve(self.head, pooled, self.targets, with_gain, self.label_smoothing)

    def stacked(self, settings: Sequence[Setting]) -> Curves:
        """The curves of some settings."""
        curves = [self.curve(setting) for setting in settings]
        return Curves(*(torch.cat(values) for values in zip(*curves, strict=True)))

    def _least(self, settings: Sequence[Setting]) -> Setting:
        """The setting of the least loss on all images."""
        every = torch.arange(len(self.targets))
        losses, _ = self.stacked(settings).at(every, every)
        return settings[int(losses.mean(1).argmin())]

    def _pooling(self, setting: Setting) -> Callable[[Tensor], Tensor]:
        """The pooling of sets that `calibrate` would install, with gain one."""
        if setting.pool != 'rotp':
            return setting.simple().make().pool_sets
        layer = ROTPool(self.pool.options, self.pool.num_features).to(self.targets.device)
        if self.pool.options.prior == 'attention':
            layer.prior = self.pool.prior
        set_pool(layer, setting)
        return layer.pool_sets

    def _scaled(self, sets: Tensor, size_gains: tuple[float, ...]) -> Tensor:
        """Sets (b, D, N) in float32, the samples of each size times its gain."""
        if not any(size_gains):
            return sets.float()
        gains = torch.tensor(size_gains).exp().repeat_interleave(torch.tensor(self.positions))
        return sets.float() * gains.to(sets.device)

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
