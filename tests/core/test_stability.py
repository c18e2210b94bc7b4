"""float32 from end to end: nothing overflows, in the plan, the output or any gradient."""

import itertools

import pytest
import torch

from rotp_vision.core import Solver, StepWeights, rot_pool, rot_problem, solve
from tests.core.variants import every_structure, every_variant, random, varied_weights, with_similarity

# The paper's grid, section "numerical stability": α1 and α2 = α3 over 1e-5 ... 1e4, without and with α0.
EXPONENTS = range(-5, 5)
NUM_MODULES = 4


def assert_sound(x, solver, mask=None, *, structure=None, **weights):
    """Plan without NaN or +inf and of mass one, output and every gradient finite."""
    x = x.clone().requires_grad_()
    tensors = {name: torch.full((NUM_MODULES,), value, requires_grad=True) for name, value in weights.items()}
    if structure is not None:
        tensors['structure'] = torch.full((NUM_MODULES,), structure, requires_grad=True)
    problem, step = rot_problem(x, mask=mask), StepWeights(**tensors)
    log_plan = solve(problem, step, solver)
    pooled = rot_pool(problem, step, solver)
    assert not log_plan.isnan().any()
    assert (log_plan < 1e-3).all()  # -inf is the logarithm of no mass
    assert ((log_plan.double().exp().sum((1, 2)) - 1).abs() < 1e-3).all()
    assert pooled.isfinite().all()
    towards = torch.linspace(1, 2, pooled.numel()).view_as(pooled)
    grads = torch.autograd.grad((pooled * towards).sum(), [x, *tensors.values()], allow_unused=True)
    assert grads[0] is not None
    for name, grad in zip(['features', *tensors], grads, strict=True):
        assert grad is None or grad.isfinite().all(), name


def weights_of(solver: Solver, alpha1: float, penalty: float, rho: float = 1.0) -> dict[str, float]:
    weights = {'smoothness': alpha1, 'feature_penalty': penalty, 'sample_penalty': penalty}
    if solver.name != 'sinkhorn':
        weights['step'] = rho
    return weights


@every_variant
@pytest.mark.parametrize('structure', [None, 0.1])
def test_papers_grid(solver, structure):
    x = random(1, 5, 10, dtype=torch.float32)
    for i, j in itertools.product(EXPONENTS, EXPONENTS):
        assert_sound(x, solver, structure=structure, **weights_of(solver, 10.0**i, 10.0**j))


@every_variant
@pytest.mark.parametrize('structure', [None, 0.1])
@pytest.mark.parametrize('extreme', [1e-5, 1e4])
def test_extreme_step_and_proximal(solver, structure, extreme):
    x = random(1, 5, 10, dtype=torch.float32)
    for i, j in itertools.product((-5, 0, 4), (-5, 0, 4)):
        weights = weights_of(solver, 10.0**i, 10.0**j, rho=extreme)
        if solver.name == 'sinkhorn':
            weights['proximal'] = extreme
        assert_sound(x, solver, structure=structure, **weights)


def dominated(scale: float) -> torch.Tensor:
    x = random(2, 5, 10, dtype=torch.float32)
    x[:, :, 3] += scale
    return x


MAPS = {
    'zero': torch.zeros(2, 5, 10),
    'constant': torch.full((2, 5, 10), 3.7),
    'one sample': random(2, 5, 1, dtype=torch.float32),
    'one feature': random(2, 1, 10, dtype=torch.float32),
    'one of each': random(2, 1, 1, dtype=torch.float32),
    'large': 1e4 * random(2, 5, 10, dtype=torch.float32),
    'tiny': 1e-30 * random(2, 5, 10, dtype=torch.float32),
    'one sample dominates': dominated(1e4),
    'one sample is nothing': dominated(-1e4),
    'a dead feature': random(2, 5, 10, dtype=torch.float32) * (torch.arange(5) > 0).view(1, 5, 1),
}


@every_variant
@every_structure
@pytest.mark.parametrize('x', MAPS.values(), ids=MAPS)
def test_hard_maps(solver, similarity, x):
    solver, structure = with_similarity(solver, similarity), None if similarity is None else 0.1
    masks = [None]
    if x.shape[2] > 1:
        masks.append(torch.arange(x.shape[2]) < torch.tensor([[1], [4]]))
    for mask in masks:
        assert_sound(x, solver, mask, structure=structure, **weights_of(solver, 0.5, 0.5))


@every_variant
@pytest.mark.parametrize('value', [0.0, 3.7])
def test_constant_maps_pool_to_the_constant(solver, value):
    x = torch.full((2, 5, 10), value)
    weights = varied_weights(4, solver, structure=True, dtype=torch.float32)
    torch.testing.assert_close(rot_pool(rot_problem(x), weights, solver), x[:, :, 0], rtol=1e-6, atol=0)


@every_variant
@every_structure
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(solver, similarity, dtype):
    """Output in the dtype of the input, and exactly the rounded float32 result of the same rounded input."""
    solver = with_similarity(solver, similarity)
    weights = varied_weights(3, solver, structure=similarity is not None, dtype=torch.float32)
    half = random(2, 5, 10).to(dtype).requires_grad_()
    full = half.detach().float().requires_grad_()
    pooled_half, pooled_full = (rot_pool(rot_problem(x), weights, solver) for x in (half, full))
    assert solve(rot_problem(half), weights, solver).dtype == torch.float32
    assert pooled_half.dtype == dtype
    assert torch.equal(pooled_half, pooled_full.to(dtype))
    (grad_half,) = torch.autograd.grad(pooled_half.sum(), half)
    (grad_full,) = torch.autograd.grad(pooled_full.sum(), full)
    # The two ways X enters, plan and average, are rounded one by one before they meet.
    torch.testing.assert_close(grad_half.float(), grad_full, rtol=4 * torch.finfo(dtype).eps, atol=1e-2)


@every_variant
@every_structure
def test_autocast_changes_nothing(solver, similarity):
    solver = with_similarity(solver, similarity)
    weights = varied_weights(3, solver, structure=similarity is not None, dtype=torch.float32)
    results = []
    for enabled in (False, True):
        x = random(2, 5, 10, dtype=torch.float32).requires_grad_()
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
            problem = rot_problem(x)
            log_plan, pooled = solve(problem, weights, solver), rot_pool(problem, weights, solver)
        results.append((log_plan, pooled, *torch.autograd.grad(pooled.sum(), x)))
    for off, on in zip(*results, strict=True):
        assert on.dtype == torch.float32
        assert torch.equal(on, off)
