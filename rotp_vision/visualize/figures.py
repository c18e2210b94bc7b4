"""Figures as pixels and as files."""

import io
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from rotp_vision.files import write_atomically


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
