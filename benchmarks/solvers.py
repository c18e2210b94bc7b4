"""What each solver costs, as a multiple of average pooling in the same run: a Markdown table on stdout.

    python -m benchmarks.solvers --threads 1 --repeats 9

Candidates take turns within every repeat and the median counts, so that a busy machine disturbs all alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rotp_vision.core import Solver, StepWeights, rot_pool, rot_problem

SHAPES = [(32, 512, 49), (32, 2048, 49)]
NUM_MODULES = 4
ALPHA = {'smoothness': 1.0, 'feature_penalty': 1.0, 'sample_penalty': 1.0}


def candidates() -> dict[str, Callable[[Tensor], Tensor]]:
    """Name to pooling of a map (B, C, H, W); weights are learnable, as in a layer."""

    def pooling(solver: Solver, num_modules: int, **weights: float) -> Callable[[Tensor], Tensor]:
        tensors = {name: torch.full((num_modules,), value, requires_grad=True) for name, value in weights.items()}
        steps = StepWeights(**tensors)

        def run(maps: Tensor) -> Tensor:
            x = maps.flatten(2)
            return rot_pool(x, rot_problem(x), steps, solver)

        return run

    sinkhorn = Solver('sinkhorn', num_inner=NUM_MODULES)
    result: dict[str, Callable[[Tensor], Tensor]] = {
        'average': nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        f'sinkhorn, {NUM_MODULES} steps': pooling(sinkhorn, 1, **ALPHA),
    }
    for name in ('badmm-e', 'badmm-q'):
        for coupled in (False, True):
            result[f'{"coupled " if coupled else ""}{name}, {NUM_MODULES} modules'] = pooling(
                Solver(name, coupled=coupled), NUM_MODULES, step=1.0, **ALPHA
            )
    result[f'sinkhorn, {NUM_MODULES} modules × {NUM_MODULES} steps, structure'] = pooling(
        sinkhorn, NUM_MODULES, structure=0.1, proximal=1.0, **ALPHA
    )
    result[f'badmm-e, {NUM_MODULES} modules, structure'] = pooling(
        Solver('badmm-e'), NUM_MODULES, structure=0.1, step=1.0, **ALPHA
    )
    return result


def seconds(run: Callable[[], object], number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        run()
    return (time.perf_counter() - start) / number


def saved_bytes(pooling: Callable[[Tensor], Tensor], maps: Tensor) -> int:
    """Bytes that the backward pass keeps alive; a storage shared by several saved tensors counts once."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pooling(maps)
    return sum(storage.nbytes() for storage in storages.values())


def measure(shape: tuple[int, int, int], repeats: int) -> None:
    batch, channels, samples = shape
    side = int(samples**0.5)
    maps = torch.randn(batch, channels, side, side, requires_grad=True)
    poolings = candidates()
    times: dict[tuple[str, bool], list[float]] = {}
    for repeat in range(-1, repeats):  # the first is to warm up
        for name, pooling in poolings.items():
            number = 20 if name == 'average' else 1

            def forward(pooling: Callable[[Tensor], Tensor] = pooling) -> Tensor:
                with torch.no_grad():
                    return pooling(maps)

            def both(pooling: Callable[[Tensor], Tensor] = pooling) -> None:
                pooling(maps).sum().backward()
                maps.grad = None

            for backward, run in ((False, forward), (True, both)):
                if repeat >= 0:
                    times.setdefault((name, backward), []).append(seconds(run, number))
                else:
                    run()
    median = {key: statistics.median(values) for key, values in times.items()}
    unit = maps.numel() * maps.element_size()
    print(f'\n### (B, D, N) = {shape}\n')
    print('| solver | forward, × average | forward + backward, × average | saved for backward, × X |')
    print('| --- | ---: | ---: | ---: |')
    for name, pooling in poolings.items():
        ratios = [median[name, backward] / median['average', backward] for backward in (False, True)]
        print(f'| {name} | {ratios[0]:.1f} | {ratios[1]:.1f} | {saved_bytes(pooling, maps) / unit:.1f} |', flush=True)
    print(f'\nAverage pooling: {median["average", False] * 1e6:.0f} µs, {median["average", True] * 1e6:.0f} µs.')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--threads', type=int, default=1, help='threads that torch may use')
    parser.add_argument('--repeats', type=int, default=9, help='how often each candidate is timed')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f'torch {torch.__version__}, {args.threads} thread(s), median of {args.repeats}')
    for shape in SHAPES:
        measure(shape, args.repeats)


if __name__ == '__main__':
    main()
