"""Losses and accuracies of pooled features at every gain, fitted and judged on different halves of the images."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rotp_vision.surgery.head import Head

Difference = tuple[float, float]  # mean of a paired difference over the images, and its standard error


def gem(sets: Tensor, power: float) -> Tensor:
    """(B, D) generalized mean of sets (B, D, N): mean_n(max(x_n, 1e-6)^p)^(1/p)."""
    return sets.clamp_min(1e-6).pow(power).mean(2).pow(1 / power)


def rank(logits: Tensor, targets: Tensor) -> Tensor:
    """(n,) how many classes have a logit that is not below the right one's: 0 where the prediction is right.

    Ties and NaN count against the right class.
    """
    return (~(logits < logits.gather(1, targets[:, None]))).sum(1) - 1


def paired_difference(ours: Tensor, theirs: Tensor) -> Difference:
    """Mean of the difference over the images, and its standard error."""
    difference = (ours - theirs).cpu().double()
    return float(difference.mean()), float(difference.std() / math.sqrt(len(difference)))


def exceeds(ours: Tensor, theirs: Tensor) -> bool:
    """Whether ours is larger on average, by more than a standard error."""
    difference, error = paired_difference(ours, theirs)
    return difference > error


class Curve(NamedTuple):
    """Loss and correctness of a pooling on each image, at every gain."""

    log_gains: Tensor  # (gains,) in even steps
    loss: Tensor  # (gains, images)
    right: Tensor  # (gains, images) 1.0 where the prediction is right

    def of(self, images: Tensor) -> 'Curve':
        """The curve on some of the images."""
        return Curve(self.log_gains, self.loss[:, images], self.right[:, images])

    def best(self) -> tuple[int, float]:
        """The gain of the least mean loss: its index, and how many steps from it the least of a parabola lies."""
        mean = self.loss.cpu().double().mean(1)  # not every device has float64
        index = int(mean.argmin())
        if not 0 < index < len(mean) - 1:
            return index, 0.0
        before, here, after = mean[index - 1 : index + 2].tolist()
        bend = before - 2 * here + after
        return index, 0.5 * (before - after) / bend if bend > 0 else 0.0

    def at(self, index: int, offset: float) -> tuple[Tensor, Tensor]:
        """(images,) loss and correctness at a gain as `best` gives it."""
        if offset == 0.0:
            return self.loss[index], self.right[index]
        before, here, after = self.loss[index - 1 : index + 2]
        slope, bend = (after - before) / 2, before - 2 * here + after
        return here + offset * slope + 0.5 * offset**2 * bend, self.right[index]

    def gain(self, index: int, offset: float) -> float:
        """The gain that `best` gives by index and offset."""
        step = float(self.log_gains[1] - self.log_gains[0]) if offset else 0.0
        return math.exp(float(self.log_gains[index]) + offset * step)


def gain_curve(
    head: Head, pooled: Tensor, targets: Tensor, with_gain: bool = True, label_smoothing: float = 0.0
) -> Curve:
    """The curve of pooled features (images, D) over the gains, or at gain one alone."""
    logits = head(pooled)

    def at(log_gains: Tensor) -> Curve:
        losses, rights = [], []
        for gain in log_gains.exp().tolist():
            if head.affine:
                scaled = torch.lerp(head.zero, logits, gain)
            else:
                scaled = logits if gain == 1.0 else head(gain * pooled)
            target = scaled.gather(1, targets[:, None]).squeeze(1)
            wanted = target if not label_smoothing else torch.lerp(target, scaled.mean(1), label_smoothing)
            losses.append(scaled.logsumexp(1) - wanted)
            others = scaled.scatter(1, targets[:, None], -math.inf).amax(1)  # argmax takes ten times as long
            rights.append((target > others).float())
        return Curve(log_gains, torch.stack(losses), torch.stack(rights))

    if not with_gain or head.scale_free:
        return at(torch.zeros(1))
    coarse = at(0.4 * torch.arange(-8, 8))
    return at(coarse.log_gains[coarse.best()[0]] + 0.1 * torch.arange(-4, 5)) if head.affine else coarse


class Judged(NamedTuple):
    """Loss and correctness of a pooling on each image, by what was fitted on the other half of the images."""

    loss: Tensor  # (images,)
    right: Tensor  # (images,)
    found: Any  # fitted on all images: a `Setting`, or a power of GeM
    gain: float  # likewise


def cross_fit(images: Tensor, fit: Callable[[Tensor], Any], curve_of: Callable[[Any], Curve]) -> Judged:
    """What `fit` finds on each half of the images, judged on the other half, and what it finds on all images."""
    loss, right = torch.empty(len(images)), torch.empty(len(images))
    for fitted, others in ((images[::2], images[1::2]), (images[1::2], images[::2])):
        curve = curve_of(fit(fitted))
        judged = curve.of(others).at(*curve.of(fitted).best())
        loss[others.cpu()], right[others.cpu()] = judged[0].cpu(), judged[1].cpu()
    found = fit(images)
    curve = curve_of(found)
    return Judged(loss, right, found, curve.gain(*curve.best()))


def judge_pooled(head: Head, pooled: Tensor, targets: Tensor) -> Judged:
    """Pooled features (images, D) with a gain that is fitted on each half of the images and judged on the other."""
    curve = gain_curve(head, pooled, targets)
    return cross_fit(torch.arange(len(targets), device=targets.device), lambda images: None, lambda _: curve)
