"""Closed-form ridge classifiers on pooled features, and the folds by which they are judged."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# λ of the ridge in units of the mean eigenvalue of the images' Gram matrix, so that one value suits networks of any
# width and any number of images. From 0.1 to 1 the accuracy hardly changes; far below that it falls.
PENALTY = 0.3
# The final classifier takes the value whose held-out outputs have the least cross-entropy.
PENALTIES = (0.1, 0.3, 0.7, 1.5)
# Least deviation of a feature, in units of the mean deviation. A feature that hardly varies over the fitted images may
# lie thousands of its deviations away on others.
LEAST_DEVIATION = 0.1


class Linear(NamedTuple):
    """A linear classifier: logits = features @ weight.T + bias."""

    weight: Tensor  # (classes, C)
    bias: Tensor  # (classes,)

    def __call__(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight.to(features.device), self.bias.to(features.device))

    def scaled(self, factor: float) -> 'Linear':
        """The classifier with its logits multiplied by a factor."""
        return Linear(factor * self.weight, factor * self.bias)


def class_weights(targets: Tensor) -> Tensor:
    """(n,) weights of the images, equal in sum for all classes that have images; they add up to one."""
    counts = targets.bincount()
    return 1.0 / (counts[targets] * (counts > 0).sum())


def assign_folds(targets: Tensor, groups: Tensor, num_folds: int, seed: int = 0) -> Tensor:
    """(n,) fold of each image: no group is divided, and each class is spread over the folds as evenly as that allows.

    The groups are dealt out one after the other, the largest first, each to the fold that has the fewest images of its
    classes so far, and among equal folds to the smallest.
    """
    num_classes = int(targets.max()) + 1
    _, members = groups.unique(return_inverse=True)
    counts = torch.zeros(int(members.max()) + 1, num_classes, dtype=torch.float64)  # images by group and class
    counts.index_put_((members, targets), torch.ones(len(targets), dtype=torch.float64), accumulate=True)
    shares = counts / counts.sum(0).clamp_min(1)
    order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(seed))
    order = order[counts[order].sum(1).argsort(descending=True, stable=True)]
    filled = torch.zeros(num_folds, num_classes, dtype=torch.float64)  # share of each class
    fold_of_group = torch.empty(len(counts), dtype=torch.long)
    for group in order.tolist():
        cost = filled @ shares[group] + 1e-6 * filled.sum(1)
        fold = int(cost.argmin())
        fold_of_group[group] = fold
        filled[fold] += shares[group]
    return fold_of_group[members]


class RidgeFolds:
    """Ridge classifiers on the images of some folds, judged on those of others.

        minimize  n Σ_i w_i ‖y_i − b − W z_i‖² + λ ‖W‖²,   z = (x − mean) / deviation,   y one-hot, w as `class_weights`

    over the n images of the folds that are fitted. Mean and deviation of a feature are those over all images, which
    needs no labels. With more features than images the dual problem is solved, with one row an image:

        W = αᵀ z,   (z zᵀ + λ / n diag(1 / w)) α = y − b

    Args:
        features: (n, C), on any device.
        targets: (n,) class indices.
        folds: (n,) the fold of each image.
        num_classes: K.
        penalty: λ / C.
    """

    def __init__(self, features: Tensor, targets: Tensor, folds: Tensor, num_classes: int, penalty: float = PENALTY):
        wide = torch.float32 if features.device.type == 'mps' else torch.float64  # MPS has no float64
        x = features.to(wide)
        self.targets, self.folds = targets.to(x.device), folds.to(x.device)
        self.num_folds = int(folds.max()) + 1
        mean, deviation = x.mean(0), x.std(0, correction=0)
        scale = 1 / deviation.clamp_min(max(LEAST_DEVIATION * float(deviation.mean()), 1e-12))
        self.z = ((x - mean) * scale).float()
        self.mean, self.scale = mean.float(), scale.float()
        self.onehot = F.one_hot(self.targets, num_classes).to(self.z)
        self.penalty = penalty * features.shape[1]
        self.products = self.z @ self.z.T if len(x) < features.shape[1] else None  # of the dual problem

    def _fit(self, kept: Tensor) -> Linear:
        """The classifier of z, fitted on some images."""
        weights = class_weights(self.targets[kept])[:, None]
        z, y = self.z[kept], self.onehot[kept]
        penalty = self.penalty / len(kept)
        if self.products is not None:
            system = self.products[kept][:, kept]
            system.diagonal().add_(penalty / weights.squeeze(1))
            solved = torch.cholesky_solve(torch.cat([y, torch.ones_like(weights)], 1), torch.linalg.cholesky(system))
            bias = solved[:, :-1].sum(0) / solved[:, -1].sum()
            return Linear((solved[:, :-1] - solved[:, -1:] * bias).T @ z, bias)
        mean, target = (weights * z).sum(0), (weights * y).sum(0)
        z, y = (z - mean) * weights.sqrt(), (y - target) * weights.sqrt()
        system = z.T @ z
        system.diagonal().add_(penalty)
        solution = torch.cholesky_solve(z.T @ y, torch.linalg.cholesky(system))
        return Linear(solution.T, target - mean @ solution)

    def held_out(self, *left_out: int) -> tuple[Tensor, Tensor]:
        """Indices of the images of some folds, and their logits by a fit on all the others; both on the CPU."""
        held = torch.isin(self.folds, torch.tensor(left_out, device=self.folds.device))
        images = held.nonzero().squeeze(1)
        return images.cpu(), self._fit((~held).nonzero().squeeze(1))(self.z[images]).cpu()

    def out_of_fold(self) -> Tensor:
        """(n, K) logits on the CPU, of each image by a fit on the other folds."""
        logits = torch.empty(self.onehot.shape)
        for k in range(self.num_folds):
            images, values = self.held_out(k)
            logits[images] = values
        return logits

    def classifier(self) -> Linear:
        """The classifier of the features, fitted on all images, with the standardization folded in."""
        weight, bias = self._fit(torch.arange(len(self.z), device=self.z.device))
        weight = weight * self.scale
        return Linear(weight, bias - weight @ self.mean)
