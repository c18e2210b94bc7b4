"""Comparing a converted network with the original on the same images, and the positions that a plan uses."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data.config import resolve_data_config
from timm.layers.adaptive_avgmax_pool import SelectAdaptivePool2d
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from rotp_vision.calibration.fit import check_finite, is_better
from rotp_vision.calibration.report import TITLES, verdict
from rotp_vision.calibration.scores import Judged, exceeds, judge_pooled, paired_difference, rank
from rotp_vision.data.folders import read_folder
from rotp_vision.images import UnreadableImage, open_image
from rotp_vision.layers import LocalROTPool2d, ROTPool, ROTSetPool, SimplePool
from rotp_vision.layers.global_pool import MapPool
from rotp_vision.models import ROTPResNet
from rotp_vision.surgery import MultiScale, revert, rot_pools
from rotp_vision.surgery.head import CHUNK, Head, checked_batch, collect, evaluating, find_global_pool, sets_of
from rotp_vision.surgery.pools import described_pools
from rotp_vision.tables import text_table

_OF_OTHER_SIZES = ('test_input_size', 'test_crop_pct', 'pool_size')
# Folders of images with these names are parts of a dataset, not classes.
_SPLITS = {'train', 'training', 'val', 'valid', 'validation', 'test'}


def image_config(model: nn.Module, image_size: int | None = None) -> dict[str, Any]:
    """timm's data configuration of a network, at another image size if one is given."""
    if image_size is not None and image_size < 1:
        raise ValueError(f'the image size must be positive, got {image_size}')
    return resolve_data_config({'img_size': image_size}, model=model)


def record_image_config(model: nn.Module, config: Mapping[str, Any], **others: Any) -> None:
    """Make timm's configuration of a network say which images it was fitted to, so that it is saved with it."""
    known = {**(getattr(model, 'pretrained_cfg', None) or {}), **config, **others}
    model.pretrained_cfg = {name: value for name, value in known.items() if name not in _OF_OTHER_SIZES}  # pyright: ignore


class ImageFiles(Dataset):
    """The images of a folder, labelled by their class folders.

    Args:
        root: the folder.
        transform: from an image to a tensor; None for its pixels as uint8.
        limit: use at most this many images, evenly spread.
    """

    def __init__(self, root: str | Path, transform: Callable[[Image.Image], Any] | None, limit: int | None = None):
        found = read_folder(root)
        self.root, self.classes, self.transform = found.root, found.classes, transform
        if limit is not None and limit < 1:
            raise ValueError(f'the limit must be at least one image, got {limit}')
        labelled = [(Path(file), label) for file, label in zip(found.files, found.labels, strict=True)]
        self.total = len(labelled)  # without the limit
        count = self.total if limit is None else min(limit, self.total)
        self.samples = [labelled[k * self.total // count] for k in range(count)]

    @property
    def files(self) -> list[Path]:
        return [file for file, _ in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image, and the index of its class folder (-1 if it is in none)."""
        file, label = self.samples[index]
        return (self.transform or pil_to_tensor)(open_image(file)), label

    def batch(self, indices: list[int]) -> Any:
        """A batch of images and labels. An unreadable image is returned as the error, which a worker would wrap."""
        try:
            return default_collate([self[index] for index in indices])
        except UnreadableImage as error:
            return error

    def why_no_labels(self, num_classes: int) -> str:
        """Why the class folders cannot be the classes of a network with `num_classes`; '' if they can."""
        if not self.classes:
            return f'{self.root} has no class folders'
        depths = {len(path.relative_to(self.root).parts) for path in self.files}
        if set(self.classes) <= _SPLITS and min(depths) > 2:
            parts, one = ', '.join(self.classes), self.root / self.classes[-1]
            return f'{self.root} has the folders {parts}, which are not classes: give one of them, such as {one}'
        outside = sum(label < 0 for _, label in self.samples)
        if outside:
            return f'{self.root} has {outside} images outside its class folders'
        if len(self.classes) != num_classes:
            return f'{self.root} has {len(self.classes)} class folders, the network {num_classes} classes'
        return ''

    def number_as(self, names: Sequence[str] | None) -> str:
        """Number the classes as a network does whose class names are known; returns why that is impossible, or ''."""
        if not names or list(names) == self.classes:
            return ''
        odd = sorted(set(names) ^ set(self.classes))
        if odd:
            return f'{self.root} has other class folders than the classes of the network: {", ".join(odd[:3])}'
        numbers = {self.classes.index(name): number for number, name in enumerate(names)}
        self.samples = [(file, numbers.get(label, label)) for file, label in self.samples]
        self.classes = list(names)
        return ''


def image_batches(images: ImageFiles, batch_size: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of images and labels in the order of the files; raises UnreadableImage at the first unreadable one."""
    indices: Any = range(len(images))
    for batch in DataLoader(indices, batch_size, num_workers=workers, collate_fn=images.batch):
        if isinstance(batch, UnreadableImage):
            raise batch
        yield batch


class Score(NamedTuple):
    """Mean cross-entropy and accuracies, between 0 and 1, of a network on labelled images."""

    loss: float
    top1: float
    top5: float | None

    @classmethod
    def of(cls, judged: Judged, ranks: Tensor | None = None) -> 'Score':
        """The means over the images; `ranks` counts the classes that are not below the right one."""
        top5 = None if ranks is None else float((ranks < 5).float().mean())
        return cls(float(judged.loss.mean()), float(judged.right.mean()), top5)


class Comparison(NamedTuple):
    """Differences of a converted network from the original on the same images; `print` shows them.

    Example:
        >>> import timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> images = torch.rand(4, 3, 64, 64)
        >>> rotp_vision.verify(model, [(images, torch.arange(4) % 3)]).image_size
        '64 × 64'
    """

    num_images: int
    image_size: str
    original: Score | None  # None without labels, as are the next two
    average_gain: Score | None  # average pooling with a gain fitted on the other half of the images
    converted: Score | None
    sentence: str  # the verdict; '' without labels
    agreement: float  # share of the images for which both predict the same class
    largest_difference: float  # between two logits
    gain: float | None  # the gain of the ROT pool, if it scales the logits because the head is affine
    beyond_gain: float | None  # the largest difference when the original's logits are scaled by that gain too
    positions: str  # a sentence about how far the plan is from uniform

    def table(self) -> str:
        """The scores as text; '' without labels."""
        rows = [('pooling', 'cross-entropy', 'top-1 %', 'top-5 %')]
        scores = {'original': self.original, 'average + gain': self.average_gain, 'converted': self.converted}
        for name, score in scores.items():
            if score is not None:
                top5 = '' if score.top5 is None else f'{100 * score.top5:.2f}'
                rows.append((name, f'{score.loss:.4f}', f'{100 * score.top1:.2f}', top5))
        return text_table(rows) if len(rows) > 1 else ''

    def __str__(self) -> str:
        lines = [self.table()]
        if self.average_gain is not None:
            lines.append('average + gain: average pooling with a gain fitted on the other half of these images')
        lines.append(
            f'{self.num_images} images of {self.image_size}: same prediction {100 * self.agreement:.2f} %, '
            f'largest logit difference {self.largest_difference:.4g}'
        )
        if self.gain is not None and self.gain != 1.0:
            lines.append(
                f'the gain of {self.gain:.4g} scales the logits; when those of the original are scaled alike, the '
                f'largest difference is {self.beyond_gain:.4g}'
            )
        return '\n'.join(line for line in (*lines, self.positions, self.sentence) if line)


def verify(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    original: nn.Module | None = None,
    labelled: bool = True,
    device: torch.device | str | None = None,
    total: int | None = None,
) -> Comparison:
    """Compare a converted network with the original, which is by default the same network with its native pools.

    Args:
        model: the network with ROT pools.
        loader: batches of (images, class indices) on which neither was fitted.
        original: the network to compare with.
        labelled, device, total: as in `compare`.

    Example:
        >>> import timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> result = rotp_vision.verify(model, [(torch.rand(4, 3, 64, 64), torch.arange(4) % 3)])
        >>> result.agreement
        1.0
    """
    return compare(native_copy(model) if original is None else original, model, loader, labelled, device, total)


def native_copy(model: nn.Module) -> nn.Module:
    """A copy of a network with the native pools in place of its ROT pools."""
    native = copy.deepcopy(model)
    inner = native.model if isinstance(native, MultiScale) else native
    if isinstance(inner, ROTPResNet):
        if isinstance(inner.global_pool, ROTPool | SimplePool):
            inner.global_pool = SelectAdaptivePool2d(pool_type='avg', flatten=True)
        if isinstance(inner.maxpool, LocalROTPool2d):
            inner.maxpool = nn.MaxPool2d(3, 2, 1)
        return native
    return revert(native)


def compare(
    original: nn.Module,
    converted: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    labelled: bool = True,
    device: torch.device | str | None = None,
    total: int | None = None,
) -> Comparison:
    """Compare a converted network with the original, both in eval mode, on every image of a loader.

    Args:
        original: the native network.
        converted: the network with ROT pools; it must have the same classes.
        loader: batches of images and labels. Instead of images, a list of sizes where the converted network takes one
            (see `multi_scale`); a network of one size gets the first of them.
        labelled: whether the labels are class indices; losses and accuracies are computed only then.
        device: where the networks run; they are moved there. None for the device of the converted network.
        total: number of batches, if known, for the progress bar.

    Example:
        >>> import copy, timm, torch, rotp_vision
        >>> native = timm.create_model('test_resnet', num_classes=3)
        >>> model = rotp_vision.convert(copy.deepcopy(native), {'smoothness': 0.3})
        >>> result = rotp_vision.compare(native, model, [(torch.rand(4, 3, 64, 64), torch.arange(4) % 3)])
        >>> result.num_images, result.sentence.split(':')[0] in ('Keep average pooling', 'ROTP pays')
        (4, True)
    """
    device = next(converted.parameters()).device if device is None else device
    networks = [original.to(device), converted.to(device)]
    batches = iter(loader)
    first = next(batches, None)
    if first is None:
        raise ValueError('loader must give at least one batch of (images, class indices), got none')
    with evaluating(original), evaluating(converted):
        example = _moved(checked_batch(converted, first)[0], device)
        head = _head(converted, example)
        gain = _scalar_gain(head.pool) if head is not None and head.affine else None
        targets: list[Tensor] = []
        facts: list[Tensor] = []  # (7, b): same prediction, difference, difference beyond the gain, losses and ranks
        with counted_positions(converted) as positions, _means(head) as means:
            for batch in tqdm(chain([first], batches), 'comparing', total, unit='batch'):
                images, labels = checked_batch(converted, batch)
                native, ours = (network(_for(network, _moved(images, device))).float().cpu() for network in networks)
                if native.shape != ours.shape:
                    raise ValueError(f'the networks have {native.shape[1]} and {ours.shape[1]} classes')
                check_finite(original, native)
                check_finite(converted, ours)
                targets.append(labels if labelled else torch.zeros_like(labels))
                scaled = native if head is None or gain is None else torch.lerp(head.zero.cpu(), native, gain)
                same = (native.argmax(1) == ours.argmax(1)).float()
                differences = [(other - ours).abs().amax(1) for other in (native, scaled)]
                losses = [F.cross_entropy(logits, targets[-1], reduction='none') for logits in (native, ours)]
                ranks = [rank(logits, targets[-1]).float() for logits in (native, ours)]
                facts.append(torch.stack([same, *differences, *losses, *ranks]))
        same, differences, beyond, *losses_and_ranks = torch.cat(facts, 1)
        scores: dict[str, Score] = {}
        sentence = ''
        if labelled:
            losses, ranks = losses_and_ranks[:2], losses_and_ranks[2:]
            native, ours = (Judged(a, (b < 1).float(), None, 1.0) for a, b in zip(losses, ranks, strict=True))
            judged = {'the original': native}
            if head is not None and len(same) > 1:
                judged['average pooling with a gain'] = judge_pooled(
                    head, torch.cat(means), torch.cat(targets).to(device)
                )
                scores['average_gain'] = Score.of(judged['average pooling with a gain'])
            scores |= {'original': Score.of(native, ranks[0]), 'converted': Score.of(ours, ranks[1])}
            kinds = {getattr(pool.options, 'pool', 'rotp') for pool in described_pools(converted).values()}
            sentence = _verdict(ours, judged, kinds.pop() if len(kinds) == 1 else '')
    plan = positions_sentence(float(torch.cat(positions.used).mean()), positions.total) if positions.used else ''
    return Comparison(
        num_images=len(same),
        image_size=' and '.join(f'{size.shape[-2]} × {size.shape[-1]}' for size in tree_leaves(example)),
        original=scores.get('original'),
        average_gain=scores.get('average_gain'),
        converted=scores.get('converted'),
        sentence=sentence,
        agreement=float(same.mean()),
        largest_difference=float(differences.max()),
        gain=gain,
        beyond_gain=float(beyond.max()) if gain else None,
        positions=plan,
    )


def _verdict(ours: Judged, peers: dict[str, Judged], kind: str) -> str:
    """Whether the pooling pays against the last of the peers, by the rule of `calibrate`."""
    average = next(iter(peers.values()))
    name, peer = list(peers.items())[-1]
    pays = is_better(ours, peer) and not exceeds(average.right, ours.right)
    differences = paired_difference(ours.right, peer.right), paired_difference(ours.loss, peer.loss)
    return verdict(pays, [(name, *differences)], 'these images', TITLES.get(kind, 'The new pooling'))


def _moved(images: Any, device: torch.device | str) -> Any:
    """Images, or a list of sizes of them, on a device."""
    return tree_map(lambda size: size.to(device), images)


def _for(network: nn.Module, images: Any) -> Any:
    """The input of a network: of a list of sizes, a network of one size gets the first."""
    return images if isinstance(images, Tensor) or isinstance(network, MultiScale) else images[0]


def _head(model: nn.Module, images: Any) -> Head | None:
    """The head after the global ROT pool of a model; None without one, or if the logits depend on more than it."""
    try:
        _, pool = find_global_pool(model)
        labels = torch.zeros(len(tree_leaves(images)[0]), dtype=torch.long)
        return Head(model, pool, collect(model, pool, [(images, labels)], CHUNK))
    except ValueError:
        return None


@contextmanager
def _means(head: Head | None) -> Iterator[list[Tensor]]:
    """The means (B, D) of the sets that reach the pool within the block, a tensor for each forward pass."""
    means: list[Tensor] = []
    if head is None:
        yield means
        return
    pool = head.pool
    with pool.register_forward_pre_hook(lambda _, args: means.append(sets_of(pool, args[0]).mean(2))):
        yield means


def _scalar_gain(pool: ROTPool) -> float | None:
    gain = pool.named_weights().get('gain')
    return float(gain) if gain is not None and gain.numel() == 1 else None


@torch.no_grad()
def positions_used(pool: MapPool | ROTSetPool, maps: Tensor) -> Tensor:
    """(B,) effective number of positions in the plan: N for average pooling, 1 if one position has all the weight.

        Σ_d c_d exp(H(w_d)),   w_d = softmax_n(log P_dn),   c_d = |f_d| / Σ_d |f_d|

    This is the exponential of the entropy of the weights of each feature, averaged over the features in proportion to
    the size of the pooled feature.

    Args:
        pool: a pool of maps or of tokens.
        maps: its input.
    """
    sets, weights = sets_of(pool, maps), sets_of(pool, pool.log_plan(maps)).softmax(2)
    pooled = (sets.to(weights.dtype) * weights).sum(2).abs() + torch.finfo(weights.dtype).tiny
    share = pooled / pooled.sum(1, keepdim=True)
    return (share * torch.special.entr(weights).sum(2).exp()).sum(1)


class UsedPositions:
    """The counts of `counted_positions`."""

    def __init__(self) -> None:
        self.used: list[Tensor] = []  # (B,) of each forward pass
        self.total = 0  # N


@contextmanager
def counted_positions(model: nn.Module) -> Iterator[UsedPositions]:
    """Count the positions used by the global ROT pool in the forward passes of the block, if the model has one."""
    positions = UsedPositions()

    def count(pool: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(pool, (MapPool, ROTSetPool))
        positions.used.append(positions_used(pool, inputs[0]))
        positions.total = sets_of(pool, inputs[0]).shape[2]

    pools = [pool for pool in rot_pools(model).values() if isinstance(pool, (MapPool, ROTSetPool))]
    with ExitStack() as stack:
        if len(pools) == 1:
            stack.enter_context(pools[0].register_forward_pre_hook(count))
        yield positions


def positions_sentence(used: float, total: int) -> str:
    """A sentence about how far a plan is from uniform."""
    sentence = f'The plan uses {used:.3g} of {total} positions'
    if used > 0.99 * total:
        return f'{sentence}: the pooling is still average pooling.'
    return f'{sentence}; average pooling uses all of them, max pooling one.'
