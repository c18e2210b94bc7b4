"""Reports of a run: CSV files, tables and curves."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import nn

from rotp_vision.pictures import save_figure
from rotp_vision.surgery.pools import described_pools
from rotp_vision.tables import text_table
from rotp_vision.training.checkpoint import Progress

Rates = dict[str, float | None]


class CsvLog:
    """Rows in a CSV file, which a continued run rewrites from the rows in its checkpoint."""

    def __init__(self, path: Path, rows: list[dict[str, Any]]):
        self.path, self.rows = path, rows
        path.unlink(missing_ok=True)
        self._write(rows)

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._write([row])

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        with self.path.open('a', newline='') as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator='\n')
            if not file.tell():
                writer.writeheader()
            writer.writerows(rows)


class Logs:
    """The CSV files of a run; their rows are part of its checkpoints."""

    def __init__(self, output: Path, progress: Progress):
        self.progress = progress
        self.steps = CsvLog(output / 'steps.csv', progress.steps)
        self.epochs = CsvLog(output / 'metrics.csv', progress.epochs)
        self.learned = CsvLog(output / 'weights.csv', progress.weights)

    def step(self, loss: float, rates: Rates, speed: float, data_time_share: float) -> None:
        timing = {'images_per_second': round(speed, 1), 'data_time_share': round(data_time_share, 3)}
        self.steps.append({**self._point, 'step': self.progress.step, 'loss': loss, **rates, **timing})

    def epoch(self, loss: float, metrics: dict[str, float], rates: Rates, seconds: float) -> None:
        self.epochs.append({**self._point, 'train_loss': loss, **metrics, **rates, 'seconds': round(seconds, 2)})

    def weights(self, model: nn.Module, epoch: int) -> None:
        for name, values in learned_weights(described_pools(model)).items():
            for iteration, value in enumerate(values):
                self.learned.append({'epoch': epoch, 'weight': name, 'iteration': iteration, 'value': value})

    @property
    def _point(self) -> dict[str, int]:
        return {'stage': self.progress.stage, 'epoch': self.progress.epoch}


def plan(title: str, facts: Mapping[str, object]) -> str:
    """Returns facts about a stage, one per line, below a title."""
    width = max(map(len, facts))
    return '\n'.join([f'\n{title}', *(f'  {name.ljust(width)}  {value}' for name, value in facts.items())])


def summary(rows: Mapping[str, Mapping[str, float]], weights: Mapping[str, Sequence[float]], num_classes: int) -> str:
    """Returns tables of the accuracies, top-5 among more than ten classes, and of the learned weights."""
    columns = {
        'top1': ('top-1 %', '.2f'),
        'top5': ('top-5 %', '.2f'),
        'loss': ('loss', '.4f'),
        'images': ('images', '.0f'),
    }
    if num_classes <= 10:
        del columns['top5']
    lines = [['pooling', *(title for title, _ in columns.values())]]
    lines += [[name, *(format(row[key], form) for key, (_, form) in columns.items())] for name, row in rows.items()]
    text = f'\nValidation\n{text_table(lines)}\n'
    if weights:
        learned = [[name, '  '.join(f'{value:.4g}' for value in values)] for name, values in weights.items()]
        text += f'\nLearned weights\n{text_table([["weight", "value per iteration"], *learned])}\n'
    return text


def learned_weights(pools: Mapping[str, nn.Module]) -> dict[str, list[float]]:
    """Returns the positive weights of every ROTP layer: path.name → a value per iteration, or the mean of many."""
    weights = {}
    for path, layer in pools.items():
        for name, value in layer.named_weights().items():  # type: ignore[operator]
            if value.numel() > 16:
                weights[f'{path}.{name} (mean)'] = [value.mean().item()]
            else:
                weights[f'{path}.{name}'] = value.flatten().tolist()
    return weights


def plot_curves(path: Path, epochs: Sequence[Mapping[str, Any]]) -> None:
    """Draws loss and accuracy over the epochs of both stages."""
    figure = Figure((10, 4), layout='constrained')
    left, right = figure.subplots(1, 2)
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
    save_figure(figure, path)
