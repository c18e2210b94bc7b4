"""Where stage 2 starts: the pooling as held-out images want it, and what simpler poolings make of the same images."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn

from rotp_vision.calibration import Calibration, calibrate, fit_gain
from rotp_vision.layers import GlobalROTPool2d
from rotp_vision.surgery import rot_pools
from rotp_vision.surgery.head import find_global_pool, sets_of
from rotp_vision.training.context import Run
from rotp_vision.training.data import Shard, ValImages, chosen_batches, on_device, shard_places
from rotp_vision.training.sources import Source, StreamSource, hold_out

NUM_IMAGES = 512  # on which the simpler poolings are fitted where the pooling itself is not calibrated
BATCH = 64
# Right predictions beyond which a loss on images that were trained on says nothing: it falls with every gain, while
# that on others rises.
KNOWN = 0.99


def start_pooling(run: Run, model: nn.Module, *, gem: bool) -> dict[str, tuple[float, float]]:
    """Calibrates the pooling of `model` as stage2.calibrate says; all processes end with the same.

    Args:
        run: the run.
        model: the converted model.
        gem: whether to return generalized-mean pooling too.

    Returns:
        The simpler poolings that were fitted beside it, by title: power of the mean, and gain.
    """
    copied = copy.deepcopy(model)
    report, problem = _fitted(run, copied)
    if report is None:
        run.console.print(f'the pooling starts as configured, not calibrated: {problem}', soft_wrap=True, markup=False)
        return {}
    if run.config.stage2.calibrate:
        path, _ = find_global_pool(copied)
        run.console.print(f'\n{replace(report, path=path)}\n', soft_wrap=True, markup=False)
        calibrated = {
            path: (asdict(pool.options), {name: value.cpu() for name, value in pool.state_dict().items()})
            for path, pool in rot_pools(copied).items()
        }
        for path, (options, weights) in run.host.gather(calibrated)[0].items():
            pool = rot_pools(model)[path]
            pool.set_options(options)
            pool.load_state_dict(weights)
    simpler = {report.average_gain.name: (1.0, report.average_gain.gain)}
    if gem and report.gem.power is not None:
        simpler[report.gem.name] = (report.gem.power, report.gem.gain)
    return simpler


def average_gain(run: Run, model: nn.Module) -> float | None:
    """The gain that the same images give average pooling in the place of the pool; None where they cannot tell."""
    report, _ = _fitted(run, copy.deepcopy(model), feature_scales=('rms',), priors=('uniform',))
    return None if report is None else report.average_gain.gain


def end_pooling(run: Run, model: nn.Module) -> None:
    """Fits the gain of the trained pooling to the images held out for calibration; all processes end with the same.

    In stage 2 the pooling sees images that the network was trained on, which ask for a larger gain than others do.
    """
    try:
        _, pool = find_global_pool(model)
    except ValueError:  # pools of windows alone, or mixed ones, which are not calibrated either
        return
    if run.held is None or pool.gain is None:
        return
    broken = list[str]()
    if run.main:
        factor = fit_gain(model, _labelled(run, run.held, broken), max_images=len(run.held))
        run.console.print(f'gain fitted to the {len(run.held)} images held out: × {factor:.3f}', soft_wrap=True)
    run.note_broken(broken)
    gain = run.host.gather(pool.named_weights()['gain'].cpu())[0]
    pool.set_weights(gain=gain)


def _fitted(run: Run, model: nn.Module, **search: Any) -> tuple[Calibration, None] | tuple[None, str]:
    """The model calibrated by the main process, with the report on all of them; or why that is of no use."""
    if not run.trained:
        return None, 'the classifier is not trained yet'
    if isinstance(run.train, StreamSource):
        return None, 'a stream has no sample of training images'
    report, problem, broken = None, '', list[str]()
    # A network is too sure of the images it was trained on.
    smoothing = run.config.stage2.label_smoothing if run.held is None else 0.0
    if run.main:
        source = run.held or hold_out(run.train, min(NUM_IMAGES, len(run.train)), run.config.seed)[1]
        try:
            report = calibrate(
                model, _labelled(run, source, broken), label_smoothing=smoothing, max_images=len(source), **search
            )
        except ValueError as error:
            problem = str(error)
    report, problem = run.host.gather((report, problem))[0]
    run.note_broken(broken)
    if report is not None and run.held is None and report.average.top1 >= KNOWN and not smoothing:
        problem = (
            f'the network is right on {100 * report.average.top1:.1f} % of its training images, so that no gain is too '
            'large for them; stage2.label_smoothing holds it back'
        )
        report = None
    return (None, problem) if report is None else (report, None)


def _labelled(run: Run, source: Source, broken: list[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """Images as evaluation sees them, and their labels; names of unreadable ones are added to `broken`."""
    # The batch does not depend on the number of processes: neither does, then, what rounding makes of a choice.
    places = shard_places(len(source), BATCH, Shard(0, 1))
    batches = chosen_batches(ValImages(source, run.val_transform), run.config.data, places)
    for batch in on_device(batches, run.prepare, run.accelerator.device):
        broken += batch.broken
        if len(batch.labels):
            yield batch.images, batch.labels


@contextmanager
def simpler_pooling(model: nn.Module, power: float, gain: float) -> Iterator[None]:
    """The model with the mean of powers, with a gain, in the place of its global ROT pool's plan."""
    _, pool = find_global_pool(model)

    def pool_simply(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        pooled = gain * _mean(sets_of(pool, args[0]), power)
        return pool.shaped(pooled) if isinstance(pool, GlobalROTPool2d) else pooled

    hook = pool.register_forward_hook(pool_simply)
    try:
        yield
    finally:
        hook.remove()


def _mean(sets: Tensor, power: float) -> Tensor:
    if power == 1:
        return sets.mean(2)
    return sets.clamp_min(1e-6).pow(power).mean(2).pow(1 / power)
