"""What the plan sees of the features inside an operator, made for a chunk at a time, and the way back."""

import math

import torch
from torch import Tensor

from rotp_vision.core.explicit.scratch import Scratch, extremes
from rotp_vision.core.problem import VIEW_FLOOR


class Seen:
    """X = φ(features) of a chunk; see `view_of`.

    Of 'rms' X = s · features with a feature vector s: the average of the features is that of X divided by s, and no
    second matrix is needed. Of 'log' there are both.
    """

    def __init__(self, given: Tensor, view: str, masked: Tensor | None, scratch: Scratch, eager: bool) -> None:
        """Of `given` (b, D, N), zero on masked samples; `masked` (b, 1, N) says which are."""
        self._count = given.shape[2] if masked is None else given.shape[2] - masked.sum(2, keepdim=True)
        low, high = extremes(given) if eager else (-math.inf, math.inf)
        self.spread = high - low  # a bound on how far the entries of X lie apart
        features = scratch.load(given)
        self.x = features  # (b, D, N)
        self.averaged: Tensor | None = None  # (b, D, N) the features, where neither they nor a multiple of them is X
        self.scale: Tensor | None = None  # (b, D, 1) s
        if view == 'rms':
            out = scratch.take()
            self.scale = self._rms_scale(features, max(-low, high), out)
            if features is given:
                self.x = torch.mul(features, self.scale, out=out)
            else:
                self.x = torch.mul(features, self.scale, out=scratch.over(features))
                scratch.give_back()
            self.spread = 2 * math.sqrt(given.shape[2])
        elif view == 'log':
            self.averaged = features
            out = scratch.take()
            positive = features if low >= 0 else torch.clamp(features, min=0.0, out=out)
            positive = torch.add(positive, VIEW_FLOOR, out=out)
            self.x = torch.log(positive, out=scratch.over(positive))
            if masked is not None:
                self.x = scratch.fill(self.x, masked, 0.0)
            self.spread = math.log((max(high, 0.0) + VIEW_FLOOR) / (max(low, 0.0) + VIEW_FLOOR)) if eager else math.inf
        self.may_overwrite = self.x is not given

    def _rms_scale(self, features: Tensor, largest: float, out: Tensor | None) -> Tensor:
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

    def back(
        self, d_x: Tensor, d_averaged: Tensor, x: Tensor, peak: Tensor | None, grad: Tensor, moved: Tensor, out: Tensor
    ) -> Tensor:
        """The gradient of the features, over `d_x`.

        Args:
            d_x: (b, D, N) the gradient of X, by way of its average as well, unless the features are averaged.
            d_averaged: (b, D, N) that of the features by way of their average, unless X is averaged.
            x: (b, D, N) X less its peaks.
            peak: (b, D, 1) the peaks; None for zero.
            grad: (b, D, 1) the gradient of the average of X.
            moved: (b, D, 1) that times the average of x.
            out: (b, D, N) for anything.
        """
        if self.scale is not None:
            # Through s = (mean_n features² + floor²)^(-1/2), which X is multiplied with and its average divided by.
            d_log_s = torch.mul(d_x, x, out=out).sum(2, keepdim=True) - moved
            if peak is not None:
                d_log_s += peak * (d_x.sum(2, keepdim=True) - grad)
            step = d_log_s * self.scale / self._count
            d_x = d_x.mul_(self.scale) if peak is None else torch.addcmul(-peak * step, d_x, self.scale, out=d_x)
            return d_x.addcmul_(x, step, value=-1)
        if self.averaged is not None:
            # What is not above zero becomes infinite, and its gradient zero.
            positive = torch.ops.aten.threshold.out(self.averaged, 0.0, torch.inf, out=out).add_(VIEW_FLOOR)
            return torch.addcdiv(d_averaged, d_x, positive, out=d_x)
        return d_x
