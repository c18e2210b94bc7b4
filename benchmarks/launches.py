"""Launches and bytes of the poolings on a GPU, counted without one by running them on fake tensors.

    python -m benchmarks.launches              # at matmul precision 'highest'
    python -m benchmarks.launches --precision high --detail sinkhorn

Every operation on a fake tensor that is neither a view nor an allocation is one launch, which reads its inputs once and
writes its outputs once. An operation on the CPU, a mixture of devices or a look at a value is an error. Times are
estimates: bytes at 80 % of a GPU's bandwidth, and nothing for the launches themselves and for exponentials.
"""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.speed import GeM
from benchmarks.tables import to_markdown
from rotp_vision.layers import GeMPool2d, GlobalROTPool2d, LocalROTPool2d

BANDWIDTH = {'H100': 3.35e12, 'A100': 2.0e12}  # bytes per second
SHARE_OF_BANDWIDTH = 0.8
STEP_MS = {'AMP': 104.0, 'TF32': 273.0}  # of a ResNet-50 with 256 images on an A100, from NVIDIA's published throughput
# Without a GPU torch refuses to run backward on fake CUDA tensors. These are on no CPU and on one device either.
DEVICE = 'lazy:0'
NO_LAUNCH = ('empty', 'new_empty', 'detach', 'lift_fresh', '_unsafe_view')
GLOBAL, STEM = (256, 2048, 7, 7), (256, 64, 112, 112)
WINDOWS: dict[str, Any] = {'kernel_size': 3, 'stride': 2, 'padding': 1}


class Count(NamedTuple):
    """Cost of forward and backward of a layer."""

    launches: int
    bytes: int

    @property
    def gigabytes(self) -> float:
        return self.bytes / 1e9

    def milliseconds(self, gpu: str) -> float:
        return 1000 * self.bytes / (SHARE_OF_BANDWIDTH * BANDWIDTH[gpu])


class Counter(TorchDispatchMode):
    """Counts the operations that run while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name, kwargs or {}
        result = func(*args, **kwargs)
        operation = name.removeprefix('aten::')
        view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if outputs and not view and not operation.startswith(NO_LAUNCH):
            # These read only the shape of their input.
            read = () if operation.startswith('new_') or operation.endswith('_like') else (args, kwargs)
            inputs = [leaf for leaf in tree_leaves(read) if isinstance(leaf, Tensor)]
            for tensor in (*inputs, *outputs):
                # A Python number wrapped in a tensor stays on the CPU and costs nothing.
                if tensor.device != torch.device(DEVICE) and tensor.dim():
                    raise RuntimeError(f'{operation} on {tensor.device}')
            self.launches.append((operation, sum(map(_bytes, {id(t): t for t in (*inputs, *outputs)}.values()))))
        return result


def _bytes(tensor: Tensor) -> int:
    """Bytes in memory; an expanded axis counts once."""
    values = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        values *= size if stride else min(size, 1)
    return values * tensor.element_size()


def count(
    make: Callable[[], nn.Module], shape: Sequence[int], *, channels_last: bool = True
) -> tuple[Count, list[tuple[str, int]]]:
    """Launches and bytes of forward and backward of a layer, every parameter and the map requiring gradients."""
    counter = Counter()
    # The lazy device knows neither autocast nor recomputation.
    without_autocast = mock.patch.object(torch, 'autocast', return_value=contextlib.nullcontext())
    with FakeTensorMode(), without_autocast, mock.patch.object(torch, 'lazy', torch.cpu, create=True):
        with torch.device(DEVICE):
            layer = make()
        layout = torch.channels_last if channels_last else torch.contiguous_format
        maps = torch.empty(*shape, device=DEVICE).to(memory_format=layout).requires_grad_()
        with counter:
            pooled = layer(maps)
            torch.autograd.grad(pooled, [maps, *layer.parameters()], torch.empty_like(pooled), allow_unused=True)
    return Count(len(counter.launches), sum(size for _, size in counter.launches)), counter.launches


def cases() -> dict[str, tuple[Callable[[], nn.Module], Sequence[int], bool]]:
    """Layers, the shape of their map, and whether it is channels_last."""
    rows: dict[str, tuple[Callable[[], nn.Module], Sequence[int], bool]] = {
        'average': (lambda: nn.AdaptiveAvgPool2d(1), GLOBAL, True),
        'GeM': (GeM, GLOBAL, True),
        'GeMPool2d': (lambda: GeMPool2d(learn=True), GLOBAL, True),
        'the default': (GlobalROTPool2d, GLOBAL, True),
        'the default, contiguous map': (GlobalROTPool2d, GLOBAL, False),
        'start mean, uniform prior': (lambda: GlobalROTPool2d({'start': 'mean', 'prior': 'uniform'}), GLOBAL, True),
    }
    for name, options in {
        'the default, raw features': {'feature_scale': 'raw'},
        'badmm-e': {'solver': 'badmm-e'},
        'badmm-q': {'solver': 'badmm-q'},
        'badmm-e-coupled': {'solver': 'badmm-e-coupled'},
        'badmm-e with structure': {'solver': 'badmm-e', 'structure': 0.1},
    }.items():
        rows[name] = (lambda options=options: GlobalROTPool2d(options), GLOBAL, True)
    rows['stem 3×3/2: max pooling'] = (lambda: nn.MaxPool2d(**WINDOWS), STEM, True)
    for name in ('sinkhorn', 'badmm-e'):
        rows[f'stem 3×3/2: {name}'] = (lambda name=name: LocalROTPool2d(options=name, **WINDOWS), STEM, True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--precision', choices=['highest', 'high'], default='highest', help='of float32 products')
    parser.add_argument('--detail', help='a row of the table, of which every launch is printed')
    args = parser.parse_args()
    torch.set_float32_matmul_precision(args.precision)
    lines = []
    for name, (make, shape, channels_last) in cases().items():
        if args.detail not in (None, name):
            continue
        counted, launches = count(make, shape, channels_last=channels_last)
        if args.detail:
            print('\n'.join(f'{operation} {size:,}' for operation, size in launches))
        times = [counted.milliseconds(gpu) for gpu in BANDWIDTH]
        shares = [100 * times[1] / (step + times[1]) for step in STEP_MS.values()]
        lines.append(
            {
                'pooling': name,
                'launches': counted.launches,
                'GB moved': f'{counted.gigabytes:.2f}',
                f'ms {" / ".join(BANDWIDTH)}, estimated': ' / '.join(f'{ms:.1f}' for ms in times),
                f'% of an A100 step, {" / ".join(STEP_MS)}': ' / '.join(f'{share:.1f}' for share in shares),
            }
        )
    print(to_markdown(lines), end='')


if __name__ == '__main__':
    main()
