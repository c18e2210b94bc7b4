"""The embedder: a frozen network, its pooling, its transform, and what it has learned of a gallery."""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from rotp_vision.data.workers import iterate, loading
from rotp_vision.embedding.whitening import Spectrum, project
from rotp_vision.evaluation import image_config
from rotp_vision.files import open_by_umask, replacing, write_atomically
from rotp_vision.hub import TORCHVISION, build, load_pretrained, save_pretrained
from rotp_vision.images import UnreadableImage, open_image, to_rgb
from rotp_vision.layers import AnyPoolOptions
from rotp_vision.surgery import convert
from rotp_vision.surgery.convert import replace_pool
from rotp_vision.surgery.pools import described_pools, is_local, new_pools

SHRINKAGE = 300.0  # of the whitening, in mean eigenvalues of the covariance
EMBEDDER, PROJECTION = 'embedder.json', 'projection.safetensors'
FORMAT = 1
Precision = Literal['float32', 'float16', 'bfloat16']


class Embedder:
    """Feature vectors of images by a frozen network: L2-normalised, float32, on the CPU.

    Args:
        model: timm's name of a network with its weights' tag ('resnet50.tv_in1k'), also 'torchvision:NAME', or a
            network, which is copied. Its pretrained weights are used.
        pool: what the global pool is replaced by, as `convert` takes it; None keeps the network's own. A network that
            has a pool of this package keeps it.
        image_size: side of the images, if not that of the network's data config.
        device: where the network runs; by default that of a given network, and the GPU if there is one otherwise.
        precision: of the network: 'float32', or 'bfloat16' or 'float16' by autocast.

    Attributes:
        model: the network in eval mode.
        transform: from an image of Pillow to a tensor.
        mean, matrix: what `fit` has learned; None before.

    Example:
        >>> import timm, torch, rotp_vision
        >>> embedder = rotp_vision.Embedder(timm.create_model('test_resnet'))
        >>> vectors = embedder(torch.rand(4, 3, 64, 64))
        >>> vectors.shape, vectors.norm(dim=1).round(decimals=4)
        (torch.Size([4, 96]), tensor([1., 1., 1., 1.]))
    """

    def __init__(
        self,
        model: str | nn.Module,
        pool: AnyPoolOptions | Mapping[str, Any] | str | None = 'embedding',
        *,
        image_size: int | None = None,
        device: torch.device | str | None = None,
        precision: Precision = 'float32',
    ):
        if precision not in ('float32', 'float16', 'bfloat16'):
            raise ValueError(f"precision must be 'float32', 'float16' or 'bfloat16', got {precision!r}")
        if isinstance(model, str):
            weights = {'weights': 'DEFAULT'} if model.startswith(TORCHVISION) else {'pretrained': True}
            network = build(model, **weights).to(default_device())
        else:
            network = copy.deepcopy(model)
        if device is not None:
            network.to(device)
        self.model = network.eval().requires_grad_(False)
        if pool is not None and not new_pools(self.model):
            try:
                convert(self.model, pool)
            except ValueError as error:
                raise ValueError(f'{error}. With pool=None the network embeds with its own pooling') from error
        self.precision: Precision = precision
        self.image_config = image_config(self.model, image_size)
        self.transform: Callable[[Image.Image], Tensor] = cast(Any, create_transform(**self.image_config))
        self.mean: Tensor | None = None
        self.matrix: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the network runs."""
        return next(self.model.parameters()).device

    def __call__(
        self,
        images: Any,
        *,
        return_logits: bool = False,
        batch_size: int = 32,
        workers: int = 0,
        progress: bool = False,
    ) -> Any:
        """(N, D) vectors of the images, and with `return_logits` also (N, classes) logits of the same pass.

        Args:
            images: a path, an image of Pillow, a sequence of these (a list, a column of a `datasets` table), prepared
                images (N, C, H, W), or a DataLoader of these, whose batches may hold more after the images.
            return_logits: whether to return the logits of the network's classifier too.
            batch_size: images in a forward pass.
            workers: processes that read images.
            progress: whether to show a progress bar.

        Raises:
            UnreadableImage: at the first image that cannot be read.
        """
        vectors, logits = [], []
        for batch in tqdm(self._batches(images, batch_size, workers), 'embedding', unit='batch', disable=not progress):
            (features,), scores = self.features(batch, return_logits)
            vectors.append(project(features.cpu(), self.mean, self.matrix))
            if scores is not None:
                logits.append(scores.cpu())
        if not vectors:
            raise ValueError('there must be at least one image to embed, got none')
        return (torch.cat(vectors), torch.cat(logits)) if return_logits else torch.cat(vectors)

    @torch.inference_mode()
    def features(
        self, images: Tensor, return_logits: bool = False, pools: Sequence[nn.Module] = ()
    ) -> tuple[list[Tensor], Tensor | None]:
        """As `read_features`, for prepared images on any device; `pools` are made by `pools_for`."""
        dtype = getattr(torch, self.precision)
        path = self.pool_path if pools else ''
        with torch.autocast(self.device.type, dtype, enabled=self.precision != 'float32'):
            return read_features(self.model, images.to(self.device), return_logits, path, pools)

    @property
    def pool_path(self) -> str:
        """Path of the network's global pool of this package; raises if there is none."""
        paths = [path for path, pool in described_pools(self.model).items() if not is_local(pool)]
        if len(paths) != 1:
            raise ValueError(f'the network must have one global pool of this package to try others, got {len(paths)}')
        return paths[0]

    def set_pool(self, options: AnyPoolOptions) -> None:
        """Replace the network's pool; vectors of before do not compare with those of after."""
        replace_pool(self.model, self.pool_path, options).eval()

    def pools_for(self, options: Iterable[AnyPoolOptions | None]) -> list[nn.Module]:
        """Pools with these options that fit the network, which keeps its own; None stands for that one."""
        network, own = copy.deepcopy(self.model), self.model.get_submodule(self.pool_path)
        return [own if one is None else replace_pool(network, self.pool_path, one).eval() for one in options]

    def fit(self, gallery: Any, shrinkage: float = SHRINKAGE, **loading: Any) -> 'Embedder':
        """Learn the mean and the shrunk whitening of a gallery, without labels; returns the same embedder.

            v = normalise((I + Σ / s)^(-1/2) (f − mean)),   s = shrinkage · mean eigenvalue of Σ

        with normalised features f. Fit it once, on the images that are searched: vectors of before do not compare with
        vectors of after.

        Args:
            gallery: images as the embedder takes them, or their vectors (N, D) by an embedder that was not fitted.
            shrinkage: the larger, the less is whitened; inf only subtracts the mean.
            loading: as `__call__` takes it.
        """
        if not shrinkage > 0:
            raise ValueError(f'shrinkage must be positive, got {shrinkage}')
        self.mean = self.matrix = None
        features = gallery if isinstance(gallery, Tensor) and gallery.dim() == 2 else self(gallery, **loading)
        if len(features) < 2:
            raise ValueError('a gallery must have at least two images, got one')
        spectrum = Spectrum.of(features)
        self.mean = spectrum.mean.float()
        self.matrix = None if shrinkage == float('inf') else spectrum.whitening(shrinkage).float()
        return self

    def save(self, directory: str | Path, *, force: bool = False, **network: Any) -> Path:
        """Write network, pooling, transform, mean and whitening, so that a query embeds identically later.

        Args:
            directory: the directory to write; it must not exist unless `force`.
            force: whether to replace the files of an embedder that is there.
            network: `base` and `model_args`, as `save_pretrained` takes them.
        """
        target = Path(directory)
        if target.exists() and not force:
            raise ValueError(f'{target} exists; choose another directory, or overwrite it with force')
        (target / EMBEDDER).unlink(missing_ok=True)  # first, so that a directory left half replaced is refused
        if described_pools(self.model):
            save_pretrained(self.model, target, force=force, **network)
        else:
            timm.models.save_for_hf(self.model, str(target), safe_serialization=True)  # pyright: ignore
        known = {'mean': self.mean, 'matrix': self.matrix}
        tensors = {name: value for name, value in known.items() if value is not None}
        if tensors:
            with replacing(target / PROJECTION) as temporary:
                save_file(tensors, temporary)
                open_by_umask(temporary)
        else:
            (target / PROJECTION).unlink(missing_ok=True)
        described = {
            'format': FORMAT,
            'images': self.image_config,
            'precision': self.precision,
            'fitted': bool(tensors),
        }
        write_atomically(target / EMBEDDER, json.dumps(described, indent=2))
        return target

    @classmethod
    def load(cls, directory: str | Path, *, device: torch.device | str | None = None, base: Any = None) -> 'Embedder':
        """The embedder that `save` wrote; `base` builds a network of your own, as for `load_pretrained`."""
        path = Path(directory) / EMBEDDER
        if not path.is_file():
            raise ValueError(f'{directory} is not a directory that Embedder.save wrote: it has no {EMBEDDER}')
        described = json.loads(path.read_text('utf-8'))
        if described['format'] > FORMAT:
            raise ValueError(f'{path} has format {described["format"]}, this rotp_vision reads up to {FORMAT}: upgrade')
        network = load_pretrained(directory, base=base).to(device or default_device())
        made = cls(network, None, precision=described['precision'])
        made.image_config = described['images']
        made.transform = cast(Any, create_transform(**made.image_config))
        if described['fitted']:
            tensors = load_file(Path(directory) / PROJECTION)
            made.mean, made.matrix = tensors['mean'], tensors.get('matrix')
        return made

    def _batches(self, images: Any, batch_size: int, workers: int) -> Iterator[Tensor]:
        if isinstance(images, Tensor):
            if images.dim() != 4:
                raise ValueError(f'images must be (N, C, H, W), got {tuple(images.shape)}')
            yield from images.split(batch_size)
            return
        if isinstance(images, DataLoader):
            for batch in images:
                yield batch[0] if isinstance(batch, list | tuple) else batch
            return
        items = [images] if isinstance(images, str | Path | Image.Image) else images
        for batch, reasons in prepared_batches(items, self.transform, batch_size, workers):
            for reason in reasons:
                if reason is not None:
                    raise reason
            yield batch


def default_device() -> str:
    """The GPU if there is one."""
    mps = 'mps' if torch.backends.mps.is_available() else 'cpu'
    return 'cuda' if torch.cuda.is_available() else mps


def read_features(
    model: Any, images: Tensor, return_logits: bool = False, path: str = '', pools: Sequence[nn.Module] = ()
) -> tuple[list[Tensor], Tensor | None]:
    """The features by which a network classifies, (B, D) before normalisation, and its logits, in one pass and float32.

    Args:
        model: a network of timm, or another, whose output counts as features unless a linear layer makes it.
        images: (B, C, H, W).
        return_logits: whether to return the logits.
        path: of the network's global pool, if features by several pools are wanted.
        pools: which take its place one after the other; the features by each are returned.
    """
    of_timm = hasattr(model, 'forward_features') and hasattr(model, 'forward_head')
    maps = model.forward_features(images) if of_timm else images
    owner, name = model.get_submodule(path.rpartition('.')[0]), path.rpartition('.')[2]
    own, found, logits = getattr(owner, name, None), [], None
    try:
        for pool in pools or (own,):
            if pools:
                setattr(owner, name, pool)
            if of_timm:
                features = model.forward_head(maps, pre_logits=True)
                logits = model.forward_head(maps) if return_logits and model.num_classes else None
            else:
                features, logits = _before_classifier(model, images)
            features = features.flatten(1) if features.shape[2:] == (1, 1) else features
            if features.dim() != 2:
                got = tuple(features.shape)
                raise ValueError(f'the network must pool its features to (B, D), got {got}: give it a global pool')
            found.append(features.float())
    finally:
        if pools:
            setattr(owner, name, own)
    if return_logits and logits is None:
        raise ValueError('the network has no classifier whose logits could be returned')
    return found, logits.float() if return_logits and logits is not None else None


def _before_classifier(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Input and output of the linear layer that makes the output of a network; if none does, its output and None."""
    seen: list[tuple[Tensor, Tensor]] = []
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]

    def look(_: nn.Module, args: Any, output: Any) -> None:
        seen.append((args[0], output))

    with last[0].register_forward_hook(look) if last else nullcontext():
        output = model(images)
    made = [given for given, result in seen if result.data_ptr() == output.data_ptr()]
    return (made[0], output) if made else (output, None)


class _Prepared(Dataset):
    """Prepared images, or the error in place of one that cannot be read, because a data worker would wrap it."""

    def __init__(self, items: Sequence[Any], transform: Callable[[Image.Image], Tensor]):
        self.items, self.transform = items, transform

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Tensor | UnreadableImage:
        item = self.items[index]
        if isinstance(item, Tensor):
            return item
        try:
            return self.transform(open_image(item) if isinstance(item, str | Path) else to_rgb(item))
        except UnreadableImage as error:
            return error


def _collate(samples: list[Any]) -> tuple[Tensor, list[UnreadableImage | None]]:
    errors = [sample if isinstance(sample, UnreadableImage) else None for sample in samples]
    readable = [sample for sample in samples if isinstance(sample, Tensor)]
    return torch.stack(readable) if readable else torch.empty(0), errors


def prepared_batches(
    items: Sequence[Any],
    transform: Callable[[Image.Image], Tensor],
    batch_size: int,
    workers: int,
    batches: Sequence[Sequence[int]] | None = None,
) -> Iterator[tuple[Tensor, list[UnreadableImage | None]]]:
    """The readable images of each batch, and for each of its items why it cannot be read, None if it can.

    Args:
        items: paths, images of Pillow or prepared images.
        transform: from an image to a tensor.
        batch_size: items in a batch.
        workers: processes that read them.
        batches: indices of the items of each batch, in place of all in their order.
    """
    chosen: dict[str, Any] = {'batch_size': batch_size} if batches is None else {'batch_sampler': batches}
    yield from iterate(DataLoader(_Prepared(items, transform), collate_fn=_collate, **chosen, **loading(workers)))
