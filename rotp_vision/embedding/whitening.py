"""Centring and shrunk whitening of feature vectors, fitted without labels."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK = 4096  # features in float64 at a time


class Spectrum(NamedTuple):
    """Mean (D,) of feature vectors, and eigenvectors (D, r) and eigenvalues (r,) of their covariance, in float64."""

    mean: Tensor
    vectors: Tensor
    values: Tensor

    @classmethod
    def of(cls, features: Tensor) -> 'Spectrum':
        """The spectrum of L2-normalised features (n, D)."""
        mean = features.mean(0, dtype=torch.float64)
        count, width = features.shape

        def centred(some: Tensor) -> Tensor:
            return (some.double() - mean) / count**0.5

        if count < width:
            rows = centred(features)
            values, vectors = torch.linalg.eigh(rows @ rows.T)
        else:
            covariance = torch.zeros(width, width, dtype=torch.float64)
            for some in map(centred, features.split(_BLOCK)):
                covariance.addmm_(some.T, some)
            rows, (values, vectors) = None, torch.linalg.eigh(covariance)
        known = values > 1e-12 * values[-1]
        values, vectors = values[known], vectors[:, known]
        return cls(mean, vectors if rows is None else rows.T @ vectors / values.sqrt(), values)

    def factors(self, shrinkage: float) -> Tensor:
        """(r,) eigenvalues of `whitening` along the eigenvectors."""
        return (1 + self.values / (shrinkage * self.values.sum() / len(self.mean))).rsqrt()

    def whitening(self, shrinkage: float) -> Tensor:
        """(D, D) (I + Σ / s)^(-1/2), where s is `shrinkage` times the mean eigenvalue of the covariance Σ.

        It whitens directions whose variance exceeds s, and leaves those below it as they are.
        """
        identity = torch.eye(len(self.mean), dtype=torch.float64)
        return identity + (self.vectors * (self.factors(shrinkage) - 1)) @ self.vectors.T


def project(features: Tensor, mean: Tensor | None, matrix: Tensor | None = None) -> Tensor:
    """L2-normalised (n, D) of features that are L2-normalised, centred and multiplied by a symmetric matrix."""
    features = F.normalize(features)
    if mean is not None:
        features = features - mean
    return F.normalize(features if matrix is None else features @ matrix)
