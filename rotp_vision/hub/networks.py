"""Native networks by name, and which of them a config.json may ask for."""

import difflib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import timm
import torchvision
from torch import nn

from rotp_vision.layers.options import LARGEST

TORCHVISION = 'torchvision:'

# Arguments of timm's entry points that their model classes do not have.
_OF_ENTRY_POINTS = {'bn_momentum', 'bn_eps', 'bn_tf', 'drop_connect_rate', 'use_naflex'}
# Arguments that make a network read or download weights.
OF_LOADING = {*inspect.signature(timm.create_model).parameters, 'weights', 'weights_backbone', 'progress'}


def build(name: str, **kwargs: Any) -> nn.Module:
    """A network without weights by its name in timm, or in torchvision with the prefix 'torchvision:'."""
    if not name.startswith(TORCHVISION):
        if ':' not in name and not timm.is_model(name):
            near = ', '.join(difflib.get_close_matches(name.split('.')[0], timm.list_models(), 3)) or 'none'
            raise ValueError(
                f'{name!r} is neither a model of timm (close matches: {near}) nor a directory; models of torchvision '
                'are called torchvision:NAME'
            )
        return timm.create_model(name, **kwargs)
    known = torchvision.models.list_models(torchvision.models)
    if name.removeprefix(TORCHVISION) not in known:
        raise ValueError(f'{name!r} is not a classification model of torchvision; it has {", ".join(known)}')
    return torchvision.models.get_model(name.removeprefix(TORCHVISION), **({'weights': None} | kwargs))


def is_own(base: str) -> bool:
    """Whether the name of a native network is that of a callable, 'module:name', not of timm or torchvision."""
    return ':' in base and not base.startswith(TORCHVISION)


def refuse_foreign(name: str, arguments: Mapping[str, Any]):
    """Raise a ValueError unless a config names a network of timm or torchvision and passes only its own arguments.

    A config comes with weights from anywhere; other arguments could make it download something or read another file,
    and huge numbers would fill the memory.
    """
    builder: Any = None
    try:
        if name.startswith(TORCHVISION):
            builder = torchvision.models.get_model_builder(name.removeprefix(TORCHVISION))
        elif ':' not in name:
            builder = timm.model_entrypoint(name)
    except (ValueError, KeyError, AttributeError, RuntimeError):
        pass
    if builder is None:
        raise ValueError(
            f'config.json must name a network of timm or torchvision, got {name!r}; if that is your own network, pass '
            'the function or class that builds it: rotp_vision.load_pretrained(directory, base=YourNetwork)'
        )
    module = sys.modules[builder.__module__]
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and (issubclass(value, nn.Module) or value.__module__ == module.__name__)
    ]
    known = {argument for cls in classes for argument in inspect.signature(cls.__init__).parameters}
    foreign = sorted(set(arguments) - (known | _OF_ENTRY_POINTS) | set(arguments) & OF_LOADING)
    if foreign:
        raise ValueError(f'config.json has arguments that the network {name} does not take: {", ".join(foreign)}')
    refuse_huge(arguments)


def refuse_huge(arguments: Any, name: str = ''):
    """Raise a ValueError if an integer among the arguments, however nested, is larger than any useful size."""
    if isinstance(arguments, Mapping):
        for key, value in arguments.items():
            refuse_huge(value, str(key))
    elif isinstance(arguments, list | tuple):
        for value in arguments:
            refuse_huge(value, name)
    elif isinstance(arguments, int) and abs(arguments) > (limit := 2**20 if name == 'num_classes' else LARGEST):
        raise ValueError(f'{name} in config.json must be at most {limit}, got {arguments}')


def num_classes_of(model: nn.Module) -> int:
    """Number of classes of a model: its `num_classes`, or the output features of its last linear layer."""
    num_classes = getattr(model, 'num_classes', None)
    if isinstance(num_classes, int):
        return num_classes
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError('the model has neither num_classes nor a linear layer from which to infer it')
    return linear[-1].out_features
