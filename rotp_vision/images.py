"""Opening image files; every reader of the package uses it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

# Pillow tries all of its decoders on a file, whatever its name, and one of them starts Ghostscript.
_WANTED = ('JPEG', 'PNG', 'WEBP', 'BMP', 'GIF', 'TIFF', 'PPM', 'AVIF')
Image.init()
FORMATS = tuple(name for name in _WANTED if name in Image.OPEN)


class UnreadableImage(ValueError):
    """An image cannot be decoded; the error holds its name and the reason."""

    def __init__(self, name: str, reason: str):
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f'{self.name} is not an image that can be read: {self.reason}'


def to_rgb(image: Image.Image) -> Image.Image:
    """The decoded image in RGB; 16 bits a channel become 8."""
    if image.mode == 'F':
        raise ValueError('values in floating point have no known range: save the image with 8 or 16 bits a channel')
    if image.mode.startswith('I'):  # 16-bit grey values; Pillow's conversion would clip almost all of them to white
        grey = np.asarray(image).astype(np.float64) / 257
        image = Image.fromarray(grey.round().clip(0, 255).astype(np.uint8))
    image.load()
    return image if image.mode == 'RGB' else image.convert('RGB')


def open_image(
    file: str | Path | IO[bytes],
    name: str | None = None,
    decode: Callable[[Image.Image], Image.Image] = to_rgb,
) -> Image.Image:
    """The RGB image in a file; 16 bits a channel become 8.

    Args:
        file: its path, or the file itself.
        name: its name in errors; by default its path.
        decode: turns the opened image, of which only the header has been read, into a decoded one in RGB.

    Raises:
        UnreadableImage: if the file cannot be decoded, for any reason.
    """
    try:
        if isinstance(file, (str, Path)) and os.path.exists(file) and not os.path.isfile(file):
            raise ValueError('not a regular file')  # a pipe would block
        with Image.open(file, formats=FORMATS) as image:
            return decode(image)
    except Exception as error:  # decoders raise errors of any class
        raise UnreadableImage(name or str(file), str(error) or type(error).__name__) from error
