"""The plots of paper.py, drawn from the rows and plans of its analyses."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.paper_analyses import LIMITS, PUBLISHED_SINKHORN, RUNTIME_SOLVERS, SOLVERS
from benchmarks.tables import Row

# Colour-blind safe, and told apart by marker and dash in black and white.
STYLES = {
    PUBLISHED_SINKHORN: {'color': '#000000', 'marker': 'x', 'linestyle': ':'},
    'Sinkhorn': {'color': '#0072B2', 'marker': 'o', 'linestyle': '-'},
    'BADMM-E': {'color': '#D55E00', 'marker': 's', 'linestyle': '--'},
    'BADMM-Q': {'color': '#E69F00', 'marker': 'D', 'linestyle': '--'},
    'coupled BADMM-E': {'color': '#009E73', 'marker': '^', 'linestyle': '-.'},
    'coupled BADMM-Q': {'color': '#CC79A7', 'marker': 'v', 'linestyle': '-.'},
}


def convergence(rows: Sequence[Row]) -> Figure:
    """Three panels against iterations: <-X, P>, the entropic objective and the quadratic one."""
    figure = Figure(figsize=(11, 3.6), layout='constrained')
    panels = figure.subplots(1, 3)
    for name in SOLVERS:
        quadratic = name.endswith('Q')
        line = [row for row in rows if row['solver'] == name]
        iterations = [row['iterations'] for row in line]
        panels[0].plot(iterations, [row['⟨−X, P⟩'] for row in line], label=name, **STYLES[name], markersize=5)
        panels[1 + quadratic].plot(
            iterations, [row['objective'] for row in line], label=name, **STYLES[name], markersize=5
        )
    titles = ('⟨−X, P⟩', 'objective, entropic', 'objective, quadratic')
    for axes, title in zip(panels, titles, strict=True):
        axes.set(title=title, xlabel='iterations')
        _powers_of_two(axes, rows)
    figure.legend(*panels[0].get_legend_handles_labels(), loc='outside lower center', ncols=5, frameon=False)
    return figure


def stability(masses: dict[tuple, Tensor], exponents: Sequence[int]) -> Figure:
    """Heat maps of the mass, one per solver and α0; NaN is white, infinity counts as too much."""
    names = [PUBLISHED_SINKHORN, *SOLVERS]
    figure = Figure(figsize=(12, 4.8), layout='constrained')
    grid = figure.subplots(2, len(names), sharex=True, sharey=True)
    # Grey, not white, where the mass is right: white is for NaN.
    colours = mpl.colormaps['coolwarm'].with_extremes(bad='white')
    ticks = range(0, len(exponents), 3)
    image = None
    for row, structure in zip(grid, (0.0, 0.1), strict=True):
        for axes, name in zip(row, names, strict=True):
            mass = masses[name, structure].numpy()
            image = axes.imshow(np.where(np.isinf(mass), 2.0, mass), cmap=colours, vmin=0, vmax=2, origin='lower')
            nan = int(np.isnan(mass).sum())
            axes.set_title(f'{name}\nα0 = {structure:g}: {nan} NaN', fontsize=9)
            axes.set_xticks(ticks, [f'$10^{{{exponents[i]}}}$' for i in ticks])
            axes.set_yticks(ticks, [f'$10^{{{exponents[i]}}}$' for i in ticks])
        row[0].set_ylabel('α1')
    for axes in grid[1]:
        axes.set_xlabel('α2 = α3')
    assert image is not None
    figure.colorbar(image, ax=grid, label='‖P‖₁ (one is right)', extend='max', shrink=0.8)
    return figure


def precision(plans: dict[tuple, Tensor]) -> Figure:
    """Plans beside the truth: a row per solver, a column per pooling and setting; NaN is white."""
    names = ['truth', PUBLISHED_SINKHORN, *SOLVERS]
    columns = [(pooling, setting) for pooling, settings in LIMITS.items() for setting in settings]
    figure = Figure(figsize=(12, 7.2), layout='constrained')
    grid = figure.subplots(len(names), len(columns))
    colours = mpl.colormaps['Blues'].with_extremes(bad='white')
    for row, name in zip(grid, names, strict=True):
        for axes, (pooling, setting) in zip(row, columns, strict=True):
            truth = plans[pooling, setting, 'truth']
            plan = plans[pooling, setting, name].numpy()
            # The scale of the truth: what is darker than its darkest has too much mass.
            axes.imshow(np.where(np.isinf(plan), 1e9, plan), cmap=colours, vmin=0, vmax=1.25 * truth.max().item())
            axes.set_xticks([])
            axes.set_yticks([])
        row[0].set_ylabel(name.replace(' ', '\n', 1), rotation=0, ha='right', va='center')
    for axes, (pooling, setting) in zip(grid[0], columns, strict=True):
        alpha = ', '.join(_power(value) for value in LIMITS[pooling][setting])
        axes.set_title(f'{pooling}, {setting}\nα = ({alpha})', fontsize=9)
    return figure


def runtime(rows: Sequence[Row]) -> Figure:
    """Four panels: against T and N, with and without the structural term; times are relative."""
    figure = Figure(figsize=(11, 6.4), layout='constrained')
    grid = figure.subplots(2, 2)
    for line, structure in zip(grid, (0.1, 0.0), strict=True):
        for axes, against in zip(line, ('T', 'N'), strict=True):
            panel = [row for row in rows if row['α0'] == structure and row['against'] == against]
            for name in RUNTIME_SOLVERS:
                points = [row for row in panel if row['solver'] == name]
                values, times = [row['value'] for row in points], [row['relative time'] for row in points]
                axes.plot(values, times, label=name, **STYLES[name])
            what = 'iterations' if against == 'T' else 'samples N'
            term = 'with' if structure else 'without'
            axes.set(title=f'{term} structural term, against {against}', xlabel=what, ylabel='relative time')
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=4, frameon=False)
    return figure


def differences(updates: Sequence[Row], duals: Sequence[Row], scales: Sequence[Row]) -> Figure:
    """Three panels: the Sinkhorn update, the dual step, and the scale of the features."""
    figure = Figure(figsize=(12.5, 4), layout='constrained')
    update, dual, scale = figure.subplots(1, 3)
    floor = 1e-16  # float64 ends here, and a logarithmic axis has no zero
    for name in (PUBLISHED_SINKHORN, 'Sinkhorn'):
        line = [row for row in updates if row['update'] == name]
        values = [max(row['objective − optimum'], floor) for row in line]
        update.plot([row['steps'] for row in line], values, label=name, **STYLES[name])
    update.set(title='1. Sinkhorn update', xlabel='steps K', ylabel='objective − optimum', yscale='log')
    variants = dict.fromkeys(row['variant'] for row in duals)
    styles = (STYLES['coupled BADMM-Q'], STYLES['coupled BADMM-E'], STYLES['BADMM-E'])
    for name, style in zip(variants, styles, strict=True):
        line = [row for row in duals if row['variant'] == name]
        values = [max(row['relative excess'], floor) for row in line]
        dual.plot([row['iterations'] for row in line], values, label=name, **style)
    dual.set(title='2. BADMM-E and its dual step', xlabel='iterations', yscale='log')
    dual.set_ylabel('objective, relative excess')
    dual.set_xscale('log', base=4)
    for name, style in zip(('raw', 'rms', 'log'), styles, strict=True):
        line = [row for row in scales if row['feature scale'] == name]
        scale.plot([row['scale'] for row in line], [row['effective samples'] for row in line], label=name, **style)
    scale.set(title='4. What the plan sees', xlabel='scale of the features', ylabel='effective samples (of 49)')
    scale.set(xscale='log', ylim=(0, 52))
    for axes in (update, dual, scale):
        axes.legend(fontsize=8, loc='best')
        axes.grid(alpha=0.3)
    return figure


def _powers_of_two(axes: Axes, rows: Sequence[Row]):
    counts = sorted({row['iterations'] for row in rows})
    axes.set_xscale('log', base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.grid(alpha=0.3)


def _power(value: float) -> str:
    return f'$10^{{{round(np.log10(value))}}}$'
