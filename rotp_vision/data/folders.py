"""The reader of image folders."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from timm.utils.misc import natural_key

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.ppm', '.bmp', '.pgm', '.tif', '.tiff', '.webp')
"""Extensions of image files, in lower case; the reader ignores the case of a file's extension."""


class ImageFolder(NamedTuple):
    """The images in a folder, labelled by the class folder that they are in."""

    root: Path
    classes: list[str]
    """Names of the class folders that hold images, in timm's order: by number and regardless of case."""
    empty: list[str]
    """Names of the folders in `root` that hold no image of their own; they are not classes."""
    files: list[str]
    """Paths of the images: those outside class folders, then class by class, each sorted by path."""
    labels: list[int]
    """Index into `classes` for each file; -1 for an image that is in no class folder."""


def read_folder(root: str | Path) -> ImageFolder:
    """Returns all images in a folder and in the folders below it.

    A class folder is a folder in `root`; images in its subfolders belong to it. Links to folders are followed, but
    every real directory is read once, so that a link to a parent folder does not multiply the images. Only regular
    files count as images, and dangling links, which cannot be read later.

    Raises:
        ValueError: if `root` is not a folder or holds no images.
        OSError: if a folder cannot be listed.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f'there is no folder of images at {root}')
    top = os.path.realpath(root)
    folders = [entry for entry in os.scandir(root) if os.path.isdir(entry.path)]
    seen = {top}
    found: dict[str, list[str]] = {}
    aliases = []
    # Mark all class folders as read before descending, so that a link inside one cannot claim the images of another.
    for entry in sorted(folders, key=lambda entry: (entry.is_symlink(), entry.name)):
        real = os.path.realpath(entry.path)
        if real in seen:
            if real != top:
                aliases.append(entry.name)
        elif not Path(top).is_relative_to(real):  # a link to a parent of `root` is no class folder
            seen.add(real)
            found[entry.name] = []
    for name in sorted(found):
        found[name] = sorted(_images_below(os.path.join(root, name), seen))
    classes = sorted((name for name in found if found[name]), key=_timm_order)
    files = sorted(entry.path for entry in os.scandir(root) if _is_image(entry))
    labels = [-1] * len(files)
    for label, name in enumerate(classes):
        files += found[name]
        labels += [label] * len(found[name])
    if not files:
        raise ValueError(f'there are no images in {root} (looked for {", ".join(EXTENSIONS)})')
    empty = sorted([*aliases, *(name for name in found if not found[name])], key=_timm_order)
    return ImageFolder(root, classes, empty, files, labels)


def _timm_order(name: str) -> tuple[list[str | int], str]:
    return natural_key(name), name  # the name itself decides between 'cat' and 'Cat'


def _images_below(folder: str, seen: set[str]) -> Iterator[str]:
    """Paths of the images in a folder and below it, except in the real directories in `seen`, which is extended."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if _is_image(entry):
            yield entry.path
        elif os.path.isdir(entry.path) and (real := os.path.realpath(entry.path)) not in seen:
            seen.add(real)
            yield from _images_below(entry.path, seen)


def _is_image(entry: os.DirEntry[str]) -> bool:
    if not entry.name.lower().endswith(EXTENSIONS):
        return False
    if entry.is_symlink():
        return os.path.isfile(entry.path) or not os.path.exists(entry.path)
    return entry.is_file(follow_symlinks=False)
