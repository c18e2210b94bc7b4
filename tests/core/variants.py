"""Every solver variant once, and small problems and weights for them."""

import pytest
import torch
from torch import Tensor

from rotp_vision.core import ROTProblem, Solver, make_solver, rot_problem

BADMM = ('badmm-e', 'badmm-q', 'badmm-e-coupled', 'badmm-q-coupled')
# With three sets of weights every dual is made, added to and read.
VARIANTS: dict[str, Solver] = {
    'sinkhorn': make_solver('sinkhorn', num_iters=3),
    'sinkhorn proximal': make_solver('sinkhorn', num_iters=2, num_outer=3),
    **{name: make_solver(name, num_iters=3) for name in BADMM},
}
for similarity in ('covariance', 'cosine'):
    structured = {'structure': True, 'similarity': similarity}
    VARIANTS[f'sinkhorn {similarity}'] = make_solver('sinkhorn', num_iters=2, num_outer=3, **structured)
    VARIANTS |= {f'{name} {similarity}': make_solver(name, num_iters=3, **structured) for name in BADMM}
PLAIN = {name: solver for name, solver in VARIANTS.items() if 'structure' not in solver.starts('mean', 1.0)}
PUBLISHED = {name: VARIANTS[name] for name in ('badmm-e', 'badmm-q')}


def every(variants: dict[str, Solver]):
    return pytest.mark.parametrize('solver', variants.values(), ids=variants)


every_variant = every(VARIANTS)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def constant(dtype: torch.dtype = torch.float64, **values: float) -> dict[str, Tensor]:
    """Weights that all iterations share."""
    return {name: torch.tensor([value], dtype=dtype) for name, value in values.items()}


def varied_weights(solver: Solver, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The weights that `solver` reads and no others, different in every iteration."""
    ranges = {
        'smoothness': (0.5, 0.8),
        'feature_penalty': (0.7, 1.2),
        'sample_penalty': (0.4, 0.2),
        'structure': (0.3, 0.5),
        'step': (1.2, 0.9),
        'proximal': (0.2, 0.4),
    }
    return {
        name: torch.linspace(*ranges[name], solver.num_weight_sets, dtype=torch.float64).to(dtype)
        for name in solver.starts('mean', 1.0)
    }


def varied_problem(batch: int, num_features: int, num_samples: int, *, seed: int = 0) -> ROTProblem:
    """A problem with priors that are not uniform and differ from set to set."""
    return rot_problem(
        random(batch, num_features, num_samples, seed=seed),
        log_feature_prior=random(batch, num_features, seed=seed + 1),
        log_sample_prior=random(batch, num_samples, seed=seed + 2),
    )
