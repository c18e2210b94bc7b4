"""The beginning of a run: data, processes, checkpoint and model, with every error found before training."""

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from timm.layers import convert_sync_batchnorm  # pyright: ignore[reportPrivateImportUsage]
from torch import nn

from rotp_vision.data.loading import split_batch, steps_per_epoch
from rotp_vision.data.sources import Source, data_changes, hold_out, inventory, open_sources
from rotp_vision.data.transforms import transforms
from rotp_vision.data.workers import check_shared_memory, seed_all
from rotp_vision.files import check_writable
from rotp_vision.surgery.freeze import freeze_parameters
from rotp_vision.training.cache import cache_directory
from rotp_vision.training.checkpoint import Checkpoint, Progress, find_checkpoint
from rotp_vision.training.config import RunConfig, changed_epochs, changes, to_dict
from rotp_vision.training.model import build_model, convert_model, load_for_evaluation, normalization
from rotp_vision.training.optimize import make_optimizer
from rotp_vision.training.processes import (
    check_launch,
    check_shared,
    check_trackers,
    fail,
    fail_once,
    gather,
    hold,
    precision,
    together,
)
from rotp_vision.training.run import Run

FEW_STEPS = 300  # updates of stage 1 from trained weights, below which more epochs or a probe are suggested


def start(config: RunConfig) -> tuple[Run, nn.Module]:
    """Returns a run and its model, with the native pooling unless the run evaluates another; exits on any error."""
    writes = config.evaluate is None and not config.dry_run
    accelerator = _connect(config, writes)
    checkpoint, warnings, news = None, list[str](), list[str]()
    workers = min(config.data.workers, _cores_per_process())
    if workers < config.data.workers:
        news.append(
            f'{workers} data workers instead of {config.data.workers}: there are no more cores for each process'
        )
        config.data.workers = workers
    stored = to_dict(config) | {'mixed_precision': accelerator.mixed_precision}
    with together():
        train, val = open_sources(config.data, config.seed)
        inventories = {'train': inventory(train), 'val': inventory(val)}
        train, held = _hold_out(config, train)
        if writes and accelerator.is_main_process:
            check_writable(Path(config.output))
            if Path(config.output).is_dir():
                hold(Path(config.output))
    of_main = gather(inventories)[0]
    with together():
        # Copies of the images on other machines may have other modification times.
        if lines := data_changes(of_main, inventories, ['files']):
            raise ValueError('the images are not those of process 0:\n  ' + '\n  '.join(lines))
        if writes:
            checkpoint, warnings = find_checkpoint(Path(config.output) / 'checkpoints', config.resume)
        if checkpoint is not None:
            news += _check_continuation(config, stored, checkpoint, of_main, warnings)
    found = gather(checkpoint.path.name if checkpoint else None)
    if len({*found}) > 1:
        fail_once(f'processes find different checkpoints ({found}): --output must be on storage that all nodes share')
    if accelerator.num_processes > 1 and writes and config.stage2.epochs and config.stage2.cache_features:
        with together():
            check_shared(cache_directory(config), 'stage2.cache_dir')

    seed_all(config.seed)  # every process initialises the same model
    new_classifier = list[str]()
    with together((ValueError, OSError, RuntimeError, TypeError, AssertionError)):
        model = _make_model(config, len(train.classes), accelerator.num_processes, new_classifier.append)
    progress = checkpoint.progress if checkpoint else Progress(stage=1 if config.stage1.epochs else 2)
    progress.data = of_main
    begins_trained = bool(config.model.checkpoint) or config.model.pretrained
    train_transform, val_transform = transforms(config.data, *normalization(model))
    run = Run(
        config=config,
        stored_config=stored,
        accelerator=accelerator,
        train=train,
        val=val,
        held=held,
        train_transform=train_transform,
        val_transform=val_transform,
        norm=normalization(model),
        progress=progress,
        checkpoint=checkpoint,
        trained=bool(config.stage1.epochs) or (begins_trained and not new_classifier),
        stop=[],
    )
    for warning in warnings:
        run.warn(warning)
    few = FEW_STEPS // max(1, len(train) // config.global_batch_size) if begins_trained and config.stage1.epochs else 0
    if few > config.stage1.epochs:
        news.append(
            f'{config.stage1.epochs} epochs of {len(train):,} images are few updates: stage1.epochs {few} would make '
            f'{FEW_STEPS}. For a few hundred images `rotp-vision probe` is faster, and often more accurate'
        )
    for line in (*news, *(new_classifier if checkpoint is None else ())):
        run.say(line)
    return run, model


def _cores_per_process() -> int:
    """Returns the cores of this machine for each of its processes, at least one."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get('LOCAL_WORLD_SIZE', '1')))


def _hold_out(config: RunConfig, train: Source) -> tuple[Source, Source | None]:
    """Returns the images to train on, and those held out for calibration."""
    if config.evaluate is not None:
        return train, None
    held, more = None, ''
    begins_trained = config.stage1.epochs or config.model.pretrained or config.model.checkpoint
    count = min(config.stage2.calibrate, len(train) // 5) if config.stage2.epochs and begins_trained else 0
    if count:
        train, held = hold_out(train, count, config.seed)
        more = f'; {count} more are held out by stage2.calibrate'
    try:
        steps_per_epoch(len(train), config.global_batch_size)
    except ValueError as error:
        raise ValueError(f'{error}{more}') from error
    return train, held


def _connect(config: RunConfig, writes: bool) -> Accelerator:
    """Connects the processes."""
    if config.deterministic:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not config.deterministic
    try:
        check_trackers(config.trackers)
        accelerator = Accelerator(
            mixed_precision=precision(config.mixed_precision),
            log_with=[*config.trackers] if writes and config.trackers else None,
            project_dir=config.output,
            # The script accumulates gradients itself. Without this an environment variable could scale them again.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            # The other processes wait while the main one calibrates and draws.
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=1))],
        )
        check_launch(accelerator)
    except (ValueError, RuntimeError) as error:
        if 'gloo' in str(error).lower():
            fail(
                f'{error}\nThe processes do not all reach each other: name the network interface that connects the '
                'nodes (`ip addr` lists them), as in GLOO_SOCKET_IFNAME=eth0'
            )
        fail_once(error)
    return accelerator


def _check_continuation(
    config: RunConfig, stored: dict[str, Any], checkpoint: Checkpoint, inventories: dict[str, Any], warnings: list[str]
) -> list[str]:
    """Raises a ValueError if settings or data are not those of the checkpoint; returns changes to tell the user."""
    if lines := changes(checkpoint.config, stored):
        raise ValueError(
            'a continued run must keep its settings; these differ from the checkpoint:\n  ' + '\n  '.join(lines)
        )
    progress = checkpoint.progress
    news = changed_epochs(checkpoint.config, stored, progress.stage, progress.epoch + bool(progress.step))
    if lines := data_changes(progress.data, inventories):
        if not config.allow_changed_data:
            raise ValueError(
                'the images are not those that the run began with:\n  '
                + '\n  '.join(lines)
                + '\nRestore those images, '
                'or continue with these by --allow-changed-data'
            )
        warnings.append('; '.join(lines))
    return news


def _make_model(config: RunConfig, num_classes: int, processes: int, notify: Callable[[str], object]) -> nn.Module:
    """Returns the model; `notify` is called if its classifier is new."""
    images = config.global_batch_size // processes  # that data workers hold for evaluation
    if config.evaluate is None:
        images *= 2  # and at most as many for training
    check_shared_memory(config.data.workers, 3 * config.data.image_size**2 * images)
    if config.evaluate is not None:
        return load_for_evaluation(config.evaluate, config.model, config.pool, num_classes)
    for stage in (config.stage1, config.stage2):
        size = split_batch(config.global_batch_size, processes, stage.accumulation)
        if (stage.mixup or stage.cutmix) and size % 2:
            raise ValueError(f'mixup needs an even number of images per forward pass and process, got {size}')
    trains = bool(config.stage1.epochs) or config.stage2.train != 'pool'
    model = build_model(config.model, num_classes, new_classifier=trains, notify=notify)
    _check_stages(config, model)
    return convert_sync_batchnorm(model) if config.sync_batchnorm and processes > 1 else model


def _check_stages(config: RunConfig, model: nn.Module) -> None:
    """Finds errors of stage 2 and of the optimizers before stage 1 begins, on a copy of the model."""
    with torch.random.fork_rng(devices=[]):
        copied = copy.deepcopy(model)
        for stage, settings in ((1, config.stage1), (2, config.stage2)):
            if not settings.epochs:
                continue
            if stage == 2:
                freeze_parameters(convert_model(copied, config.pool), config.stage2.train)
                if config.stage2.cache_features and not hasattr(copied, 'forward_features'):
                    raise ValueError(
                        f'{config.model.name} has no forward_features, as timm networks do: set stage2.cache_features '
                        'false'
                    )
            try:
                make_optimizer(copied, settings)
            except (ValueError, TypeError, AssertionError) as error:
                raise ValueError(f'stage{stage}.optimizer {settings.optimizer!r} cannot be created: {error}') from error
