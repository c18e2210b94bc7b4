"""Saving converted models in timm's format, and loading them in one line."""

import difflib
import inspect
import json
import re
import sys
import tempfile
import textwrap
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from safetensors import SafetensorError
from safetensors.torch import save_file
from timm.models import load_state_dict
from timm.models._builder import load_pretrained as load_weights
from timm.models._builder import resolve_pretrained_cfg
from timm.models._hub import save_config_for_hf
from torch import nn

from rotp_vision.files import force_to_disk, open_by_umask, replacing
from rotp_vision.layers import LocalROTPool2d, pool_options
from rotp_vision.models import ROTPResNet
from rotp_vision.surgery import convert, revert, rot_pools
from rotp_vision.surgery.convert import new_pools
from rotp_vision.surgery.find import image_channels
from rotp_vision.surgery.freeze import classifiers

__all__ = ['load_pretrained', 'read_state_dict', 'save_pretrained']

TORCHVISION = 'torchvision:'
_PREPROCESSING = ('input_size', 'interpolation', 'crop_pct', 'crop_mode', 'mean', 'std')


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
    return torchvision.models.get_model(name.removeprefix(TORCHVISION), weights=None, **kwargs)


# Arguments of timm's entry points that their model classes do not have.
_OF_ENTRY_POINTS = {'bn_momentum', 'bn_eps', 'bn_tf', 'drop_connect_rate', 'use_naflex'}
# Arguments that make a network read or download weights.
_OF_LOADING = {*inspect.signature(timm.create_model).parameters, 'weights', 'weights_backbone', 'progress'}


def refuse_foreign(name: str, arguments: Mapping[str, Any]):
    """Raise a ValueError unless a config names a network of timm or torchvision and passes only its own arguments.

    A config comes with weights from anywhere; other arguments could make it download something or read another file.
    """
    try:
        if name.startswith(TORCHVISION):
            builder: Any = torchvision.models.get_model_builder(name.removeprefix(TORCHVISION))
        else:
            builder = timm.model_entrypoint(name) if ':' not in name else None
    except (ValueError, KeyError, AttributeError, RuntimeError):
        builder = None
    if builder is None:
        raise ValueError(f'config.json must name a network of timm or torchvision, got {name!r}')
    module = sys.modules[builder.__module__]
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and (issubclass(value, nn.Module) or value.__module__ == module.__name__)
    ]
    known = {argument for cls in classes for argument in inspect.signature(cls.__init__).parameters}
    foreign = sorted(set(arguments) - (known | _OF_ENTRY_POINTS) | set(arguments) & _OF_LOADING)
    if foreign:
        raise ValueError(f'config.json has arguments that the network {name} does not take: {", ".join(foreign)}')


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
    except RuntimeError as error:
        lines = [textwrap.shorten(line, 200, placeholder=' …') for line in str(error).splitlines()[1:5]]
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


def save_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    base: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Path:
    """Write a converted model as `model.safetensors` and `config.json`, from which one line loads it.

        model = timm.create_model('local-dir:directory', pretrained=True)      # after import rotp_vision
        model = rotp_vision.load_pretrained('directory')                       # the same

    The directory is written completely or not at all. Before that, the network is built as `load_pretrained` will
    build it, without weights, and a warning names a layer that differs (stride, dropout, …); pass `model_args` then.

    Args:
        model: a converted model, or a `ROTPResNet`.
        directory: the directory to write; it must not exist unless `force`.
        base: the native network's name in timm, or in torchvision with the prefix 'torchvision:'. By default the
            architecture in the `pretrained_cfg` of a timm model.
        model_args: further arguments that `timm.create_model` was given for the native network (in_chans, …).
        force: whether to replace these two files if the directory exists; its other files stay.

    Raises:
        ValueError: if the directory exists, or if the weights would not fit the network built from `config.json`.

    Example:
        >>> import tempfile, timm, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     _ = rotp_vision.save_pretrained(model, f'{place}/converted')
        ...     type(rotp_vision.load_pretrained(f'{place}/converted')).__name__
        'ResNet'
    """
    target = Path(directory)
    if target.exists() and not force:
        raise ValueError(f'{target} exists; choose another directory, or overwrite it with force')
    pools = rot_pools(model)
    own = {path: pool for path, pool in new_pools(model).items() if path not in pools}
    if own:
        raise ValueError(
            f'{", ".join(own)} is a pool of your own, which config.json cannot describe. Save the state dict, '
            'safetensors.torch.save_model(model, file); to load it, build the network, convert(model, pool) as before, '
            'and safetensors.torch.load_model(model, file)'
        )
    if not pools:
        raise ValueError('the model has no ROT pool to save; convert it first, or save it as timm does')
    cfg = dict(getattr(model, 'pretrained_cfg', None) or {})
    base = base or cfg.get('architecture')
    if base is None:
        raise ValueError("base must name the native network (as timm does, or 'torchvision:…'), got None")
    native_args = dict(model_args or {})
    channels = image_channels(model)
    other_images = channels not in (None, 3)
    if other_images:
        native_args.setdefault('in_chans', channels)
    if isinstance(model, ROTPResNet):
        architecture = base
        # All of the options, because the variant would fill in those that are left out.
        arguments = native_args | {
            name: asdict(pools[path].options)
            for name, path in (('rotp', 'global_pool'), ('rotp_stem', 'maxpool'))
            if path in pools
        }
        if 'global_pool' not in pools:
            arguments['global_pool'] = model.global_pool.pool_type
    else:
        architecture = 'rotp_converted'
        options = {path: pool.options.to_dict() for path, pool in pools.items()}
        arguments = {'base': base, 'base_args': native_args, 'pools': options}
        folded = [path for path, pool in pools.items() if pool.gain_folded]
        if folded:
            arguments['folded'] = folded
    num_classes = num_classes_of(model)
    config = {'architecture': architecture, 'num_classes': num_classes, 'model_args': arguments}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f'.{target.name}.') as workplace:
        made = Path(workplace) / 'made'
        made.mkdir()
        if cfg and not base.startswith(TORCHVISION):
            save_config_for_hf(model, made / 'config.json', model_config=config, model_args=arguments)  # pyright: ignore
            written = json.loads((made / 'config.json').read_text())
            # timm 1.0.31 adds arguments that it has recorded, the name of the pool among them, which do not apply.
            written['model_args'] = arguments
            if other_images:
                # The weights have this number of channels already, so timm must not adapt the first convolution.
                written['pretrained_cfg']['first_conv'] = None
            (made / 'config.json').write_text(json.dumps(written, indent=2))
        else:
            seen = {key: cfg[key] for key in _PREPROCESSING if key in cfg}
            config['pretrained_cfg'] = seen | {'num_classes': num_classes, 'classifier': None, 'first_conv': None}
            (made / 'config.json').write_text(json.dumps(config, indent=2))
        _compare_with_loaded(model, made)
        _write_weights(model, made / 'model.safetensors')
        for file in made.iterdir():
            force_to_disk(file)
        old = Path(workplace) / 'old'
        if target.exists():
            target.rename(old)
        made.rename(target)
        for other in old.iterdir() if old.is_dir() else ():
            if not (target / other.name).exists():
                other.rename(target / other.name)
    return target


def _compare_with_loaded(model: nn.Module, directory: Path):
    """Raise if the weights would not fit the network that is loaded, and warn if that one has other layers."""
    advice = 'pass the arguments that it was created with as model_args'
    try:
        loaded = _built_without_weights(directory)
    except Exception as error:  # of the network's own making
        raise ValueError(
            f'load_pretrained could not build this network ({type(error).__name__}: {error}); {advice}'
        ) from error
    difference = _first_difference(_shapes(model), _shapes(loaded))
    if difference:
        raise ValueError(
            f'load_pretrained would build another network than this one ({difference}); {advice}, or save the state '
            'dict alone if the network was changed since'
        )
    difference = _first_difference(_layers(model), _layers(loaded))
    if difference:
        warnings.warn(f'load_pretrained will build another network ({difference}); {advice}', stacklevel=3)


def _built_without_weights(directory: Path) -> nn.Module:
    """The network of a config, on the meta device unless it reads values while it is built."""
    name = f'local-dir:{directory}'
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter('ignore')
        try:
            with torch.device('meta'):
                return timm.create_model(name)
        except Exception:
            return timm.create_model(name)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _layers(model: nn.Module) -> dict[str, str]:
    """The representation of every module except ROT pools, whose representation shows learned values."""
    pools = tuple(rot_pools(model))
    said: dict[str, str] = {}
    for path, module in model.named_modules():
        if path in pools or path.startswith(tuple(f'{pool}.' for pool in pools)):
            continue
        has_parts = any(True for _ in module.children())
        text = f'{type(module).__name__}({module.extra_repr()})' if has_parts else repr(module)
        # In evaluation mode synchronized batch norm is batch norm.
        said[path] = re.sub(r'^Sync(BatchNorm|BatchNormAct)\(', r'\g<1>2d(', text)
    return said


def _first_difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    for name in {**here, **there}:
        mine, other = here.get(name, 'nothing'), there.get(name, 'nothing')
        if mine != other:
            return f'{name or "the network"} is {mine} here and would be {other} when loaded'
    return None


def write_state_dict(model: nn.Module, path: str | Path, *, force: bool = False) -> Path:
    """Write a model's weights to a safetensors file, completely or not at all."""
    target = Path(path)
    if target.suffix != '.safetensors':
        raise ValueError(f'the file must end in .safetensors, got {target.name}')
    if target.exists() and not force:
        raise ValueError(f'{target} exists; choose another file, or overwrite it with force')
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        _write_weights(model, temporary)
    return target


def _write_weights(model: nn.Module, path: Path):
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, path, metadata={'format': 'pt'})
    open_by_umask(path)


def load_pretrained(directory: str | Path, **kwargs: Any) -> nn.Module:
    """The model that `save_pretrained` wrote, in eval mode; `kwargs` as `timm.create_model` takes them.

    Example:
        >>> import tempfile, timm, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     directory = rotp_vision.save_pretrained(model, f'{place}/converted')
        ...     rotp_vision.load_pretrained(directory).num_classes
        3
    """
    config = Path(directory) / 'config.json'
    if not config.is_file():
        inside = ', '.join(str(found.parent) for found in sorted(Path(directory).glob('*/config.json')))
        hint = f'; did you mean {inside}?' if inside else ''
        raise ValueError(f'{directory} is not a directory that save_pretrained wrote: it has no config.json{hint}')
    try:
        json.loads(config.read_text())['architecture']
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{config} is not what save_pretrained wrote: {error!r}') from error
    _refuse_pickle(Path(directory))
    try:
        return timm.create_model(f'local-dir:{directory}', pretrained=True, **kwargs).eval()
    except SafetensorError as error:
        raise ValueError(f'the weights in {directory} cannot be read, the file may be incomplete: {error}') from error


def _refuse_pickle(directory: Path):
    """Raise if there is no safetensors file, because timm would then load any other weights, pickles included."""
    if not (directory / 'model.safetensors').is_file():
        raise ValueError(
            f'{directory} has no model.safetensors, and other weights in it are not loaded: if you trust them, read '
            'them with read_state_dict or --checkpoint'
        )


def native_of(directory: str | Path) -> tuple[str | None, dict[str, Any]]:
    """`base` and `model_args` with which `save_pretrained` wrote a directory."""
    config = json.loads((Path(directory) / 'config.json').read_text())
    arguments = dict(config['model_args'])
    if config['architecture'] == 'rotp_converted':
        return arguments['base'], arguments['base_args']
    return config['architecture'], {key: value for key, value in arguments.items() if not key.startswith('rotp')}


def num_classes_of(model: nn.Module) -> int:
    """Number of classes of a model: its `num_classes`, or the output features of its last linear layer."""
    num_classes = getattr(model, 'num_classes', None)
    if isinstance(num_classes, int):
        return num_classes
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError('the model has neither num_classes nor a linear layer from which to infer it')
    return linear[-1].out_features


def _with_versions(state: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights with the version numbers of the model's modules, which safetensors does not store."""
    versioned = OrderedDict(state)
    versioned._metadata = model.state_dict()._metadata  # pyright: ignore[reportAttributeAccessIssue]
    return versioned


def build_converted(
    pretrained: bool = False,
    pretrained_cfg=None,
    pretrained_cfg_overlay=None,
    cache_dir=None,
    base: str = 'resnet18',
    base_args: Mapping[str, Any] | None = None,
    pools: Mapping[str, Mapping[str, Any]] | None = None,
    folded: Sequence[str] = (),
    **kwargs: Any,
) -> nn.Module:
    """The network of `rotp_converted`, which is registered in timm: any network with converted pools.

    Args:
        pretrained: whether to load the weights that `pretrained_cfg` points to.
        base: the native network's name in timm, or in torchvision with the prefix 'torchvision:'.
        base_args: arguments of the native network.
        pools: options of each converted pool by its path; None for the default global pooling.
        folded: paths of the pools whose gain was folded.
        pretrained_cfg, pretrained_cfg_overlay, cache_dir, kwargs: as `timm.create_model` gives them.
    """
    refuse_foreign(base, base_args or {})
    cfg = resolve_pretrained_cfg('rotp_converted', pretrained_cfg, pretrained_cfg_overlay)
    if pretrained and cfg.source == 'local-dir':
        _refuse_pickle(Path(cfg.file or ''))
    kwargs.pop('pretrained_model_args', None)  # timm from 1.0.31 on passes those of config.json once more
    arguments = {'num_classes': cfg.num_classes, **(base_args or {}), **kwargs}
    if 'global_pool' in kwargs or 'features_only' in kwargs:
        # Without its global pool, or with another one, the network is the native one.
        whole = build_converted(
            pretrained, pretrained_cfg, pretrained_cfg_overlay, cache_dir, base, base_args, pools, folded
        )
        local = [path for path, pool in rot_pools(whole).items() if isinstance(pool, LocalROTPool2d)]
        if local:
            raise ValueError(
                f'the network has local ROT pools ({", ".join(local)}), which features_only and global_pool would '
                'drop: load it as it is, and use forward_intermediates, forward_features or reset_classifier'
            )
        if pretrained:
            overlay = {'state_dict': revert(whole).state_dict(), 'num_classes': cfg.num_classes}
            arguments |= {'pretrained': True, 'pretrained_cfg_overlay': overlay}
        model: Any = build(base, **arguments)
    else:
        model = build(base, **arguments)
        if pools is None:
            convert(model)
        for path, options in (pools or {}).items():
            convert(model, pool_options(options), where=[path])
        for path in folded:
            rot_pools(model)[path].gain_folded = True
        if pretrained:
            in_chans, num_classes = arguments.get('in_chans', 3), arguments['num_classes']
            load_weights(model, cfg.to_dict(), num_classes, in_chans, filter_fn=_with_versions)
    # So that saving it again names the native network.
    model.pretrained_cfg = model.default_cfg = cfg.to_dict() | {'architecture': base}
    return model
