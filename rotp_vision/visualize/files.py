"""Figures as pixels and as files."""

import io
import os
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image


def save_figure(figure: Figure, path: str | Path):
    """The figure as a PNG file, written whole or not at all."""
    write_whole(Path(path), to_png(to_pixels(figure)))


def to_pixels(figure: Figure) -> np.ndarray:
    """(H, W, 3) what the figure looks like."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def to_png(pixels: np.ndarray) -> bytes:
    """A PNG file's content."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, 'PNG', optimize=True)
    return buffer.getvalue()


def write_whole(path: Path, content: bytes):
    """`content` into `path`, all of it or nothing."""
    partial = path.with_name(f'.{path.name}.{os.getpid()}')
    partial.write_bytes(content)
    partial.replace(path)
