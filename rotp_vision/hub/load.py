"""Loading saved models: `load_pretrained`, and the network `rotp_converted` that is registered in timm."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import _registry as registry
from timm.models import generate_default_cfgs, get_pretrained_cfg, register_model
from timm.models._builder import load_pretrained as load_weights
from timm.models._builder import resolve_pretrained_cfg
from torch import nn

from rotp_vision.hub.networks import OF_LOADING, build, is_own, refuse_foreign, refuse_huge
from rotp_vision.hub.weights import WEIGHTS, fit_weights, refuse_pickle, with_versions
from rotp_vision.layers import LocalROTPool2d, any_pool_options
from rotp_vision.surgery import MultiScale, convert, multi_scale, revert, rot_pools
from rotp_vision.surgery.classes import CONVERTED, FORMAT, name_for_timm
from rotp_vision.surgery.pools import described_pools

CONFIG, HUB = 'config.json', 'hf-hub:'

_resnet18 = get_pretrained_cfg('resnet18')
assert _resnet18 is not None
default_cfgs = generate_default_cfgs({CONVERTED: replace(_resnet18, url='', hf_hub_id=None, tag=None)})


def load_pretrained(directory: str | Path, *, base: Callable[..., nn.Module] | None = None, **kwargs: Any) -> nn.Module:
    """The model that `save_pretrained` or `push_to_hub` wrote, in eval mode.

    Args:
        directory: the directory, or 'hf-hub:owner/name'.
        base: what builds the network, if it is your own: the callable that it was saved with.
        kwargs: as `timm.create_model` takes them; with `base`, further arguments of it.

    Example:
        >>> import tempfile, timm, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     directory = rotp_vision.save_pretrained(model, f'{place}/converted')
        ...     rotp_vision.load_pretrained(directory).num_classes
        3
    """
    if str(directory).startswith(HUB):
        name, _, revision = str(directory).removeprefix(HUB).partition('@')
        directory = snapshot_download(name, revision=revision or None, allow_patterns=[CONFIG, WEIGHTS])
    directory = Path(directory)
    config = read_config(directory)
    refuse_pickle(directory)
    try:
        if base is None:
            if config['architecture'] != CONVERTED:
                refuse_foreign(config['architecture'], config['model_args'])
            return timm.create_model(f'local-dir:{directory}', pretrained=True, **kwargs).eval()
        model = build_own(directory, base, **kwargs)
        state = load_file(directory / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f'the weights in {directory} cannot be read, the file may be incomplete: {error}') from error
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f'{directory} cannot be loaded, as its {CONFIG}, its weights or the arguments given now do not fit '
            f'({type(error).__name__}: {error})'
        ) from error
    cure = 'base must build the network that was saved'
    fit_weights(model, with_versions(state, model), f'the weights in {directory} do not fit', cure)
    return model.eval()


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of a saved model, with 'architecture' and 'model_args' checked."""
    path = directory / CONFIG
    if not path.is_file():
        inside = ', '.join(str(found.parent) for found in sorted(directory.glob(f'*/{CONFIG}')))
        hint = f'; did you mean {inside}?' if inside else ''
        raise ValueError(f'{directory} is not a directory that save_pretrained wrote: it has no {CONFIG}{hint}')
    wrong = f'{path} is not what save_pretrained wrote'
    try:
        config = json.loads(path.read_text('utf-8'))
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{wrong}: {error!r}') from error
    if not isinstance(config, dict) or not isinstance(config.get('architecture'), str):
        raise ValueError(f"{wrong}: it must hold the name of a network as 'architecture'")
    arguments = config.setdefault('model_args', {})
    if not isinstance(arguments, dict) or (config['architecture'] == CONVERTED and 'base' not in arguments):
        raise ValueError(f"{wrong}: it must hold the arguments of the network as 'model_args'")
    if config.get('rotp_format', 0) > FORMAT:
        raise ValueError(f'{path} was written by a newer rotp_vision: upgrade it')
    refuse_huge({'num_classes': config.get('num_classes')})
    if config['architecture'] == CONVERTED:
        _check_description(**{key: arguments[key] for key in _DESCRIPTION if key in arguments})
    return config


def native_of(directory: str | Path) -> tuple[str, dict[str, Any]]:
    """`base` and `model_args` with which `save_pretrained` wrote a directory."""
    config = read_config(Path(directory))
    arguments = config['model_args']
    if config['architecture'] == CONVERTED:
        return arguments['base'], dict(arguments.get('base_args') or {})
    return config['architecture'], {key: value for key, value in arguments.items() if not key.startswith('rotp')}


def build_own(directory: Path, base: Callable[..., nn.Module], **kwargs: Any) -> nn.Module:
    """A network of the user's own with the pools of a config, built by the callable that was given for it."""
    (name, native_args), arguments = native_of(directory), read_config(directory)['model_args']
    if not is_own(name):
        raise ValueError(f'{directory} holds {name}, a network of timm or torchvision: load it without base')
    model = base(**(native_args | kwargs))
    _put_pools(model, arguments.get('pools') or {}, arguments.get('folded', ()))
    return model


def _put_pools(model: nn.Module, pools: Mapping[str, Mapping[str, Any]], folded: Sequence[str]):
    """Convert the pools of a network that are not ROT pools yet, and mark those whose gain was folded."""
    there = described_pools(model)
    for path, options in pools.items():
        try:
            checked = any_pool_options(options)
        except ValueError as error:
            raise ValueError(f'the options of {path} in {CONFIG} do not apply: {error}') from error
        if path not in there:
            convert(model, checked, where=[path])
    there = rot_pools(model)
    unknown = [path for path in folded if path not in there]
    if unknown:
        raise ValueError(f"{CONFIG} names pools that the network does not have under 'folded': {', '.join(unknown)}")
    for path in folded:
        there[path].gain_folded = True


_DESCRIPTION = ('base', 'base_args', 'pools', 'folded', 'format')


def _check_description(base: Any = '', base_args: Any = None, pools: Any = None, folded: Any = (), format: Any = 0):
    """Raise a ValueError unless the description of a converted network has the right types, and a known format."""
    if not isinstance(format, int) or format > FORMAT:
        raise ValueError(f'{CONFIG} has format {format!r}, but this rotp_vision reads up to {FORMAT}: upgrade it')
    named = isinstance(pools, Mapping) and all(isinstance(options, Mapping) for options in pools.values())
    listed = isinstance(folded, list | tuple) and all(isinstance(path, str) for path in folded)
    for name, value, good, wanted in (
        ('base', base, isinstance(base, str), 'the name of a network'),
        ('base_args', base_args, base_args is None or isinstance(base_args, Mapping), 'a mapping of arguments'),
        ('pools', pools, pools is None or named, 'options of pools by their paths'),
        ('folded', folded, listed, 'a list of paths'),
    ):
        if not good:
            raise ValueError(f'{name} in {CONFIG} must be {wanted}, got {value!r}')


@register_model
def rotp_converted(
    pretrained: bool = False,
    pretrained_cfg=None,
    pretrained_cfg_overlay=None,
    cache_dir=None,
    base: str = 'resnet18',
    base_args: Mapping[str, Any] | None = None,
    pools: Mapping[str, Mapping[str, Any]] | None = None,
    folded: Sequence[str] = (),
    sizes: Sequence[int] | None = None,
    crop_pct: Sequence[float] | None = None,
    format: int = 0,
    **kwargs: Any,
) -> nn.Module:
    """Any network with converted pools, as `save_pretrained` describes it in config.json; by default a ResNet-18.

    Args:
        pretrained: whether to load the weights that `pretrained_cfg` points to.
        base: the native network's name in timm, or in torchvision with the prefix 'torchvision:'.
        base_args: arguments of the native network.
        pools: options of each converted pool by its path; None for the default global pooling.
        folded: paths of the pools whose gain was folded.
        sizes, crop_pct: of `multi_scale`; None for a network that reads one size.
        format: version of this description; rotp_vision 0.2 wrote none.
        pretrained_cfg, pretrained_cfg_overlay, cache_dir, kwargs: as `timm.create_model` gives them.
    """
    _check_description(base, base_args, pools, folded, format)
    refuse_foreign(base, base_args or {})
    refuse_huge({'pools': pools or {}, 'sizes': sizes or ()})
    unwanted = sorted(set(kwargs) & OF_LOADING)
    if unwanted:  # timm passes what stands beside base_args in config.json
        raise ValueError(f'{CONFIG} has arguments that the network {base} does not take: {", ".join(unwanted)}')
    cfg = resolve_pretrained_cfg(CONVERTED, pretrained_cfg, pretrained_cfg_overlay)
    if pretrained and cfg.source == 'local-dir':
        refuse_pickle(Path(cfg.file or ''))
    saved_args = kwargs.pop('pretrained_model_args', {})  # those of config.json once more
    if kwargs.get('global_pool') == saved_args.get('global_pool'):
        kwargs.pop('global_pool', None)  # the pool's name as timm records it, not a request for another one
    arguments = {'num_classes': cfg.num_classes, **(base_args or {}), **kwargs}
    if 'global_pool' in kwargs or 'features_only' in kwargs:
        if sizes:
            raise ValueError('the network pools several sizes of an image: load it as it is, and use its part `model`')
        weights = _native_weights(pretrained, pretrained_cfg, pretrained_cfg_overlay, cache_dir, base, base_args, pools)
        if weights is not None:
            overlay = {'state_dict': weights, 'num_classes': cfg.num_classes}
            arguments |= {'pretrained': True, 'pretrained_cfg_overlay': overlay}
        model: Any = _built(base, arguments)
    else:
        model = _built(base, arguments)
        if pools is None:
            convert(model)
        else:
            _put_pools(model, pools, folded)
        if sizes:
            model = multi_scale(model, sizes, crop_pct)
        if pretrained:
            in_chans, num_classes = arguments.get('in_chans', 3), arguments['num_classes']
            load_weights(model, cfg.to_dict(), num_classes, in_chans, filter_fn=with_versions)
    # So that saving it again names the native network.
    model.pretrained_cfg = model.default_cfg = cfg.to_dict() | {'architecture': base}
    if described_pools(model) and not isinstance(model, MultiScale):
        name_for_timm(model)
    return model


def _built(base: str, arguments: Mapping[str, Any]) -> nn.Module:
    """The native network; a value that it cannot take, such as an unknown layer, is a ValueError.

    An argument that it does not have stays a TypeError, as timm has it.
    """
    try:
        return build(base, **arguments)
    except (AssertionError, AttributeError, KeyError, RuntimeError) as error:
        raise ValueError(
            f'the network {base} cannot be built with the arguments in {CONFIG} ({type(error).__name__}: {error})'
        ) from error


def _native_weights(pretrained: bool, *description: Any) -> dict[str, Any] | None:
    """Weights for the network without its global ROT pool, as `features_only` and other values of `global_pool` ask."""
    whole = rotp_converted(pretrained, *description)
    local = [path for path, pool in rot_pools(whole).items() if isinstance(pool, LocalROTPool2d)]
    if local:
        raise ValueError(
            f'the network has local ROT pools ({", ".join(local)}), which features_only and global_pool would '
            'drop: load it as it is, and use forward_intermediates, forward_features or reset_classifier'
        )
    return revert(whole).state_dict() if pretrained else None


# timm.list_models leaves out what it calls deprecated: no user should choose this name.
registry._deprecated_models[CONVERTED] = None
