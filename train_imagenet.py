#!/usr/bin/env python
"""Train an image classifier in two stages: with its native pooling, then with ROTP in its place.

    python train_imagenet.py --config configs/demo.yaml
    torchrun --nproc_per_node 8 train_imagenet.py --config configs/paper.yaml --data.path /data/imagenet
    python train_imagenet.py … --resume auto                 # continue after any interruption, bit-exactly
    python train_imagenet.py … --evaluate runs/paper/export  # only evaluate

`rotp-vision train --config demo` is the same from an installed package. `--help` explains every setting.
"""

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import yaml
from timm.utils import ModelEmaV3  # pyright: ignore[reportPrivateImportUsage]
from torch import nn
from tqdm import tqdm

from rotp_vision.data.loading import Batch, Schedule, steps_per_epoch, train_batches
from rotp_vision.data.workers import random_state, seed_all, set_random_state
from rotp_vision.evaluation import counted_positions
from rotp_vision.files import write_atomically
from rotp_vision.surgery import rot_pools
from rotp_vision.surgery.freeze import freeze_parameters
from rotp_vision.training import report
from rotp_vision.training.cache import FeatureCache, PoolAndClassifier, build_cache, validate
from rotp_vision.training.checkpoint import clear_leftovers, list_checkpoints, save_checkpoint
from rotp_vision.training.config import flat, parse_config
from rotp_vision.training.finish import NATIVE, describe_positions, finish, pool_title, show_stage
from rotp_vision.training.model import convert_model
from rotp_vision.training.optimize import learning_rates, make_mixup, make_optimizer, make_scheduler
from rotp_vision.training.pooling import average_gain, compare_poolings, refit_gain, simpler_pooling, start_pooling
from rotp_vision.training.processes import (
    expected_errors,
    fail,
    fail_once,
    gather,
    hold,
    share_buffers,
    stop_signals,
    together,
)
from rotp_vision.training.run import Run
from rotp_vision.training.setup import start

DRY_STEPS = 4  # per stage in a dry run; the first warms up and is not timed


def main(args: Sequence[str] | None = None, program: str = 'train_imagenet.py') -> None:
    config = parse_config(args, program)
    with expected_errors():
        run, model = start(config)
        if config.evaluate is not None:  # has nothing to save, so a signal ends it at once
            metrics = run.evaluate(run.to_device(model), run.val_images(), len(run.val))
            run.say(report.summary({config.evaluate: metrics}, {}, len(run.val.classes)))
        else:
            with stop_signals() as run.stop:
                two_stages(run, model)
        run.accelerator.end_training()


def two_stages(run: Run, model: nn.Module) -> None:
    """Run the rest of the two stages, then export and report."""
    config, progress = run.config, run.progress
    open_output(run)

    if progress.stage == 1:
        model = train_stage(run, model)
        if config.stage2.epochs:
            progress.stage, progress.epoch, progress.step = 2, 0, 0
    if progress.stage == 2:
        if run.checkpoint is None and run.trained and NATIVE not in progress.summary and not config.dry_run:
            progress.summary[NATIVE] = run.evaluate(run.to_device(model), run.val_images(), len(run.val))
        model = train_stage(run, convert_model(model, config.pool, progress.pools))
    if config.dry_run:
        return

    note = ''
    if progress.stage == 2:
        # Evaluate from the images, even if epochs were evaluated from cached maps.
        with counted_positions(model) as positions:
            metrics = run.evaluate(model, run.val_images(), len(run.val))
        progress.summary[f'{pool_title(config.pool)} trained'] = metrics
        note = describe_positions(run, positions)
    if run.main:
        finish(run, model, note)
    run.accelerator.wait_for_everyone()


def train_stage(run: Run, model: nn.Module) -> nn.Module:
    """Train the current stage from its start or from a checkpoint; return the model with its final weights."""
    progress, dry = run.progress, run.config.dry_run
    stage = Stage(run, model)
    batches = map(run.prepare, stage.batches())
    for _ in range(progress.epoch, stage.settings.epochs):
        started = time.perf_counter()
        train_epoch(stage, batches)
        if dry:
            break
        end_epoch(stage, started)
    return end_stage(stage)


def train_epoch(stage: 'Stage', batches: Iterator[Batch]) -> None:
    """Train the remaining steps of the current epoch, with checkpoints in between; a signal ends the run."""
    run, config, progress, steps = stage.run, stage.run.config, stage.run.progress, stage.steps
    stage.wrapped.train()
    bar = tqdm(
        initial=progress.step,
        total=steps,
        desc=f'stage {progress.stage} epoch {progress.epoch + 1}/{stage.settings.epochs}',
        unit='step',
        leave=False,
        disable=not (run.main and sys.stderr.isatty()),
    )
    started, first_step, data_time = time.perf_counter(), progress.step, 0.0
    while progress.step < steps:
        step = train_step(stage, batches)
        data_time += step.data_time
        progress.step += 1
        progress.loss_sum += step.loss

        elapsed = time.perf_counter() - started
        speed = (progress.step - first_step) * config.global_batch_size / elapsed
        bar.update()
        bar.set_postfix_str(f'loss {step.loss:.4f}, {speed:.0f} images/s', refresh=False)
        if config.dry_run:
            if progress.step >= min(DRY_STEPS, steps):
                bar.close()
                show_estimate(run, elapsed / (progress.step - first_step), steps * stage.settings.epochs)
                return
            if progress.step == 1:
                started, first_step = time.perf_counter(), 1
            continue
        if progress.step % config.log_every == 0 or progress.step == steps:
            stage.log_step(step, speed, data_time / elapsed)
        due = step.late or (config.checkpoint_steps and progress.step % config.checkpoint_steps == 0)
        if due or step.stopping or progress.step == steps:
            stage.save()
        if step.stopping:
            bar.close()
            run.leave()
    bar.close()


class Step(NamedTuple):
    """What happened in a step, over all processes."""

    loss: float
    rates: report.Rates
    stopping: bool  # a process got a signal
    late: bool  # a checkpoint is due by time
    data_time: float  # seconds that this process waited for images


def train_step(stage: 'Stage', batches: Iterator[Batch]) -> Step:
    """Update the weights once, unless the loss is not finite, which ends the run."""
    run, config, settings, accelerator = stage.run, stage.run.config, stage.settings, stage.run.accelerator
    updates = run.progress.epoch * stage.steps + run.progress.step
    stage.scheduler.step_update(updates)
    loss = total = torch.zeros((), device=accelerator.device)
    copied = None
    broken, data_time = list[str](), 0.0
    for number in range(1, settings.accumulation + 1):
        last = number == settings.accumulation
        waited = time.perf_counter()
        batch = next(batches)
        data_time += time.perf_counter() - waited
        broken += batch.broken
        images, labels = batch.images, batch.labels
        if stage.mixup is not None:
            images, labels = stage.mixup(images, labels)
        with contextlib.nullcontext() if last else accelerator.no_sync(stage.wrapped):
            part = F.cross_entropy(stage.wrapped(images), labels, label_smoothing=stage.smoothing)
            part = part / settings.accumulation
            loss += part.detach()
            if last:
                # All processes agree on what happened before any of them updates a weight. The sum is copied during the
                # backward pass, so that the device does not wait for the host.
                late = run.main and 0 < 60 * config.checkpoint_minutes <= time.monotonic() - stage.saved
                flags = [loss.new_full((), float(flag)) for flag in (bool(run.stop), bool(broken), late)]
                total = accelerator.reduce(torch.stack([loss / run.shard.processes, *flags]), 'sum')
                total = total.to('cpu', non_blocking=True)  # type: ignore[union-attr]
                copied = torch.cuda.current_stream().record_event() if loss.is_cuda else None
            accelerator.backward(part)

    if settings.clip_norm is not None:
        accelerator.clip_grad_norm_(stage.wrapped.parameters(), settings.clip_norm)
    rates = learning_rates(stage.optimizer)
    if copied is not None:
        copied.synchronize()
    mean_loss, stopping, news, late = total.tolist()
    if news:
        run.note_broken(broken)
    if not math.isfinite(mean_loss):
        stop_diverged(run, rates)
    stage.optimizer.step()
    stage.optimizer.zero_grad()
    if stage.ema is not None:
        stage.ema.update(stage.model, step=updates)
    return Step(mean_loss, rates, bool(stopping), bool(late), data_time)


def stop_diverged(run: Run, rates: report.Rates) -> None:
    """End the run without saving, because the last forward pass has changed batch statistics."""
    progress, saved = run.progress, list_checkpoints(run.output / 'checkpoints')
    last = f'The last checkpoint is {saved[-1]}. ' if saved else ''
    fail_once(
        f'the loss is not finite at stage {progress.stage}, epoch {progress.epoch + 1}, step {progress.step + 1}, '
        f'learning rate {rates["lr"] or rates["pool_lr"]:.3g}. {last}Lower the learning rate, lengthen the warm-up or '
        'clip gradients, and start a new run, optionally with a checkpoint as --model.checkpoint'
    )


def end_epoch(stage: 'Stage', started: float) -> None:
    """Evaluate, log and save at the end of an epoch; a signal ends the run."""
    run, progress, settings = stage.run, stage.run.progress, stage.settings
    share_buffers(stage.averaged)
    metrics = validate(run, stage.averaged, stage.cache)
    seconds, train_loss = time.perf_counter() - started, progress.loss_sum / stage.steps
    stage.log_epoch(train_loss, metrics, seconds)
    run.say(
        f'stage {progress.stage}  epoch {progress.epoch + 1:3d}/{settings.epochs}  loss {train_loss:.4f}  '
        f'validation: loss {metrics["loss"]:.4f}  top-1 {metrics["top1"]:6.2f} %  {seconds:.1f} s'
    )
    progress.epoch, progress.step, progress.loss_sum = progress.epoch + 1, 0, 0.0
    progress.note_accuracy(metrics['top1'])
    if progress.stage == 1:
        progress.summary[NATIVE] = metrics
    stage.save()
    if any(gather(bool(run.stop))):
        run.leave()


def end_stage(stage: 'Stage') -> nn.Module:
    """Return the trained model without wrappers, in stage 2 with its gain refitted to held-out images."""
    run, model = stage.run, stage.model
    run.accelerator.unwrap_model(stage.wrapped, keep_fp32_wrapper=False)
    run.accelerator.free_memory()
    model._compiled_call_impl = None  # set by `compile`; the next stage has another graph
    if run.config.dry_run:
        return model
    if stage.ema is not None:
        model.load_state_dict(stage.ema.module.state_dict())
    share_buffers(model)
    if run.progress.stage == 2:
        refit_gain(run, model)
        if stage.logs:
            stage.logs.weights(model, run.progress.epoch)
        if run.config.stage2.train != 'pool':
            # Average pooling would profit from the other trained weights too.
            gain = average_gain(run, model)
            if gain is not None:
                with simpler_pooling(model, 1.0, gain):
                    run.progress.summary['average + gain, rest as trained'] = validate(run, model, stage.cache)
    return model


class Stage:
    """A stage in training: model, optimizer, data and logs, at its start or as in the checkpoint of the run."""

    def __init__(self, run: Run, model: nn.Module):
        self.run, config, checkpoint = run, run.config, run.checkpoint
        run.checkpoint = None  # the next stage begins at its start
        number = run.progress.stage
        self.settings = settings = config.stage1 if number == 1 else config.stage2
        self.steps = steps_per_epoch(len(run.train), config.global_batch_size)

        # Model. The frozen part neither updates batch statistics nor takes part in the backward pass.
        if number == 2:
            freeze_parameters(model, config.stage2.train)
        if checkpoint is not None:
            model.load_state_dict(checkpoint.model)
        self.model = run.to_device(model)
        show_stage(run, model, number, settings, self.steps)
        self.cache: FeatureCache | None = None
        if number == 2 and not config.dry_run:
            if config.stage2.cache_features:
                try:
                    self.cache = build_cache(run, model)
                except (ValueError, OSError) as error:
                    fail(error)
            if checkpoint is None:
                self.start_pooling()

        # Optimizer
        self.ema = ModelEmaV3(model, settings.ema_decay, use_warmup=True) if settings.ema_decay else None
        self.averaged = model if self.ema is None else self.ema.module
        optimizer = make_optimizer(model, settings)
        self.scheduler = make_scheduler(optimizer, settings, self.steps)
        self.mixup = make_mixup(settings, len(run.train.classes))
        self.smoothing = 0.0 if self.mixup else settings.label_smoothing  # Mixup smooths the labels itself
        if checkpoint is not None:
            optimizer.load_state_dict(checkpoint.others['optimizer'])
            if self.ema is not None and checkpoint.state_dict_ema is not None:
                self.ema.module.load_state_dict(checkpoint.state_dict_ema)

        # DDP must wrap the module whose forward is called: gradients of a submodule that is called directly are not
        # synchronised, without any error.
        trained = model if self.cache is None else PoolAndClassifier(model)
        self.wrapped, self.optimizer = run.accelerator.prepare(trained, optimizer)
        if config.compile:
            self.wrapped.compile()
        if checkpoint is None:
            seed_all(config.seed, number, run.shard.rank)
        else:
            self.restore_generators(checkpoint.others)

        self.logs = report.Logs(run.output, run.progress) if run.main and not config.dry_run else None
        if self.logs and not run.progress.weights:
            self.logs.weights(self.averaged, 0)
        self.saved = time.monotonic()  # time of the last checkpoint

    def start_pooling(self) -> None:
        """Calibrate the pooling, and evaluate it beside simpler ones."""
        run, model = self.run, self.model
        simpler = start_pooling(run, model, also_gem=self.cache is not None)
        run.progress.simpler = {title: [*pooling] for title, pooling in simpler.items()}
        run.progress.pools = {path: asdict(pool.options) for path, pool in rot_pools(model).items()}
        freeze_parameters(model, run.config.stage2.train)  # a new prior trains too
        compare_poolings(run, model, self.cache)

    def batches(self) -> Iterator[Batch]:
        """Return the batches of the forward passes of this process from the current step to the end of the stage."""
        run, config = self.run, self.run.config
        schedule = Schedule(
            length=len(run.train),
            global_batch=config.global_batch_size,
            accumulation=self.settings.accumulation,
            shard=run.shard,
            seed=2 * config.seed + run.progress.stage - 1,  # the stages use different orders of the images
            epochs=range(run.progress.epoch, self.settings.epochs),
            start=run.progress.step,
        )
        if self.cache is not None:
            return self.cache.train_batches(schedule, config.data.workers)
        return train_batches(run.train, run.train_transform, config.data, schedule)

    def save(self) -> None:
        """Save a checkpoint. The main process writes it; all processes end if that fails."""
        run = self.run
        others: dict[str, Any] = {'random': gather(random_state())}
        with together():
            if run.main:
                scaler = run.accelerator.scaler
                others['optimizer'] = self.optimizer.state_dict()
                others['scaler'] = None if scaler is None else scaler.state_dict()
                ema = None if self.ema is None else self.ema.module.state_dict()
                directory, model, keep = run.output / 'checkpoints', self.model.state_dict(), run.config.keep
                save_checkpoint(directory, run.progress, run.stored_config, model, ema, others, keep)
        self.saved = time.monotonic()

    def restore_generators(self, states: dict[str, Any]) -> None:
        """Restore loss scaler and random generators, which are seeded anew for another number of processes."""
        run = self.run
        if run.accelerator.scaler is not None:
            run.accelerator.scaler.load_state_dict(states['scaler'])
        if len(states['random']) == run.shard.processes:
            set_random_state(states['random'][run.shard.rank])
        else:
            run.warn(f'the run had {len(states["random"])} processes: dropout and mixup draw new random numbers')
            seed_all(run.config.seed, run.progress.stage, run.shard.rank, run.progress.epoch, run.progress.step)

    def log_step(self, step: Step, speed: float, data_time_share: float) -> None:
        """Write a row of steps.csv, and the same to the trackers."""
        if self.logs:
            self.logs.step(step.loss, step.rates, speed, data_time_share)
        shown = {f'train/{name}': rate for name, rate in step.rates.items() if rate is not None}
        self.run.accelerator.log({'train/loss': step.loss, **shown}, step=self.total_steps)

    def log_epoch(self, train_loss: float, metrics: dict[str, float], seconds: float) -> None:
        """Write a row of metrics.csv and the learned weights, and the metrics to the trackers."""
        if self.logs:
            self.logs.weights(self.averaged, self.run.progress.epoch + 1)
            self.logs.epoch(train_loss, metrics, learning_rates(self.optimizer), seconds)
        self.run.accelerator.log({f'val/{key}': value for key, value in metrics.items()}, step=self.total_steps)

    @property
    def total_steps(self) -> int:
        """Number of steps of both stages so far."""
        progress = self.run.progress
        before = self.run.config.stage1.epochs if progress.stage == 2 else 0
        return (before + progress.epoch) * self.steps + progress.step


def open_output(run: Run) -> None:
    """Create and lock the output directory, and start the trackers, unless this is a dry run."""
    config = run.config
    if config.dry_run:
        return
    with together():
        if run.main:
            run.output.mkdir(parents=True, exist_ok=True)
            hold(run.output)
            clear_leftovers(run.output)
            write_atomically(run.output / 'config.yaml', yaml.safe_dump(run.stored_config, sort_keys=False))
    if config.trackers:
        run.accelerator.init_trackers('rotp_vision', {key: str(value) for key, value in flat(run.stored_config)})
    if run.checkpoint is not None:
        run.say(f'continuing from {run.checkpoint.path}')


def show_estimate(run: Run, seconds: float, steps: int) -> None:
    total = timedelta(seconds=round(seconds * steps))
    run.say(f'  {seconds:.3f} s a step, about {total} for {steps:,} steps, without evaluation and cache\n')


if __name__ == '__main__':
    main()
