"""Compile every Triton kernel ahead of time for GPUs that need not be here; a table of what each takes.

    python benchmarks/triton_aot.py [--targets sm_80 gfx942] [--quick]

Registers, spilled bytes and shared memory are those of the compiled kernel (`cuobjdump` of the triton wheel for NVIDIA,
the metadata of the code object for AMD). Launches and bytes are counted, not measured: nothing here says how fast a
kernel is. Spills on NVIDIA are an error.
"""

import argparse
import itertools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rotp_vision.core import triton_badmm, triton_sinkhorn
from rotp_vision.core.triton_tiles import BACKWARD_ELEMENTS, FORWARD_ELEMENTS, MAX_TILES, launch_options

TARGETS = {
    'sm_80': GPUTarget('cuda', 80, 32),
    'sm_90': GPUTarget('cuda', 90, 32),
    'sm_100': GPUTarget('cuda', 100, 32),
    'gfx942': GPUTarget('hip', 'gfx942', 64),
}
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / 'bin' / 'cuobjdump'
MAPS = {'grad', 'features', 'x_map', 'pooled', 'd_features', 'd_x'}  # pointers in the dtype of the features
VECTORS = {
    'log_prior_d', 'log_prior_n', 'coefficients', 'rows', 'columns', 'parts', 'd_columns', 'd_log_p0', 'slopes',
}  # fmt: skip
SAMPLES_FIRST = ('features_n', 'x_n', 'd_features_n', 'd_x_n')  # the strides of one of a contiguous map
CHANNELS_LAST = ('features_d', 'x_d', 'd_features_d', 'd_x_d')


class Kernel(NamedTuple):
    """A kernel with its flags: one row of the table per layout and size."""

    name: str
    function: Any
    flags: dict[str, bool]
    elements: int  # of a tile

    def label(self) -> str:
        return ' '.join([self.name, *(flag for flag in ('FIRST', 'LAST', 'SAME') if self.flags.get(flag))])


SOLVERS = {
    'badmm-e': (triton_badmm.badmm_forward, triton_badmm.badmm_backward, {'QUADRATIC': False}),
    'badmm-q': (triton_badmm.badmm_forward, triton_badmm.badmm_backward, {'QUADRATIC': True}),
    'sinkhorn': (triton_sinkhorn.sinkhorn_forward, triton_sinkhorn.sinkhorn_backward, {}),
}


def kernels() -> list[Kernel]:
    """Every kernel and combination of flags that the launchers use, but for those that leave a store out."""
    found = []
    for name, (forward, backward, flags) in SOLVERS.items():
        for end, same in itertools.product((False, True), repeat=2):
            if end or same:  # only the last launch of forward reads the features
                found.append(Kernel(f'{name} forward', forward, {'LAST': end, 'SAME': same} | flags, FORWARD_ELEMENTS))
            needs = {'NEED_FEATURES': not same, 'NEED_X': True}
            both = {'FIRST': end, 'SAME': same} | flags | needs
            found.append(Kernel(f'{name} backward', backward, both, BACKWARD_ELEMENTS))
    return found


def compiled(kernel: Kernel, target: GPUTarget, block_n: int, dtype: str, unit_strides: tuple[str, ...]) -> Any:
    """The kernel as a launch on such a map would have it compiled."""
    constants: dict[str, Any] = dict(kernel.flags)
    constants |= {'BLOCK_D': kernel.elements // block_n, 'BLOCK_N': block_n, 'TILES': MAX_TILES}
    names = kernel.function.arg_names
    constants |= {name: 1 for name in (*unit_strides, 'prior_d_d', 'prior_n_n', 'grad_d') if name in names}

    def type_of(name: str) -> str:
        if name in constants:
            return 'constexpr'
        return f'*{dtype}' if name in MAPS else '*fp32' if name in VECTORS else 'i32'

    signature = {name: type_of(name) for name in names}
    aligned = {(i,): [['tt.divisibility', 16]] for i, name in enumerate(names) if signature[name].startswith('*')}
    values = {(names.index(name),): value for name, value in constants.items()}
    options = launch_options(amd=target.backend == 'hip')
    return triton.compile(ASTSource(kernel.function, signature, values, aligned), target=target, options=options)


def resources(binary: Any, target: GPUTarget) -> tuple[int, int, int]:
    """Registers per thread, bytes spilled per thread, bytes of shared memory."""
    if target.backend == 'hip':
        text = binary.asm['amdgcn']
        number = lambda name: int(re.search(rf'\.{name}:\s*(\d+)', text)[1])  # noqa: E731
        return number('vgpr_count'), number('private_segment_fixed_size'), binary.metadata.shared
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(binary.asm['cubin'])
        file.flush()
        command = [str(CUOBJDUMP), '--dump-resource-usage', file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r'(REG|STACK|LOCAL):(\d+)', text)}
    return used['REG'], used['STACK'] + used['LOCAL'], binary.metadata.shared


def traffic(launches: int, dtype_bytes: int) -> tuple[int, int]:
    """Bytes per element of X moved by forward and by backward where features and plan's view are one.

    Every launch reads X; the last of backward writes its gradient. The vectors are a few per cent of that.
    """
    return launches * dtype_bytes, (launches + 1) * dtype_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--targets', nargs='+', choices=TARGETS, default=list(TARGETS))
    parser.add_argument('--quick', action='store_true', help='7×7 maps in float32 only')
    args = parser.parse_args()

    sizes = (64,) if args.quick else (16, 64, 256)
    layouts = {'contiguous': SAMPLES_FIRST, 'channels_last': CHANNELS_LAST}
    dtypes = ('fp32',) if args.quick else ('fp32', 'fp16')
    print('| target | kernel | tile | dtype | layout | registers | spilled | shared |')
    print('| --- | --- | --- | --- | --- | --- | --- | --- |')
    spilling = []
    for target, kernel, block_n, dtype, layout in itertools.product(args.targets, kernels(), sizes, dtypes, layouts):
        if dtype == 'fp16' and block_n != 64:
            continue  # the same code but for the conversions
        binary = compiled(kernel, TARGETS[target], block_n, dtype, layouts[layout])
        registers, spilled, shared = resources(binary, TARGETS[target])
        tile = f'{kernel.elements // block_n}×{block_n}'
        row = f'| {target} | {kernel.label()} | {tile} | {dtype} | {layout} | {registers} | {spilled} | {shared} |'
        print(row, flush=True)
        if spilled and TARGETS[target].backend == 'cuda':
            spilling.append(row)
    print('\nLaunches, and bytes moved per element of X in float32 (half of it in float16), counted:\n')
    print('| solver | forward: launches | bytes | backward: launches | bytes |')
    print('| --- | --- | --- | --- | --- |')
    for name, launches in (('badmm-e, badmm-q, T = 4', 4), ('T = 8', 8), ('sinkhorn, K = 4', 5)):
        forward, backward = traffic(launches, 4)
        print(f'| {name} | {launches} | {forward} | {launches} + 2 small sums | {backward} |')
    if spilling:
        raise SystemExit('these kernels spill registers:\n' + '\n'.join(spilling))


if __name__ == '__main__':
    main()
