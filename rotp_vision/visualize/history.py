"""How plans and weights change in training."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

SYMBOLS = {
    'structure': 'α0, structure',
    'smoothness': 'α1, smoothness',
    'feature_penalty': 'α2, feature penalty',
    'sample_penalty': 'α3, sample penalty',
    'step': 'ρ, step',
    'proximal': 'τ, proximal',
    'norm_power': 'β, power of the norm prior',
    'gain': 'gain',
}


def plot_plans(plans: Sequence[Tensor], labels: Sequence[str]) -> Figure:
    """Plans (D, N) side by side on one colour scale, as they change in training (paper, figure "visual_p").

    Args:
        plans: each (D, N), not logarithms; the first axis is features, the second samples.
        labels: one per plan, such as 'epoch 10'.
    """
    if not plans or len(plans) != len(labels):
        raise ValueError(
            f'plans and labels must have the same length, at least one, got {len(plans)} and {len(labels)}'
        )
    if any(plan.dim() != 2 for plan in plans):
        raise ValueError(f'plans must have shape (D, N), got {[tuple(plan.shape) for plan in plans]}')
    figure = Figure(figsize=(1.9 * len(plans) + 1.1, 3.4), layout='constrained')
    panels = np.atleast_1d(figure.subplots(1, len(plans), sharey=len({plan.shape for plan in plans}) == 1))
    pixels = [plan.detach().cpu().float().numpy() for plan in plans]
    # The colour shows the square root of the mass, so that a spread-out plan is visible beside a sharp one.
    scale = PowerNorm(0.5, vmin=0, vmax=max(float(plan.max()) for plan in pixels))
    drawn = None
    for axes, plan, label in zip(panels, pixels, labels, strict=True):
        drawn = axes.imshow(plan, cmap='Blues', norm=scale, aspect='auto', interpolation='none')
        axes.set(title=label, xlabel='samples')
    panels[0].set_ylabel('features')
    assert drawn is not None
    figure.colorbar(drawn, ax=list(panels), label='mass P (colour by its square root)', shrink=0.9)
    return figure


def plot_weights(history: Sequence[Mapping[str, Tensor]] | str | Path) -> Figure:
    """Learned weights over epochs: a panel for each of α0 … α3, ρ, τ and the gain, a line for each module.

    Args:
        history: what `ROTPool.named_weights` returned after each epoch; or a CSV file with the columns epoch, weight
            (path of the layer, a dot and the name), module and value. Of a gain per channel the mean is drawn.
    """
    lines = _lines_of_file(Path(history)) if isinstance(history, (str, Path)) else _lines(history)
    if not lines:
        raise ValueError(f'history must hold at least one weight, got {history!r}')
    names = list(dict.fromkeys(name for name, _ in lines))
    columns = min(len(names), 3)
    figure = Figure(figsize=(3.6 * columns, 2.8 * -(-len(names) // columns)), layout='constrained')
    grid = figure.subplots(-(-len(names) // columns), columns, squeeze=False).flatten()
    for axes, name in zip(grid, names, strict=False):
        modules = {module: line for (other, module), line in lines.items() if other == name}
        for module, line in modules.items():
            label = f'module {module + 1}: {line[-1][1]:.3g}' if len(modules) > 1 else f'{line[-1][1]:.3g}'
            axes.plot(*zip(*line, strict=True), marker='o', markersize=3, label=label)
        path, _, last = name.rpartition('.')
        axes.set_title(SYMBOLS.get(last, last) + (f'\n{path}' if path else ''), fontsize=10)
        axes.set_xlabel('epoch')
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    return figure


# Weights over epochs, as {(name, module): [(epoch, value)]}


def _lines(history: Sequence[Mapping[str, Tensor]]) -> dict[tuple[str, int], list[tuple[float, float]]]:
    lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for epoch, weights in enumerate(history):
        for name, value in weights.items():
            values = [float(value.mean())] if name == 'gain' else value.flatten().tolist()
            for module, number in enumerate(values):
                lines.setdefault((name, module), []).append((epoch, number))
    return lines


def _lines_of_file(path: Path) -> dict[tuple[str, int], list[tuple[float, float]]]:
    lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with path.open(encoding='utf-8', newline='') as file:
        reader = csv.DictReader(file)
        missing = {'epoch', 'weight', 'module', 'value'} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f'{path} must have the columns epoch, weight, module and value; missing {sorted(missing)}')
        for row in reader:
            line = lines.setdefault((row['weight'], int(row['module'])), [])
            line.append((float(row['epoch']), float(row['value'])))
    return lines
