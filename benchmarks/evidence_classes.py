"""New classes on frozen maps, part of evidence.py: ridge classifiers by pooling, and two poolings that are trained."""

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from timm.layers import SimPool2d
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import evidence_report
from benchmarks.evidence_poolings import ALONE, AVERAGE, AVERAGE_GAIN, CHUNK, INSTALLED, OURS, PEERS, Maps, pooled
from benchmarks.real_data import Network, column_of, groups_of, maps_of
from rotp_vision.probing import ProbeResult, fit_probe
from rotp_vision.probing.fit import balanced_mean, pooled_features
from rotp_vision.probing.ridge import RidgeFolds, assign_folds

DATASETS = ('foda15', 'magnetic_tile6', 'cub25')
LABELS = (5, 20, 60)  # of each class; all images of a class that has fewer
SPLITS = (31, 32, 33)  # seeds; 0 to 2 and 21 to 23 in earlier runs
TRAINED_LABELS = 20  # the trained poolings take minutes, so they are run with one number of labels
FOLDS = 3  # one of them is judged
STEPS, BATCH, LR = 60, 32, 1e-3  # of the trained poolings


class ABMIL(nn.Module):
    """Attention-based multiple instance pooling (Ilse et al., 2018): Σ_n softmax_n(wᵀ tanh(V x_n)) x_n."""

    def __init__(self, num_features: int, width: int = 128):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(num_features, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        instances = x.flatten(2).transpose(1, 2)  # (B, N, C)
        return (self.score(instances).softmax(1) * instances).sum(1)


TRAINED: dict[str, Callable[[int], nn.Module]] = {'ABMIL (trained)': ABMIL, 'SimPool (trained)': SimPool2d}


def draw(targets: Tensor, groups: Tensor, labels: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of `labels` images of each class, from as many groups as possible, and of all images of other groups."""
    folds = assign_folds(targets, groups, FOLDS, seed)
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for label in targets.unique().tolist():
        mine = ((targets == label) & (folds != 0)).nonzero().squeeze(1)
        mine = mine[torch.randperm(len(mine), generator=generator)]
        turn = torch.empty(len(mine))  # the number of the image within its group, so that groups take turns
        for group in groups[mine].unique().tolist():
            own = groups[mine] == group
            turn[own] = torch.arange(int(own.sum()), dtype=turn.dtype)
        chosen.append(mine[turn.argsort(stable=True)][:labels])
    return torch.cat(chosen), (folds == 0).nonzero().squeeze(1)


def run(network: Network, model: nn.Module, args: argparse.Namespace, kept: Callable) -> list[evidence_report.Setting]:
    settings = []
    for dataset in args.classes:
        path = args.output / 'judged' / f'{network.builder}-{dataset}.pt'
        found = kept(path, args.finished_only, lambda: measure(network, model, args, dataset))  # noqa: B023
        if found is not None:
            settings += [evidence_report.of_classes(network.name, dataset, found, labels) for labels in found['labels']]
    return settings


def measure(network: Network, model: nn.Module, args: argparse.Namespace, dataset: str) -> dict[str, Any]:
    """Right predictions of every pooling on held-out groups, by number of labels and split."""
    maps, targets = maps_of(network, model, args.data, args.cache, args.limit, dataset)
    features = _pool_all(maps, targets)
    names = column_of(network._replace(images=dataset), args.data, 'group', args.limit)
    groups = groups_of(dataset, names, features[AVERAGE, 0])
    most = int(targets.bincount().min()) * (FOLDS - 1) // FOLDS
    numbers = [labels for labels in LABELS if labels <= most or labels == min(n for n in LABELS if n >= min(most, 60))]
    runs = []
    for labels in numbers:
        for seed in SPLITS:
            fit, judged = draw(targets, groups, labels, seed)
            rights, said = {}, {}
            for name in PEERS:
                rights[name], said[name] = _judge_peer(name, features, targets, groups, fit, judged)
            result = fit_probe(maps[fit], targets[fit], groups[fit])
            for name, chosen in (
                (OURS, result),
                (INSTALLED, result),
                (ALONE, _without_softmax(result, maps[fit], targets[fit])),
            ):
                predicted = torch.cat([chosen.predict(maps[part]) for part in judged.split(CHUNK)])
                rights[name] = (predicted == targets[judged]).float()
                said[name] = f'{chosen.chosen.pooling.family} {chosen.chosen.pooling.setting}'.strip()
            for name, make in TRAINED.items() if labels == TRAINED_LABELS else ():
                rights[name] = _train(make, maps, targets, fit, judged, seed=len(runs))
                said[name] = ''
            runs.append({'labels': labels, 'fit': fit, 'judged': judged, 'right': rights, 'setting': said})
            shown = ', '.join(f'{n} {100 * balanced_mean(r, targets[judged]):.1f}' for n, r in rights.items())
            print(f'{network.name}, {dataset}, {labels} labels, split {seed}: {shown}; ours: {said[OURS]}', flush=True)
    return {'labels': numbers, 'runs': runs, 'targets': targets, 'groups': groups}


def _without_softmax(result: ProbeResult, maps: Tensor, targets: Tensor) -> ProbeResult:
    """The result if ROT pools that are softmax or max pooling are excluded: Sinkhorn's pool or average pooling."""
    row = next(row for row in result.rows if row.name == 'Sinkhorn')
    chosen = row if row.beats_average else result.rows[0]
    features = pooled_features(maps, chosen.pooling, None)
    ridge = RidgeFolds(features, targets, torch.zeros_like(targets), int(targets.max()) + 1)
    return replace(result, chosen=chosen, classifier=ridge.classifier())


def _pool_all(maps: Tensor, targets: Tensor) -> dict[tuple[str, int], Tensor]:
    """(images, C) features by every setting of every peer. A gain has no effect on the ridge classifiers."""
    pools = {
        (name, number): pool
        for name, settings in PEERS.items()
        if name != AVERAGE_GAIN
        for number, (_, pool) in enumerate(settings)
    }
    return pooled(pools, Maps([maps], targets), torch.arange(len(maps)))


def _judge_peer(
    name: str, features: dict[tuple[str, int], Tensor], targets: Tensor, groups: Tensor, fit: Tensor, judged: Tensor
) -> tuple[Tensor, str]:
    """Right predictions of a ridge classifier with the setting that is best in cross-validation, and that setting."""
    family = AVERAGE if name == AVERAGE_GAIN else name
    num_classes = int(targets.max()) + 1
    folds = assign_folds(targets[fit], groups[fit], 5)

    def score(number: int) -> float:
        ridge = RidgeFolds(features[family, number][fit], targets[fit], folds, num_classes)
        right = torch.empty(len(fit))
        for k in range(ridge.num_folds):
            images, logits = ridge.held_out(k)
            right[images] = (logits.argmax(1) == targets[fit][images]).float()
        return balanced_mean(right, targets[fit])

    numbers = range(len(PEERS[family]))
    best = max(numbers, key=score) if len(numbers) > 1 else 0
    chosen = features[family, best]
    classifier = RidgeFolds(chosen[fit], targets[fit], torch.zeros_like(fit), num_classes).classifier()
    predicted = classifier(chosen[judged]).argmax(1)
    return (predicted == targets[judged]).float(), PEERS[family][best][0]


def _train(
    make: Callable[[int], nn.Module], maps: Tensor, targets: Tensor, fit: Tensor, judged: Tensor, seed: int
) -> Tensor:
    """Right predictions of a pooling trained with its classifier: AdamW, cosine schedule, the same budget for each."""
    torch.manual_seed(seed)
    scale = 1 / float(maps[fit].float().std())
    width, num_classes = maps.shape[1], int(targets.max()) + 1
    network = nn.Sequential(make(width), nn.BatchNorm1d(width, affine=False), nn.Linear(width, num_classes))
    optimizer = torch.optim.AdamW(network.parameters(), LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        batch = fit[torch.randint(len(fit), (BATCH,), generator=generator)]
        loss = F.cross_entropy(network(scale * maps[batch].float()), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    network = copy.copy(network).eval()
    with torch.inference_mode():
        predicted = [network(scale * maps[part].float()).argmax(1) for part in judged.split(CHUNK)]
    return (torch.cat(predicted) == targets[judged]).float()
