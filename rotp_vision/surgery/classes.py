"""Classes made at conversion: a network's own class with one or two methods changed.

Conversion changes the class of an object, not the object: hooks, parameters, buffers and references to it stay. Such an
object is pickled and copied as its native class and its `Changes`.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rotp_vision.surgery.families import FAMILIES

# The name of the pool that is added to a module whose method pools by itself.
NEW_POOL = 'rot_pool'
# The name under which timm saves a converted model and builds it again.
CONVERTED = 'rotp_converted'
# The mask argument (B, N) of timm's models for images of any shape: True where a patch exists.
MASK = 'patch_valid'


class Host(NamedTuple):
    """A method that pools by itself, and how it calls a pool module instead."""

    method: str
    layout: str  # of the map or tokens that it pools
    prefix: int  # number of tokens that it drops first
    before: str  # the child before which the pool is placed
    family: bool = False  # whether `families` has the changed method


class Changes(NamedTuple):
    """What a class made at conversion changes."""

    guard: bool = False  # whether `reset_classifier` keeps the trained pool
    host: Host | None = None  # the method that calls the pool
    frozen: bool = False  # whether `train` leaves frozen modules in evaluation mode
    architecture: str = ''  # the name of a timm model before conversion; afterwards timm saves it as CONVERTED


def native_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before surgery."""
    return getattr(type(module), '_native', type(module))


def changes_of(module: nn.Module) -> Changes:
    return getattr(type(module), '_changes', Changes())


def change(module: nn.Module, **changes: Any):
    """Give the module the class with these changes; with no changes left, its native class."""
    module.__class__ = changed_class(native_class(module), changes_of(module)._replace(**changes))


@functools.cache
def changed_class(native: type[nn.Module], changes: Changes) -> type[nn.Module]:
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
        body['train'] = _train_unfrozen
    if changes.architecture:
        body['_model_args'] = property(_converted_arguments, _record_arguments)
        # TorchScript would compile it, or take what is recorded behind it for an attribute.
        for name in ('__jit_unused_properties__', '__jit_ignored_attributes__'):
            body[name] = [*getattr(native, name, ()), '_model_args']
    return type(native.__name__, (native,), body)


def _reduce(self: nn.Module, protocol: int) -> tuple:
    _, _, state, *rest = native_class(self).__reduce_ex__(self, max(protocol, 2))
    return (_rebuild, (native_class(self), changes_of(self)), state, *rest)


def _rebuild(native: type[nn.Module], changes: Changes) -> nn.Module:
    cls = changed_class(native, changes)
    return cls.__new__(cls)


def _guarded_reset(native: Any):
    """`reset_classifier` that keeps the trained pool, which the native method would replace by a native one."""
    reset = native.reset_classifier

    @functools.wraps(reset)
    def reset_classifier(self: nn.Module, *args: Any, **kwargs: Any):
        from rotp_vision.surgery.convert import lift, put_back

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
    from rotp_vision.surgery.freeze import rest_frozen

    native_class(self).train(self, mode)
    rest_frozen(self, mode)
    return self


# timm saves what it recorded of a model's arguments, `_model_args`: of a converted model, those of CONVERTED.


def recorded_arguments(model: nn.Module) -> dict[str, Any]:
    """The arguments of the native network that timm recorded, without the number of classes, which may change."""
    return {name: value for name, value in vars(model).get('_model_args', {}).items() if name != 'num_classes'}


def _converted_arguments(self: nn.Module) -> dict[str, Any]:
    from rotp_vision.surgery.convert import recipe

    return recipe(self, changes_of(self).architecture, recorded_arguments(self))


def _record_arguments(self: nn.Module, arguments: Mapping[str, Any]):
    own = {'base', 'base_args', 'pools', 'folded'} | (
        {'global_pool'} if arguments.get('global_pool') == 'rotp' else set()
    )
    native = {name: value for name, value in arguments.items() if name not in own}
    vars(self)['_model_args'] = vars(self).get('_model_args', {}) | native
