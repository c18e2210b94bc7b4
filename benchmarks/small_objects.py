"""Accuracy of small networks against the size of the object.

    python -m benchmarks.small_objects --page benchmarks/EVIDENCE.md

A network of four convolutions is trained from scratch with each pooling on generated images whose objects have every
size, and judged at each size on its own. The network that was trained with average pooling also has its pooling alone
replaced and fitted afterwards.
"""

import argparse
import copy
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.paper import Results, renew_page
from benchmarks.tables import pivot
from rotp_vision.data.generated import CLASSES, generate
from rotp_vision.layers import GlobalROTPool2d, PoolOptions

SIZE = 64
RADII = (0.04, 0.055, 0.075, 0.1, 0.14, 0.2)  # in parts of the image's side
WIDTHS = (16, 32, 48, 48)
SHARPER = PoolOptions(smoothness=4.0)
LONGER = ', 3 times as long'
FITTED_AFTERWARDS = 'average, then ROTP fitted'


def average() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


FROM_SCRATCH: dict[str, Callable[[], nn.Module]] = {
    'average': average,
    'ROTP (default)': GlobalROTPool2d,
    'ROTP from temperature 4': lambda: GlobalROTPool2d(SHARPER),
    'BADMM-E published': lambda: GlobalROTPool2d(PoolOptions.paper()),
    'max': lambda: nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten()),
    'average' + LONGER: average,
    'ROTP from temperature 4' + LONGER: lambda: GlobalROTPool2d(SHARPER),
}


class SmallNet(nn.Module):
    """Four convolutions to 16 × 16 maps, a pooling and a classifier."""

    def __init__(self, pool: nn.Module):
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in zip((3, *WIDTHS[:-1]), WIDTHS, (2, 2, 1, 1), strict=True):
            layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(True)]
        self.features = nn.Sequential(*layers)
        self.pool = pool
        self.classifier = nn.Linear(WIDTHS[-1], len(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)))


def images(split: int, count: int, radius_range: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """(count, 3, SIZE, SIZE) images and their classes."""
    drawn = [generate(0, split, index, SIZE, radius_range=radius_range) for index in range(count)]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image, _ in drawn])).permute(0, 3, 1, 2)
    return pixels.float() / 127.5 - 1, torch.tensor([label for _, label in drawn])


def train(network: nn.Module, parameters: list[dict], data: tuple[Tensor, Tensor], epochs: int, seed: int):
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = data
    batches = [b for _ in range(epochs) for b in torch.randperm(len(labels), generator=generator).split(32)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group['lr'] for group in parameters], total_steps=len(batches), pct_start=0.15
    )
    for batch in batches:
        x = pixels[batch]
        if torch.rand((), generator=generator) < 0.5:
            x = x.flip(3)
        loss = F.cross_entropy(network(x), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def groups(network: SmallNet) -> list[dict]:
    pool = list(network.pool.parameters())
    rest = [p for module in (network.features, network.classifier) for p in module.parameters()]
    return [{'params': rest, 'lr': 3e-3}, *([{'params': pool, 'lr': 0.02}] if pool else [])]


def accuracy(network: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    network.eval()
    with torch.inference_mode():
        correct = torch.cat([network(x).argmax(1) == y for x, y in zip(*(d.split(100) for d in data), strict=True)])
    return 100 * correct.float().mean().item()


def measure(seeds: int, num_train: int, num_test: int, epochs: int, kept: Path) -> list[dict]:
    """A row for each pooling, seed and size; networks that are kept are not trained again."""
    kept.mkdir(parents=True, exist_ok=True)
    training = images(0, num_train, (RADII[0], RADII[-1]))
    tests = {radius: images(1, num_test, (radius, radius)) for radius in RADII}
    rows = []
    for seed in range(seeds):
        average: dict[str, Tensor] = {}
        for name in (*FROM_SCRATCH, FITTED_AFTERWARDS):
            path = kept / f'small-{num_train}-{epochs}-{seed}-{name}.pt'
            torch.manual_seed(seed)  # the same start for every pooling
            network = SmallNet(FROM_SCRATCH[name]() if name in FROM_SCRATCH else GlobalROTPool2d(SHARPER))
            if path.exists():
                network.load_state_dict(torch.load(path, weights_only=True))
            elif name in FROM_SCRATCH:
                train(network, groups(network), training, 3 * epochs if name.endswith(LONGER) else epochs, seed)
            else:
                network.load_state_dict(average, strict=False)
                network.eval()  # the backbone's statistics stay
                train(network, [{'params': list(network.pool.parameters()), 'lr': 0.05}], training, 1, seed)
            if name == 'average':
                average = copy.deepcopy(network.state_dict())
            torch.save(network.state_dict(), path)
            scores = {radius: accuracy(network, data) for radius, data in tests.items()}
            print(f'seed {seed}, {name}: {", ".join(f"{s:.1f}" for s in scores.values())}', flush=True)
            rows += [{'pooling': name, 'seed': seed, 'radius': r, 'top-1 %': s} for r, s in scores.items()]
    return rows


def report(results: Results, seeds: int = 2, num_train: int = 2400, num_test: int = 600, epochs: int = 8):
    rows = measure(seeds, num_train, num_test, epochs, results.output / 'fitted')
    summary = []
    for name in dict.fromkeys(row['pooling'] for row in rows):
        for radius in RADII:
            values = [row['top-1 %'] for row in rows if (row['pooling'], row['radius']) == (name, radius)]
            error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
            summary.append({'pooling': name, 'radius': radius, 'mean': mean(values), 'error': error})
    readable = [row | {'text': f'{row["mean"]:.1f} ± {row["error"]:.1f}'} for row in summary]
    results.table('small_objects', rows, sizes=pivot(readable, ['pooling'], 'radius', 'text'))
    results.figure('small_objects', draw(summary))


def draw(summary: list[dict]) -> Figure:
    figure = Figure(figsize=(9, 4), layout='constrained')
    axes = figure.subplots()
    names = dict.fromkeys(row['pooling'] for row in summary)
    for name, marker in zip(names, 'os^DvxPX', strict=True):
        line = [row for row in summary if row['pooling'] == name]
        radii, means, errors = zip(*((100 * row['radius'], row['mean'], row['error']) for row in line), strict=True)
        axes.errorbar(radii, means, yerr=errors, marker=marker, capsize=3, label=name)
    axes.axhline(100 / len(CLASSES), color='grey', linestyle=':', label='chance')
    axes.set(xscale='log', xlabel="object's radius in % of the image's side", ylabel='top-1 %')
    axes.set_xticks([100 * radius for radius in RADII], [f'{100 * radius:g}' for radius in RADII])
    axes.minorticks_off()
    figure.legend(loc='outside right center', frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--output', type=Path, default=Path('runs/small_objects'))
    parser.add_argument('--page', type=Path, help='Markdown page whose marked table and plot are renewed')
    args = parser.parse_args()
    results = Results(args.output)
    report(results)
    if args.page is not None:
        renew_page(args.page, results, 'evidence')


if __name__ == '__main__':
    main()
