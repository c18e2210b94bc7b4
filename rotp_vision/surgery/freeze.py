"""Freezing all of a network but its pooling."""

from typing import Any, Literal, get_args

from torch import nn

from rotp_vision.surgery.classes import change, changes_of
from rotp_vision.surgery.convert import refuse_wrapped
from rotp_vision.surgery.multi_scale import MultiScale
from rotp_vision.surgery.pools import new_pools

Train = Literal['pool', 'pool+classifier', 'all']
# The names of the parameters that did not require gradients before `freeze`.
FIXED = '_rotp_fixed'


def freeze(model: nn.Module, train: Train = 'pool') -> nn.Module:
    """Freeze all of a model but its new pools, in place; returns the same model and prints how much of it trains.

    Frozen modules stay in evaluation mode even after `model.train()`: norm layers keep their statistics, and dropout
    stays off, including dropout that the network applies itself. `freeze(model, 'all')` undoes it. Freeze before
    wrapping the model in DDP and before making the optimizer.

    Args:
        model: with ROT pools.
        train: 'pool' for the ROT pools, 'pool+classifier' for the pools and the classifier, or 'all'.

    Example:
        >>> import timm, rotp_vision
        >>> model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
        >>> model = rotp_vision.freeze(model)
        trainable params: 5 || all params: 372,984 || trainable%: 0.0013
    """
    freeze_parameters(model, train)
    total = sum(parameter.numel() for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(f'trainable params: {count:,} || all params: {total:,} || trainable%: {100 * count / total:.4f}')  # as peft
    return model


def freeze_parameters(model: nn.Module, train: Train) -> None:
    """`freeze` without the report."""
    if train not in get_args(Train):
        raise ValueError(f'train must be one of {", ".join(get_args(Train))}, got {train!r}')
    refuse_wrapped(model)
    learning = _learning_modules(model, train)
    if not changes_of(model).frozen:
        vars(model)[FIXED] = {name for name, p in model.named_parameters() if not p.requires_grad}
    if train == 'all':
        fixed = vars(model).pop(FIXED)
        change(model, frozen=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in fixed)
        model.train(model.training)
        return
    model.requires_grad_(False)
    for module in learning:
        module.requires_grad_(True)
    change(model, frozen=True)
    model.train(model.training)


def _learning_modules(model: nn.Module, train: Train) -> list[nn.Module]:
    if train == 'all':
        return []
    pools = pool_modules(model)
    return pools if train == 'pool' else [*pools, *classifiers(model)]


def pool_modules(model: nn.Module) -> list[nn.Module]:
    """The new pools of a model, and the gains of its sizes; raises a ValueError if there is nothing to train."""
    pools: list[nn.Module] = list(new_pools(model).values())
    if not pools:
        raise ValueError('the model has no ROT pool to train; convert(model) first')
    if not any(True for pool in pools for _ in pool.parameters()):
        raise ValueError("the pools have no parameters to train; ROT pools have some unless learn='fixed'")
    return pools + [module.gain for module in model.modules() if isinstance(module, MultiScale)]


def classifiers(model: nn.Module) -> list[nn.Module]:
    """The classifiers that a timm model names; of other models the last linear layer or convolution."""
    get_classifier: Any = getattr(model, 'get_classifier', None)
    if get_classifier is not None:
        given = get_classifier()
        classifiers = list(given) if isinstance(given, (tuple, list)) else [given]
    else:
        classifiers = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))][-1:]
    classifiers = [module for module in classifiers if isinstance(module, nn.Module)]
    if not any(True for module in classifiers for _ in module.parameters()):
        raise ValueError("the model has no classifier to train; reset_classifier(num_classes) or train='pool'")
    return classifiers
