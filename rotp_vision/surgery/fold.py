"""Folding a pool's output gain into the linear layer that reads it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rotp_vision.layers import ROTPool
from rotp_vision.surgery.find import example_inputs
from rotp_vision.surgery.pools import rot_pools
from rotp_vision.surgery.trace import undisturbed

# Layers that do not change values in evaluation mode.
TRANSPARENT = (nn.Identity, nn.Flatten, nn.modules.dropout._DropoutNd)


class Ran(NamedTuple):
    """A layer that ran in a forward pass, its input and its output."""

    path: str
    module: nn.Module
    input: Tensor
    output: Tensor


def fold_gain(model: nn.Module, example_input: Tensor | tuple | None = None) -> nn.Module:
    """Move the output gain of each ROT pool into the weights of the layer that reads it, in place.

        W (g · f) + c = (W g) · f + c

    That layer must be linear or a 1 × 1 convolution, with only dropout, flattening and identities in between. The
    outputs on the example are compared before and after. The gain stays in that layer, even after `revert`.

    Args:
        model: with ROT pools that have a gain.
        example_input: an input of the model or a tuple of its inputs; by default two images of noise.

    Raises:
        ValueError: if a gain cannot be folded, with the reason; the model is then unchanged.

    Example:
        >>> import timm, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> model.global_pool.set_weights(gain=1.5)
        >>> float(rotp_vision.fold_gain(model.eval()).global_pool.named_weights()['gain'])
        1.0
    """
    pools = {path: pool for path, pool in rot_pools(model).items() if pool.gain is not None}
    if not pools:
        raise ValueError("the model has no ROT pool with a gain; gain='scalar' or 'channel' is an option of the pool")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError('the model is on the meta device, so its gain has no value to fold')
    inputs = example_inputs(model, example_input)
    if example_input is None:
        noise = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0))
        inputs = (noise.to(inputs[0]),)
    ran, before = run_layers(model, inputs)
    readers = {path: _readers(path, pool, ran) for path, pool in pools.items()}
    kept = [(layer, layer.weight.detach().clone()) for layers in readers.values() for layer in layers]
    gains = {path: pool.named_weights()['gain'] for path, pool in pools.items()}
    with torch.no_grad():
        for path, layers in readers.items():
            for layer in layers:
                gain = gains[path].to(layer.weight.dtype)
                layer.weight.mul_(gain.view(1, -1, *[1] * (layer.weight.dim() - 2)) if gain.dim() else gain)
            pools[path].set_weights(gain=1.0)
    _, after = run_layers(model, inputs)
    error = float((after - before).double().norm() / before.double().norm())
    if not error <= torch.finfo(before.dtype).eps ** 0.5:
        with torch.no_grad():
            for layer, weight in kept:
                layer.weight.copy_(weight)
        for path, pool in pools.items():
            pool.set_weights(gain=gains[path])
        raise ValueError(
            f'folding would change the output by {error:.2g} of its norm: the layer reads something besides '
            f'{", ".join(readers)}, or a function is applied in between'
        )
    for path, pool in pools.items():
        pool.gain_folded |= bool((gains[path] != 1).any())
    return model


def run_layers(model: nn.Module, inputs: tuple) -> tuple[list[Ran], Tensor]:
    """The layers that run in a forward pass, in order, and its output. The state of the model does not change."""
    ran: list[Ran] = []
    paths = {module: path for path, module in model.named_modules()}

    def record(module: nn.Module, args: tuple, output: object):
        # Containers are skipped because their children are recorded; a ROT pool counts as one layer.
        is_layer = isinstance(module, ROTPool) or not any(True for _ in module.children())
        if is_layer and args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            ran.append(Ran(paths[module], module, args[0], output))

    with undisturbed(model):
        for module in model.modules():
            module.register_forward_hook(record)
        output = model(*inputs)
    if not isinstance(output, Tensor):
        raise ValueError(f'the model must return a tensor, got {type(output).__name__}')
    return ran, output


def _readers(path: str, pool: ROTPool, ran: list[Ran]) -> list[nn.Linear | nn.Conv2d]:
    """The linear layers that read the output of the pool."""
    index = next((i for i, call in enumerate(ran) if call.module is pool), None)
    if index is None:
        raise ValueError(f'{path} does not run in a forward pass')
    rest = [call for call in ran[index + 1 :] if not isinstance(call.module, TRANSPARENT)]
    if not rest:
        raise ValueError(f'no linear layer reads the output of {path}, so its gain cannot be folded')
    first = rest[0]
    readers = [call.module for call in rest if call.input is first.input]
    for reader in readers:
        if not is_linear(reader):
            raise ValueError(
                f'the gain of {path} cannot be folded: {first.path} ({type(first.module).__name__}) reads it, '
                'but is neither a linear layer nor a 1 × 1 convolution'
            )
    return [reader for reader in readers if isinstance(reader, (nn.Linear, nn.Conv2d))]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear map of the features: a linear layer or a 1 × 1 convolution."""
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.padding in ((0, 0), 'valid') and module.groups == 1
    return isinstance(module, nn.Linear)
