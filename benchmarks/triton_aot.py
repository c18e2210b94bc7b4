"""Compile every Triton kernel that 'auto' can choose ahead of time, for GPUs that need not be here.

    python -m benchmarks.triton_aot [--targets sm_80 gfx942] [--quick] [--output benchmarks/TRITON.md]

Layers run forwards and backwards on tensors without values, and every launch they ask for is compiled as it would be
there: with the same constants, and the same strides and sizes known to be one or a multiple of 16. Registers, spilled
bytes and shared memory are those of the compiled kernel (`cuobjdump` of the triton wheel for NVIDIA, the metadata of
the code object for AMD). `benchmarks.launches` counts launches and bytes; nothing here says how fast a kernel is.
Spills on NVIDIA are an error. Triton's cache keeps what is compiled: a run that was interrupted goes on.
"""

import argparse
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.backends.nvidia
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.launches import WINDOWS, Counter, count
from rotp_vision.files import write_atomically
from rotp_vision.layers import GlobalROTPool2d, LocalROTPool2d

TARGETS = {
    'sm_80': GPUTarget('cuda', 80, 32),
    'sm_90': GPUTarget('cuda', 90, 32),
    'sm_100': GPUTarget('cuda', 100, 32),
    'gfx942': GPUTarget('hip', 'gfx942', 64),
}
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / 'bin' / 'cuobjdump'
DTYPES = {torch.float32: 'fp32', torch.bfloat16: 'bf16', torch.float16: 'fp16', torch.bool: 'i1'}
SOLVERS = ('badmm-e', 'badmm-q', 'sinkhorn')
VIEWS = ('rms', 'identity', 'log')
SIDES = (7, 3, 5, 8, 10, 14, 16)  # of square maps: every BLOCK_N, and two with N a multiple of 16
CHANNELS = 2048
LOCAL = ((3, 64), (3, 256), (2, 64))  # side of the windows, and channels; fewer take the same tiles or smaller ones


class Launch(NamedTuple):
    """A kernel as a layer launches it: what Triton would compile."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    aligned: dict[tuple[int, ...], Any]  # what is a multiple of 16
    options: dict[str, Any]

    @property
    def name(self) -> str:
        flags = {name: value for name, value in self._named().items() if isinstance(value, bool)}
        given = [name for name, value in flags.items() if value and name in ('LAST', 'FIRST', 'QUADRATIC')]
        given += ['no gradient of the map' for name, value in flags.items() if not value and name.startswith('NEED')]
        return ' '.join([self.kernel.__name__, *given])

    @property
    def view(self) -> str:
        return self._named().get('VIEW', '')

    @property
    def tile(self) -> str:
        sizes = [str(value) for name, value in self._named().items() if name.startswith(('BLOCK', 'K'))]
        return '×'.join(sizes) or '1'

    def _named(self) -> dict[str, Any]:
        return {self.kernel.arg_names[path[0]]: value for path, value in self.constants.items() if len(path) == 1}


class Recorder(Counter):
    """Keeps every launch of a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Launch] = []

    def kernel(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        super().kernel(kernel, grid, *arguments, **constants)
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        given |= {name: constants.pop(name) for name in kernel.arg_names if name in constants}
        launch = Launch(kernel, {}, {}, {}, constants)
        for i, parameter in enumerate(kernel.params):
            value = given[parameter.name]
            if parameter.is_constexpr:
                launch.signature[parameter.name] = 'constexpr'
                launch.constants[i,] = value
            else:
                kind = _specialized(launch, value, (i,), not parameter.do_not_specialize)
                launch.signature[parameter.name] = kind
        self.recorded.append(launch)


def _specialized(launch: Launch, value: Any, path: tuple[int, ...], specialize: bool) -> Any:
    """The type of an argument as Triton would have it, which takes one for a constant and notes multiples of 16."""
    if isinstance(value, tuple):
        return tuple(_specialized(launch, entry, (*path, j), specialize) for j, entry in enumerate(value))
    if isinstance(value, float):
        return 'fp32'
    if specialize and isinstance(value, int) and value == 1:
        launch.constants[path] = 1
        return 'constexpr'
    if isinstance(value, Tensor) or (specialize and value % 16 == 0):
        launch.aligned[path] = [['tt.divisibility', 16]]
    return f'*{DTYPES[value.dtype]}' if isinstance(value, Tensor) else 'i32'


class Case(NamedTuple):
    """A layer, the map it runs on, and whether that needs no gradient."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype
    frozen: bool = False


def cases(kind: str, solvers: list[str], quick: bool) -> Iterator[Case]:
    """Of sets or windows: float32 in full; of bfloat16, the same code but for conversions, the view rms."""
    variants = [(torch.float32, view) for view in VIEWS] + [(torch.bfloat16, 'rms')]
    for solver, (dtype, view) in itertools.product(solvers, variants[:1] if quick else variants):
        options = {'solver': solver, 'view': view}
        if kind == 'windows':
            for size, channels in LOCAL[:1] if quick else LOCAL:
                windows = WINDOWS | {'kernel_size': size}
                yield Case(partial(LocalROTPool2d, options, **windows), (2, channels, 14, 14), dtype)
            continue
        pool = partial(GlobalROTPool2d, options)
        for side in SIDES[:1] if quick else SIDES:
            yield Case(pool, (2, CHANNELS, side, side), dtype)
        if not quick:
            yield Case(pool, (2, CHANNELS - 1, 7, 7), dtype)  # no multiple of 16
            yield Case(pool, (2, CHANNELS, 7, 7), dtype, frozen=True)


def launches(cases: Iterable[Case]) -> Iterator[tuple[Launch, dict[str, str]]]:
    """Every launch that is another kernel to Triton, and where it comes from."""
    seen = set()
    for case, layout in itertools.product(cases, ('contiguous', 'channels_last')):
        recorder, (make, shape, dtype, frozen) = Recorder(), case
        count(make, shape, dtype=dtype, channels_last=layout == 'channels_last', frozen=frozen, counter=recorder)
        where = {'map': '×'.join(map(str, shape[1:])), 'dtype': DTYPES[dtype], 'layout': layout}
        for launch in recorder.recorded:
            if repr(launch) not in seen:
                seen.add(repr(launch))
                yield launch, {'kernel': launch.name, 'view': launch.view, 'tile': launch.tile} | where


def compiled(launch: Launch, target: GPUTarget) -> Any:
    """As a launch on such a GPU would have it."""
    hip = target.backend == 'hip'
    options = {name: value for name, value in launch.options.items() if not (hip and name == 'maxnreg')}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.aligned)
    return triton.compile(source, target=target, options=options)


def resources(binary: Any, target: GPUTarget) -> tuple[int, int, int]:
    """Registers per thread, bytes spilled per thread, bytes of shared memory."""
    if target.backend == 'hip':
        text = binary.asm['amdgcn']
        numbers = dict(re.findall(r'\.(vgpr_count|private_segment_fixed_size):\s*(\d+)', text))
        return int(numbers['vgpr_count']), int(numbers['private_segment_fixed_size']), binary.metadata.shared
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(binary.asm['cubin'])
        file.flush()
        command = [str(CUOBJDUMP), '--dump-resource-usage', file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r'(REG|STACK|LOCAL):(\d+)', text)}
    return used['REG'], used['STACK'] + used['LOCAL'], binary.metadata.shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--targets', nargs='+', choices=TARGETS, default=list(TARGETS))
    parser.add_argument('--kinds', nargs='+', choices=('sets', 'windows'), default=['sets', 'windows'])
    parser.add_argument('--solvers', nargs='+', choices=SOLVERS, default=list(SOLVERS))
    parser.add_argument('--quick', action='store_true', help='7×7 maps and 3×3 windows, view rms, in float32 only')
    parser.add_argument('--output', type=Path, help='Markdown file to write, a row for each kernel')
    args = parser.parse_args()

    found: dict[str, dict[str, list[tuple[int, ...]]]] = {}
    spilling = []
    for name, kind in itertools.product(args.targets, args.kinds):
        target = TARGETS[name]
        for launch, row in launches(cases(kind, args.solvers, args.quick)):
            used = resources(compiled(launch, target), target)
            line = f'| {" | ".join([name, *row.values(), *map(str, used)])} |'
            print(line, flush=True)
            if used[1] and target.backend == 'cuda':
                spilling.append(line)
            found.setdefault(launch.name, {}).setdefault(name, []).append(used)
    if args.output is not None:
        write(args.output, args.targets, found)
    if spilling:
        raise SystemExit('these kernels spill registers:\n' + '\n'.join(spilling))


def write(path: Path, targets: list[str], found: dict[str, dict[str, list[tuple[int, ...]]]]) -> None:
    lines = [
        '# The Triton kernels, compiled for GPUs that were not there\n',
        f'`python -m benchmarks.triton_aot --output benchmarks/TRITON.md`, triton {triton.__version__}. For each',
        'kernel, in how many variants it was compiled (view, tile, dtype, memory layout, sizes that are multiples of',
        '16), and of these the most registers per thread, bytes spilled per thread and bytes of shared memory per',
        'program. Nothing here says how fast a kernel is: no GPU has run them yet.\n',
        f'| kernel | {" | ".join(targets)} |',
        f'| --- | {" | ".join("---" for _ in targets)} |',
    ]
    for name, of_target in found.items():
        cells = []
        for target in targets:
            variants = of_target.get(target, [])
            most = ', '.join(str(max(numbers)) for numbers in zip(*variants, strict=True))
            cells.append(f'{len(variants)}: {most}' if variants else '–')
        lines.append(f'| {name} | {" | ".join(cells)} |')
    write_atomically(path, '\n'.join(lines) + '\n')


if __name__ == '__main__':
    main()
