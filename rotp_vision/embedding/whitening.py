"""Centring and shrunk whitening of feature vectors, fitted without labels."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Spectrum(NamedTuple):
    """Mean (D,) of feature vectors, and eigenvectors (D, r) and eigenvalues (r,) of their covariance, in float64."""

    mean: Tensor
    vectors: Tensor
    values: Tensor

    @classmethod
    def of(cls, features: Tensor) -> 'Spectrum':
        """The spectrum of L2-normalised features (n, D)."""
        features = features.double()
        mean = features.mean(0)
        centred = (features - mean) / len(features) ** 0.5
        few = len(features) < features.shape[1]
        values, vectors = torch.linalg.eigh(centred @ centred.T if few else centred.T @ centred)
        known = values > 1e-12 * values[-1]
        values, vectors = values[known], vectors[:, known]
        return cls(mean, centred.T @ vectors / values.sqrt() if few else vectors, values)

    def whitening(self, shrinkage: float) -> Tensor:
        """(D, D) (I + Σ / s)^(-1/2), where s is `shrinkage` times the mean eigenvalue of the covariance Σ.

        It whitens directions whose variance exceeds s, and leaves those below it as they are.
        """
        added = shrinkage * self.values.sum() / len(self.mean)
        factors = (1 + self.values / added).rsqrt()
        return torch.eye(len(self.mean), dtype=torch.float64) + (self.vectors * (factors - 1)) @ self.vectors.T


def project(features: Tensor, mean: Tensor | None, matrix: Tensor | None = None) -> Tensor:
    """L2-normalised (n, D) of features that are L2-normalised, centred and multiplied by a symmetric matrix."""
    features = F.normalize(features)
    if mean is not None:
        features = features - mean
    return F.normalize(features if matrix is None else features @ matrix)
