"""Choosing a pooling from a few hundred labelled images, and saying whether it pays.

Poolings are fitted on one half of the images and judged on the other, then the other way round, so that each image is
judged by a fit that has not seen it. Average pooling with a gain and GeM with a gain are fitted and judged alike.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from rotp_vision.core import PENALTY, FeatureScale, scale_features
from rotp_vision.layers import PoolOptions, ROTPool
from rotp_vision.layers.options import MEAN_START
from rotp_vision.surgery.head import Collected, GlobalPool, Head, collect, evaluating, find_global_pool
from rotp_vision.surgery.multi_scale import MultiScale

Metric = Literal['loss', 'top1']
TriedPrior = Literal['uniform', 'norm']

# The coarse grid: temperatures in multiples of the spread of what the plan sees, and powers of the norm prior.
_TEMPERATURES = (16.0, 5.0, 1.6, 0.5)
_POWERS = (0.0, 2.0, 6.0)
_GEM_POWERS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
# Steps of the local search, then half as large: of the logarithms of temperature, penalty and a view's gain, and of the
# power.
_STEPS = {'temperature': 0.6, 'power': 1.0, 'penalty': 1.2, 'size': 0.3}
_MOST_STEPS = 6  # along one axis
_LEAST = 1e-3  # of cross-entropy: next to the mean, differences are small but so are their standard errors


NOTHING_FOUND = 'no pooling beats average pooling with a gain on these images; the pooling was left next to the mean'


class Setting(NamedTuple):
    """What is searched."""

    feature_scale: FeatureScale
    temperature: float
    power: float = 0.0  # β of the norm prior
    penalty: float = PENALTY  # α3 over the temperature, where the solver reads it
    size_gains: tuple[float, ...] = ()  # logarithms of the gains of several views; the first is zero


@dataclass(frozen=True)
class Row:
    """One pooling as judged: each image by a fit on images of the other half.

    Attributes:
        name: 'average', 'average + gain', 'GeM + gain' or 'ROTP …'.
        gain: fitted on all images, as are the other settings.
        loss: cross-entropy.
        top1: share of right predictions.
        loss_difference: mean of the paired difference of the loss to average + gain, and its standard error.
        top1_difference: the same of the share of right predictions, to average pooling.
        power: of GeM.
        setting: of ROTP.
    """

    name: str
    gain: float
    loss: float
    top1: float
    loss_difference: tuple[float, float]
    top1_difference: tuple[float, float]
    power: float | None = None
    setting: Setting | None = None

    def settings(self) -> str:
        """The fitted settings in words."""
        if self.power is not None:
            return f'p = {self.power:.3g}'
        if self.setting is None:
            return ''
        norm = f', norm power {self.setting.power:.2g}' if self.setting.power else ''
        gains = ', '.join(f'{math.exp(gain):.2g}' for gain in self.setting.size_gains)
        sizes = f', sizes times {gains}' if gains else ''
        return f'scale {self.setting.feature_scale}, temperature {self.setting.temperature:.3g}{norm}{sizes}'


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found: `print` it, or see its rows.

    Attributes:
        path: of the pool in the model.
        num_images: how many images were used.
        average: average pooling as the network came; of one with several views (see `multi_scale`), the first view alone.
        average_gain: average pooling with a fitted gain.
        gem: GeM pooling with fitted power and gain.
        tried: ROTP with each prior that was tried.
        chosen: the row of `tried` that the pool was left at; None if it was left next to the mean.
        sentence: what was gained, in words.
        trials: every setting that was tried, with the loss of the best gain on all images.

    Example:
        >>> import timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> report = rotp_vision.calibrate(model, [(torch.rand(8, 3, 64, 64), torch.arange(8) % 3)])
        >>> [row.name for row in report.rows]
        ['average', 'average + gain', 'GeM + gain', 'ROTP, uniform prior', 'ROTP, norm prior']
    """

    path: str
    num_images: int
    average: Row
    average_gain: Row
    gem: Row
    tried: tuple[Row, ...]
    chosen: Row | None
    sentence: str
    trials: tuple[tuple[Setting, float], ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self.average, self.average_gain, self.gem, *self.tried)

    def table(self) -> str:
        """The rows as a Markdown table: scores on images that were not fitted, differences ± standard errors."""
        lines = [
            '| pooling | settings | gain | cross-entropy | − average + gain | top-1 % | − average |',
            '| --- | --- | --- | --- | --- | --- | --- |',
        ]
        for row in self.rows:
            name = row.name + (' (chosen)' if row is self.chosen else '')
            loss = '' if row is self.average_gain else '{:+.4f} ± {:.4f}'.format(*row.loss_difference)
            top1 = '' if row is self.average else '{:+.1f} ± {:.1f}'.format(*(100 * v for v in row.top1_difference))
            scores = f'{row.gain:.3f} | {row.loss:.4f} | {loss} | {100 * row.top1:.1f} | {top1}'
            lines.append(f'| {name} | {row.settings()} | {scores} |')
        return '\n'.join(lines)

    def __str__(self) -> str:
        head = f'{self.path}: {self.num_images} images, each judged by a fit on the other half of them'
        return f'{head}\n\n{self.table()}\n\n{self.sentence}'


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

    The backbone sees each image once. View, temperature, α3 (where the solver reads it), the power of the norm prior
    and the gain are fitted on halves of the images, by a coarse grid and a local search, and judged on the other
    halves. The pooling is left at what was best, fitted on all images, provided that it beats average pooling with a
    gain by a standard error and by 0.001 of cross-entropy, and that its top-1 is not a standard error below average
    pooling's; otherwise next to the mean, with the gain alone. Nothing but the pooling changes. Of a network with
    several views (see `multi_scale`) it also fits the gain of each.

    Args:
        model: a model with one global ROT pooling, of maps or tokens (see `convert`).
        loader: batches of (images, class indices), on any device; a few hundred images, in an order without meaning.
            Use the image size at which the model will be used. Instead of images, a list of views where `multi_scale` takes
            one.
        views: what the plan may see.
        priors: 'uniform', 'norm' or both; a pool with an attention prior keeps it.
        metric: what decides, 'loss' or 'top1'. A pooling that is sharp enough to lower the loss most may cost a little
            accuracy.
        label_smoothing: of the loss. Images that the network was trained on want some: it is too sure of them, and a
            gain that is fitted to them without is too large for others.
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
    for name, given, allowed in (
        ('feature_scales', feature_scales, get_args(FeatureScale)),
        ('priors', priors, get_args(TriedPrior)),
        ('metric', [metric], get_args(Metric)),
    ):
        if isinstance(given, str) or not given or not set(given) <= set(allowed):
            raise ValueError(f'{name} must be of {", ".join(allowed)}, got {given!r}')
    if not 0 <= label_smoothing < 1:
        raise ValueError(f'label_smoothing must lie in [0, 1), got {label_smoothing}')
    if max_images < 4:
        raise ValueError(f'max_images must be at least 4, got {max_images}')
    if pool.options.prior == 'attention':
        priors = ('uniform',)
    with evaluating(model):
        collected = collect(model, pool, loader, max_images)
        if len(collected.targets) < 4:
            raise ValueError(f'loader must give at least 4 images, got {len(collected.targets)}')
        places = model.positions(collected.example) if isinstance(model, MultiScale) else None
        search = _Search(collected, Head(model, pool, collected), pool.options, metric, label_smoothing, places)
        peers = {
            'average': search.judge_average(with_gain=False),
            'average + gain': search.judge_average(with_gain=True),
            'GeM + gain': search.judge_gem(),
        }
        tried = {f'ROTP, {prior} prior': search.judge_rotp(feature_scales, prior) for prior in priors}
    average, average_gain, gem = peers.values()
    rows = {name: _row(name, judged, average, average_gain) for name, judged in (peers | tried).items()}
    best, chosen = average_gain, None
    for name, judged in tried.items():
        if _is_better(judged, best, metric) and not _exceeds(average.right, judged.right):
            best, chosen = judged, rows[name]
    helps = average_gain.loss.mean() < average.loss.mean()
    _install(pool, best.found, best.gain if chosen or helps else 1.0)
    if isinstance(model, MultiScale) and chosen:
        model.scale_gains([math.exp(gain) for gain in best.found.size_gains])
    return Calibration(
        path,
        len(collected.targets),
        *(rows[name] for name in peers),
        tried=tuple(rows[name] for name in tried),
        chosen=chosen,
        sentence=_sentence(best, average_gain, gem) if chosen else NOTHING_FOUND,
        trials=tuple((setting, float(curve.loss.mean(1).min())) for setting, curve in search.known.items()),
    )


def fit_gain(model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], *, max_images: int = 512) -> float:
    """Fit the gain of a converted model's global pooling to labelled images, and nothing else.

    For a pooling that was trained on images that the network knows: it is too sure of those, so that they ask for a
    larger gain than others do. The gain stays as it is where one that is fitted on half of the images does not help
    on the other half.

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
        pooled = torch.cat([pool.pool_sets(sets.float()) for sets in collected.sets])
        head, targets = Head(model, pool, collected), collected.targets
        judged = judge_pooled(head, pooled, targets)
        if not judged.loss.mean() < nn.functional.cross_entropy(head(pooled), targets).cpu():
            return 1.0
    pool.set_weights(gain=judged.gain * pool.named_weights()['gain'])
    return judged.gain


def _row(name: str, judged: 'Judged', average: 'Judged', average_gain: 'Judged') -> Row:
    return Row(
        name,
        judged.gain,
        float(judged.loss.mean()),
        float(judged.right.mean()),
        _difference(judged.loss, average_gain.loss),
        _difference(judged.right, average.right),
        power=judged.found if isinstance(judged.found, float) else None,
        setting=judged.found if isinstance(judged.found, Setting) else None,
    )


def _difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Mean of the paired difference over the images, and its standard error."""
    difference = (ours - theirs).double()
    return float(difference.mean()), float(difference.std() / math.sqrt(len(difference)))


def _exceeds(ours: Tensor, theirs: Tensor) -> bool:
    """Whether by more than a standard error."""
    difference, error = _difference(ours, theirs)
    return difference > error


def _is_better(ours: 'Judged', theirs: 'Judged', metric: Metric) -> bool:
    return _exceeds(ours.right, theirs.right) if metric == 'top1' else _exceeds(theirs.loss - _LEAST, ours.loss)


def _sentence(chosen: 'Judged', average_gain: 'Judged', gem: 'Judged') -> str:
    def compared(name: str, peer: 'Judged') -> str:
        loss, top1 = _difference(chosen.loss, peer.loss), _difference(chosen.right, peer.right)
        points = f'{100 * top1[0]:+.1f} ± {100 * top1[1]:.1f} points'
        return f'{name} by {loss[0]:+.4f} ± {loss[1]:.4f} of cross-entropy and {points} of top-1'

    return (
        f'on images that were not fitted it differs from {compared("average + gain", average_gain)}, and from '
        f'{compared("GeM + gain", gem)}'
    )


def _install(pool: GlobalPool, setting: Setting | None, gain: float) -> None:
    """Leave the pool at a setting, or next to the mean if there is none, with a gain."""
    options = pool.options
    prior = 'attention' if options.prior == 'attention' else 'uniform'
    if setting is None:
        setting = Setting(options.feature_scale, MEAN_START[options.feature_scale])
    elif setting.power:
        prior = 'norm'
    pool.set_options(replace(options, feature_scale=setting.feature_scale, prior=prior))
    weights = dict(_options_at(options, setting).starting_weights())
    if prior == 'norm':
        weights['norm_power'] = setting.power
    if pool.gain is not None:
        weights['gain'] = gain
    pool.set_weights(**weights)


def _options_at(options: PoolOptions, setting: Setting) -> PoolOptions:
    """The options at a setting, other weights as given or next to the mean, without prior and gain."""
    temperature = setting.temperature
    searched = {
        'smoothness': temperature,
        'step': temperature * options.to_solver().num_weight_sets,
        'proximal': temperature,
        'sample_penalty': temperature * setting.penalty,
    }
    weights = {name: searched[name] for name in options.starting_weights() if name in searched}
    return replace(
        options, start='mean', feature_scale=setting.feature_scale, gain='off', prior='uniform', prior_width=None, **weights
    )


class _Curve(NamedTuple):
    """How a pooling does on each image, at every gain."""

    log_gains: Tensor  # (gains,) in even steps
    loss: Tensor  # (gains, images)
    right: Tensor  # (gains, images) 1.0 where the prediction is right

    def of(self, images: Tensor) -> '_Curve':
        return _Curve(self.log_gains, self.loss[:, images], self.right[:, images])

    def best(self) -> tuple[int, float]:
        """The gain of the least mean loss: its place, and how far beyond it, in steps, a parabola puts the least."""
        mean = self.loss.double().mean(1)
        place = int(mean.argmin())
        if not 0 < place < len(mean) - 1:
            return place, 0.0
        before, here, after = mean[place - 1 : place + 2].tolist()
        return place, 0.5 * (before - after) / (before - 2 * here + after)

    def at(self, place: int, beyond: float) -> tuple[Tensor, Tensor]:
        """(images,) loss and right predictions at a gain as `best` gives it."""
        if beyond == 0.0:
            return self.loss[place], self.right[place]
        before, here, after = self.loss[place - 1 : place + 2]
        slope, bend = (after - before) / 2, before - 2 * here + after
        return here + beyond * slope + 0.5 * beyond**2 * bend, self.right[place]

    def gain(self, place: int, beyond: float) -> float:
        step = float(self.log_gains[1] - self.log_gains[0]) if beyond else 0.0
        return math.exp(float(self.log_gains[place]) + beyond * step)


class Judged(NamedTuple):
    """How a pooling does on each image by what was fitted on the other half of the images."""

    loss: Tensor  # (images,)
    right: Tensor  # (images,)
    found: Any  # fitted on all images: a `Setting`, or a power of GeM
    gain: float  # likewise


def _gain_curve(
    head: Head, pooled: Tensor, targets: Tensor, with_gain: bool = True, label_smoothing: float = 0.0
) -> _Curve:
    """How pooled features (images, D) do at every gain, or at gain one alone."""
    logits = head(pooled)

    def at(log_gains: Tensor) -> _Curve:
        losses, rights = [], []
        for gain in log_gains.exp().tolist():
            if head.affine:
                scaled = torch.lerp(head.zero, logits, gain)
            else:
                scaled = logits if gain == 1.0 else head(gain * pooled)
            target = scaled.gather(1, targets[:, None]).squeeze(1)
            wanted = target if not label_smoothing else torch.lerp(target, scaled.mean(1), label_smoothing)
            losses.append(scaled.logsumexp(1) - wanted)
            rights.append((target >= scaled.amax(1)).float())  # argmax takes ten times as long
        return _Curve(log_gains, torch.stack(losses), torch.stack(rights))

    if not with_gain or head.scale_free:
        return at(torch.zeros(1))
    coarse = at(0.4 * torch.arange(-8, 8))
    return at(coarse.log_gains[coarse.best()[0]] + 0.1 * torch.arange(-4, 5)) if head.affine else coarse


def _cross_fit(images: Tensor, fit: Callable[[Tensor], Any], curve_of: Callable[[Any], _Curve]) -> Judged:
    """What `fit` finds on each half of the images, judged on the other, and what it finds on all."""
    loss, right = torch.empty(len(images)), torch.empty(len(images))
    for fitted, others in ((images[::2], images[1::2]), (images[1::2], images[::2])):
        curve = curve_of(fit(fitted))
        judged = curve.of(others).at(*curve.of(fitted).best())
        loss[others.cpu()], right[others.cpu()] = judged[0].cpu(), judged[1].cpu()
    found = fit(images)
    curve = curve_of(found)
    return Judged(loss, right, found, curve.gain(*curve.best()))


def judge_pooled(head: Head, pooled: Tensor, targets: Tensor) -> Judged:
    """Pooled features (images, D) with a gain that is fitted on each half of the images and judged on the other."""
    curve = _gain_curve(head, pooled, targets)
    return _cross_fit(torch.arange(len(targets), device=targets.device), lambda images: None, lambda _: curve)


class _Search:
    """Fits poolings on halves of the images and judges them on the other halves."""

    def __init__(
        self,
        collected: Collected,
        head: Head,
        options: PoolOptions,
        metric: Metric,
        label_smoothing: float,
        places: Sequence[int] | None = None,
    ):
        self.sets, self.targets = collected.sets, collected.targets
        self.head, self.options, self.metric, self.label_smoothing = head, options, metric, label_smoothing
        self.images = torch.arange(len(self.targets), device=self.targets.device)
        self.places = list(places or [self.sets[0].shape[2]])  # of each view
        self.equal_gains = (0.0,) * len(self.places) if places else ()
        self.known: dict[Setting, _Curve] = {}
        self.means = torch.cat([sets.float().mean(2) for sets in self.sets])
        self.average = self._curve(self.means)

    def judge_average(self, with_gain: bool) -> Judged:
        curve = self.average
        if not with_gain:
            first = torch.cat([sets[:, :, : self.places[0]].float().mean(2) for sets in self.sets])
            curve = self._curve(first, with_gain=False)
        return _cross_fit(self.images, lambda images: None, lambda _: curve)

    def judge_gem(self) -> Judged:
        def pooled(power: float) -> Tensor:
            return torch.cat([s.float().clamp_min(1e-6).pow(power).mean(2).pow(1 / power) for s in self.sets])

        curves = {power: self._curve(pooled(power)) for power in _GEM_POWERS}
        return _cross_fit(
            self.images, lambda images: min(curves, key=lambda p: self._cost(curves[p], images)), curves.__getitem__
        )

    def judge_rotp(self, feature_scales: Sequence[FeatureScale], prior: TriedPrior) -> Judged:
        spreads = self._spreads(feature_scales)
        powers = _POWERS if prior == 'norm' else (0.0,)
        coarse = [
            Setting(scale, multiple * spreads[scale], power, size_gains=self.equal_gains)
            for scale, multiple, power in product(feature_scales, _TEMPERATURES, powers)
            if multiple != _TEMPERATURES[0] or scale == feature_scales[0]  # at high temperature all scales give the mean
        ]
        self._try(coarse)

        def fit(images: Tensor) -> Setting:
            best = min(coarse, key=lambda setting: self._cost(self.known[setting], images))
            return self._refined(best, images, prior)

        return _cross_fit(self.images, fit, self.known.__getitem__)

    def _refined(self, best: Setting, images: Tensor, prior: TriedPrior) -> Setting:
        """What a local search from `best` finds: along each axis as far as it helps, then once more by half steps."""
        axes = ['temperature']
        axes += ['power'] if prior == 'norm' else []
        axes += ['penalty'] if 'sample_penalty' in self.options.starting_weights() else []
        axes += [f'size {size}' for size in range(1, len(self.places))]
        least = self._cost(self.known[best], images)
        for size, axis in product((1.0, 0.5), axes):
            for way in (size, -size):
                start = best
                for _ in range(_MOST_STEPS):
                    setting = _moved(best, axis, way * _STEPS[axis.split()[0]])
                    self._try([setting])
                    cost = self._cost(self.known[setting], images)
                    if cost >= least:
                        break
                    best, least = setting, cost
                if best != start:
                    break
        return self._mildest(best, images, prior)

    def _mildest(self, best: Setting, images: Tensor, prior: TriedPrior) -> Setting:
        """Of the settings that are not worse than the best by a standard error, the one nearest to average pooling.

        The loss is flat around its minimum, and a sharper pooling tends to cost accuracy. How far a pooling is from the
        average shows in its gain, as it changes the size of the features.
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
        mild = [setting for setting in mild if not _exceeds(loss(setting), least)]
        return min([best, *mild], key=distance)

    def _cost(self, curve: _Curve, images: Tensor) -> float:
        loss, right = (values.mean() for values in curve.of(images).at(*curve.of(images).best()))
        # Many settings have the same top-1: among those the loss decides.
        return float(loss) if self.metric == 'loss' else float(1e-4 * loss - right)

    def _try(self, settings: Sequence[Setting]) -> None:
        """Let the curves of the settings, which have the same gains of views, be known."""
        new = [setting for setting in settings if setting not in self.known]
        pooled: dict[Setting, list[Tensor]] = {setting: [] for setting in new}
        for sets in self.sets if new else ():
            x = self._scaled(sets, new[0].size_gains)
            for setting in new:
                pool = ROTPool(replace(_options_at(self.options, setting), prior='norm')).to(x.device)
                pool.set_weights(norm_power=setting.power)
                pooled[setting].append(pool.pool_sets(x).detach())
        for setting, chunks in pooled.items():
            self.known[setting] = self._curve(torch.cat(chunks), self.options.gain != 'off')

    def _scaled(self, sets: Tensor, size_gains: tuple[float, ...]) -> Tensor:
        """Sets (b, D, N) in float32, the samples of each view times its gain."""
        if not any(size_gains):
            return sets.float()
        gains = torch.tensor(size_gains).exp().repeat_interleave(torch.tensor(self.places))
        return sets.float() * gains.to(sets.device)

    def _curve(self, pooled: Tensor, with_gain: bool = True) -> _Curve:
        return _gain_curve(self.head, pooled, self.targets, with_gain, self.label_smoothing)

    def _spreads(self, feature_scales: Sequence[FeatureScale]) -> dict[FeatureScale, float]:
        """Root mean square deviation of what the plan sees from its mean over an image's samples, by view."""
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
        return float(f'{value:.6g}')  # so that a step and a step back lead to where one was

    if axis.startswith('size '):
        gains, size = list(setting.size_gains), int(axis.split()[1])
        gains[size] = rounded(gains[size] + amount)
        return setting._replace(size_gains=tuple(gains))
    value = getattr(setting, axis)
    value = value + amount if axis == 'power' else value * math.exp(amount)
    return setting._replace(**{axis: rounded(value)})
