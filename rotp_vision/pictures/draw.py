"""Drawing maps over images, with one scale of colours for all pictures, and learned weights over epochs."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm, to_rgb
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from rotp_vision.files import write_atomically

# Colours below and above the middle of a scale, which colour-blind readers can tell apart.
WEIGHT_COLOURS = ('#5e3c99', '#e66101')
EVIDENCE_COLOURS = ('#1b4f9c', '#c8102e')
# Weight of a position relative to average pooling: least, middle and most. Fixed, so that a flat map looks flat.
WEIGHT_SCALE = (0.0, 1.0, 4.0)
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


def displayed(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """(H, W, 3) in 0 … 1: the image as the network saw it, cropped and resized."""
    image = x.cpu().float() * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    return image.clamp(0, 1).permute(1, 2, 0).numpy()


def overlay_weight(axes: Axes, image: np.ndarray, weight: Tensor) -> ScalarMappable:
    """Draw the weight (h, w) of each position over the grey image, transparent where it equals average pooling's."""
    return overlay(axes, image, weight.cpu().float() * weight.numel(), WEIGHT_COLOURS, WEIGHT_SCALE)


def overlay(
    axes: Axes, image: np.ndarray, values: Tensor, colours: tuple[str, str], scale: tuple[float, float, float]
) -> ScalarMappable:
    """Draw a map over the grey image, the more opaque the further a value is from the middle of the scale."""
    height, width = image.shape[:2]
    grey = image @ np.array([0.299, 0.587, 0.114])
    smooth = F.interpolate(values[None, None], (height, width), mode='bilinear', align_corners=False)[0, 0].numpy()
    norm = TwoSlopeNorm(scale[1], scale[0], scale[2])
    offset = 2 * norm(smooth).filled().clip(0, 1) - 1
    layer = np.empty((height, width, 4))
    layer[..., :3] = np.where(offset[..., None] < 0, to_rgb(colours[0]), to_rgb(colours[1]))
    layer[..., 3] = 0.85 * np.abs(offset)
    axes.imshow(0.35 + 0.65 * grey, cmap='gray', vmin=0, vmax=1)
    axes.imshow(layer)
    return ScalarMappable(norm, LinearSegmentedColormap.from_list('', [colours[0], 'white', colours[1]]))


def plot_looked(images: Sequence[np.ndarray], weights: Sequence[Tensor], titles: Sequence[str]) -> Figure:
    """Images, and below each the weight of its positions in the pooling.

    Args:
        images: each (H, W, 3) in 0 … 1.
        weights: each (h, w), as `pool_maps` returns them.
        titles: one per image.
    """
    figure = Figure(figsize=(1.7 * len(titles) + 0.8, 3.9), layout='constrained', dpi=120)
    panels = figure.subplots(2, len(titles), squeeze=False)
    drawn = None
    for (above, below), image, weight, title in zip(panels.T, images, weights, titles, strict=True):
        above.imshow(image)
        above.set_title(title, fontsize=8, parse_math=False)  # a $ in a name is no formula
        drawn = overlay_weight(below, image, weight)
        for axes in (above, below):
            axes.set_axis_off()
    if drawn is not None:
        bar = figure.colorbar(drawn, ax=panels[1].tolist(), extend='max')
        bar.set_label('weight of a position\n(average pooling: 1)', fontsize=8)
    return figure


def plot_weights(table: str | Path) -> Figure:
    """Learned weights over epochs: a panel for each weight, with a line for each iteration that has its own.

    Args:
        table: a CSV file with the columns epoch, weight (path of the layer, a dot and the name), iteration and value.
    """
    lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with Path(table).open(encoding='utf-8', newline='') as file:
        reader = csv.DictReader(file)
        missing = {'epoch', 'weight', 'iteration', 'value'} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(
                f'{table} must have the columns epoch, weight, iteration and value; missing {sorted(missing)}'
            )
        for row in reader:
            line = lines.setdefault((row['weight'], int(row['iteration'])), [])
            line.append((float(row['epoch']), float(row['value'])))
    if not lines:
        raise ValueError(f'{table} must hold at least one weight')
    names = list(dict.fromkeys(name for name, _ in lines))
    columns = min(len(names), 3)
    figure = Figure(figsize=(3.6 * columns, 2.8 * -(-len(names) // columns)), layout='constrained')
    grid = figure.subplots(-(-len(names) // columns), columns, squeeze=False).flatten()
    for axes, name in zip(grid, names, strict=False):
        iterations = {iteration: line for (other, iteration), line in lines.items() if other == name}
        for iteration, line in iterations.items():
            label = f'iteration {iteration + 1}: {line[-1][1]:.3g}' if len(iterations) > 1 else f'{line[-1][1]:.3g}'
            axes.plot(*zip(*line, strict=True), marker='o', markersize=3, label=label)
        path, _, last = name.rpartition('.')
        axes.set_title(SYMBOLS.get(last, last) + (f'\n{path}' if path else ''), fontsize=10)
        axes.set_xlabel('epoch')
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    return figure


def save_figure(figure: Figure, path: str | Path):
    """Write the figure as a PNG file, whole or not at all."""
    write_atomically(Path(path), to_png(to_pixels(figure)))


def to_pixels(figure: Figure) -> np.ndarray:
    """The drawn figure as RGB pixels (H, W, 3)."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def to_png(pixels: np.ndarray) -> bytes:
    """The content of a PNG file with these pixels."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, 'PNG', optimize=True)
    return buffer.getvalue()
