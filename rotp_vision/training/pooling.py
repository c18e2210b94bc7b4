"""Calibration of the pooling before and after stage 2, on images that are held out, and simpler poolings beside it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn

from rotp_vision.calibration import Calibration, calibrate, fit_gain
from rotp_vision.calibration.scores import gem
from rotp_vision.data.loading import Shard, ValImages, chosen_batches, shard_indices
from rotp_vision.data.sources import Source, hold_out
from rotp_vision.layers import GlobalROTPool2d
from rotp_vision.surgery import rot_pools
from rotp_vision.surgery.head import find_global_pool, sets_of
from rotp_vision.training.cache import FeatureCache, validate
from rotp_vision.training.finish import pool_title
from rotp_vision.training.processes import gather
from rotp_vision.training.run import Run

NUM_IMAGES = 512  # used to fit the simpler poolings if the pooling itself is not calibrated
BATCH = 64
# Above this accuracy the loss on training images is useless for calibration: it falls with every larger gain, while the
# loss on other images rises.
MEMORISED = 0.99


def start_pooling(run: Run, model: nn.Module, *, also_gem: bool) -> dict[str, tuple[float, float]]:
    """Calibrates the pooling of `model` as stage2.calibrate says; all processes end with the same pooling.

    Args:
        run: the run.
        model: the converted model.
        also_gem: whether to return generalized-mean pooling too.

    Returns:
        The simpler poolings that were fitted beside it, by title: power of the mean, and gain.
    """
    copied = copy.deepcopy(model)
    report, problem = _calibrated(run, copied)
    if report is None:
        run.say(f'the pooling starts as configured, not calibrated: {problem}')
        return {}
    if run.config.stage2.calibrate:
        path, _ = find_global_pool(copied)
        run.say(f'\n{replace(report, path=path)}\n')
        calibrated = {
            path: (asdict(pool.options), {name: value.cpu() for name, value in pool.state_dict().items()})
            for path, pool in rot_pools(copied).items()
        }
        for path, (options, weights) in gather(calibrated)[0].items():
            pool = rot_pools(model)[path]
            pool.set_options(options)
            pool.load_state_dict(weights)
    simpler = {report.average_gain.name: (1.0, report.average_gain.gain)}
    if also_gem and report.gem.setting.power is not None:
        simpler[report.gem.name] = (report.gem.setting.power, report.gem.gain)
    return simpler


def compare_poolings(run: Run, model: nn.Module, cache: FeatureCache | None) -> None:
    """Evaluates the pooling before it trains, and simpler ones in its place, for the table at the end."""
    if not run.trained:
        return
    progress = run.progress
    for title, (power, gain) in progress.simpler.items():
        with simpler_pooling(model, power, gain):
            progress.summary[title] = validate(run, model, cache)
    start = 'calibrated' if run.config.stage2.calibrate and progress.simpler else 'before training'
    progress.summary[f'{pool_title(run.config.pool)} {start}'] = validate(run, model, cache)


def average_gain(run: Run, model: nn.Module) -> float | None:
    """Returns the gain of average pooling fitted to the same images, or None if they cannot be used."""
    report, _ = _calibrated(run, copy.deepcopy(model), feature_scales=('rms',), priors=('uniform',))
    return None if report is None else report.average_gain.gain


def refit_gain(run: Run, model: nn.Module) -> None:
    """Fits the gain of the trained pooling to the held-out images; all processes end with the same gain.

    In stage 2 the pooling sees images that the network was trained on. Networks are overconfident on these, so the gain
    that it learns is too large for other images.
    """
    try:
        _, pool = find_global_pool(model)
    except ValueError:  # only local or mixed pools, which are not calibrated either
        return
    if run.held is None or pool.gain is None:
        return
    broken = list[str]()
    if run.main:
        try:
            factor = fit_gain(model, _labelled(run, run.held, broken), max_images=len(run.held))
            run.say(f'gain fitted to the {len(run.held)} images held out: × {factor:.3f}')
        except ValueError as error:
            run.say(f'the gain stays as trained: {error}')
    run.note_broken(broken)
    gain = gather(pool.named_weights()['gain'].cpu())[0]
    pool.set_weights(gain=gain)


def _calibrated(run: Run, model: nn.Module, **search: Any) -> tuple[Calibration, None] | tuple[None, str]:
    """Calibrates the model on the main process; returns the report on all processes, or why there is none."""
    if not run.trained:
        return None, 'the classifier is not trained yet'
    report, problem, broken = None, '', list[str]()
    # Networks are overconfident on their training images.
    smoothing = run.config.stage2.label_smoothing if run.held is None else 0.0
    if run.main:
        source = run.held or hold_out(run.train, min(NUM_IMAGES, len(run.train)), run.config.seed)[1]
        try:
            report = calibrate(
                model,
                _labelled(run, source, broken),
                only='rotp',
                label_smoothing=smoothing,
                max_images=len(source),
                **search,
            )
        except ValueError as error:
            problem = str(error)
    report, problem = gather((report, problem))[0]
    run.note_broken(broken)
    if report is not None and run.held is None and report.average.top1 >= MEMORISED and not smoothing:
        problem = (
            f'the network is right on {100 * report.average.top1:.1f} % of its training images, so the best gain on '
            'them is unbounded; set stage2.label_smoothing > 0, or hold images out by stage2.calibrate'
        )
        report = None
    return (None, problem) if report is None else (report, None)


def _labelled(run: Run, source: Source, broken: list[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields images with the evaluation transform and their labels; adds the names of unreadable ones to `broken`."""
    # The batch size does not depend on the number of processes, so that rounding cannot change the choice.
    keys = shard_indices(len(source), BATCH, Shard(0, 1))
    for batch in map(run.prepare, chosen_batches(ValImages(source, run.val_transform), run.config.data.workers, keys)):
        broken += batch.broken
        if len(batch.labels):
            yield batch.images, batch.labels


@contextmanager
def simpler_pooling(model: nn.Module, power: float, gain: float) -> Iterator[None]:
    """Replaces the output of the global ROT pool of a model by a generalized mean times a gain."""
    _, pool = find_global_pool(model)

    def pool_simply(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        sets = sets_of(pool, args[0])
        pooled = gain * (sets.mean(2) if power == 1 else gem(sets, power))
        return pool.shaped(pooled) if isinstance(pool, GlobalROTPool2d) else pooled

    with pool.register_forward_hook(pool_simply):
        yield
