"""What the plan sees of the features inside an operator, made for a chunk at a time, and the way back."""

import math

import torch
from torch import Tensor

from rotp_vision.core.explicit.scratch import Scratch, extremes
from rotp_vision.core.problem import VIEW_FLOOR

_NO_OVERFLOW = 75.0  # of features whose logarithms lie no further apart, x / VIEW_FLOOR is finite in float32


class Seen:
    """X = φ(features) of a chunk, see `view_of`; where values may be read, every row less its maximum, its peak.

    Of 'rms' X = s · features with a feature vector s: the average of the features is that of X divided by s, and no
    second matrix is needed. Of 'log' there are both.
    """

    def __init__(self, given: Tensor, view: str, masked: Tensor | None, scratch: Scratch, eager: bool) -> None:
        """Of `given` (b, D, N), zero on masked samples; `masked` (b, 1, N) says which are."""
        self._count = given.shape[2] if masked is None else given.shape[2] - masked.sum(2, keepdim=True)
        low, high = extremes(given) if eager else (-math.inf, math.inf)
        features = scratch.load(given)
        self.averaged: Tensor | None = None  # (b, D, N) the features, where neither they nor a multiple of them is X
        self.scale: Tensor | None = None  # (b, D, 1) s
        self.peak: Tensor | None = None  # (b, D, 1) what was taken off the rows of X
        if eager:
            self.peak = (features if masked is None else features.masked_fill(masked, -torch.inf)).amax(2, keepdim=True)
        if view == 'rms':
            self.scale = self._rms_scale(features, max(-low, high), scratch)
            self.peak = None if self.peak is None else self.peak * self.scale
            self.spread = 2 * math.sqrt(given.shape[2])  # a bound on how far the entries of a row of X lie apart
        elif view == 'log':
            self.averaged = features
            self.spread = math.log((max(high, 0.0) + VIEW_FLOOR) / (max(low, 0.0) + VIEW_FLOOR)) if eager else math.inf
        else:
            self.spread = high - low
        self.x = self._rows(features, features is not given, low, scratch)
        if masked is not None and (eager or view == 'log'):
            self.x.masked_fill_(masked, 0.0)

    def _rows(self, features: Tensor, ours: bool, low: float, scratch: Scratch) -> Tensor:
        """(b, D, N) X less the peaks; `ours` says whether the features may be overwritten."""
        scale, peak = self.scale, self.peak
        if self.averaged is None and scale is None and peak is None:
            return features
        out = features if ours and self.averaged is None else scratch.take()
        if self.averaged is not None:
            positive = features if low >= 0 else torch.clamp(features, min=0.0, out=out)
            if self.spread < _NO_OVERFLOW:  # log1p(x / floor), which torch makes faster, is the same but for a constant
                x, constant = torch.mul(positive, 1 / VIEW_FLOOR, out=out).log1p_(), math.log(VIEW_FLOOR)
            else:
                x, constant = torch.add(positive, VIEW_FLOOR, out=out).log_(), 0.0
            if peak is None:
                return x
            self.peak = (peak.clamp_min(0.0) + VIEW_FLOOR).log()
            return x.sub_(self.peak - constant)
        if peak is None:
            return features if scale is None else torch.mul(features, scale, out=out)
        return torch.sub(features, peak, out=out) if scale is None else torch.addcmul(-peak, features, scale, out=out)

    def _rms_scale(self, features: Tensor, largest: float, scratch: Scratch) -> Tensor:
        out = scratch.take()
        if largest < torch.finfo(features.dtype).max ** 0.4:
            squares = torch.mul(features, features, out=out).sum(2, keepdim=True)
            return (squares / self._count + VIEW_FLOOR**2).rsqrt()
        # The square of a large feature would overflow.
        size = features.abs().amax(2, keepdim=True).clamp_min(VIEW_FLOOR)
        squares = torch.div(features, size, out=out)
        squares = torch.mul(squares, squares, out=out).sum(2, keepdim=True)
        return (squares / self._count + (VIEW_FLOOR / size).square()).rsqrt() / size

    def pooled(self, average: Tensor) -> Tensor:
        """(b, D, 1) the average of the features, of that of X or of `averaged`, if there is."""
        return average if self.scale is None else average / self.scale

    def back(self, d_x: Tensor, d_averaged: Tensor, grad: Tensor, moved: Tensor, out: Tensor) -> Tensor:
        """The gradient of the features, over `d_x`.

        Args:
            d_x: (b, D, N) the gradient of X, by way of its average as well, unless the features are averaged.
            d_averaged: (b, D, N) that of the features by way of their average, unless X is averaged.
            grad: (b, D, 1) the gradient of the average of X.
            moved: (b, D, 1) that times the average of X less its peaks.
            out: (b, D, N) for anything.
        """
        if self.scale is not None:
            # Through s = (mean_n features² + floor²)^(-1/2), which X is multiplied with and its average divided by.
            d_log_s = torch.mul(d_x, self.x, out=out).sum(2, keepdim=True) - moved
            if self.peak is not None:
                d_log_s += self.peak * (d_x.sum(2, keepdim=True) - grad)
            step = d_log_s * self.scale / self._count
            shift = torch.zeros_like(step) if self.peak is None else -self.peak * step
            return torch.addcmul(shift, d_x, self.scale, out=d_x).addcmul_(self.x, step, value=-1)
        if self.averaged is not None:
            # What is not above zero becomes infinite, and its gradient zero.
            positive = torch.ops.aten.threshold.out(self.averaged, 0.0, torch.inf, out=out).add_(VIEW_FLOOR)
            return torch.addcdiv(d_averaged, d_x, positive, out=d_x)
        return d_x
