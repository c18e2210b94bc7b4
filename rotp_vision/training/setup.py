"""The beginning of a run: data, processes, checkpoint and model, with every error found before training."""

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from rich.console import Console
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
    fail_together,
    hold,
    is_first_process,
    num_launched,
    precision,
)
from rotp_vision.training.run import Run


class Inputs(NamedTuple):
    """The inputs of a run."""

    train: Source
    val: Source
    held: Source | None  # training images held out for calibration
    inventories: dict[str, Any]  # of both splits
    checkpoint: Checkpoint | None  # to continue from
    warnings: list[str]  # about damaged checkpoints


def start(config: RunConfig) -> tuple[Run, nn.Module]:
    """Returns a run and its model, with the native pooling unless the run evaluates another; exits on any error."""
    writes_nothing = config.dry_run or config.evaluate is not None
    # Errors in data and checkpoint are found before a GPU is used. Several processes connect first, to report such an
    # error once, and end before the model is built.
    inputs, problem = None, None
    try:
        inputs = _open_inputs(config, writes_nothing)
    except (ValueError, OSError) as error:
        problem = error
        if num_launched() == 1:
            fail(error)
    accelerator = _connect(config, writes_nothing)
    fail_together(problem)
    assert inputs is not None
    console = Console(quiet=not accelerator.is_main_process, highlight=False)
    stored = to_dict(config) | {'mixed_precision': accelerator.mixed_precision}
    news, checkpoint = list[str](), inputs.checkpoint
    warnings = inputs.warnings
    if checkpoint is not None:
        try:
            news = _check_continuation(config, stored, checkpoint, inputs.inventories, warnings)
        except ValueError as error:
            problem = error
        fail_together(problem)
    if accelerator.num_processes > 1 and not writes_nothing and config.stage2.epochs and config.stage2.cache_features:
        try:
            check_shared(cache_directory(config), 'stage2.cache_dir')
        except ValueError as error:
            problem = error
    fail_together(problem)

    seed_all(config.seed)  # every process initialises the same model
    model, new_classifier = None, list[str]()
    with accelerator.main_process_first():
        try:
            model = _make_model(config, len(inputs.train.classes), accelerator.num_processes, new_classifier.append)
        except (ValueError, OSError, RuntimeError, TypeError, AssertionError) as error:
            problem = error
    fail_together(problem)
    assert model is not None
    progress = checkpoint.progress if checkpoint else Progress(stage=1 if config.stage1.epochs else 2)
    progress.data = inputs.inventories
    begins_trained = bool(config.model.checkpoint) or config.model.pretrained
    train_transform, val_transform = transforms(config.data, *normalization(model))
    run = Run(
        config=config,
        stored_config=stored,
        accelerator=accelerator,
        console=console,
        train=inputs.train,
        val=inputs.val,
        held=inputs.held,
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
    for line in (*news, *(new_classifier if checkpoint is None else ())):
        run.say(line)
    return run, model


def _open_inputs(config: RunConfig, writes_nothing: bool) -> Inputs:
    """Opens data and checkpoint of a run, and checks that it can write; raises ValueError or OSError."""
    train, val = open_sources(config.data, config.seed)
    inventories, held = {'train': inventory(train), 'val': inventory(val)}, None
    if config.evaluate is None:
        begins_trained = config.stage1.epochs or config.model.pretrained or config.model.checkpoint
        count = min(config.stage2.calibrate, len(train) // 5) if config.stage2.epochs and begins_trained else 0
        if count:
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


def _connect(config: RunConfig, writes_nothing: bool) -> Accelerator:
    """Connects the processes."""
    if config.deterministic:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not config.deterministic
    try:
        accelerator = Accelerator(
            mixed_precision=precision(config.mixed_precision),
            log_with=None if writes_nothing else [*config.trackers] or None,
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
    return model


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
