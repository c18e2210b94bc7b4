"""Tracing a forward pass to find where maps and tokens are reduced to one vector."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rotp_vision.surgery.pools import NewPool


class Call(NamedTuple):
    """One call of a module or function that reduced a map or tokens to one vector per image."""

    time: int
    path: str  # of the module, or of the module in whose method the function was called
    module: nn.Module
    method: str  # the calling method of a function; '' for a module
    name: str  # of the function; '' for a module
    run: Callable[[Tensor], Any]  # the same call on another tensor
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]


def is_spatial(tensor: Any, batch: int) -> bool:
    """Whether a tensor has more than one vector per image: at least two axes besides the batch are longer than one."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return False
    shape = tensor.shape
    return len(shape) > 2 and shape[0] == batch and sum(size > 1 for size in shape[1:]) > 1


class Trace(TorchFunctionMode):
    """The calls of one forward pass; `watch` fills it."""

    def __init__(self, model: nn.Module, batch: int):
        super().__init__()
        self.batch = batch
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.calls: list[Call] = []
        self.ran: list[tuple[int, str, nn.Module, Any, Any]] = []  # time, path, module, input shape, output shape
        self.time = 0
        self.last_spatial = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        self.time += 1
        if is_spatial(out, self.batch):
            self.last_spatial = self.time
        elif out.dim() > 1 and out.shape[0] == self.batch and args and is_spatial(args[0], self.batch):
            host = self._calling_method()
            if host is not None:
                module, method = host
                rest = args[1:]
                self._add(
                    module, method, getattr(func, '__name__', ''), args[0], out, lambda x: func(x, *rest, **kwargs)
                )
        return out

    def after_module(self, module: nn.Module, args: tuple, out: Any):
        self.time += 1
        source = args[0] if args else None
        self.ran.append((self.time, self.paths[id(module)], module, _shape(source), _shape(out)))
        if is_spatial(out, self.batch):
            self.last_spatial = self.time
        elif isinstance(out, Tensor) and is_spatial(source, self.batch):
            self._add(module, '', '', source, out, module.forward)

    def _add(self, module: nn.Module, method: str, name: str, source: Any, out: Tensor, run: Callable[[Tensor], Any]):
        self.calls.append(
            Call(
                self.time,
                self.paths[id(module)],
                module,
                method,
                name,
                run,
                tuple(source.shape),
                tuple(out.shape),
            )
        )

    def _calling_method(self) -> tuple[nn.Module, str] | None:
        """The innermost method of a module of the model on the stack."""
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            owner, name = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None, code.co_name
            if isinstance(owner, nn.Module) and id(owner) in self.paths and not name.startswith('<'):  # comprehensions
                return owner, name
            frame = frame.f_back
        return None


class Source(NamedTuple):
    """How the tensor that a method pools derives from its argument: first tokens dropped, or axes permuted."""

    argument_shape: tuple[int, ...]
    prefix: int  # tokens dropped first
    arrange: Callable[[Tensor], Tensor]


class ArgumentTrace(TorchFunctionMode):
    """Finds out whether a function called inside a method gets the method's own argument."""

    ARRANGING = ('flatten', 'permute', 'transpose')

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.source: Source | None = None  # None until such a call was seen
        self._known: list[tuple[Tensor, Source]] = []

    def enter(self, argument: Any):
        if isinstance(argument, Tensor):
            self._known = [(argument, Source(tuple(argument.shape), 0, lambda x: x))]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        source = next((source for tensor, source in self._known if args and args[0] is tensor), None)
        if source is None:
            return out
        name, rest = getattr(func, '__name__', ''), args[1:]
        if name == self.name:
            self.source = source
        elif name == '__getitem__' and source is self._known[0][1]:
            prefix = _dropped_prefix(rest[0])
            if prefix is not None:
                self._known.append((out, source._replace(prefix=prefix)))
        elif name in self.ARRANGING and source.prefix == 0:
            before = source.arrange
            self._known.append((out, source._replace(arrange=lambda x: func(before(x), *rest, **kwargs))))
        return out


def _dropped_prefix(index: Any) -> int | None:
    """k if the index is [:, k:], otherwise None."""
    if not isinstance(index, tuple) or len(index) != 2 or not all(isinstance(part, slice) for part in index):
        return None
    whole, tail = index
    if whole != slice(None) or tail.stop is not None or tail.step is not None:
        return None
    return int(tail.start or 0)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and hooks; restores modes, hooks and the random state."""
    modules = list(model.modules())
    kept = [(module.training, module._forward_hooks, module._forward_pre_hooks) for module in modules]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == 'cuda'}
    try:
        for module in modules:
            module.training = False
            module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        with torch.no_grad(), torch.random.fork_rng([device.index for device in devices]):
            yield
    finally:
        for module, (training, hooks, pre_hooks) in zip(modules, kept, strict=True):
            module.training, module._forward_hooks, module._forward_pre_hooks = training, hooks, pre_hooks


def watch(model: nn.Module, inputs: tuple[Any, ...]) -> Trace:
    """The trace of one forward pass of `model`. The state of the model does not change."""
    trace = Trace(model, next(value.shape[0] for value in inputs if isinstance(value, Tensor)))
    with undisturbed(model):
        for module in model.modules():
            module.register_forward_hook(trace.after_module)
        with trace:
            model(*inputs)
    return trace


def source_of(model: nn.Module, inputs: tuple[Any, ...], call: Call) -> Source | None:
    """How the input of a function call derives from its method's argument; None if it does not."""
    trace = ArgumentTrace(call.name)
    native = getattr(call.module, call.method)
    patched = call.module.__dict__.get(call.method)

    def entered(x: Any, *args: Any, **kwargs: Any) -> Any:
        trace.enter(x)
        return native(x, *args, **kwargs)

    with undisturbed(model):
        call.module.__dict__[call.method] = entered
        try:
            with trace:
                model(*inputs)
        finally:
            del call.module.__dict__[call.method]
            if patched is not None:
                call.module.__dict__[call.method] = patched
    return trace.source


def inside_new_pool(model: nn.Module, path: str) -> bool:
    """Whether the module at `path` is part of a ROT pool or of a pool that `convert` placed."""
    module = model
    for name in path.split('.') if path else []:
        if isinstance(module, NewPool):
            return True
        module = module.get_submodule(name)
    return False
