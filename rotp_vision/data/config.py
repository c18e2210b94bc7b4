"""Settings of the images and their preprocessing."""

from dataclasses import dataclass
from typing import Literal

from rotp_vision.data.generated import Question


@dataclass
class DataConfig:
    """Images and their preprocessing.

    Args:
        source: `folder` (class directories under train/ and val/), `hf` (Hugging Face datasets: a hub name, a directory
            of parquet files, or a copy made by save_to_disk) or `generated` (small objects on textured backgrounds).
        question: what the labels of `generated` images say: `one object`, which object is on the image, or
            `most frequent`, which kind of object is the most frequent of ten.
        path: the folder, the hub name or the directory; not used by `generated`.
        train_split: name of the training split (a subfolder for `folder`).
        val_split: name of the validation split.
        image_key: column of the images (`hf`).
        label_key: column of the labels (`hf`).
        train_images: number of training images (`generated`).
        val_images: number of validation images (`generated`).
        num_classes: classes the data must have; unset takes what is found (`generated` has at most 8).
        image_size: side of the network's square input, in pixels.
        crop_pct: share of the resized image that evaluation keeps.
        scale: smallest and largest share of the image's area a random training crop takes. With (1, 1) it takes the
            whole image if the image's aspect ratio is within `ratio`, and the largest centred crop in `ratio` if not.
        ratio: smallest and largest aspect ratio of a random training crop.
        hflip: probability of a horizontal flip.
        color_jitter: strength of colour jitter.
        auto_augment: timm's policy string such as rand-m7-mstd0.5-inc1; unset for none.
        random_erasing: probability of erasing a random rectangle.
        draft: decode a JPEG at a half, a quarter or an eighth of its size if the training crop still has at least the
            network's resolution. Large photos load several times as fast, and their training pixels differ slightly
            from those of a full decode; evaluation always decodes in full.
        workers: data workers per process; 0 loads in the training process.
        max_broken: number of unreadable images, counted by name, that a run tolerates.
    """

    source: Literal['folder', 'hf', 'generated'] = 'folder'
    question: Question = 'one object'
    path: str | None = None
    train_split: str = 'train'
    val_split: str = 'val'
    image_key: str = 'image'
    label_key: str = 'label'
    train_images: int = 4096
    val_images: int = 1024
    num_classes: int | None = None
    image_size: int = 224
    crop_pct: float = 0.875
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 4 / 3)
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
    random_erasing: float = 0.0
    draft: bool = True
    workers: int = 8
    max_broken: int = 100
