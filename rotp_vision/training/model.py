"""Networks from names and files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import timm
import torch
import torchvision
from timm.layers import convert_sync_batchnorm  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor, nn

from rotp_vision.hub import TORCHVISION, build, load_pretrained, read_state_dict, refuse_foreign
from rotp_vision.surgery import convert
from rotp_vision.training.checkpoint import MANIFEST, load_checkpoint
from rotp_vision.training.config import ModelConfig, PoolConfig


def build_model(config: ModelConfig, num_classes: int) -> nn.Module:
    """The configured network with its native pooling, from published weights, a file or scratch."""
    kwargs: dict[str, Any] = dict(config.kwargs)
    if config.name.startswith(TORCHVISION) and config.pretrained:
        name = config.name.removeprefix(TORCHVISION)
        model = torchvision.models.get_model(name, weights='DEFAULT', **kwargs)
        found = [module for module in model.modules() if isinstance(module, nn.Linear)][-1].out_features
        if found != num_classes:
            raise ValueError(f'{config.name} is pretrained for {found} classes but the data has {num_classes}')
    else:
        if config.pretrained:
            kwargs['pretrained'] = True
        model = build(config.name, num_classes=num_classes, **kwargs)
    if config.checkpoint is not None:
        model.load_state_dict(load_weights(Path(config.checkpoint)))
    return model


def load_weights(path: Path) -> dict[str, Tensor]:
    """Weights of a run's checkpoint (the moving average if it has one), or of a file."""
    if not path.is_dir():
        return read_state_dict(path)
    checkpoint = load_checkpoint(path)
    return checkpoint.state.get('ema') or checkpoint.model


def published_classes(config: ModelConfig) -> int | None:
    """Classes that the published weights of a timm name know; None where that is not known."""
    if config.name.startswith(TORCHVISION) or not timm.is_model(config.name):
        return None
    cfg = timm.get_pretrained_cfg(config.name)
    return cfg.num_classes if cfg is not None else None


def convert_model(model: nn.Module, config: PoolConfig) -> nn.Module:
    """The network with its pooling replaced by ROTP."""
    return convert(model, config.options, config.where)


def synchronized(model: nn.Module) -> nn.Module:
    """The network with batch statistics over all processes. timm's function keeps the activations of its norm layers,
    if it is called once.
    """
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return model
    return convert_sync_batchnorm(model)


def load_for_evaluation(path: str, config: ModelConfig, pool: PoolConfig, num_classes: int) -> nn.Module:
    """The network of a checkpoint of a run, of an exported directory or of a weights file.

    The directories know what they are of. A file is of the configured network, with the configured pooling where it has
    more weights than the native network.
    """
    place = Path(path)
    if path == 'model':
        return build_model(config, num_classes)
    if (place / MANIFEST).is_file():
        checkpoint = load_checkpoint(place)
        stored = checkpoint.config
        refuse_foreign(stored['model']['name'], stored['model']['kwargs'])
        model = build_model(ModelConfig(**(stored['model'] | {'pretrained': False, 'checkpoint': None})), num_classes)
        if checkpoint.progress.stage == 2:
            model = convert_model(model, PoolConfig(**stored['pool']))
        model.load_state_dict(load_weights(place))
        return model
    if (place / 'config.json').is_file():
        model = load_pretrained(place)
        if getattr(model, 'num_classes', num_classes) != num_classes:
            raise ValueError(f'{path} has {model.num_classes} classes but the data has {num_classes}')
        return model
    state = load_weights(place)
    model = build_model(replace(config, pretrained=False, checkpoint=None), num_classes)
    try:
        if state.keys() - model.state_dict().keys():
            model = convert_model(model, pool)
        model.load_state_dict(state)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f'{path} does not fit the configured network and pooling ({shorten(str(error), 300, placeholder=" …")}): '
            'give the settings of its run, or the directory of the checkpoint or export, which knows them'
        ) from error
    return model


def normalization(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the images that a network expects."""
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    cfg = cfg if isinstance(cfg, Mapping) else vars(cfg)
    return tuple(cfg.get('mean', (0.485, 0.456, 0.406))), tuple(cfg.get('std', (0.229, 0.224, 0.225)))


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Parameters of a network, and those of them that are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


@torch.no_grad()
def map_shape(model: nn.Module, image_size: int) -> tuple[int, int, int]:
    """(C, H, W) of the map that goes into the pooling."""
    if not (hasattr(model, 'forward_features') and hasattr(model, 'forward_head')):
        raise ValueError('stage2.cache_features needs a timm model (forward_features and forward_head)')
    device = next(model.parameters()).device
    was_training = model.training
    maps = model.eval().forward_features(torch.zeros(1, 3, image_size, image_size, device=device))  # type: ignore[operator]
    model.train(was_training)
    if maps.dim() != 4:
        raise ValueError(f'stage2.cache_features needs maps (B, C, H, W), the network makes {tuple(maps.shape)}')
    return tuple(maps.shape[1:])  # type: ignore[return-value]
