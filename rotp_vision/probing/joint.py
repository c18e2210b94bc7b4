"""Training the pooling and the classifier of a probe together, starting from the closed form."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from rotp_vision.layers import ROTPool
from rotp_vision.probing.fit import Judged, Neck, ProbeResult, as_sets, balanced_difference, make_row, pooled_features
from rotp_vision.probing.poolings import OURS, Pooling
from rotp_vision.probing.ridge import Linear, RidgeFolds, assign_folds, class_weights
from rotp_vision.probing.temperature import fit_temperature

_EPOCHS = 20
_BATCH = 64
_POOL_RATE = 0.05  # of weights whose steps are relative changes
_CLASSIFIER_RATE = 2e-3
_DECAY = 0.05  # of the classifier
_EPSILON = 1e-5  # of the normalization


def train_jointly(
    result: ProbeResult, maps: Tensor, targets: Tensor, groups: Tensor | None = None, *, progress: bool = False
) -> ProbeResult:
    """The result with ROTP and its classifier trained together by gradients, if that beats the closed form.

    The pooling starts with the best parameters of ROTP. Its features pass a batch norm without scale and shift, which
    is folded into the classifier at the end. One training for each fold is judged on the images of that fold. A
    training on all images is chosen if those trainings beat the earlier choice by a standard error.

    Args:
        result: the result of `fit_probe` on the same images.
        maps, targets, groups: as in `fit_probe`.
        progress: whether to show a progress bar.

    Returns:
        The result with one more row, chosen or not.
    """
    groups = torch.arange(len(targets)) if groups is None else groups
    start = next(row for row in result.rows if row.name == OURS).pooling
    num_classes = len(result.classifier.bias)
    folds = assign_folds(targets, groups, result.num_folds)
    closed = [
        RidgeFolds(pooled_features(maps, row.pooling, result.neck), targets, folds, num_classes)
        for row in (result.rows[0], result.chosen)
    ]
    average, before = (Judged.of(ridge.out_of_fold(), targets) for ridge in closed)
    outputs = torch.empty(len(targets), num_classes)
    with tqdm(None, 'training', (result.num_folds + 1) * _EPOCHS, unit='epoch', disable=not progress) as bar:
        for k in range(result.num_folds):
            learned, judged = (folds != k).nonzero().squeeze(1), (folds == k).nonzero().squeeze(1)
            pooling, classifier = _train(start, maps[learned], targets[learned], num_classes, result.neck, bar)
            outputs[judged] = classifier(pooled_features(maps[judged], pooling, result.neck))
        pooling, classifier = _train(start, maps, targets, num_classes, result.neck, bar)
    trained = Judged.of(outputs.softmax(1), targets)
    row = make_row(pooling.family, pooling, trained, average, targets, groups)
    result = replace(result, rows=(*result.rows, row))
    difference, error = balanced_difference(trained.right, before.right, targets, groups)
    if difference <= error:
        return result
    temperature = fit_temperature(outputs, targets, folds)
    return replace(result, chosen=row, classifier=classifier.scaled(temperature.factor), temperature=temperature)


def _train(
    start: Pooling, maps: Tensor, targets: Tensor, num_classes: int, neck: Neck | None, bar: tqdm
) -> tuple[Pooling, Linear]:
    """A pooling and a classifier, trained together by cross-entropy with equal weight for every class."""
    assert start.options is not None
    assert isinstance(start.pool, ROTPool)
    pool = ROTPool(start.options)
    pool.set_weights(**start.pool.named_weights())
    sets = as_sets(maps)

    def features(images: Tensor) -> Tensor:
        pooled = pool.pool_sets(sets[images].float())
        return pooled if neck is None else neck(pooled)

    with torch.no_grad():
        width = features(torch.arange(1)).shape[1]
    norm = nn.BatchNorm1d(width, eps=_EPSILON, affine=False, track_running_stats=False)
    layer = nn.Linear(width, num_classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.AdamW(
        [
            {'params': list(pool.parameters()), 'lr': _POOL_RATE, 'weight_decay': 0.0},
            {'params': list(layer.parameters()), 'lr': _CLASSIFIER_RATE, 'weight_decay': _DECAY},
        ]
    )
    generator = torch.Generator().manual_seed(0)
    size = min(_BATCH, len(targets))
    orders = [torch.randperm(len(targets), generator=generator) for _ in range(_EPOCHS)]
    epochs = [[batch for batch in order.split(size) if len(batch) > 1] for order in orders]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, sum(map(len, epochs)))
    weights = class_weights(targets) * len(targets)
    for batches in epochs:
        for batch in batches:
            logits = layer(norm(features(batch)))
            losses = F.cross_entropy(logits, targets[batch], reduction='none')
            optimizer.zero_grad()
            (losses * weights[batch]).mean().backward()
            optimizer.step()
            schedule.step()
        bar.update()
    pool.requires_grad_(False)
    setting = ', '.join(f'{name} {float(value.mean()):.3g}' for name, value in pool.named_weights().items())
    pooling = Pooling('ROTP, trained', setting, pool, start.options)
    x = pooled_features(maps, pooling, neck)
    weight = layer.weight.detach() / (x.var(0, correction=0) + _EPSILON).sqrt()
    return pooling, Linear(weight, layer.bias.detach() - weight @ x.mean(0))
