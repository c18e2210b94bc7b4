#!/usr/bin/env python
"""Train an image classifier in two stages: with its native pooling, then with ROTP in its place.

    python train_imagenet.py --config configs/demo.yaml
    accelerate launch --config_file configs/accelerate/one_node_8_gpus.yaml train_imagenet.py \
        --config configs/paper_resnet50.yaml --data.path /data/imagenet --output runs/resnet50
    python train_imagenet.py … --resume auto                      # continue after any interruption, bit-exactly
    python train_imagenet.py … --evaluate runs/resnet50/export    # only evaluate

`--help` explains every setting.
"""

import contextlib
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import timm
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from rich.console import Console
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from tqdm import tqdm

import rotp_vision
from rotp_vision.training import cache as feature_cache
from rotp_vision.training import report
from rotp_vision.training.checkpoint import Checkpoint, Progress, find_checkpoint, save_checkpoint, write_atomically
from rotp_vision.training.config import RunConfig, StageConfig, changes, parse_config, to_dict
from rotp_vision.training.data import (
    Batch,
    Shard,
    TrainImages,
    Transform,
    ValImages,
    shard_loader,
    split_batch,
    steps_per_epoch,
    train_loader,
    transforms,
    val_loader,
)
from rotp_vision.training.model import (
    TORCHVISION,
    build_model,
    convert_model,
    count_parameters,
    load_for_evaluation,
    map_shape,
    normalization,
    published_classes,
)
from rotp_vision.training.processes import (
    HostGroup,
    LossWatch,
    check_launch,
    random_state,
    seed_all,
    set_random_state,
    share_buffers,
    stop_signals,
)
from rotp_vision.training.sources import Source, StreamSource, open_sources

DRY_STEPS = 4  # of each stage; the first warms up and is not timed


@dataclass
class Run:
    """What every part of a run shares."""

    config: RunConfig
    stored_config: dict[str, Any]
    accelerator: Accelerator
    host: HostGroup
    console: Console
    stop: list[str]  # names of the signals that came
    train: Source | StreamSource
    val: Source | StreamSource
    train_transform: Transform
    val_transform: Transform
    progress: Progress

    @property
    def shard(self) -> Shard:
        return Shard(self.accelerator.process_index, self.accelerator.num_processes)

    @property
    def output(self) -> Path:
        return Path(self.config.output)

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process


def main(args: Sequence[str] | None = None) -> None:
    # Configuration. Whatever can be wrong with it, the data or the checkpoint is found before any GPU is touched.
    config = parse_config(args)
    output = Path(config.output)
    try:
        train, val = open_sources(config.data, config.seed)
        num_classes = len(train.classes)
        check_classes(config, num_classes)
        checkpoint, warnings = None, []
        if not (config.dry_run or config.evaluate):
            checkpoint, warnings = find_checkpoint(output / 'checkpoints', config.resume)
    except (ValueError, OSError) as error:
        fail(error)

    # Processes
    if config.deterministic:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not config.deterministic
    precision = None if config.mixed_precision == 'auto' else config.mixed_precision
    logs = config.trackers if not (config.dry_run or config.evaluate) else []
    accelerator = Accelerator(mixed_precision=precision, log_with=logs or None, project_dir=output)
    check_launch(accelerator)
    console = Console(quiet=not accelerator.is_main_process, highlight=False)
    for warning in warnings:
        console.print(f'[yellow]warning:[/] {warning}')
    stored = to_dict(config) | {'mixed_precision': accelerator.mixed_precision}
    if checkpoint is not None and (lines := changes(checkpoint.config, stored)):
        fail('a continued run must keep its settings; these differ from the checkpoint:\n  ' + '\n  '.join(lines))

    # Model, on every process from the same seed
    seed_all(config.seed)
    try:
        with accelerator.main_process_first():
            if config.evaluate:
                model = load_for_evaluation(config.evaluate, config.model, num_classes)
            else:
                model = build_model(config.model, num_classes)
        for stage in (config.stage1, config.stage2):
            split_batch(config.global_batch_size, accelerator.num_processes, stage.accumulation)
        steps_per_epoch(len(train), config.global_batch_size)
    except (ValueError, OSError, RuntimeError) as error:
        fail(error)
    mean, std = normalization(model)
    train_transform, val_transform = transforms(config.data, mean, std)
    progress = checkpoint.progress if checkpoint else Progress(stage=1 if config.stage1.epochs else 2)

    with stop_signals() as stop:
        run = Run(
            config, stored, accelerator, HostGroup(accelerator), console, stop,
            train, val, train_transform, val_transform, progress,
        )  # fmt: skip
        if config.evaluate:
            evaluate_only(run, model)
        else:
            train_and_report(run, model, checkpoint)
    accelerator.end_training()


def train_and_report(run: Run, model: nn.Module, checkpoint: Checkpoint | None) -> None:
    """Both stages, then tables, pictures and export."""
    config, progress, console = run.config, run.progress, run.console
    if run.main and not config.dry_run:
        run.output.mkdir(parents=True, exist_ok=True)
        write_atomically(run.output / 'config.yaml', yaml.safe_dump(plain(run.stored_config), sort_keys=False))
    if config.trackers and not config.dry_run:
        run.accelerator.init_trackers('rotp_vision', config=dict(flat(run.stored_config)))
    if checkpoint is not None:
        console.print(f'continuing from {checkpoint.path}')

    if progress.stage == 1:
        model = train_stage(run, model, 1, checkpoint)
        checkpoint = None
        if config.stage2.epochs and not config.dry_run:
            start_stage_2(progress)
    if config.stage2.epochs:
        knows_classes = config.model.pretrained or config.model.checkpoint is not None
        if checkpoint is None and 'native' not in progress.summary and knows_classes and not config.dry_run:
            place(run, model)
            progress.summary['native'] = evaluate(run, model, images_for_evaluation(run))
        model = convert_model(model, config.pool)
        model = train_stage(run, model, 2, checkpoint)
    if config.dry_run:
        return

    # Report
    stage = progress.stage
    if stage == 2:
        # On the images themselves, whatever the epochs' evaluations were made from.
        progress.summary[pool_title(config)] = evaluate(run, model, images_for_evaluation(run))
    if run.main:
        finish(run, model)
    run.host.wait()


def start_stage_2(progress: Progress) -> None:
    progress.stage, progress.epoch, progress.step, progress.best, progress.best_name = 2, 0, 0, -1.0, ''


def train_stage(run: Run, model: nn.Module, stage: int, checkpoint: Checkpoint | None) -> nn.Module:
    """Trains one stage from its start or from a checkpoint of it; returns the model with the weights to go on with."""
    config, accelerator, progress, host = run.config, run.accelerator, run.progress, run.host
    settings = config.stage1 if stage == 1 else config.stage2
    cached = stage == 2 and config.stage2.cache_features
    steps = steps_per_epoch(len(run.train), config.global_batch_size)
    pools = rotp_vision.rot_pools(model) if stage == 2 else {}

    # Model: the frozen part neither moves its statistics nor takes part in the backward pass
    if stage == 2:
        rotp_vision.freeze(model, config.stage2.train)
    if config.sync_batchnorm and accelerator.num_processes > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if checkpoint is not None:
        model.load_state_dict(checkpoint.model)
    place(run, model)
    ema = ModelEmaV3(model, settings.ema_decay, use_warmup=True) if settings.ema_decay else None

    # Optimizer
    optimizer = create_optimizer_v2(
        model, settings.optimizer, settings.lr, settings.weight_decay, settings.momentum
    )
    scheduler = make_scheduler(optimizer, settings, steps)
    if checkpoint is not None:
        optimizer.load_state_dict(checkpoint.state['optimizer'])
        if ema is not None:
            ema.module.load_state_dict(checkpoint.state['ema'])

    show_stage(run, model, stage, settings, steps)
    maps = prepare_cache(run, model) if cached and not config.dry_run else None

    # DDP must see the whole forward pass: a part of the model called by itself would leave gradients apart.
    wrapped, optimizer = accelerator.prepare(feature_cache.PoolAndClassifier(model) if maps else model, optimizer)
    if config.compile:
        wrapped.compile()
    evaluated = model if ema is None else ema.module
    if maps:
        evaluated = feature_cache.PoolAndClassifier(evaluated)
    mixup = make_mixup(settings, len(run.train.classes))
    smoothing = 0.0 if mixup else settings.label_smoothing
    if checkpoint is not None:
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(checkpoint.state['scaler'])
        restore_random_state(run, checkpoint)
    else:
        seed_all(config.seed, stage, run.shard.rank)

    def save() -> None:
        """One checkpoint of this very point; the main process writes, all learn whether it worked."""
        states = host.gather(random_state())
        problem = None
        if run.main:
            state: dict[str, Any] = {'optimizer': optimizer.state_dict(), 'random': states}
            state['ema'] = ema.module.state_dict() if ema is not None else None
            state['scaler'] = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
            try:
                save_checkpoint(
                    run.output / 'checkpoints', progress, plain(run.stored_config), model.state_dict(), state, config.keep
                )
            except OSError as error:
                problem = str(error)
        problem = next(filter(None, host.gather(problem)), None)
        if problem:
            fail(problem)

    # Loop
    main_logs = run.main and not config.dry_run
    step_log = report.CsvLog(run.output / 'steps.csv', progress.steps) if main_logs else None
    epoch_log = report.CsvLog(run.output / 'metrics.csv', progress.epochs) if main_logs else None
    weight_log = report.CsvLog(run.output / 'weights.csv', progress.weights) if main_logs and pools else None
    if weight_log and not progress.weights:
        log_weights(weight_log, pools, 0)
    buffers = [buffer for buffer in model.buffers() if buffer.numel()]
    good_buffers = [buffer.clone() for buffer in buffers]
    watch = LossWatch(accelerator.device)
    offset = config.stage1.epochs * steps if stage == 2 else 0  # of the trackers' step axis

    for epoch in range(progress.epoch, settings.epochs):
        wrapped.train()
        batches = epoch_of_batches(run, settings, stage, epoch, progress.step, maps)
        bar = tqdm(
            initial=progress.step, total=steps, desc=f'stage {stage} epoch {epoch + 1}/{settings.epochs}',
            unit='step', leave=False, disable=not (run.main and sys.stderr.isatty()),
        )  # fmt: skip
        started, first_step, data_time = time.perf_counter(), progress.step, 0.0
        while progress.step < steps:
            updates = epoch * steps + progress.step
            scheduler.step_update(updates)
            broken: list[str] = []
            loss = torch.zeros((), device=accelerator.device)
            torch._foreach_copy_(good_buffers, buffers)
            for forward in range(settings.accumulation):
                last = forward + 1 == settings.accumulation
                waited = time.perf_counter()
                batch = next(batches)
                data_time += time.perf_counter() - waited
                broken += batch.broken
                images, labels = to_device(run, batch)
                if mixup is not None:
                    images, labels = mixup(images, labels)
                with contextlib.nullcontext() if last else accelerator.no_sync(wrapped):
                    part = F.cross_entropy(wrapped(images), labels, label_smoothing=smoothing) / settings.accumulation
                    loss += part.detach()
                    if last:
                        watch.record(loss)
                    accelerator.backward(part)

            # All processes agree on what happened before any of them moves a weight.
            value = watch.read()
            finite = math.isfinite(value)
            mean_loss, bad, stopping, news = host.sum(
                value / run.shard.processes if finite else 0.0, not finite, bool(run.stop), bool(broken)
            )
            if news:
                note_broken(run, [name for names in host.gather(broken) for name in names])
            if bad:
                torch._foreach_copy_(buffers, good_buffers)
                if not config.dry_run:
                    save()
                fail(
                    f'the loss is not finite at stage {stage}, epoch {epoch + 1}, step {progress.step + 1} (learning rate '
                    f'{optimizer.param_groups[0]["lr"]:.3g}); the state before that step is saved as {progress.name}. '
                    'Lower the learning rate, lengthen the warm-up or clip gradients, and start anew from it with '
                    '--model.checkpoint'
                )
            if settings.clip_norm is not None:
                accelerator.clip_grad_norm_(wrapped.parameters(), settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            if ema is not None:
                ema.update(model, step=updates)
            progress.step += 1
            progress.loss_sum += mean_loss

            # What a person sees, and what a crash may not take
            speed = (progress.step - first_step) * config.global_batch_size / (time.perf_counter() - started)
            bar.update()
            bar.set_postfix_str(f'loss {mean_loss:.4f}, {speed:.0f} images/s', refresh=False)
            if config.dry_run:
                if progress.step == 1:
                    started, first_step = time.perf_counter(), 1
                if progress.step >= min(DRY_STEPS, steps):
                    bar.close()
                    show_estimate(run, started, first_step, steps * settings.epochs)
                    progress.step = 0
                    return unwrapped(run, wrapped, model)
                continue
            if progress.step % config.log_every == 0 or progress.step == steps:
                row = {
                    'stage': stage, 'epoch': epoch, 'step': progress.step, 'loss': mean_loss,
                    'lr': optimizer.param_groups[0]['lr'], 'images_per_second': round(speed, 1),
                    'data_time_share': round(data_time / (time.perf_counter() - started), 3),
                }  # fmt: skip
                if step_log:
                    step_log.append(row)
                accelerator.log({'train/loss': mean_loss, 'train/lr': row['lr']}, step=offset + updates + 1)
            due = config.checkpoint_every and progress.step % config.checkpoint_every == 0
            if due or stopping or progress.step == steps:
                save()
            if stopping:
                bar.close()
                leave(run)
        bar.close()

        # Evaluation and the end of the epoch
        share_buffers(evaluated, accelerator)
        val_batches = maps.val_batches(config.global_batch_size, run.shard) if maps else images_for_evaluation(run)
        metrics = evaluate(run, evaluated, val_batches)
        row = {
            'stage': stage, 'epoch': epoch, 'train_loss': progress.loss_sum / steps, **metrics,
            'lr': optimizer.param_groups[0]['lr'], 'seconds': round(time.perf_counter() - started, 2),
        }  # fmt: skip
        if epoch_log:
            epoch_log.append(row)
        if weight_log:
            log_weights(weight_log, rotp_vision.rot_pools(model if ema is None else ema.module), epoch + 1)
        accelerator.log({f'val/{name}': value for name, value in metrics.items()}, step=offset + (epoch + 1) * steps)
        run.console.print(
            f'stage {stage}  epoch {epoch + 1:3d}/{settings.epochs}  loss {row["train_loss"]:.4f}  '
            f'val loss {metrics["loss"]:.4f}  top-1 {metrics["top1"]:6.2f} %  top-5 {metrics["top5"]:6.2f} %  '
            f"{row['seconds']:.1f} s",
            soft_wrap=True,
        )
        progress.epoch, progress.step, progress.loss_sum = epoch + 1, 0, 0.0
        if metrics['top1'] > progress.best:
            progress.best, progress.best_name = metrics['top1'], progress.name
        if stage == 1:
            progress.summary['native'] = metrics
        save()
        if host.sum(bool(run.stop))[0]:
            leave(run)

    model = unwrapped(run, wrapped, model)
    if ema is not None:
        model.load_state_dict(ema.module.state_dict())
    share_buffers(model, accelerator)
    return model


def unwrapped(run: Run, wrapped: nn.Module, model: nn.Module) -> nn.Module:
    """`model` as it was before Accelerate wrapped it, and Accelerate without a memory of this stage."""
    run.accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    run.accelerator.free_memory()
    return model


def make_scheduler(optimizer: torch.optim.Optimizer, settings: StageConfig, steps: int) -> Any:
    """timm's schedule by updates. It is not prepared by Accelerate, which would step it once per process."""
    constant = settings.schedule == 'constant'
    scheduler, _ = create_scheduler_v2(
        optimizer,
        'step' if constant else settings.schedule,
        num_epochs=settings.epochs,
        decay_epochs=settings.decay_epochs,  # type: ignore[arg-type]
        decay_rate=1.0 if constant or settings.schedule == 'poly' else settings.decay_rate,
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


def epoch_of_batches(
    run: Run, settings: StageConfig, stage: int, epoch: int, start: int, maps: feature_cache.FeatureCache | None
) -> Iterator[Batch]:
    """This process's forward passes from step `start` of an epoch on."""
    config = run.config
    seed = 2 * config.seed + stage - 1  # epochs of the two stages are not in the same order
    common = {
        'global_batch': config.global_batch_size, 'accumulation': settings.accumulation, 'shard': run.shard,
        'seed': seed, 'epoch': epoch, 'start': start,
    }  # fmt: skip
    if maps is not None:
        return maps.train_batches(**common, workers=config.data.workers)
    return train_loader(run.train, run.train_transform, config.data, **common)


def place(run: Run, model: nn.Module) -> None:
    """Moves a model to the device and memory format of the run."""
    model.to(run.accelerator.device)
    if run.config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def to_device(run: Run, batch: Batch) -> tuple[Tensor, Tensor]:
    device = run.accelerator.device
    images, labels = batch.images.to(device, non_blocking=True), batch.labels.to(device, non_blocking=True)
    if run.config.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return images.float(), labels


def images_for_evaluation(run: Run) -> Iterator[Batch]:
    size = max(run.config.global_batch_size // run.shard.processes, 1)
    return val_loader(run.val, run.val_transform, run.config.data, size, run.shard)


@torch.no_grad()
def evaluate(run: Run, model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
    """Loss and accuracy over all processes: sums and one count, in which every image is found exactly once."""
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=run.accelerator.device)
    broken: list[str] = []
    for batch in batches:
        broken += batch.broken
        if not len(batch.labels):
            continue
        images, labels = to_device(run, batch)
        with run.accelerator.autocast():
            logits = model(images)
        logits = logits.float()
        best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction='sum')
        sums += torch.stack([loss, best[:, 0].sum(), best.sum(), loss.new_tensor(len(labels))]).double()
    loss, top1, top5, count = run.host.sum(*sums.tolist())
    note_broken(run, [name for names in run.host.gather(broken) for name in names])
    known = set(run.progress.broken)
    if count + len(known) < len(run.val) or count > len(run.val):
        raise RuntimeError(f'evaluation saw {count:.0f} images of {len(run.val)}')
    return {'loss': loss / count, 'top1': 100 * top1 / count, 'top5': 100 * top5 / count, 'images': int(count)}


def note_broken(run: Run, names: list[str]) -> None:
    """Names, counts and remembers unreadable images; too many end the run."""
    known = run.progress.broken
    new = sorted(set(names) - set(known))
    for name in new:
        run.console.print(f'[yellow]warning:[/] unreadable image {name} ({len(known) + 1} so far)', soft_wrap=True)
        known.append(name)
    if len(known) > run.config.data.max_broken:
        fail(f'{len(known)} unreadable images are more than data.max_broken = {run.config.data.max_broken}')


def prepare_cache(run: Run, model: nn.Module) -> feature_cache.FeatureCache:
    """The feature maps of all images by the frozen backbone, computed now or found complete."""
    config, data = run.config, run.config.data
    assert not isinstance(run.train, StreamSource)
    assert not isinstance(run.val, StreamSource)
    views = config.stage2.cache_views
    base = Path(config.stage2.cache_dir) if config.stage2.cache_dir else run.output / 'cache'
    directory = base / feature_cache.fingerprint(model, data, config.seed, views)
    filler = torch.zeros(3, data.image_size, data.image_size)
    parts: dict[str, TrainImages | ValImages] = {'val': ValImages(run.val, run.val_transform, filler)}
    for view in range(views):
        parts[f'train{view}'] = TrainImages(run.train, run.train_transform, config.seed, view)
    if views == 0:
        parts['train0'] = ValImages(run.train, run.val_transform, filler)
    files = {part: feature_cache.shard_file(directory, part, run.shard) for part in parts}
    if any(run.host.gather(not all(file.exists() for file in files.values()))):
        plan = feature_cache.CachePlan(map_shape(model, data.image_size), len(run.train), len(run.val), views)
        if run.main:
            try:
                plan.check_disk(directory)
            except OSError as error:
                fail(error)
        run.console.print(f'computing {plan.bytes / 2**20:.0f} MiB of feature maps {plan.shape} into {directory}')

    @torch.no_grad()
    def compute(images: Tensor) -> Tensor:
        images = images.to(run.accelerator.device, non_blocking=True)
        if config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with run.accelerator.autocast():
            return model.forward_features(images).float()  # type: ignore[operator]

    model.eval()
    size = max(config.global_batch_size // run.shard.processes, 1)
    for part, dataset in parts.items():
        length = len(range(run.shard.rank, len(dataset), run.shard.processes))
        batches = shard_loader(dataset, data, size, run.shard)
        broken = feature_cache.write_shard(files[part], batches, compute, length)
        note_broken(run, [name for names in run.host.gather(broken) for name in names])
    run.host.wait()
    return feature_cache.FeatureCache(directory, views, run.shard.processes)


def restore_random_state(run: Run, checkpoint: Checkpoint) -> None:
    """Each process's own generators as they were; with another number of processes, fresh ones from this point."""
    states = checkpoint.state['random']
    if len(states) == run.shard.processes:
        set_random_state(states[run.shard.rank])
    else:
        run.console.print(f'[yellow]warning:[/] the run had {len(states)} processes: dropout and mixup are drawn anew')
        seed_all(run.config.seed, run.progress.stage, run.shard.rank, run.progress.epoch, run.progress.step)


def check_classes(config: RunConfig, num_classes: int) -> None:
    """A frozen classifier must be one that knows the data's classes."""
    if not config.stage1.epochs and config.stage2.train == 'pool' and config.stage2.epochs and not config.evaluate:
        if not (config.model.pretrained or config.model.checkpoint):
            raise ValueError(
                'stage 2 alone with stage2.train pool needs a trained network: give model.pretrained or model.checkpoint, '
                'or train from scratch with stage2.train all'
            )
        known = published_classes(config.model) if config.model.pretrained else None
        if known is not None and known != num_classes:
            raise ValueError(f'{config.model.name} is pretrained for {known} classes but the data has {num_classes}')


def evaluate_only(run: Run, model: nn.Module) -> None:
    place(run, model)
    report.show_summary(run.console, {str(run.config.evaluate): evaluate(run, model, images_for_evaluation(run))}, {})


def show_stage(run: Run, model: nn.Module, stage: int, settings: StageConfig, steps: int) -> None:
    config = run.config
    total, trained = count_parameters(model)
    micro = split_batch(config.global_batch_size, run.shard.processes, settings.accumulation)
    facts: dict[str, object] = {
        'model': f'{config.model.name}, {total:,} parameters, {trained:,} trained',
        'images': f'{len(run.train):,} for training, {len(run.val):,} for validation, {len(run.train.classes)} classes',
        'batch': f'{config.global_batch_size} = {run.shard.processes} processes × {settings.accumulation} × {micro}',
        'steps': f'{settings.epochs} epochs × {steps} = {settings.epochs * steps:,}',
        'optimizer': f'{settings.optimizer}, learning rate {settings.lr:g}, {settings.schedule}',
        'precision': run.accelerator.mixed_precision,
    }
    if stage == 2:
        facts['pooling'] = f'{", ".join(rotp_vision.rot_pools(model))}: {pool_title(config)}, trains {config.stage2.train}'
    if stage == 2 and config.stage2.cache_features:
        shape = map_shape(model, config.data.image_size)
        plan = feature_cache.CachePlan(shape, len(run.train), len(run.val), config.stage2.cache_views)
        facts['cache'] = f'{plan.bytes / 2**30:.2f} GiB of {shape} maps in float16'
    title = 'with native pooling' if stage == 1 else 'with ROTP'
    report.show_plan(run.console, f'Stage {stage}: {title}', facts)


def show_estimate(run: Run, started: float, first_step: int, steps: int) -> None:
    done = run.progress.step - first_step
    seconds = (time.perf_counter() - started) / max(done, 1)
    total = timedelta(seconds=round(seconds * steps))
    run.console.print(f'  {seconds:.3f} s per step, about {total} for {steps:,} steps (evaluation and cache not counted)\n')


def log_weights(log: report.CsvLog, pools: dict[str, nn.Module], epoch: int) -> None:
    for name, values in report.learned_weights(pools).items():
        for module, value in enumerate(values):
            log.append({'epoch': epoch, 'weight': name, 'module': module, 'value': value})


def finish(run: Run, model: nn.Module) -> None:
    """Tables, pictures and the exported model."""
    config, progress, output = run.config, run.progress, run.output
    pools = rotp_vision.rot_pools(model) if progress.stage == 2 else {}
    summary = {('native pooling' if name == 'native' else name): row for name, row in progress.summary.items()}
    report.show_summary(run.console, summary, report.learned_weights(pools))
    report.plot_curves(output / 'curves.png', progress.epochs)
    pictures = ['curves.png']
    if pools:
        report.plot_weights(output / 'weights.png', progress.weights)
        pictures.append('weights.png')
        if picture_where_looked(run, model, pools):
            pictures.append('looked.png')
    run.console.print('pictures: ' + ', '.join(str(output / name) for name in pictures), soft_wrap=True)
    run.console.print(f'metrics:  {output / "metrics.csv"}, {output / "steps.csv"}', soft_wrap=True)
    if not config.model.name.startswith(TORCHVISION):
        run.console.print(f'model:    {export(model, output / "export", bool(pools))}', soft_wrap=True)


def export(model: nn.Module, directory: Path, converted: bool) -> str:
    """Writes safetensors and config.json in timm's layout; returns the line that loads them."""
    model = model.cpu().eval()
    if converted:
        rotp_vision.save_pretrained(model, directory)
        return f"rotp_vision.load_pretrained('{directory}')"
    timm.models.save_for_hf(model, str(directory), safe_serialization=True)
    return f"timm.create_model('local-dir:{directory}', pretrained=True)"


def picture_where_looked(run: Run, model: nn.Module, pools: dict[str, nn.Module]) -> bool:
    """looked.png: some validation images and the weight of each place; False where no pooling is a global one."""
    pool = next((pool for pool in reversed(list(pools.values())) if hasattr(pool, 'plan')), None)
    if pool is None or isinstance(run.val, StreamSource):
        return False
    dataset = ValImages(run.val, run.val_transform)
    places = torch.linspace(0, len(dataset) - 1, 9).long().tolist()
    samples = [sample for sample in (dataset[place] for place in places) if sample[0] is not None][:8]
    images = torch.stack([image for image, _, _ in samples if image is not None]).to(run.accelerator.device)
    looked, logits = report.where_pool_looked(model.eval(), pool, images)
    names = run.val.classes
    guesses = logits.argmax(1).tolist()
    titles = [
        f'{names[label]}' + ('' if guess == label else f'\nseen as {names[guess]}')
        for (_, label, _), guess in zip(samples, guesses, strict=True)
    ]
    mean, std = normalization(model)
    report.plot_looked(run.output / 'looked.png', images, looked, titles, mean, std)
    return True


def pool_title(config: RunConfig) -> str:
    options = config.pool.options
    return 'ROTP ' + (options if isinstance(options, str) else str(options.get('solver', 'badmm-e')))


def leave(run: Run) -> NoReturn:
    """After a signal, with everything saved."""
    command = shlex.join([sys.argv[0], *sys.argv[1:]])
    cause = run.stop[0] if run.stop else 'a signal to another process'
    run.console.print(f'\nstopped by {cause}; saved as {run.progress.name}. Continue with\n', soft_wrap=True)
    run.console.print(f'  python {command} --resume auto\n', soft_wrap=True)
    run.accelerator.end_training()
    raise SystemExit(0)


def fail(error: object) -> NoReturn:
    print(f'error: {error}', file=sys.stderr, flush=True)
    raise SystemExit(1)


def plain(values: Any) -> Any:
    """Tuples as lists, so that YAML and JSON give back what they were given."""
    if isinstance(values, dict):
        return {key: plain(value) for key, value in values.items()}
    return [plain(value) for value in values] if isinstance(values, (list, tuple)) else values


def flat(values: dict[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Dotted keys and values that every tracker accepts."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f'{prefix}{key}.')
        else:
            yield prefix + key, value if isinstance(value, (int, float, str, bool)) else str(value)


if __name__ == '__main__':
    main()
