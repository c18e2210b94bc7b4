"""`rotp-vision demo`: one pooling layer learns two questions, of which average and max pooling answer one each."""

import csv
import io
import multiprocessing
import os
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
import torch
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform
from tqdm import tqdm

from rotp_vision.data.config import DataConfig
from rotp_vision.data.generated import CLASSES_OF, Question
from rotp_vision.data.sources import open_sources
from rotp_vision.files import write_atomically
from rotp_vision.hub import load_pretrained
from rotp_vision.pictures import plot_looked, pool_maps, save_figure
from rotp_vision.tables import text_table
from rotp_vision.training.script import config_file, train

# Where it exists, a server imports once and every run is a fork of it.
FORKS = multiprocessing.get_context('spawn' if sys.platform == 'win32' else 'forkserver')
FORKS.set_forkserver_preload(['rotp_vision.training.setup', __name__])

EPOCHS: dict[Question, int] = {'one object': 6, 'most frequent': 8}
AVERAGE, MAX, NORMS, ROTP, TWO_STAGES = 'average', 'max', 'mean weighted by norms', 'ROTP', 'average, then ROTP'
POOLINGS = (AVERAGE, MAX, NORMS, ROTP, TWO_STAGES)
NUM_VAL, SIDE = 1000, 64  # as in configs/demo.yaml
SHOWN = 4  # images of each question in looked.png


class Row(NamedTuple):
    """One run of the training script."""

    question: Question
    pooling: str
    seed: int

    def directory(self, output: Path) -> Path:
        return output / f'{self.question}, {self.pooling}, seed {self.seed}'.replace(', ', '-').replace(' ', '-')

    def arguments(self, output: Path) -> list[str]:
        """The arguments of train_imagenet.py; a finished run is not repeated, an interrupted one continues."""
        epochs = EPOCHS[self.question]
        first = {NORMS: 0, ROTP: 0, TWO_STAGES: epochs // 3}.get(self.pooling, epochs)
        arguments = [f'--config={config_file("demo")}', f'--output={self.directory(output)}', '--resume=auto']
        arguments += [f'--seed={self.seed}', f'--data.question={self.question}']
        arguments += [f'--stage1.epochs={first}', f'--stage2.epochs={epochs - first}']
        if self.pooling == NORMS:
            arguments += ['--pool.options={pool: gem, power: 1.0, norm_power: 2.0, learn: true}']
        return arguments + (['--model.kwargs={global_pool: max}'] if self.pooling == MAX else [])


def demo(output: str | Path = 'runs/demo', seeds: int = 1) -> str:
    """Train every pooling on both questions, two runs at a time with one thread each; returns a verdict and a table.

    Writes results.csv (question, pooling, seed, top1), looked.png and a directory for each run.

    Args:
        output: directory to write. What is finished there is not computed again.
        seeds: runs of each question and pooling.
    """
    if seeds < 1:
        raise ValueError(f'seeds must be at least 1, got {seeds}')
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    rows = [Row(question, pooling, seed) for seed in range(seeds) for question in EPOCHS for pooling in POOLINGS]
    top1 = {}
    with FORKS.Pool(min(2, os.cpu_count() or 1), maxtasksperchild=1) as pool:
        jobs = [(row.directory(output), row.arguments(output)) for row in rows]
        bar = tqdm(zip(rows, pool.imap(_run, jobs), strict=True), total=len(rows), unit='run')
        for row, value in bar:
            bar.write(f'{row.question}, {row.pooling}, seed {row.seed}: {value:.1f} %')
            top1[row] = value
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerows([[*Row._fields, 'top1'], *([*row, f'{value:.2f}'] for row, value in top1.items())])
    write_atomically(output / 'results.csv', text.getvalue())
    _draw(output)
    return f'{report(top1)}\n\nwrote {output / "results.csv"} and {output / "looked.png"}'


def _run(job: tuple[Path, list[str]]) -> float:
    """Train, in a process of its own; returns the top-1 in percent on the validation images."""
    directory, arguments = job
    directory.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # small networks are faster with one thread, and the runs do not wait for each other
    with (directory / 'log.txt').open('w+') as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
        try:
            train(arguments)
        except SystemExit as end:
            if end.code:
                log.seek(0)
                raise RuntimeError(f'a run failed, see {log.name}:\n{log.read()[-2000:]}') from end
    with (directory / 'metrics.csv').open(newline='') as file:
        return float(list(csv.DictReader(file))[-1]['top1'])


def report(top1: dict[Row, float]) -> str:
    """A verdict with standard errors (over seeds, or of the images if there is one seed), the table, and its limits."""
    shown = {(question, pooling): _with_error(top1, question, pooling) for question in EPOCHS for pooling in POOLINGS}

    def both(pooling: str) -> str:
        return ' and '.join(f'{shown[question, pooling]} %' for question in EPOCHS)

    table = [['pooling', *(f'{question}, top-1 %' for question in EPOCHS)]]
    table += [[pooling, *(shown[question, pooling] for question in EPOCHS)] for pooling in POOLINGS]
    return (
        f'One ROTP layer learns both questions ({both(ROTP)}); average pooling has {both(AVERAGE)}, max pooling '
        f'{both(MAX)}.\n\n{text_table(table)}\n\n'
        'one object: which object is on the image? most frequent: which kind of object is the most frequent of ten?\n'
        'A mean weighted by the norms of the positions, with one learned power, does most of what ROTP does here.\n'
        'docs/training.md has other questions, networks and poolings, some of them ahead of ROTP.'
    )


def _with_error(top1: dict[Row, float], question: str, pooling: str) -> str:
    values = [value for row, value in top1.items() if (row.question, row.pooling) == (question, pooling)]
    share = mean(values) / 100
    error = 100 * (share * (1 - share) / NUM_VAL) ** 0.5 if len(values) == 1 else stdev(values) / len(values) ** 0.5
    return f'{mean(values):.1f} ± {error:.1f}'


def _draw(output: Path) -> None:
    """Draw looked.png: validation images of both questions, and the weight of each position under ROTP."""
    pictures, weights, titles = [], [], []
    for question in EPOCHS:
        model = load_pretrained(Row(question, ROTP, 0).directory(output) / 'export')
        transform = create_transform(**resolve_data_config(model=model))
        _, val = open_sources(DataConfig(source='generated', question=question, image_size=SIDE), 0)
        read = [val.read(index) for index in range(SHOWN)]
        with torch.inference_mode():
            maps = pool_maps(model, torch.stack([transform(image) for image, _ in read]))  # pyright: ignore
        pictures += [np.asarray(image) / 255 for image, _ in read]
        weights += list(maps.weight)
        titles += [f'{question}:\n{CLASSES_OF[question][label]}' for _, label in read]
    save_figure(plot_looked(pictures, weights, titles), output / 'looked.png')
