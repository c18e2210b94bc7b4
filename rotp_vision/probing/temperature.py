"""One temperature for the outputs of a classifier, so that their softmax can be read as probabilities."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_LARGEST = 5.0  # log of the largest factor, which is reached where every image is classified right
_BINS = 15


class Temperature(NamedTuple):
    """A temperature, and what it does to the probabilities of held-out images.

    Attributes:
        factor: the inverse temperature, by which the classifier's weight and bias are multiplied.
        cross_entropy: mean cross-entropy without the temperature, and with one fitted to the images of other folds.
        calibration_error: expected calibration error likewise: the mean difference, over 15 bins of equal width,
            between the largest probability and the share of right predictions.
    """

    factor: float
    cross_entropy: tuple[float, float]
    calibration_error: tuple[float, float]

    def __str__(self) -> str:
        (loss, new_loss), (error, new_error) = self.cross_entropy, self.calibration_error
        return (
            f'One temperature on the classifier changes the cross-entropy of held-out images from {loss:.3f} to '
            f'{new_loss:.3f} and the expected calibration error from {error:.3f} to {new_error:.3f}.'
        )


def fit_temperature(logits: Tensor, targets: Tensor, folds: Tensor) -> Temperature:
    """The temperature with the least mean cross-entropy.

    Args:
        logits: (n, K) outputs for images that the classifier was not fitted to.
        targets: (n,) class indices.
        folds: (n,) folds of the images. To report its effect on a fold, the temperature is fitted to the others.
    """
    scaled = logits.clone()
    for k in folds.unique():
        others = folds != k
        scaled[~others] *= _factor(logits[others], targets[others])
    losses = [float(F.cross_entropy(outputs, targets)) for outputs in (logits, scaled)]
    errors = [expected_calibration_error(outputs, targets) for outputs in (logits, scaled)]
    return Temperature(_factor(logits, targets), (losses[0], losses[1]), (errors[0], errors[1]))


def _factor(logits: Tensor, targets: Tensor) -> float:
    """The factor with the least cross-entropy, which is convex in it: its slope is bisected over the log factor."""
    right = logits.gather(1, targets[:, None]).squeeze(1)
    low, high = -_LARGEST, _LARGEST
    for _ in range(30):
        middle = (low + high) / 2
        slope = (((math.exp(middle) * logits).softmax(1) * logits).sum(1) - right).mean()
        low, high = (middle, high) if slope < 0 else (low, middle)
    return math.exp(low)


def expected_calibration_error(logits: Tensor, targets: Tensor) -> float:
    """The mean difference between confidence and accuracy over bins of the confidence."""
    confidence, predicted = logits.softmax(1).max(1)
    surplus = confidence - (predicted == targets).float()
    bins = (confidence * _BINS).long().clamp_max(_BINS - 1)
    return float(torch.zeros(_BINS).index_add(0, bins, surplus).abs().sum() / len(targets))
