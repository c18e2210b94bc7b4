"""New classes on a frozen network: what `fit_probe` chooses from few labels, judged on held-out groups.

    python -m benchmarks.probe --data DIRECTORY

For each set of images the groups are dealt to five parts. Each part is judged once, by a fit on a few labels a class
from the other four, so that every image is judged exactly once. Every pooling gets the same classifier, with the
parameters that cross-validation on the labelled images chooses.
"""

import argparse
import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.real_data import NETWORKS, Network, add_data_arguments, build, column_of, groups_of, maps_of
from benchmarks.tables import to_markdown
from rotp_vision.probing import fit_probe
from rotp_vision.probing.fit import balanced_difference, balanced_mean, pooled_features
from rotp_vision.probing.ridge import RidgeFolds, assign_folds

PARTS = 5
CHOICE = "probe's choice"


class Task(NamedTuple):
    """A set of images, and how many of each class are labelled."""

    images: str
    labels: int


TASKS = [Task('foda15', 20), Task('magnetic_tile6', 20), Task('cub25', 15)]


def load(network: Network, images: str, args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Maps, targets and groups of all images of a set, in the order of its file."""
    maps, targets = maps_of(network, build(network, args.data), args.data, args.cache, args.limit, images)
    names = column_of(network._replace(images=images), args.data, 'group', args.limit)
    # `real_data` shuffles the images; the figures were made in the order of the file.
    shuffled = np.random.default_rng(0).permutation(len(maps)) if args.limit is None else np.arange(len(maps))
    order = shuffled.argsort()
    maps, targets = maps[order], targets[order]
    return maps, targets, groups_of(images, np.array(names)[order], maps.float().mean((2, 3)))


def labelled(targets: Tensor, allowed: Tensor, labels: int, seed: int) -> Tensor:
    """Indices of `labels` images of each class, drawn from those allowed."""
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for target in targets.unique():
        mine = ((targets == target) & allowed).nonzero().squeeze(1)
        chosen.append(mine[torch.randperm(len(mine), generator=generator)[:labels]])
    return torch.cat(chosen)


def judge(maps: Tensor, targets: Tensor, groups: Tensor, labels: int) -> tuple[dict[str, Tensor], list[str]]:
    """(n,) right predictions by pooling, each image judged in the part that was held out, and what was chosen."""
    parts = assign_folds(targets, groups, PARTS)
    num_classes = int(targets.max()) + 1
    right: dict[str, Tensor] = {}
    chosen = []
    for part in range(PARTS):
        fitted = labelled(targets, parts != part, labels, seed=part)
        others = (parts == part).nonzero().squeeze(1)
        result = fit_probe(maps[fitted], targets[fitted], groups[fitted])
        predictions = {CHOICE: result.predict(maps[others])}
        for row in result.rows:
            one_fold = torch.zeros_like(fitted)
            features = pooled_features(maps[fitted], row.pooling, None)
            classifier = RidgeFolds(features, targets[fitted], one_fold, num_classes).classifier()
            predictions[row.name] = classifier(pooled_features(maps[others], row.pooling, None)).argmax(1)
        for name, predicted in predictions.items():
            right.setdefault(name, torch.empty(len(targets)))[others] = (predicted == targets[others]).float()
        chosen.append(f'{result.chosen.name} {result.chosen.setting}'.strip())
    return right, chosen


def report(right: dict[str, Tensor], targets: Tensor, groups: Tensor, chosen: list[str]) -> str:
    names = [*(key for key in right if key != CHOICE), CHOICE]
    best = max(names[:-1], key=lambda key: balanced_mean(right[key], targets))
    rows = []
    for key in names:
        row = {'pooling': key, 'balanced accuracy %': f'{100 * balanced_mean(right[key], targets):.1f}'}
        for column, other in (('− average', 'average'), ('− best', best)):
            difference = balanced_difference(right[key], right[other], targets, groups)
            row[column] = '' if key == other else '{:+.1f} ± {:.1f}'.format(*(100 * value for value in difference))
        rows.append(row)
    return f'{to_markdown(rows)}\nChosen in the five parts: {"; ".join(chosen)}.'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_arguments(parser)
    networks = {network.builder: network for network in NETWORKS if network.size == 224}
    parser.add_argument('--networks', nargs='+', choices=list(networks), default=[NETWORKS[0].builder])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for network in map(networks.__getitem__, args.networks):
        for task in TASKS:
            maps, targets, groups = load(network, task.images, args)
            right, chosen = judge(maps, targets, groups, task.labels)
            print(f'\n### {network.name}, {task.images}, {task.labels} labels a class\n')
            print(report(right, targets, groups, chosen), flush=True)
        maps, targets, groups = load(network, TASKS[0].images, args)
        start = time.process_time()
        result = fit_probe(maps, targets, groups)
        minutes = (time.process_time() - start) / 60
        print(f'\nAll {result.num_images} images of {TASKS[0].images}, {minutes:.1f} minutes of one core:\n\n{result}')


if __name__ == '__main__':
    main()
