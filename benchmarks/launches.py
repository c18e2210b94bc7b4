"""Launches and bytes of the pooling on a GPU that is not there, counted with tensors that have no values.

    python -m benchmarks.launches

Every operation on a fake tensor that is neither a view nor an allocation is one launch, which reads its inputs
once and writes its outputs once; so is every launch of a Triton kernel, where overlapping windows are read once, as a
cache would have it. An operation on the CPU, a mixture of devices or a look at a value is an error. Times are
estimates: bytes at 80 % of a GPU's bandwidth, and nothing for the launches themselves and for exponentials.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.tables import to_markdown
from rotp_vision.core import solver
from rotp_vision.core import triton as triton_room
from rotp_vision.core.triton import check
from rotp_vision.layers import GlobalROTPool2d, LocalROTPool2d

BANDWIDTH = {'H100': 3.35e12, 'A100': 2.0e12}  # bytes per second
SHARE_OF_BANDWIDTH = 0.8
STEP_MS = {'AMP': 104.0, 'TF32': 273.0}  # of a ResNet-50 with 256 images on an A100, from NVIDIA's published throughput
# Without a GPU torch refuses to run backward on fake CUDA tensors. These are on no CPU and on one device either.
DEVICE = 'lazy:0'
NO_LAUNCH = ('empty', 'new_empty', 'detach', 'lift_fresh', '_unsafe_view')
GLOBAL, STEM = (256, 2048, 7, 7), (256, 64, 112, 112)
WINDOWS: dict[str, Any] = {'kernel_size': 3, 'stride': 2, 'padding': 1}


class Count(NamedTuple):
    """What forward and backward of a layer take."""

    launches: int
    bytes: int

    @property
    def gigabytes(self) -> float:
        return self.bytes / 1e9

    def milliseconds(self, gpu: str) -> float:
        return 1000 * self.bytes / (SHARE_OF_BANDWIDTH * BANDWIDTH[gpu])


class Counter(TorchDispatchMode):
    """Counts what happens while it is on; our own operators are taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name, kwargs or {}
        if name.startswith('rotp_vision::'):
            with self:
                return OPDEFS[name]._init_fn(*args, **kwargs)
        result = func(*args, **kwargs)
        operation = name.removeprefix('aten::')
        view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if outputs and not view and not operation.startswith(NO_LAUNCH):
            # Of these the input only says what to make.
            read = () if operation.startswith('new_') or operation.endswith('_like') else (args, kwargs)
            inputs = [leaf for leaf in tree_leaves(read) if isinstance(leaf, Tensor)]
            for tensor in (*inputs, *outputs):
                # A number of Python's that became a tensor stays on the CPU, and costs nothing.
                if tensor.device != torch.device(DEVICE) and tensor.dim():
                    raise RuntimeError(f'{operation} on {tensor.device}')
            self.launches.append((operation, sum(map(_bytes, {id(t): t for t in (*inputs, *outputs)}.values()))))
        return result

    def kernel(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """In place of `tiles.launch`."""
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        end = constants.get('LAST', constants.get('FIRST', True))
        unused = set() if end else {'pooled', 'd_features', 'd_log_p0', 'slopes'}
        unused |= (
            set() if constants.get('NEED_FEATURES', constants.get('NEED_X', True)) else {'d_features', 'd_windows'}
        )
        total = 0
        for name, value in given.items():
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor) and name not in unused:
                    total += _bytes(tensor) // self._slices(kernel.__name__, name, tensor, end)
        self.launches.append((kernel.__name__, total))

    def _slices(self, kernel: str, name: str, tensor: Tensor, end: bool) -> int:
        """Of how many equal parts of a vector a launch touches one."""
        if name == 'parts':  # (launches, …): what the launch before left, and its own
            return max(1, tensor.shape[0] // 2)
        if name == 'saved_r' and kernel.startswith('sinkhorn') and not (end and 'backward' in kernel):
            return tensor.shape[1]  # (B, launches, D): that of its own step
        return 1


def _bytes(tensor: Tensor) -> int:
    """What is in memory of it: an expanded axis is there once."""
    values = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        values *= size if stride else min(size, 1)
    return values * tensor.element_size()


@contextlib.contextmanager
def pretended(counter: Counter, backend: str) -> Iterator[None]:
    """Kernels that are trusted and only counted; or no Triton at all."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        if backend == 'triton':
            from rotp_vision.core.triton import tiles

            enter(mock.patch.object(tiles, 'launch', counter.kernel))
            enter(mock.patch.object(tiles, 'on_device', return_value=contextlib.nullcontext()))
            enter(mock.patch('rotp_vision.core.triton.windows.on_device', return_value=contextlib.nullcontext()))
        enter(mock.patch.object(triton_room, 'INSTALLED', backend == 'triton'))
        enter(mock.patch.object(triton_room, 'INTERPRETED', True))
        enter(mock.patch.object(solver, 'on_gpu', return_value=True))
        enter(mock.patch.object(torch, 'autocast', return_value=contextlib.nullcontext()))
        enter(mock.patch.object(check, 'is_traced', return_value=False))
        enter(mock.patch.object(check, 'trusted', return_value=True))
        yield


def count(
    make: Callable[[], nn.Module],
    shape: Sequence[int],
    *,
    backend: str = 'triton',
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    frozen: bool = False,
    counter: Counter | None = None,
) -> tuple[Count, list[tuple[str, int]]]:
    """Of forward and backward of a layer on a map, with 'auto' where Triton is there, or is not ('torch').

    Args:
        make: makes the layer.
        shape: of the map.
        backend: 'triton' or 'torch'.
        dtype: of the map.
        channels_last: memory format of the map.
        frozen: whether the map needs no gradient.
        counter: what counts; a new one if None.

    Returns:
        The count, and what was launched, with its bytes.
    """
    with FakeTensorMode():
        with torch.device(DEVICE):
            pool = make()
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        x = torch.empty(shape, dtype=dtype, device=DEVICE, memory_format=memory_format).requires_grad_(not frozen)
        counter = counter or Counter()
        with pretended(counter, backend), counter:
            out = pool(x)
            inputs = [*([] if frozen else [x]), *pool.parameters()]
            torch.autograd.grad(out, inputs, torch.empty_like(out))
    launches = counter.launches
    return Count(len(launches), sum(size for _, size in launches)), launches


class GeM(nn.Module):
    """Generalized mean as timm users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.ones(()) * 3)

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=1e-6).pow(self.power).mean((2, 3)).pow(1 / self.power)


def cases() -> dict[str, tuple[Callable[[], nn.Module], Sequence[int], str]]:
    """Rows of the table: layer, map, backend."""
    rows: dict[str, tuple[Callable[[], nn.Module], Sequence[int], str]] = {
        'average': (lambda: nn.AdaptiveAvgPool2d(1), GLOBAL, 'torch'),
        'GeM': (GeM, GLOBAL, 'torch'),
    }
    for backend in ('triton', 'torch'):
        for name in ('sinkhorn', 'badmm-e', 'badmm-q'):
            rows[f'{name}, {backend}'] = (lambda name=name: GlobalROTPool2d(name), GLOBAL, backend)
    for name, options in (
        ('badmm-e coupled', {'solver': 'badmm-e', 'coupled': True}),
        ('badmm-e with structure', {'solver': 'badmm-e', 'structure': 0.1}),
    ):
        rows[f'{name}, torch'] = (lambda options=options: GlobalROTPool2d(options), GLOBAL, 'torch')
    rows['stem 3×3/2: max pooling'] = (lambda: nn.MaxPool2d(**WINDOWS), STEM, 'torch')
    for name in ('sinkhorn', 'badmm-e'):
        rows[f'stem 3×3/2: {name}, triton'] = (lambda name=name: LocalROTPool2d(name, **WINDOWS), STEM, 'triton')
    rows['5×5/2: sinkhorn, triton on windows cut out'] = (
        lambda: LocalROTPool2d(kernel_size=5, stride=2, padding=2), STEM, 'triton',
    )  # fmt: skip
    rows['stem 3×3/2: sinkhorn with a norm prior, triton on windows cut out'] = (
        lambda: LocalROTPool2d({'prior': 'norm'}, **WINDOWS), STEM, 'triton',
    )  # fmt: skip
    for name in ('sinkhorn', 'badmm-e'):
        rows[f'stem 3×3/2: {name}, torch'] = (lambda name=name: LocalROTPool2d(name, **WINDOWS), STEM, 'torch')
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--detail', help='a row of the table, of which every launch is printed')
    args = parser.parse_args()
    lines = []
    for name, (make, shape, backend) in cases().items():
        if args.detail not in (None, name):
            continue
        counted, launches = count(make, shape, backend=backend)
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
