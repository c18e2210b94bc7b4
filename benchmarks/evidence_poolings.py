"""The poolings that evidence.py compares, their fit on kept maps, and how their predictions are judged."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rotp_vision.core import view_of
from rotp_vision.layers import MEAN_POOL, GlobalROTPool2d, MixedROTPool2d, PoolOptions
from rotp_vision.layers.parameters import PositiveWeight

AVERAGE, AVERAGE_GAIN, GEM_GAIN = 'average', 'average, gain', 'GeM, gain'
_FUSION_GAIN = replace(MEAN_POOL, gain='scalar')


class PowerMean(nn.Module):
    """GeM: f_d = gain · (mean_n max(x_dn, 0)^p)^(1/p); p = 1 is average pooling of what is not negative."""

    def __init__(self, power: float = 1.0, learn: bool = True, gain: bool = False):
        super().__init__()
        self.power = PositiveWeight(power, learn=learn)
        self.gain = PositiveWeight(1.0) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        power = self.power()
        pooled = x.flatten(2).clamp_min(1e-6).pow(power).mean(2).pow(1 / power)
        return pooled if self.gain is None else pooled * self.gain()


class Average(nn.Module):
    """Average pooling, with a learned gain or none."""

    def __init__(self, gain: bool = False):
        super().__init__()
        self.gain = PositiveWeight(1.0) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.flatten(2).mean(2)
        return pooled if self.gain is None else pooled * self.gain()


class MeanMax(nn.Module):
    """Mixed mean-max pooling in closed form: what `MixedROTPool2d.mean_max` is by Proposition 2, at less cost."""

    def __init__(self, gain: bool = False):
        super().__init__()
        self.omega = nn.Parameter(torch.zeros(2))
        self.gain = PositiveWeight(1.0) if gain else None

    def set_share(self, mean: float):
        """Let the mean have this share, and the maximum the rest."""
        with torch.no_grad():
            self.omega.copy_(torch.tensor([mean, 1 - mean]).log())

    def forward(self, x: Tensor) -> Tensor:
        mean, maximum = self.omega.softmax(0)
        pooled = mean * x.flatten(2).mean(2) + maximum * x.flatten(2).amax(2)
        return pooled if self.gain is None else pooled * self.gain()


def _rot(solver: Any, **options: Any) -> Callable[[int], nn.Module]:
    return lambda num_features: GlobalROTPool2d(PoolOptions.paper(solver, **options), num_features)


def _near_mean(solver: Any, view: str, gain: str = 'scalar', **options: Any) -> Callable[[int], nn.Module]:
    return _rot(solver, start='mean', view=view, gain=gain, **options)


_SINKHORN_RMS = PoolOptions('sinkhorn', gain='off', smoothness=4.0)
# Starts to choose from: temperatures as multiples of the spread of what the plan sees, powers of GeM, shares of the
# mean in mean-max, and the gain of each.
MULTIPLES = (64.0, 16.0, 8.0, 4.0, 2.0, 1.0)
GAINS = tuple(0.05 * i for i in range(4, 25))
POWERS = (1.0, 1.25, 1.5, 2.0, 3.0)
SHARES = (0.98, 0.95, 0.9, 0.8, 0.5)

# From the number of channels to a pooling of maps (B, C, H, W) to (B, C). Fitted in this order.
POOLINGS: dict[str, Callable[[int], nn.Module]] = {
    AVERAGE: lambda _: Average(),
    AVERAGE_GAIN: lambda _: Average(gain=True),
    'GeM p = 1.5, gain': lambda _: PowerMean(1.5, learn=False, gain=True),
    GEM_GAIN: lambda _: PowerMean(gain=True),
    'Sinkhorn rms, gain': _near_mean('sinkhorn', 'rms'),
    'softmax rms, gain': _near_mean('badmm-e', 'rms', num_modules=1),
    'mean-max, gain': lambda _: MeanMax(gain=True),
    'BADMM-E published, gain': _rot('badmm-e', gain='scalar'),
    'BADMM-E rms, gain': _near_mean('badmm-e', 'rms'),
    'coupled BADMM-E rms, gain': _near_mean('badmm-e', 'rms', coupled=True),
    'Sinkhorn log, gain': _near_mean('sinkhorn', 'log'),
    'Sinkhorn identity, gain': _near_mean('sinkhorn', 'identity'),
    'GeM': lambda _: PowerMean(),
    'Sinkhorn rms': _near_mean('sinkhorn', 'rms', gain='off'),
    'softmax identity, gain': _near_mean('badmm-e', 'identity', num_modules=1),
    'hierarchical Sinkhorn rms + mean, gain': lambda _: MixedROTPool2d([_SINKHORN_RMS, MEAN_POOL], _FUSION_GAIN),
    'Sinkhorn rms, gain, attention prior': _near_mean('sinkhorn', 'rms', prior='attention', prior_width=32),
    'BADMM-E published': _rot('badmm-e'),
    'BADMM-Q published, gain': _rot('badmm-q', gain='scalar'),
    'BADMM-E identity, gain': _near_mean('badmm-e', 'identity'),
    'BADMM-Q rms, gain': _near_mean('badmm-q', 'rms'),
    'BADMM-E log, gain': _near_mean('badmm-e', 'log'),
    'coupled BADMM-Q rms, gain': _near_mean('badmm-q', 'rms', coupled=True),
    'BADMM-E rms with structure, gain': _near_mean('badmm-e', 'rms', structure=1.0),
    'Sinkhorn rms, gain per channel': _near_mean('sinkhorn', 'rms', gain='channel'),
}


class Recipe(NamedTuple):
    """How many images fit a pooling and judge it, and how it is fitted."""

    fit: int = 1000
    choose: int = 150  # of those to fit on, to choose the start
    judge: int = 1000
    epochs: int = 1
    batch: int = 50
    lr: float = 0.1  # of the positive weights, whose steps are relative changes
    prior_lr: float = 3e-3  # of the matrices of an attention prior


class Outcome(NamedTuple):
    """What one fitted pooling made of the images that judge it, one number an image."""

    index: Tensor
    loss: Tensor
    top1: Tensor
    top5: Tensor
    confidence: Tensor


def split(num_images: int, recipe: Recipe, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the images to fit on and, none of them among those, of the images to judge on."""
    if recipe.fit >= num_images:
        raise ValueError(f'fit must leave images of {num_images} to judge on, got {recipe.fit}')
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(seed))
    return order[: recipe.fit], order[recipe.fit :][: recipe.judge]


def starts_of(pool: nn.Module, maps: Tensor) -> list[Callable[[], None]]:
    """Where a pooling may start: temperatures, powers of GeM, shares of the mean; the published only where it is."""
    if isinstance(pool, PowerMean) and isinstance(pool.power.beta, nn.Parameter):
        return [partial(pool.power.set, power) for power in POWERS]
    if isinstance(pool, MeanMax):
        return [partial(pool.set_share, share) for share in SHARES]
    if not isinstance(pool, GlobalROTPool2d) or pool.options.start == 'paper':
        return [lambda: None]
    spread = float(view_of(maps.float().flatten(2), pool.view).var(2, correction=0).mean().sqrt())
    times = {'smoothness': 1, 'step': pool.options.modules}
    names = [name for name in pool.named_weights() if name in times]
    return [partial(pool.set_weights, **{name: times[name] * m * spread for name in names}) for m in MULTIPLES]


def choose_start(pool: nn.Module, classifier: nn.Module, maps: Tensor, labels: Tensor):
    """Leave the pooling at the start, and the gain if it has one, of least cross-entropy on these images."""
    gain = getattr(pool, 'gain', None)
    best = math.inf, lambda: None, 1.0
    with torch.no_grad():
        for start in starts_of(pool, maps):
            start()
            pooled = torch.cat([pool(chunk.float()) for chunk in maps.split(50)])
            for factor in GAINS if gain is not None else (1.0,):
                loss = float(F.cross_entropy(classifier(factor * pooled), labels))
                if loss < best[0]:
                    best = loss, start, factor
    best[1]()
    if gain is not None:
        gain.set(best[2])


def fit(pool: nn.Module, classifier: nn.Module, maps: Tensor, labels: Tensor, index: Tensor, recipe: Recipe, seed: int):
    """Choose a start, then train the pooling's own parameters by cross-entropy; the rest stays as it is."""
    groups = {'beta': [], 'matrix': []}
    for name, parameter in pool.named_parameters():
        groups['matrix' if name.startswith('prior.') else 'beta'].append(parameter)
    if not any(groups.values()):
        return
    choose_start(pool, classifier, maps[index[: recipe.choose]], labels[index[: recipe.choose]])
    optimizer = torch.optim.Adam(
        [
            {'params': groups['beta'], 'lr': recipe.lr},
            *([{'params': groups['matrix'], 'lr': recipe.prior_lr}] if groups['matrix'] else []),
        ]
    )
    generator = torch.Generator().manual_seed(seed)
    orders = [index[torch.randperm(len(index), generator=generator)] for _ in range(recipe.epochs)]
    batches = [batch for order in orders for batch in order.split(recipe.batch)]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    for batch in batches:
        loss = F.cross_entropy(classifier(pool(maps[batch].float())), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def judge(pool: nn.Module, classifier: nn.Module, maps: Tensor, labels: Tensor, index: Tensor) -> Outcome:
    with torch.inference_mode():
        logits = torch.cat([classifier(pool(maps[chunk].float())) for chunk in index.split(100)])
    labels = labels[index]
    confidence, _ = logits.softmax(1).max(1)
    hits = logits.topk(5, 1).indices == labels[:, None]
    loss = F.cross_entropy(logits, labels, reduction='none')
    return Outcome(index, loss, hits[:, 0].float(), hits.any(1).float(), confidence)


def weights_of(pool: nn.Module) -> str:
    """The positive weights that were learned, for people to read."""
    found = {name: module for name, module in pool.named_modules() if isinstance(module, PositiveWeight)}
    learned = {name: module for name, module in found.items() if isinstance(module.beta, nn.Parameter)}
    texts = [f'{name.removeprefix("weights.")} {module.extra_repr()}' for name, module in learned.items()]
    omega = getattr(pool, 'omega', None)
    if omega is not None:
        texts.append(f'head prior {", ".join(f"{value:.3f}" for value in omega.softmax(0).tolist())}')
    return '; '.join(texts)


def calibration_error(confidence: Tensor, correct: Tensor, num_bins: int = 15) -> float:
    """Expected calibration error: Σ_bins (share of the images in the bin) · |accuracy − mean confidence|."""
    bins = (confidence * num_bins).long().clamp_max(num_bins - 1)
    gap = torch.zeros(num_bins, dtype=torch.float64).index_add_(0, bins, (correct - confidence).double())
    return float(gap.abs().sum() / len(confidence))


def paired_test(differences: Tensor) -> tuple[float, float, float]:
    """Mean of paired differences, its standard error, and the two-sided p-value of their ratio t.

    By the normal distribution, which with hundreds of images is that of t.
    """
    differences = differences.double()
    mean = float(differences.mean())
    error = float(differences.std() / math.sqrt(len(differences)))
    if error == 0:
        return mean, error, 1.0 if mean == 0 else 0.0
    return mean, error, math.erfc(abs(mean) / error / math.sqrt(2))


def per_image(ours: list[Outcome], theirs: list[Outcome], field: str, num_images: int) -> Tensor:
    """Ours minus theirs for each image judged, averaged over the seeds that judged it; lists go seed by seed."""
    total, count = torch.zeros(num_images, dtype=torch.float64), torch.zeros(num_images)
    for one, other in zip(ours, theirs, strict=True):
        if not torch.equal(one.index, other.index):
            raise ValueError('outcomes must be of the same images in the same order to be paired')
        total[one.index] += (getattr(one, field) - getattr(other, field)).double()
        count[one.index] += 1
    return total[count > 0] / count[count > 0]
