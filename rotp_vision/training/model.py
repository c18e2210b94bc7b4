"""Networks from names and files."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

from rotp_vision.hub import (
    TORCHVISION,
    build,
    fit_weights,
    load_pretrained,
    num_classes_of,
    read_state_dict,
    refuse_foreign,
    with_new_classifier,
)
from rotp_vision.surgery import convert
from rotp_vision.training.checkpoint import is_checkpoint, load_checkpoint
from rotp_vision.training.config import ModelConfig, PoolConfig


def build_model(
    config: ModelConfig, num_classes: int, *, new_classifier: bool = False, notify: Callable[[str], object] = print
) -> nn.Module:
    """Returns the configured network with its native pooling, from published weights, a file or scratch.

    Args:
        config: the network.
        num_classes: number of classes of the data.
        new_classifier: whether to use a new classifier if the weights have another number of classes; otherwise a
            ValueError is raised.
        notify: called with one line if the classifier is new.
    """
    kwargs: dict[str, Any] = dict(config.kwargs)

    def compare(name: str, known: int | None) -> None:
        if known in (None, num_classes):
            return
        found = f'{name} has {known} classes, the data {num_classes}'
        if not new_classifier:
            raise ValueError(f'{found}: set stage1.epochs, or stage2.train pool+classifier, to train a new classifier')
        notify(f'{found}: the classifier is new')

    if config.checkpoint is not None:
        state, name = load_weights(Path(config.checkpoint)), Path(config.checkpoint).name
    elif config.pretrained and config.name.startswith(TORCHVISION):
        model = torchvision.models.get_model(config.name.removeprefix(TORCHVISION), weights='DEFAULT', **kwargs)
        if num_classes_of(model) == num_classes:
            return model
        state, name = model.state_dict(), config.name
    else:
        if config.pretrained:
            compare(config.name, published_classes(config))  # timm leaves such a classifier out by itself
            kwargs['pretrained'] = True
        return build(config.name, num_classes=num_classes, **kwargs)
    model = build(config.name, num_classes=num_classes, **kwargs)
    state, known = with_new_classifier(model, state)
    compare(name, known)
    fit_weights(
        model,
        state,
        f'{name} does not fit {config.name}',
        'choose the network of the weights: model.name, model.kwargs',
    )
    return model


def load_weights(path: Path) -> dict[str, Tensor]:
    """Returns the weights of a run's checkpoint (the moving average if it has one), or of another file."""
    if not is_checkpoint(path) and not path.is_dir():
        return read_state_dict(path)
    checkpoint = load_checkpoint(path)
    return checkpoint.state_dict_ema or checkpoint.model


def published_classes(config: ModelConfig) -> int | None:
    """Returns the number of classes of the published weights of a timm model, or None if it is unknown."""
    if config.name.startswith(TORCHVISION) or not timm.is_model(config.name):
        return None
    cfg = timm.get_pretrained_cfg(config.name)
    return cfg.num_classes if cfg is not None else None


def convert_model(
    model: nn.Module, config: PoolConfig, pools: Mapping[str, Mapping[str, Any]] | None = None
) -> nn.Module:
    """Replaces the pooling by ROTP: as configured, or by pools with the given options at their paths."""
    for path, options in (pools or {}).items():
        model = convert(model, options, [path])
    if pools:
        return model
    return convert(model, config.options, config.where)


def load_for_evaluation(path: str, config: ModelConfig, pool: PoolConfig, num_classes: int) -> nn.Module:
    """Returns the network of a checkpoint of a run, of an exported directory or of a weights file.

    Checkpoints and exports describe their network. A file in an export counts as the export. Any other file must fit
    the configured network, with the configured pooling if it has more weights than the native network.
    """
    file = Path(path)
    directory = file.parent if file.name == 'model.safetensors' else file
    if path == 'model':
        return build_model(config, num_classes)
    if is_checkpoint(file):
        checkpoint = load_checkpoint(file)
        stored = checkpoint.config
        refuse_foreign(stored['model']['name'], stored['model']['kwargs'])
        model = build_model(ModelConfig(**(stored['model'] | {'pretrained': False, 'checkpoint': None})), num_classes)
        if checkpoint.progress.stage == 2:
            model = convert_model(model, PoolConfig(**stored['pool']), checkpoint.progress.pools)
        model.load_state_dict(checkpoint.state_dict_ema or checkpoint.model)
        return model
    if (directory / 'config.json').is_file():
        model = load_pretrained(directory)
        if getattr(model, 'num_classes', num_classes) != num_classes:
            raise ValueError(f'{path} has {model.num_classes} classes but the data has {num_classes}')
        return model
    state = load_weights(file)
    model = build_model(replace(config, pretrained=False, checkpoint=None), num_classes)
    what = f'{path} does not fit the configured network and pooling'
    cure = 'give the settings of its run, or the directory of the checkpoint or export, which holds them'
    if state.keys() - model.state_dict().keys():
        try:
            model = convert_model(model, pool)
        except ValueError as error:
            raise ValueError(f'{what} ({error}); {cure}') from error
    fit_weights(model, state, what, cure)
    return model


def normalization(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the mean and standard deviation with which the network expects images to be normalised."""
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    cfg = cfg if isinstance(cfg, Mapping) else vars(cfg)
    return tuple(cfg.get('mean', (0.485, 0.456, 0.406))), tuple(cfg.get('std', (0.229, 0.224, 0.225)))


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Returns the number of parameters of a network, and of those that are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


@torch.no_grad()
def map_shape(model: nn.Module, image_size: int) -> tuple[int, int, int]:
    """Returns the shape (C, H, W) of the input of the pooling."""
    if not (hasattr(model, 'forward_features') and hasattr(model, 'forward_head')):
        raise ValueError('stage2.cache_features needs a timm model (forward_features and forward_head)')
    device = next(model.parameters()).device
    was_training = model.training
    maps = model.eval().forward_features(torch.zeros(1, 3, image_size, image_size, device=device))  # type: ignore[operator]
    model.train(was_training)
    if maps.dim() != 4:
        raise ValueError(f'stage2.cache_features needs maps (B, C, H, W), the network makes {tuple(maps.shape)}')
    return tuple(maps.shape[1:])  # type: ignore[return-value]
