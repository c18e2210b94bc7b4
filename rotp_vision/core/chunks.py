"""How many images are computed at a time."""

import torch
from torch import Tensor

# Entries of the plans in a chunk, on a CPU and elsewhere. On a CPU a chunk should stay in the cache, and recomputed
# chunks bound the memory of the backward pass; a GPU wants few launches, so there the limits bound memory alone.
ENTRIES = {
    'operator': (2**18, 2**62),
    'formula': (2**20, 2**25),
    'windows': (2**18, 2**27),
}


def entries(x: Tensor, kind: str) -> int:
    """Plan entries in a chunk of that kind on the device of `x`."""
    return ENTRIES[kind][0 if x.device.type == 'cpu' else 1]


def set_chunks(x: Tensor, kind: str) -> list[slice]:
    """Slices of the batch axis of `x` (B, D, N), at least one set in each; one empty slice for an empty batch."""
    num_sets = max(1, entries(x, kind) // max(1, x[:1].numel()))
    return [slice(first, first + num_sets) for first in range(0, max(1, x.shape[0]), num_sets)]


def reads_values(x: Tensor) -> bool:
    """Whether values may be looked at: elsewhere than on a CPU that would synchronise the device."""
    return x.device.type == 'cpu'


def device_type(x: Tensor) -> str:
    """The device for `torch.autocast`, which knows no meta device."""
    return 'cpu' if x.device.type == 'meta' else x.device.type


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, compute, *tensors):
        return compute(*tensors)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("this pooling has no second derivative; construct it with backend='reference' for one")


def once_differentiable(compute, *tensors):
    """`compute(*tensors)`, the gradients of an operator; differentiating them again is a clear error."""
    return _Once.apply(compute, *tensors)
