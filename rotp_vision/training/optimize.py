"""Optimizers, schedules and mixup of timm, as the settings of a stage ask for them."""

from typing import Any

import torch
from timm.data import Mixup  # pyright: ignore[reportPrivateImportUsage]
from timm.optim import create_optimizer_v2, param_groups_weight_decay  # pyright: ignore[reportPrivateImportUsage]
from timm.scheduler import create_scheduler_v2  # pyright: ignore[reportPrivateImportUsage]
from torch import nn

from rotp_vision.surgery import param_groups
from rotp_vision.training.config import PoolStageConfig, StageConfig
from rotp_vision.training.report import Rates


def make_optimizer(model: nn.Module, settings: StageConfig) -> torch.optim.Optimizer:
    """Returns timm's optimizer. In stage 2 the parameters of the new pools are in separate groups, marked `pooling`."""
    if isinstance(settings, PoolStageConfig):
        lr = settings.pool_lr if settings.train == 'pool' else settings.lr
        groups = param_groups(model, lr=lr, weight_decay=settings.weight_decay, pool_lr=settings.pool_lr)
        for group in groups:
            # timm's schedules multiply by lr_scale, so that both rates follow the same curve to their ends.
            group |= {'lr': lr, 'lr_scale': group['lr'] / lr}
    else:
        lr, excluded = settings.lr, getattr(model, 'no_weight_decay', set)()
        groups = param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=excluded)
    return create_optimizer_v2(groups, settings.optimizer, lr, momentum=settings.momentum)


def learning_rates(optimizer: torch.optim.Optimizer) -> Rates:
    """Returns the current learning rates of the pooling and of the rest; None for a part that is not trained."""
    rates = {group.get('pooling', False): group['lr'] for group in optimizer.param_groups}
    return {'lr': rates.get(False), 'pool_lr': rates.get(True)}


def make_scheduler(optimizer: torch.optim.Optimizer, settings: StageConfig, steps: int) -> Any:
    """Returns timm's schedule by updates. Do not prepare it by Accelerate, which would step it once per process."""
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
    """Returns timm's mixup and CutMix, which also smooth the labels; None if neither is set."""
    if not (settings.mixup or settings.cutmix):
        return None
    return Mixup(settings.mixup, settings.cutmix, label_smoothing=settings.label_smoothing, num_classes=num_classes)
