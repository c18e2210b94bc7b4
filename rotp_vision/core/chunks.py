"""How many images are computed at a time."""

from torch import Tensor

# Entries of the plans in a chunk, on a CPU and elsewhere. On a CPU a chunk should stay in the cache, and recomputed
# chunks bound the memory of the backward pass; a GPU wants few launches, so there the limits bound memory alone.
ENTRIES = {
    'operator': (2**19, 2**62),
    'formula': (2**20, 2**25),
    'windows': (2**18, 2**27),
}


def set_chunks(x: Tensor, kind: str) -> list[slice]:
    """Slices of the batch axis of `x` (B, D, N), at least one set in each; one empty slice for an empty batch."""
    limit = ENTRIES[kind][x.device.type != 'cpu']
    num_sets = max(1, limit // max(1, x[:1].numel()))
    return [slice(first, first + num_sets) for first in range(0, max(1, x.shape[0]), num_sets)]


def reads_values(x: Tensor) -> bool:
    """Whether values may be looked at: elsewhere than on a CPU that would synchronise the device."""
    return x.device.type == 'cpu'


def device_type(x: Tensor) -> str:
    """The device for `torch.autocast`, which knows no meta device."""
    return 'cpu' if x.device.type == 'meta' else x.device.type
