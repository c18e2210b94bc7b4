#!/usr/bin/env python
"""Train an image classifier in two stages: with its native pooling, then with ROTP in its place.

    python train_imagenet.py --config configs/demo.yaml
    torchrun --nproc_per_node 8 train_imagenet.py --config configs/paper.yaml --data.path /data/imagenet
    python train_imagenet.py … --resume auto                 # continue after any interruption, bit-exactly
    python train_imagenet.py … --evaluate runs/paper/export  # only evaluate

`rotp-vision train --config demo` is the same from an installed package. `--help` explains every setting.
"""

import contextlib
import copy
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from rich.console import Console
from rich.markup import escape
from timm.data import Mixup  # pyright: ignore[reportPrivateImportUsage]
from timm.optim import create_optimizer_v2, param_groups_weight_decay  # pyright: ignore[reportPrivateImportUsage]
from timm.scheduler import create_scheduler_v2  # pyright: ignore[reportPrivateImportUsage]
from timm.utils import ModelEmaV3  # pyright: ignore[reportPrivateImportUsage]
from torch import nn
from tqdm import tqdm

import rotp_vision
from rotp_vision.evaluation import UsedPositions, counted_positions, positions_sentence
from rotp_vision.files import check_writable, write_atomically
from rotp_vision.training import report
from rotp_vision.training.cache import FeatureCache, PoolAndClassifier, build_cache, cache_directory
from rotp_vision.training.calibration import average_gain, end_pooling, simpler_pooling, start_pooling
from rotp_vision.training.checkpoint import (
    Checkpoint,
    Progress,
    clear_leftovers,
    find_checkpoint,
    save_checkpoint,
)
from rotp_vision.training.config import (
    PoolStageConfig,
    RunConfig,
    StageConfig,
    changed_epochs,
    changes,
    flat,
    parse_config,
    to_dict,
)
from rotp_vision.training.context import Run, fail, fail_once, fail_together, is_first_process, num_launched
from rotp_vision.training.data import (
    Batch,
    Schedule,
    TrainTransform,
    ValTransform,
    check_shared_memory,
    on_device,
    split_batch,
    steps_per_epoch,
    train_batches,
    transforms,
)
from rotp_vision.training.finish import NATIVE, finish, pool_title, show_stage
from rotp_vision.training.model import (
    build_model,
    convert_model,
    load_for_evaluation,
    normalization,
    synchronized,
)
from rotp_vision.training.processes import (
    HostGroup,
    KeptBuffers,
    LossWatch,
    check_launch,
    check_trackers,
    exit_status,
    hold,
    precision,
    random_state,
    seed_all,
    set_random_state,
    share_buffers,
    stop_signals,
    unreachable,
)
from rotp_vision.training.sources import Source, StreamSource, data_changes, hold_out, inventory, open_sources

Rates = dict[str, float | None]
DRY_STEPS = 4  # per stage in a dry run; the first warms up and is not timed


def main(args: Sequence[str] | None = None, program: str = 'train_imagenet.py') -> None:
    # Configuration. Errors in it, the data or the checkpoint are found before a GPU is used. Several processes have to
    # connect first, to report them once, so they end before the model is built.
    config = parse_config(args, program)
    writes_nothing = config.dry_run or config.evaluate is not None
    found, problem = None, None
    try:
        found = open_inputs(config, writes_nothing)
    except (ValueError, OSError) as error:
        problem = error
        if num_launched() == 1:
            fail(error)

    # Processes
    if config.deterministic:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not config.deterministic
    try:
        accelerator = Accelerator(
            mixed_precision=precision(config.mixed_precision),
            log_with=None if writes_nothing else [*config.trackers] or None,
            project_dir=config.output,
            # This script accumulates gradients itself. Without this an environment variable could scale them again.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        check_launch(accelerator)
        host = HostGroup(accelerator)
    except (ValueError, RuntimeError) as error:
        if 'gloo' in str(error):
            fail(error if 'GLOO_SOCKET_IFNAME' in str(error) else unreachable(error))
        fail_once(error)
    fail_together(host, problem)
    assert found is not None
    train, val, held, data, checkpoint, warnings = found
    num_classes = len(train.classes)
    console = Console(quiet=not accelerator.is_main_process, highlight=False)
    for warning in warnings:
        console.print(f'[yellow]warning:[/] {escape(warning)}', soft_wrap=True)
    stored_config = to_dict(config) | {'mixed_precision': accelerator.mixed_precision}
    if checkpoint is not None and (lines := changes(checkpoint.config, stored_config)):
        fail_once('a continued run must keep its settings; these differ from the checkpoint:\n  ' + '\n  '.join(lines))
    news, anew = list[str](), list[str]()
    if checkpoint is not None:
        point = checkpoint.progress
        try:
            news += changed_epochs(checkpoint.config, stored_config, point.stage, point.epoch + bool(point.step))
        except ValueError as error:
            fail_once(error)

    if checkpoint is not None and (lines := data_changes(checkpoint.progress.data, data)):
        if not config.allow_changed_data:
            problem = ValueError(
                'the images are not those that the run began with:\n  ' + '\n  '.join(lines) + '\nGive it those, or '
                'continue with these by --allow-changed-data'
            )
        else:
            console.print('[yellow]warning:[/] ' + escape('; '.join(lines)), soft_wrap=True)
    if accelerator.num_processes > 1 and not writes_nothing and config.stage2.epochs and config.stage2.cache_features:
        try:
            host.check_shared(cache_directory(config), 'stage2.cache_dir')
        except ValueError as error:
            problem = error
    fail_together(host, problem)

    # Model, initialized from the same seed on every process
    seed_all(config.seed)
    made = None
    with accelerator.main_process_first():
        try:
            made = make_model(config, num_classes, accelerator.num_processes, anew.append)
        except (ValueError, OSError, RuntimeError, TypeError, AssertionError) as error:
            problem = error
    fail_together(host, problem)
    assert made is not None
    model, (train_transform, val_transform) = made
    for line in (*news, *(anew if checkpoint is None else ())):
        console.print(line, soft_wrap=True, markup=False)
    progress = checkpoint.progress if checkpoint else Progress(stage=1 if config.stage1.epochs else 2)
    progress.data = data

    # An evaluation has nothing to save, so a signal ends it at once.
    with contextlib.nullcontext([]) if config.evaluate is not None else stop_signals() as stop:
        run = Run(
            config=config,
            stored_config=stored_config,
            accelerator=accelerator,
            host=host,
            console=console,
            stop=stop,
            train=train,
            val=val,
            held=held,
            train_transform=train_transform,
            val_transform=val_transform,
            norm=normalization(model),
            progress=progress,
            trained=bool(config.stage1.epochs)
            or (not anew and (config.model.pretrained or bool(config.model.checkpoint))),
        )
        if config.evaluate is not None:
            metrics = run.evaluate(run.place(model), run.val_images(), len(val))
            report.show_summary(console, {config.evaluate: metrics}, {})
        else:
            two_stages(run, model, checkpoint)
    accelerator.end_training()


class Inputs(NamedTuple):
    """What a run reads."""

    train: Source | StreamSource
    val: Source | StreamSource
    held: Source | None  # training images that are kept for calibration
    inventories: dict[str, Any]  # of both splits
    checkpoint: Checkpoint | None  # to continue from
    warnings: list[str]  # about damaged checkpoints


def open_inputs(config: RunConfig, writes_nothing: bool) -> Inputs:
    """Data and checkpoint of a run, and whether it can write; raises ValueError or OSError."""
    train, val = open_sources(config.data, config.seed)
    inventories, held = {'train': inventory(train), 'val': inventory(val)}, None
    check_beginning(config)
    if config.evaluate is None:
        begins_trained = config.stage1.epochs or config.model.pretrained or config.model.checkpoint
        count = min(config.stage2.calibrate, len(train) // 5) if config.stage2.epochs and begins_trained else 0
        if count and not isinstance(train, StreamSource):
            train, held = hold_out(train, count, config.seed)
        try:
            steps_per_epoch(len(train), config.global_batch_size)
        except ValueError as error:
            more = f'; {len(held)} more are held out by stage2.calibrate' if held is not None else ''
            raise ValueError(f'{error}{more}') from error
    if writes_nothing:
        return Inputs(train, val, held, inventories, None, [])
    check_trackers(config.trackers)
    if is_first_process():
        check_writable(Path(config.output))
        if Path(config.output).is_dir():
            hold(Path(config.output))
    return Inputs(train, val, held, inventories, *find_checkpoint(Path(config.output) / 'checkpoints', config.resume))


def make_model(
    config: RunConfig, num_classes: int, processes: int, notify: Callable[[str], object]
) -> tuple[nn.Module, tuple[TrainTransform, ValTransform]]:
    """The model and its transforms for training and evaluation; `notify` is called if its classifier is new."""
    images = config.global_batch_size // processes  # that data workers hold for evaluation
    for stage in (config.stage1, config.stage2) if config.evaluate is None else ():
        size = split_batch(config.global_batch_size, processes, stage.accumulation)
        if (stage.mixup or stage.cutmix) and size % 2:
            raise ValueError(f'mixup needs an even number of images per forward pass and process, got {size}')
    if config.evaluate is None:
        images *= 2  # at most as many for training
    check_shared_memory(config.data.workers, 3 * config.data.image_size**2 * images)
    if config.evaluate is not None:
        model = load_for_evaluation(config.evaluate, config.model, config.pool, num_classes)
    else:
        trains = bool(config.stage1.epochs) or config.stage2.train != 'pool'
        model = build_model(config.model, num_classes, new_classifier=trains, notify=notify)
        check_stages(config, model)
    return model, transforms(config.data, *normalization(model))


def two_stages(run: Run, model: nn.Module, checkpoint: Checkpoint | None) -> None:
    """Run what remains of the two stages, then report."""
    config, progress = run.config, run.progress
    if run.main and not config.dry_run:
        try:
            run.output.mkdir(parents=True, exist_ok=True)
            hold(run.output)
            clear_leftovers(run.output)
            write_atomically(run.output / 'config.yaml', yaml.safe_dump(run.stored_config, sort_keys=False))
        except OSError as error:
            fail(f'cannot write to --output {run.output}: {error}')
        except ValueError as error:
            fail(error)
    if config.trackers and not config.dry_run:
        run.accelerator.init_trackers('rotp_vision', {key: str(value) for key, value in flat(run.stored_config)})
    if checkpoint is not None:
        run.console.print(f'continuing from {checkpoint.path}', soft_wrap=True, markup=False)

    if progress.stage == 1:
        model = train_stage(run, model, 1, checkpoint)
        checkpoint = None
    if config.stage2.epochs:
        if checkpoint is None:
            progress.stage, progress.epoch, progress.step = 2, 0, 0
            if run.trained and NATIVE not in progress.summary and not config.dry_run:
                progress.summary[NATIVE] = run.evaluate(run.place(model), run.val_images(), len(run.val))
        model = train_stage(run, convert_model(model, config.pool, progress.pools), 2, checkpoint)
    if config.dry_run:
        return
    note = None
    if progress.stage == 2:
        # From the images, even if epochs were evaluated from cached maps.
        with counted_positions(model) as positions:
            progress.summary[f'{pool_title(config.pool)} trained'] = run.evaluate(model, run.val_images(), len(run.val))
        note = describe_positions(run, positions)
    if run.main:
        finish(run, model, note)
    run.host.wait()


def train_stage(run: Run, model: nn.Module, stage: int, checkpoint: Checkpoint | None) -> nn.Module:
    """Train one stage from its start or from a checkpoint; returns the model with its final weights."""
    config, accelerator, progress, host = run.config, run.accelerator, run.progress, run.host
    settings = config.stage1 if stage == 1 else config.stage2
    steps = steps_per_epoch(len(run.train), config.global_batch_size)

    # Model. The frozen part neither updates batch statistics nor takes part in the backward pass.
    if stage == 2:
        rotp_vision.freeze(model, config.stage2.train)
    if config.sync_batchnorm and accelerator.num_processes > 1:
        model = synchronized(model)
    if checkpoint is not None:
        model.load_state_dict(checkpoint.model)
    run.place(model)
    show_stage(run, model, stage, settings, steps)

    # Feature maps, if the frozen part is computed once.
    maps = None
    if stage == 2 and config.stage2.cache_features and not config.dry_run:
        try:
            maps = build_cache(run, model)
        except (ValueError, OSError) as error:
            fail(error)
    if stage == 2 and checkpoint is None and not config.dry_run:
        progress.simpler = {
            title: [*pooling] for title, pooling in start_pooling(run, model, gem=maps is not None).items()
        }
        progress.pools = {path: asdict(pool.options) for path, pool in rotp_vision.rot_pools(model).items()}
        rotp_vision.freeze(model, config.stage2.train)  # a new prior trains too
        compare_poolings(run, model, maps)

    # Optimizer
    ema = ModelEmaV3(model, settings.ema_decay, use_warmup=True) if settings.ema_decay else None
    averaged = model if ema is None else ema.module
    optimizer = make_optimizer(model, settings)
    scheduler = make_scheduler(optimizer, settings, steps)
    mixup = make_mixup(settings, len(run.train.classes))
    smoothing = 0.0 if mixup else settings.label_smoothing  # Mixup smooths the labels itself
    if checkpoint is not None:
        optimizer.load_state_dict(checkpoint.state['optimizer'])
        if ema is not None:
            ema.module.load_state_dict(checkpoint.state['ema'])

    # DDP must wrap the module whose forward is called: gradients of a submodule that is called directly are not
    # synchronised, without any error.
    wrapped, optimizer = accelerator.prepare(PoolAndClassifier(model) if maps else model, optimizer)
    if config.compile:
        wrapped.compile()
    if checkpoint is None:
        seed_all(config.seed, stage, run.shard.rank)
    else:
        restore_generators(run, checkpoint)

    def save() -> None:
        """Save a checkpoint. The main process writes it; all processes end if that fails."""
        generators = host.gather(random_state())
        problem = None
        if run.main:
            state: dict[str, Any] = {'optimizer': optimizer.state_dict(), 'random': generators}
            state['ema'] = ema.module.state_dict() if ema is not None else None
            state['scaler'] = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
            directory = run.output / 'checkpoints'
            try:
                save_checkpoint(directory, progress, run.stored_config, model.state_dict(), state, config.keep)
            except OSError as error:
                problem = str(error)
        problems = [text for text in host.gather(problem) if text]
        if problems:
            fail_once(problems[0])

    # Loop
    logs = Logs(run) if run.main and not config.dry_run else None
    if logs and not progress.weights:
        logs.weights(averaged, 0)
    buffers = KeptBuffers(model)
    watch = LossWatch(accelerator.device)
    offset = config.stage1.epochs * steps if stage == 2 else 0  # of the steps that trackers see
    saved = time.monotonic()  # time of the last checkpoint
    batches = on_device(stage_batches(run, settings, stage, maps), run.prepare, accelerator.device)

    for epoch in range(progress.epoch, settings.epochs):
        wrapped.train()
        bar = tqdm(
            initial=progress.step,
            total=steps,
            desc=f'stage {stage} epoch {epoch + 1}/{settings.epochs}',
            unit='step',
            leave=False,
            disable=not (run.main and sys.stderr.isatty()),
        )
        started, first_step, data_time = time.perf_counter(), progress.step, 0.0
        while progress.step < steps:
            updates = epoch * steps + progress.step
            scheduler.step_update(updates)
            loss = torch.zeros((), device=accelerator.device)
            broken: list[str] = []
            buffers.keep()
            for number in range(1, settings.accumulation + 1):
                last = number == settings.accumulation
                waited = time.perf_counter()
                batch = next(batches)
                data_time += time.perf_counter() - waited
                broken += batch.broken
                images, labels = batch.images, batch.labels
                if mixup is not None:
                    images, labels = mixup(images, labels)
                with contextlib.nullcontext() if last else accelerator.no_sync(wrapped):
                    part = F.cross_entropy(wrapped(images), labels, label_smoothing=smoothing) / settings.accumulation
                    loss += part.detach()
                    if last:
                        watch.record(loss)
                    accelerator.backward(part)

            # All processes agree on what happened before any of them updates a weight. They talk while the device is
            # still at the backward pass.
            value = watch.read()
            finite = math.isfinite(value)
            share = value / run.shard.processes if finite else 0.0
            late = run.main and 0 < 60 * config.checkpoint_minutes <= time.monotonic() - saved
            agreement = host.start(share, not finite, bool(run.stop), bool(broken), late)
            if settings.clip_norm is not None:
                accelerator.clip_grad_norm_(wrapped.parameters(), settings.clip_norm)
            rates = learning_rates(optimizer)
            mean_loss, infinite, stopping, news, due = agreement.wait()
            if news:
                run.note_broken(broken)
            if infinite:
                buffers.restore()
                if not config.dry_run:
                    save()
                fail_once(
                    f'the loss is not finite at stage {stage}, epoch {epoch + 1}, step {progress.step + 1}, learning '
                    f'rate {rates["lr"] or rates["pool_lr"]:.3g}. The state before that step is checkpoint '
                    f'{progress.name}. Lower the learning rate, lengthen the warm-up or clip gradients, and start '
                    'anew, if you like with that checkpoint as --model.checkpoint'
                )
            optimizer.step()
            optimizer.zero_grad()
            if ema is not None:
                ema.update(model, step=updates)
            progress.step += 1
            progress.loss_sum += mean_loss

            # Progress bar, logs and checkpoints
            elapsed = time.perf_counter() - started
            speed = (progress.step - first_step) * config.global_batch_size / elapsed
            bar.update()
            bar.set_postfix_str(f'loss {mean_loss:.4f}, {speed:.0f} images/s', refresh=False)
            if config.dry_run:
                if progress.step >= min(DRY_STEPS, steps):
                    bar.close()
                    show_estimate(run, elapsed / (progress.step - first_step), steps * settings.epochs)
                    return unwrapped(run, wrapped, model)
                if progress.step == 1:
                    started, first_step = time.perf_counter(), 1
                continue
            if logs and (progress.step % config.log_every == 0 or progress.step == steps):
                logs.step(stage, epoch, mean_loss, rates, speed, data_time / elapsed)
                shown = {f'train/{name}': rate for name, rate in rates.items() if rate is not None}
                accelerator.log({'train/loss': mean_loss, **shown}, step=offset + updates + 1)
            due = due or (config.checkpoint_steps and progress.step % config.checkpoint_steps == 0)
            if due or stopping or progress.step == steps:
                save()
                saved = time.monotonic()
            if stopping:
                bar.close()
                leave(run)
        bar.close()

        # The end of an epoch
        share_buffers(averaged, accelerator)
        metrics = validate(run, averaged, maps)
        seconds = time.perf_counter() - started
        if logs:
            logs.weights(averaged, epoch + 1)
            logs.epoch(stage, epoch, progress.loss_sum / steps, metrics, learning_rates(optimizer), seconds)
            accelerator.log({f'val/{key}': value for key, value in metrics.items()}, step=offset + (epoch + 1) * steps)
        run.console.print(
            f'stage {stage}  epoch {epoch + 1:3d}/{settings.epochs}  loss {progress.loss_sum / steps:.4f}  '
            f'validation: loss {metrics["loss"]:.4f}  top-1 {metrics["top1"]:6.2f} %  {seconds:.1f} s',
            soft_wrap=True,
        )
        progress.epoch, progress.step, progress.loss_sum = epoch + 1, 0, 0.0
        progress.note_accuracy(metrics['top1'])
        if stage == 1:
            progress.summary[NATIVE] = metrics
        save()
        if host.sum(bool(run.stop))[0]:
            leave(run)

    model = unwrapped(run, wrapped, model)
    if ema is not None:
        model.load_state_dict(ema.module.state_dict())
    share_buffers(model, accelerator)
    if stage == 2 and not config.dry_run:
        end_pooling(run, model)
    if stage == 2 and config.stage2.train != 'pool':
        # Average pooling would profit from the other trained weights too.
        gain = average_gain(run, model)
        if gain is not None:
            with simpler_pooling(model, 1.0, gain):
                progress.summary['average + gain, rest as trained'] = validate(run, model, maps)
    return model


def validate(run: Run, model: nn.Module, maps: FeatureCache | None) -> dict[str, float]:
    """Loss and accuracy on the validation images, from their maps where these are stored."""
    if maps is None:
        return run.evaluate(model, run.val_images(), len(run.val))
    return run.evaluate(PoolAndClassifier(model), maps.val_batches(run.local_batch, run.shard), maps.val.readable)


def compare_poolings(run: Run, model: nn.Module, maps: FeatureCache | None) -> None:
    """Evaluate the pooling before it trains, and simpler ones in its place, for the table at the end."""
    if not run.trained:
        return
    for title, (power, gain) in run.progress.simpler.items():
        with simpler_pooling(model, power, gain):
            run.progress.summary[title] = validate(run, model, maps)
    start = 'calibrated' if run.config.stage2.calibrate and run.progress.simpler else 'before training'
    run.progress.summary[f'{pool_title(run.config.pool)} {start}'] = validate(run, model, maps)


def describe_positions(run: Run, positions: UsedPositions) -> str | None:
    """A sentence about how far the plan is from uniform, over the images of all processes."""
    used, count = run.host.sum(sum(float(some.sum()) for some in positions.used), sum(map(len, positions.used)))
    total = max(run.host.gather(positions.total))
    return positions_sentence(used / count, total) if count else None


def make_optimizer(model: nn.Module, settings: StageConfig) -> torch.optim.Optimizer:
    """timm's optimizer. In stage 2 the parameters of ROT pools are in separate groups, marked `pooling`."""
    pools = rotp_vision.rot_pools(model)
    fixed = getattr(model, 'no_weight_decay', set)()
    groups: list[dict[str, Any]] = param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=fixed)
    lr = settings.lr
    if isinstance(settings, PoolStageConfig):
        ours = {id(parameter) for pool in pools.values() for parameter in pool.parameters()}
        alone = settings.train == 'pool'
        lr = settings.pool_lr if alone else settings.lr
        # timm's schedules multiply by lr_scale, so that both rates follow the same curve.
        scale = {} if alone else {'lr_scale': settings.pool_lr / settings.lr}
        parts = []
        for pooling, others in ((False, {}), (True, scale)):
            for group in groups:
                chosen = [parameter for parameter in group['params'] if (id(parameter) in ours) == pooling]
                parts.append(group | {'params': chosen, 'pooling': pooling} | others)
        groups = [group for group in parts if group['params']]
    return create_optimizer_v2(groups, settings.optimizer, lr, momentum=settings.momentum)


def learning_rates(optimizer: torch.optim.Optimizer) -> Rates:
    """Current learning rates of the pooling and of the rest; None for what is not trained."""
    rates = {group.get('pooling', False): group['lr'] for group in optimizer.param_groups}
    return {'lr': rates.get(False), 'pool_lr': rates.get(True)}


def make_scheduler(optimizer: torch.optim.Optimizer, settings: StageConfig, steps: int) -> Any:
    """timm's schedule by updates. It is not prepared by Accelerate, which would step it once per process."""
    flat_schedule = settings.schedule == 'constant'
    scheduler, _ = create_scheduler_v2(
        optimizer,
        'step' if flat_schedule else settings.schedule,
        num_epochs=settings.epochs,
        decay_epochs=settings.decay_epochs,  # type: ignore[arg-type]
        decay_rate=1.0 if flat_schedule or settings.schedule == 'poly' else settings.decay_rate,
        min_lr=settings.min_lr,
        warmup_lr=settings.warmup_lr,
        warmup_epochs=settings.warmup_epochs,  # type: ignore[arg-type]
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    return scheduler


def make_mixup(settings: StageConfig, num_classes: int) -> Mixup | None:
    if not (settings.mixup or settings.cutmix):
        return None
    return Mixup(settings.mixup, settings.cutmix, label_smoothing=settings.label_smoothing, num_classes=num_classes)


def stage_batches(run: Run, settings: StageConfig, stage: int, maps: FeatureCache | None) -> Iterator[Batch]:
    """Batches of the forward passes of this process from the current step to the end of the stage."""
    config = run.config
    schedule = Schedule(
        length=len(run.train),
        global_batch=config.global_batch_size,
        accumulation=settings.accumulation,
        shard=run.shard,
        seed=2 * config.seed + stage - 1,  # the stages use different orders of the images
        epochs=range(run.progress.epoch, settings.epochs),
        start=run.progress.step,
    )
    if maps is not None:
        return maps.train_batches(schedule, config.data.workers)
    return train_batches(run.train, run.train_transform, config.data, schedule)


def restore_generators(run: Run, checkpoint: Checkpoint) -> None:
    """Restore loss scaler and random generators; with another number of processes the generators are seeded anew."""
    if run.accelerator.scaler is not None:
        run.accelerator.scaler.load_state_dict(checkpoint.state['scaler'])
    states = checkpoint.state['random']
    if len(states) == run.shard.processes:
        set_random_state(states[run.shard.rank])
    else:
        run.console.print(f'[yellow]warning:[/] the run had {len(states)} processes: dropout and mixup are drawn anew')
        seed_all(run.config.seed, run.progress.stage, run.shard.rank, run.progress.epoch, run.progress.step)


def unwrapped(run: Run, wrapped: nn.Module, model: nn.Module) -> nn.Module:
    """The model without Accelerate's wrappers; Accelerate releases what it holds of this stage."""
    run.accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    run.accelerator.free_memory()
    model._compiled_call_impl = None  # set by `compile`; the next stage has another graph
    return model


def check_beginning(config: RunConfig) -> None:
    """Raise if stage 2 alone would keep untrained weights frozen."""
    if config.stage1.epochs or config.stage2.train == 'all' or config.evaluate is not None:
        return
    if not (config.model.pretrained or config.model.checkpoint):
        raise ValueError(
            f'stage 2 by itself with stage2.train {config.stage2.train} needs a trained network: give model.pretrained '
            'or model.checkpoint, or train from scratch with stage2.train all'
        )


def check_stages(config: RunConfig, model: nn.Module) -> None:
    """Find errors of stage 2 and of the optimizers before stage 1 begins, on a copy of the model."""
    with torch.random.fork_rng(devices=[]):
        copied = copy.deepcopy(model)
        for stage, settings in ((1, config.stage1), (2, config.stage2)):
            if not settings.epochs:
                continue
            if stage == 2:
                rotp_vision.freeze(convert_model(copied, config.pool), config.stage2.train)
                if config.stage2.cache_features and not hasattr(copied, 'forward_features'):
                    raise ValueError(
                        f'{config.model.name} has no forward_features, as timm networks do: set stage2.cache_features '
                        'false'
                    )
            try:
                make_optimizer(copied, settings)
            except (ValueError, TypeError, AssertionError) as error:
                raise ValueError(f'stage{stage}.optimizer {settings.optimizer!r} cannot be created: {error}') from error


def show_estimate(run: Run, seconds: float, steps: int) -> None:
    total = timedelta(seconds=round(seconds * steps))
    run.console.print(f'  {seconds:.3f} s a step, about {total} for {steps:,} steps, evaluation and cache apart\n')


class Logs:
    """The CSV files of a run; their rows are part of its checkpoints."""

    def __init__(self, run: Run):
        self.progress = run.progress
        self.steps = report.CsvLog(run.output / 'steps.csv', run.progress.steps)
        self.epochs = report.CsvLog(run.output / 'metrics.csv', run.progress.epochs)
        self.learned = report.CsvLog(run.output / 'weights.csv', run.progress.weights)

    def step(self, stage: int, epoch: int, loss: float, rates: Rates, speed: float, data_time_share: float) -> None:
        place = {'stage': stage, 'epoch': epoch, 'step': self.progress.step}
        timing = {'images_per_second': round(speed, 1), 'data_time_share': round(data_time_share, 3)}
        self.steps.append({**place, 'loss': loss, **rates, **timing})

    def epoch(
        self, stage: int, epoch: int, loss: float, metrics: dict[str, float], rates: Rates, seconds: float
    ) -> None:
        place = {'stage': stage, 'epoch': epoch}
        self.epochs.append({**place, 'train_loss': loss, **metrics, **rates, 'seconds': round(seconds, 2)})

    def weights(self, model: nn.Module, epoch: int) -> None:
        for name, values in report.learned_weights(rotp_vision.rot_pools(model)).items():
            for module, value in enumerate(values):
                self.learned.append({'epoch': epoch, 'weight': name, 'module': module, 'value': value})


def without_resume(args: Sequence[str]) -> list[str]:
    """A command's arguments without `--resume` and its value."""
    pairs = zip(['', *args], args, strict=False)
    return [arg for before, arg in pairs if '--resume' not in (before, arg) and not arg.startswith('--resume=')]


def leave(run: Run) -> NoReturn:
    """End a run that a signal stopped, after its checkpoint was saved."""
    cause = next(name for names in run.host.gather(run.stop) for name in names)
    run.console.print(f'stopped by {cause} and saved as {run.progress.name}; continue with', soft_wrap=True)
    script, *args = without_resume(sys.argv)
    command = ['python', script] if script.endswith('.py') else [Path(script).name]
    run.console.print(f'  {shlex.join([*command, *args])} --resume auto', soft_wrap=True, markup=False)
    run.accelerator.end_training()
    raise SystemExit(exit_status(cause))


if __name__ == '__main__':
    main()
