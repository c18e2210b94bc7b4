"""Opening image files, by everything that reads any."""

from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

# Whatever a file is called, Pillow would try all of its decoders on it, among them one that starts Ghostscript.
_WANTED = ('JPEG', 'PNG', 'WEBP', 'BMP', 'GIF', 'TIFF', 'PPM', 'AVIF')
Image.init()
FORMATS = tuple(name for name in _WANTED if name in Image.OPEN)


class UnreadableImage(ValueError):
    """An image that cannot be decoded, by its name and the reason."""

    def __init__(self, name: str, reason: str):
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f'{self.name} is not an image that can be read: {self.reason}'


def to_rgb(image: Image.Image) -> Image.Image:
    """The decoded image in RGB; 16 bits a channel become 8."""
    if image.mode.startswith('I'):  # grey values to 65535, all of which but the darkest would become white
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
        name: what to call it where it cannot be read; by default its path.
        decode: from the opened image, of which only the header has been read, to a decoded one in RGB.

    Raises:
        UnreadableImage: whatever is wrong with it.
    """
    try:
        with Image.open(file, formats=FORMATS) as image:
            return decode(image)
    except Exception as error:  # decoders raise whatever they like
        raise UnreadableImage(name or str(file), str(error) or type(error).__name__) from error
