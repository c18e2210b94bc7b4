"""Operators as torch sees them: chunks, dtypes, memory, compilers and exporters."""

import copy

import pytest
import torch
from torch import Tensor, nn

from rotp_vision.core import StepWeights, explicit_pool, rot_problem
from rotp_vision.core.explicit import scratch as scratch_module
from tests.core.explicit.operators import OPERATORS, every_operator, every_view, leaves, pooled, results


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
    options = (2,) if name == 'sinkhorn_pool' else (quadratic,)
    rows = {'sinkhorn_pool': 6, 'coupled_badmm_pool': 27, 'badmm_pool': 9}[name]
    x, log_p0, log_q0 = torch.randn(2, 6, 5), torch.randn(2, 6).log_softmax(1), torch.randn(2, 5).log_softmax(1)
    inputs = (x, log_p0, log_q0, torch.rand(rows, 2) + 0.5)
    differentiable = tuple(value.requires_grad_() for value in inputs)
    options = (view, similarity, *options)
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
        return explicit_pool(problem, weights, self.name, self.coupled, self.num_inner, self.similarity)


@every_operator
@every_view
def test_graphs(operator, view):
    """Compiled, exported, traced, scripted, mapped, on the meta device: the same numbers."""
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


def test_backend_is_checked():
    operator = OPERATORS['sinkhorn']
    tensors = leaves(operator, 1, 3, 2)
    with pytest.raises(ValueError, match="backend must be one of auto, torch, triton, reference, got 'cuda'"):
        pooled(operator, tensors, 'cuda')
