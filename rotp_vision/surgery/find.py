"""Finding the pools of a model from one forward pass."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from timm.layers.pool2d_same import AvgPool2dSame, MaxPool2dSame
from timm.models import get_model_input_config
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rotp_vision.layers import ROTPool
from rotp_vision.surgery.classes import FAMILIES, native_class
from rotp_vision.surgery.pools import NEW_POOL, FoundPool, Host, Layout, NewPool, Reduction, UserPool
from rotp_vision.surgery.trace import Call, Trace, inside_new_pool, source_of, watch


def find_pools(model: nn.Module, example_input: Tensor | tuple | None = None) -> list[FoundPool]:
    """The pools of `model`, found by running it once on an example, in the order in which they ran.

    The global pool is the module, or the mean in a method, that reduces a map to one vector and after which nothing
    spatial follows. Its name does not matter. Squeeze-and-excitation blocks do not count, because their output goes
    back into the map. The model may be on the meta device. Batch statistics, hooks, training flags and the random
    state stay as they are.

    Args:
        model: any classifier.
        example_input: input of the model, or a tuple of its inputs. By default two images of zeros, of the input size
            of a timm model and of 224 × 224 otherwise.

    Example:
        >>> import timm, rotp_vision
        >>> [pool.path for pool in rotp_vision.find_pools(timm.create_model('test_resnet')) if pool.kind == 'global']
        ['global_pool']
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):  # pyright: ignore
        raise ValueError('pools cannot be found in a model that TorchScript has traced or scripted; convert it before')
    inputs = example_inputs(model, example_input)
    try:
        trace = watch(model, inputs)
    except Exception as error:  # the model may raise anything
        shape = tuple(inputs[0].shape)
        raise ValueError(
            f'the model did not run on an example of shape {shape}; pass an input that it takes as example_input '
            f'({type(error).__name__}: {error})'
        ) from error
    found = [(_time(trace, pool.path), pool) for pool in _local_pools(model, trace)]
    found += _global_pools(model, trace, inputs)
    return [pool for _, pool in sorted(found, key=lambda entry: entry[0])]


def example_inputs(model: nn.Module, example_input: Tensor | tuple | None = None) -> tuple[Any, ...]:
    """The example as a tuple of inputs, or two images of zeros of the model's own size, device and dtype."""
    if example_input is not None:
        return example_input if isinstance(example_input, tuple) else (example_input,)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    device, dtype = (None, None) if parameter is None else (parameter.device, parameter.dtype)
    return (torch.zeros(2, *_image_size(model), device=device, dtype=dtype),)


def _image_size(model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of the images of a timm model; of others 224 × 224 with their first channels."""
    channels, height, width = get_model_input_config(model)['input_size']
    if not hasattr(model, 'pretrained_cfg'):
        stem = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
        channels = channels if stem is None else min(channels, stem.in_channels)
    return channels, height, width


def _time(trace: Trace, path: str) -> int:
    return next(time for time, ran_path, *_ in trace.ran if ran_path == path)


# Global pools


def _global_pools(model: nn.Module, trace: Trace, inputs: tuple) -> list[tuple[int, FoundPool]]:
    candidates, pools = _candidates(model, trace)
    if not pools:
        return [(trace.time, _no_pool(model, trace, inputs, candidates))]
    in_methods = sum(bool(call.method) for call in pools)
    found = {}
    for call in pools:
        pool = _function_pool(model, trace, inputs, call, in_methods) if call.method else _module_pool(call)
        runs = sum(path == call.path for _, path, *_ in trace.ran)
        if not call.method and runs > 1:
            pool = pool._replace(replaceable=False, reason=f'{call.path} runs {runs} times in one forward pass')
        if pool.replaceable and _pools_class_maps(model, trace, call):
            pool = pool._replace(
                reason='it pools class maps, not features: its output is the output of the model. To replace it '
                f'nevertheless, name it: where=[{pool.path!r}]'
            )
        found[pool.path] = call.time, pool
    return list(found.values())


def _candidates(model: nn.Module, trace: Trace) -> tuple[list[Call], list[Call]]:
    """Calls after the last spatial output that reduce a map to one vector, and those of them that pool."""
    last = [call for call in trace.calls if call.time > trace.last_spatial]
    modules = [call for call in last if not call.method and _is_pool(call)]
    outermost = [call for call in modules if not any(_inside(call.path, other.path) for other in modules)]
    functions = [
        call
        for call in last
        if call.method
        and not any(call.path == other.path or _inside(call.path, other.path) for other in modules)
        and not inside_new_pool(model, call.path)
    ]
    candidates = sorted(outermost + functions, key=lambda call: call.time)
    return candidates, [
        call for call in candidates if not call.method or _probe(call.run, call.input_shape)[1] != 'other'
    ]


def _inside(path: str, other: str) -> bool:
    return path.startswith(f'{other}.') if other else path != ''


def _is_pool(call: Call) -> bool:
    """Whether a module reduces a map to one vector, has no parameters and is not a container."""
    module = call.module
    if isinstance(module, NewPool):
        return True
    if any(True for _ in module.parameters()):
        return False
    is_leaf = not any(True for _ in module.children())
    few = _size(call.output_shape) < _size(call.input_shape)
    return few and (is_leaf or hasattr(module, 'pool_type'))


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _probe(run: Callable[[Tensor], Any], shape: tuple[int, ...]) -> tuple[Layout, Reduction, bool]:
    """Layout, mean or max, and whether the axes are dropped; found by running the call on random numbers."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), device='cpu')
    try:
        with torch.no_grad():
            out = run(x)
    except (RuntimeError, ValueError, TypeError, AssertionError):
        return '', 'other', False
    layouts: list[tuple[Layout, tuple[int, ...]]] = [('NCHW', (2, 3)), ('NHWC', (1, 2))]
    if x.dim() == 3:
        layouts = [('NLC', (1,)), ('NCL', (2,))]
    for layout, axes in layouts if isinstance(out, Tensor) else []:
        expected: list[tuple[Reduction, Tensor]] = [
            ('mean', x.mean(axes, keepdim=True)),
            ('max', x.amax(axes, keepdim=True)),
        ]
        for name, pooled in expected:
            for flat in (False, True):
                target = pooled.flatten(1) if flat else pooled
                if out.shape == target.shape and torch.allclose(out, target, rtol=1e-4, atol=1e-5):
                    return layout, name, flat
    return '', 'other', False


def _module_pool(call: Call) -> FoundPool:
    if isinstance(call.module, NewPool):
        kind = 'a ROT pool' if isinstance(call.module, ROTPool) else 'a converted pool'
        reason = f'it is {kind} already; revert(model) first if convert put it there'
        layout, reduction, flat = '', 'other', True
    else:
        layout, reduction, flat = _probe(call.run, call.input_shape)
        reason = (
            ''
            if layout in ('NCHW', 'NHWC', 'NCL') and reduction != 'other'
            else f'it is neither the mean nor the maximum of each channel: {_readable(call.module)}'
        )
    if not call.path:
        reason = 'the model is this pool alone, which has no parent to hold another: wrap it, nn.Sequential(pool)'
    output = 'flatten' if flat else 'keep dims'
    kind = 'tokens' if len(call.input_shape) == 3 else 'global'
    old = _readable(call.module)
    return FoundPool(call.path, kind, old, call.input_shape, layout, output, not reason, reason, reduction)


def _function_pool(model: nn.Module, trace: Trace, inputs: tuple, call: Call, in_methods: int) -> FoundPool:
    layout, reduction, flat = _probe(call.run, call.input_shape)
    cls = native_class(call.module)
    old = f'{call.name} in {cls.__name__}.{call.method}'
    shape = call.input_shape
    host, reason = None, ''
    if in_methods > 1:
        reason = f'{old} is one of {in_methods} poolings in methods: one new pool cannot replace all of them'
    elif FAMILIES.get(cls, ('',))[0] == call.method:
        host = Host(call.method, layout, 0, _next_child(trace, call), family=True)
    elif native_method(cls, call.method) is None:
        reason = f'{old} is not a method with a map as its first argument'
    else:
        source = source_of(model, inputs, call)
        if source is not None and source.prefix == 0:
            shape, arrange = source.argument_shape, source.arrange
            layout, reduction, flat = _probe(lambda x: call.run(arrange(x)), shape)
        if source is None or layout in ('', 'NCL'):
            reason = (
                f'{old} pools a result of the same method, where no pool can be inserted. Use a module, '
                f'self.pool = nn.AdaptiveAvgPool2d(1), in place of the function, or pool in a separate method '
                f'(def forward_head(self, x))'
            )
        else:
            host = Host(call.method, layout, source.prefix, _next_child(trace, call))
    path = f'{call.path}.{NEW_POOL}' if call.path else NEW_POOL
    kind = 'tokens' if len(shape) == 3 else 'global'
    output = 'flatten' if flat else 'keep dims'
    return FoundPool(path, kind, old, shape, layout, output, not reason, reason, reduction, host)


def native_method(cls: type, name: str) -> Callable | None:
    """The method if it takes an argument besides self, otherwise None."""
    method = inspect.getattr_static(cls, name, None)
    if not inspect.isfunction(method) or len(inspect.signature(method).parameters) < 2:
        return None
    return method


def _next_child(trace: Trace, call: Call) -> str:
    """The child that runs next after the pooling; a new pool is placed before it."""
    prefix = f'{call.path}.' if call.path else ''
    for time, path, *_ in trace.ran:
        if time > call.time and path.startswith(prefix) and path != call.path:
            return path[len(prefix) :].split('.')[0]
    return ''


def _pools_class_maps(model: nn.Module, trace: Trace, call: Call) -> bool:
    """Whether nothing is learned after the pool and its channels are the classes (SqueezeNet)."""
    after = (module for time, _, module, *_ in trace.ran if time > call.time)
    own = any(module._parameters for module in after)
    return not own and getattr(model, 'num_classes', None) == call.input_shape[1]


def _no_pool(model: nn.Module, trace: Trace, inputs: tuple, candidates: list[Call]) -> FoundPool:
    """A record of what the model has instead of a global pool, with the reason why it cannot be replaced."""
    attention = [path for _, path, module, *_ in trace.ran if _is_attention_pool(module)]
    idle = [(path, module) for _, path, module, shape, _ in trace.ran if _pools_one_pixel(module, shape)]
    last = candidates[-1] if candidates else None
    shape = () if last is None else last.input_shape
    kind = 'tokens' if len(shape) == 3 else 'global'
    if attention:
        path, old = attention[-1], 'attention pooling'
        reason = 'the model pools by attention, which has weights of its own: there is no mean to replace'
    elif getattr(model, 'global_pool', '') == 'token' or (last is not None and last.name == '__getitem__'):
        path, old = '' if last is None else last.path, 'class token'
        reason = 'the classifier reads a class token: ' + (
            'nothing is pooled. Create the model with global_pool="avg" (--model-kwargs global_pool=avg) if its '
            'weights allow it'
            if _can_pool(model, inputs)
            else 'a model that classifies from it has no pooling to replace'
        )
    elif idle:
        path, old = idle[-1][0], _readable(idle[-1][1])
        reason = (
            'its input has one pixel: there is nothing to pool. If the model is for larger images, pass one '
            'as example_input'
        )
    elif last is None:
        path, old = '', 'no pooling'
        reason = (
            'no module or function reduces a map to one vector: the model has no pooled output. If it has no head, '
            'create it with num_classes=…, global_pool="avg" (--num-classes, --model-kwargs global_pool=avg)'
        )
    elif _size(last.output_shape) == _size(last.input_shape):
        path, old = last.path, f'fixed grid of {" × ".join(str(size) for size in shape[2:])}'
        reason = 'the classifier reads every position of a fixed grid: one pooled vector would not fit its weights'
    else:
        path, old = last.path, f'{last.name or native_class(last.module).__name__}'
        reason = f'{old} is neither the mean nor the maximum over the positions of one map'
    return FoundPool(path, kind, old, shape, '', 'flatten', False, reason)


def _can_pool(model: nn.Module, inputs: tuple) -> bool:
    """Whether a timm model that reads its class token can pool instead, tried on a copy."""
    if not hasattr(model, 'reset_classifier'):
        return False
    # A copy on the meta device takes neither memory nor time.
    memo: dict[int, Any] = {id(p): nn.Parameter(p.to('meta'), p.requires_grad) for p in model.parameters()}
    memo |= {id(buffer): buffer.to('meta') for buffer in model.buffers()}
    try:
        asked: Any = copy.deepcopy(model, memo)
        with torch.device('meta'):  # so that the new classifier draws no random numbers
            asked.reset_classifier(asked.num_classes, 'avg')
        trace = watch(asked, tree_map_only(Tensor, lambda x: x.to('meta'), inputs))
    except Exception:  # the model may raise anything
        return False
    return bool(_candidates(asked, trace)[1])


def _pools_one_pixel(module: nn.Module, shape: tuple[int, ...] | None) -> bool:
    is_pool = isinstance(module, (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)) or hasattr(module, 'feat_mult')
    return is_pool and shape is not None and len(shape) == 4 and shape[2:] == (1, 1)


def _is_attention_pool(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return 'attention' in name and 'pool' in name and not isinstance(module, NewPool)


# Local pools


def _local_pools(model: nn.Module, trace: Trace) -> list[FoundPool]:
    found: dict[str, FoundPool] = {}
    for _, path, module, shape, out_shape in trace.ran:
        if path in found or not isinstance(module, (nn.MaxPool2d, nn.AvgPool2d)) or not shape or not out_shape:
            continue
        if sum(size > 1 for size in out_shape[1:]) < 2:
            continue
        reduction = 'max' if isinstance(module, nn.MaxPool2d) else 'mean'
        kernel, stride, padding = (_pair(v) for v in (module.kernel_size, module.stride, module.padding))
        replaceable, reason = True, ''
        if type(module) not in (nn.MaxPool2d, nn.AvgPool2d, MaxPool2dSame, AvgPool2dSame):
            replaceable, reason = False, f'{type(module).__name__} is not a known kind of pool'
        elif kernel == (1, 1):
            replaceable, reason = False, 'a window of one pixel does not pool, it only subsamples'
        elif isinstance(module, nn.AvgPool2d) and module.divisor_override is not None:
            replaceable, reason = False, 'divisor_override makes it a sum, not a mean'
        elif isinstance(module, nn.MaxPool2d) and module.return_indices:
            replaceable, reason = False, 'return_indices needs a single index, which a plan does not have'
        elif reduction == 'mean' and (kernel, stride, padding) == ((3, 3), (1, 1), (1, 1)):
            reason = 'average pooling of 3 × 3 at stride 1 mixes tokens, it does not pool'
        old = _readable(module)
        found[path] = FoundPool(path, 'local', old, shape, 'NCHW', 'keep dims', replaceable, reason, reduction)
    return list(found.values())


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _readable(module: nn.Module) -> str:
    if isinstance(module, NewPool):
        if isinstance(module, UserPool):
            return type(module.pool).__name__
        return f'{type(module).__name__}({module.options.solver if isinstance(module, ROTPool) else ""})'
    return ' '.join(repr(module).split())
