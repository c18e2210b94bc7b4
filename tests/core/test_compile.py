"""Compilers, exporters, traces and transforms see the formula as plain operations; torch.fx runs the operator."""

import copy
import shutil
import warnings
from pathlib import Path
from sysconfig import get_path

import pytest
import torch

from rotp_vision.core import sinkhorn
from rotp_vision.layers import GlobalROTPool2d, LocalROTPool2d, ROTSetPool
from tests.core.variants import random

LAYERS = {
    'default': lambda: GlobalROTPool2d(),
    'norm prior': lambda: GlobalROTPool2d({'prior': 'norm', 'gain': 'channel'}, 6),
    'attention': lambda: GlobalROTPool2d({'solver': 'badmm-q-coupled', 'prior': 'attention', 'start': 'paper'}, 6),
    'structure': lambda: GlobalROTPool2d({'solver': 'badmm-e', 'structure': 0.1, 'feature_scale': 'log'}),
    'outer steps': lambda: GlobalROTPool2d({'num_outer': 2, 'start': 'paper', 'feature_scale': 'raw'}),
    'local': lambda: LocalROTPool2d(kernel_size=3, stride=2, padding=1),
}
every_layer = pytest.mark.parametrize('make', LAYERS.values(), ids=LAYERS)
few_layers = pytest.mark.parametrize('make', [LAYERS['default'], LAYERS['structure']], ids=['default', 'structure'])


def maps(batch: int) -> torch.Tensor:
    return random(batch, 6, 5, 4, seed=batch, dtype=torch.float32)


def outputs_and_gradients(function, x, parameters):
    x = x.clone().requires_grad_()
    pooled = function(x)
    return [pooled, *torch.autograd.grad(pooled.square().sum(), [x, *parameters], allow_unused=True)]


def assert_close(actual, expected):
    """About 1e-6 apart, relative to the largest value."""
    for one, other in zip(actual, expected, strict=True):
        if one is not None or other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6 * max(1.0, float(other.detach().abs().max())))


@every_layer
def test_compiles_forwards_and_backwards_to_one_graph_for_every_batch(make):
    torch.compiler.reset()
    layer = make()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend='aot_eager')
    for batch, stance in ((3, 'default'), (2, 'fail_on_recompile'), (5, 'fail_on_recompile')):
        expected = outputs_and_gradients(layer, maps(batch), list(layer.parameters()))
        with torch.compiler.set_stance(stance):
            assert_close(outputs_and_gradients(compiled, maps(batch), list(layer.parameters())), expected)


def test_a_mask_is_compiled_to_one_graph_for_every_batch():
    torch.compiler.reset()
    layer = ROTSetPool()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend='aot_eager')
    for batch, stance in ((3, 'default'), (2, 'fail_on_recompile'), (4, 'fail_on_recompile')):
        x, mask = maps(batch).flatten(2).mT, torch.arange(20) < torch.arange(2, 2 + batch).unsqueeze(1)
        with torch.compiler.set_stance(stance):
            assert_close([compiled(x, mask)], [layer(x, mask)])


@pytest.mark.skipif(
    not any(map(shutil.which, ('c++', 'g++', 'clang++'))) or not Path(get_path('include'), 'Python.h').exists(),
    reason="inductor needs a C++ compiler and Python's headers",
)
def test_inductor(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path))  # what another processor left is not for this one
    torch.compiler.reset()
    layer = GlobalROTPool2d()
    actual = outputs_and_gradients(torch.compile(layer, fullgraph=True), maps(2), list(layer.parameters()))
    assert_close(actual, outputs_and_gradients(layer, maps(2), list(layer.parameters())))


@every_layer
def test_exports_plain_operators_for_any_batch(make):
    layer = make()
    exported = torch.export.export(layer, (maps(3),), dynamic_shapes=({0: torch.export.Dim('batch')},))
    graphs = [part.graph for part in exported.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    calls = [node.target for graph in graphs for node in graph.nodes if node.op == 'call_function']
    # torch.autocast(enabled=False) is a region of the graph.
    others = {str(target) for target in calls if getattr(target, 'namespace', '') not in ('', 'aten')}
    assert others <= {'wrap_with_autocast'}
    assert len(calls) > 20
    module = exported.module()
    for batch in (1, 2, 5):
        actual = outputs_and_gradients(module, maps(batch), list(module.parameters()))
        assert_close(actual, outputs_and_gradients(layer, maps(batch), list(layer.parameters())))


@few_layers
def test_an_onnx_file_runs_as_the_layer(make, tmp_path):
    onnxruntime = pytest.importorskip('onnxruntime')
    layer, path = make(), tmp_path / 'layer.onnx'
    torch.onnx.export(layer, (maps(2),), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    (out,) = session.run(None, {session.get_inputs()[0].name: maps(2).numpy()})
    assert_close([torch.from_numpy(out)], [layer(maps(2))])


@every_layer
def test_a_trace_is_of_any_batch_and_size_and_warns_of_nothing(make):
    layer = make()
    with warnings.catch_warnings():
        warnings.simplefilter('error', torch.jit.TracerWarning)
        traced = torch.jit.trace(layer, maps(3))
    for shape in ((5, 6, 5, 4), (2, 6, 9, 8), (1, 6, 2, 3)):
        x = random(*shape, dtype=torch.float32)
        assert_close([traced(x)], [layer(x)])


@few_layers
def test_transforms_of_torch_func(make):
    layer, x = make(), maps(2)

    def total(x, parameters):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    got = torch.func.grad(total, argnums=(0, 1))(x, parameters)
    assert_close([got[0], *got[1].values()], outputs_and_gradients(layer, x, list(layer.parameters()))[1:])
    assert_close([torch.vmap(layer)(torch.stack([x, x + 1]))], [torch.stack([layer(x), layer(x + 1)])])
    jacobian = torch.func.jacrev(layer)(x)
    vector = random(*x.shape, seed=7, dtype=torch.float32)
    product = torch.func.jvp(layer, (x,), (vector,))[1]
    torch.testing.assert_close(jacobian.flatten(2) @ vector.flatten(), product, rtol=1e-4, atol=1e-5)


@every_layer
def test_torch_fx_keeps_the_layer_as_one_node_and_runs_it_bit_for_bit(make, monkeypatch):
    calls, apply = [], sinkhorn._SinkhornPool.apply
    monkeypatch.setattr(sinkhorn._SinkhornPool, 'apply', lambda *inputs: calls.append(1) or apply(*inputs))
    model = torch.nn.Sequential(make())
    graph = torch.fx.symbolic_trace(model)
    assert [node.op for node in graph.graph.nodes] == ['placeholder', 'call_module', 'output']
    ran = torch.fx.Interpreter(graph).run(maps(2))
    if make is LAYERS['default']:
        assert calls
    assert torch.equal(ran, model(maps(2)))


@every_layer
def test_meta_tensors_have_the_shapes_of_the_output(make):
    layer = make()
    expected = layer(maps(3)).shape
    assert copy.deepcopy(layer).to('meta')(maps(3).to('meta')).shape == expected


def test_the_operator_runs_in_eager_mode_alone(monkeypatch):
    """So that what is compared above is the operator with the formula."""
    calls, apply = [], sinkhorn._SinkhornPool.apply
    monkeypatch.setattr(sinkhorn._SinkhornPool, 'apply', lambda *inputs: calls.append(1) or apply(*inputs))
    layer = GlobalROTPool2d()
    layer(maps(2))
    assert len(calls) == 1
    torch.jit.trace(layer, maps(2), check_trace=False)
    torch.func.grad(lambda x: layer(x).sum())(maps(2))
    torch.export.export(layer, (maps(2),))
    assert len(calls) == 1
