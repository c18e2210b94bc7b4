"""Every Triton kernel against the torch operators, run on CPU by Triton's interpreter.

Not collected by itself: the interpreter must be chosen before triton is first imported, so `test_sets` runs this file
in a process of its own. By hand: `TRITON_INTERPRET=1 pytest tests/core/triton/sets_interpreted.py`.
"""

import argparse
import copy
import json

import pytest
import torch
from torch import Tensor, nn

from rotp_vision import bench
from rotp_vision.core import Solver, scaled_softplus
from rotp_vision.core.triton import badmm, coefficients, sinkhorn, tiles  # noqa: F401 - define their operators
from rotp_vision.layers import GlobalROTPool2d, ROTSetPool
from tests.core.explicit.operators import leaves, pooled, results

OPERATORS = {
    'badmm-e': (Solver('badmm-e'), False, False),
    'badmm-q': (Solver('badmm-q'), False, False),
    'sinkhorn': (Solver('sinkhorn', num_inner=2), False, False),
}
every_operator = pytest.mark.parametrize('operator', OPERATORS.values(), ids=OPERATORS)

# Of float32 kernels against the torch path in float64, relative to the largest entry; and absolute, for gradients of
# weights that are a sum in which larger terms cancel (the torch path in float32 errs there as much).
TOLERANCE, FLOOR = 1e-5, 1e-6


def double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().double().requires_grad_(value.requires_grad) for name, value in tensors.items()}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = (got[name].double() - value.double()).abs().max()
        assert error <= TOLERANCE * value.abs().max() + FLOOR, f'{name}: {error} of {value.abs().max()}'


def assert_same(operator, tensors: dict[str, Tensor], mask: Tensor | None = None, view: str = 'identity'):
    got = results(operator, tensors, 'triton', mask, view)
    assert_close(got, results(operator, double(tensors), 'torch', mask, view))
    return got


@every_operator
@pytest.mark.parametrize('shape', [(2, 5, 1), (2, 33, 4), (1, 1, 9), (1, 33, 49), (1, 5, 196)])
def test_equals_torch(operator, shape):
    assert_same(operator, leaves(operator, *shape, dtype=torch.float32))


@every_operator
def test_several_tiles_and_several_sub_tiles(operator, monkeypatch):
    """Nine tiles of four features, the last of them with one: in nine programs, then in two of five and four."""
    tensors = leaves(operator, 1, 33, 196, num_modules=2, dtype=torch.float32)
    assert tiles.tiling(33, 196, tiles.BACKWARD_ELEMENTS)[1:] == (4, 1, 9)
    assert_same(operator, tensors)
    monkeypatch.setattr(tiles, 'MAX_TILES', 2)
    assert tiles.tiling(33, 196, tiles.BACKWARD_ELEMENTS)[1:] == (4, 5, 2)
    assert_same(operator, tensors)


@pytest.mark.parametrize(('name', 'count'), [('badmm-e', 1), ('badmm-e', 4), ('badmm-q', 1), ('badmm-q', 4)])
def test_any_number_of_modules(name, count):
    assert_same(OPERATORS[name], leaves(OPERATORS[name], 1, 6, 9, num_modules=count, dtype=torch.float32))


@pytest.mark.parametrize('num_inner', [1, 5])
def test_any_number_of_inner_steps(num_inner):
    operator = (Solver('sinkhorn', num_inner=num_inner), False, False)
    assert_same(operator, leaves(operator, 1, 6, 5, num_modules=2, dtype=torch.float32))


@every_operator
@pytest.mark.parametrize('view', ['identity', 'rms', 'log'])
def test_masks_and_views(operator, view):
    mask = torch.arange(9) < torch.tensor([[1], [6]])
    got = assert_same(operator, leaves(operator, 2, 12, 9, num_modules=2, dtype=torch.float32), mask, view)
    assert torch.equal(got['x'][0, :, 1:], torch.zeros(12, 8))


@every_operator
@pytest.mark.parametrize('view', ['identity', 'rms', 'log'])
def test_masked_samples_are_not_read(operator, view):
    """Whatever they hold: a layer gives the features to the kernels as they are."""
    weights = {'smoothness': 0.8, 'step': 1.3} if 'badmm' in operator[0].name else {'smoothness': 1.3}
    pool = ROTSetPool({'solver': operator[0].name, 'view': view, **weights})
    mask = torch.arange(9) < torch.tensor([[1], [6]])
    x = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(0)).masked_fill(~mask.unsqueeze(2), torch.nan)
    expected = of_layer(pool, x, torch.float64, mask)
    pool.solver = pool.solver._replace(backend='triton')
    got = of_layer(pool, x, torch.float32, mask)
    assert_close(got, expected)
    assert torch.equal(got['x'][~mask], torch.zeros(11, 12))


@pytest.mark.parametrize('name', ['badmm-e', 'sinkhorn'])
@pytest.mark.parametrize('view', ['rms', 'log'])
def test_views_of_several_tiles(name, view):
    """Features of a channel from silent to such that their squares overflow."""
    tensors = leaves(OPERATORS[name], 1, 33, 196, num_modules=2, dtype=torch.float32)
    sizes = torch.logspace(-6, 3 if view == 'log' else 25, 33).view(1, -1, 1)
    tensors['x'] = (tensors['x'].detach() * sizes).requires_grad_()
    got = results(OPERATORS[name], tensors, 'triton', None, view)
    expected = results(OPERATORS[name], double(tensors), 'torch', None, view)
    for given in (got, expected):
        given['output'] = given['output'] / sizes[0, :, 0]
        given['x'] = given['x'] * (1.0 if view == 'log' else 1e-20)
        given |= {
            key: value * (1e-3 if view == 'log' else 1e-25) for key, value in given.items() if key not in 'x output'
        }
    assert_close(got, expected)


@every_operator
@pytest.mark.parametrize('masked', [False, True])
def test_features_far_from_zero(operator, masked):
    """Features all far below zero, or far apart: exponents of samples that do not exist must not overflow."""
    mask = torch.arange(9) < torch.tensor([[1], [6]]) if masked else None
    for spread in (20.0, 1e3):
        tensors = leaves(operator, 2, 12, 9, dtype=torch.float32)
        tensors['x'] = (spread * (tensors['x'].detach() - 3)).requires_grad_()
        got, expected = results(operator, tensors, 'triton', mask), results(operator, double(tensors), 'torch', mask)
        assert all(value.isfinite().all() for value in got.values()), spread
        for name in expected:
            error, size = (got[name] - expected[name]).abs().max(), expected[name].abs().max()
            assert error <= 1e-5 * max(size, spread * 1e-3), (name, spread, error)


@every_operator
def test_channels_last_without_copies(operator):
    tensors = leaves(operator, 2, 8, 9, dtype=torch.float32)
    tensors['x'] = tensors['x'].detach().mT.contiguous().mT.requires_grad_()
    got = assert_same(operator, tensors)
    assert got['x'].stride() == tensors['x'].stride() == (72, 1, 8)


@every_operator
@pytest.mark.parametrize(
    ('dtype', 'view'), [(torch.float16, 'identity'), (torch.bfloat16, 'rms'), (torch.float16, 'log')]
)
def test_half_precision_in_and_out(operator, dtype, view):
    """The same numbers as float32 from the rounded features, rounded once at the end."""
    tensors = leaves(operator, 2, 6, 5, num_modules=2, dtype=torch.float32)
    tensors['x'] = tensors['x'].detach().to(dtype).requires_grad_()
    towards = torch.linspace(-1, 2, 12).view(2, 6).to(dtype)
    got, expected = {}, {}
    for found, given, backend in ((got, tensors, 'triton'), (expected, double(tensors), 'torch')):
        out = pooled(operator, given, backend, view=view)
        grads = torch.autograd.grad(out, list(given.values()), towards.to(out.dtype), allow_unused=True)
        found |= {'output': out} | {name: grad for name, grad in zip(given, grads, strict=True) if grad is not None}
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == (dtype if name in ('output', 'x') else torch.float32)
        error = (got[name].double() - value).abs().max()
        rounding = torch.finfo(dtype).eps if name in ('output', 'x') else TOLERANCE
        assert error <= rounding * value.abs().max() + FLOOR, name


@every_operator
def test_only_what_is_asked_for(operator):
    tensors = leaves(operator, 1, 6, 5, num_modules=2, dtype=torch.float32)
    expected = results(operator, tensors, 'triton')
    for frozen in ({'x'}, set(tensors) - {'x'}):
        part = {name: value.detach().requires_grad_(name not in frozen) for name, value in tensors.items()}
        out = pooled(operator, part, 'triton')
        free = {name: value for name, value in part.items() if value.requires_grad}
        towards = torch.linspace(-1, 2, out.numel()).view_as(out)
        grads = torch.autograd.grad(out, list(free.values()), towards, allow_unused=True, materialize_grads=True)
        for name, grad in zip(free, grads, strict=True):
            assert torch.equal(grad, expected[name]), name


@every_operator
def test_expanded_gradient(operator):
    """The gradient of a sum is one number behind all entries."""
    tensors = leaves(operator, 2, 6, 5, dtype=torch.float32)
    got, expected = (
        torch.autograd.grad(pooled(operator, values, backend).sum(), values['x'])[0]
        for values, backend in ((tensors, 'triton'), (double(tensors), 'torch'))
    )
    assert_close({'x': got}, {'x': expected})


# The rest of opcheck's tests run the operator many times; `test_compiles_whole` has what they are for.
CHECKS = ('test_schema', 'test_autograd_registration', 'test_faketensor')


@every_operator
def test_opcheck(operator):
    name, option, modules = (
        ('sinkhorn', 3, 1) if operator[0].name == 'sinkhorn' else ('badmm', 'q' in operator[0].name, 2)
    )
    x, log_p0, log_q0 = torch.randn(2, 6, 5), torch.randn(2, 6).log_softmax(1), torch.randn(2, 5).log_softmax(1)
    inputs, options = (x, log_p0, log_q0, torch.rand(4 * modules + 1) + 0.4), ('rms', option)
    differentiable = tuple(value.clone().requires_grad_() for value in inputs)
    forward = getattr(torch.ops.rotp_vision, f'triton_{name}_pool')
    torch.library.opcheck(forward.default, (*differentiable, *options), test_utils=CHECKS)
    out, *saved = forward(*inputs, *options)
    backward = getattr(torch.ops.rotp_vision, f'{forward.__name__}_backward').default
    for needs in ([True] * 4, [False, True, False, True]):
        torch.library.opcheck(backward, (torch.ones_like(out), *inputs, *saved, needs, *options), test_utils=CHECKS)


def test_opcheck_of_coefficients():
    weights = [torch.rand(3).add(0.4).requires_grad_() for _ in range(3)]
    gain, ops = torch.tensor(1.5, requires_grad=True), torch.ops.rotp_vision
    torch.library.opcheck(ops.triton_badmm_coefficients.default, (*weights[:2], gain, True), test_utils=CHECKS)
    torch.library.opcheck(ops.triton_sinkhorn_coefficients.default, (*weights, gain), test_utils=CHECKS)


@every_operator
def test_compiles_whole(operator):
    tensors = leaves(operator, 2, 6, 5, num_modules=2, dtype=torch.float32)
    expected = results(operator, tensors, 'triton')
    torch.compiler.reset()
    compiled = torch.compile(pooled, fullgraph=True, backend='aot_eager')
    out = compiled(operator, tensors, 'triton')
    towards = torch.linspace(-1, 2, out.numel()).view_as(out)
    got = {'output': out, 'x': torch.autograd.grad(out, tensors['x'], towards)[0]}
    assert_close(got, {name: expected[name] for name in got})


@every_operator
def test_second_derivative_is_refused(operator):
    tensors = leaves(operator, 1, 6, 5, dtype=torch.float32)
    (grad,) = torch.autograd.grad(pooled(operator, tensors, 'triton').sum(), tensors['x'], create_graph=True)
    with pytest.raises(RuntimeError, match='no second derivative'):
        grad.sum().backward()


def of_layer(pool: nn.Module, x: Tensor, dtype: torch.dtype, *others: Tensor) -> dict[str, Tensor]:
    pool = copy.deepcopy(pool).to(dtype)
    x = x.to(dtype).requires_grad_()
    out = pool(x, *others)
    inputs = {'x': x} | dict(pool.named_parameters())
    grads = torch.autograd.grad(
        out, list(inputs.values()), torch.linspace(-1, 2, out.numel(), dtype=dtype).view_as(out)
    )
    return {'output': out.detach()} | dict(zip(inputs, grads, strict=True))


@pytest.mark.parametrize('options', [
    {'solver': 'badmm-e', 'num_modules': 2}, {'solver': 'sinkhorn', 'gain': 'channel'},
    {'solver': 'badmm-q', 'view': 'log', 'learn': 'shared'}, {'solver': 'sinkhorn', 'prior': 'norm'},
])  # fmt: skip
def test_layers(options):
    """View, gain, prior and the weights' own parameters: the same from both backends."""
    x = torch.randn(2, 5, 4, 3, generator=torch.Generator().manual_seed(0))
    pool = GlobalROTPool2d({'step' if 'badmm' in options['solver'] else 'smoothness': 1.3, **options}, 5)
    with torch.no_grad():
        for parameter in pool.parameters():
            parameter.add_(torch.rand(parameter.shape) - 0.5)
    expected = of_layer(pool, x, torch.float64)
    pool.solver = pool.solver._replace(backend='triton')
    assert_close(of_layer(pool, x, torch.float32), expected)


@pytest.mark.parametrize('solver', ['badmm-e', 'sinkhorn'])
def test_layers_keep_half_precision(solver):
    """What is saved for backward is the half-precision map itself, not a wider copy of it."""
    x = torch.randn(2, 5, 4, 3, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = GlobalROTPool2d({'solver': solver, 'view': 'identity', 'backend': 'triton'})(x)
    assert got.dtype == torch.float16
    assert [tensor.dtype for tensor in saved if tensor.numel() == x.numel()] == [torch.float16]
    expected = GlobalROTPool2d({'solver': solver, 'view': 'identity', 'backend': 'torch'})(x.detach())
    torch.testing.assert_close(got.detach(), expected, rtol=2e-3, atol=2e-3)
    assert torch.autograd.grad(got.sum(), x)[0].dtype == torch.float16


def test_softplus():
    """Over the whole range, of all shapes, with parameters in half precision too; relative to each entry."""
    betas = [torch.linspace(-80, 30, 301), torch.tensor(0.3), torch.linspace(-3, 3, 4).bfloat16()]
    starts = [torch.linspace(1e-3, 1e3, 301), torch.tensor(2.0), torch.ones(4)]
    found = []
    for function, dtype in ((coefficients.softplus, None), (scaled_softplus, torch.float64)):
        given = [beta.to(dtype or beta.dtype).requires_grad_() for beta in betas]
        weights = function(given, [start.to(dtype or start.dtype) for start in starts])
        towards = [torch.linspace(1, 2, w.numel()).view_as(w).to(w.dtype) for w in weights]
        found.append([*weights, *torch.autograd.grad(weights, given, towards)])
    for got, expected in zip(*found, strict=True):
        tolerance = 1e-2 if got.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=0)


def test_bench_compares_and_advises(monkeypatch, capsys):
    monkeypatch.setattr(bench, 'SHAPES', ((5, 2, 2),))
    monkeypatch.setattr(bench, 'LOCAL_SHAPES', ((3, 2, 3),))
    monkeypatch.setattr(bench, 'SOLVERS', ('sinkhorn',))
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = parser.parse_args(['--device', 'cpu', '--batch-size', '1', '--repeats', '1', '--channels-last'])
    bench.run(args)
    printed = capsys.readouterr().out
    assert printed.count('| 5×2×2 |') == printed.count('| 3×2×3, 3×3 windows, stride 2 |') == 1
    assert "Choose backend='torch': triton agrees everywhere" in printed  # the interpreter is not fast

    monkeypatch.setattr(bench, 'AGREEMENT', -1.0)
    with pytest.raises(RuntimeError, match='2 of 2 rows disagree and 0 fail'):
        bench.run(args)
    assert 'Please report this table' in capsys.readouterr().out

    monkeypatch.setattr(tiles, 'launch_forward', lambda *arguments, **flags: 1 / 0)
    with pytest.raises(RuntimeError, match='1 of 2 rows disagree and 1 fail'):
        bench.run(args)
    rows = json.loads(capsys.readouterr().out.split('Please post this line:\n')[1].splitlines()[0])['rows']
    assert [row.get('triton_fails') for row in rows] == ['ZeroDivisionError: division by zero', None]
