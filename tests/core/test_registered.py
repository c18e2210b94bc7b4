"""Solvers of a user's own: the same numbers, gradients and graphs as the formula itself, with little memory."""

import copy

import pytest
import torch

from rotp_vision.core import SOLVERS, Solver, pool, register_solver, registered, rot_pool, rot_problem, solve
from rotp_vision.layers import GlobalROTPool2d, LocalROTPool2d, PoolOptions, ROTSetPool, pool_options


@pytest.fixture(autouse=True)
def formulas(monkeypatch):
    """Two solvers that are known in a test alone: softmax with a temperature, and steps of it towards the priors."""
    monkeypatch.setattr(registered, 'SOLVERS', SOLVERS)
    before = dict(SOLVERS)

    def softmax(problem, weights):
        return problem.seen() / weights.temperature

    def steps(problem, weights):
        log_plan = problem.log_feature_prior.unsqueeze(2) + problem.log_sample_prior.unsqueeze(1)
        for smoothness, pull in zip(weights.smoothness, weights.pull, strict=True):
            log_plan = log_plan + problem.seen() / smoothness
            log_plan = log_plan - pull / (1 + pull) * log_plan.logsumexp(1, keepdim=True)
        return log_plan

    register_solver('softmax', softmax, {'temperature': 50.0})
    register_solver('steps', steps, {'smoothness': 2.0, 'pull': 0.5}, num_modules=3)
    yield
    SOLVERS.clear()
    SOLVERS.update(before)


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_softmax_is_what_one_module_of_badmm_is():
    x = random(3, 5, 4, 4)
    ours = GlobalROTPool2d({'solver': 'softmax', 'weights': {'temperature': 0.7}}).double()
    known = GlobalROTPool2d({'solver': 'badmm-e', 'num_modules': 1, 'step': 0.7}).double()
    torch.testing.assert_close(ours(x), known(x), rtol=1e-6, atol=1e-6)  # starting values are float32
    torch.testing.assert_close(ours.plan(x).sum((1, 2, 3)), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize('view', ['identity', 'rms', 'log'])
@pytest.mark.parametrize('masked', [False, True])
def test_chunks_give_the_formula_and_its_gradients(view, masked, monkeypatch):
    """Values and gradients of features, priors and weights, with a batch that does not divide into chunks."""
    x = random(5, 4, 6).requires_grad_()
    prior = random(1, 6).requires_grad_()
    mask = torch.arange(6) < torch.tensor([[6], [1], [4], [2], [6]]) if masked else None
    layer = ROTSetPool({'solver': 'steps', 'view': view}).double()
    inputs = [x, prior, *layer.parameters()]

    def by_formula():
        problem = rot_problem(x, log_sample_prior=prior, mask=mask, view=view)
        return pool(problem.features, solve(problem, layer.weights(), Solver('steps'))) * layer.gain()

    expected = torch.autograd.grad(by_formula().square().sum(), inputs)
    assert all(grad.abs().max() > 1e-6 for grad in expected)
    monkeypatch.setitem(registered.CHUNK_ELEMENTS, 'cpu', 2 * 4 * 6)
    for backend in ('auto', 'reference'):
        layer.solver = layer.solver._replace(backend=backend)
        pooled = layer.pool_sets(x, mask, prior)
        torch.testing.assert_close(pooled, by_formula())
        for got, known in zip(torch.autograd.grad(pooled.square().sum(), inputs), expected, strict=True):
            torch.testing.assert_close(got, known)
    with torch.no_grad():
        torch.testing.assert_close(layer.pool_sets(x, mask, prior), pooled)


def test_gradcheck():
    weights = SOLVERS['steps'].weights_type

    def pooled(x, smoothness, pull):
        return rot_pool(rot_problem(x, view='rms'), weights(smoothness, pull), Solver('steps'))

    values = random(2, 3, 4), torch.tensor([0.7, 0.9]).double(), torch.tensor([0.5, 0.3]).double()
    inputs = tuple(value.requires_grad_() for value in values)
    assert torch.autograd.gradcheck(pooled, inputs)
    assert torch.autograd.gradgradcheck(pooled, inputs)


def test_backward_keeps_the_inputs_alone(monkeypatch):
    """Memory at the end of forward: the formula under autograd keeps several plans, the layer none."""
    monkeypatch.setitem(registered.CHUNK_ELEMENTS, 'cpu', 64 * 49)
    x = random(64, 64, 49, dtype=torch.float32).requires_grad_()
    layer = ROTSetPool({'solver': 'steps'})
    saved = []

    def count(tensor):
        saved.append(tensor.numel())
        return tensor

    for backend, most in (('auto', 1.1), ('reference', 100.0)):
        layer.solver = layer.solver._replace(backend=backend)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            layer.pool_sets(x)
        assert sum(saved) <= most * x.numel()
    assert sum(saved) > 5 * x.numel()  # what it would be


@pytest.mark.parametrize('solver', ['softmax', 'steps'])
def test_graphs(solver):
    layer, maps, other = GlobalROTPool2d(solver), torch.randn(3, 6, 2, 2), torch.randn(5, 6, 2, 2)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager', dynamic=True)
    compiled(maps).square().sum().backward()
    got = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    layer(maps).square().sum().backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in layer.parameters()])
    exported = torch.export.export(layer, (maps,), dynamic_shapes=({0: torch.export.Dim('batch')},))
    assert not [node for node in exported.graph.nodes if 'rotp_vision' in str(node.target)]
    torch.testing.assert_close(exported.module()(other), layer(other))
    torch.testing.assert_close(torch.jit.trace(layer, maps)(other), layer(other))
    torch.testing.assert_close(torch.fx.symbolic_trace(torch.nn.Sequential(layer))(other), layer(other))
    torch.testing.assert_close(torch.vmap(layer)(torch.stack([maps, maps + 1]))[1], layer(maps + 1))
    grad = torch.func.grad(lambda x: layer(x).sum())(maps)
    torch.testing.assert_close(grad, torch.autograd.grad(layer(maps.requires_grad_()).sum(), maps)[0])
    assert copy.deepcopy(layer).to('meta')(maps.detach().to('meta')).shape == (3, 6)


def test_autocast_and_half_precision():
    layer, x = GlobalROTPool2d('steps'), random(2, 6, 3, 3, dtype=torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(layer(x), layer(x).float())
    assert torch.equal(layer(x), layer(x))
    half = copy.deepcopy(layer).half()(x.half())
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), layer(x.half().float()), rtol=1e-2, atol=1e-2)


def test_local_windows():
    x = random(2, 5, 6, 6)
    layer = LocalROTPool2d('softmax', kernel_size=2).double()
    windows = x.unfold(2, 2, 2).unfold(3, 2, 2)  # (2, 5, 3, 3, 2, 2)
    expected = (windows * layer.plan(x)).sum((4, 5)) / layer.plan(x).sum((4, 5))
    torch.testing.assert_close(layer(x), expected)


def test_options():
    options = PoolOptions('steps', num_modules=2, smoothness=[1.0, 3.0], weights={'pull': 0.25}, view='log')
    assert options.starting_weights() == {'smoothness': [1.0, 3.0], 'pull': 0.25}
    assert PoolOptions('steps').modules == 3
    assert pool_options(options.to_dict()) == options
    layer = GlobalROTPool2d(options)
    assert {name: value.tolist() for name, value in layer.named_weights().items()} == {
        'smoothness': [1.0, 3.0],
        'pull': [0.25, 0.25],
        'gain': 1.0,
    }
    layer.set_weights(pull=2.0)
    assert layer.named_weights()['pull'].tolist() == [2.0, 2.0]
    assert len(list(GlobalROTPool2d({'solver': 'steps', 'learn': 'fixed', 'gain': 'off'}).parameters())) == 0
    assert [p.numel() for p in GlobalROTPool2d({'solver': 'steps', 'learn': 'shared'}).parameters()] == [1, 1, 1]


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        ({'solver': 'stepz'}, r"solver must be one of .*, got 'stepz'.*register_solver"),
        ({'solver': 'steps', 'weights': {'pul': 1.0}}, "'steps' has pull there, got pul"),
        ({'solver': 'steps', 'weights': {'smoothness': 1.0}}, 'got smoothness'),
        ({'solver': 'sinkhorn', 'weights': {'pull': 1.0}}, "'sinkhorn' has none there"),
        ({'solver': 'steps', 'weights': {'pull': -1.0}}, 'pull must be positive'),
        ({'solver': 'steps', 'weights': {'pull': [1.0, 2.0]}}, 'pull must be one number, or a list of 3'),
        ({'solver': 'steps', 'start': 'paper'}, 'starts where it was registered'),
        ({'solver': 'steps', 'step': 1.0}, 'step has no effect'),
        ({'solver': 'steps', 'num_inner': 2}, 'num_inner has no effect'),
        ({'solver': 'steps', 'structure': 2.0}, 'structure has no effect'),
        ({'solver': 'steps', 'coupled': True}, 'coupled is an option of'),
    ],
)
def test_bad_options(given, message):
    with pytest.raises(ValueError, match=message):
        pool_options(given)


@pytest.mark.parametrize(
    ('name', 'weights', 'message'),
    [
        ('sinkhorn', {}, 'no solver of this package has'),
        ('paper', {}, 'no solver of this package has'),
        ('mine', {'a b': 1.0}, 'name of its own'),
        ('mine', {'gain': 1.0}, 'name of its own'),
        ('mine', {'forward': 1.0}, 'name of its own'),
        ('mine', {'pull': 0.0}, 'pull must be a positive number'),
        ('mine', {'pull': 'one'}, 'pull must be a positive number'),
    ],
)
def test_bad_registrations(name, weights, message):
    with pytest.raises(ValueError, match=message):
        register_solver(name, lambda problem, weights: problem.seen(), weights)
    assert 'mine' not in SOLVERS


def test_a_plan_of_another_shape_is_an_error():
    register_solver('wrong', lambda problem, weights: problem.seen().sum(1), {})
    with pytest.raises(ValueError, match=r"solver 'wrong' must return a log plan of shape \(2, 3, 4\), got \(2, 4\)"):
        ROTSetPool('wrong').pool_sets(torch.rand(2, 3, 4))
    with pytest.raises(ValueError, match="backend 'triton' has no kernel of solver 'softmax'"):
        GlobalROTPool2d({'solver': 'softmax', 'backend': 'triton'})(torch.rand(2, 3, 4, 4))
