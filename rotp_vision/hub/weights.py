"""Reading and writing weights: files that cannot run code, and errors that say what does not fit."""

import textwrap
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from timm.models import load_state_dict
from torch import nn

from rotp_vision.files import open_by_umask, replacing
from rotp_vision.surgery.freeze import classifiers

WEIGHTS = 'model.safetensors'


def read_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint file: safetensors, or a pickle that holds nothing but tensors and plain values.

    It reads .pth and .pth.tar with `state_dict`, `model` or `state_dict_ema` inside (EMA weights first, as in timm),
    and removes the prefixes of DDP (`module.`) and torch.compile (`_orig_mod.`).

    Example:
        >>> import tempfile, torch, rotp_vision
        >>> with tempfile.NamedTemporaryFile(suffix='.pth') as file:
        ...     torch.save({'state_dict': {'module.weight': torch.ones(2)}}, file.name)
        ...     rotp_vision.read_state_dict(file.name)
        {'weight': tensor([1., 1.])}
    """
    if not Path(path).is_file():
        raise ValueError(f'there is no checkpoint file at {path}')
    try:
        state = load_state_dict(str(path), weights_only=True)
    except RuntimeError as error:
        reason = str(error).split(' No automatic')[0]
        raise ValueError(
            f'{path} is refused because it holds more than weights and could run code on loading ({reason}). If you '
            'trust it, save its state dict alone, preferably as safetensors'
        ) from error
    except Exception as error:
        raise ValueError(f'{path} is not a checkpoint file that can be read: {error}') from error
    if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(
            f'{path} holds no state dict: expected tensors by name, or these under state_dict, model or state_dict_ema'
        )
    return state


def fit_weights(model: nn.Module, state: Mapping[str, torch.Tensor], what: str, cure: str):
    """Load weights into a network; if they do not fit, a ValueError lists the first mismatches.

    Args:
        model: the network.
        state: its weights by name.
        what: the beginning of the message: '… does not fit …'.
        cure: the end of the message, which says what to do.
    """
    try:
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as error:  # of torch, after a line with the network's name, or of a pool
        found = str(error).splitlines()
        lines = [textwrap.shorten(line, 200, placeholder=' …') for line in found[1:5] or found]
        raise ValueError('\n  '.join([f'{what}:', *lines]) + f'\n{cure}') from error


def with_new_classifier(
    model: nn.Module, state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], int | None]:
    """The weights, with the network's own classifier if theirs has another number of classes, and that number.

    The number is None if the classifier fits or the weights have none that can be recognized.
    """
    state, found = dict(state), None
    heads = {id(module) for module in classifiers(model)}
    for path, module in model.named_modules():
        if id(module) not in heads:
            continue
        own = {f'{path}.{name}': value for name, value in module.state_dict().items()}
        others = {name: len(state[name]) for name, value in own.items() if _of_other_classes(value, state.get(name))}
        if others:
            found = next(iter(others.values()))
            state |= own
    return state, found


def _of_other_classes(mine: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two classifier weights differ in shape by the number of classes alone."""
    return other is not None and len(mine) != len(other) and mine.shape[1:] == other.shape[1:]


def write_state_dict(model: nn.Module, path: str | Path, *, force: bool = False) -> Path:
    """Write a model's weights to a safetensors file, completely or not at all."""
    target = Path(path)
    if target.suffix != '.safetensors':
        raise ValueError(f'the file must end in .safetensors, got {target.name}')
    if target.exists() and not force:
        raise ValueError(f'{target} exists; choose another file, or overwrite it with force')
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        save_weights(model, temporary)
    return target


def save_weights(model: nn.Module, path: Path):
    """Write a model's weights to a safetensors file, which must not be in use."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, path, metadata={'format': 'pt'})
    open_by_umask(path)


def refuse_pickle(directory: Path):
    """Raise if there is no safetensors file, because timm would then load any other weights, pickles included."""
    if not (directory / WEIGHTS).is_file():
        raise ValueError(
            f'{directory} has no {WEIGHTS}, and other weights in it are not loaded: if you trust them, read '
            'them with read_state_dict or --checkpoint'
        )


def with_versions(state: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights with the version numbers of the model's modules, which safetensors does not store."""
    versioned = OrderedDict(state)
    versioned._metadata = model.state_dict()._metadata  # pyright: ignore[reportAttributeAccessIssue]
    return versioned
