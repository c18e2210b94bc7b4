"""Feature vectors of frozen networks: which pooling finds images of the same class?

    python -m benchmarks.embeddings --data DIRECTORY    # writes embeddings.csv, EMBEDDINGS.md and the docs' table
    python -m benchmarks.embeddings --check             # whether the two are what embeddings.csv says

## Protocol

It was committed before the run.

*Cells.* A cell is a network on a set of images that it was not trained on. ResNet-50 and EfficientNet-Lite0 (ImageNet):
birds (600 images of 25 classes), debris (FOD-A, 1,500 frames of 15 classes), tiles (632 of 6 classes) and photos
(ImageNet validation, every third class, 3 a class). ResNet-18 (Tiny-ImageNet): photos of every fourth class. All are
frozen and nothing is trained. 224 px (64 for the ResNet-18).

*Scores.* Every image searches all others by cosine similarity; images of its own group (the sequence of a frame, tiles
whose average features have a cosine above 0.985) are left out. R@1, R@5, mAP, and kNN accuracy by 10 votes, with
standard errors over groups; differences to average pooling are paired.

*Poolings.* Every pooling stands in the list below with all its settings: average; max; GeM; the mean and GeM with
positions weighted by powers of their norm (the norm prior; HOW weights by the norm itself); CroW with both of its
weights; R-MAC with three scales; ROTP (Sinkhorn on the rms scale, α3 = 3 T) over its temperature T and the norm
prior β.

*After the pooling.* As it is: L2-normalised. Centred: the mean of the gallery is subtracted, and normalised again.
Whitened: also multiplied by (I + Σ / s)^(-1/2), s = c times the mean eigenvalue of the covariance Σ. Mean and
covariance come from the unlabelled images of the cell. Only the settings of the table below are centred and whitened.

*Choice.* The value of a setting in a cell is (R@1 + mAP) / 2 as it is, its regret the distance to the best setting of
any pooling there. The setting with which a pooling is scored in a cell is the one with the least mean regret over the
cells of other images. The preset 'embedding' is the ROTP setting with the least mean regret over all cells; the
shrinkage c is chosen likewise for the preset. The table shows every pooling at one setting (GeM 3, norm prior 2 and the
preset) and beside it the mean of its scores as chosen.

*Target.* The preset beats average by at least 4 points of R@1 on average over cells, as they are and centred, and is
within 0.5 of the best row of the table.

*Sizes.* The settings of the table on birds and tiles, at 320 px, and with the positions of 224 and 320 px as one set,
on the ImageNet networks.
"""

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.real_data import NETWORKS, Network, add_data_arguments, build, column_of, groups_of, maps_of
from benchmarks.tables import to_csv, to_markdown
from rotp_vision.embedding.scores import METRICS, mean_over_groups, retrieval
from rotp_vision.embedding.whitening import Spectrum
from rotp_vision.files import write_atomically
from rotp_vision.layers import PoolOptions, ROTPool, any_pool_options

HERE = Path(__file__).parent
RESULTS, REPORT, DOCS = HERE / 'embeddings.csv', HERE / 'EMBEDDINGS.md', HERE.parent / 'docs' / 'embeddings.md'
BEGIN, END = '<!-- table: benchmarks/embeddings.py -->\n', '<!-- end of table -->\n'
IMAGES = {'birds': 'cub25', 'debris': 'foda15', 'tiles': 'magnetic_tile6', 'photos': 'plain'}
LARGER = ('birds', 'tiles')  # images that are also read at 320 px
EVERY = {'in1k_dev': 3, 'tiny200_val_even': 4}  # of the classes of photos
SHRINKAGES = (10, 30, 100, 300)
AS_IS, CENTRED = 'as it is', 'centred'
CHUNK = 50

Pool = Callable[[Tensor], Tensor]  # maps (n, C, H, W), or sets (n, C, N, 1), to vectors


class Setting(NamedTuple):
    """A pooling with its numbers."""

    pooling: str
    numbers: str
    pool: Pool


def crow(maps: Tensor) -> Tensor:
    """Cross-dimensional weighting (Kalantidis et al., 2016): positions by √ of their sum, channels by rarity."""
    weights = maps.sum(1, keepdim=True)
    weights = (weights / weights.norm(dim=(2, 3), keepdim=True)).sqrt()
    present = (maps > 0).float().mean((2, 3))
    rarity = ((present.sum(1, keepdim=True) + 1e-6) / (present + 1e-6)).log()
    return (maps * weights).sum((2, 3)) * rarity


def rmac(maps: Tensor, scales: int = 3) -> Tensor:
    """The sum of normalised maxima of 1 + 4 + 9 square regions (Tolias et al., 2016), for square maps."""
    side = maps.shape[2]
    pooled = torch.zeros(maps.shape[:2])
    for scale in range(1, scales + 1):
        width = 2 * side // (scale + 1)
        starts = [round(k * (side - width) / max(scale - 1, 1)) for k in range(scale)]
        for top in starts:
            for left in starts:
                pooled += F.normalize(maps[:, :, top : top + width, left : left + width].amax((2, 3)))
    return pooled


def named(name: str, **numbers: float) -> Pool:
    options = any_pool_options(name, **numbers)
    assert not isinstance(options, PoolOptions)
    return options.make()


def rotp(temperature: float, norm_power: float) -> Setting:
    options = PoolOptions.embedding(smoothness=temperature, sample_penalty=3 * temperature, norm_power=norm_power)
    pool = ROTPool(options)
    return Setting('ROTP', f'T = {temperature:g}, β = {norm_power:g}', lambda maps: pool.pool_sets(maps.flatten(2)))


SETTINGS = [
    Setting('average', '', named('avg')),
    Setting('max', '', named('max')),
    *(Setting('GeM', f'p = {p}', named('gem', power=p)) for p in (2, 3, 4, 5, 8)),
    Setting('CroW', '', crow),
    Setting('R-MAC', '', rmac),
    *(Setting('mean, norm prior', f'β = {b}', named('avg', norm_power=b)) for b in (1, 2, 3)),
    *(
        Setting('GeM, norm prior', f'p = {p}, β = {b}', named('gem', power=p, norm_power=b))
        for p in (2, 3, 5)
        for b in (1, 2, 3)
    ),
    *(rotp(t, b) for t in (2, 4, 8) for b in (1, 2, 3)),
]
SHOWN = {'GeM': 'p = 3', 'mean, norm prior': 'β = 2', 'GeM, norm prior': 'p = 3, β = 2'}  # and the preset
ON_GRIDS = ('CroW', 'R-MAC')  # do not pool sets of positions


class Cell(NamedTuple):
    """A network on a set of images, at one size or two."""

    network: Network
    images: str
    size: str  # '224', '320' or '224 + 320'; the ResNet-18's own is '64'

    @property
    def key(self) -> dict[str, str]:
        return {'network': self.network.name, 'images': self.images, 'px': self.size}


def cells() -> list[Cell]:
    """The cells at the networks' own size, then those at other sizes."""
    *imagenet, tiny = NETWORKS
    own = [Cell(network, name, '224') for network in imagenet for name in IMAGES]
    others = [cell._replace(size=size) for cell in own if cell.images in LARGER for size in ('320', '224 + 320')]
    return [*own, Cell(tiny, 'photos', '64'), *others]


def load(cell: Cell, args: argparse.Namespace) -> tuple[list[Tensor], Tensor, Tensor]:
    """Maps of each size, labels and groups of the images of a cell."""
    network, task = cell.network, IMAGES[cell.images]
    model = build(network, args.data)
    tasks = [f'{task} 320' if size == '320' else task for size in cell.size.split(' + ')]
    loaded = [maps_of(network, model, args.data, args.cache, args.limit, one) for one in tasks]
    maps, labels = [one[0] for one in loaded], loaded[0][1]
    if task == 'plain':
        kept = labels % EVERY[network.images] == 0
        return [one[kept] for one in maps], labels[kept], torch.arange(int(kept.sum()))
    names = column_of(network._replace(images=task), args.data, 'group', args.limit)
    # Tiles are grouped by their features at 224 px at every size.
    own = maps if '224' in cell.size else load(cell._replace(size='224'), args)[0]
    features = torch.cat([part.float().mean((2, 3)) for part in own[0].split(CHUNK)])
    return maps, labels, groups_of(task, names, features)


@torch.no_grad()
def pooled(setting: Setting, maps: list[Tensor]) -> Tensor:
    """(images, C) vectors; the positions of several maps are one set."""
    vectors = []
    for chunks in zip(*(one.split(CHUNK) for one in maps), strict=True):
        one = chunks[0].float() if len(chunks) == 1 else torch.cat([c.float().flatten(2) for c in chunks], 2)[..., None]
        vectors.append(setting.pool(one))
    return torch.cat(vectors)


def projections(features: Tensor, shrinkages: tuple[int, ...] | None) -> Iterator[tuple[str, Tensor]]:
    """Features as they are and, unless `shrinkages` is None, centred and whitened."""
    features = F.normalize(features)
    yield AS_IS, features
    if shrinkages is None:
        return
    spectrum = Spectrum.of(features)
    # All that is left of centred features is along the eigenvectors, and cosines do not depend on the basis.
    centred = (features - spectrum.mean.float()) @ spectrum.vectors.float()
    yield CENTRED, F.normalize(centred)
    for shrinkage in shrinkages:
        yield whitened(shrinkage), F.normalize(centred * spectrum.factors(shrinkage).float())


def whitened(shrinkage: int) -> str:
    return f'whitened, c = {shrinkage}'


def score(
    cell: Cell, settings: list[Setting], shrinkages: tuple[int, ...] | None, args: argparse.Namespace
) -> list[dict]:
    """The rows of a cell: one for each setting and what comes after it. The first setting is average pooling."""
    maps, labels, groups = load(cell, args)
    rows, base = [], {}
    for setting in settings:
        if len(maps) > 1 and setting.pooling in ON_GRIDS:
            continue
        for after, features in projections(pooled(setting, maps), shrinkages):
            found = retrieval(features, labels, groups)
            base.setdefault(after, found)
            row = cell.key | {'pooling': setting.pooling, 'setting': setting.numbers, 'after': after}
            for name, field in METRICS.items():
                values = 100 * getattr(found, field)
                mean, error = mean_over_groups(values, groups)
                _, paired = mean_over_groups(values - 100 * getattr(base[after], field), groups)
                row |= {name: f'{mean:.2f}', f'{name} ±': f'{error:.2f}', f'{name} − average ±': f'{paired:.2f}'}
            rows.append(row)
    return rows


class Results:
    """Rows of embeddings.csv."""

    def __init__(self, rows: list[dict[str, str]]):
        self.rows = rows
        self.cells = list(dict.fromkeys((row['network'], row['images'], row['px']) for row in rows))
        self.own = [cell for cell in self.cells if '320' not in cell[2]]
        self.afters = list(dict.fromkeys(row['after'] for row in rows))
        columns = ('network', 'images', 'px', 'pooling', 'setting', 'after')
        self._by_key = {tuple(row[column] for column in columns): row for row in rows}

    def get(self, cell: tuple[str, str, str], setting: tuple[str, str], after: str, metric: str = 'R@1') -> float:
        row = self._by_key.get((*cell, *setting, after))
        return math.nan if row is None else float(row[metric])

    def value(self, cell: tuple[str, str, str], setting: tuple[str, str], after: str = AS_IS) -> float:
        return (self.get(cell, setting, after) + self.get(cell, setting, after, 'mAP')) / 2

    @cache  # noqa: B019 - lives as long as the command
    def best(self, cell: tuple[str, str, str]) -> float:
        return max(self.value(cell, setting) for setting in self.settings())

    def settings(self, pooling: str | None = None) -> list[tuple[str, str]]:
        known = dict.fromkeys((row['pooling'], row['setting']) for row in self.rows)
        return [setting for setting in known if pooling in (None, setting[0])]

    def choose(self, pooling: str, without: str | None = None) -> tuple[str, str]:
        """The setting of least mean regret over the cells of other images than `without`."""
        judges = [cell for cell in self.own if _images(cell) != without]
        regrets = {s: [self.best(cell) - self.value(cell, s) for cell in judges] for s in self.settings(pooling)}
        return min(regrets, key=lambda setting: sum(regrets[setting]))

    def shrinkage(self, setting: tuple[str, str]) -> int:
        """The shrinkage of whitening with the largest mean value over the cells."""
        return max(SHRINKAGES, key=lambda c: sum(self.value(cell, setting, whitened(c)) for cell in self.own))

    def mean(self, setting: tuple[str, str] | Callable, after: str, metric: str, cells: Any = None) -> float:
        """Mean of a score over cells; the setting may be a function of the cell."""
        cells = self.own if cells is None else cells
        settings = [setting(cell) if callable(setting) else setting for cell in cells]
        return float(np.mean([self.get(cell, s, after, metric) for cell, s in zip(cells, settings, strict=True)]))


def _images(cell: tuple[str, str, str]) -> str:
    """What images a cell is of; the photos of the two sets of classes are not the same."""
    return f'{cell[1]} {cell[2]}' if cell[2] == '64' else cell[1]


def shown_settings(results: Results) -> list[tuple[str, str]]:
    """The settings of the table, the preset last."""
    one = [s for s in results.settings() if s[0] != 'ROTP' and SHOWN.get(s[0], '') == s[1]]
    return [*one, results.choose('ROTP')]


def table(results: Results, columns: dict[str, tuple[str, Any]], chosen: bool = False) -> str:
    """Mean R@1 / mAP of every setting of the table; a column is what comes after the pooling, and cells (None: all)."""
    rows = []
    for setting in shown_settings(results):
        row = {'pooling': f'{setting[0]} {setting[1]}'.strip()}
        for title, (after, cells) in columns.items():
            row[title] = _pair(results, setting, after, cells)
        if chosen:
            own = partial(_chosen, results, setting[0])
            row['as chosen on other images'] = _pair(results, own, AS_IS, None)
        rows.append(row)
    return to_markdown(rows)


def _chosen(results: Results, pooling: str, cell: tuple[str, str, str]) -> tuple[str, str]:
    return results.choose(pooling, _images(cell))


def _pair(results: Results, setting: Any, after: str, cells: Any) -> str:
    pair = ' / '.join(f'{results.mean(setting, after, metric, cells):.1f}' for metric in ('R@1', 'mAP'))
    return pair.replace('nan / nan', '–')


def docs_table(results: Results) -> str:
    of_images = {name: (AS_IS, [cell for cell in results.own if cell[1] == name]) for name in IMAGES}
    columns = of_images | {'mean': (AS_IS, None)}
    if CENTRED in results.afters:
        after = whitened(results.shrinkage(results.choose('ROTP')))
        columns |= {CENTRED: (CENTRED, None), 'whitened': (after, None)}
    return table(results, columns)


def error_table(results: Results) -> str:
    """Every score of average pooling and of the preset, and their difference, with standard errors."""
    preset, average = results.choose('ROTP'), ('average', '')
    rows = []
    for cell in results.own:
        row: dict[str, Any] = {'network': cell[0], 'images': cell[1]}
        for metric in METRICS:
            ours, theirs = (results.get(cell, s, AS_IS, metric) for s in (preset, average))
            error = results.get(cell, preset, AS_IS, f'{metric} − average ±')
            row[metric] = f'{theirs:.1f} → {ours:.1f} ({ours - theirs:+.1f} ± {error:.1f})'
        rows.append(row)
    return to_markdown(rows)


def verdict(results: Results) -> str:
    preset = results.choose('ROTP')
    lines = []
    for after in (AS_IS, CENTRED)[: len(results.afters)]:
        gain = results.mean(preset, after, 'R@1') - results.mean(('average', ''), after, 'R@1')
        best = max(shown_settings(results), key=lambda s: results.mean(s, after, 'R@1'))
        short = results.mean(best, after, 'R@1') - results.mean(preset, after, 'R@1')
        name = f'{best[0]} {best[1]}'.strip()
        lines.append(
            f'- {after}: the preset gains {gain:+.1f} points of R@1 over average (target +4.0: '
            f'{"met" if gain >= 4 else "missed"}), and is {short:.2f} below the best row, {name} (target 0.5: '
            f'{"met" if short <= 0.5 else "missed"}).'
        )
    return '\n'.join(lines)


def report(results: Results) -> str:
    preset = results.choose('ROTP')
    of_cells = {f'{cell[0].split(" (")[0]} {cell[1]}': (AS_IS, [cell]) for cell in results.own}
    missing = [cell for cell in cells() if tuple(cell.key.values()) not in results.cells]
    further = f'Not measured yet: {"; ".join(" ".join(cell.key.values()) for cell in missing)}.\n'
    if CENTRED in results.afters:
        c = results.shrinkage(preset)
        afters = {after: (after, None) for after in results.afters}
        sizes = {
            f'{size} px, {after}': (after, [cell for cell in results.cells if cell[2] == size and cell[1] in LARGER])
            for size in ('224', '320', '224 + 320')
            for after in (AS_IS, whitened(c))
        }
        further = f"""## After the pooling (mean R@1 / mAP over the cells; the preset whitens best with c = {c})

{table(results, afters)}
## Sizes (mean R@1 / mAP on birds and tiles over the ImageNet networks)

{table(results, sizes)}"""
    chosen = {_images(cell): results.choose('ROTP', _images(cell))[1] for cell in results.own}
    return f"""# Feature vectors of frozen networks

Written by `python -m benchmarks.embeddings`; its docstring holds the protocol, `embeddings.csv` every score. R@1 and
mAP in %, cosine similarity, images of the same group left out. ResNet-50 is He et al.'s v1 (not timm's `a1_in1k`),
EfficientNet-Lite0 is `tf_efficientnet_lite0.in1k`.

The preset: ROTP {preset[1]}.
{'; '.join(f'without {name}: {numbers}' for name, numbers in chosen.items())}.

{verdict(results)}

## As they are (R@1 / mAP)

{table(results, of_cells | {'mean': (AS_IS, None)}, chosen=True)}
## Average pooling → preset, with standard errors over groups

{error_table(results)}
{further}"""


def read() -> Results:
    with RESULTS.open(newline='') as file:
        return Results(list(csv.DictReader(file)))


def written(results: Results) -> dict[Path, str]:
    """The contents of the files that show the results."""
    before, rest = DOCS.read_text('utf-8').split(BEGIN)
    return {REPORT: report(results), DOCS: f'{before}{BEGIN}{docs_table(results)}{END}{rest.split(END)[1]}'}


def is_current() -> bool:
    """Whether report and docs are what embeddings.csv says."""
    return all(path.read_text('utf-8') == text for path, text in written(read()).items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_arguments(parser)
    parser.add_argument('--check', action='store_true', help='whether report and docs are what embeddings.csv says')
    args = parser.parse_args()
    if args.check:
        sys.exit(not is_current())
    torch.set_num_threads(args.threads)
    results = read() if RESULTS.exists() else Results([])
    for after in (AS_IS, CENTRED):  # the settings to centre and whiten are known when all are scored as they are
        for cell in cells():
            if ('320' in cell.size and after == AS_IS) or any(
                row | cell.key | {'after': after} == row for row in results.rows
            ):
                continue
            print(*cell.key.values(), after, flush=True)
            if after == AS_IS:
                rows = score(cell, SETTINGS, None, args)
            else:
                shown = [s for s in SETTINGS if (s.pooling, s.numbers) in shown_settings(results)]
                other = '320' in cell.size
                rows = score(cell, shown, (results.shrinkage(results.choose('ROTP')),) if other else SHRINKAGES, args)
            known = {tuple(row.values())[:6]: row for row in [*results.rows, *rows]}
            results = Results(list(known.values()))
            write_atomically(RESULTS, to_csv(results.rows))
    for path, text in written(read()).items():
        write_atomically(path, text)


if __name__ == '__main__':
    main()
