"""The paper's analysis of its layers, repeated: a table and a plot for each part. See PAPER.md.

    python -m benchmarks.paper --output runs/paper

runs on CPU in a few minutes. With `--page benchmarks/PAPER.md` the tables and plots of that page are renewed too.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from benchmarks import paper_analyses, paper_figures
from benchmarks.tables import Row, pivot, to_csv, to_markdown
from rotp_vision.files import write_atomically

ANALYSES = ('convergence', 'stability', 'precision', 'runtime', 'differences')
EXPONENTS = range(-5, 5)


class Results:
    """Writes the results of an analysis, and keeps the Markdown tables for the page."""

    def __init__(self, output: Path):
        self.output = output
        self.tables: dict[str, str] = {}
        self.figures: list[Path] = []
        output.mkdir(parents=True, exist_ok=True)

    def table(self, name: str, rows: Sequence[Row], **readable: Sequence[Row]):
        """`rows` as name.csv, and as name.md: as they are, or arranged as the tables name_suffix in `readable`."""
        arranged = {f'{name}_{suffix}': table for suffix, table in readable.items()} or {name: rows}
        tables = {key: to_markdown(table) for key, table in arranged.items()}
        write_atomically(self.output / f'{name}.csv', to_csv(rows))
        write_atomically(self.output / f'{name}.md', '\n'.join(tables.values()))
        self.tables |= tables

    def figure(self, name: str, figure: Figure):
        path = self.output / f'{name}.png'
        save_figure(figure, path)
        self.figures.append(path)


def save_figure(figure: Figure, path: Path):
    """A small PNG: 256 colours are enough for a plot."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(90)
    canvas.draw()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert('RGB').quantize(256).save(path, optimize=True)


def convergence(results: Results, **sizes: int):
    rows = paper_analyses.convergence(**sizes)
    tables = {'expectation': '⟨−X, P⟩', 'objective': 'objective'}
    results.table('convergence', rows, **{k: pivot(rows, ['solver'], 'iterations', v) for k, v in tables.items()})
    results.figure('convergence', paper_figures.convergence(rows))


def stability(results: Results, exponents: Sequence[int] = EXPONENTS, seeds: Sequence[int] = (0, 1, 2)):
    rows, masses = paper_analyses.stability(exponents)
    results.table('stability', rows)
    settings = paper_analyses.stability_settings(exponents, seeds)
    named = [row | {'seed': f'seed {row["seed"]}', 'failed': f'{row["NaN"]} + {row["wrong mass"]}'} for row in settings]
    results.table('stability_settings', settings, counts=pivot(named, ['solver', 'α0', 'steps', 'τ'], 'seed', 'failed'))
    results.figure('stability', paper_figures.stability(masses, exponents))


def precision(results: Results, **sizes: int):
    rows, plans = paper_analyses.precision(**sizes)
    named = [row | {'limit': f'{row["pooling"]}, {row["setting"]}'} for row in rows]
    errors = {key: pivot(named, ['solver'], 'limit', f'{key} error') for key in ('pooled', 'plan')}
    results.table('precision', rows, **errors)
    settings = paper_analyses.precision_settings()
    pooled = pivot(settings, ['solver', 'T', 'ρ'], 'pooling', 'pooled error')
    results.table('precision_settings', settings, pooled=pooled)
    results.figure('precision', paper_figures.precision(plans))


def runtime(results: Results, repeats: int = 20, iteration_counts=(5, 10, 20, 50), sample_counts=(50, 200, 800)):
    rows = paper_analyses.runtime(repeats, iteration_counts, sample_counts)
    panels = {
        f'{"structure" if structure else "plain"}_{against}': pivot(
            [row for row in rows if row['α0'] == structure and row['against'] == against],
            ['solver'],
            'value',
            'relative time',
        )
        for structure in (0.1, 0.0)
        for against in ('T', 'N')
    }
    results.table('runtime', rows, **panels)
    results.figure('runtime', paper_figures.runtime(rows))


def differences(results: Results, most_iters: int = 4096):
    updates, duals = paper_analyses.sinkhorn_update(), paper_analyses.dual_steps(most_iters)
    scales = paper_analyses.channel_scale()
    results.table('sinkhorn_update', updates, excess=pivot(updates, ['update'], 'steps', 'objective − optimum'))
    results.table('dual_steps', duals, excess=pivot(duals, ['variant'], 'iterations', 'relative excess'))
    results.table('structural_factor', paper_analyses.structural_factor())
    tables = {'samples': 'effective samples', 'inflation': 'output / mean'}
    results.table('scale', scales, **{k: pivot(scales, ['feature scale'], 'scale', v) for k, v in tables.items()})
    results.figure('differences', paper_figures.differences(updates, duals, scales))


def renew_page(page: Path, results: Results, prefix: str = 'paper'):
    """Put the tables between their marks `<!-- table: name -->` and `<!-- end -->`, and the plots into figures/."""
    text = page.read_text('utf-8')
    for name, table in results.tables.items():
        text, count = re.subn(
            rf'(<!-- table: {name} -->\n).*?(<!-- end -->)', lambda m, t=table: m[1] + t + m[2], text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f'{page} must have one mark for the table {name}, got {count}')
    write_atomically(page, text)
    figures = page.parent / 'figures'
    figures.mkdir(exist_ok=True)
    for path in results.figures:
        (figures / f'{prefix}_{path.name}').write_bytes(path.read_bytes())


def main(arguments: Sequence[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--output', type=Path, default=Path('runs/paper'), help='directory for tables and plots')
    parser.add_argument(
        '--only', nargs='+', choices=ANALYSES, default=ANALYSES, help='analyses to make; all by default'
    )
    parser.add_argument('--page', type=Path, help='Markdown page whose marked tables and plots are renewed')
    args = parser.parse_args(arguments)
    mpl.rcParams.update({'font.size': 10, 'axes.titlesize': 10})
    # Sharp plans hold numbers next to zero, with which a processor is many times slower than with zero.
    torch.set_flush_denormal(True)
    results = Results(args.output)
    for name in args.only:
        print(f'{name} …', flush=True)
        globals()[name](results)
    if args.page is not None:
        renew_page(args.page, results)
    print(f'tables and plots are in {args.output}')


if __name__ == '__main__':
    main()
