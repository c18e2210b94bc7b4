"""Choosing a pooling for a new classifier on a frozen network, and fitting that classifier in closed form.

Every pooling gets a ridge classifier on its standardized features. They are compared by cross-validation in which the
images of one group (the frames of a video) never lie on both sides, and the parameters of a pooling are chosen without
the images on which its score is counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from rotp_vision.probing.poolings import OURS, Pooling, all_poolings
from rotp_vision.probing.ridge import Linear, RidgeFolds, assign_folds, class_weights

Neck = Callable[[Tensor], Tensor]
_CHUNK = 32  # images pooled at a time, so that their maps stay in the processor's cache


@dataclass(frozen=True)
class ProbeRow:
    """One kind of pooling as judged.

    Attributes:
        name: 'average', 'max', 'average + max', 'GeM', 'softmax', 'Sinkhorn' or, for whatever a ROT pool can be (the
            last two and max), 'ROTP'.
        pooling: with the parameters that were chosen on all images.
        score: balanced accuracy, the mean over the classes of the share of right predictions. Each image is judged by
            a classifier, and with parameters, that were found without its fold.
        difference: of the score to average pooling's on the same images, and its standard error over the groups.
        error: mean squared error of the logits, in which classes weigh the same, judged likewise.
        error_difference: likewise of the squared error.
    """

    name: str
    pooling: Pooling
    score: float
    difference: tuple[float, float]
    error: float
    error_difference: tuple[float, float]

    @property
    def setting(self) -> str:
        """The parameters in words."""
        return (
            self.pooling.setting
            if self.pooling.family == self.name
            else f'{self.pooling.family} {self.pooling.setting}'
        )

    @property
    def beats_average(self) -> bool:
        """Whether it does by a standard error: of the score, or of the squared error at no lower score."""
        (more, spread), (worse, spread_of_error) = self.difference, self.error_difference
        return more > spread or (worse < -spread_of_error and more > -1e-9)  # equal scores differ by rounding

    def shown_difference(self) -> str:
        return '{:+.1f} ± {:.1f}'.format(*(100 * value for value in self.difference))


@dataclass(frozen=True)
class ProbeResult:
    """What `fit_probe` found: `print` it, see its rows, or let it classify.

    Attributes:
        rows: every kind of pooling, average first, ours last.
        chosen: the row of ROTP, the best that can be written as a ROT pool, if it beats average pooling; otherwise
            that of average pooling.
        classifier: of the chosen pooling's features, fitted on all images, standardization folded in.
        num_images: how many images were used.
        num_groups: in how many groups they are.
        num_folds: of the cross-validation.
        neck: what the network does with pooled features before its classifier.

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
    neck: Neck | None = None

    @property
    def sentence(self) -> str:
        """What was chosen and why, in words."""
        average, ours = self.rows[0], self.chosen
        if ours is average:
            return 'average pooling is chosen: ROTP does not beat it by a standard error'
        text = f'{ours.name} is chosen ({ours.setting}): {ours.shown_difference()} points over average pooling'
        better = [f'{row.name} ({100 * row.score:.1f})' for row in self.rows if row.score > ours.score]
        return text + (f'; with a higher score: {", ".join(better)}' if better else '')

    def table(self) -> str:
        """The rows as a Markdown table."""
        lines = ['| pooling | parameters | balanced accuracy % | − average | squared error | − average |']
        lines.append('| --- ' * 6 + '|')
        for row in self.rows:
            name = row.name + (' (chosen)' if row is self.chosen else '')
            cells = [name, row.setting, f'{100 * row.score:.1f}', row.shown_difference()]
            cells += [f'{row.error:.4f}', '{:+.4f} ± {:.4f}'.format(*row.error_difference)]
            if row is self.rows[0]:
                cells[3] = cells[5] = ''
            lines.append(f'| {" | ".join(cells)} |')
        return '\n'.join(lines)

    def __str__(self) -> str:
        groups = '' if self.num_groups == self.num_images else f' in {self.num_groups} groups'
        head = f'{self.num_images} images{groups}, {len(self.classifier.bias)} classes, {self.num_folds} folds'
        return f'{head}\n\n{self.table()}\n\n{self.sentence}'

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
    ridge classifier on its standardized features, in closed form, in which every class weighs the same. The score is
    balanced accuracy by cross-validation over the groups. The parameters of a pooling are those of the least squared
    error, which depends less on single images than accuracy does. For its score they are chosen on the other folds, by
    classifiers that have not seen the fold that is judged either: the folds are left out in pairs. ROTP, the best of
    what a ROT pool can be, is chosen if it beats average pooling by a standard error of the score, or of the squared
    error at no lower score.

    Args:
        maps: (n, C, H, W) maps or (n, N, C) tokens as the network's pool sees them, in any floating dtype.
        targets: (n,) class indices; every class from 0 to the largest must have images.
        groups: (n,) integers, equal for images that must not be divided (frames of a video, photos of one object);
            None if each image is its own group.
        num_folds: of the cross-validation.
        neck: what the network does with pooled features (n, C) before its classifier; None if nothing.
        class_names: for error messages.
        progress: whether to show a progress bar.

    Example:
        >>> import torch, rotp_vision
        >>> maps, targets = torch.rand(60, 8, 4, 4), torch.arange(60) % 3
        >>> maps[:, :, 1, 2] += 3 * torch.eye(8)[targets]  # the class shows at one place
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
    groups = checked_groups(targets, groups, num_folds, class_names)
    num_classes = int(targets.max()) + 1
    folds = assign_folds(targets, groups, num_folds)
    poolings = all_poolings()
    judged = []
    for pooling in tqdm(poolings, 'trying poolings', unit='pooling', disable=not progress):
        features = pooled_features(maps, pooling, neck)
        judged.append(_judge(RidgeFolds(features, targets, folds, num_classes), targets))
    trials = _Trials(judged, targets, folds)
    places = {
        name: [k for k, one in enumerate(poolings) if one.family == name] for name in (p.family for p in poolings)
    }
    places[OURS] = [k for k, pooling in enumerate(poolings) if k and pooling.options is not None]
    average = trials.judged_as_chosen([0])
    rows = []
    for name, mine in places.items():
        judged_as_chosen, best = trials.judged_as_chosen(mine), poolings[trials.choice(mine)]
        rows.append(make_row(name, best, judged_as_chosen, average, targets, groups))
    chosen = rows[-1] if rows[-1].beats_average else rows[0]
    features = pooled_features(maps, chosen.pooling, neck)
    classifier = RidgeFolds(features, targets, torch.zeros_like(folds), num_classes).classifier()
    return ProbeResult(tuple(rows), chosen, classifier, len(targets), len(groups.unique()), num_folds, neck)


def checked_groups(
    targets: Tensor, groups: Tensor | None, num_folds: int, class_names: Sequence[str] | None = None
) -> Tensor:
    """The groups, or one for each image; raises if they cannot be cross-validated."""
    if targets.is_floating_point() or int(targets.min()) < 0:
        raise ValueError(f'targets must be class indices from 0 on, got {targets.dtype} from {targets.min()}')
    if groups is None:
        groups = torch.arange(len(targets), device=targets.device)
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
    """(n, C) features of maps (n, C, H, W) or tokens (n, N, C), after the network's neck."""
    pooled = torch.cat([pooling(chunk.float()) for chunk in as_sets(maps).split(_CHUNK)])
    return pooled if neck is None else neck(pooled)


def balanced_mean(values: Tensor, targets: Tensor) -> float:
    """The mean over the classes of the means of `values` (n,) over their images: of right predictions, the score."""
    return float(class_weights(targets).to(values) @ values)


def balanced_difference(ours: Tensor, theirs: Tensor, targets: Tensor, groups: Tensor) -> tuple[float, float]:
    """Difference of two balanced means over the same images, and its standard error over the groups.

    s² = G / (G − 1) Σ_g (Σ_{i ∈ g} w_i (d_i − mean of d over the class of i))²,   d the paired difference
    """
    weights = class_weights(targets).double()
    difference = (ours - theirs).double()
    share = weights * difference
    means = torch.zeros(int(targets.max()) + 1, dtype=torch.float64, device=targets.device)
    means = means.index_add(0, targets, share) / means.index_add(0, targets, weights).clamp_min(1e-12)
    _, members = groups.unique(return_inverse=True)
    sums = share.new_zeros(int(members.max()) + 1).index_add(0, members, weights * (difference - means[targets]))
    error = (sums.square().sum() * len(sums) / max(len(sums) - 1, 1)).sqrt()
    return float(share.sum()), float(error)


class Judged(NamedTuple):
    """How classifiers do on images that they have not seen."""

    right: Tensor  # (…, n) 1.0 where the prediction is right
    error: Tensor  # (…, n) squared error of the logits

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor) -> 'Judged':
        wanted = F.one_hot(targets, logits.shape[1])
        return cls((logits.argmax(1) == targets).float(), (logits - wanted).square().sum(1))


def make_row(name: str, pooling: Pooling, judged: Judged, average: Judged, targets: Tensor, groups: Tensor) -> ProbeRow:
    """The row of a pooling, judged on the same images as average pooling."""
    score, error = (balanced_mean(values, targets) for values in judged)
    differences = [balanced_difference(*values, targets, groups) for values in zip(judged, average, strict=True)]
    return ProbeRow(name, pooling, score, differences[0], error, differences[1])


def _judge(ridge: RidgeFolds, targets: Tensor) -> Judged:
    """(folds, n): row k, image i by the classifier that has seen neither fold k nor the fold of i."""
    judged = Judged(*torch.empty(2, ridge.num_folds, len(targets), device=targets.device))
    for pair in combinations_with_replacement(range(ridge.num_folds), 2):
        images, logits = ridge.held_out(*pair)
        known = Judged.of(logits, targets[images])
        for k, own in (pair, pair[::-1]):
            mine = ridge.folds[images] == own
            for values, new in zip(judged, known, strict=True):
                values[k, images[mine]] = new[mine]
    return judged


class _Trials(NamedTuple):
    """All poolings as judged by `_judge`, and the choice among some of them."""

    judged: Sequence[Judged]
    targets: Tensor
    folds: Tensor

    def of_own_fold(self, place: int) -> Judged:
        """(n,) how the pooling at `place` does on each image, by a classifier that has not seen its fold."""
        return Judged(*(values.gather(0, self.folds[None]).squeeze(0) for values in self.judged[place]))

    def judged_as_chosen(self, places: Sequence[int]) -> Judged:
        """(n,) how the pooling does that is chosen, for each fold, by the images of the other folds."""
        judged = self.of_own_fold(places[0])
        for k in range(int(self.folds.max()) + 1 if len(places) > 1 else 0):
            best = self.of_own_fold(self.choice(places, without=k))
            judged = Judged(*(torch.where(self.folds == k, *values) for values in zip(best, judged, strict=True)))
        return judged

    def choice(self, places: Sequence[int], without: int | None = None) -> int:
        """The place of the pooling with the least squared error on all images, or as if one fold did not exist."""

        def error(place: int) -> float:
            if without is None:
                return balanced_mean(self.of_own_fold(place).error, self.targets)
            images = self.folds != without
            return balanced_mean(self.judged[place].error[without, images], self.targets[images])

        return min(places, key=error)
