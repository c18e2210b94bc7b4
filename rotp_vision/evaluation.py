"""Comparing two networks on a folder of images."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from rotp_vision.images import UnreadableImage, open_image


class ImageFiles(Dataset):
    """The images of a folder, labelled where they lie in one folder per class.

    Args:
        root: the folder.
        transform: from an image to a tensor; None for its bytes as they are.
        limit: use only so many images, evenly spread.
    """

    def __init__(self, root: str | Path, transform: Callable[[Image.Image], Any] | None, limit: int | None = None):
        self.root, self.transform = Path(root), transform
        if not self.root.is_dir():
            raise ValueError(f'there is no folder of images at {self.root}')
        files = sorted(path for path in self.root.rglob('*') if path.suffix.lower() in IMG_EXTENSIONS)
        if not files:
            raise ValueError(f'there are no images in {self.root} (looked for {", ".join(IMG_EXTENSIONS)})')
        self.classes = sorted({path.relative_to(self.root).parts[0] for path in files if path.parent != self.root})
        if limit is not None and limit < 1:
            raise ValueError(f'the limit must be at least one image, got {limit}')
        count = len(files) if limit is None else min(limit, len(files))
        self.files = [files[i * len(files) // count] for i in range(count)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image, and the index of its class folder (-1 where there is none)."""
        path = self.files[index]
        tensor = (self.transform or pil_to_tensor)(open_image(path))
        folder = path.relative_to(self.root).parts[0]
        return tensor, self.classes.index(folder) if folder in self.classes else -1

    def why_no_labels(self, num_classes: int) -> str:
        """Why the folders cannot be the classes of a network of so many; empty if they can."""
        if not self.classes:
            return f'{self.root} has no class folders'
        beside = sum(path.parent == self.root for path in self.files)
        if beside:
            return f'{self.root} has {beside} images beside its class folders'
        if len(self.classes) != num_classes:
            return f'{self.root} has {len(self.classes)} class folders, the network {num_classes} classes'
        return ''


class _Told(Dataset):
    """Samples of a dataset; one that cannot be read is told as it is, where an error would come from a data worker with
    its traceback."""

    def __init__(self, dataset: ImageFiles):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | UnreadableImage:
        try:
            return self.dataset[index]
        except UnreadableImage as error:
            return error


def _collate(samples: list[Any]) -> Any:
    return next((sample for sample in samples if isinstance(sample, Exception)), None) or default_collate(samples)


def image_batches(images: ImageFiles, batch_size: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of images and labels in the order of their names; UnreadableImage at the first that cannot be read."""
    for batch in DataLoader(_Told(images), batch_size, num_workers=workers, collate_fn=_collate):
        if isinstance(batch, UnreadableImage):
            raise batch
        yield batch


class Comparison(NamedTuple):
    """Two networks on the same images; accuracies as (original, converted), None without labels."""

    num_images: int
    top1: tuple[float, float] | None
    top5: tuple[float, float] | None
    agreement: float
    largest_difference: float


def compare(
    original: nn.Module,
    converted: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    labelled: bool,
    device: torch.device | str = 'cpu',
    total: int | None = None,
) -> Comparison:
    """Both networks, in eval mode, on every image of the loader, of `total` batches if that is known."""
    networks = [original.to(device).eval(), converted.to(device).eval()]
    hits = torch.zeros(2, 2, dtype=torch.float64)  # networks × (top-1, top-5)
    count, agreed, largest = 0, 0, 0.0
    with torch.inference_mode():
        for images, labels in tqdm(loader, total=total, desc='comparing', unit='batch'):
            logits = [network(images.to(device)).float().cpu() for network in networks]
            if logits[0].shape != logits[1].shape:
                raise ValueError(f'the networks have {logits[0].shape[1]} and {logits[1].shape[1]} classes')
            count += len(images)
            agreed += int((logits[0].argmax(1) == logits[1].argmax(1)).sum())
            largest = max(largest, float((logits[0] - logits[1]).abs().max()))
            for i, one in enumerate(logits):
                correct = one.topk(min(5, one.shape[1]), 1).indices == labels[:, None]
                hits[i] += torch.stack([correct[:, 0].sum(), correct.any(1).sum()])
    if not labelled:
        return Comparison(count, None, None, agreed / count, largest)
    (top1, top5), (new_top1, new_top5) = (hits / count).tolist()
    return Comparison(count, (top1, new_top1), (top5, new_top5), agreed / count, largest)
