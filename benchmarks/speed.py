"""What pooling costs: time as a multiple of GeM, memory as a multiple of the map.

    python -m benchmarks.speed                      # writes speed.md
    python -m benchmarks.speed --before ../checkout # also the layers of another commit, checked out there

All rows of a table are timed in turns, in one process, and the fastest of several runs counts, so that other load
affects them little and alike. Multiples do not carry over to other machines, so the tables name the processor and its
vector instructions.
"""

import argparse
import ctypes
import importlib
import importlib.util
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.layers import AttentionPool2d, LsePlus2d, SimPool2d
from torch import Tensor, nn

from benchmarks.tables import to_markdown
from rotp_vision.files import write_atomically
from rotp_vision.layers import GeMPool2d, GlobalROTPool2d, LocalROTPool2d

Row = dict[str, Any]
Pools = Mapping[str, nn.Module]
CLOCKS = {'wall': time.perf_counter, 'cpu': time.process_time}
# The eight layouts of the table of the default: (B, C, H, W), and whether channels come last in memory.
LAYOUTS = [
    (shape, channels_last)
    for shape in ((32, 2048, 7, 7), (32, 512, 7, 7), (32, 1280, 14, 14), (16, 768, 24, 24))
    for channels_last in (False, True)
]
MEAN = {'start': 'mean', 'prior': 'uniform'}  # the default of version 0.2
OTHERS: dict[str, dict[str, Any]] = {
    'feature scale raw': {'feature_scale': 'raw'},
    'feature scale log': {'feature_scale': 'log'},
    'plain autograd': {'backend': 'reference'},
    'badmm-e': {'solver': 'badmm-e'},
    'badmm-q': {'solver': 'badmm-q'},
    'badmm-e-coupled': {'solver': 'badmm-e-coupled'},
    'badmm-q-coupled': {'solver': 'badmm-q-coupled'},
    'sinkhorn with structure': {'structure': 0.1},
    'badmm-e with structure': {'solver': 'badmm-e', 'structure': 0.1},
}
# The same in the words of version 0.2.
OTHERS_BEFORE: dict[str, dict[str, Any]] = {
    'feature scale raw': {'view': 'identity'},
    'feature scale log': {'view': 'log'},
    'badmm-e': {'solver': 'badmm-e'},
    'badmm-q': {'solver': 'badmm-q'},
    'badmm-e-coupled': {'solver': 'badmm-e', 'coupled': True},
    'badmm-q-coupled': {'solver': 'badmm-q', 'coupled': True},
    'sinkhorn with structure': {'structure': 0.1},
    'badmm-e with structure': {'solver': 'badmm-e', 'structure': 0.1},
}


class GeM(nn.Module):
    """GeM as it is usually written, the unit of the tables; `GeMPool2d` computes the same in the log domain."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(3.0))

    def forward(self, maps: Tensor) -> Tensor:
        return maps.clamp(min=1e-6).pow(self.p).mean((2, 3)).pow(1 / self.p)


class LocalGeM(GeM):
    """The same of every window."""

    def forward(self, maps: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(maps.clamp(min=1e-6).pow(self.p), 3, 2).pow(1 / self.p)


class SoftmaxPool(nn.Module):
    def forward(self, maps: Tensor) -> Tensor:
        x = maps.flatten(2)
        return (x * x.softmax(2)).sum(2)


class POTSinkhorn(nn.Module):
    """POT's batched Sinkhorn, differentiated by autograd."""

    def forward(self, maps: Tensor) -> Tensor:
        import ot.batch

        x = maps.flatten(2)
        plan = ot.batch.solve_batch(-x, reg=0.6931, max_iter=4, tol=0.0, grad='autodiff').plan
        return (x * plan).sum(2) / plan.sum(2)


class Timing(NamedTuple):
    now: Callable[[], float]
    repeats: int


def layers_before(checkout: Path) -> Any:
    """The module `rotp_vision.layers` of another checkout, beside ours."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split('.')[0] == 'rotp_vision'}
    sys.path.insert(0, str(checkout))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # both register the names of their models
            return importlib.import_module('rotp_vision.layers')
    finally:
        sys.path.remove(str(checkout))
        for name in [name for name in sys.modules if name.split('.')[0] == 'rotp_vision']:
            del sys.modules[name]
        sys.modules.update(ours)


def peers(channels: int) -> dict[str, nn.Module]:
    pools = {
        'average': nn.AdaptiveAvgPool2d(1),
        'GeM': GeM(),
        'GeMPool2d': GeMPool2d(learn=True),
        'softmax': SoftmaxPool(),
        'timm LsePlus2d': LsePlus2d(),
        'timm SimPool2d': SimPool2d(channels),
        'timm AttentionPool2d': AttentionPool2d(channels, feat_size=7),
    }
    if importlib.util.find_spec('ot') is not None:
        pools['POT batched Sinkhorn, 4 iterations'] = POTSinkhorn()
    return pools


def fastest(steps: Mapping[str, Callable[[], None]], timing: Timing) -> dict[str, float]:
    """Seconds of the fastest run of each step, all taking turns."""
    times = dict.fromkeys(steps, float('inf'))
    for i in range(timing.repeats + 2):
        for name, step in steps.items():
            start = timing.now()
            step()
            if i >= 2:
                times[name] = min(times[name], timing.now() - start)
    return times


def training_step(pool: nn.Module, maps: Tensor) -> Callable[[], None]:
    """Forward and backward, every parameter and the map requiring gradients."""
    towards = torch.randn_like(pool(maps))
    inputs = [maps, *pool.parameters()]

    def step() -> None:
        torch.autograd.grad(pool(maps), inputs, towards, allow_unused=True)

    return step


def inference_step(pool: nn.Module, maps: Tensor) -> Callable[[], None]:
    return torch.no_grad()(lambda: pool(maps))


def saved_multiple(pool: nn.Module, maps: Tensor) -> float:
    """Bytes kept for backward besides the parameters, as a multiple of the map."""
    parameters = {p.untyped_storage().data_ptr() for p in pool.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # or a storage could be freed and its address counted once for two

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pool(maps)
    return sum(kept.values()) / maps.untyped_storage().nbytes()


def cost_rows(shape: str, pools: Pools, maps: Tensor, timing: Timing) -> list[Row]:
    """A row for each pool, with its times as multiples of GeM's."""
    times = fastest({name: training_step(pool, maps) for name, pool in pools.items()}, timing)
    inference = fastest({name: inference_step(pool, maps) for name, pool in pools.items()}, timing)
    return [
        {
            'map': shape,
            'pooling': name,
            '× GeM': times[name] / times['GeM'],
            'inference × GeM': inference[name] / inference['GeM'],
            'saved × map': saved_multiple(pool, maps),
            'ms': 1e3 * times[name],
            'inference ms': 1e3 * inference[name],
        }
        for name, pool in pools.items()
    ]


def layout_rows(timing: Timing, before: Any) -> list[Row]:
    """The default over eight layouts, and its geometric means."""
    rows: list[Row] = []
    for shape, channels_last in LAYOUTS:
        maps = torch.randn(shape).abs()
        maps = maps.contiguous(memory_format=torch.channels_last) if channels_last else maps
        pools = {'GeM': GeM(), 'GeMPool2d': GeMPool2d(learn=True), 'softmax': SoftmaxPool()}
        pools |= {'default': GlobalROTPool2d(), 'start mean, no norm prior': GlobalROTPool2d(MEAN)}
        if before is not None:
            pools |= {
                'before': before.GlobalROTPool2d(),
                'before, with norm prior': before.GlobalROTPool2d({'prior': 'norm'}),
            }
        name = f'{shape}{", channels_last" if channels_last else ""}'
        rows += cost_rows(name, pools, maps.requires_grad_(), timing)
    means: list[Row] = []
    for pooling in dict.fromkeys(row['pooling'] for row in rows):
        some = [row for row in rows if row['pooling'] == pooling]
        numbers = {key: statistics.geometric_mean(row[key] or 1e-9 for row in some) for key in list(rows[0])[2:]}
        means.append({'map': 'geometric mean', 'pooling': pooling} | numbers)
    return rows + means


def pool_rows(timing: Timing, before: Any) -> list[Row]:
    """All poolings on the map of a ResNet-50."""
    pools = peers(2048) | {'the default': GlobalROTPool2d()}
    compiled = torch.compile(GlobalROTPool2d(), fullgraph=True, dynamic=True)
    pools |= {name: GlobalROTPool2d(MEAN | options) for name, options in OTHERS.items()}
    pools['the default, compiled'] = compiled
    if before is not None:
        pools['before: the default'] = before.GlobalROTPool2d()
        pools |= {f'before: {name}': before.GlobalROTPool2d(options) for name, options in OTHERS_BEFORE.items()}
    return cost_rows('(32, 2048, 7, 7)', pools, torch.randn(32, 2048, 7, 7).abs().requires_grad_(), timing)


def local_rows(timing: Timing, before: Any) -> list[Row]:
    pools: dict[str, nn.Module] = {'average': nn.AvgPool2d(3, 2), 'max': nn.MaxPool2d(3, 2), 'GeM': LocalGeM()}
    for solver in ('sinkhorn', 'badmm-e'):
        pools[solver] = LocalROTPool2d(3, 2, options=solver)
        if before is not None:
            pools[f'before: {solver}'] = before.LocalROTPool2d(solver, kernel_size=3, stride=2)
    maps = torch.randn(8, 64, 112, 112).requires_grad_()
    return cost_rows('(8, 64, 112, 112), 3×3 stride 2', pools, maps, timing)


def step_share(timing: Timing) -> str:
    """The share of the default in a training step of ResNet-50 at 224 px, batch 32."""
    import timm

    model = timm.create_model('resnet50').train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(32, 3, 224, 224), torch.randint(1000, (32,))

    def step() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    maps = torch.randn(32, 2048, 7, 7).abs().requires_grad_()
    pools = {'average': nn.AdaptiveAvgPool2d(1), 'GeM': GeM(), 'the default': GlobalROTPool2d()}
    steps = {'step': step} | {name: training_step(pool, maps) for name, pool in pools.items()}
    times = fastest(steps, timing._replace(repeats=min(timing.repeats, 5)))
    shares = ', '.join(f'{name} {100 * times[name] / times["step"]:.2f} %' for name in pools)
    return f'Of a ResNet-50 training step at 224 px, batch 32 ({times["step"]:.2f} s): {shares}.'


def processor() -> str:
    """The processor's name, for the reader of the table."""
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(':')[1].strip() for line in lines if line.startswith('model name')), platform.machine())


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, as in a long training run; fresh pages cost time at each use."""
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None:
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: what may be free at the end of the heap
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: from which size on a block is the system's; glibc takes no more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--repeats', type=int, default=15)
    parser.add_argument('--clock', choices=CLOCKS, default='wall', help="'cpu' for a machine that is busy otherwise")
    parser.add_argument('--before', type=Path, help='a checkout of another commit, whose layers are timed in turns')
    parser.add_argument('--tables', nargs='+', default=['layouts', 'pools', 'local', 'step'])
    parser.add_argument('--output', type=Path, default=Path(__file__).parent / 'results', help='directory to write to')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    timing = Timing(CLOCKS[args.clock], args.repeats)
    before = layers_before(args.before) if args.before else None
    torch.manual_seed(0)
    vectors = torch.backends.cpu.get_cpu_capability()
    machine = f'{processor()} ({vectors}), {args.threads} threads, torch {torch.__version__}, float32'
    parts = [f'# What pooling costs\n\n{machine}. Forward and backward, the fastest of several runs.']
    for name, table in {'layouts': layout_rows, 'pools': pool_rows, 'local': local_rows}.items():
        if name in args.tables:
            parts.append(to_markdown(table(timing, before)))
            print(parts[-1], flush=True)
    if 'step' in args.tables:
        parts.append(step_share(timing))
    args.output.mkdir(parents=True, exist_ok=True)
    write_atomically(args.output / 'speed.md', '\n\n'.join(parts) + '\n')
    print('\n\n'.join(parts))


if __name__ == '__main__':
    main()
