"""Compile every Triton kernel ahead of time for GPUs that need not be here; a table of what each takes.

    python -m benchmarks.triton_aot [--targets sm_80 gfx942] [--quick] [--output benchmarks/TRITON.md]

Registers, spilled bytes and shared memory are those of the compiled kernel (`cuobjdump` of the triton wheel for NVIDIA,
the metadata of the code object for AMD). `benchmarks.launches` counts launches and bytes; nothing here says how fast a
kernel is. Spills on NVIDIA are an error.
"""

import argparse
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rotp_vision.core.triton import badmm, coefficients, local_badmm, local_sinkhorn, sinkhorn, windows
from rotp_vision.core.triton.tiles import BACKWARD_ELEMENTS, FORWARD_ELEMENTS, MAX_TILES, NUM_WARPS, launch_options
from rotp_vision.files import write_atomically

TARGETS = {
    'sm_80': GPUTarget('cuda', 80, 32),
    'sm_90': GPUTarget('cuda', 90, 32),
    'sm_100': GPUTarget('cuda', 100, 32),
    'gfx942': GPUTarget('hip', 'gfx942', 64),
}
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / 'bin' / 'cuobjdump'
MAPS = {'grad', 'features', 'x_map', 'pooled', 'd_features', 'd_x'}  # pointers in the dtype of the features
VECTORS = {
    'log_prior_d', 'log_prior_n', 'coefficients', 'saved_r', 'saved_c', 'saved_l', 'parts', 'd_c', 'd_gaps',
    'd_log_p0', 'slopes', 'saved', 'd_windows', 'buffer',
    'smoothness', 'feature_penalty', 'sample_penalty', 'steps', 'gain', 'out',
    'd_smoothness', 'd_feature_penalty', 'd_sample_penalty', 'd_step', 'd_gain', 'd_out',
}  # fmt: skip
POINTERS = {'betas', 'starts', 'weights', 'grads', 'd_betas'}  # tuples of such
# How many entries the tuples of a kernel have, and which of them are one, hence constants: of contiguous maps, and of
# channels_last.
SETS = {
    'grad_strides': (2, [1], [1]), 'prior_d_strides': (2, [1], [1]), 'prior_n_strides': (2, [1], [1]),
    'features_strides': (3, [2], [1]), 'd_features_strides': (3, [2], [1]),
}  # fmt: skip
WINDOWS = {
    'geometry': (11, [9, 10], [9, 10]), 'x_strides': (4, [3], [1]), 'pooled_strides': (4, [3], [1]),
    'grad_strides': (4, [3], [1]), 'd_x_strides': (4, [3], [1]), 'buffer_strides': (4, [2], [3]),
    'spacing': (7, [3], [1]),
}  # fmt: skip
# A layer's weights: three per module, and the gain.
WEIGHTS = {'strides': (2, [0, 1], [0, 1]), 'sizes': (4, [3], [3])} | dict.fromkeys(POINTERS, (4, [], []))
LAYOUTS = ('contiguous', 'channels_last')


class Kernel(NamedTuple):
    """A kernel with its constants, as a launch has them."""

    name: str
    tile: str
    function: Any
    constants: dict[str, Any]
    tuples: dict[str, tuple[int, list[int], list[int]]]
    num_warps: int = NUM_WARPS
    dtypes: tuple[str, ...] = ('fp32',)  # another dtype is the same code but for the conversions


SOLVERS = {
    'badmm-e': (badmm.badmm_forward, badmm.badmm_backward, {'QUADRATIC': False}),
    'badmm-q': (badmm.badmm_forward, badmm.badmm_backward, {'QUADRATIC': True}),
    'sinkhorn': (sinkhorn.sinkhorn_forward, sinkhorn.sinkhorn_backward, {}),
}
LOCAL_SOLVERS = {
    'badmm-e': (local_badmm.local_badmm_forward, local_badmm.local_badmm_backward, {'QUADRATIC': False}),
    'badmm-q': (local_badmm.local_badmm_forward, local_badmm.local_badmm_backward, {'QUADRATIC': True}),
    'sinkhorn': (local_sinkhorn.local_sinkhorn_forward, local_sinkhorn.local_sinkhorn_backward, {}),
}
# Windows' size, channels, views. The view 'rms' holds most; fewer taps or channels than these take the same tiles.
LOCAL_CASES = ((3, 64, ('identity', 'rms', 'log')), (3, 256, ('rms',)), (2, 64, ('rms',)))


def global_kernels(sizes: tuple[int, ...], views: tuple[str, ...], solvers: tuple[str, ...]) -> Iterator[Kernel]:
    """Every kernel for sets and combination of flags that the launchers use, but for those that leave a store out."""
    for name, end, view, block_n in itertools.product(solvers, (False, True), views, sizes):
        forward, backward, flags = SOLVERS[name]
        dtypes = ('fp32', 'fp16') if block_n == 64 and view == 'rms' else ('fp32',)
        for way, function, elements, more in (
            ('forward', forward, FORWARD_ELEMENTS, {'LAST': end}),
            ('backward', backward, BACKWARD_ELEMENTS, {'FIRST': end, 'NEED_FEATURES': True}),
        ):
            block_d = elements // block_n
            constants = {'VIEW': view, 'BLOCK_D': block_d, 'BLOCK_N': block_n, 'TILES': MAX_TILES} | more | flags
            label = ' '.join([name, way, view, *(flag for flag in ('FIRST', 'LAST') if constants.get(flag))])
            yield Kernel(label, f'{block_d}×{block_n}', function, constants, SETS, dtypes=dtypes)


def weight_kernels() -> Iterator[Kernel]:
    """What makes coefficients of weights."""
    for way, function in (('forward', coefficients.softplus_forward), ('backward', coefficients.softplus_backward)):
        yield Kernel(f'softplus {way}', '1', function, {'BLOCK': coefficients.BLOCK}, WEIGHTS, num_warps=1)
    for way in ('forward', 'backward'):
        for quadratic in (False, True):
            function = getattr(coefficients, f'badmm_coefficients_{way}')
            label = f'badmm-{"eq"[quadratic]} coefficients {way}'
            yield Kernel(label, '1', function, {'QUADRATIC': quadratic}, WEIGHTS, num_warps=1)
        function = getattr(coefficients, f'sinkhorn_coefficients_{way}')
        yield Kernel(f'sinkhorn coefficients {way}', '1', function, {}, WEIGHTS, num_warps=1)


def local_kernels(cases: tuple[tuple[int, int, tuple[str, ...]], ...], solvers: tuple[str, ...]) -> Iterator[Kernel]:
    """Every kernel for windows."""
    for (size, channels, views), name in itertools.product(cases, solvers):
        *functions, flags = LOCAL_SOLVERS[name]
        for function, way in zip(functions, ('forward', 'backward'), strict=True):
            cut = windows.window_tiling(channels, size**2, way == 'backward')
            shape = {'KH': size, 'KW': size, 'BLOCK_W': cut.block_w, 'BLOCK_C': cut.block_c}
            for view in views:
                constants = shape | {'VIEW': view} | flags | ({'NEED_X': True} if way == 'backward' else {})
                label, tile = f'local {size}×{size} {name} {way} {view}', f'{cut.block_w}×{cut.block_c}'
                dtypes = ('fp32', 'fp16') if view == 'identity' else ('fp32',)
                yield Kernel(label, tile, function, constants, WINDOWS, cut.num_warps, dtypes)
    block = windows.GATHER_BLOCK
    for size in sorted({size for size, _, _ in cases}):
        constants = {'KH': size, 'KW': size, 'BLOCK': block}
        label = f'local {size}×{size} gather'
        yield Kernel(label, str(block), windows.gather_windows, constants, WINDOWS, dtypes=('fp32', 'fp16'))


def compiled(kernel: Kernel, target: GPUTarget, dtype: str, layout: str) -> Any:
    """The kernel as a launch on such a map would have it compiled."""
    names = kernel.function.arg_names
    constants = dict(kernel.constants)
    if 'CHANNELS_LAST' in names:
        constants['CHANNELS_LAST'] = layout == 'channels_last'
    signature, values = {}, {}
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = 'constexpr'
            values[i,] = constants[name]
        elif name in kernel.tuples:
            size, *ones = kernel.tuples[name]
            fixed = ones[LAYOUTS.index(layout)]
            kind = '*fp32' if name in POINTERS else 'i32'
            signature[name] = tuple('constexpr' if j in fixed else kind for j in range(size))
            values |= {(i, j): 1 for j in fixed}
        else:
            kinds = {'floor': 'fp32'} | dict.fromkeys(MAPS, f'*{dtype}') | dict.fromkeys(VECTORS, '*fp32')
            signature[name] = kinds.get(name, 'i32')
    aligned = {(i,): [['tt.divisibility', 16]] for i, name in enumerate(names) if name in MAPS | VECTORS}
    options = launch_options(target.backend == 'hip', kernel.num_warps)
    return triton.compile(ASTSource(kernel.function, signature, values, aligned), target=target, options=options)


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
    parser.add_argument('--solvers', nargs='+', choices=SOLVERS, default=list(SOLVERS))
    parser.add_argument('--quick', action='store_true', help='7×7 maps and 3×3 windows, view rms, in float32 only')
    parser.add_argument('--output', type=Path, help='Markdown file to write: the most over dtypes and layouts')
    args = parser.parse_args()

    solvers = tuple(args.solvers)
    sizes, cases = ((64,), ((3, 64, ('rms',)),)) if args.quick else ((16, 64, 256), LOCAL_CASES)
    views = ('rms',) if args.quick else ('identity', 'rms', 'log')
    kernels = [*weight_kernels(), *global_kernels(sizes, views, solvers), *local_kernels(cases, solvers)]
    print('| target | kernel | tile | dtype | layout | registers | spilled | shared |')
    print('| --- | --- | --- | --- | --- | --- | --- | --- |')
    most: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    spilling = []
    for target, kernel in itertools.product(args.targets, kernels):
        for dtype, layout in itertools.product(kernel.dtypes[:1] if args.quick else kernel.dtypes, LAYOUTS):
            binary = compiled(kernel, TARGETS[target], dtype, layout)
            used = resources(binary, TARGETS[target])
            numbers = ' | '.join(map(str, used))
            row = f'| {target} | {kernel.name} | {kernel.tile} | {dtype} | {layout} | {numbers} |'
            print(row, flush=True)
            if used[1] and TARGETS[target].backend == 'cuda':
                spilling.append(row)
            of_kernel = most.setdefault((kernel.name, kernel.tile), {})
            of_kernel[target] = tuple(map(max, used, of_kernel.get(target, used)))
    if args.output is not None:
        write(args.output, args.targets, most)
    if spilling:
        raise SystemExit('these kernels spill registers:\n' + '\n'.join(spilling))


def write(path: Path, targets: list[str], most: dict[tuple[str, str], dict[str, tuple[int, ...]]]) -> None:
    lines = [
        '# The Triton kernels, compiled for GPUs that were not there\n',
        f'`python -m benchmarks.triton_aot --output benchmarks/TRITON.md`, triton {triton.__version__}. Registers per',
        'thread, bytes spilled per thread and bytes of shared memory per program, each the most over dtypes and',
        'layouts. Tiles are features × samples, and windows × channels. Nothing here says how fast a kernel is: no GPU',
        'has run them yet.\n',
        f'| kernel | tile | {" | ".join(targets)} |',
        f'| --- | --- | {" | ".join("---" for _ in targets)} |',
    ]
    for (name, tile), used in most.items():
        lines.append(f'| {name} | {tile} | {" | ".join(", ".join(map(str, used[target])) for target in targets)} |')
    write_atomically(path, '\n'.join(lines) + '\n')


if __name__ == '__main__':
    main()
