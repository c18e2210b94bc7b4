"""What pooling does to real networks on images that they have not seen: stage 2 from kept maps, several seeds.

    python -m benchmarks.evidence --data ../shared/data

Backbone and classifier stay as they are; only the pooling is fitted, on some of the images, and judged on others.
Each fitted pooling is kept in `--output`, so that a run that was stopped goes on where it was. With
`--small-objects` also small networks on generated images, by the size of the object. With
`--page benchmarks/EVIDENCE.md` the tables and plots of that page are renewed.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import torch
from matplotlib.figure import Figure

from benchmarks import small_objects
from benchmarks.evidence_poolings import (
    AVERAGE,
    AVERAGE_GAIN,
    GEM_GAIN,
    POOLINGS,
    Outcome,
    Recipe,
    calibration_error,
    fit,
    judge,
    paired_test,
    per_image,
    split,
    weights_of,
)
from benchmarks.paper import Results, renew_page
from benchmarks.real_data import NETWORKS, Network, add_data_arguments, build, maps_of
from rotp_vision.files import replacing

# What every pooling is tested against; the page shows the first three, the CSV all.
REFERENCES = (AVERAGE, AVERAGE_GAIN, GEM_GAIN, 'GeM p = 1.5, gain', 'Sinkhorn rms, gain')


def outcomes_of(network: Network, args: argparse.Namespace, recipe: Recipe) -> dict[str, list[tuple[Outcome, str]]]:
    """(outcome, learned weights) of every pooling, seed by seed; those that are kept are not made again."""
    kept = args.output / 'fitted'
    kept.mkdir(parents=True, exist_ok=True)
    setting = '-'.join(f'{value:g}' for value in recipe)
    paths = {
        (seed, name): kept / f'{network.builder}-{args.limit or "all"}-{setting}-{seed}-{name}.pt'
        for seed in range(args.seeds)
        for name in POOLINGS
    }
    if not args.finished_only and not all(path.exists() for path in paths.values()):
        model = build(network, args.data).requires_grad_(False)
        maps, labels = maps_of(network, model, args.data, args.cache, args.limit)
        classifier = model.get_classifier()  # pyright: ignore[reportCallIssue]
        for (seed, name), path in paths.items():
            if path.exists():
                continue
            torch.manual_seed(seed)
            to_fit, to_judge = split(len(labels), recipe, seed)
            pool = POOLINGS[name](maps.shape[1])
            fit(pool, classifier, maps, labels, to_fit, recipe, seed)
            outcome = judge(pool, classifier, maps, labels, to_judge)
            with replacing(path) as temporary:
                torch.save({'outcome': tuple(outcome), 'weights': weights_of(pool)}, temporary)
            print(
                f'{network.name}, seed {seed}, {name}: cross-entropy {outcome.loss.mean():.4f}, '
                f'top-1 {100 * outcome.top1.mean():.2f}; {weights_of(pool)}',
                flush=True,
            )
    results = {}
    for name in POOLINGS:
        files = [paths[seed, name] for seed in range(args.seeds)]
        if all(file.exists() for file in files):
            runs = [torch.load(file, weights_only=True) for file in files]
            results[name] = [(Outcome(*run['outcome']), run['weights']) for run in runs]
    return results


def with_error(values: Sequence[float], digits: int) -> str:
    """Mean ± standard error over the seeds."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f'{mean(values):.{digits}f} ± {error:.{digits}f}'


def summarize(network: str, fitted: dict[str, list[tuple[Outcome, str]]]) -> tuple[list[dict], list[dict]]:
    """Rows in full, and rows to read; best cross-entropy first."""
    outcomes = {name: [outcome for outcome, _ in runs] for name, runs in fitted.items()}
    num_images = 1 + max(int(outcome.index.max()) for runs in outcomes.values() for outcome in runs)
    full, readable = [], []
    for name, runs in outcomes.items():
        metrics = {
            'top-1 %': [100 * float(run.top1.mean()) for run in runs],
            'top-5 %': [100 * float(run.top5.mean()) for run in runs],
            'cross-entropy': [float(run.loss.mean()) for run in runs],
            'ECE %': [100 * calibration_error(run.confidence, run.top1) for run in runs],
        }
        tests = {}
        for reference in REFERENCES:
            if reference in outcomes:
                for field, scale in (('loss', 1), ('top1', 100)):
                    change, error, p = paired_test(per_image(runs, outcomes[reference], field, num_images))
                    tests[reference, field] = (scale * change, scale * error, p)
        row = {'network': network, 'pooling': name}
        for key, values in metrics.items():
            row[key] = mean(values)
            row[f'{key} standard error'] = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        for (reference, field), test in tests.items():
            for key, value in zip(('minus', 'standard error to', 'p to'), test, strict=True):
                row[f'{field} {key} {reference}'] = value
        full.append(row | {'weights': ' | '.join(weights for _, weights in fitted[name])})
        digits = {'cross-entropy': 4}
        line = {'pooling': name} | {key: with_error(values, digits.get(key, 2)) for key, values in metrics.items()}
        for (reference, field), (change, _, p) in tests.items():
            same = name == reference
            if field == 'loss' and reference in REFERENCES[:3]:
                line[f'Δ cross-entropy to {reference}'] = '' if same else f'{change:+.4f} (p {p:.2g})'
            elif reference == AVERAGE:
                line[f'Δ top-1 to {reference}'] = '' if same else f'{change:+.2f} (p {p:.2g})'
        readable.append(line)
    order = sorted(range(len(full)), key=lambda i: full[i]['cross-entropy'])
    return [full[i] for i in order], [readable[i] for i in order]


def draw(tables: dict[str, list[dict]]) -> Figure:
    """Cross-entropy against that of average pooling on the same images, by pooling; what is far worse is cut off."""
    figure = Figure(figsize=(6.4 * len(tables), 6.4), layout='constrained')
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for axes, (network, rows) in zip(panels, tables.items(), strict=True):
        changes = [row[f'loss minus {AVERAGE}'] for row in rows]
        limit = 1.3 * max(-min(changes), 0.01)
        for y, (row, change) in enumerate(zip(rows, changes, strict=True)):
            if change > limit:
                axes.text(limit, y, f'{change:+.2f} →', ha='right', va='center')
            else:
                error = 1.96 * row[f'loss standard error to {AVERAGE}']
                axes.errorbar(change, y, xerr=error, fmt='o', color='#0072B2', capsize=3)
        axes.axvline(0, color='grey', linestyle='--', linewidth=1)
        axes.set_yticks(range(len(rows)), [f'{row["pooling"]}   {row["cross-entropy"]:.4f}' for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set(title=network, xlabel='cross-entropy minus average pooling', xlim=(-1.7 * limit, limit))
    return figure


def main(arguments: Sequence[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_arguments(parser)
    builders = [network.builder for network in NETWORKS]
    parser.add_argument('--networks', nargs='+', choices=builders, default=builders)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--output', type=Path, default=Path('runs/evidence'), help='directory for tables and plots')
    parser.add_argument('--page', type=Path, help='Markdown page whose marked tables and plots are renewed')
    parser.add_argument('--finished-only', action='store_true', help='fit nothing more, report what is kept')
    parser.add_argument('--small-objects', action='store_true', help='also the generated small objects')
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    results = Results(args.output)
    tables = {}
    for network in NETWORKS:
        if network.builder in args.networks:
            fitted = outcomes_of(network, args, Recipe())
            if AVERAGE in fitted:
                full, readable = summarize(network.name, fitted)
                tables[network.name] = full
                results.table(network.builder, full, poolings=readable)
    if tables:
        results.figure('poolings', draw(tables))
    if args.small_objects:
        small_objects.report(results)
    if args.page is not None:
        renew_page(args.page, results, 'evidence')
    print(f'tables and plots are in {args.output}')


if __name__ == '__main__':
    main()
