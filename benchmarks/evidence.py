"""Where a pooling pays: frozen networks used as they were trained, and used differently, on images not fitted.

    python -m benchmarks.evidence --data DIRECTORY --page benchmarks/EVIDENCE.md

The protocol is on that page. Maps are kept in `--cache` and what was judged in `--output`, so that a run that was
stopped goes on where it was, and no pooling is judged twice. With `--finished-only` it reports what there is.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import evidence_boxes, evidence_classes, evidence_report
from benchmarks.evidence_poolings import (
    ALONE,
    AVERAGE_GAIN,
    GEM,
    OURS,
    PEERS,
    Maps,
    Outcome,
    calibrated,
    judge_ours,
    judge_peers,
)
from benchmarks.paper import Results, renew_page
from benchmarks.real_data import NETWORKS, SMALL, Network, add_data_arguments, build, maps_of
from rotp_vision.files import replacing
from rotp_vision.layers import ROTPool
from rotp_vision.surgery.head import find_global_pool

PLAIN, TWO_SCALES, LARGE_VIEW = 'plain', '224 + 384', '384 whole'
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
        return maps_of(
            network, model, args.data, args.cache, min(filter(None, (limit, args.limit)), default=None), name
        )

    if task == TWO_SCALES:  # each view is made from the photo
        (small, _), (large, labels) = made(PLAIN, None), made(LARGE_VIEW, None if network.name in CHEAP else SHIFTED)
        return Maps([small[: len(large)], large], labels)
    maps, labels = made(task, None if task == PLAIN else SHIFTED)
    return Maps([maps], labels)


def run_task(network: Network, model: nn.Module, task: str, args: argparse.Namespace) -> dict[str, Any]:
    """Fit and judge every pooling."""
    maps = task_maps(network, model, task, args)
    fit, judged = split(len(maps.labels), args.fit)
    ours, report = calibrated(model, maps, fit)
    _, pool = find_global_pool(ours)
    outcomes = judge_peers(list(PEERS), model.get_classifier(), maps, fit, judged)  # pyright: ignore
    outcomes[OURS] = judge_ours(ours, maps, judged, report)
    large = {}
    if task == TWO_SCALES:
        alone = maps._replace(views=maps.views[1:])
        large = judge_peers([AVERAGE_GAIN, GEM], model.get_classifier(), alone, fit, judged)  # pyright: ignore
        ours_alone, report_alone = calibrated(model, alone, fit)
        large[OURS] = judge_ours(ours_alone, alone, judged, report_alone)
    return {
        'outcomes': {name: tuple(outcome) for name, outcome in outcomes.items()},
        'large view alone': {name: tuple(outcome) for name, outcome in large.items()},
        'judged': judged,
        'report': str(report),
        'pool': {'options': pool.options.to_dict(), 'weights': weights_of(pool)},
    }


def weights_of(pool: ROTPool) -> dict[str, Any]:
    return {name: value.tolist() for name, value in pool.named_weights().items()}


def kept(path: Path, finished_only: bool, make: Any) -> dict[str, Any] | None:
    """What is in a file; if it is not there, it is made, unless only what is finished is wanted."""
    if not path.exists():
        if finished_only:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        wall, processor = time.perf_counter(), time.process_time()
        made = make()
        minutes = (time.perf_counter() - wall) / 60, (time.process_time() - processor) / 60
        with replacing(path) as temporary:
            torch.save(made, temporary)
        print(
            f'{path.stem}: {minutes[0]:.1f} minutes, {minutes[1]:.1f} of one core\n{made.get("report", "")}\n',
            flush=True,
        )
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
    boxes: list[dict[str, Any]] = []
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
                alone = {name: Outcome(*values) for name, values in found['large view alone'].items()}
                scales += evidence_report.two_scales(network.name, outcomes, alone)
            if task == PLAIN:
                areas = evidence_boxes.areas_of(network, args.data, args.limit)[found['judged']]
                settings += evidence_report.by_area(network.name, outcomes, areas)
                path = args.output / 'judged' / f'{builder}-boxes.pt'
                boxes += (
                    kept(path, args.finished_only, lambda: evidence_boxes.measure(network, model, found, args)) or {}  # noqa: B023
                ).get('rows', [])
        settings += evidence_classes.run(network, model, args, kept)
    evidence_report.write(results, settings, boxes, scales)
    if args.page is not None:
        renew_page(args.page, results, 'evidence')
    print(f'tables and plots are in {args.output}')


if __name__ == '__main__':
    main()
