"""Retrieval scores of feature vectors: every image searches all others except those of its own group."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rotp_vision.probing.ridge import assign_folds

NEIGHBOURS = 10  # that vote in kNN classification
_BLOCK = 2**24  # similarities at a time


class Retrieval(NamedTuple):
    """Scores of each query, (n,) between 0 and 1; NaN for an image whose class has no image in another group.

    Attributes:
        recall_1: whether the nearest image has the query's class.
        recall_5: whether one of the five nearest has.
        average_precision: mean over the images of its class of the precision among all that are as near.
        knn: whether the class with most of the ten nearest is the query's; ties go to the nearer ones.
    """

    recall_1: Tensor
    recall_5: Tensor
    average_precision: Tensor
    knn: Tensor


METRICS = dict(zip(('R@1', 'R@5', 'mAP', 'kNN'), Retrieval._fields, strict=True))


def retrieval(features: Tensor, labels: Tensor, groups: Tensor | None = None) -> Retrieval:
    """Scores of every image as a query among all images of other groups, by cosine similarity.

    Similarities are computed for some queries at a time, so that memory grows with n, not with n².

    Args:
        features: (n, D), L2-normalised.
        labels: (n,) class indices.
        groups: (n,) integers, equal for images that must not find each other (frames of a video, photos of one
            object); None if each image is its own group.

    Example:
        >>> import torch
        >>> from rotp_vision.embedding.scores import retrieval
        >>> features = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
        >>> retrieval(features, torch.tensor([0, 0, 1])).recall_1
        tensor([1., 1., nan])
    """
    groups = torch.arange(len(labels)) if groups is None else groups
    device, count = features.device, len(features)
    labels, groups = labels.to(device), groups.to(device)
    ranks = torch.arange(1, count + 1, device=device)
    blocks = []
    for queries in torch.arange(count, device=device).split(max(1, _BLOCK // count)):
        similarity = features[queries] @ features.T
        similarity.masked_fill_(groups[queries, None] == groups, -torch.inf)
        similarity, order = similarity.sort(stable=True, dim=1, descending=True)
        other = similarity > -torch.inf
        found = labels[order]
        right = (found == labels[queries, None]) & other
        precision = (right.cumsum(1) / ranks * right).sum(1) / right.sum(1)
        votes = features.new_zeros(len(queries), int(labels.max()) + 1)
        weights = other[:, :NEIGHBOURS] * (1 + 1e-3 / ranks[:NEIGHBOURS])  # the nearer of equal classes wins
        votes.scatter_add_(1, found[:, :NEIGHBOURS], weights.to(votes.dtype))
        scores = [right[:, 0], right[:, :5].any(1), precision, votes.argmax(1) == labels[queries]]
        blocks.append(torch.stack([score.float() for score in scores]).masked_fill(~right.any(1), torch.nan))
    return Retrieval(*torch.cat(blocks, 1).cpu())


def mean_over_groups(values: Tensor, groups: Tensor | None = None) -> tuple[float, float]:
    """The mean of the values (n,) that are not NaN, and its standard error over the groups.

    s² = G / (G − 1) Σ_g (Σ_{i ∈ g} (v_i − mean) / n)²
    """
    known = ~values.isnan()
    groups = torch.arange(len(values)) if groups is None else groups
    _, members = groups[known].unique(return_inverse=True)
    values = values[known].double()
    if not len(values):
        return float('nan'), float('nan')
    share = (values - values.mean()) / len(values)
    sums = share.new_zeros(int(members.max()) + 1).index_add(0, members, share)
    return float(values.mean()), float((sums.square().sum() * len(sums) / (len(sums) - 1)).sqrt())


class Choice(NamedTuple):
    """A pooling chosen by retrieval scores.

    Attributes:
        name: the pooling, which is the preset unless another is clearly better.
        best: the pooling with the highest score on all images.
        gain: score of the poolings chosen on other groups minus that of the preset, on the same queries.
        error: its standard error over the groups.
    """

    name: str
    best: str
    gain: float
    error: float


def check_groups(labels: Tensor, groups: Tensor, num_folds: int = 4) -> None:
    """Raise unless every class has images of as many groups as there are folds."""
    few = [label for label in labels.unique().tolist() if len(groups[labels == label].unique()) < num_folds]
    if few:
        raise ValueError(f'every class needs images of at least {num_folds} groups, but {len(few)} classes have fewer')


def choose(scores: Mapping[str, Tensor], preset: str, labels: Tensor, groups: Tensor, num_folds: int = 4) -> Choice:
    """Choose a pooling by the scores of each query, judged on queries of other groups than it was chosen on.

    The groups are dealt to folds. For each fold the pooling with the highest mean score on the queries of the other
    folds is judged by the queries of this one. The best pooling replaces the preset if the poolings that were chosen
    so are better than it by two standard errors.

    Args:
        scores: (n,) scores of each query, by pooling, as `retrieval` gives them.
        preset: the pooling that is kept otherwise.
        labels: (n,) class indices.
        groups: (n,) integers; a class must have images of `num_folds` groups.
        num_folds: of the cross-validation.
    """
    names = list(scores)
    check_groups(labels, groups, num_folds)
    folds = assign_folds(labels, groups, num_folds)
    stacked = torch.stack([scores[name] for name in names]).double()  # (poolings, n)
    judged = torch.full_like(stacked[0], torch.nan)
    for fold in range(num_folds):
        inside = folds == fold
        judged[inside] = stacked[int(stacked[:, ~inside].nanmean(1).argmax()), inside]
    gain, error = mean_over_groups(judged - scores[preset], groups)
    best = names[int(stacked.nanmean(1).argmax())]
    return Choice(best if gain > 2 * error else preset, best, gain, error)
