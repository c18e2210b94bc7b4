"""Closed-form ridge classifiers on pooled features, and the folds by which they are judged.

All that cross-validation needs of the features are sums over each fold, computed once: every fit on some of the folds
is then one Cholesky factorization.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# λ of the ridge in units of the mean eigenvalue of the images' Gram matrix, so that one value suits networks of any
# width and any number of images. From 0.1 to 1 the accuracy hardly changes; far below that it falls.
PENALTY = 0.3


class Linear(NamedTuple):
    """A linear classifier: logits = features @ weight.T + bias."""

    weight: Tensor  # (classes, C)
    bias: Tensor  # (classes,)

    def __call__(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)


def class_weights(targets: Tensor) -> Tensor:
    """(n,) weights of the images with which every class that has any weighs the same; their sum is one."""
    counts = targets.bincount()
    return 1.0 / (counts[targets] * (counts > 0).sum())


def assign_folds(targets: Tensor, groups: Tensor, num_folds: int, seed: int = 0) -> Tensor:
    """(n,) fold of each image: no group is divided, and each class is spread over the folds as evenly as that allows.

    The groups are dealt out one after the other, the largest first, each to the fold that has the fewest images of its
    classes so far; of equal folds the smallest gets it.
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


class _Sums(NamedTuple):
    """Weighted sums over some images."""

    weight: Tensor  # Σ w
    mean: Tensor  # Σ w z, (p,)
    targets: Tensor  # Σ w y, (K,)
    products: Tensor  # Σ w z zᵀ, (p, p)
    cross: Tensor  # Σ w z yᵀ, (p, K)


class RidgeFolds:
    """Ridge classifiers on the images of some folds, judged on those of others.

        minimize  n Σ_i w_i ‖y_i − b − W z_i‖² + λ ‖W‖²,   z = (x − mean) / std,   y one-hot, w as `class_weights`

    The deviation of a feature, which needs no labels, is that over all images. Where there are fewer images than
    features, z is first rotated to as many coordinates as there are images, which changes no fit.

    Args:
        features: (n, C).
        targets: (n,) class indices.
        folds: (n,) the fold of each image.
        num_classes: K.
        penalty: λ / C.
    """

    def __init__(self, features: Tensor, targets: Tensor, folds: Tensor, num_classes: int, penalty: float = PENALTY):
        weights = class_weights(targets).double()
        x = features.double()
        mean = weights @ x
        deviation = (weights @ (x - mean).square()).sqrt()
        # A feature that is the same for all images says nothing and is left out.
        scale = torch.where(deviation > 1e-6 * mean.abs(), 1 / deviation, 0.0)
        z = ((x - mean) * scale).float()
        self.mean, self.scale, weights = mean.float(), scale.float(), weights.float()
        self.rotation = None
        if len(z) < z.shape[1]:
            self.rotation, coordinates = torch.linalg.qr(z.T)  # z = coordinatesᵀ rotationᵀ
            z = coordinates.T.contiguous()
        self.coordinates, self.folds, self.num_folds = z, folds, int(folds.max()) + 1
        self.penalty = penalty * features.shape[1]
        self.sizes = folds.bincount().tolist()
        onehot = F.one_hot(targets, num_classes).to(z)
        self.sums = [self._sums(z[folds == k], onehot[folds == k], weights[folds == k]) for k in range(self.num_folds)]

    @staticmethod
    def _sums(z: Tensor, onehot: Tensor, weights: Tensor) -> _Sums:
        weighted = z * weights[:, None]
        return _Sums(weights.sum(), weighted.sum(0), weights @ onehot, weighted.T @ z, weighted.T @ onehot)

    def _fit(self, left_out: Sequence[int]) -> Linear:
        """The classifier of the coordinates, fitted on all folds but some."""
        kept = [sums for k, sums in enumerate(self.sums) if k not in left_out]
        weight, mean, targets, products, cross = _Sums(
            *(torch.stack(parts).sum(0) for parts in zip(*kept, strict=True))
        )
        mean, targets = mean / weight, targets / weight
        products = products / weight - mean[:, None] * mean
        cross = cross / weight - mean[:, None] * targets
        num_images = sum(size for k, size in enumerate(self.sizes) if k not in left_out)
        products.diagonal().add_(self.penalty / num_images)
        solution = torch.cholesky_solve(cross, torch.linalg.cholesky(products))
        return Linear(solution.T, targets - mean @ solution)

    def held_out(self, *left_out: int) -> tuple[Tensor, Tensor]:
        """Indices of the images of some folds, and their logits by a fit on all the others."""
        images = torch.isin(self.folds, torch.tensor(left_out, device=self.folds.device)).nonzero().squeeze(1)
        return images, self._fit(left_out)(self.coordinates[images])

    def classifier(self) -> Linear:
        """The classifier of the features, fitted on all images, with the standardization folded in."""
        weight, bias = self._fit(())
        if self.rotation is not None:
            weight = weight @ self.rotation.T
        weight = weight * self.scale
        return Linear(weight, bias - weight @ self.mean)
