"""What pooling costs: time as a multiple of average pooling and of GeM, memory as a multiple of the map.

    python -m benchmarks.speed                   # everything; writes speed.csv, speed.md, speed.png
    python -m benchmarks.speed --no-step --repeats 5

All rows of a table are timed in turn, in one process, forward and backward, and the medians compared, so that whatever
else the machine does falls on all alike. Memory that was freed is kept, as in a training run that has reached its size:
otherwise what allocates much, such as GeM, takes up to twice as long, by chance. No multiple carries over to another
machine: average pooling reads memory and hardly computes, so that wider vectors make everything else cheaper beside it.
The table names the processor and its vectors. After other poolings come the layers as users get them, the default
first, then the solvers alone, on the features as they are.
"""

import argparse
import ctypes
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib
import timm
import torch
from timm.layers import AttentionPool2d, LsePlus2d, SimPool2d
from torch import Tensor, nn

from benchmarks.tables import to_csv, to_markdown
from rotp_vision.core import Solver, StepWeights, rot_pool, rot_problem
from rotp_vision.files import write_atomically
from rotp_vision.layers import GlobalROTPool2d, LocalROTPool2d

matplotlib.use('Agg')
import matplotlib.pyplot as plt

Row = dict[str, str | float]
CLOCKS = {'wall': time.perf_counter, 'cpu': time.process_time}


class Timing(NamedTuple):
    now: Callable[[], float]
    repeats: int


START = 0.6931  # softplus(0), the paper's starting value of every weight

# How fast each must be at least, × average pooling, at (32, 512, 7, 7) and (32, 2048, 7, 7).
SOLVERS = {
    'BADMM-E, 4 modules': (Solver('badmm-e'), 4, False, (55, 65)),
    'BADMM-Q, 4 modules': (Solver('badmm-q'), 4, False, (75, 85)),
    'Sinkhorn, 4 iterations': (Solver('sinkhorn', num_inner=4), 1, False, (45, 55)),
    'BADMM-E with structure, 4 modules': (Solver('badmm-e'), 4, True, (180, 190)),
    'coupled BADMM-E, 4 modules': (Solver('badmm-e', coupled=True), 4, False, (80, 90)),
}


# Layers as users get them: the default, then other views and solvers with a gain.
LAYERS = {
    'GlobalROTPool2d, the default': {},
    'GlobalROTPool2d, view log': {'view': 'log'},
    'GlobalROTPool2d, view identity': {'view': 'identity'},
    'GlobalROTPool2d, badmm-e': {'solver': 'badmm-e'},
    'GlobalROTPool2d, badmm-e, view log': {'solver': 'badmm-e', 'view': 'log'},
}

# The other operators, for which no limit was set.
OTHERS = {
    'coupled BADMM-Q, 4 modules': (Solver('badmm-q', coupled=True), 4, False, None),
    'coupled BADMM-E with structure, 4 modules': (Solver('badmm-e', coupled=True), 4, True, None),
    'Sinkhorn with structure, 4 modules of 4 iterations': (Solver('sinkhorn', num_inner=4), 4, True, None),
}


class CorePool(nn.Module):
    """rot_pool of a map, with learnable weights and nothing else."""

    def __init__(self, solver: Solver, num_modules: int, structure: bool):
        super().__init__()
        self.solver = solver
        names = ['smoothness', 'feature_penalty', 'sample_penalty', 'step', *(['structure'] if structure else [])]
        self.weights = nn.ParameterDict({name: torch.full((num_modules,), START) for name in names})

    def forward(self, maps: Tensor) -> Tensor:
        problem = rot_problem(maps.flatten(2))
        return rot_pool(problem, StepWeights(**self.weights), self.solver)


class GeM(nn.Module):
    """Generalized mean with a learnable exponent."""

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
        plan = ot.batch.solve_batch(-x, reg=START, max_iter=4, tol=0.0, grad='autodiff').plan
        return (x * plan).sum(2) / plan.sum(2)


def has_pot() -> bool:
    return importlib.util.find_spec('ot') is not None


def peers(channels: int) -> dict[str, nn.Module]:
    pools = {
        'average (AdaptiveAvgPool2d)': nn.AdaptiveAvgPool2d(1),
        'softmax': SoftmaxPool(),
        'GeM': GeM(),
        'timm LsePlus2d': LsePlus2d(),
        'timm SimPool2d': SimPool2d(channels),
        'timm AttentionPool2d': AttentionPool2d(channels, feat_size=7),
    }
    return pools | ({'POT batched Sinkhorn, 4 iterations': POTSinkhorn()} if has_pot() else {})


def step_of(pool: nn.Module, maps: Tensor) -> Callable[[], None]:
    """Forward and backward, the way a training step meets them."""
    towards = torch.randn_like(pool(maps))
    inputs = [maps, *pool.parameters()]

    def step() -> None:
        torch.autograd.grad(pool(maps), inputs, towards, allow_unused=True)

    return step


def inference_of(pool: nn.Module, maps: Tensor) -> Callable[[], None]:
    """Forward alone."""

    def step() -> None:
        with torch.no_grad():
            pool(maps)

    return step


def medians(steps: dict[str, Callable[[], None]], timing: Timing) -> dict[str, float]:
    """Seconds of each step, all taking turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(timing.repeats + 2):
        for name, step in steps.items():
            start = timing.now()
            step()
            if i >= 2:
                times[name].append(timing.now() - start)
    return {name: statistics.median(values) for name, values in times.items()}


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


def cost_rows(shape: str, pools: dict[str, nn.Module], maps: Tensor, must: dict[str, int], timing: Timing) -> list[Row]:
    """A row for each pool; the first is the average that the others are compared with."""
    times = medians({name: step_of(pool, maps) for name, pool in pools.items()}, timing)
    inference = medians({name: inference_of(pool, maps) for name, pool in pools.items()}, timing)
    average = next(iter(pools))
    return [
        {
            'map': shape,
            'pooling': name,
            '× average': times[name] / times[average],
            '× GeM': times[name] / times['GeM'],
            'must reach': must.get(name, ''),
            'inference × average': inference[name] / inference[average],
            'saved × map': saved_multiple(pool, maps),
            'ms': 1e3 * times[name],
        }
        for name, pool in pools.items()
    ]


def global_rows(channels: int, timing: Timing, *, reference: bool) -> list[Row]:
    maps = torch.randn(32, channels, 7, 7).abs().requires_grad_()
    pools = peers(channels)
    pools |= {name: GlobalROTPool2d(options) for name, options in LAYERS.items()}
    must = {}
    for name, (solver, num_modules, structure, limits) in (SOLVERS | OTHERS).items():
        pools[name] = CorePool(solver, num_modules, structure)
        if limits is not None:
            must[name] = limits[channels == 2048]
        if reference:
            pools[f'{name}, plain autograd'] = CorePool(solver._replace(backend='reference'), num_modules, structure)
    return cost_rows(f'(32, {channels}, 7, 7)', pools, maps, must, timing)


def local_rows(timing: Timing) -> list[Row]:
    maps = torch.randn(8, 64, 112, 112).requires_grad_()
    pools: dict[str, nn.Module] = {
        'average (AvgPool2d)': nn.AvgPool2d(3, 2),
        'max (MaxPool2d)': nn.MaxPool2d(3, 2),
        'GeM': LocalGeM(),
    }
    ours = {f'LocalROTPool2d, {name}': name for name in ('badmm-e', 'sinkhorn')}
    for label, solver in ours.items():
        pools[label] = LocalROTPool2d({'solver': solver}, kernel_size=3, stride=2)
    return cost_rows('(8, 64, 112, 112), 3×3 stride 2', pools, maps, dict.fromkeys(ours, 28), timing)


def growth_rows(timing: Timing) -> list[Row]:
    """How much more each costs when one thing doubles."""
    rows: list[Row] = []
    base = {'B': 32, 'C': 512, 'H·W': 49, 'modules': 4}
    for name, (solver, num_modules, structure, _) in SOLVERS.items():
        steps = {}
        for doubled in (None, *base):
            size = {key: value * (1 + (key == doubled)) for key, value in base.items()}
            maps = torch.randn(size['B'], size['C'], 1, size['H·W']).abs().requires_grad_()
            if solver.name == 'sinkhorn':
                pool = CorePool(solver._replace(num_inner=size['modules']), num_modules, structure)
            else:
                pool = CorePool(solver, size['modules'], structure)
            steps[doubled or 'base'] = step_of(pool, maps)
        times = medians(steps, timing)
        rows.append({'pooling': name} | {f'2 × {key}': times[key] / times['base'] for key in base})
    return rows


def spread_rows(timing: Timing) -> list[Row]:
    """How much more each costs on features that are larger: of a trained network the largest may be in the hundreds."""
    rows: list[Row] = []
    maps = {scale: (scale * torch.randn(32, 512, 7, 7)).relu().requires_grad_() for scale in (1, 10, 100)}
    for name, (solver, num_modules, structure, _) in SOLVERS.items():
        pool = CorePool(solver, num_modules, structure)
        times = medians({str(scale): step_of(pool, x) for scale, x in maps.items()}, timing)
        rows.append({'pooling': name} | {f'{scale} × features': times[str(scale)] / times['1'] for scale in (10, 100)})
    return rows


def resnet_step() -> Callable[[], None]:
    """A training step of ResNet-50 at 224 px, batch 32."""
    model = timm.create_model('resnet50').train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(32, 3, 224, 224), torch.randint(1000, (32,))

    def step() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_shares(timing: Timing) -> tuple[float, dict[str, float]]:
    """Seconds of a training step, and each pooling's share of it in % on a map such as it ends with, taking turns."""
    maps = torch.randn(32, 2048, 7, 7).abs().requires_grad_()
    pools = {name: CorePool(*solver[:3]) for name, solver in SOLVERS.items()}
    pools = {'average (AdaptiveAvgPool2d)': nn.AdaptiveAvgPool2d(1), 'GeM': GeM()} | pools
    steps = {name: step_of(pool, maps) for name, pool in pools.items()}
    times = medians({'step': resnet_step()} | steps, timing)
    return times['step'], {name: 100 * times[name] / times['step'] for name in pools}


def plot(rows: list[Row], path: Path) -> None:
    shapes = list(dict.fromkeys(str(row['map']) for row in rows))
    bars = [sum(row['map'] == shape for row in rows) + 3 for shape in shapes]  # and room for title and axis
    figure, axes = plt.subplots(
        len(shapes),
        1,
        figsize=(9, 0.25 * sum(bars)),
        layout='constrained',
        squeeze=False,
        gridspec_kw={'height_ratios': bars},
    )
    for axis, shape in zip(axes[:, 0], shapes, strict=True):
        ours = [row for row in rows if row['map'] == shape]
        values = [float(row['× average']) for row in ours]
        drawn = axis.barh([str(row['pooling']) for row in ours], values)
        axis.bar_label(drawn, [f'{value:.3g}' for value in values], padding=3)
        axis.invert_yaxis()
        axis.set(xscale='log', xlabel='forward + backward, × average pooling', title=shape, xlim=(0.5, 2 * max(values)))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def processor() -> str:
    """The processor's name, for the reader of the table."""
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(':')[1].strip() for line in lines if line.startswith('model name')), platform.machine())


def keep_freed_memory() -> None:
    """Let glibc, where it is, give no memory back to the system, whose fresh pages would cost time at each use."""
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None:
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: what may be free at the end of the heap
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: from which size on a block is the system's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--repeats', type=int, default=15)
    parser.add_argument('--clock', choices=CLOCKS, default='wall', help="'cpu' for a machine that is busy otherwise")
    parser.add_argument('--output', type=Path, default=Path(__file__).parent / 'results', help='directory to write to')
    parser.add_argument('--no-reference', action='store_true', help='leave out the plain autograd path')
    parser.add_argument('--no-growth', action='store_true', help='leave out what happens when a size or features grow')
    parser.add_argument('--no-step', action='store_true', help='leave out the share of a ResNet-50 training step')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    timing = Timing(CLOCKS[args.clock], args.repeats)
    torch.manual_seed(0)

    rows = [r for channels in (512, 2048) for r in global_rows(channels, timing, reference=not args.no_reference)]
    rows += local_rows(timing)
    vectors = torch.backends.cpu.get_cpu_capability()
    machine = f'{processor()} ({vectors}), {args.threads} threads, torch {torch.__version__}, float32'
    parts = [f'# What pooling costs\n\n{machine}. Forward and backward, medians.']
    if not has_pot():
        parts.append('POT is not installed: its row is missing.')
    if not args.no_step:
        seconds, shares = step_shares(timing._replace(repeats=min(timing.repeats, 7)))
        for row in rows:
            known = str(row['map']).startswith('(32, 2048')
            row['% of a ResNet-50 step'] = shares.get(str(row['pooling']), '') if known else ''
        parts.append(f'A ResNet-50 training step at 224 px, batch 32, took {seconds:.2f} s in turns with its share.')
    parts.append(to_markdown(rows))
    if not args.no_growth:
        parts.append(
            '## Growth when one size doubles, from (32, 512, 49), × time\n\n' + to_markdown(growth_rows(timing))
        )
        parts.append('## Growth when features do, from normal ones, × time\n\n' + to_markdown(spread_rows(timing)))

    args.output.mkdir(parents=True, exist_ok=True)
    write_atomically(args.output / 'speed.csv', to_csv(rows))
    write_atomically(args.output / 'speed.md', '\n\n'.join(parts) + '\n')
    plot(rows, args.output / 'speed.png')
    print('\n\n'.join(parts))


if __name__ == '__main__':
    main()
