"""Which start of the pooling suits a network that is trained along with it, from scratch.

    python -m benchmarks.starts --data DIRECTORY --page benchmarks/STARTS.md

Small networks answer questions about generated images and real photos (see `SETTINGS`) with every pooling of `POOLINGS`
and three seeds. Each run adds a row to benchmarks/starts.csv, and a run that has a row is not repeated, so that an
interrupted command resumes; `--part 0/2` and `--part 1/2` divide the runs between two processes. STARTS.md holds the
protocol.
"""

import argparse
import copy
import csv
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.layers.adaptive_avgmax_pool import SelectAdaptivePool2d
from timm.models.resnet import BasicBlock, downsample_conv
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.paper import Results, renew_page
from benchmarks.real_data import NETWORKS, column_of, groups_of, images_of
from benchmarks.tables import Row
from rotp_vision.data.generated import CLASSES, CLASSES_OF, generate, place_objects, to_image
from rotp_vision.layers import GeMPool2d, GlobalROTPool2d, PoolOptions
from rotp_vision.probing.fit import balanced_mean
from rotp_vision.probing.ridge import assign_folds

RESULTS = Path(__file__).parent / 'starts.csv'
SEEDS = 3
NUM_TRAIN, NUM_TEST = 2400, 1000  # generated images
SIDE, PHOTO_SIDE = 64, 96
RADIUS = (0.06, 0.085)  # of the objects, in parts of the side
LR, POOL_LR = 3e-3, 0.02


def rotp(temperature: float, power: float) -> Callable[[], nn.Module]:
    """ROTP from that temperature and that power of the norm prior."""
    options = PoolOptions(smoothness=temperature, sample_penalty=3 * temperature, prior='norm', norm_power=power)
    return lambda: GlobalROTPool2d(options)


PEERS: dict[str, Callable[[], nn.Module]] = {
    'average': lambda: SelectAdaptivePool2d(pool_type='avg', flatten=True),
    'max': lambda: SelectAdaptivePool2d(pool_type='max', flatten=True),
    '(average + max) / 2': lambda: SelectAdaptivePool2d(pool_type='avgmax', flatten=True),
    'GeM, p learned from 3': lambda: GeMPool2d(3.0, learn=True),
    'mean weighted by norms, β learned from 2': lambda: GeMPool2d(1.0, norm_power=2.0, learn=True),
}
CANDIDATES = {f'ROTP, T = {t}, β = 2': rotp(t, 2) for t in (2, 5, 10)}
NEXT_TO_MEAN = 'ROTP, T = 50, no norm prior'
LATER = {f'ROTP, T = {t}, β = 2': rotp(t, 2) for t in (2, 10, 50)}  # candidates behind a network trained with average
POOLINGS = PEERS | {NEXT_TO_MEAN: lambda: GlobalROTPool2d({'start': 'mean', 'prior': 'uniform'})} | CANDIDATES | LATER
ONE_STAGE, TWO_STAGES = [*PEERS, NEXT_TO_MEAN, *CANDIDATES], ['average', 'max', NEXT_TO_MEAN, *LATER]


class Setting(NamedTuple):
    """A question, the network that learns to answer it, and for how long."""

    question: str
    network: str
    epochs: int
    two_stages: bool = False  # average for a third of the epochs, then the pooling with everything trained

    @property
    def name(self) -> str:
        return f'{self.question}, {self.network}'

    @property
    def poolings(self) -> list[str]:
        return TWO_STAGES if self.two_stages else ONE_STAGE


SETTINGS = [
    Setting('one object', 'residual', 9),
    Setting('most frequent', 'plain', 12),
    Setting('tiles', 'plain', 30),
    Setting('debris', 'plain', 20),
    Setting('one object', 'plain', 9, two_stages=True),
    Setting('most frequent', 'plain', 12, two_stages=True),
    Setting('how many', 'residual', 12),
    Setting('which texture', 'plain', 9),
    Setting('most frequent', 'residual', 12),
    Setting('one object', 'plain', 9),
]
PHOTOS = {'debris': 'foda15', 'tiles': 'magnetic_tile6'}


# Images


def how_many(rng: np.random.Generator, label: int) -> np.ndarray:
    """One to six objects of any kinds."""
    return place_objects(rng, [CLASSES[kind] for kind in rng.integers(len(CLASSES), size=label + 1)], SIDE, RADIUS)


def which_texture(rng: np.random.Generator, label: int) -> np.ndarray:
    """Twelve cells with five patterns; the right one covers at least 8 % of the image more than any other."""
    y, x = np.mgrid[:SIDE, :SIDE]
    others = [kind for kind in range(5) if kind != label]
    while True:
        points = rng.uniform(0, SIDE, (12, 2))
        cell = np.hypot(y[..., None] - points[:, 0], x[..., None] - points[:, 1]).argmin(-1)
        kind = np.array([label] * 4 + rng.permutation(others * 2).tolist())[cell]
        shares = np.bincount(kind.ravel(), minlength=5) / kind.size
        if shares[label] >= 0.08 + shares[others].max():
            break
    u, v = (np.sin(2 * np.pi * axis / rng.uniform(4, 7) + rng.uniform(0, 2 * np.pi)) for axis in (y, x))
    patterns = np.stack([u, v, u * v, np.maximum(u, v), rng.normal(0, 0.7, u.shape)])
    pattern = np.take_along_axis(patterns, kind[None], 0)[0]
    grain = rng.normal(0, 0.06, (SIDE, SIDE, 3))
    return rng.uniform(0.4, 0.6, 3) + grain + pattern[..., None] * rng.uniform(0.08, 0.2, 3)


DRAWN = {'how many': (how_many, 6), 'which texture': (which_texture, 5)}


class Images(NamedTuple):
    """Images (n, 3, side, side) of 8 bits and their classes, to train on and to judge on."""

    train: Tensor
    train_targets: Tensor
    test: Tensor
    test_targets: Tensor


@lru_cache(SEEDS)
def images(question: str, seed: int, data: Path | None) -> Images:
    """The images of a run; those of real photos are split by group into as many parts as there are seeds."""
    if question in PHOTOS:
        pixels, targets, groups = photos(PHOTOS[question], data)
        held_out = assign_folds(targets, groups, SEEDS) == seed
        return Images(pixels[~held_out], targets[~held_out], pixels[held_out], targets[held_out])
    parts: list[Tensor] = []
    for split, count in enumerate((NUM_TRAIN, NUM_TEST)):
        drawn = [draw(question, seed, split, index) for index in range(count)]
        parts.append(torch.from_numpy(np.stack([image for image, _ in drawn])).permute(0, 3, 1, 2))
        parts.append(torch.tensor([target for _, target in drawn]))
    return Images(*parts)


def draw(question: str, seed: int, split: int, index: int) -> tuple[np.ndarray, int]:
    if question in CLASSES_OF:
        image, target = generate(seed, split, index, SIDE, question, len(CLASSES_OF[question]), RADIUS)
        return np.asarray(image), target
    drawing, num_classes = DRAWN[question]
    target = index % num_classes
    return np.asarray(to_image(drawing(np.random.default_rng((seed, split, index)), target))), target


@lru_cache
def photos(file: str, data: Path | None) -> tuple[Tensor, Tensor, Tensor]:
    """Photos, their classes, and their groups: those of the file, for tiles near-duplicates among thumbnails."""
    if data is None:
        raise SystemExit('real photos need --data')
    network = NETWORKS[0]._replace(
        images=file, label='label', resize=PHOTO_SIDE, size=PHOTO_SIDE, mean=(0,) * 3, std=(1,) * 3
    )
    rows = images_of(network, data)[:]
    pixels, targets = torch.stack(rows['x']), torch.tensor(rows['y'])
    thumbnails = F.adaptive_avg_pool2d(pixels.mean(1, keepdim=True), 16).flatten(1)
    names = [str(name) for name in column_of(network, data, 'group')]
    groups = groups_of(file, names, thumbnails - thumbnails.mean(1, keepdim=True))
    return (255 * pixels).round().byte(), targets, groups


# Training


def plain() -> nn.Sequential:
    """Four convolutions; 16 × 16 maps of an image of 64 px."""
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 16, 2), (16, 24, 2), (24, 32, 1), (32, 32, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(True)]
    return nn.Sequential(*layers)


def residual() -> nn.Sequential:
    """A convolution and two residual blocks; 16 × 16 maps of an image of 64 px."""
    blocks = (BasicBlock(before, 32, s, downsample_conv(before, 32, 1, s)) for before, s in ((16, 2), (32, 1)))
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True), *blocks)


class Network(nn.Module):
    """Features, a pooling and a classifier."""

    def __init__(self, features: nn.Module, pool: nn.Module, num_classes: int):
        super().__init__()
        self.features = features.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.pool = pool
        self.classifier = nn.Linear(32, num_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        x = (pixels.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
        with torch.autocast('cpu', torch.bfloat16):
            return self.classifier(self.pool(self.features(x))).float()


def train(network: Network, given: Images, epochs: int, seed: int, flip: bool) -> None:
    pool, rest = list(network.pool.parameters()), [*network.features.parameters(), *network.classifier.parameters()]
    groups = [{'params': rest, 'lr': LR}, *([{'params': pool, 'lr': POOL_LR}] if pool else [])]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    n = len(given.train)
    batches = [
        batch for _ in range(epochs) for batch in torch.randperm(n, generator=generator)[: n // 32 * 32].split(32)
    ]
    rates = [group['lr'] for group in groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=len(batches), pct_start=0.15)
    network.train()
    for batch in batches:
        x = given.train[batch]
        if flip and torch.rand((), generator=generator) < 0.5:
            x = x.flip(3)
        loss = F.cross_entropy(network(x), given.train_targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@lru_cache(SEEDS)
def new_network(setting: Setting, seed: int, data: Path | None) -> Network:
    """The network before its pooling is chosen: as drawn, or trained with average for a third of the epochs."""
    given = images(setting.question, seed, data)
    torch.manual_seed(seed)
    features = {'plain': plain, 'residual': residual}[setting.network]()
    network = Network(features, PEERS['average'](), int(given.train_targets.max()) + 1)
    if setting.two_stages:
        train(network, given, setting.epochs // 3, seed, setting.question in PHOTOS)
    return network


def run(setting: Setting, pooling: str, seed: int, data: Path | None) -> dict[str, Any]:
    """Train and judge one network; returns its row."""
    begin = time.process_time()
    given = images(setting.question, seed, data)
    network = copy.deepcopy(new_network(setting, seed, data))
    network.pool = POOLINGS[pooling]()
    epochs = setting.epochs - setting.epochs // 3 * setting.two_stages
    train(network, given, epochs, seed, setting.question in PHOTOS)
    network.eval()
    with torch.inference_mode():
        right = torch.cat([network(x) for x in given.test.split(100)]).argmax(1) == given.test_targets
    row = {'question': setting.question, 'network': setting.network, 'stages': 1 + setting.two_stages}
    row |= {
        'pooling': pooling,
        'seed': seed,
        'accuracy': round(100 * balanced_mean(right.float(), given.test_targets), 2),
    }
    pool = network.pool
    weights = {k: float(v) for k, v in pool.named_weights().items()} if isinstance(pool, GlobalROTPool2d) else {}
    learned = {'T': weights.get('smoothness'), 'β': weights.get('norm_power')}
    row |= {name: '' if value is None else round(value, 3) for name, value in learned.items()}
    return row | {'seconds': round(time.process_time() - begin)}


# Results


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline='') as lines:
        return list(csv.DictReader(lines))


def key_of(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in ('question', 'network', 'stages', 'pooling', 'seed'))


def run_missing(path: Path, part: tuple[int, int], minutes: float, data: Path | None) -> None:
    """Add the missing rows of one part of the runs, until the time is up."""
    begin = time.monotonic()
    runs = [(s, pooling, seed) for s in SETTINGS for pooling in s.poolings for seed in range(SEEDS)]
    done = {key_of(row) for row in read(path)}
    for setting, pooling, seed in runs[part[0] :: part[1]]:
        key = (setting.question, setting.network, str(1 + setting.two_stages), pooling, str(seed))
        if key in done:
            continue
        if time.monotonic() - begin > 60 * minutes:
            return
        row = run(setting, pooling, seed, data)
        with path.open('a', newline='') as lines:
            writer = csv.DictWriter(lines, list(row), lineterminator='\n')
            if lines.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
        print(*row.values(), flush=True)


def regret(scores: dict[str, dict[str, list[float]]], pooling: str, settings: Sequence[str]) -> float:
    """Mean over settings of what the pooling is behind the best peer."""
    best = (max(mean(scores[s][peer]) for peer in PEERS if peer in scores[s]) for s in settings)
    return mean(b - mean(scores[s][pooling]) for b, s in zip(best, settings, strict=True))


def choose(scores: dict[str, dict[str, list[float]]], names: Sequence[str], without: str = '') -> str:
    """The candidate of the smallest mean regret over the settings of all questions but one."""
    settings = [s for s in scores if not without or not s.startswith(without)]
    return min(names, key=lambda name: regret(scores, name, settings))


def tables(rows: Sequence[Row]) -> dict[str, list[dict[str, str]]]:
    """The tables of the page, of the settings whose runs are complete: with one stage and with two."""
    made = {}
    for stages, names in (('1', ONE_STAGE), ('2', TWO_STAGES)):
        scores: dict[str, dict[str, list[float]]] = {}
        for row in rows:
            if str(row['stages']) == stages:
                name = f'{row["question"]}, {row["network"]}'
                scores.setdefault(name, {}).setdefault(row['pooling'], []).append(float(row['accuracy']))
        scores = {s: given for s, given in scores.items() if all(len(given.get(n, ())) == SEEDS for n in names)}
        if not scores:
            continue
        lines = [_line(name, scores, {s: scores[s][name] for s in scores}) for name in names]
        if stages == '1':
            chosen = {s: choose(scores, list(CANDIDATES), s.split(',')[0]) for s in scores}
            lines.append(_line('**chosen on the other questions**', scores, {s: scores[s][chosen[s]] for s in scores}))
        made[f'starts_{stages}'] = lines
    return made | ({'starts_learned': learned(rows)} if made else {})


def learned(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The temperature and the power of the norm prior that each start ends with, in their means over seeds."""
    lines = {name: {'pooling': name} for name in (NEXT_TO_MEAN, *CANDIDATES, *LATER)}
    for setting in SETTINGS:
        for name, line in lines.items():
            key = (setting.question, setting.network, str(1 + setting.two_stages), name)
            mine = [row for row in rows if key_of(row)[:4] == key]
            ends = [f'{mean(float(row[k]) for row in mine):.1f}' for k in ('T', 'β') if mine and mine[0].get(k)]
            line[setting.name + ', two stages' * setting.two_stages] = ', '.join(ends)
    empty = {column for column in lines[NEXT_TO_MEAN] if not any(line[column] for line in lines.values())}
    return [{column: value for column, value in line.items() if column not in empty} for line in lines.values()]


def _line(name: str, scores: dict[str, dict[str, list[float]]], values: dict[str, list[float]]) -> dict[str, str]:
    seeds = [mean(run) for run in zip(*values.values(), strict=True)]
    gaps = [
        max(mean(scores[s][peer]) for peer in PEERS if peer in scores[s]) - mean(given) for s, given in values.items()
    ]
    error = stdev(seeds) / len(seeds) ** 0.5
    line = {'pooling': name} | {s: f'{mean(given):.1f}' for s, given in values.items()}
    line |= {'mean': f'{mean(seeds):.1f} ± {error:.1f}', 'worst gap': f'{max(gaps):.1f}'}
    return line | {'mean regret': f'{mean(gaps):.1f}'}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', type=Path, help='directory with images/foda15.parquet and magnetic_tile6.parquet')
    parser.add_argument('--results', type=Path, default=RESULTS)
    parser.add_argument('--part', default='0/1', help='which part of the runs this process makes')
    parser.add_argument('--minutes', type=float, default=1e9, help='begin no run after so many minutes')
    parser.add_argument('--page', type=Path, help='Markdown page whose marked tables are renewed')
    args = parser.parse_args()
    index, parts = map(int, args.part.split('/'))
    run_missing(args.results, (index, parts), args.minutes, args.data)
    if args.page is not None:
        results = Results(Path('runs/starts'))
        results.table('starts', read(args.results), **{k[7:]: v for k, v in tables(read(args.results)).items()})
        renew_page(args.page, results, 'starts')


if __name__ == '__main__':
    main()
