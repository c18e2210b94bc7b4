"""Comparing two networks on a folder of images, and a pooling with average pooling."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from rotp_vision.layers import ROTSetPool
from rotp_vision.layers.global_pool import MapPool
from rotp_vision.surgery import rot_pools


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
        try:
            with Image.open(path) as image:
                tensor = (self.transform or pil_to_tensor)(image.convert('RGB'))
        except (OSError, SyntaxError) as error:  # the latter of some broken PNGs
            raise ValueError(f'{path} is not an image that can be read: {error}') from error
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
) -> Comparison:
    """Both networks, in eval mode, on every image of the loader."""
    networks = [original.to(device).eval(), converted.to(device).eval()]
    hits = torch.zeros(2, 2, dtype=torch.float64)  # networks × (top-1, top-5)
    count, agreed, largest = 0, 0, 0.0
    with torch.inference_mode():
        for images, labels in tqdm(loader, desc='comparing', unit='batch'):
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


@torch.no_grad()
def places_used(pool: MapPool | ROTSetPool, maps: Tensor) -> Tensor:
    """(B,) places that the plan uses of each image's N: N for average pooling, 1 where one place has all weight.

        Σ_d c_d exp(H(w_d)),   w_d = softmax_n(log P_dn),   c_d = |f_d| / Σ_d |f_d|

    The exponential of the entropy of the weights that a feature is averaged with, over the features by what they
    contribute.

    Args:
        pool: of maps or of tokens.
        maps: what goes into it.
    """
    if isinstance(pool, MapPool):
        sets, log_plan = pool.sets(maps), pool.map_log_plan(maps)
    else:
        sets = maps.transpose(1, 2)
        log_plan = pool.log_plan(sets)
    weights = log_plan.softmax(2)
    pooled = (sets.to(weights.dtype) * weights).sum(2).abs() + torch.finfo(weights.dtype).tiny
    share = pooled / pooled.sum(1, keepdim=True)
    return (share * torch.special.entr(weights).sum(2).exp()).sum(1)


class Places:
    """What was counted inside `counted_places`."""

    def __init__(self) -> None:
        self.used: list[Tensor] = []  # (B,) of each forward pass
        self.total = 0  # N


@contextmanager
def counted_places(model: nn.Module) -> Iterator[Places]:
    """Counts the places that the global ROT pool uses in the forward passes inside; nothing without such a pool."""
    places = Places()

    def count(pool: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(pool, (MapPool, ROTSetPool))
        places.used.append(places_used(pool, inputs[0]))
        places.total = inputs[0][0].numel() // inputs[0].shape[_feature_axis(pool)]

    pools = [pool for pool in rot_pools(model).values() if isinstance(pool, (MapPool, ROTSetPool))]
    hooks = [pool.register_forward_pre_hook(count) for pool in pools if len(pools) == 1]
    try:
        yield places
    finally:
        for hook in hooks:
            hook.remove()


def _feature_axis(pool: MapPool | ROTSetPool) -> int:
    return 1 if isinstance(pool, MapPool) and pool.input_fmt == 'NCHW' else -1


def places_sentence(used: float, total: int) -> str:
    """How far a plan is from uniform, in words."""
    told = f'The plan uses {used:.3g} of {total} places'
    if used > 0.99 * total:
        return f'{told}: the pooling is still average pooling.'
    return f'{told}; average pooling uses all of them, max pooling one.'
