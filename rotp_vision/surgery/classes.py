"""How a network holds its new pools: classes with one or two methods changed, placing pools and taking them out.

Conversion changes the class of an object, not the object: hooks, parameters, buffers and references to it stay. Such an
object is pickled and copied as its native class and its `Changes`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import DenseNet, MNASNet, MobileNetV2, ShuffleNetV2

from rotp_vision.surgery.pools import (
    NEW_POOL,
    FoundPool,
    Host,
    NewPool,
    Replaced,
    UserPool,
    converted_pools,
    described_pools,
    is_local,
    new_pools,
    replaced_by,
    rot_pools,
)

# The name under which timm saves a converted model and builds it again.
CONVERTED = 'rotp_converted'
# The version of the description that `recipe` makes; rotp_vision 0.2 wrote none.
FORMAT = 1
# The mask argument (B, N) of timm's models for images of any shape: True where a patch exists.
MASK = 'patch_valid'


class Changes(NamedTuple):
    """What a class made at conversion changes."""

    guard: bool = False  # whether `reset_classifier` keeps the trained pool
    host: Host | None = None  # the method that calls the pool
    frozen: bool = False  # whether frozen modules stay in evaluation mode
    architecture: str = ''  # the name of a timm model before conversion; afterwards timm saves it as CONVERTED


def native_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before surgery."""
    return getattr(type(module), '_native', type(module))


def changes_of(module: nn.Module) -> Changes:
    """What surgery has changed in the module's class."""
    return getattr(type(module), '_changes', Changes())


def refuse_sharded(model: nn.Module):
    """Raise if a part of the model is sharded: changing its class would drop the class that FSDP gave it."""
    for path, module in model.named_modules():
        if {'FSDPModule', 'FullyShardedDataParallel'} & {cls.__name__ for cls in type(module).__mro__}:
            raise ValueError(
                f'{path or "the model"} is sharded by FSDP: convert, freeze, revert or reset the classifier before that'
            )


def change(module: nn.Module, **changes: Any):
    """Give the module the class with these changes; without any changes left, its native class."""
    module.__class__ = changed_class(native_class(module), changes_of(module)._replace(**changes))


@functools.cache
def changed_class(native: type[nn.Module], changes: Changes) -> type[nn.Module]:
    """The class that inherits `native` and has these changes."""
    if changes == Changes():
        return native
    body: dict[str, Any] = {
        '_native': native,
        '_changes': changes,
        '__module__': native.__module__,
        '__doc__': native.__doc__,
        '__reduce_ex__': _reduce,
    }
    if changes.guard:
        body['reset_classifier'] = _guarded_reset(native)
    if changes.host is not None:
        body[changes.host.method] = _hosting_method(native, changes.host)
    if changes.frozen:
        body |= {'train': _train_unfrozen, '__call__': _call_resting}
    if changes.architecture:
        body['_model_args'] = property(_converted_arguments, _record_arguments)
        # TorchScript, which timm's suite tries, would compile it, or mistake the recorded arguments for an attribute.
        for name in ('__jit_unused_properties__', '__jit_ignored_attributes__'):
            body[name] = [*getattr(native, name, ()), '_model_args']
    return type(native.__name__, (native,), body)


def _reduce(self: nn.Module, protocol: int) -> tuple:
    _, _, state, *rest = native_class(self).__reduce_ex__(self, max(protocol, 2))
    return (_rebuild, (native_class(self), changes_of(self)), state, *rest)


def _rebuild(native: type[nn.Module], changes: Changes) -> nn.Module:
    cls = changed_class(native, changes)
    return cls.__new__(cls)


# Methods of these classes


def _guarded_reset(native: Any):
    """`reset_classifier` that keeps the trained pool, which the native method would replace by a native one."""
    reset = native.reset_classifier

    @functools.wraps(reset)
    def reset_classifier(self: nn.Module, *args: Any, **kwargs: Any):
        refuse_sharded(self)
        call = inspect.signature(reset).bind(self, *args, **kwargs)
        asked = call.arguments.get('global_pool')
        if asked == 'rotp':
            del call.arguments['global_pool']
        lifted = lift(self)
        reset(*call.args, **call.kwargs)
        if asked in (None, 'rotp'):
            put_back(self, lifted)

    return reset_classifier


def _hosting_method(native: type, host: Host):
    """A method that pools by itself, changed to call the pool module first."""
    if host.family:
        return FAMILIES[native][1]
    method = getattr(native, host.method)
    others = list(inspect.signature(method).parameters)[2:]
    mask_index = others.index(MASK) if MASK in others else len(others)

    # The mean of one sample is that sample: after the pool, the native method's own pooling changes nothing.
    @functools.wraps(method)
    def hosting(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        pool = getattr(self, NEW_POOL)
        if host.layout != 'NLC':
            return method(self, pool(x), *args, **kwargs)
        tokens = x[:, host.prefix :]
        mask = args[mask_index] if mask_index < len(args) else kwargs.get(MASK)
        if mask is not None:  # it covers the patches; the tokens before them always exist
            mask = F.pad(mask, (tokens.shape[1] - mask.shape[1], 0), value=True)
        pooled = pool(tokens, mask).unsqueeze(1)  # (B, 1, D)
        if host.prefix:
            pooled = torch.cat([x[:, : host.prefix], pooled], 1)
        return method(self, pooled, *args, **kwargs)

    return hosting


def _train_unfrozen(self: nn.Module, mode: bool = True) -> nn.Module:
    """Set the mode of the network, its pools and modules with trainable parameters of their own; the rest evaluates."""
    native_class(self).train(self, mode)
    for module in self.modules():
        module.training = mode and any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    for pool in new_pools(self).values():
        pool.train(mode)
    self.training = mode
    return self


def _call_resting(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the network in evaluation mode, so that dropout in its own forward pass stays off."""
    mode, self.training = self.training, False
    try:
        return native_class(self).__call__(self, *args, **kwargs)
    finally:
        self.training = mode


# Networks of torchvision whose forward pass pools by a function in its middle.


def _densenet(self: Any, x: Tensor) -> Tensor:
    return self.classifier(self.rot_pool(F.relu(self.features(x), inplace=True)).flatten(1))


def _mnasnet(self: Any, x: Tensor) -> Tensor:
    return self.classifier(self.rot_pool(self.layers(x)).flatten(1))


def _mobilenet_v2(self: Any, x: Tensor) -> Tensor:
    return self.classifier(self.rot_pool(self.features(x)).flatten(1))


def _shufflenet_v2(self: Any, x: Tensor) -> Tensor:
    x = self.maxpool(self.conv1(x))
    x = self.conv5(self.stage4(self.stage3(self.stage2(x))))
    return self.fc(self.rot_pool(x).flatten(1))


# By class: the method that pools, and its replacement.
FAMILIES: dict[type, tuple[str, Callable[..., Tensor]]] = {
    DenseNet: ('forward', _densenet),
    MNASNet: ('forward', _mnasnet),
    MobileNetV2: ('_forward_impl', _mobilenet_v2),
    ShuffleNetV2: ('_forward_impl', _shufflenet_v2),
}


# Placing pools, and taking them out


# The hooks of a module. A pool shares them with the one that it replaces, so that they run with either.
_HOOKS = (
    '_forward_pre_hooks',
    '_forward_pre_hooks_with_kwargs',
    '_forward_hooks',
    '_forward_hooks_with_kwargs',
    '_forward_hooks_always_called',
    '_backward_pre_hooks',
    '_backward_hooks',
    '_is_full_backward_hook',
)


def place(model: nn.Module, found: FoundPool, pool: NewPool):
    """Put a new pool where the found one is, and give it the hooks of that one."""
    parent_path, _, name = found.path.rpartition('.')
    parent = model.get_submodule(parent_path)
    native: Any = getattr(parent, name) if found.host is None else None
    vars(pool)['replaced'] = Replaced(found, native)  # first, so that a half-finished replacement can be undone
    if found.host is None:
        vars(pool).update({name: vars(native)[name] for name in _HOOKS})
        for owner, alias in _references(model, native):
            setattr(owner, alias, pool)
    else:
        setattr(parent, NEW_POOL, pool)
        _move_before(parent, NEW_POOL, found.host.before)
        change(parent, host=found.host)
    if found.kind != 'local':
        for owner in _owners(model, found.path):
            if hasattr(owner, 'reset_classifier'):
                change(owner, guard=True)


def _take(model: nn.Module, path: str, pool: NewPool):
    replaced = replaced_by(pool)
    assert replaced is not None
    if replaced.native is None:
        parent = model.get_submodule(path.rpartition('.')[0])
        delattr(parent, NEW_POOL)
        change(parent, host=None)
        return
    replaced.native.train(pool.training)
    vars(replaced.native).update({name: vars(pool)[name] for name in _HOOKS})
    for owner, alias in _references(model, pool):
        setattr(owner, alias, replaced.native)


def take_all(model: nn.Module, pools: Mapping[str, NewPool]):
    """Restore what these pools have replaced, and the classes and the name of the network if none is left."""
    for path, pool in pools.items():
        _take(model, path, pool)
    for module in model.modules():
        if changes_of(module).guard and all(is_local(pool) for pool in converted_pools(module).values()):
            change(module, guard=False)
    if not converted_pools(model):
        _unname(model)


def lift(model: nn.Module) -> dict[str, NewPool]:
    """Restore the native global pools; returns the pools that were there, for `put_back`."""
    lifted = {path: pool for path, pool in converted_pools(model).items() if not is_local(pool)}
    take_all(model, lifted)
    return lifted


def put_back(model: nn.Module, lifted: Mapping[str, NewPool]):
    """Place the pools that `lift` took out."""
    for path, pool in lifted.items():
        replaced = replaced_by(pool)
        assert replaced is not None
        place(model, replaced.pool._replace(path=path), pool)
    name_for_timm(model)


def _references(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every parent of a module, and the name that it has there."""
    return [(owner, name) for owner in model.modules() for name, child in owner._modules.items() if child is module]


def _owners(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules that contain the module at `path`, the model first."""
    names = path.split('.')
    return [model.get_submodule('.'.join(names[:depth])) for depth in range(len(names))]


def _move_before(parent: nn.Module, name: str, other: str):
    """Move the child `name` before `other`, so that the parameters of the classifier stay last."""
    children: dict[str, nn.Module | None] = dict(parent._modules)
    moved = children.pop(name)
    ordered: dict[str, nn.Module | None] = {}
    for child_name, child in children.items():
        if child_name == other:
            ordered[name] = moved
        ordered[child_name] = child
    ordered.setdefault(name, moved)
    parent._modules = ordered  # assigned at once, so that an interruption leaves no network without its children


# What timm saves: it records a model's arguments in `_model_args`; of a converted model, they are those of CONVERTED.


def recipe(model: nn.Module, base: str, base_args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which CONVERTED builds a converted model again.

    Args:
        model: the converted model.
        base: the native network's name.
        base_args: arguments of the native network.
    """
    folded = [path for path, pool in rot_pools(model).items() if pool.gain_folded]
    options = {path: pool.options.to_dict() for path, pool in described_pools(model).items()}
    made = {'format': FORMAT, 'base': base, 'base_args': dict(base_args), 'pools': options}
    return made | ({'folded': folded} if folded else {})


def recorded_arguments(model: nn.Module) -> dict[str, Any]:
    """The arguments of the native network that timm recorded, without the number of classes, which may change."""
    return {name: value for name, value in vars(model).get('_model_args', {}).items() if name != 'num_classes'}


def _converted_arguments(self: nn.Module) -> dict[str, Any]:
    return recipe(self, changes_of(self).architecture, recorded_arguments(self))


def _record_arguments(self: nn.Module, arguments: Mapping[str, Any]):
    own = {'format', 'base', 'base_args', 'pools', 'folded'}
    if arguments.get('global_pool') == 'rotp':
        own.add('global_pool')
    native = {name: value for name, value in arguments.items() if name not in own}
    vars(self)['_model_args'] = vars(self).get('_model_args', {}) | native


def name_for_timm(model: nn.Module):
    """Let timm's `save_for_hf` and `push_to_hf_hub` write what builds the converted model, if it is one of timm's.

    Pools of the user's own cannot be described there.
    """
    architecture = (getattr(model, 'pretrained_cfg', None) or {}).get('architecture')
    described = not any(isinstance(pool, UserPool) for pool in new_pools(model).values())
    if described and architecture not in (None, CONVERTED):
        change(model, architecture=architecture)  # first, so that a half-finished change can be undone
        _set_architecture(model, CONVERTED)


def _unname(model: nn.Module):
    """Undo `name_for_timm`."""
    if changes_of(model).architecture:
        _set_architecture(model, changes_of(model).architecture)
        change(model, architecture='')


def _set_architecture(model: Any, name: str):
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, 'architecture': name}
