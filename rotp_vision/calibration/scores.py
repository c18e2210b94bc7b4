"""Losses and margins of candidate poolings at every gain, and scores on images that were not fitted."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rotp_vision.surgery.head import Head

Difference = tuple[float, float]  # mean of a paired difference over the images, and its standard error

SPLITS = 10  # random pairs of halves


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


class Curves(NamedTuple):
    """Losses and margins of one or more poolings on each image, at several gains."""

    log_gains: Tensor  # (poolings, gains) in even steps
    loss: Tensor  # (poolings, gains, images)
    margin: Tensor  # (poolings, gains, images) the right logit minus the largest other

    def fit(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The gain of least mean loss on some images: its index, and the steps from it to the least of a parabola."""
        mean = self.loss[:, :, images].mean(2).cpu().double()  # not every device has float64
        index = mean.argmin(1)
        inner = index.clamp(1, max(mean.shape[1] - 2, 1))
        if mean.shape[1] == 1:
            return index, torch.zeros(len(mean))
        before, here, after = (mean.gather(1, inner[:, None] + step).squeeze(1) for step in (-1, 0, 1))
        bend = before - 2 * here + after
        offset = torch.where((inner == index) & (bend > 0), 0.5 * (before - after) / bend, 0.0)
        return index, offset.float()

    def gains(self, images: Tensor) -> list[float]:
        """The gain of each pooling that fits some images best."""
        index, offset = self.fit(images)
        step = self.log_gains[0, 1] - self.log_gains[0, 0] if self.log_gains.shape[1] > 1 else 0.0
        return (self.log_gains.gather(1, index[:, None]).squeeze(1) + step * offset).exp().tolist()

    def at(self, fitted: Tensor, judged: Tensor) -> tuple[Tensor, Tensor]:
        """(poolings, images) loss and margin on some images, at the gains that fit others best."""
        index, offset = (values.to(self.loss.device) for values in self.fit(fitted))
        rows, last = torch.arange(len(index), device=index.device), self.loss.shape[1] - 1
        offset = offset[:, None]

        def interpolated(values: Tensor) -> Tensor:
            before, here, after = (values[rows, (index + step).clamp(0, last)][:, judged] for step in (-1, 0, 1))
            return here + offset * (after - before) / 2 + 0.5 * offset**2 * (before - 2 * here + after)

        return interpolated(self.loss), interpolated(self.margin)

    def of(self, rows: Tensor | list[int]) -> 'Curves':
        """The curves of some of the poolings."""
        return Curves(*(values[rows] for values in self))


def gain_curve(
    head: Head, pooled: Tensor, targets: Tensor, with_gain: bool = True, label_smoothing: float = 0.0
) -> Curves:
    """The curves of one pooling, from its features (images, D), over the gains, or at gain one alone."""
    logits = head(pooled)

    def at(log_gains: Tensor) -> Curves:
        losses, margins = [], []
        for gain in log_gains.exp().tolist():
            if head.affine:
                scaled = torch.lerp(head.zero, logits, gain)
            else:
                scaled = logits if gain == 1.0 else head(gain * pooled)
            target = scaled.gather(1, targets[:, None]).squeeze(1)
            wanted = target if not label_smoothing else torch.lerp(target, scaled.mean(1), label_smoothing)
            losses.append(scaled.logsumexp(1) - wanted)
            margins.append(target - scaled.scatter(1, targets[:, None], -math.inf).amax(1))
        return Curves(log_gains[None], torch.stack(losses)[None], torch.stack(margins)[None])

    if not with_gain or head.scale_free:
        return at(torch.zeros(1))
    coarse = at(0.4 * torch.arange(-8, 8))
    least = coarse.loss.mean(2).argmin().cpu()
    return at(coarse.log_gains[0, least] + 0.1 * torch.arange(-4, 5)) if head.affine else coarse


class Judged(NamedTuple):
    """Scores of a pooling on each image by fits that have not seen it, the mean over the splits."""

    loss: Tensor  # (images,)
    right: Tensor  # (images,) share of the fits by which the prediction is right
    found: Any  # fitted on all images: the number of the pooling among the candidates
    gain: float  # likewise


def splits(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images to fit and images to judge: random halves, each in either role."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(SPLITS):
        first, second = torch.randperm(count, generator=generator).tensor_split(2)
        yield first, second
        yield second, first


def cross_fit(curves: Curves, choose: Callable[[Curves, Tensor], int]) -> Judged:
    """Judge what `choose` finds among the curves and the images it is given, on images that it is not given."""
    count = curves.loss.shape[2]
    loss, right = torch.zeros(count), torch.zeros(count)
    for fitted, judged in splits(count):
        one = curves.of([choose(curves, fitted)])
        losses, margins = (values[0].cpu() for values in one.at(fitted, judged))
        loss[judged] += losses / SPLITS
        right[judged] += (margins > 0).float() / SPLITS
    everything = torch.arange(count)
    found = choose(curves, everything)
    return Judged(loss, right, found, curves.of([found]).gains(everything)[0])


def promised_difference(ours: Tensor, theirs: Tensor) -> Difference:
    """Mean of the difference of two scores by cross-fitting, and the standard error of it on other images.

    The fits share images with each other and with what judges other fits, so that the error over the images is too
    small. With halves the correction is a factor of √2 (Nadeau and Bengio, 2003).
    """
    difference, error = paired_difference(ours, theirs)
    return difference, math.sqrt(2) * error


def judge_pooled(head: Head, pooled: Tensor, targets: Tensor) -> Judged:
    """Pooled features (images, D) with a gain, judged on images that it was not fitted to."""
    return cross_fit(gain_curve(head, pooled, targets), lambda curves, images: 0)
