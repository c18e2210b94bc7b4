"""One graph under torch.compile and torch.export, forward and backward, for any batch size."""

import shutil
from pathlib import Path
from sysconfig import get_path

import pytest
import torch
from torch import nn

from rotp_vision.core import StepWeights, rot_pool, rot_problem
from tests.core.variants import VARIANTS, every_variant, random, varied_weights, with_similarity


class Pool(nn.Module):
    """Pooling with the weights as parameters."""

    def __init__(self, solver, structure):
        super().__init__()
        self.solver = solver
        # The least number with which every weight that is read has a gradient.
        weights = varied_weights(3 if solver.coupled else 2, solver, structure=structure, dtype=torch.float32)
        for name, value in weights._asdict().items():
            self.register_parameter(name, None if value is None else nn.Parameter(value.clone()))

    def forward(self, x, mask=None):
        weights = StepWeights(*(getattr(self, name) for name in StepWeights._fields))
        return rot_pool(rot_problem(x, mask=mask), weights, self.solver)


def make(solver, similarity, masked):
    def inputs(batch):
        x = random(batch, 5, 7, seed=batch, dtype=torch.float32)
        mask = torch.arange(7) < torch.arange(2, 2 + batch).unsqueeze(1)
        return (x, mask) if masked else (x,)

    return Pool(with_similarity(solver, similarity), similarity is not None), inputs


def outputs_and_gradients(function, model, inputs):
    x = inputs[0].clone().requires_grad_()
    pooled = function(x, *inputs[1:])
    return pooled, *torch.autograd.grad(pooled.square().sum(), [x, *model.parameters()])


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@every_variant
def test_compiles_to_one_graph_for_every_batch(solver):
    """With structure and mask, which is every operation a solver has."""
    torch.compiler.reset()
    model, inputs = make(solver, 'covariance', masked=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend='aot_eager')
    for batch, stance in ((3, 'default'), (2, 'fail_on_recompile'), (4, 'fail_on_recompile')):
        with torch.compiler.set_stance(stance):
            actual = outputs_and_gradients(compiled, model, inputs(batch))
        assert_same(actual, outputs_and_gradients(model, model, inputs(batch)))


@pytest.mark.skipif(
    not any(map(shutil.which, ('c++', 'g++', 'clang++'))) or not Path(get_path('include'), 'Python.h').exists(),
    reason="inductor needs a C++ compiler and Python's headers",
)
def test_inductor(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path))  # what another processor left is not for this one
    torch.compiler.reset()
    model, inputs = make(VARIANTS['badmm-e'], None, masked=False)
    compiled = torch.compile(model, fullgraph=True)
    actual = outputs_and_gradients(compiled, model, inputs(2))
    assert_same(actual, outputs_and_gradients(model, model, inputs(2)))


@every_variant
@pytest.mark.parametrize(('similarity', 'masked'), [(None, False), ('covariance', True)])
def test_exports_with_dynamic_batch(solver, similarity, masked):
    model, inputs = make(solver, similarity, masked)
    batch = {0: torch.export.Dim('batch')}
    exported = torch.export.export(model, inputs(3), dynamic_shapes=(batch,) * len(inputs(3))).module()
    for size in (1, 2, 5):
        actual = outputs_and_gradients(exported, exported, inputs(size))
        assert_same(actual, outputs_and_gradients(model, model, inputs(size)))
