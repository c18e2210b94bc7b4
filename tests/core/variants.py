"""Every solver variant once, and small problems for them."""

import pytest
import torch
from torch import Tensor

from rotp_vision.core import ROTProblem, Solver, StepWeights, rot_problem, step_weights

VARIANTS = {
    'sinkhorn': Solver('sinkhorn', num_inner=3),
    'badmm-e': Solver('badmm-e'),
    'badmm-q': Solver('badmm-q'),
    'coupled-badmm-e': Solver('badmm-e', coupled=True),
    'coupled-badmm-q': Solver('badmm-q', coupled=True),
}
SINKHORN = VARIANTS['sinkhorn']

every_variant = pytest.mark.parametrize('solver', VARIANTS.values(), ids=VARIANTS)
every_structure = pytest.mark.parametrize('similarity', [None, 'covariance', 'cosine'])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_similarity(solver: Solver, similarity: str | None) -> Solver:
    return solver if similarity is None else solver._replace(similarity=similarity)


def varied_weights(
    num_modules: int, solver: Solver, *, structure: bool = False, dtype: torch.dtype = torch.float64
) -> StepWeights:
    """The weights that `solver` reads and no others, different in every module."""

    def ramp(first: float, last: float) -> list[float]:
        return torch.linspace(first, last, num_modules).tolist()

    proximal = solver.name == 'sinkhorn'
    penalties = proximal or solver.coupled
    return step_weights(
        num_modules,
        smoothness=ramp(0.5, 0.8),
        feature_penalty=ramp(0.7, 1.2) if penalties else None,
        sample_penalty=ramp(0.4, 0.2) if penalties else None,
        structure=ramp(0.3, 0.5) if structure else None,
        step=None if proximal else ramp(1.2, 0.9),
        proximal=ramp(0.2, 0.4) if proximal else None,
        dtype=dtype,
    )


def varied_problem(batch: int, num_features: int, num_samples: int, *, seed: int = 0) -> ROTProblem:
    """A problem with priors that are not uniform and differ from set to set."""
    return rot_problem(
        random(batch, num_features, num_samples, seed=seed),
        log_feature_prior=random(batch, num_features, seed=seed + 1),
        log_sample_prior=random(batch, num_samples, seed=seed + 2),
    )
