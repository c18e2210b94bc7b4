"""Parameter groups for optimizers."""

from typing import Any

from timm.optim import param_groups_weight_decay  # pyright: ignore[reportPrivateImportUsage]
from torch import nn

from rotp_vision.surgery.freeze import pool_modules


def param_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0, pool_lr: float = 0.05
) -> list[dict[str, Any]]:
    """Returns parameter groups for an optimizer: the pooling has a learning rate of its own and no weight decay.

    The pooling has a handful of weights on a log-like scale. At the rate of a network they hardly move, and weight
    decay pulls them to arbitrary values. The schedulers of torch and timm keep the ratio of the two rates.

    Args:
        model: with pools by `convert`; it may be wrapped by DDP or `torch.compile`. Frozen parameters are left out.
        lr: learning rate of the rest.
        weight_decay: weight decay of the rest, except of parameters with one axis (biases, norms) and those that timm
            excludes for this network.
        pool_lr: learning rate of the pooling; 0.05 suits Adam and AdamW.

    Example:
        >>> import timm, torch, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> optimizer = torch.optim.AdamW(rotp_vision.param_groups(model, lr=1e-3, weight_decay=0.05))
        >>> [(len(group['params']), group['lr'], group['weight_decay']) for group in optimizer.param_groups]
        [(31, 0.001, 0.0), (16, 0.001, 0.05), (5, 0.05, 0.0)]
    """
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or hasattr(model, '_orig_mod'):
        model = getattr(model, '_orig_mod', None) or model.module  # type: ignore[assignment]
    pooling = {id(parameter) for module in pool_modules(model) for parameter in module.parameters()}
    excluded = getattr(model, 'no_weight_decay', set)()
    groups: list[dict[str, Any]] = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=excluded)
    for group in groups:
        group |= {'params': [p for p in group['params'] if id(p) not in pooling], 'lr': lr}
    trained = [p for p in model.parameters() if id(p) in pooling and p.requires_grad]
    groups.append({'params': trained, 'lr': pool_lr, 'weight_decay': 0.0, 'pooling': True})
    return [group for group in groups if group['params']]
