"""Comparing a converted network with the original on a folder of images.

`compare` runs both networks on the same images and compares their predictions, logits, losses and accuracies; it adds
the score of average pooling with a fitted gain, and how many places the plan of the ROT pool uses.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from rotp_vision.calibration import judge_pooled
from rotp_vision.images import UnreadableImage, open_image
from rotp_vision.layers import ROTPool, ROTSetPool
from rotp_vision.layers.global_pool import MapPool
from rotp_vision.surgery import MultiScale, rot_pools
from rotp_vision.surgery.head import CHUNK, Head, collect, find_global_pool, sets_of

# Folders of images with these names are parts of a dataset, not classes.
_SPLITS = {'train', 'training', 'val', 'valid', 'validation', 'test'}


def _spread(values: list[Any], limit: int) -> list[Any]:
    """At most `limit` of the values, evenly spaced."""
    count = min(limit, len(values))
    return [values[i * len(values) // count] for i in range(count)]


class ImageFiles(Dataset):
    """The images of a folder; those in class folders are labelled.

    Args:
        root: the folder.
        transform: from an image to a tensor; None for its pixels as uint8.
        limit: use at most this many images, evenly spread.
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
        self.files = files if limit is None else _spread(files, limit)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image, and the index of its class folder (-1 if it is in none)."""
        path = self.files[index]
        tensor = (self.transform or pil_to_tensor)(open_image(path))
        folder = path.relative_to(self.root).parts[0]
        return tensor, self.classes.index(folder) if folder in self.classes else -1

    def of_every_folder(self, limit: int) -> list[Path]:
        """At most `limit` of the files, as evenly over the folders that they are in as these allow."""
        folders: dict[Path, list[Path]] = {}
        for path in self.files:
            folders.setdefault(path.parent, []).append(path)
        counts = dict.fromkeys(_spread(list(folders), limit), 0)
        left = min(limit, sum(len(folders[folder]) for folder in counts))
        while left:
            for folder in [folder for folder in counts if counts[folder] < len(folders[folder])][:left]:
                counts[folder] += 1
                left -= 1
        return [path for folder, count in counts.items() for path in _spread(folders[folder], count)]

    def why_no_labels(self, num_classes: int) -> str:
        """Why the class folders cannot be the classes of a network with `num_classes`; empty if they can."""
        depths = {len(path.relative_to(self.root).parts) for path in self.files}
        if self.classes and set(self.classes) <= _SPLITS and min(depths) > 2:
            parts, one = ', '.join(self.classes), self.root / self.classes[-1]
            return f'{self.root} has the folders {parts}, which are not classes: give one of them, such as {one}'
        if not self.classes:
            return f'{self.root} has no class folders'
        outside = sum(path.parent == self.root for path in self.files)
        if outside:
            return f'{self.root} has {outside} images outside its class folders'
        if len(self.classes) != num_classes:
            return f'{self.root} has {len(self.classes)} class folders, the network {num_classes} classes'
        return ''


class Score(NamedTuple):
    """Mean cross-entropy and accuracies, between 0 and 1, of a network on labelled images."""

    loss: float
    top1: float
    top5: float | None


class _SamplesOrErrors(Dataset):
    """Samples of a dataset; an unreadable image is returned as the error, which a data worker would wrap if raised."""

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
    for batch in DataLoader(_SamplesOrErrors(images), batch_size, num_workers=workers, collate_fn=_collate):
        if isinstance(batch, UnreadableImage):
            raise batch
        yield batch


class Comparison(NamedTuple):
    """How a converted network differs from the original on the same images."""

    num_images: int
    original: Score | None  # None without labels, and so are the next two
    average_gain: Score | None  # average pooling with a gain fitted on the other half of the images
    converted: Score | None
    agreement: float  # share of the images for which both predict the same class
    largest_difference: float  # between a logit of one and of the other
    gain: float | None  # the gain of the ROT pool, if it scales the logits because the head is affine
    beyond_gain: float | None  # the largest difference once the original's logits are scaled by that gain too
    places: str  # a sentence about how far the plan is from uniform


def compare(
    original: nn.Module,
    converted: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    labelled: bool,
    device: torch.device | str = 'cpu',
    total: int | None = None,
) -> Comparison:
    """Compare a converted network with the original, both in eval mode, on every image of a loader.

    Args:
        original: the native network.
        converted: the network with ROT pools; it must have the same classes.
        loader: batches of images and labels. Instead of images, a list of views where the converted network takes one
            (see `multi_scale`); a network without views sees the first of them.
        labelled: whether the labels are class indices; losses and accuracies are computed only then.
        device: where the networks run; they are moved there.
        total: number of batches, if known, for the progress bar.
    """
    networks = [original.to(device).eval(), converted.to(device).eval()]
    batches = iter(loader)
    first = next(batches)
    head = _head(converted, _moved(first[0], device))
    gain = None if head is None or not head.affine else _scalar_gain(head.pool)
    sums = torch.zeros(2, 3, dtype=torch.float64)  # networks × (loss, top-1, top-5)
    count, agreed, largest, beyond = 0, 0, 0.0, 0.0
    means: list[Tensor] = []
    targets: list[Tensor] = []
    hook = None
    if head is not None:
        pool = head.pool
        hook = pool.register_forward_pre_hook(lambda _, args: means.append(sets_of(pool, args[0]).mean(2)))
    with torch.inference_mode(), counted_places(converted) as places:
        for images, labels in tqdm(chain([first], batches), 'comparing', total, unit='batch'):
            logits = [network(_seen(network, _moved(images, device))).float().cpu() for network in networks]
            if logits[0].shape != logits[1].shape:
                raise ValueError(f'the networks have {logits[0].shape[1]} and {logits[1].shape[1]} classes')
            count += len(labels)
            targets.append(labels)
            agreed += int((logits[0].argmax(1) == logits[1].argmax(1)).sum())
            largest = max(largest, float((logits[0] - logits[1]).abs().max()))
            if head is not None and gain is not None:
                scaled = torch.lerp(head.zero.cpu(), logits[0], gain)
                beyond = max(beyond, float((scaled - logits[1]).abs().max()))
            for i, one in enumerate(logits if labelled else []):
                right = one.topk(min(5, one.shape[1]), 1).indices == labels[:, None]
                loss = F.cross_entropy(one, labels, reduction='sum')
                sums[i] += torch.stack([loss, right[:, 0].sum(), right.any(1).sum()])
        average_gain = None
        if hook is not None and head is not None:
            hook.remove()
            if labelled and count > 1:
                judged = judge_pooled(head, torch.cat(means), torch.cat(targets).to(device))
                average_gain = Score(float(judged.loss.mean()), float(judged.right.mean()), None)
    old, new = (Score(*row) if labelled else None for row in (sums / count).tolist())
    sentence = places_sentence(float(torch.cat(places.used).mean()), places.total) if places.used else ''
    share = agreed / count
    return Comparison(count, old, average_gain, new, share, largest, gain, beyond if gain else None, sentence)


def _moved(images: Any, device: torch.device | str) -> Any:
    """Images, or a list of views of them, on a device."""
    return tree_map(lambda view: view.to(device), images)


def _seen(network: nn.Module, images: Any) -> Any:
    """What a network sees of images: of a list of views one without views sees the first."""
    return images if isinstance(images, Tensor) or isinstance(network, MultiScale) else images[0]


def _head(model: nn.Module, images: Any) -> Head | None:
    """The head after the global ROT pool of a model; None without one, or if the logits depend on more than it."""
    try:
        _, pool = find_global_pool(model)
        labels = torch.zeros(len(tree_leaves(images)[0]), dtype=torch.long)
        return Head(model, pool, collect(model, pool, [(images, labels)], CHUNK))
    except ValueError:
        return None


def _scalar_gain(pool: ROTPool) -> float | None:
    gain = pool.named_weights().get('gain')
    return float(gain) if gain is not None and gain.numel() == 1 else None


@torch.no_grad()
def places_used(pool: MapPool | ROTSetPool, maps: Tensor) -> Tensor:
    """(B,) effective number of places that the plan uses: N for average pooling, 1 if one place has all the weight.

        Σ_d c_d exp(H(w_d)),   w_d = softmax_n(log P_dn),   c_d = |f_d| / Σ_d |f_d|

    This is the exponential of the entropy of the weights of each feature, averaged over the features in proportion to
    the size of the pooled feature.

    Args:
        pool: a pool of maps or of tokens.
        maps: its input.
    """
    if isinstance(pool, MapPool):
        sets, log_plan = pool.sets(maps), pool.sets(pool.log_plan(maps))
    else:
        sets = maps.transpose(1, 2)
        log_plan = pool.solve_sets(sets)
    weights = log_plan.softmax(2)
    pooled = (sets.to(weights.dtype) * weights).sum(2).abs() + torch.finfo(weights.dtype).tiny
    share = pooled / pooled.sum(1, keepdim=True)
    return (share * torch.special.entr(weights).sum(2).exp()).sum(1)


class Places:
    """What `counted_places` has counted."""

    def __init__(self) -> None:
        self.used: list[Tensor] = []  # (B,) of each forward pass
        self.total = 0  # N


@contextmanager
def counted_places(model: nn.Module) -> Iterator[Places]:
    """Count the places that the one global ROT pool uses in the forward passes within; none without such a pool."""
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
    """A sentence about how far a plan is from uniform."""
    sentence = f'The plan uses {used:.3g} of {total} places'
    if used > 0.99 * total:
        return f'{sentence}: the pooling is still average pooling.'
    return f'{sentence}; average pooling uses all of them, max pooling one.'
