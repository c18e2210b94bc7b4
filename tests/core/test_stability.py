"""float32 from end to end: nothing overflows, in the plan, the output or any gradient."""

import itertools

import pytest
import torch

from rotp_vision.core import Solver, make_solver, rot_pool, rot_problem, solve
from tests.core.variants import PLAIN, VARIANTS, constant, every, every_variant, random, varied_weights

# The paper's grid, section "numerical stability": α1 and α2 = α3 over 1e-5 ... 1e4, without and with α0.
EXPONENTS = range(-5, 5)
STRUCTURED = {name: solver for name, solver in VARIANTS.items() if 'covariance' in name}


def assert_sound(x, solver, mask=None, **values):
    """Plan without NaN or +inf and of mass one, output and every gradient finite."""
    x = x.clone().requires_grad_()
    weights = {name: value.requires_grad_() for name, value in constant(torch.float32, **values).items()}
    problem = rot_problem(x, mask=mask)
    log_plan = solve(problem, weights, solver)
    pooled = rot_pool(problem, weights, solver)
    assert not log_plan.isnan().any()
    assert (log_plan < 1e-3).all()  # -inf is the logarithm of no mass
    assert ((log_plan.double().exp().sum((1, 2)) - 1).abs() < 1e-3).all()
    assert pooled.isfinite().all()
    towards = torch.linspace(1, 2, pooled.numel()).view_as(pooled)
    grads = torch.autograd.grad((pooled * towards).sum(), [x, *weights.values()], allow_unused=True)
    assert grads[0] is not None
    for name, grad in zip(['features', *weights], grads, strict=True):
        assert grad is None or grad.isfinite().all(), name


def values_of(solver: Solver, alpha1: float, penalty: float, rho: float = 1.0) -> dict[str, float]:
    values = {'smoothness': alpha1, 'feature_penalty': penalty, 'sample_penalty': penalty, 'structure': 0.1}
    values |= {'step': rho, 'proximal': rho}
    return {name: values[name] for name in solver.starts('mean', 1.0)}


@every(PLAIN | STRUCTURED)
def test_papers_grid(solver):
    x = random(1, 5, 10, dtype=torch.float32)
    for i, j in itertools.product(EXPONENTS, EXPONENTS):
        assert_sound(x, solver, **values_of(solver, 10.0**i, 10.0**j))


@every({name: solver for name, solver in (PLAIN | STRUCTURED).items() if name != 'sinkhorn'})
@pytest.mark.parametrize('extreme', [1e-5, 1e4])
def test_extreme_step_and_proximal(solver, extreme):
    x = random(1, 5, 10, dtype=torch.float32)
    for i, j in itertools.product((-5, 0, 4), (-5, 0, 4)):
        assert_sound(x, solver, **values_of(solver, 10.0**i, 10.0**j, rho=extreme))


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
@pytest.mark.parametrize('x', MAPS.values(), ids=MAPS)
def test_hard_maps(solver, x):
    assert_sound(x, solver, **values_of(solver, 0.5, 0.5))
    if x.shape[2] > 1:
        mask = torch.arange(x.shape[2]) < torch.tensor([[1], [4]])
        assert_sound(x, solver, mask, **values_of(solver, 0.5, 0.5))


@every_variant
@pytest.mark.parametrize('value', [0.0, 3.7])
def test_constant_maps_pool_to_the_constant(solver, value):
    x = torch.full((2, 5, 10), value)
    weights = varied_weights(solver, torch.float32)
    torch.testing.assert_close(rot_pool(rot_problem(x), weights, solver), x[:, :, 0], rtol=1e-6, atol=0)


@every(PLAIN)
@pytest.mark.parametrize('feature_scale', ['raw', 'rms', 'log'])
def test_what_is_not_a_number_reaches_the_output_of_its_own_set_alone(solver, feature_scale):
    x, weights = random(2, 3, 4), varied_weights(solver)
    x[0, 1, 2] = torch.nan
    pooled = rot_pool(rot_problem(x, feature_scale=feature_scale), weights, solver)
    assert pooled[0, 1].isnan()
    assert not pooled[1].isnan().any()
    for name in weights:
        broken = weights | {name: torch.full_like(weights[name], torch.nan)}
        assert rot_pool(rot_problem(x[1:], feature_scale=feature_scale), broken, solver).isnan().any(), name


@pytest.mark.parametrize(
    ('name', 'zero'), [('sinkhorn', 'smoothness'), ('badmm-e', 'step'), ('badmm-q-coupled', 'step')]
)
def test_a_weight_that_underflowed_to_zero_is_no_silent_number(name, zero):
    """softplus underflows when training diverges: the result is not a number, as by the reference."""
    solver = make_solver(name)
    weights = constant(**dict.fromkeys(solver.starts('mean', 1.0), 1.0) | {zero: 0.0})
    for backend in ('auto', 'reference'):
        assert not rot_pool(rot_problem(random(2, 6, 5)), weights, solver, backend=backend).isfinite().any()


@every_variant
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(solver, dtype):
    """Output in the dtype of the input, and exactly the rounded float32 result of the same rounded input."""
    weights = varied_weights(solver, torch.float32)
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
def test_autocast_changes_nothing(solver):
    weights = varied_weights(solver, torch.float32)
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
