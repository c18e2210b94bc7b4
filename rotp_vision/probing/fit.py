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

from rotp_vision.probing.poolings import Pooling, all_poolings
from rotp_vision.probing.ridge import Linear, RidgeFolds, assign_folds, class_weights

Neck = Callable[[Tensor], Tensor]
_CHUNK = 32  # images pooled at a time, so that their maps stay in the processor's cache


@dataclass(frozen=True)
class ProbeRow:
    """One kind of pooling as judged.

    Attributes:
        name: 'average', 'max', 'average + max', 'GeM', 'softmax' or 'ROTP'.
        pooling: with the parameters that were chosen on all images.
        score: balanced accuracy, the mean over the classes of the share of right predictions. Each image is judged by
            a classifier, and with parameters, that were found without its fold.
        difference: of the score to average pooling's on the same images, and its standard error over the groups.
    """

    name: str
    pooling: Pooling
    score: float
    difference: tuple[float, float]

    def shown_difference(self) -> str:
        return '{:+.1f} ± {:.1f}'.format(*(100 * value for value in self.difference))


@dataclass(frozen=True)
class ProbeResult:
    """What `fit_probe` found: `print` it, see its rows, or let it classify.

    Attributes:
        rows: every kind of pooling, average first, ours last.
        chosen: the row of ROTP if it beats average pooling by a standard error, otherwise that of average pooling.
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
        average, ours = self.rows[0], self.rows[-1]
        points = f'{ours.shown_difference()} points'
        if self.chosen is average:
            return f'average pooling is chosen: ROTP does not beat it by a standard error ({points})'
        text = f'ROTP is chosen ({ours.pooling.setting}): it beats average pooling by {points}'
        better = [f'{row.name} ({100 * row.score:.1f})' for row in self.rows if row.score > ours.score]
        return text + (f'; peers with a higher score: {", ".join(better)}' if better else '')

    def table(self) -> str:
        """The rows as a Markdown table."""
        lines = ['| pooling | parameters | balanced accuracy % | − average |', '| --- | --- | --- | --- |']
        for row in self.rows:
            name = row.name + (' (chosen)' if row is self.chosen else '')
            difference = '' if row is self.rows[0] else row.shown_difference()
            lines.append(f'| {name} | {row.pooling.setting} | {100 * row.score:.1f} | {difference} |')
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

    Each pooling of a list (average, max, their mean, GeM, softmax, ROTP over temperature and norm prior) gets a ridge
    classifier on its standardized features, in closed form, in which every class weighs the same. The score is
    balanced accuracy by cross-validation over the groups. A kind of pooling with parameters is scored with those that
    do best on the other folds, by classifiers that have seen neither; for it the folds are left out in pairs. ROTP is
    chosen, with the parameters that do best on all folds, if it beats average pooling by a standard error.

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
        ['average', 'max', 'average + max', 'GeM', 'softmax', 'ROTP']
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
    trials = _Trials(judged, targets, groups, folds)
    families = dict.fromkeys(pooling.family for pooling in poolings)
    rows = []
    for name in families:
        mine = [place for place, pooling in enumerate(poolings) if pooling.family == name]
        right = trials.right_of_choice(mine)
        difference = balanced_difference(right, trials.right(0), targets, groups)
        rows.append(ProbeRow(name, poolings[trials.choice(mine)], balanced_accuracy(right, targets), difference))
    ours = rows[-1]
    chosen = ours if ours.difference[0] > ours.difference[1] else rows[0]
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


@torch.no_grad()
def pooled_features(maps: Tensor, pooling: Pooling, neck: Neck | None) -> Tensor:
    """(n, C) features of maps (n, C, H, W) or tokens (n, N, C), after the network's neck."""
    sets = maps.flatten(2) if maps.dim() == 4 else maps.transpose(1, 2)  # (n, C, N)
    pooled = torch.cat([pooling(chunk.float()) for chunk in sets.split(_CHUNK)])
    return pooled if neck is None else neck(pooled)


def balanced_accuracy(right: Tensor, targets: Tensor) -> float:
    """The mean over the classes of the share of right predictions `right` (n,)."""
    return float(class_weights(targets).to(right) @ right)


def balanced_difference(ours: Tensor, theirs: Tensor, targets: Tensor, groups: Tensor) -> tuple[float, float]:
    """Difference of two balanced accuracies on the same images, and its standard error over the groups.

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


class _Judged(NamedTuple):
    """How the classifiers of one pooling do: row k, image i by the one that has seen neither fold k nor that of i."""

    right: Tensor  # (folds, n) 1.0 where the prediction is right
    error: Tensor  # (folds, n) squared error of the logits


def _judge(ridge: RidgeFolds, targets: Tensor) -> _Judged:
    right, error = torch.empty(2, ridge.num_folds, len(targets), device=targets.device)
    for pair in combinations_with_replacement(range(ridge.num_folds), 2):
        images, logits = ridge.held_out(*pair)
        wanted = targets[images]
        is_right = (logits.argmax(1) == wanted).float()
        errors = (logits - F.one_hot(wanted, logits.shape[1])).square().sum(1)
        for k, own in (pair, pair[::-1]):
            mine = ridge.folds[images] == own
            right[k, images[mine]], error[k, images[mine]] = is_right[mine], errors[mine]
    return _Judged(right, error)


class _Trials(NamedTuple):
    """All poolings as judged, and the choice among some of them."""

    judged: Sequence[_Judged]
    targets: Tensor
    groups: Tensor
    folds: Tensor

    def right(self, place: int) -> Tensor:
        """(n,) right predictions of the pooling at `place` on folds that its classifiers have not seen."""
        return self.judged[place].right.gather(0, self.folds[None]).squeeze(0)

    def right_of_choice(self, places: Sequence[int]) -> Tensor:
        """(n,) right predictions of the pooling that is chosen, for each fold, by the images of the other folds."""
        right = self.right(places[0])
        for k in range(int(self.folds.max()) + 1 if len(places) > 1 else 0):
            right = torch.where(self.folds == k, self.right(self.choice(places, without=k)), right)
        return right

    def choice(self, places: Sequence[int], without: int | None = None) -> int:
        """The place of the best pooling, by all images or by those of the other folds as if one did not exist.

        Of those whose accuracy is not a standard error below the best, it is the one with the least squared error,
        which depends less on single images.
        """
        if without is None:
            rights = {place: self.right(place) for place in places}
            errors = {place: self.judged[place].error.gather(0, self.folds[None]).squeeze(0) for place in places}
            images = slice(None)
        else:
            images = self.folds != without
            rights = {place: self.judged[place].right[without, images] for place in places}
            errors = {place: self.judged[place].error[without, images] for place in places}
        targets, groups = self.targets[images], self.groups[images]
        best = max(places, key=lambda place: balanced_accuracy(rights[place], targets))

        def is_near(place: int) -> bool:
            difference, error = balanced_difference(rights[best], rights[place], targets, groups)
            return difference <= error

        return min(filter(is_near, places), key=lambda place: balanced_accuracy(errors[place], targets))
