"""A picture of queries with their nearest images."""

from collections.abc import Mapping

import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from rotp_vision.images import open_image

SIDE, GAP, HEAD = 96, 6, 22
QUERIES = 8
RIGHT, WRONG, BACK = '#2e9e4f', '#c8402e', 'white'


def nearest(features: Tensor, queries: Tensor, groups: Tensor, count: int) -> Tensor:
    """(queries, count) indices of the images of other groups that are nearest by cosine similarity."""
    similarity = features[queries] @ features.T
    similarity.masked_fill_(groups[queries, None] == groups, -torch.inf)
    return similarity.topk(min(count, len(features))).indices


def neighbour_sheet(
    files: list[str], tables: Mapping[str, Tensor], labels: Tensor | None, groups: Tensor, count: int
) -> Image.Image:
    """A few evenly spaced queries, each beside its nearest images by every table of vectors.

    Args:
        files: of the n images.
        tables: (n, D) normalised vectors by title.
        labels: (n,) classes, by which images of the query's class get a green frame and others a red one; or None.
        groups: (n,) of the images that must not find each other.
        count: neighbours to show.
    """
    queries = torch.linspace(0, len(files) - 1, min(QUERIES, len(files))).long()
    found = [nearest(vectors, queries, groups, count) for vectors in tables.values()]
    step = SIDE + GAP
    width = step * (1 + sum(one.shape[1] for one in found)) + GAP * (1 + 2 * len(found))
    sheet = Image.new('RGB', (width, HEAD + step * len(queries) + GAP), BACK)
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, GAP), 'query', 'black')
    for row, query in enumerate(queries.tolist()):
        top, left = HEAD + step * row, GAP
        sheet.paste(_thumbnail(files[query], None), (left, top))
        left += step + 2 * GAP
        for title, one in zip(tables, found, strict=True):
            if not row:
                draw.text((left, GAP), f'nearest by {title}', 'black')
            for index in one[row].tolist():
                right = None if labels is None else bool(labels[index] == labels[query])
                sheet.paste(_thumbnail(files[index], right), (left, top))
                left += step
            left += 2 * GAP
    return sheet


def _thumbnail(file: str, right: bool | None) -> Image.Image:
    image = ImageOps.fit(open_image(file), (SIDE - 6, SIDE - 6))
    return ImageOps.expand(image, 3, BACK if right is None else RIGHT if right else WRONG)
