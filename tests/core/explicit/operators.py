"""All operators with explicit gradients, and how they are compared with the reference."""

import pytest
import torch
from torch import Tensor

from rotp_vision.core import Solver, StepWeights, rot_pool, rot_problem

# solver, whether with a structural term, whether with a proximal one
OPERATORS = {
    'badmm-e': (Solver('badmm-e'), False, False),
    'badmm-q': (Solver('badmm-q'), False, False),
    'badmm-e covariance': (Solver('badmm-e', similarity='covariance'), True, False),
    'badmm-q cosine': (Solver('badmm-q', similarity='cosine'), True, False),
    'coupled badmm-e': (Solver('badmm-e', coupled=True), False, False),
    'coupled badmm-q': (Solver('badmm-q', coupled=True), False, False),
    'coupled badmm-e covariance': (Solver('badmm-e', coupled=True), True, False),
    'coupled badmm-q cosine': (Solver('badmm-q', coupled=True, similarity='cosine'), True, False),
    'sinkhorn': (Solver('sinkhorn', num_inner=3), False, False),
    'sinkhorn proximal': (Solver('sinkhorn', num_inner=2), False, True),
    'sinkhorn covariance': (Solver('sinkhorn', num_inner=2), True, False),
    'sinkhorn proximal cosine': (Solver('sinkhorn', num_inner=2, similarity='cosine'), True, True),
}
every_view = pytest.mark.parametrize('view', ['identity', 'rms', 'log'])
every_operator = pytest.mark.parametrize('operator', OPERATORS.values(), ids=OPERATORS)

# Largest difference from the reference in float64, relative to the largest entry.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}


def leaves(operator, batch, num_features, num_samples, *, num_modules=3, dtype=torch.float64):
    """Everything a gradient is taken of, by name: features, priors, weights."""
    _, structure, proximal = operator
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    def positive():
        return (torch.rand(num_modules, generator=generator, dtype=torch.float64) + 0.4).to(dtype).requires_grad_()

    tensors = {'x': normal(batch, num_features, num_samples)}
    tensors |= {'log_p0': normal(batch, num_features), 'log_q0': normal(1, num_samples)}
    tensors |= {name: positive() for name in ('smoothness', 'feature_penalty', 'sample_penalty', 'step')}
    tensors |= {'structure': positive()} if structure else {}
    tensors |= {'proximal': positive()} if proximal else {}
    return tensors


def pooled(operator, tensors: dict[str, Tensor], backend: str, mask=None, view: str = 'identity') -> Tensor:
    weights = StepWeights(**{name: value for name, value in tensors.items() if name in StepWeights._fields})
    priors = {'log_feature_prior': tensors['log_p0'], 'log_sample_prior': tensors['log_q0']}
    problem = rot_problem(tensors['x'], **priors, mask=mask, view=view)
    return rot_pool(problem, weights, operator[0]._replace(backend=backend))


def results(
    operator, tensors: dict[str, Tensor], backend: str, mask: Tensor | None = None, view: str = 'identity'
) -> dict[str, Tensor]:
    """The output and every gradient, by name."""
    out = pooled(operator, tensors, backend, mask, view)
    towards = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    used = [value for value in tensors.values() if value.requires_grad]
    grads = torch.autograd.grad(out, used, towards, allow_unused=True, materialize_grads=True)
    return {'output': out.detach()} | dict(zip(tensors, grads, strict=True))


def assert_same(operator, tensors, mask=None, tolerance=TOLERANCE, view='identity'):
    exact = {name: value.detach().double().requires_grad_() for name, value in tensors.items()}
    expected, got = (
        results(operator, given, backend, mask, view) for given, backend in ((exact, 'reference'), (tensors, 'torch'))
    )
    dtype = tensors['x'].dtype
    sizes = {name: value.abs().max() for name, value in expected.items()}
    # A weight's gradient is a sum of which little may be left. In float32 its rounding is compared with all weights'.
    weights = [name for name in expected if name in StepWeights._fields] if dtype == torch.float32 else []
    sizes |= dict.fromkeys(weights, max((sizes[name] for name in weights), default=None))
    for name, value in expected.items():
        assert got[name].dtype == dtype, name
        error = ((got[name] - value).abs().max() / sizes[name].clamp_min(1e-2)).item()
        assert error < tolerance[dtype], f'{name}: {error}'
