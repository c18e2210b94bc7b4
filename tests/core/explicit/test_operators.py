"""The operators with explicit backward against the plain path, outputs and every gradient by name."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from rotp_vision.core import Solver, StepWeights, decompositions, explicit_pool, rot_pool, rot_problem
from rotp_vision.core.explicit import scratch as scratch_module
from rotp_vision.layers import PoolOptions
from tests.memory import most_memory

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
@pytest.mark.parametrize('masked', [True, False])
def test_masks_and_views(operator, masked, view):
    mask = torch.arange(9) < torch.tensor([[1], [4], [9]]) if masked else None
    tensors = leaves(operator, 3, 16, 9)
    assert_same(operator, tensors, mask, view=view)
    if masked:
        gradient = results(operator, tensors, 'torch', mask, view)['x']
        assert torch.equal(gradient[0, :, 1:], torch.zeros(16, 8, dtype=torch.float64))


@every_operator
@every_view
def test_memory_formats_and_chunks(operator, view, monkeypatch):
    """In chunks of which the last is smaller, forwards (of 2 or 5 sets) and backwards (of 4 or 8)."""
    tensors = leaves(operator, 23, 8, 6)
    expected = results(operator, tensors, 'torch', view=view)
    tensors['x'] = tensors['x'].detach().mT.contiguous().mT.requires_grad_()
    monkeypatch.setitem(scratch_module.CHUNK_ELEMENTS, 'cpu', 4 * 8 * 6)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 1)
    got = results(operator, tensors, 'torch', view=view)
    assert got['x'].stride() == tensors['x'].stride()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, msg=name)


@every_operator
@every_view
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_features(operator, dtype, view):
    """The same as of the rounded features in float32, rounded once at the end."""
    tensors = leaves(operator, 2, 8, 6, dtype=torch.float32)
    tensors['x'] = tensors['x'].detach().to(dtype).requires_grad_()
    wide = tensors | {'x': tensors['x'].detach().float().requires_grad_()}
    towards = torch.linspace(-1, 2, 16).view(2, 8).to(dtype)
    got, expected = (pooled(operator, given, 'torch', view=view) for given in (tensors, wide))
    assert torch.equal(got, expected.to(dtype))
    got = torch.autograd.grad(got, list(tensors.values()), towards, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(
        expected, list(wide.values()), towards.float(), allow_unused=True, materialize_grads=True
    )
    for name, value, right in zip(tensors, got, expected, strict=True):
        torch.testing.assert_close(value, right.to(value.dtype), msg=name)


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
@pytest.mark.parametrize('view', ['rms', 'log'])
@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('size', [1e-6, 1.0, 1e3])
def test_views_in_float32(operator, view, masked, size):
    """Of features of any size, some of them zero as after a rectifier, and a channel that is silent.

    Near the floor a view is ill-conditioned: then no better than plain autograd.
    """
    mask = torch.arange(9) < torch.tensor([[1], [4], [9]]) if masked else None
    tensors = leaves(operator, 3, 16, 9, dtype=torch.float32)
    x = size * tensors['x'].detach().relu()
    x[:, 3] = 0.0
    tensors['x'] = x.requires_grad_()
    wide = {name: value.detach().double().requires_grad_() for name, value in tensors.items()}
    expected = results(operator, wide, 'reference', mask, view)
    got, plain = (results(operator, tensors, backend, mask, view) for backend in ('torch', 'reference'))
    for name, value in expected.items():
        error, plain_error = (
            (other[name] - value).abs().max() / value.abs().max().clamp_min(1e-2) for other in (got, plain)
        )
        assert error < max(1e-3, 2 * plain_error), (name, error, plain_error)


@every_operator
@pytest.mark.parametrize('backend', ['torch', 'reference'])
def test_rms_of_features_whose_squares_overflow(operator, backend):
    tensors = leaves(operator, 2, 6, 5, dtype=torch.float32)
    small = results(operator, tensors, backend, view='rms')
    tensors['x'] = (1e30 * tensors['x'].detach()).requires_grad_()
    large = results(operator, tensors, backend, view='rms')
    assert all(value.isfinite().all() for value in large.values())
    torch.testing.assert_close(large['output'] / 1e30, small['output'], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(large['x'], small['x'], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ('dtype', 'spread'), [(torch.float32, 1.0), (torch.float32, 10.0), (torch.float64, 10.0), (torch.float64, 80.0)]
)
def test_coupled_plans_whose_scale_is_below_zero(dtype, spread):
    """c = 1/ρ + (1 - α1'/ρ) s, where the smoothness before is larger than the step."""
    operator = OPERATORS['coupled badmm-e']
    tensors = leaves(operator, 2, 16, 4, dtype=dtype)
    tensors['x'] = (spread * tensors['x'].detach()).requires_grad_()
    tensors['step'] = torch.tensor([0.5, 4.0, 0.4], dtype=dtype, requires_grad=True)
    tensors['smoothness'] = torch.tensor([0.1, 6.0, 0.3], dtype=dtype, requires_grad=True)
    assert_same(operator, tensors, tolerance={torch.float64: 1e-9, torch.float32: 1e-4})


@every_operator
@every_view
def test_gradcheck(operator, view):
    tensors = leaves(operator, 2, 4, 3, num_modules=2)

    def function(*values):
        return pooled(operator, dict(zip(tensors, values, strict=True)), 'torch', view=view)

    assert torch.autograd.gradcheck(function, tuple(tensors.values()))


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
def test_empty_batch(operator):
    expected, got = (results(operator, leaves(operator, 0, 6, 5), backend) for backend in ('reference', 'torch'))
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@every_operator
def test_same_bits_twice(operator):
    """On two threads, of a batch that is worth sharing between them."""
    torch.set_num_threads(2)
    tensors = leaves(operator, 8, 256, 49, dtype=torch.float32)
    first, second = (results(operator, tensors, 'torch') for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_operator
@every_view
def test_keeps_nothing_but_its_inputs(operator, view):
    """What is saved for backward: X itself, not a copy, and next to nothing, whatever the number of modules."""
    tensors = leaves(operator, 8, 64, 49, num_modules=8, dtype=torch.float32)
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pooled(operator, tensors, 'torch', view=view)
    given = tensors['x'].untyped_storage()
    kept, size = sum(storages.values()), given.nbytes()  # numbers: pytest would print the storage itself
    assert given.data_ptr() in storages
    assert kept <= 1.1 * size


@every_operator
@every_view
def test_inference_needs_no_more_than_the_batch_again(operator, view):
    """The most memory at a time besides X, as torch's profiler sees it."""
    tensors = leaves(operator, 32, 1024, 49, num_modules=4, dtype=torch.float32)
    with torch.no_grad():
        most = most_memory(lambda: pooled(operator, tensors, 'torch', view=view))
    size = tensors['x'].untyped_storage().nbytes()
    assert most <= size


@every_operator
def test_second_derivative_is_refused(operator):
    tensors = leaves(operator, 1, 6, 5)
    (grad,) = torch.autograd.grad(pooled(operator, tensors, 'torch').sum(), tensors['x'], create_graph=True)
    with pytest.raises(RuntimeError, match='no second derivative'):
        grad.sum().backward()


@every_operator
@every_view
def test_opcheck(operator, view):
    """torch's own tests of an operator: schema, fake tensors, autograd registration, dynamic shapes."""
    solver, structure, _ = operator
    name = {'sinkhorn': 'sinkhorn_pool'}.get(solver.name, 'coupled_badmm_pool' if solver.coupled else 'badmm_pool')
    quadratic, similarity = solver.name == 'badmm-q', solver.similarity if structure else ''
    options = (2, False, similarity) if name == 'sinkhorn_pool' else (quadratic, similarity)
    forces = quadratic + structure
    rows = {'sinkhorn_pool': 5 + structure, 'coupled_badmm_pool': 21 + 3 * forces}.get(name, 3 + forces)
    x, log_p0, log_q0 = torch.randn(2, 6, 5), torch.randn(2, 6).log_softmax(1), torch.randn(2, 5).log_softmax(1)
    inputs = (x, log_p0, log_q0, torch.rand(rows, 2) + 0.5)
    differentiable = tuple(value.requires_grad_() for value in inputs)
    options = (view, *options)
    torch.library.opcheck(getattr(torch.ops.rotp_vision, name).default, (*differentiable, *options))
    fixed = tuple(value.detach() for value in inputs)
    backward = getattr(torch.ops.rotp_vision, f'{name}_backward').default
    torch.library.opcheck(backward, (torch.randn(2, 6), *fixed, [True, True, True, True], *options))


class Pool(nn.Module):
    """A layer as small as can be, which also scripts."""

    def __init__(self, operator, num_modules: int = 2, view: str = 'identity'):
        super().__init__()
        self.view = view
        solver, structure, proximal = operator
        self.name, self.coupled, self.num_inner = str(solver.name), solver.coupled, solver.num_inner
        self.similarity = str(solver.similarity)
        self.structure = nn.Parameter(torch.full((num_modules,), 0.4)) if structure else None
        self.proximal = nn.Parameter(torch.full((num_modules,), 0.3)) if proximal else None
        self.alpha = nn.Parameter(torch.linspace(0.6, 0.9, num_modules))

    def forward(self, maps: Tensor) -> Tensor:
        problem = rot_problem(maps.flatten(2), view=self.view)
        a = self.alpha
        weights = StepWeights(a, a, a, self.structure, a, self.proximal)
        return explicit_pool(problem, weights, self.name, self.coupled, self.num_inner, self.similarity, False)


@every_operator
@every_view
def test_graphs(operator, view):
    """Compiled, exported, taken apart, traced, scripted, mapped, on the meta device: the same numbers."""
    layer = Pool(operator, view=view)
    maps, other = torch.randn(3, 6, 2, 2), torch.randn(5, 6, 2, 2)

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager', dynamic=True)
    for given in (maps, other):
        layer.zero_grad()
        layer(given).square().sum().backward()
        expected = layer.alpha.grad
        layer.zero_grad()
        out = compiled(given)
        out.square().sum().backward()
        torch.testing.assert_close(out, layer(given))
        torch.testing.assert_close(layer.alpha.grad, expected)

    exported = torch.export.export(layer, (maps,), dynamic_shapes=({0: torch.export.Dim('batch')},))
    ours = [node for node in exported.graph.nodes if 'rotp_vision' in str(node.target)]
    assert len(ours) == 1
    torch.testing.assert_close(exported.module()(other), layer(other))
    plain = exported.run_decompositions(decompositions())
    assert not [node for node in plain.graph.nodes if 'rotp_vision' in str(node.target)]
    torch.testing.assert_close(plain.module()(other), layer(other))

    scripted = torch.jit.script(layer)
    out = scripted(maps)
    torch.testing.assert_close(out, layer(maps))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), list(scripted.parameters())))
    torch.testing.assert_close(torch.jit.trace(layer, maps)(other), layer(other))
    torch.testing.assert_close(torch.vmap(layer)(torch.stack([maps, maps + 1]))[1], layer(maps + 1))
    assert copy.deepcopy(layer).to('meta')(maps.to('meta')).shape == (3, 6)


@every_operator
def test_autocast_changes_nothing(operator):
    layer, maps = Pool(operator), torch.randn(3, 6, 2, 2)
    expected = layer(maps)
    with torch.autocast('cpu', torch.bfloat16):
        out = layer(maps)
        (grad,) = torch.autograd.grad(out.sum(), layer.alpha)
    assert torch.equal(out, expected)
    assert torch.equal(grad, torch.autograd.grad(expected.sum(), layer.alpha)[0])


@pytest.mark.parametrize('structure', [False, True])
@pytest.mark.parametrize('proximal', [False, True])
@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('spread', [1.0, 1e3])
def test_implicit_gradients_are_those_of_a_converged_sinkhorn(structure, proximal, masked, spread, monkeypatch):
    """At the fixed point unrolling gives the same, with exponentials shared or not (the spread)."""
    monkeypatch.setitem(scratch_module.CHUNK_ELEMENTS, 'cpu', 8 * 6)
    operator = Solver('sinkhorn', num_inner=200), structure, proximal
    mask = torch.arange(6) < torch.tensor([[1], [4], [6]]) if masked else None
    tensors = leaves(operator, 3, 8, 6, num_modules=2)
    tensors['x'] = (spread * tensors['x'].detach()).requires_grad_()
    expected = results(operator, tensors, 'torch', mask)
    got = results((operator[0]._replace(implicit=True), structure, proximal), tensors, 'torch', mask)
    for name, value in expected.items():
        size = value.abs().max().clamp_min(1e-2)
        assert ((got[name] - value).abs().max() / size).item() < 1e-9, name


def test_implicit_gradients_are_for_sinkhorn():
    operator = Solver('badmm-e', implicit=True), False, False
    with pytest.raises(ValueError, match='implicit is for sinkhorn'):
        results(operator, leaves(operator, 1, 6, 5), 'torch')
    with pytest.raises(ValueError, match="implicit is an option of solver 'sinkhorn'"):
        PoolOptions('badmm-q', implicit=True)


def test_backend_is_checked():
    operator = OPERATORS['sinkhorn']
    tensors = leaves(operator, 1, 3, 2)
    with pytest.raises(ValueError, match="backend must be one of auto, torch, triton, reference, got 'cuda'"):
        pooled(operator, tensors, 'cuda')
