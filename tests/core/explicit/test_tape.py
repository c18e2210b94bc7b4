"""The engine: outputs and every gradient by name, of every operator, against the plain path."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.core.explicit.operators import (
    OPERATORS,
    TOLERANCE,
    assert_same,
    every_operator,
    every_view,
    leaves,
    pooled,
    results,
)
from tests.memory import most_memory


@every_operator
@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize(
    'shape', [(2, 1, 1), (3, 3, 1), (2, 64, 4), (2, 64, 49), (1, 2048, 9), (1, 2048, 49), (1, 1, 196), (2, 3, 196)]
)
def test_equals_reference(operator, dtype, shape):
    assert_same(operator, leaves(operator, *shape, dtype=dtype))


@every_operator
@pytest.mark.parametrize('num_modules', [1, 2, 6])
def test_any_number_of_modules(operator, num_modules):
    assert_same(operator, leaves(operator, 2, 6, 5, num_modules=num_modules))


@every_operator
@every_view
def test_gradcheck(operator, view):
    tensors = leaves(operator, 2, 4, 3, num_modules=2)

    def function(*values):
        return pooled(operator, dict(zip(tensors, values, strict=True)), 'torch', view=view)

    assert torch.autograd.gradcheck(function, tuple(tensors.values()))


@pytest.mark.parametrize(
    ('operator', 'step'),
    [
        pytest.param(operator, step, id=f'{name} {step}')
        for name, operator in OPERATORS.items()
        for step in ((1.0,) if operator[0].name == 'sinkhorn' else (1e-3, 1.0, 1e3))  # which Sinkhorn does not read
    ],
)
def test_stability_grid_in_float32(operator, step):
    """Outputs agree with float64, and every gradient is finite."""
    for i, j in itertools.product((-5, -2, 0, 2, 4), repeat=2):
        tensors = leaves(operator, 1, 10, 5, dtype=torch.float32)
        for name, value in {'smoothness': 10.0**i, 'feature_penalty': 10.0**j, 'sample_penalty': 10.0**j}.items():
            tensors[name] = torch.full((3,), value, requires_grad=True)
        tensors['step'] = torch.full((3,), step, requires_grad=True)
        single = results(operator, tensors, 'torch')
        wide = {name: value.detach().double().requires_grad_() for name, value in tensors.items()}
        double = results(operator, wide, 'torch')
        assert all(value.isfinite().all() for value in single.values()), (i, j)
        torch.testing.assert_close(single['output'].double(), double['output'], rtol=1e-2, atol=1e-2, msg=f'{i} {j}')


@every_operator
@pytest.mark.parametrize('masked', [False, True])
def test_any_spread_of_features_in_float32(operator, masked):
    """Below, at and beyond the spreads for which exponents need no maximum, outputs and gradients stay accurate.

    Where a plan is all but an indicator, rounding must not be taken for a gradient: the structural term would multiply
    it by many powers of ten. What is ill-conditioned need not be better than by plain autograd, in the median of five.
    """
    mask = torch.arange(9) < torch.tensor([[1], [4], [9]]) if masked else None
    for spread in (0.1, 5.0, 10.0, 20.0, 40.0, 100.0, 1e3):
        errors: dict[str, list[Tensor]] = {}
        for start in range(-1, 4):
            tensors = leaves(operator, 3, 16, 9, dtype=torch.float32)
            x = spread * torch.linspace(start, start + 1, 3 * 16 * 9).sin().mul(1e3).sin()
            tensors['x'] = x.view(3, 16, 9).requires_grad_()
            wide = {name: value.detach().double().requires_grad_() for name, value in tensors.items()}
            expected = results(operator, wide, 'reference', mask)
            found = [results(operator, tensors, backend, mask) for backend in ('torch', 'reference')]
            for name, value in expected.items():
                size = value.abs().max().clamp_min(1e-6 * spread)
                each = torch.stack([(other[name] - value).abs().max() / size for other in found])
                errors.setdefault(name, []).append(each)
        for name, each in errors.items():
            error, plain_error = torch.stack(each).median(0).values
            assert error < max(1e-3, 2 * plain_error), (name, spread, error)


@every_operator
@pytest.mark.parametrize('masked', [True, False])
@pytest.mark.parametrize('offset', [-50.0, 50.0])
def test_features_far_from_zero_in_float32(operator, masked, offset):
    """Masked samples, which are zero, are then the largest or smallest of all, and mean nothing."""
    mask = torch.arange(9) < torch.tensor([[1], [4], [9]]) if masked else None
    tensors = leaves(operator, 3, 16, 9, dtype=torch.float32)
    tensors['x'] = (0.3 * tensors['x'].detach() + offset).requires_grad_()
    assert_same(operator, tensors, mask, {torch.float32: 1e-3})


@every_operator
@every_view
def test_only_what_is_asked_for(operator, view):
    """Frozen features: the gradients of the weights are the same, and the features get none; and the reverse."""
    tensors = leaves(operator, 2, 6, 5)
    expected = results(operator, tensors, 'torch', view=view)
    for frozen in ({'x'}, set(tensors) - {'x'}):
        part = {name: value.detach().requires_grad_(name not in frozen) for name, value in tensors.items()}
        out = pooled(operator, part, 'torch', view=view)
        towards = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
        free = {name: value for name, value in part.items() if value.requires_grad}
        grads = torch.autograd.grad(out, list(free.values()), towards, allow_unused=True, materialize_grads=True)
        for name, grad in zip(free, grads, strict=True):
            torch.testing.assert_close(grad, expected[name], msg=name)


@every_operator
def test_nan_in_nan_out(operator):
    tensors = leaves(operator, 2, 6, 5)
    x = tensors['x'].detach().clone()
    x[0, 2, 1] = torch.nan
    out = pooled(operator, tensors | {'x': x}, 'torch')
    assert out[0].isnan().any()
    assert not out[1].isnan().any()
    for name in ('log_p0', 'log_q0', 'step', 'smoothness'):
        if name == 'step' and operator[0].name == 'sinkhorn':
            continue
        value = tensors[name].detach().clone()
        value[..., -1 if operator[0].name == 'sinkhorn' else 0] = torch.nan  # whose last module alone counts
        assert pooled(operator, tensors | {name: value}, 'torch').isnan().any(), name


@every_operator
def test_a_weight_of_zero_is_no_crash(operator):
    """softplus underflows when training diverges: NaN like plain autograd, not an exception."""
    solver, _, proximal = operator
    tensors = leaves(operator, 2, 6, 5)
    tensors['smoothness' if solver.name == 'sinkhorn' else 'step'] = torch.zeros(
        3, dtype=torch.float64
    ).requires_grad_()
    expected, got = (results(operator, tensors, backend)['output'].isfinite() for backend in ('reference', 'torch'))
    assert torch.equal(expected, got)
    assert bool(got.all()) == proximal  # which smooths as well


@every_operator
@every_view
def test_inference_needs_no_more_than_the_batch_again(operator, view):
    """The most memory at a time besides X, as torch's profiler sees it."""
    tensors = leaves(operator, 32, 1024, 49, num_modules=4, dtype=torch.float32)
    with torch.no_grad():
        most = most_memory(lambda: pooled(operator, tensors, 'torch', view=view))
    size = tensors['x'].untyped_storage().nbytes()
    assert most <= size
