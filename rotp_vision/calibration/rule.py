"""The rule by which `calibrate` chooses among poolings; docs/evidence.md compares it with others."""

import math

import torch
from torch import Tensor

from rotp_vision.calibration.scores import Curves

MIN_GAIN = 1e-3  # of cross-entropy: next to the mean, differences are small but so are their standard errors
ERRORS = 2.0  # standard errors by which the smoothed top-1 must rise, so that weak evidence leaves the mean


def choose(curves: Curves, images: Tensor) -> int:
    """Number of the pooling to use, by its scores on some images; number 0 is average pooling with a gain.

    - Each pooling has the gain that fits the images best.
    - The smoothed top-1 of an image is the logistic of twice its margin, whose noise is a fraction of top-1's. Poolings
      with a lower one than number 0 are discarded.
    - Of the rest the mildest is taken whose loss is within a standard error of the least: the one whose losses differ
      least from those of number 0.
    - It is used if its smoothed top-1 is above that of number 0 by two standard errors of the paired difference, and
      its loss below by a standard error plus 0.001. Otherwise number 0 is.
    """
    loss, margin = curves.at(images, images)
    smoothed = (2 * margin).sigmoid()
    gained = smoothed - smoothed[0]
    found = mildest(loss, gained.mean(1) >= 0)
    saved = loss[0] - loss[found]
    accurate = gained[found].mean() > ERRORS * _error(gained[found])
    return found if accurate and saved.mean() > MIN_GAIN + _error(saved) else 0


def best_of_family(curves: Curves, images: Tensor) -> int:
    """Number of the mildest pooling whose loss is within a standard error of the least, but number 0 if it is alone."""
    loss, _ = curves.at(images, images)
    others = torch.arange(len(loss), device=loss.device) > 0
    return mildest(loss, others)


def mildest(loss: Tensor, allowed: Tensor) -> int:
    """The row of losses (poolings, images) that is nearest to row 0, of those within a standard error of the least.

    Only allowed rows are compared; row 0 if none is.
    """
    rows = allowed.nonzero().squeeze(1)
    if not len(rows):
        return 0
    least = loss[rows[loss[rows].mean(1).argmin()]]
    excess = loss[rows] - least
    rows = rows[excess.mean(1) <= _error(excess)]
    return int(rows[(loss[rows] - loss[0]).std(1).argmin()])


def _error(differences: Tensor) -> Tensor:
    """Standard errors of the means of the last axis."""
    return differences.std(-1) / math.sqrt(differences.shape[-1])
