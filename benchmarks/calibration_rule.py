"""How well a rule that chooses a pooling from 500 images does on the others: rules of `calibrate`, compared.

    python -m benchmarks.calibration_rule --data DIRECTORY --networks efficientnet_lite0_in1k --classes 0
    python -m benchmarks.calibration_rule --data DIRECTORY --networks resnet50_v1_in1k --classes 1

Protocol, written down before any rule was run:

- **Choosing the rule**: EfficientNet-Lite0 on the ImageNet photos of even classes (plain, 384 px, and small objects:
  half the side on another photo, blurred or sharp), and the Tiny-ImageNet ResNet-18 (plain). Any number of looks is
  allowed.
- **The run that counts**: ResNet-50 on the photos of odd classes, the same tasks, once, after the rule is committed.
- **Draws**: 40 random draws of 500 images to fit on; all others judge. Draws overlap, so the standard errors of their
  means are those of the images, not those of 40 independent experiments.
- **Candidates**: average pooling; ROTP on a grid of feature scale, temperature and norm power; GeM and the mean
  weighted by the norm prior, on a grid of powers; the mean and the maximum. All have a gain that is fitted with them.
- **Rules**, each of which sees the 500 images alone:
  *halves* (0.2): the least loss on one half, made milder within a standard error, judged on the other half, and back;
  accepted if the loss falls by a standard error + 0.001 and top-1 does not fall by more than one.
  *cross-fit*: losses held out by 10 random splits; settings that lower a smoothed top-1, the logistic of the margin
  of the right logit over the best wrong one, are discarded; of the rest the mildest within a standard error of the
  least loss.
  *two errors*: the same, and the mean stays unless the smoothed top-1 rises by two standard errors.
  *smoothed top-1*: the mildest within a standard error of the highest smoothed top-1, if that rises by two.
  *lower bound*: the highest smoothed top-1 minus two standard errors of its difference to the mean, if positive.
- **What is read**: on the others, top-1 minus that of average pooling and of GeM + gain, and cross-entropy minus that
  of average + gain; how often the promised difference is within two standard errors of what the others show.
- **Goals** of the run that counts: plain photos: mean top-1 at least −0.2 points from average pooling, no draw below
  −0.8, mean loss no higher than average + gain; small objects: at least 3 points over GeM + gain; promises kept in 90
  % of draws.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import rotp_vision
from benchmarks.evidence_poolings import CHUNK, FromMaps, Maps
from benchmarks.real_data import NETWORKS, Network, add_data_arguments, build, maps_of
from rotp_vision.calibration.fit import Search
from rotp_vision.calibration.report import MEAN, Setting
from rotp_vision.calibration.rule import ERRORS, MIN_GAIN, best_of_family, choose, mildest
from rotp_vision.calibration.scores import SPLITS, Curves, cross_fit, exceeds, promised_difference, splits
from rotp_vision.files import replacing
from rotp_vision.surgery.head import Head, collect, evaluating, find_global_pool
from rotp_vision.tables import markdown_table

Rule = Callable[[Curves, Tensor], int]
TASKS = ('plain', '384', 'half-blurred', 'half-sharp')
SHIFTED = 1200  # images of a task with shifted images, before those of other classes are left out
DRAWS, FIT = 40, 500


def tabulate(network: Network, task: str, args: argparse.Namespace) -> tuple[list[Setting], Curves]:
    """The candidates of `calibrate` and their curves on all images of the classes, cached."""
    path = args.output / f'{network.builder}-{task}-{args.classes}.pt'
    if not path.exists():
        model = rotp_vision.convert(build(network, args.data).requires_grad_(False))
        least = min(filter(None, (None if task == 'plain' else SHIFTED, args.limit)), default=None)
        maps, labels = maps_of(network, model, args.data, args.cache, least, task)
        kept = torch.arange(len(labels))
        if network.images == 'in1k_dev':
            kept = kept[labels % 2 == args.classes]
        one = Maps([maps], labels)
        batches = ((one.sets(part).unsqueeze(3), labels[part]) for part in kept.split(CHUNK))
        reader = FromMaps(model).eval()
        _, pool = find_global_pool(reader)
        with evaluating(reader):
            collected = collect(reader, pool, batches, len(kept))
            search = Search(collected, Head(reader, pool, collected), pool, 0.0)
            families = search.families(('raw', 'rms', 'log'), ('uniform', 'norm'))
            settings = [setting for grid in families.values() for setting in grid]
            curves = search.stacked(settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            torch.save({'settings': [tuple(setting) for setting in settings], 'curves': tuple(curves)}, temporary)
    found = torch.load(path, weights_only=True)
    return [Setting(*values) for values in found['settings']], Curves(*found['curves'])


def halves(curves: Curves, images: Tensor) -> int:
    """The rule of 0.2, without its local search."""
    loss, right = torch.empty(2, len(images)), torch.empty(2, len(images))
    position = torch.arange(len(images))
    for fitted, judged in ((position[::2], position[1::2]), (position[1::2], position[::2])):
        found = best_of_family(curves, images[fitted])
        losses, margins = curves.of([0, found]).at(images[fitted], images[judged])
        loss[:, judged], right[:, judged] = losses, (margins > 0).float()
    better = exceeds(loss[0] - MIN_GAIN, loss[1]) and not exceeds(right[0], right[1])
    return best_of_family(curves, images) if better else 0


def crossed(curves: Curves, images: Tensor) -> int:
    """*cross-fit*: no test against average pooling but the discarding."""
    loss, margin = torch.zeros(2, len(curves.loss), len(images))
    for fitted, judged in splits(len(images)):
        losses, margins = curves.at(images[fitted], images[judged])
        loss[:, judged] += losses / SPLITS
        margin[:, judged] += margins / SPLITS
    smoothed = margin.sigmoid()
    return mildest(loss, (smoothed - smoothed[0]).mean(1) >= 0)


def smooth(curves: Curves, images: Tensor, lower_bound: bool = False) -> int:
    """*smoothed top-1*, or *lower bound*."""
    loss, margin = curves.at(images, images)
    smoothed = margin.sigmoid()
    gained = smoothed - smoothed[0]
    low = gained.mean(1) - ERRORS * gained.std(1) / math.sqrt(len(images))
    if lower_bound:
        return int(low.argmax())
    missing = smoothed[smoothed.mean(1).argmax()] - smoothed
    near = missing.mean(1) <= missing.std(1) / math.sqrt(len(images))
    distance = (loss - loss[0]).std(1).masked_fill(~near, math.inf)
    found = int(distance.argmin())
    return found if low[found] > 0 else 0


RULES: dict[str, Rule] = {
    'two errors (chosen)': choose,
    'halves': halves,
    'cross-fit': crossed,
    'smoothed top-1': smooth,
    'lower bound': lambda curves, images: smooth(curves, images, lower_bound=True),
}


def judge(curves: Curves, gems: Curves, rule: Rule, draws: int, fit: int) -> list[str]:
    """The cells of one row: means over the draws, and how often promises hold."""
    shown, kept, honest = [], 0, 0
    count = curves.loss.shape[2]
    for seed in range(draws):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(100 + seed))
        fitted, judged = order[:fit], order[fit:]
        found = rule(curves, fitted)
        losses, margins = curves.of([0, found]).at(fitted, judged)
        gem = gems.of([best_of_family(gems, fitted)]).at(fitted, judged)[1][0]
        right, peer = (margins > 0).float(), (gem > 0).float()
        shown.append(torch.stack([right[1] - right[0], right[1] - peer, losses[1] - losses[0]]).mean(1))
        kept += found == 0
        seen = Curves(curves.log_gains, curves.loss[:, :, fitted], curves.margin[:, :, fitted])
        ours, average = cross_fit(seen, rule), cross_fit(seen.of([0]), lambda *_: 0)
        promised, error = promised_difference(ours.right, average.right)
        truth = float(shown[-1][0])
        honest += abs(promised - truth) <= 2 * error + 1e-9
    top1, gem, loss = torch.stack(shown).unbind(1)
    return [
        f'{100 * top1.mean():+.2f} ({100 * top1.min():+.1f} to {100 * top1.max():+.1f})',
        f'{100 * gem.mean():+.2f}',
        f'{loss.mean():+.4f} (at most {loss.max():+.4f})',
        f'{kept} of {draws}',
        f'{100 * honest / draws:.0f} %',
    ]


def main(arguments: Sequence[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_arguments(parser)
    networks = {network.builder: network for network in NETWORKS}
    parser.add_argument('--networks', nargs='+', choices=list(networks), required=True)
    parser.add_argument('--classes', type=int, choices=[0, 1], required=True, help='even or odd ImageNet classes')
    parser.add_argument('--tasks', nargs='+', choices=TASKS, default=TASKS)
    parser.add_argument('--rules', nargs='+', choices=list(RULES), default=list(RULES))
    parser.add_argument('--only', choices=['rotp'], default='', help='candidates: average pooling and ROTP alone')
    parser.add_argument('--draws', type=int, default=DRAWS)
    parser.add_argument('--fit', type=int, default=FIT, help='images that a rule sees')
    parser.add_argument('--output', type=Path, default=Path('runs/calibration_rule'), help='where the curves are kept')
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    rows = [
        (
            'network',
            'task',
            'rule',
            'top-1 − average',
            '− GeM + gain',
            'loss − average + gain',
            'mean stays',
            'promise kept',
        )
    ]
    for builder in args.networks:
        network = networks[builder]
        for task in args.tasks if network.images == 'in1k_dev' else ('plain',):
            settings, curves = tabulate(network, task, args)
            gems = curves.of([n for n, s in enumerate(settings) if s.pool == 'gem' and not s.norm_power])
            gems = Curves(*(torch.cat(both) for both in zip(curves.of([0]), gems, strict=True)))
            ours = curves.of([n for n, s in enumerate(settings) if s == MEAN or s.pool == 'rotp' or not args.only])
            for name in args.rules:
                rows.append((network.name, task, name, *judge(ours, gems, RULES[name], args.draws, args.fit)))
    print(markdown_table(rows))


if __name__ == '__main__':
    main()
