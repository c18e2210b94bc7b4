"""Saving models with ROT pools, and publishing them."""

import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import HfApi
from timm.models import get_model_input_config
from timm.models._hub import save_config_for_hf
from torch import nn

from rotp_vision.files import force_to_disk
from rotp_vision.hub.card import model_card
from rotp_vision.hub.load import CONFIG, HUB, build_own
from rotp_vision.hub.networks import TORCHVISION, num_classes_of
from rotp_vision.hub.weights import WEIGHTS, save_weights
from rotp_vision.models import ROTPResNet
from rotp_vision.surgery import MultiScale
from rotp_vision.surgery.classes import CONVERTED, FORMAT, changes_of, recipe, recorded_arguments
from rotp_vision.surgery.pools import described_pools, new_pools

Base = str | Callable[..., nn.Module]
CARD = 'README.md'
_PREPROCESSING = ('input_size', 'interpolation', 'crop_pct', 'crop_mode', 'mean', 'std', 'label_names')
_ADVICE = 'pass the arguments that it was created with as model_args'


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

    A new directory is written completely or not at all. Before anything is written, the network is built as
    `load_pretrained` will build it, without weights, and a warning names a layer that differs (stride, dropout, …);
    pass `model_args` then.

    Args:
        model: a converted model, a `ROTPResNet`, either with `multi_scale`, or your own network with ROT pools.
        directory: the directory to write; it must not exist unless `force`.
        base: the native network's name in timm, or in torchvision with the prefix 'torchvision:'; or what builds your
            own network, with its pools or without them. By default the architecture of a timm model.
        model_args: further arguments that the native network was built with, beside those that timm recorded.
        metrics: names and values for the model card.
        license: licence of these weights for the model card; its text names the one that timm records for the base.
        force: whether to replace these three files if the directory exists. Its other files stay. `config.json` is
            removed first and written last, so that a directory left half replaced is refused when it is loaded.

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
    if target.exists() and not target.is_dir():
        raise ValueError(f'{target} is not a directory; choose another path')
    inner = model.model if isinstance(model, MultiScale) else model
    _refuse_undescribed(model, inner)
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    base = base or changes_of(inner).architecture or cfg.get('architecture')
    if base is None:
        raise ValueError(
            "base must name the native network (as timm does, or 'torchvision:…'), or be what builds your own, got None"
        )
    own = None if isinstance(base, str) else base
    config = _config(model, inner, base, model_args or {})
    with _files_of(target.resolve()) as made:
        (made / CONFIG).write_text(json.dumps(config, indent=2))
        _compare_with_loaded(model, made, own)
        save_weights(model, made / WEIGHTS)
        (made / CARD).write_text(model_card(model, made, str(directory), metrics, license), encoding='utf-8')
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
    # timm's push_to_hf_hub would not check that the model loads again, nor publish networks that are not timm's.
    with tempfile.TemporaryDirectory() as workplace:
        directory = save_pretrained(model, Path(workplace) / 'model', base=base, model_args=model_args)
        api = HfApi(token=token, library_name='rotp_vision')
        repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        card = model_card(model, directory, f'{HUB}{repository}', metrics, license)
        (directory / CARD).write_text(card, encoding='utf-8')
        return str(api.upload_folder(repo_id=repository, folder_path=directory, commit_message='Add model'))


def _refuse_undescribed(model: nn.Module, inner: nn.Module):
    """Raise if config.json cannot describe the model."""
    pools = described_pools(inner)
    undescribed = [path for path in new_pools(inner) if path not in pools]
    if undescribed:
        raise ValueError(
            f'{", ".join(undescribed)} is a pool of your own, which config.json cannot describe. Save the state dict, '
            'safetensors.torch.save_model(model, file); to load it, build the network, convert(model, pool) as before, '
            'and safetensors.torch.load_model(model, file)'
        )
    if not pools:
        raise ValueError('the model has no pool of rotp_vision to save; convert it first, or save it as timm does')
    if isinstance(getattr(model, 'timm_model', None), nn.Module):
        raise ValueError(
            'the model is a wrapper of transformers, which cannot describe the pooling; save the network in it: '
            'rotp_vision.save_pretrained(model.timm_model, directory)'
        )


def _config(model: nn.Module, inner: Any, base: Base, model_args: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model, in timm's format.

    Args:
        model: the model.
        inner: the same, or the network that a `MultiScale` holds.
        base, model_args: as `save_pretrained` takes them.
    """
    own = not isinstance(base, str)
    cfg: Any = getattr(model, 'pretrained_cfg', None) or {}
    name = base if isinstance(base, str) else f'{base.__module__}:{base.__qualname__}'
    native_args = {**recorded_arguments(inner), **model_args}
    if cfg and not own:
        channels = get_model_input_config(inner)['input_size'][0]
        native_args |= {} if channels == 3 else {'in_chans': channels}
    architecture, arguments = CONVERTED, recipe(inner, name, native_args)
    if isinstance(inner, ROTPResNet) and not own:
        registered = native_args | inner.pool_arguments()
        if 'rotp' not in registered:
            registered['global_pool'] = inner.global_pool.pool_type
        if isinstance(model, MultiScale):
            arguments |= {'base_args': registered, 'pools': {}}
        else:
            architecture, arguments = name, registered
    if isinstance(model, MultiScale):
        arguments |= {'sizes': list(model.sizes), 'crop_pct': list(model.crop_pct)}
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f'model_args must hold plain values, which JSON can write: {error}') from error
    config = {'architecture': architecture, 'num_classes': num_classes_of(model), 'model_args': arguments}
    config['rotp_format'] = FORMAT  # of the options of registered models; converted ones have it in their arguments
    if not cfg or own or name.startswith(TORCHVISION):
        seen = {key: cfg[key] for key in _PREPROCESSING if key in cfg}
        config['pretrained_cfg'] = seen | {
            'num_classes': config['num_classes'],
            'classifier': None,
            'first_conv': None,
        }
        return config
    with tempfile.TemporaryDirectory() as workplace:
        path = Path(workplace) / CONFIG
        save_config_for_hf(model, path, model_config=config)  # pyright: ignore[reportArgumentType]
        written = json.loads(path.read_text())
    # timm adds arguments that it has recorded, the name of the pool among them, which do not apply.
    return written | {'architecture': architecture, 'model_args': arguments}


@contextmanager
def _files_of(target: Path) -> Iterator[Path]:
    """An empty directory to write into, whose three files are then moved to `target`, a directory or none yet.

    Nothing else in `target` is touched. If the block raises, `target` stays as it was.
    """
    exists = target.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target if exists else target.parent, prefix='.rotp_vision.') as workplace:
        made = Path(workplace) / 'made'
        made.mkdir()
        yield made
        for file in made.iterdir():
            force_to_disk(file)
        if not exists:
            made.rename(target)
            return
        (target / CONFIG).unlink(missing_ok=True)
        for name in (WEIGHTS, CARD, CONFIG):
            (made / name).replace(target / name)


def _compare_with_loaded(model: nn.Module, directory: Path, own: Callable[..., nn.Module] | None):
    """Raise if the weights would not fit the network that is loaded, and warn if that one has other layers."""
    try:
        loaded = _built_without_weights(directory, own)
    except Exception as error:  # the user's builder may raise anything
        raise ValueError(
            f'load_pretrained could not build this network ({type(error).__name__}: {error}); {_ADVICE}'
        ) from error
    difference = _first_difference(_shapes(model), _shapes(loaded))
    if difference:
        raise ValueError(
            f'load_pretrained would build another network than this one ({difference}); {_ADVICE}, or save the state '
            'dict alone if the network was changed since'
        )
    difference = _first_difference(_layers(model), _layers(loaded))
    if difference:
        warnings.warn(f'load_pretrained will build another network ({difference}); {_ADVICE}', stacklevel=3)


def _built_without_weights(directory: Path, own: Callable[..., nn.Module] | None) -> nn.Module:
    """The network of a config, on the meta device unless it reads values while it is built."""

    def built() -> nn.Module:
        return timm.create_model(f'local-dir:{directory}') if own is None else build_own(directory, own)

    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter('ignore')
        try:
            with torch.device('meta'):
                return built()
        except Exception:
            return built()


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _layers(model: nn.Module) -> dict[str, str]:
    """The representation of every module except new pools and gains, whose representation shows learned values."""
    pools = tuple(described_pools(model)) + (('gain',) if isinstance(model, MultiScale) else ())
    shown: dict[str, str] = {}
    for path, module in model.named_modules():
        if path in pools or path.startswith(tuple(f'{pool}.' for pool in pools)):
            continue
        has_parts = any(True for _ in module.children())
        text = f'{type(module).__name__}({module.extra_repr()})' if has_parts else repr(module)
        # In evaluation mode synchronized batch norm is batch norm.
        shown[path] = re.sub(r'^Sync(BatchNorm|BatchNormAct)\(', r'\g<1>2d(', text)
    return shown


def _first_difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    for name in {**here, **there}:
        mine, other = here.get(name, 'nothing'), there.get(name, 'nothing')
        if mine != other:
            return f'{name or "the network"} is {mine} here and would be {other} when loaded'
    return None
