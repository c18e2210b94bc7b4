"""Maps of a global ROT pool: the weight of each position, and its contribution to the logit of a class."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rotp_vision.layers.global_pool import MapPool
from rotp_vision.surgery.fold import TRANSPARENT, is_linear, run_layers
from rotp_vision.surgery.head import find_any_global_pool, sets_of
from rotp_vision.surgery.multi_scale import MultiScale


class PoolMaps(NamedTuple):
    """Weights and contributions of the positions of B images in the global ROT pool of a model, on its (h, w) grid."""

    path: str  # of the pool in the model
    logits: Tensor  # (B, classes), what the model returns
    weight: Tensor  # (B, h, w) Σ_d c_d P(n|d), c_d = |f_d| / Σ_d |f_d|: 1 / N everywhere for average pooling
    contributions: Tensor  # (B, D, h, w) g_d x_dn P(n|d), whose sum over positions is the pooled feature
    average: Tensor  # (B, D, h, w) x_dn / N, the contributions under average pooling
    classifier: nn.Linear | nn.Conv2d | None  # the linear layer that reads the pooled features and gives the logits
    obstacle: str  # why `classifier` is None; '' if it is not


class Evidence(NamedTuple):
    """Contributions of the positions to the logit of a class; `rotp` sums to that logit minus `bias`."""

    class_index: Tensor  # (B,)
    bias: Tensor  # (B,)
    rotp: Tensor  # (B, h, w)
    average: Tensor  # (B, h, w), the same with average pooling in place of the ROT pool


def pool_maps(model: nn.Module, images: Tensor) -> PoolMaps:
    """Run a model in evaluation mode and compute the maps of its global ROT pool.

    Args:
        model: with one global ROT pool (`GlobalROTPool2d`, `MixedROTPool2d`, or `ROTSetPool` over a grid of tokens);
            it may have local ones too. Its mode and its hooks are restored afterwards.
        images: (B, 3, H, W) of any size the model takes, normalised.
    """
    if isinstance(model, MultiScale):
        raise ValueError('the positions of several sizes do not form one map; draw those of `model.model`')
    path, pool = find_any_global_pool(model)
    ran, logits = run_layers(model, (images,))
    index = next((i for i, call in enumerate(ran) if call.module is pool), None)
    if index is None:
        raise ValueError(f'the ROT pool {path} does not run in a forward pass of the model')
    maps, pooled = ran[index].input, ran[index].output.flatten(1)
    with torch.no_grad():
        sets, log_plan = sets_of(pool, maps), sets_of(pool, pool.log_plan(maps))
        if isinstance(pool, MapPool) and pool.input_fmt != 'NCL':
            grid = tuple(maps.shape[1:3] if pool.input_fmt == 'NHWC' else maps.shape[2:])
        else:
            grid = _grid(sets.shape[2], *images.shape[2:])
        sets = sets.to(log_plan.dtype)
        rows = log_plan.softmax(2)
        contributions = sets * rows
        if pool.gain is not None:
            contributions = contributions * pool.gain().to(contributions.dtype).view(1, -1, 1)
    if not torch.allclose(contributions.sum(2), pooled.to(contributions.dtype), rtol=1e-2, atol=_slack(pooled)):
        raise ValueError(
            f'the output of {path} must be the average of its features under its plan, times its gain, but is not; '
            'a mixed pooling whose heads have a gain of their own cannot be mapped'
        )

    # The tiny number makes all features count equally where every pooled feature is zero.
    size = contributions.sum(2).abs() + torch.finfo(contributions.dtype).tiny
    after = [call for call in ran[index + 1 :] if not isinstance(call.module, TRANSPARENT)]
    classifier, obstacle = None, ''
    if not after:
        obstacle = 'no classifier follows it'
    elif len(after) > 1 or not is_linear(after[0].module):
        between = [f'{call.path} ({type(call.module).__name__})' for call in after]
        obstacle = f'{", ".join(between[:3])}{", …" if len(between) > 3 else ""} follows it, not a linear layer alone'
    elif not torch.equal(after[0].input.flatten(1), pooled) or not torch.equal(after[0].output.flatten(1), logits):
        obstacle = f'a function is applied before or after {after[0].path}'
    else:
        assert isinstance(after[0].module, (nn.Linear, nn.Conv2d))
        classifier = after[0].module
    return PoolMaps(
        path,
        logits,
        torch.einsum('bd,bdn->bn', size / size.sum(1, keepdim=True), rows).unflatten(1, grid),
        contributions.unflatten(2, grid),
        (sets / sets.shape[2]).unflatten(2, grid),
        classifier,
        obstacle,
    )


def evidence(maps: PoolMaps, class_index: int | Sequence[int] | Tensor | None = None) -> Evidence:
    """The contribution of each position to the logit of a class, by the linear classifier w right after the pool.

        E_n = Σ_d w_d g_d x_dn P(n|d),   Σ_n E_n = logit - bias

    Args:
        maps: the result of `pool_maps`.
        class_index: one class for all images, or one per image; None for the predicted one.

    Raises:
        ValueError: if the pooled features are not read by a linear layer alone, but by a norm layer for instance.
    """
    if maps.classifier is None:
        raise ValueError(
            f'an evidence map needs a linear classifier directly after the pool {maps.path}, but {maps.obstacle}'
        )
    batch, num_classes = maps.logits.shape
    if class_index is None:
        classes = maps.logits.argmax(1)
    else:
        classes = torch.as_tensor(class_index, device=maps.logits.device).expand(batch)
        if not bool(((classes >= 0) & (classes < num_classes)).all()):
            raise ValueError(f'class_index must lie in 0 … {num_classes - 1}, got {class_index}')
    weight = maps.classifier.weight.detach().flatten(1).to(maps.contributions.dtype)[classes]  # (B, D)
    bias = maps.classifier.bias
    bias = weight.new_zeros(batch) if bias is None else bias.detach().to(weight.dtype)[classes]
    ours, average = (torch.einsum('bd,bdhw->bhw', weight, part) for part in (maps.contributions, maps.average))
    return Evidence(classes, bias, ours, average)


def _grid(num_tokens: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of tokens, in the proportions of the image."""
    rows = max(round((num_tokens * height / width) ** 0.5), 1)
    if num_tokens % rows:
        raise ValueError(f'{num_tokens} tokens do not form a grid over an image of {height} × {width}')
    return rows, num_tokens // rows


def _slack(values: Tensor) -> float:
    return torch.finfo(values.dtype).eps ** 0.5 * float(values.abs().max())
