"""Saving converted models in timm's format, publishing them, and loading them in one line."""

import difflib
import inspect
import json
import re
import sys
import tempfile
import textwrap
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from huggingface_hub import HfApi, ModelCardData, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from timm.models import load_state_dict
from timm.models._builder import load_pretrained as load_weights
from timm.models._builder import resolve_pretrained_cfg
from timm.models._hub import save_config_for_hf
from torch import nn

from rotp_vision.files import force_to_disk, open_by_umask, replacing
from rotp_vision.layers import LocalROTPool2d, pool_options
from rotp_vision.models import ROTPResNet
from rotp_vision.surgery import MultiScale, convert, multi_scale, revert, rot_pools
from rotp_vision.surgery.classes import CONVERTED, changes_of, name_for_timm, recipe, recorded_arguments
from rotp_vision.surgery.find import image_channels
from rotp_vision.surgery.freeze import classifiers
from rotp_vision.surgery.pools import new_pools

__all__ = ['load_pretrained', 'push_to_hub', 'read_state_dict', 'save_pretrained']

TORCHVISION, HUB = 'torchvision:', 'hf-hub:'
Base = str | Callable[..., nn.Module]
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
        raise ValueError(
            f'config.json must name a network of timm or torchvision, got {name!r}; if that is your own network, give '
            'it: rotp_vision.load_pretrained(directory, base=YourNetwork)'
        )
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
    base: Base | None = None,
    model_args: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    license: str | None = None,
    force: bool = False,
) -> Path:
    """Write a model with ROT pools as `model.safetensors`, `config.json` and a model card, `README.md`.

        model = rotp_vision.load_pretrained('directory')
        model = timm.create_model('local-dir:directory', pretrained=True)      # the same, after import rotp_vision

    Your own network is saved and loaded with the function or class that builds it; nothing but your call imports it:

        rotp_vision.save_pretrained(model, 'directory', base=MyNetwork, model_args={'width': 64})
        model = rotp_vision.load_pretrained('directory', base=MyNetwork)

    The directory is written completely or not at all. Before that, the network is built as `load_pretrained` will
    build it, without weights, and a warning names a layer that differs (stride, dropout, …); pass `model_args` then.

    Args:
        model: a converted model, a `ROTPResNet`, either with `multi_scale`, or your own network with ROT pools.
        directory: the directory to write; it must not exist unless `force`.
        base: the native network's name in timm, or in torchvision with the prefix 'torchvision:'; or what builds your
            own network, with its pools or without them. By default the architecture of a timm model.
        model_args: further arguments that the native network was built with, beside those that timm recorded.
        metrics: names and values for the model card.
        license: licence of these weights for the model card; its text names the one that timm records for the base.
        force: whether to replace these files if the directory exists; its other files stay.

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
    inner = model.model if isinstance(model, MultiScale) else model
    pools = rot_pools(inner)
    undescribed = [path for path in new_pools(inner) if path not in pools]
    if undescribed:
        raise ValueError(
            f'{", ".join(undescribed)} is a pool of your own, which config.json cannot describe. Save the state dict, '
            'safetensors.torch.save_model(model, file); to load it, build the network, convert(model, pool) as before, '
            'and safetensors.torch.load_model(model, file)'
        )
    if not pools:
        raise ValueError('the model has no ROT pool to save; convert it first, or save it as timm does')
    cfg = dict(getattr(model, 'pretrained_cfg', None) or {})
    base = base or changes_of(inner).architecture or cfg.get('architecture')
    if base is None:
        raise ValueError(
            "base must name the native network (as timm does, or 'torchvision:…'), or be what builds your own, got None"
        )
    own = base if callable(base) else None
    name = f'{own.__module__}:{own.__qualname__}' if own else str(base)
    native_args = {**recorded_arguments(inner), **(model_args or {})}
    channels = None if own else image_channels(inner)
    other_images = channels not in (None, 3)
    if other_images:
        native_args.setdefault('in_chans', channels)
    if isinstance(inner, ROTPResNet) and not own:
        architecture, arguments = name, native_args | inner.pool_arguments()
        if 'rotp' not in arguments:
            arguments['global_pool'] = inner.global_pool.pool_type
    else:
        architecture, arguments = CONVERTED, recipe(inner, name, native_args)
    if isinstance(model, MultiScale):
        if architecture != CONVERTED:
            architecture, arguments = CONVERTED, {'base': name, 'base_args': arguments, 'pools': {}}
        arguments |= {'sizes': list(model.sizes), 'crop_pct': list(model.crop_pct)}
    num_classes = num_classes_of(model)
    config = {'architecture': architecture, 'num_classes': num_classes, 'model_args': arguments}
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f'model_args must hold plain values, which JSON can write: {error}') from error
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f'.{target.name}.') as workplace:
        made = Path(workplace) / 'made'
        made.mkdir()
        if cfg and not own and not name.startswith(TORCHVISION):
            save_config_for_hf(model, made / 'config.json', model_config=config)  # pyright: ignore
            written = json.loads((made / 'config.json').read_text())
            # timm adds arguments that it has recorded, the name of the pool among them, which do not apply.
            written |= {'architecture': architecture, 'model_args': arguments}
            if other_images:
                # The weights have this number of channels already, so timm must not adapt the first convolution.
                written['pretrained_cfg']['first_conv'] = None
            (made / 'config.json').write_text(json.dumps(written, indent=2))
        else:
            seen = {key: cfg[key] for key in _PREPROCESSING if key in cfg}
            config['pretrained_cfg'] = seen | {'num_classes': num_classes, 'classifier': None, 'first_conv': None}
            (made / 'config.json').write_text(json.dumps(config, indent=2))
        _compare_with_loaded(model, made, own)
        _write_weights(model, made / 'model.safetensors')
        (made / 'README.md').write_text(model_card(model, made, str(target), metrics, license), encoding='utf-8')
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


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    base: Base | None = None,
    model_args: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    license: str | None = None,
    private: bool = False,
    token: str | None = None,
) -> str:
    """Publish a model on the Hugging Face Hub, as `save_pretrained` writes it; returns the address of the commit.

        model = rotp_vision.load_pretrained('hf-hub:me/my-model')
        model = timm.create_model('hf-hub:me/my-model', pretrained=True)       # the same, after import rotp_vision

    Args:
        model, base, model_args, metrics, license: as `save_pretrained` takes them.
        repo_id: 'owner/name'; the repository is made if it does not exist.
        private: whether a new repository is private.
        token: an access token, if not the one of `hf auth login`.

    Example:
        >>> import rotp_vision
        >>> rotp_vision.push_to_hub(model, 'me/resnet50-rotp', metrics={'top-1 %': 76.1})  # doctest: +SKIP
    """
    with tempfile.TemporaryDirectory() as workplace:
        directory = save_pretrained(model, Path(workplace) / 'model', base=base, model_args=model_args)
        api = HfApi(token=token, library_name='rotp_vision')
        repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        card = model_card(model, directory, f'{HUB}{repository}', metrics, license)
        (directory / 'README.md').write_text(card, encoding='utf-8')
        return str(api.upload_folder(repo_id=repository, folder_path=directory, commit_message='Add model'))


def model_card(
    model: nn.Module, directory: Path, place: str, metrics: Mapping[str, Any] | None, license: str | None
) -> str:
    """The README.md of a saved model: what it is, how to load it, its pooling, its scores and the licence.

    Args:
        model: the model.
        directory: where its config.json is.
        place: what `load_pretrained` will be given.
        metrics, license: as `save_pretrained` takes them.
    """
    base, _ = native_of(directory)
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    data = ModelCardData(license=license, library_name='rotp_vision', tags=['image-classification', 'rotp_vision'])
    network = base.rpartition(':')[2]
    code = ['import rotp_vision', '', f"model = rotp_vision.load_pretrained('{place}')"]
    if _is_own(base):
        code[-1] = f"model = rotp_vision.load_pretrained('{place}', base={network})  # {base}"
    else:
        source = place if place.startswith(HUB) else f'local-dir:{place}'
        code[0] = 'import timm, rotp_vision'
        code += [f"model = timm.create_model('{source}', pretrained=True)  # the same"]
    lines = ['---', data.to_yaml(), '---', '', f'# {network} with ROT pooling', '']
    lines += [
        f'The network `{base}` with regularized optimal transport pooling. It needs the package rotp_vision: without',
        'it timm knows no such model ("Unknown model").',
        '',
        '```bash',
        'pip install rotp_vision',
        '```',
        '',
        '```python',
        *code,
        '```',
        '',
        '## Pooling',
        '',
    ]
    for path, pool in rot_pools(model).items():
        options = ', '.join(f'{name} = {value}' for name, value in pool.options.to_dict().items()) or 'the recommended'
        lines += [f'`{path}` is `{type(pool).__name__}`, {pool.options.solver}; options: {options}.', '']
        lines += ['| weight | value |', '| --- | --- |']
        lines += [f'| {name} | {shortened(value)} |' for name, value in pool.named_weights().items()]
        lines += ['']
    if metrics:
        lines += ['## Scores', '', '| metric | value |', '| --- | --- |']
        lines += [f'| {name} | {value} |' for name, value in metrics.items()]
        lines += ['']
    origin = cfg.get('hf_hub_id') or cfg.get('origin_url') or cfg.get('url') or base
    if license:
        terms = f'These weights: {license}.'
    elif cfg.get('license'):
        terms = f'timm records the licence {cfg["license"]} for the weights of {origin}; it holds if these began there.'
    else:
        terms = 'No licence of the weights is recorded.'
    lines += ['## Licence', '', terms, '']
    return '\n'.join(lines)


def shortened(value: torch.Tensor, limit: int = 8) -> str:
    """The numbers of a weight as text, the first few if there are many."""
    values = value.flatten().tolist()
    return ', '.join(f'{v:.4g}' for v in values[:limit]) + (f', … ({len(values)})' if len(values) > limit else '')


def _compare_with_loaded(model: nn.Module, directory: Path, own: Callable[..., nn.Module] | None):
    """Raise if the weights would not fit the network that is loaded, and warn if that one has other layers."""
    advice = 'pass the arguments that it was created with as model_args'
    try:
        loaded = _built_without_weights(directory, own)
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


def _built_without_weights(directory: Path, own: Callable[..., nn.Module] | None) -> nn.Module:
    """The network of a config, on the meta device unless it reads values while it is built."""

    def built() -> nn.Module:
        return timm.create_model(f'local-dir:{directory}') if own is None else _build_own(directory, own)

    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter('ignore')
        try:
            with torch.device('meta'):
                return built()
        except Exception:
            return built()


def _build_own(directory: Path, base: Callable[..., nn.Module], **kwargs: Any) -> nn.Module:
    """A network of the user's own, by the callable that was given for it, with the pools of a config."""
    config = json.loads((directory / 'config.json').read_text())
    arguments, (name, _) = config['model_args'], native_of(directory)
    if not _is_own(name):
        raise ValueError(f'{directory} holds {name}, a network of timm or torchvision: load it without base')
    model = base(**(arguments['base_args'] | kwargs))
    _put_pools(model, arguments['pools'], arguments.get('folded', ()))
    return model


def _is_own(base: str) -> bool:
    """Whether the name of a native network is that of a callable, 'module:name', not of timm or torchvision."""
    return ':' in base and not base.startswith(TORCHVISION)


def _put_pools(model: nn.Module, pools: Mapping[str, Mapping[str, Any]], folded: Sequence[str]):
    """Convert the pools of a network that are not ROT pools yet, and mark those whose gain was folded."""
    there = rot_pools(model)
    for path, options in pools.items():
        if path not in there:
            convert(model, pool_options(options), where=[path])
    for path in folded:
        rot_pools(model)[path].gain_folded = True


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _layers(model: nn.Module) -> dict[str, str]:
    """The representation of every module except ROT pools and gains, whose representation shows learned values."""
    pools = tuple(rot_pools(model)) + (('gain',) if isinstance(model, MultiScale) else ())
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
        files = ['config.json', 'model.safetensors']
        directory = snapshot_download(name, revision=revision or None, allow_patterns=files)
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
        if base is None:
            return timm.create_model(f'local-dir:{directory}', pretrained=True, **kwargs).eval()
        model = _build_own(Path(directory), base, **kwargs)
        state = load_file(Path(directory) / 'model.safetensors')
    except SafetensorError as error:
        raise ValueError(f'the weights in {directory} cannot be read, the file may be incomplete: {error}') from error
    cure = 'base must build the network that was saved'
    fit_weights(model, _with_versions(state, model), f'the weights in {directory} do not fit', cure)
    return model.eval()


def _refuse_pickle(directory: Path):
    """Raise if there is no safetensors file, because timm would then load any other weights, pickles included."""
    if not (directory / 'model.safetensors').is_file():
        raise ValueError(
            f'{directory} has no model.safetensors, and other weights in it are not loaded: if you trust them, read '
            'them with read_state_dict or --checkpoint'
        )


def native_of(directory: str | Path) -> tuple[str, dict[str, Any]]:
    """`base` and `model_args` with which `save_pretrained` wrote a directory."""
    config = json.loads((Path(directory) / 'config.json').read_text())
    arguments = dict(config['model_args'])
    if config['architecture'] == CONVERTED:
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
    sizes: Sequence[int] | None = None,
    crop_pct: Sequence[float] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """The network of `rotp_converted`, which is registered in timm: any network with converted pools.

    Args:
        pretrained: whether to load the weights that `pretrained_cfg` points to.
        base: the native network's name in timm, or in torchvision with the prefix 'torchvision:'.
        base_args: arguments of the native network.
        pools: options of each converted pool by its path; None for the default global pooling.
        folded: paths of the pools whose gain was folded.
        sizes, crop_pct: of the views; None for a network without.
        pretrained_cfg, pretrained_cfg_overlay, cache_dir, kwargs: as `timm.create_model` gives them.
    """
    refuse_foreign(base, base_args or {})
    unwanted = sorted(set(kwargs) & _OF_LOADING)
    if unwanted:  # timm passes what stands beside base_args in config.json
        raise ValueError(f'config.json has arguments that the network {base} does not take: {", ".join(unwanted)}')
    cfg = resolve_pretrained_cfg(CONVERTED, pretrained_cfg, pretrained_cfg_overlay)
    if pretrained and cfg.source == 'local-dir':
        _refuse_pickle(Path(cfg.file or ''))
    saved_args = kwargs.pop('pretrained_model_args', {})  # those of config.json once more
    if kwargs.get('global_pool') == saved_args.get('global_pool'):
        kwargs.pop('global_pool', None)  # the name of the pool as timm records it, not a wish for another one
    arguments = {'num_classes': cfg.num_classes, **(base_args or {}), **kwargs}
    if sizes and ('global_pool' in kwargs or 'features_only' in kwargs):
        raise ValueError('the network pools several views: load it as it is, and use its part `model`')
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
        else:
            _put_pools(model, pools, folded)
        if sizes:
            model = multi_scale(model, sizes, crop_pct)
        if pretrained:
            in_chans, num_classes = arguments.get('in_chans', 3), arguments['num_classes']
            load_weights(model, cfg.to_dict(), num_classes, in_chans, filter_fn=_with_versions)
    # So that saving it again names the native network.
    model.pretrained_cfg = model.default_cfg = cfg.to_dict() | {'architecture': base}
    if rot_pools(model) and not isinstance(model, MultiScale):
        name_for_timm(model)
    return model
