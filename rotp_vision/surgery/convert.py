"""Replacing the pools of a network, and restoring them."""

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
from timm.layers.pool2d_same import AvgPool2dSame, MaxPool2dSame
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rotp_vision.layers import (
    AnyPoolOptions,
    GlobalROTPool2d,
    LocalROTPool2d,
    PoolOptions,
    ROTPool,
    ROTSetPool,
    SimplePool,
    SimplePoolOptions,
    any_pool_options,
)
from rotp_vision.surgery.classes import changes_of, name_for_timm, place, refuse_sharded, take_all
from rotp_vision.surgery.describe import describe
from rotp_vision.surgery.find import example_inputs, find_pools
from rotp_vision.surgery.pools import (
    FoundPool,
    NewPool,
    Replaced,
    UserPool,
    converted_pools,
    map_format,
    new_pools,
    replaced_by,
)
from rotp_vision.surgery.trace import undisturbed

_logger = logging.getLogger('rotp_vision')

Where = Literal['global', 'local', 'all']
Make = AnyPoolOptions | nn.Module | Callable[[int], nn.Module]


def convert(
    model: nn.Module,
    pool: AnyPoolOptions | Mapping[str, Any] | str | nn.Module | Callable[[int], nn.Module] | None = None,
    where: Where | Sequence[str] = 'global',
    example_input: Tensor | tuple | None = None,
) -> nn.Module:
    """Replace the pools of a model by ROT pools, or your own, in place; returns the same model, otherwise unchanged.

    Args:
        model: any classifier, from timm, torchvision or your own. Convert it before DDP and `torch.compile`.
        pool: `PoolOptions`, a mapping of its fields, or a name, see `pool_options`; None for the recommended pooling.
            In place of a global pool also a pooling without a plan, by its name ('avg', 'max', 'avgmax', 'gem') or
            `SimplePoolOptions`; or a module of your own, which takes maps (B, C, H, W), or tokens (B, N, C), and
            returns (B, C); or a function that makes one for C channels. With start 'auto' each ROT pool starts close
            to what it replaces: average pools close to the mean, max pools close to the maximum. With 'train' local
            pools do so, and global ones start as for training the network along with them. Padding is masked; an
            average pool that counts it as zeros (`count_include_pad`) still does.
        where: 'global' for the pool before the classifier (of a map, or of tokens), 'local' for the pools within the
            network, 'all' for both, or the paths of pools that `find_pools` lists; 're:…' is a regular expression that
            matches whole paths, as in torchao.
        example_input: an input of the model, see `find_pools`.

    Raises:
        ValueError: if there is no pool to replace, or one that cannot be replaced without changing the model otherwise.

    Example:
        >>> import timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet'))
        >>> list(rotp_vision.rot_pools(model))
        ['global_pool']

        Another pooling, and a pool of your own:

        >>> gem = {'pool': 'gem', 'power': 4.0, 'norm_power': 2.0}
        >>> model = rotp_vision.convert(timm.create_model('test_resnet'), gem)
        >>> class GeM(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3)
        >>> model = rotp_vision.convert(timm.create_model('test_resnet'), GeM())
        >>> type(rotp_vision.revert(model).global_pool).__name__
        'SelectAdaptivePool2d'
    """
    refuse_wrapped(model)
    make = _maker(pool)
    inputs = example_inputs(model, example_input)
    found = find_pools(model, inputs)
    examples = _examples(inputs)
    with undisturbed(model):
        before = model(*examples)
    earlier = set(map(id, converted_pools(model).values()))
    whole = False
    try:
        new = replace_pools(model, found, make, where)
        reason = _why_not(model, examples, before, new)
        if reason:
            raise ValueError(f'cannot replace {reason}')
        name_for_timm(model)
        whole = True
    finally:
        if not whole:  # after any error, also KeyboardInterrupt
            take_all(model, {path: pool for path, pool in converted_pools(model).items() if id(pool) not in earlier})
    _logger.info('converted %s\n%s', type(model).__name__, describe(model))
    return model


def replace_pools(
    model: nn.Module, found: list[FoundPool], make: Make, where: Where | Sequence[str]
) -> dict[str, NewPool]:
    """Replace the found pools that `where` chooses; returns the new ones by path."""
    new = [(pool, _new_pool(model, pool, make)) for pool in _choose(found, where)]
    if isinstance(make, nn.Module) and len(new) > 1:
        raise ValueError(
            f'one module cannot be {len(new)} pools ({", ".join(pool.path for pool, _ in new)}); give a function that '
            'makes one for a number of channels'
        )
    for pool, new_pool in new:
        place(model, pool, new_pool)
    return {pool.path: new_pool for pool, new_pool in new}


def _maker(pool: Any) -> Make:
    """Checked options, or a module, or a function of the number of channels."""
    if isinstance(pool, type):
        raise ValueError(
            f'pool must be a module, or a function that makes one for C channels, got the class {pool.__name__}; write '
            f'{pool.__name__}(…), or lambda channels: {pool.__name__}(…)'
        )
    return cast(Make, pool) if callable(pool) else any_pool_options(pool)


def replace_pool(model: nn.Module, path: str, options: AnyPoolOptions) -> ROTPool | SimplePool:
    """Put a pooling with other options where `convert`, or a `ROTPResNet`, has put one; returns the new pool.

    Calibration and probing install a chosen pooling by it, whichever kind it is. The new pool starts with the weights
    that its options give. Hooks, what `revert` restores, and what timm saves stay as they are.
    """
    old = new_pools(model)[path]
    replaced = replaced_by(old)
    if replaced is not None:
        inside = replaced.pool.path  # `model` may be a wrapper of the network that was converted
        model = model.get_submodule(path.removesuffix(inside).rstrip('.'))
        take_all(model, {inside: old})
        new = _new_pool(model, replaced.pool, options)
        place(model, replaced.pool, new)
        name_for_timm(model)
    elif isinstance(old, GlobalROTPool2d | SimplePool):  # of a ROTPResNet
        shape = {'flatten': old.flatten, 'input_fmt': old.input_fmt}
        rot = isinstance(options, PoolOptions)
        new = GlobalROTPool2d(options, int(cast(Any, model).num_features), **shape) if rot else options.make(**shape)
        like = next(model.parameters())
        parent, _, name = path.rpartition('.')
        setattr(model.get_submodule(parent), name, new.to(like.device, like.dtype).train(old.training))
    else:
        raise ValueError(f'{path} is {type(old).__name__}, which this network was not converted to')
    vars(new)['native'] = getattr(old, 'native', '')
    return cast('ROTPool | SimplePool', new)


def revert(model: nn.Module) -> nn.Module:
    """Restore the native pools of a converted model, in place; returns the same model.

    A frozen model stays frozen, with a warning; `freeze(model, 'all')` undoes that. Gains that `fold_gain` moved into
    the layers after a pool stay there, with a warning; to get the original network, revert before folding.

    Raises:
        ValueError: if the model has no converted pool.

    Example:
        >>> import timm, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> type(rotp_vision.revert(model).global_pool).__name__
        'SelectAdaptivePool2d'
    """
    refuse_sharded(model)
    converted = converted_pools(model)
    if not converted:
        raise ValueError('the model has no converted pool to revert')
    take_all(model, converted)
    folded = [path for path, pool in converted.items() if isinstance(pool, ROTPool) and pool.gain_folded]
    if folded:
        warnings.warn(
            f'the layers after {", ".join(folded)} keep the gain that fold_gain moved into them, so the reverted '
            'network differs from the original: revert before folding',
            stacklevel=2,
        )
    if changes_of(model).frozen:
        _logger.warning("the reverted network is still frozen; freeze(model, 'all') makes it trainable")
    return model


def refuse_wrapped(model: nn.Module):
    """Raise if the model is inside a wrapper that has collected its parameters already."""
    refuse_sharded(model)
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or hasattr(model, '_orig_mod'):
        raise ValueError(
            f'convert and freeze the model itself before it is wrapped or compiled, got {type(model).__name__}: the '
            'wrapper would miss the new parameters'
        )


def _choose(pools: list[FoundPool], where: str | Sequence[str]) -> list[FoundPool]:
    if isinstance(where, str) and not where.startswith('re:'):
        if where not in get_args(Where):
            raise ValueError(f"where must be 'global', 'local', 'all', 're:…' or a sequence of paths, got {where!r}")
        outer = [pool for pool in pools if pool.kind != 'local']
        inner = [pool for pool in pools if pool.kind == 'local' and pool.replaceable and not pool.reason]
        if where != 'local':
            for pool in outer:
                if pool.reason:
                    raise ValueError(f'cannot replace {pool.path or "the pooling"} ({pool.old}): {pool.reason}')
        chosen = (outer if where != 'local' else []) + (inner if where != 'global' else [])
        if not chosen:
            left = '; '.join(f'{pool.path}: {pool.reason}' for pool in pools if pool.kind == 'local' and pool.reason)
            raise ValueError(f'found no {where} pool to replace' + (f'. Left out: {left}' if left else ''))
        return chosen
    named: dict[str, FoundPool] = {}
    for name in [where] if isinstance(where, str) else where:
        pattern = name.removeprefix('re:') if name.startswith('re:') else re.escape(name)
        matched = {pool.path: pool for pool in pools if re.fullmatch(pattern, pool.path)}
        if not matched:
            known = ', '.join(pool.path for pool in pools)
            raise ValueError(f'where must name pools of the model ({known}); {name!r} matches none')
        named |= matched
    if not named:
        raise ValueError("where must be 'global', 'local', 'all' or name pools, got no name")
    for path, pool in named.items():
        if not pool.replaceable:
            raise ValueError(f'cannot replace {path} ({pool.old}): {pool.reason}')
    return list(named.values())


def _new_pool(model: nn.Module, found: FoundPool, make: Make) -> NewPool:
    channels = found.input_shape[found.layout.index('C')]
    # A method that pools by itself gets the pooled map with its axes kept, and may drop them.
    flatten = found.output == 'flatten' and (found.host is None or found.host.family)
    if isinstance(make, PoolOptions):
        pool: NewPool = _rot_pool(model, found, make, channels, flatten)
    elif found.kind == 'local':
        what = repr(make.pool) if isinstance(make, SimplePoolOptions) else 'a pool of your own'
        raise ValueError(f'{what} can replace a global pool, not the local {found.path} ({found.old})')
    elif isinstance(make, SimplePoolOptions):
        pool = make.make(flatten=flatten, input_fmt=map_format(found.layout))
    else:
        pool = _user_pool(found, make, channels, flatten)
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is not None:
        pool.to(like.device, like.dtype)
    owner = found.path if found.host is None else found.path.rpartition('.')[0]
    return pool.train(model.get_submodule(owner).training)


def _user_pool(
    found: FoundPool, make: nn.Module | Callable[[int], nn.Module], channels: int, flatten: bool
) -> UserPool:
    made = make if isinstance(make, nn.Module) else make(channels)
    if not isinstance(made, nn.Module):
        raise ValueError(f'pool({channels}) must return a module that pools {channels} channels, got {made!r}')
    return UserPool(made, found.layout, flatten)


def _rot_pool(model: nn.Module, found: FoundPool, options: PoolOptions, channels: int, flatten: bool) -> ROTPool:
    if options.start == 'train' and found.kind == 'local':
        options = replace(options, start='auto')
    if options.start == 'auto' and found.reduction == 'max':
        with contextlib.suppress(ValueError):  # a solver of your own has one start only
            options = replace(options, start='max')
    if found.layout == 'NLC':
        pool: ROTPool = ROTSetPool(options, channels)
    elif found.kind != 'local':
        pool = GlobalROTPool2d(options, channels, flatten=flatten, input_fmt=map_format(found.layout))
    else:
        native: Any = model.get_submodule(found.path)
        same = isinstance(native, (AvgPool2dSame, MaxPool2dSame))  # they pad before they average
        pool = LocalROTPool2d(
            options=options,
            num_features=channels,
            kernel_size=native.kernel_size,
            stride=native.stride,
            padding=native.padding,
            dilation=getattr(native, 'dilation', 1),
            ceil_mode=native.ceil_mode,
            same=same,
            count_include_pad=found.reduction == 'mean' and (native.count_include_pad or same),
        )
    pool.auto_is_mean()
    pool.reset_parameters()
    return pool


def _examples(inputs: tuple) -> tuple:
    """The inputs, with noise in place of all zeros, for which all poolings would agree."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(value.shape, generator=generator).to(value)
        if isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta and not bool(value.any())
        else value
        for value in inputs
    )


def _why_not(model: nn.Module, inputs: tuple, before: Any, pools: Mapping[str, NewPool]) -> str:
    """Returns which new pools cannot replace the old ones, and why, as text; empty if all can.

    Every new pool must run. With their outputs replaced by those of the old pools, the model must return `before`
    again; otherwise a method that pools by itself uses the map for something else too.
    """
    old: dict[str, Replaced] = {path: pool.__dict__['replaced'] for path, pool in pools.items()}
    ran: dict[str, bool] = {}  # by path, whether the result of the old pool is known

    def give_old(path: str, replaced: Replaced, args: tuple, output: Tensor) -> Any:
        ran[path] = all(other is None for other in args[1:])
        if replaced.native is not None:
            known = replaced.native.forward(*args)  # not called, so its hooks do not run
            if known.shape != output.shape:
                raise ValueError(f'it returned {tuple(output.shape)} where {tuple(known.shape)} is wanted')
            return known
        x, layout = args[0], replaced.pool.layout
        axes = {'NCHW': (2, 3), 'NHWC': (1, 2), 'NLC': (1,)}[layout]
        return (x.amax(axes) if replaced.pool.reduction == 'max' else x.mean(axes)).view_as(output)

    with undisturbed(model):
        for path, pool in pools.items():

            def hook(_: Any, args: Any, output: Any, path: str = path) -> Any:
                return give_old(path, old[path], args, output)

            pool.register_forward_hook(hook)
        try:
            after = model(*inputs)
        except Exception as error:  # the model may raise anything
            return f'{", ".join(pools)}: the model does not run with it ({type(error).__name__}: {error})'
    idle = [path for path in pools if path not in ran]
    if idle:
        return (
            f'{", ".join(idle)}: the model does not call this module but the old pool by another reference '
            '(a list, a partial function, a closure)'
        )
    if all(ran.values()) and not _alike(before, after):
        named = ', '.join(f'{path} ({replaced.pool.old})' for path, replaced in old.items())
        return (
            f'{named}: the model uses the map for more than this pooling. If a method pools, use a module in it, '
            'self.pool = nn.AdaptiveAvgPool2d(1), or pool in a separate method'
        )
    return ''


def _alike(before: Any, after: Any) -> bool:
    """Whether two outputs of a model are equal up to rounding; on the meta device they count as equal."""
    for a, b in zip(tree_leaves(before), tree_leaves(after), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point() and not a.is_meta:
            tolerance = 1e-3 if a.dtype in (torch.float32, torch.float64) else 5e-2
            a, b = a.float(), b.float()
            bound = max(float(a.abs().max()), 1e-6) if a.numel() else 1.0
            if a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=tolerance * bound, equal_nan=True):
                return False
    return True
