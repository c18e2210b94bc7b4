"""Where a pooling pays: frozen networks, used as they were trained and differently, judged on held-out images.

    python -m benchmarks.evidence --data DIRECTORY --page benchmarks/EVIDENCE.md

The protocol is on that page. Maps are cached in `--cache` and judgements in `--output`, so that an interrupted run
resumes and no pooling is judged twice. `--finished-only` reports only what is finished.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import evidence_classes, evidence_report
from benchmarks.evidence_poolings import (
    ALONE,
    AVERAGE_GAIN,
    GEM,
    INSTALLED,
    OURS,
    PEERS,
    Maps,
    Outcome,
    judge_ours,
    judge_peers,
)
from benchmarks.paper import Results, renew_page
from benchmarks.real_data import NETWORKS, SMALL, Network, add_data_arguments, areas_of, build, maps_of
from rotp_vision.files import replacing

PLAIN, TWO_SCALES, LARGE = 'plain', '224 + 384', '384 whole'
OTHER_SIZES = ('160', '288', '384')
TASKS = (PLAIN, *OTHER_SIZES, *SMALL, TWO_SCALES)
CHEAP = ('EfficientNet-Lite0',)  # networks whose two scales take all images
FIT = 500  # images that a pooling is fitted on
SHIFTED = 1200  # images of a task with shifted images; those that do not fit judge
SEED = 22  # 20 and 21 in earlier runs


def split(num_images: int, fit: int = FIT) -> tuple[Tensor, Tensor]:
    """Indices of the images to fit on and of those to judge on."""
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(SEED))
    return order[:fit], order[fit:].sort().values


def task_maps(network: Network, model: nn.Module, task: str, args: argparse.Namespace) -> Maps:
    def made(name: str, limit: int | None) -> tuple[Tensor, Tensor]:
        least = min(filter(None, (limit, args.limit)), default=None)
        return maps_of(network, model, args.data, args.cache, least, name)

    if task == TWO_SCALES:  # each size is made from the photo
        (small, _), (large, labels) = made(PLAIN, None), made(LARGE, None if network.name in CHEAP else SHIFTED)
        return Maps([small[: len(large)], large], labels)
    maps, labels = made(task, None if task == PLAIN else SHIFTED)
    return Maps([maps], labels)


def run_task(network: Network, model: nn.Module, task: str, args: argparse.Namespace) -> dict[str, Any]:
    """Fit and judge every pooling."""
    maps = task_maps(network, model, task, args)
    fit, judged = split(len(maps.labels), args.fit)
    outcomes = judge_peers(list(PEERS), model.get_classifier(), maps, fit, judged)  # pyright: ignore
    outcomes[OURS], _ = judge_ours(model, maps, fit, judged)
    outcomes[INSTALLED], report = judge_ours(model, maps, fit, judged, only='')
    large = {}
    if task == TWO_SCALES:
        alone = maps._replace(sizes=maps.sizes[1:])
        large = judge_peers([AVERAGE_GAIN, GEM], model.get_classifier(), alone, fit, judged)  # pyright: ignore
        large[OURS], _ = judge_ours(model, alone, fit, judged)
    return {
        'outcomes': {name: tuple(outcome) for name, outcome in outcomes.items()},
        'large size alone': {name: tuple(outcome) for name, outcome in large.items()},
        'judged': judged,
        'report': report,
    }


def kept(path: Path, finished_only: bool, make: Any) -> dict[str, Any] | None:
    """The content of a file, made first if it does not exist; None if `finished_only` and it does not exist."""
    if not path.exists():
        if finished_only:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        wall, processor = time.perf_counter(), time.process_time()
        made = make()
        minutes = (time.perf_counter() - wall) / 60, (time.process_time() - processor) / 60
        with replacing(path) as temporary:
            torch.save(made, temporary)
        print(f'{path.stem}: {minutes[0]:.1f} minutes, {minutes[1]:.1f} of one core', flush=True)
        print(f'{made.get("report", "")}\n', flush=True)
    return torch.load(path, weights_only=True)


def main(arguments: Sequence[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_arguments(parser)
    networks = {network.builder: network for network in NETWORKS if network.size == 224}
    parser.add_argument('--networks', nargs='+', choices=list(networks), default=list(networks))
    parser.add_argument('--tasks', nargs='*', choices=TASKS, default=TASKS)
    parser.add_argument('--classes', nargs='*', choices=evidence_classes.DATASETS, default=evidence_classes.DATASETS)
    parser.add_argument('--fit', type=int, default=FIT, help='images that a pooling is fitted on')
    parser.add_argument('--output', type=Path, default=Path('runs/evidence'), help='directory for what is judged')
    parser.add_argument('--page', type=Path, help='Markdown page whose marked tables and plots are renewed')
    parser.add_argument('--finished-only', action='store_true', help='judge nothing more, report what is kept')
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    results = Results(args.output)
    settings: list[evidence_report.Setting] = []
    scales: list[dict[str, Any]] = []
    for builder in args.networks:
        network = networks[builder]
        model = build(network, args.data).requires_grad_(False)
        for task in args.tasks:
            path = args.output / 'judged' / f'{builder}-{task}.pt'
            found = kept(path, args.finished_only, lambda: run_task(network, model, task, args))  # noqa: B023
            if found is None:
                continue
            outcomes = {name: Outcome(*values) for name, values in found['outcomes'].items()}
            outcomes[ALONE] = outcomes[OURS]  # they differ for new classes alone
            settings.append(evidence_report.frozen(network.name, task, outcomes))
            if task == TWO_SCALES:
                alone = {name: Outcome(*values) for name, values in found['large size alone'].items()}
                scales += evidence_report.two_scales(network.name, outcomes, alone)
            if task == PLAIN:
                areas = areas_of(network, args.data, args.limit)[found['judged']]
                settings += evidence_report.by_area(network.name, outcomes, areas)
        settings += evidence_classes.run(network, model, args, kept)
    evidence_report.write(results, settings, scales)
    if args.page is not None:
        renew_page(args.page, results, 'evidence')
    print(f'tables and plots are in {args.output}')


if __name__ == '__main__':
    main()
