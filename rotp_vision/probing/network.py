"""Fitting pooling and classifier of a pretrained network to your own images."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from timm.data.transforms_factory import create_transform
from torch import nn

from rotp_vision.evaluation import image_config, record_image_config
from rotp_vision.extras import of_extra
from rotp_vision.files import check_writable, write_atomically
from rotp_vision.hub import save_pretrained
from rotp_vision.layers import ROTPool
from rotp_vision.probing.fit import Neck, ProbeResult, checked_groups, fit_probe
from rotp_vision.probing.joint import train_jointly
from rotp_vision.surgery import convert, rot_pools
from rotp_vision.surgery.fold import is_linear
from rotp_vision.surgery.freeze import classifiers
from rotp_vision.surgery.head import CHUNK, GlobalPool, Head, collect, evaluating, find_global_pool


def probe(
    model: nn.Module,
    data: str | Path,
    output: str | Path | None = None,
    *,
    group_by: str | None = None,
    label: str = 'label',
    image_size: int | None = None,
    num_folds: int = 5,
    train: bool = False,
    cache: str | Path | None = None,
    base: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    workers: int = 2,
    force: bool = False,
    progress: bool = True,
) -> ProbeResult:
    """Give a pretrained network a classifier of your own images, and the pooling that suits them, in place.

    The frozen network runs once on each image. Its maps are kept on disk, so that an interrupted run continues where it
    stopped. `fit_probe` then chooses the pooling and fits the classifier. Nothing else of the network changes.

    Args:
        model: any classifier with a global pool of maps or tokens that `convert` can replace, or a converted one.
        data: a folder of class folders, or a parquet file with images (Hugging Face datasets' layout).
        output: directory to write the converted network to, from which `load_pretrained` reads it; None writes nothing.
        group_by: column of the parquet file that groups images, such as the frames of a video, which are never divided
            between folds. For a folder, 'folder' groups the images in one folder inside a class folder.
        label: column of the labels in a parquet file, class numbers or names.
        image_size: side of the images, if not that of the network's data config.
        num_folds: of the cross-validation.
        train: whether to train pooling and classifier together too, see `train_jointly`.
        cache: directory in which the maps are kept; by default they are beside the output and removed at the end.
        base: see `save_pretrained`.
        model_args: see `save_pretrained`.
        batch_size: images in a forward pass.
        workers: processes that read images.
        force: whether to replace an existing output.
        progress: whether to show progress bars.

    Returns:
        A `ProbeResult`; `print` shows it.

    Example:
        >>> import rotp_vision, tempfile, timm, torchvision
        >>> with tempfile.TemporaryDirectory() as place:
        ...     images = torchvision.datasets.FakeData(12, (3, 64, 64), num_classes=2)
        ...     for k in range(12):
        ...         folder = Path(place, 'images', 'ab'[k % 2])
        ...         folder.mkdir(parents=True, exist_ok=True)
        ...         images[k][0].save(folder / f'{k}.png')
        ...     model = timm.create_model('test_resnet')
        ...     result = rotp_vision.probe(model, f'{place}/images', num_folds=3, workers=0, progress=False)
        >>> model.num_classes, result.num_images
        (2, 12)
    """
    with of_extra('train'):
        from rotp_vision.probing.images import cached_maps, open_images, remove_maps
    target = None if output is None else Path(output)
    if target is not None:
        check_writable(target.parent)
        if target.exists() and not force:
            raise ValueError(f'{target} exists; choose another output, or overwrite it with force')
    images = open_images(Path(data), label, group_by)
    checked_groups(images.targets, images.groups, num_folds, images.classes)  # before the long part
    if not rot_pools(model):
        convert(model)
    _, pool = find_global_pool(model)
    config = image_config(model, image_size)
    shape = config['input_size']
    transform: Any = create_transform(**config)
    with ExitStack() as stack:
        if cache is not None:
            place = Path(cache)
        elif target is not None:
            place = target.with_name(f'{target.name}.maps')
        else:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(_without_classifier(model))
        stack.enter_context(evaluating(model))
        loading = {'batch_size': batch_size, 'workers': workers, 'progress': progress}
        maps = cached_maps(model, pool, images, transform, shape, place, **loading)
        result = fit_probe(
            maps,
            images.targets,
            images.groups,
            num_folds=num_folds,
            neck=_neck(model, pool, shape),
            class_names=images.classes,
            progress=progress,
        )
        if train:
            with torch.enable_grad():
                result = train_jointly(result, maps, images.targets, images.groups, progress=progress)
    _install(model, pool, result)
    unknown = {'label_descriptions': None, 'tag': None}  # which described the native classes
    record_image_config(model, config, num_classes=len(images.classes), label_names=images.classes, **unknown)
    if target is not None:
        save_pretrained(model, target, base=base, model_args=model_args, force=force)
        write_atomically(target / 'probe.md', f'{result}\n')
        if cache is None:
            remove_maps(place)
    return result


@contextmanager
def _without_classifier(model: nn.Module) -> Iterator[None]:
    """The model frozen and without its classifier, so that it returns the input of the classifier."""
    heads = [] if getattr(model, 'num_classes', None) == 0 else classifiers(model)
    heads = [head for head in heads if any(True for _ in head.parameters())]
    for head in heads:
        if not is_linear(head) or head.bias is None:
            raise ValueError(
                f'the classifier must be linear and have a bias, got {head}; a ridge classifier cannot take its place'
            )
    if len(heads) > 1:
        raise ValueError(f'the model must have one classifier, got {len(heads)}')
    owners = [(parent, name) for head in heads for parent, name in _owners(model, head)]
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    for parent, name in owners:
        setattr(parent, name, nn.Identity())
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parent, name in owners:
            setattr(parent, name, heads[0])
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


def _owners(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The parents of a module, and its names in them."""
    return [(parent, name) for parent in model.modules() for name, child in parent.named_children() if child is module]


def _neck(model: nn.Module, pool: GlobalPool, image_shape: tuple[int, ...]) -> Neck:
    """The layers between the pool and the classifier, of a model without classifier."""
    device = next(model.parameters()).device
    noise = torch.randn(2, *image_shape, generator=torch.Generator().manual_seed(0))
    collected = collect(model, pool, [(noise, torch.zeros(2, dtype=torch.long))], CHUNK)
    head = Head(model, pool, collected)
    return lambda pooled: head(pooled.to(device)).to(pooled.device)


def _install(model: nn.Module, pool: GlobalPool, result: ProbeResult) -> None:
    """Leave the model with the chosen pooling and its classifier."""
    pooling = result.chosen.pooling
    assert pooling.options is not None
    pool.set_options(pooling.options)
    if isinstance(pooling.pool, ROTPool):
        pool.set_weights(**pooling.pool.named_weights())
    num_classes = len(result.classifier.bias)
    reset: Any = getattr(model, 'reset_classifier', None)
    if reset is not None:
        reset(num_classes)
    else:
        (old,) = classifiers(model)
        new = _like(old, num_classes)
        for parent, name in _owners(model, old):
            setattr(parent, name, new)
    (layer,) = classifiers(model)
    assert isinstance(layer, (nn.Linear, nn.Conv2d))
    assert layer.bias is not None
    like = next(model.parameters())
    layer.to(like.device, like.dtype)
    with torch.no_grad():
        layer.weight.copy_(result.classifier.weight.view_as(layer.weight))
        layer.bias.copy_(result.classifier.bias)


def _like(layer: nn.Module, num_classes: int) -> nn.Module:
    """A linear layer or 1 × 1 convolution like `layer`, with another number of outputs."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, num_classes).to(layer.weight)
    assert isinstance(layer, nn.Conv2d)
    return nn.Conv2d(layer.in_channels, num_classes, 1).to(layer.weight)
