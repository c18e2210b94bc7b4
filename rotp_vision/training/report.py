"""What a run shows: CSV files, tables, curves, and where the pooling looked."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from rotp_vision.training.checkpoint import write_atomically


class CsvLog:
    """Rows in a CSV file; a continued run starts it anew from the rows its checkpoint holds."""

    def __init__(self, path: Path, rows: list[dict[str, Any]]):
        self.path, self.rows = path, rows
        if rows:
            write_atomically(path, _csv_text(rows, header=True))
        else:
            path.unlink(missing_ok=True)

    def append(self, row: dict[str, Any]) -> None:
        text = _csv_text([row], header=not self.rows)
        self.rows.append(row)
        with self.path.open('a') as file:
            file.write(text)


def _csv_text(rows: Sequence[dict[str, Any]], *, header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator='\n')
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def show_plan(console: Console, title: str, facts: Mapping[str, object]) -> None:
    """Facts about what will run, one per line."""
    table = Table(title=title, title_justify='left', show_header=False, box=None, padding=(0, 2))
    for name, value in facts.items():
        table.add_row(name, str(value))
    console.print(table)


def show_summary(
    console: Console, summary: Mapping[str, Mapping[str, float]], weights: Mapping[str, Sequence[float]]
) -> None:
    """Accuracy before and after, and the learned weights."""
    table = Table(title='Validation', title_justify='left')
    for column in ('pooling', 'top-1 %', 'top-5 %', 'loss', 'images'):
        table.add_column(column, justify='left' if column == 'pooling' else 'right')
    for name, row in summary.items():
        table.add_row(name, f'{row["top1"]:.2f}', f'{row["top5"]:.2f}', f'{row["loss"]:.4f}', str(int(row['images'])))
    console.print(table)
    if weights:
        table = Table('weight', 'value per module', title='Learned weights', title_justify='left')
        for name, values in weights.items():
            table.add_row(name, '  '.join(f'{value:.4g}' for value in values))
        console.print(table)


def learned_weights(pools: Mapping[str, nn.Module]) -> dict[str, list[float]]:
    """The positive weights of every ROTP layer as path.name → one value per module; a gain per channel as its mean."""
    weights = {}
    for path, layer in pools.items():
        for name, value in layer.named_weights().items():  # type: ignore[operator]
            if value.numel() > 16:
                weights[f'{path}.{name} (mean)'] = [value.mean().item()]
            else:
                weights[f'{path}.{name}'] = value.flatten().tolist()
    return weights


def plot_curves(path: Path, epochs: Sequence[Mapping[str, Any]]) -> None:
    """Loss and accuracy over the epochs of both stages."""
    figure, (left, right) = _figure(1, 2, (10, 4))
    x = np.arange(1, len(epochs) + 1)
    left.plot(x, [row['train_loss'] for row in epochs], label='training', marker='.')
    left.plot(x, [row['loss'] for row in epochs], label='validation', marker='.')
    left.set(xlabel='epoch', ylabel='loss')
    right.plot(x, [row['top1'] for row in epochs], label='top-1', marker='.', color='C1')
    right.set(xlabel='epoch', ylabel='validation accuracy (%)')
    first = next((number for number, row in zip(x, epochs, strict=True) if row['stage'] == 2), None)
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        if first is not None and first > 1:
            axes.axvline(first - 0.5, color='grey', linestyle=':', label='ROTP from here')
        axes.legend()
    figure.savefig(path, dpi=120)


def plot_weights(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Each learned weight over the epochs of stage 2, relative to its start (values beside the names)."""
    figure, axes = _figure(1, 1, (7, 4))
    for name in dict.fromkeys((row['weight'], row['module']) for row in rows):
        values = [row['value'] for row in rows if (row['weight'], row['module']) == name]
        label = f'{name[0]}[{name[1]}]: {values[0]:.4g} → {values[-1]:.4g}'
        axes.plot(range(len(values)), [value / values[0] for value in values], label=label, marker='.')
    axes.set(xlabel='epoch of stage 2', ylabel='learned weight / its start')
    axes.ticklabel_format(useOffset=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


@torch.no_grad()
def where_pool_looked(model: nn.Module, pool: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, W) share of the pooled features that each place gives, and the (B, classes) logits.

        w_n = Σ_d c_d softmax_n(log P_dn),   c_d = |f_d| / Σ_d |f_d|

    the row-normalised plan, that is the weights the pooling averages with, over the features by what they contribute.
    Average pooling has w_n = 1 / N everywhere.
    """
    seen: list[Tensor] = []
    hook = pool.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        logits = model(images)
    finally:
        hook.remove()
    maps = seen[0]
    rows = pool.map_log_plan(maps).softmax(-1)  # type: ignore[operator]  # (B, D, N)
    pooled = (pool.sets(maps).to(rows.dtype) * rows).sum(-1).abs()  # type: ignore[operator]
    share = pooled / pooled.sum(1, keepdim=True)
    height, width = maps.shape[1:3] if getattr(pool, 'input_fmt', 'NCHW') == 'NHWC' else maps.shape[2:]
    return torch.einsum('bd,bdn->bn', share, rows).unflatten(1, (height, width)), logits


def plot_looked(
    path: Path, images: Tensor, looked: Tensor, titles: Sequence[str], mean: Sequence[float], std: Sequence[float]
) -> None:
    """Images, and above each the places the pooling weighs more than average pooling would.

    Args:
        path: the PNG.
        images: (B, 3, H, W) as the network sees them.
        looked: (B, h, w) from `where_pool_looked`.
        titles: one per image.
        mean: of the normalisation.
        std: of the normalisation.
    """
    pictures = images.cpu().float() * torch.tensor(std).view(1, 3, 1, 1) + torch.tensor(mean).view(1, 3, 1, 1)
    pictures = pictures.clamp(0, 1).permute(0, 2, 3, 1).numpy()
    ratio = looked.cpu().float() * looked[0].numel()  # 1 is what average pooling gives every place
    heat = F.interpolate(ratio.unsqueeze(1), images.shape[-2:], mode='bilinear').squeeze(1).numpy()
    figure, axes = _figure(2, len(titles), (1.7 * len(titles) + 0.8, 3.9))
    top = max(float(heat.max()), 1.5)
    drawn = None
    for column, title in enumerate(titles):
        axes[0, column].imshow(pictures[column])
        axes[0, column].set_title(title, fontsize=8)
        axes[1, column].imshow(pictures[column].mean(-1), cmap='gray', vmin=0, vmax=1)
        drawn = axes[1, column].imshow(heat[column], cmap='inferno', alpha=0.7, vmin=0, vmax=top)
        for row in (0, 1):
            axes[row, column].set_axis_off()
    bar = figure.colorbar(drawn, ax=axes[1, :].tolist())
    bar.set_label('weight of a place\n(average pooling: 1)', fontsize=8)
    figure.savefig(path, dpi=120)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its axes that need no display and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(size, layout='constrained')
    return figure, figure.subplots(rows, columns, squeeze=rows == 1 and columns in (1, 2))
