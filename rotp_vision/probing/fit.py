"""Choosing a pooling for a new classifier on a frozen network, and fitting that classifier in closed form.

Every pooling gets a ridge classifier on its standardized features. Cross-validation compares them. It never divides a
group of images (the frames of a video), and it chooses the parameters of a pooling without the images that score it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from rotp_vision.calibration.report import in_points
from rotp_vision.calibration.scores import Difference, rank
from rotp_vision.probing.poolings import OURS, Pooling, all_poolings
from rotp_vision.probing.ridge import PENALTIES, Linear, RidgeFolds, assign_folds, class_weights
from rotp_vision.probing.temperature import Temperature, fit_temperature
from rotp_vision.tables import markdown_table

Neck = Callable[[Tensor], Tensor]
_CHUNK = 32  # images pooled at a time, so that their maps stay in the cache of the CPU


@dataclass(frozen=True)
class ProbeRow:
    """Scores of one kind of pooling.

    Attributes:
        name: 'average', 'max', 'average + max', 'GeM', 'softmax', 'Sinkhorn', or 'ROTP' for the best that a ROT pool
            can be (softmax, Sinkhorn or max).
        pooling: with the parameters that were chosen on all images.
        score: balanced accuracy, the mean over the classes of the share of right predictions. The classifier that
            judges an image, and its parameters, were fitted without the fold of that image.
        difference: of the score to that of average pooling on the same images, and its standard error over the groups.
        error: mean squared error of the logits, balanced over the classes and judged likewise.
        error_difference: the same difference of the squared error.
    """

    name: str
    pooling: Pooling
    score: float
    difference: Difference
    error: float
    error_difference: Difference

    @property
    def setting(self) -> str:
        """The parameters as text."""
        family, setting = self.pooling.family, self.pooling.setting
        return setting if family == self.name else f'{family} {setting}'.strip()

    @property
    def beats_average(self) -> bool:
        """Whether it does by a standard error of the score, or of the squared error if its score is not lower."""
        (more, spread), (worse, spread_of_error) = self.difference, self.error_difference
        return more > spread or (worse < -spread_of_error and more > -1e-9)  # equal scores differ by rounding


@dataclass(frozen=True)
class ProbeResult:
    """What `fit_probe` found: `print` it, read its rows, or classify maps with it.

    Attributes:
        rows: every kind of pooling, from average pooling to ROTP.
        chosen: the row of ROTP if it beats average pooling, otherwise that of average pooling.
        classifier: of the features of the chosen pooling, fitted on all images. Standardization and temperature are
            folded in, so that the softmax of its outputs is a probability.
        num_images: number of images.
        num_groups: number of groups of images.
        num_folds: of the cross-validation.
        temperature: the temperature of the classifier's probabilities, and what it does to them.
        neck: the layers between the pool and the classifier.

    Example:
        >>> import torch, rotp_vision
        >>> result = rotp_vision.fit_probe(torch.rand(30, 8, 4, 4), torch.arange(30) % 3)
        >>> result.chosen.name, result.logits(torch.rand(2, 8, 4, 4)).shape
        ('average', torch.Size([2, 3]))
    """

    rows: tuple[ProbeRow, ...]
    chosen: ProbeRow
    classifier: Linear
    num_images: int
    num_groups: int
    num_folds: int
    temperature: Temperature
    neck: Neck | None = None

    @property
    def sentence(self) -> str:
        """The verdict and its reason."""
        ours = self.rows[-1] if self.chosen is self.rows[0] else self.chosen
        text = f'{in_points(ours.difference)} points of balanced accuracy over average pooling'
        error = 'squared error {:+.4f} ± {:.4f}'.format(*ours.error_difference)
        if ours is not self.chosen:
            return f'Keep average pooling: {ours.name} has no clear gain ({text}, {error}).'
        if ours.difference[0] <= ours.difference[1]:
            text += f', no clear gain in accuracy; chosen by {error}'
        better = [f'{row.name} ({100 * row.score:.1f})' for row in self.rows if row.score > ours.score]
        return f'ROTP pays: {text} ({ours.setting}).' + (f' Higher scores: {", ".join(better)}.' if better else '')

    def table(self) -> str:
        """The rows as a Markdown table."""
        cells = [('pooling', 'parameters', 'balanced accuracy %', '− average', 'squared error', '− average')]
        for row in self.rows:
            name = row.name + (' (chosen)' if row is self.chosen else '')
            differences = in_points(row.difference), '{:+.4f} ± {:.4f}'.format(*row.error_difference)
            score, error = ('', '') if row is self.rows[0] else differences
            cells.append((name, row.setting, f'{100 * row.score:.1f}', score, f'{row.error:.4f}', error))
        return markdown_table(cells)

    def __str__(self) -> str:
        groups = '' if self.num_groups == self.num_images else f' in {self.num_groups} groups'
        head = f'{self.num_images} images{groups}, {len(self.classifier.bias)} classes, {self.num_folds} folds'
        return f'{head}\n\n{self.table()}\n\n{self.temperature}\n\n{self.sentence}'

    def logits(self, maps: Tensor) -> Tensor:
        """(n, classes) logits by the chosen pooling and its classifier, of maps as `fit_probe` takes them."""
        return self.classifier(pooled_features(maps, self.chosen.pooling, self.neck))

    def predict(self, maps: Tensor) -> Tensor:
        """(n,) class indices, of maps as `fit_probe` takes them."""
        return self.logits(maps).argmax(1)


def fit_probe(
    maps: Tensor,
    targets: Tensor,
    groups: Tensor | None = None,
    *,
    num_folds: int = 5,
    neck: Neck | None = None,
    class_names: Sequence[str] | None = None,
    progress: bool = False,
) -> ProbeResult:
    """Choose a pooling for a new classifier of a frozen network's maps, and fit that classifier.

    Each pooling of a list (average, max, their mean, GeM, softmax, Sinkhorn over temperature and norm prior) gets a
    ridge classifier on its standardized features, in closed form and with equal weight for every class. The score is
    balanced accuracy by cross-validation over the groups. The parameters of a pooling are those of the least squared
    error, which depends less on single images than accuracy does. To score them, they are chosen on the other folds,
    by classifiers that were fitted without the scored fold too: the folds are left out in pairs. ROTP is the best that
    a ROT pool can be. It is chosen if it beats average pooling by a standard error of the score, or by one of the
    squared error if its score is not lower. The final classifier takes the strength of the
    ridge and the temperature for which its outputs for the folds left out have the least cross-entropy.

    Args:
        maps: (n, C, H, W) maps or (n, N, C) tokens, the input of the network's pool, in any floating dtype and on any
            device.
        targets: (n,) class indices; every class from 0 to the largest must have images.
        groups: (n,) integers, equal for images that must not be divided (frames of a video, photos of one object);
            None if each image is its own group.
        num_folds: of the cross-validation.
        neck: the layers between the pool and the classifier, as a function of pooled features (n, C); None if none.
        class_names: for error messages.
        progress: whether to show a progress bar.

    Example:
        >>> import torch, rotp_vision
        >>> maps, targets = torch.rand(60, 8, 4, 4), torch.arange(60) % 3
        >>> maps[:, :, 1, 2] += 3 * torch.eye(8)[targets]  # the class shows at one position
        >>> result = rotp_vision.fit_probe(maps, targets)
        >>> [row.name for row in result.rows]
        ['average', 'max', 'average + max', 'GeM', 'softmax', 'Sinkhorn', 'ROTP']
        >>> result.predict(maps[:3])
        tensor([0, 1, 2])
    """
    if maps.dim() not in (3, 4) or not maps.is_floating_point():
        raise ValueError(
            f'maps must be floating point, (n, C, H, W) or tokens (n, N, C), got {maps.dtype} {tuple(maps.shape)}'
        )
    if targets.shape != maps.shape[:1]:
        raise ValueError(f'targets must be class indices ({len(maps)},), got {tuple(targets.shape)}')
    if not all(chunk.isfinite().all() for chunk in maps.split(_CHUNK)):
        raise ValueError('maps must be finite, but hold NaN or infinite values: check the network and the images')
    targets, groups = targets.cpu(), None if groups is None else groups.cpu()
    groups = checked_groups(targets, groups, num_folds, class_names)
    num_classes = int(targets.max()) + 1
    folds = assign_folds(targets, groups, num_folds)
    poolings = all_poolings()
    judged = []
    for pooling in tqdm(poolings, 'trying poolings', unit='pooling', disable=not progress):
        features = pooled_features(maps, pooling, neck)
        judged.append(_judge(RidgeFolds(features, targets, folds, num_classes), targets))
    trials = _Trials(judged, targets, folds)
    members = {family: [k for k, one in enumerate(poolings) if one.family == family] for family, *_ in poolings}
    members[OURS] = [k for k, pooling in enumerate(poolings) if k and pooling.options is not None]
    average = trials.judged_as_chosen([0])
    rows = []
    for name, mine in members.items():
        judged_as_chosen, best = trials.judged_as_chosen(mine), poolings[trials.choice(mine)]
        rows.append(make_row(name, best, judged_as_chosen, average, targets, groups))
    chosen = rows[-1] if rows[-1].beats_average else rows[0]
    features = pooled_features(maps, chosen.pooling, neck)
    strengths = [RidgeFolds(features, targets, folds, num_classes, penalty) for penalty in PENALTIES]
    temperatures = [fit_temperature(ridge.out_of_fold(), targets, folds) for ridge in strengths]
    temperature, ridge = min(zip(temperatures, strengths, strict=True), key=lambda pair: pair[0].cross_entropy[1])
    num_groups = len(groups.unique())
    classifier = ridge.classifier().scaled(temperature.factor)
    return ProbeResult(tuple(rows), chosen, classifier, len(targets), num_groups, num_folds, temperature, neck)


def checked_groups(
    targets: Tensor, groups: Tensor | None, num_folds: int, class_names: Sequence[str] | None = None
) -> Tensor:
    """The groups, or one for each image; raises unless they can be cross-validated."""
    if targets.is_floating_point() or int(targets.min()) < 0:
        raise ValueError(f'targets must be class indices from 0 on, got {targets.dtype} from {targets.min()}')
    if groups is None:
        groups = torch.arange(len(targets))
    if groups.shape != targets.shape:
        raise ValueError(f'groups must be integers ({len(targets)},), one for each image, got {tuple(groups.shape)}')
    if num_folds < 3:
        raise ValueError(f'num_folds must be at least 3, as folds are left out in pairs, got {num_folds}')
    counts = targets.bincount()
    names = [str(k) for k in range(len(counts))] if class_names is None else class_names
    if len(counts) < 2:
        raise ValueError(f'a classifier needs images of at least two classes, got {names[0]} alone')
    empty = [names[k] for k in range(len(counts)) if not counts[k]]
    if empty:
        raise ValueError(f'every class needs images, but there are none of {", ".join(empty[:5])}')
    num_groups = len(groups.unique())
    if num_groups < num_folds:
        what = 'images' if num_groups == len(targets) else 'groups of images'
        raise ValueError(f'{num_folds} folds need at least as many {what}, got {num_groups}; give more, or fewer folds')
    alone = [names[k] for k in range(len(counts)) if len(groups[targets == k].unique()) < 2]
    if alone:
        raise ValueError(
            f'every class needs images of at least two groups, one to learn from and one to judge by, but all images '
            f'of {", ".join(alone[:5])} are in one: add images from elsewhere, or leave the class out'
        )
    return groups


def as_sets(maps: Tensor) -> Tensor:
    """(n, C, N) sets of maps (n, C, H, W) or tokens (n, N, C)."""
    return maps.flatten(2) if maps.dim() == 4 else maps.transpose(1, 2)


@torch.no_grad()
def pooled_features(maps: Tensor, pooling: Pooling, neck: Neck | None) -> Tensor:
    """(n, C) features of maps (n, C, H, W) or tokens (n, N, C), after the neck."""
    pooled = torch.cat([pooling(chunk.float()) for chunk in as_sets(maps).split(_CHUNK)])
    return pooled if neck is None else neck(pooled)


def balanced_mean(values: Tensor, targets: Tensor) -> float:
    """The mean over the classes of the mean of `values` (n,) over the images of a class."""
    return float(class_weights(targets).to(values) @ values)


def balanced_difference(ours: Tensor, theirs: Tensor, targets: Tensor, groups: Tensor) -> tuple[float, float]:
    """Difference of two balanced means over the same images, and its standard error over the groups.

    s² = G / (G − 1) Σ_g (Σ_{i ∈ g} w_i (d_i − mean of d over the class of i))²,   d the paired difference
    """
    weights = class_weights(targets).double()
    difference = (ours - theirs).double()
    share = weights * difference
    means = torch.zeros(int(targets.max()) + 1, dtype=torch.float64)
    means = means.index_add(0, targets, share) / means.index_add(0, targets, weights).clamp_min(1e-12)
    _, members = groups.unique(return_inverse=True)
    sums = share.new_zeros(int(members.max()) + 1).index_add(0, members, weights * (difference - means[targets]))
    error = (sums.square().sum() * len(sums) / max(len(sums) - 1, 1)).sqrt()
    return float(share.sum()), float(error)


class Judged(NamedTuple):
    """Scores of classifiers on images that they were not fitted to."""

    right: Tensor  # (…, n) 1.0 where the prediction is right
    error: Tensor  # (…, n) squared error of the logits

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor) -> 'Judged':
        wanted = F.one_hot(targets, logits.shape[1])
        return cls((rank(logits, targets) < 1).float(), (logits - wanted).square().sum(1))


def make_row(name: str, pooling: Pooling, judged: Judged, average: Judged, targets: Tensor, groups: Tensor) -> ProbeRow:
    """The row of a pooling, judged on the same images as average pooling."""
    score, error = (balanced_mean(values, targets) for values in judged)
    differences = [balanced_difference(*values, targets, groups) for values in zip(judged, average, strict=True)]
    return ProbeRow(name, pooling, score, differences[0], error, differences[1])


def _judge(ridge: RidgeFolds, targets: Tensor) -> Judged:
    """(folds, n): in row k, image i is judged by a classifier fitted without fold k and without the fold of i."""
    folds = ridge.folds.cpu()
    judged = Judged(*torch.empty(2, ridge.num_folds, len(targets)))
    for pair in combinations_with_replacement(range(ridge.num_folds), 2):
        images, logits = ridge.held_out(*pair)
        known = Judged.of(logits, targets[images])
        for k, own in (pair, pair[::-1]):
            mine = folds[images] == own
            for values, new in zip(judged, known, strict=True):
                values[k, images[mine]] = new[mine]
    return judged


class _Trials(NamedTuple):
    """All poolings as judged by `_judge`, from which the best of some can be chosen. Poolings are given by index."""

    judged: Sequence[Judged]
    targets: Tensor
    folds: Tensor

    def of_own_fold(self, index: int) -> Judged:
        """(n,) scores of a pooling on each image, by a classifier that was fitted without its fold."""
        return Judged(*(values.gather(0, self.folds[None]).squeeze(0) for values in self.judged[index]))

    def judged_as_chosen(self, indices: Sequence[int]) -> Judged:
        """(n,) scores of the pooling that is chosen, for each fold, on the images of the other folds."""
        judged = self.of_own_fold(indices[0])
        for k in range(int(self.folds.max()) + 1 if len(indices) > 1 else 0):
            best = self.of_own_fold(self.choice(indices, without=k))
            judged = Judged(*(torch.where(self.folds == k, *values) for values in zip(best, judged, strict=True)))
        return judged

    def choice(self, indices: Sequence[int], without: int | None = None) -> int:
        """The pooling with the least squared error on all images, or on those outside one fold."""

        def error(index: int) -> float:
            if without is None:
                return balanced_mean(self.of_own_fold(index).error, self.targets)
            images = self.folds != without
            return balanced_mean(self.judged[index].error[without, images], self.targets[images])

        return min(indices, key=error)
