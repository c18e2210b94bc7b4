"""Generated images that ask one of two questions, on a textured background.

'one object': which object is on the image? It covers a few per cent of the image, and average pooling dilutes it.
'most frequent': which kind of object is the most frequent? Many positions count, of which max pooling sees one.

An image is a function of (seed, split, index) alone and takes about a millisecond.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from PIL import Image

CLASSES = ('disc', 'ring', 'square', 'frame', 'triangle', 'plus', 'cross', 'bars')
Question = Literal['one object', 'most frequent']
RADIUS: dict[Question, tuple[float, float]] = {'one object': (0.09, 0.13), 'most frequent': (0.075, 0.1)}
CLASSES_OF: dict[Question, tuple[str, ...]] = {'one object': CLASSES, 'most frequent': CLASSES[:6]}


def generate(
    seed: int,
    split: int,
    index: int,
    size: int,
    question: Question = 'one object',
    num_classes: int = len(CLASSES),
    radius_range: tuple[float, float] | None = None,
) -> tuple[Image.Image, int]:
    """Image `index` of a split, and its class.

    Args:
        seed: of the whole set.
        split: 0 for training, 1 for validation.
        index: of the image; classes take turns.
        size: side in pixels.
        question: what the class is.
        num_classes: the first so many of `CLASSES`.
        radius_range: radii of objects are drawn from this range, in parts of `size`; None for that of the question.
    """
    rng = np.random.default_rng((seed, split, index))
    label = index % num_classes
    shapes = [CLASSES[label]]
    if question == 'most frequent':  # ten objects of six kinds: four of the right one and at most two of any other
        others = [kind for kind in range(6) if kind != label]
        shapes = [CLASSES[kind] for kind in [label] * 4 + rng.permutation(others * 2)[:6].tolist()]
    return to_image(place_objects(rng, shapes, size, radius_range or RADIUS[question])), label


def place_objects(
    rng: np.random.Generator, shapes: Sequence[str], size: int, radius_range: tuple[float, float]
) -> np.ndarray:
    """(size, size, 3) a textured background with objects of these shapes that hardly overlap."""
    image = texture(rng, size)
    placed: list[tuple[np.ndarray, float]] = []
    for shape in shapes:
        while True:
            radius = size * rng.uniform(*radius_range)
            centre = rng.uniform(radius, size - radius, 2)
            if all(np.hypot(*(centre - other)) > 1.2 * (radius + reach) for other, reach in placed):
                break
        placed.append((centre, radius))
        draw_object(rng, image, shape, radius, centre)
    return image


def draw_object(rng: np.random.Generator, image: np.ndarray, shape: str, radius: float, centre: np.ndarray) -> None:
    """Draw one of `CLASSES` onto an image (size, size, 3) of values 0 to 1, slightly turned, unlike its background."""
    angle = rng.uniform(-0.3, 0.3)
    reach = int(np.ceil(1.5 * radius))
    low = np.maximum(centre.astype(int) - reach, 0)
    high = np.minimum(centre.astype(int) + reach + 1, len(image))
    y, x = np.mgrid[low[0] : high[0], low[1] : high[1]]
    y, x = (y - centre[0]) / radius, (x - centre[1]) / radius
    x, y = x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)
    # The signed distance, cut off half a pixel to either side of the edge, is the coverage of a pixel.
    cover = np.clip(0.5 - _distance(shape, x, y) * radius, 0, 1)[..., None]
    patch = image[low[0] : high[0], low[1] : high[1]]
    # A colour unlike the background's, so that the object is visible but its colour does not reveal the class.
    mean = patch.mean((0, 1))
    colour = np.where(mean > 0.5, mean - rng.uniform(0.3, 0.5, 3), mean + rng.uniform(0.3, 0.5, 3))
    patch += cover * (colour - patch)


def to_image(pixels: np.ndarray) -> Image.Image:
    """The image of (size, size, 3) values, cut off at 0 and 1."""
    return Image.fromarray((255 * np.clip(pixels, 0, 1)).astype(np.uint8))


def texture(rng: np.random.Generator, size: int) -> np.ndarray:
    """(size, size, 3) of oriented waves, blotches and grain around a random colour."""
    y, x = np.mgrid[:size, :size].astype(np.float32)
    waves = np.zeros((size, size), np.float32)
    for _ in range(3):
        angle, wavelength, phase = rng.uniform(0, np.pi), size * rng.uniform(0.08, 0.6), rng.uniform(0, 2 * np.pi)
        waves += np.sin((x * np.cos(angle) + y * np.sin(angle)) * np.float32(2 * np.pi / wavelength) + phase)
    blotches = Image.fromarray(rng.normal(0, 1, (8, 8)).astype(np.float32)).resize(
        (size, size), Image.Resampling.BICUBIC
    )
    tint = rng.uniform(0.3, 1.0, (2, 3)).astype(np.float32) * 0.06
    grain = rng.normal(0, 0.04, (size, size, 3)).astype(np.float32)
    image = rng.uniform(0.3, 0.7, 3).astype(np.float32) + grain
    return image + waves[..., None] * tint[0] + np.asarray(blotches)[..., None] * tint[1]


def _distance(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Signed distance (about) to the edge of a shape of radius one, negative inside."""
    box = np.maximum(abs(x), abs(y))
    diamond = np.maximum(abs(x + y), abs(x - y)) / np.sqrt(2)
    if shape == 'disc':
        return np.hypot(x, y) - 1
    if shape == 'ring':
        return abs(np.hypot(x, y) - 0.75) - 0.25
    if shape == 'square':
        return box - 0.9
    if shape == 'frame':
        return abs(box - 0.7) - 0.22
    if shape == 'triangle':
        return np.maximum(y - 0.75, abs(x) * 0.87 - y * 0.5 - 0.5)
    if shape == 'plus':
        return np.maximum(np.minimum(abs(x), abs(y)) - 0.25, box - 1)
    if shape == 'cross':
        return np.maximum(np.minimum(abs(x + y), abs(x - y)) / np.sqrt(2) - 0.25, diamond - 1)
    if shape == 'bars':
        return np.maximum(abs(abs(y) - 0.6) - 0.25, box - 1)
    raise ValueError(f'shape must be one of {", ".join(CLASSES)}, got {shape!r}')
