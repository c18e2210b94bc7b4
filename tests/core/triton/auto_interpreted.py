"""What 'auto' does on a GPU, played through on CPU: the interpreter runs the kernels, and `on_gpu` says yes.

Not collected by itself: `test_auto` runs this file in a process of its own.
"""

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rotp_vision.core import solver as solver_module
from rotp_vision.core.triton import check, tiles
from rotp_vision.layers import GlobalROTPool2d, LocalROTPool2d

OPTIONS = {'solver': 'sinkhorn', 'num_inner': 1}
STEM = {'kernel_size': 2, 'stride': 1, 'padding': 1}


@pytest.fixture(autouse=True)
def a_gpu_that_is_new(monkeypatch):
    monkeypatch.setattr(solver_module, 'on_gpu', lambda features: True)
    monkeypatch.setattr(check, '_verdicts', {})


def launches_of(function, *inputs) -> tuple[torch.Tensor, list[str]]:
    """What it returns, and the kernels that ran in this thread, which a check does not."""
    names = []
    launch = tiles.launch

    def watched(kernel, *rest, **constants):
        if check.threading.current_thread() is check.threading.main_thread():
            names.append(kernel.__name__)
        launch(kernel, *rest, **constants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, 'launch', watched)
        return function(*inputs), names


@pytest.mark.parametrize(
    ('solver', 'view', 'dtype'),
    [('badmm-e', 'rms', torch.float32), ('badmm-q', 'log', torch.bfloat16), ('sinkhorn', 'identity', torch.float16)],
)
def test_kernels_run_once_they_are_checked(solver, view, dtype, monkeypatch):
    x = torch.randn(2, 5, 2, 3).to(dtype)
    pool = GlobalROTPool2d({'solver': solver, 'view': view, 'num_modules': 1 + ('badmm' in solver)})
    before = torch.get_rng_state()
    out, names = launches_of(pool, x)
    assert f'{solver.split("-")[0]}_forward' in names
    assert 'softplus_forward' in names
    assert torch.equal(torch.get_rng_state(), before)  # whose random numbers these are not
    assert {verdict for verdicts in check._verdicts.values() for verdict in verdicts.values()} == {True}
    assert {configuration.kind for configuration in check._verdicts} == {'sets', 'softplus'}
    pool.solver = pool.solver._replace(backend='torch')
    torch.testing.assert_close(out, pool(x))
    pool.solver = pool.solver._replace(backend='auto')
    monkeypatch.setattr(check, '_passes', None)  # no second check, of another batch size neither
    pool(x[:1])


@pytest.mark.parametrize('view', ['identity', 'rms'])
def test_windows_are_checked_too(view):
    pool = LocalROTPool2d(OPTIONS | {'view': view}, **STEM)
    x = torch.randn(1, 3, 2, 2)
    out, names = launches_of(pool, x)
    assert 'local_sinkhorn_forward' in names
    assert {configuration.kind for configuration in check._verdicts} == {'windows', 'softplus'}
    pool.solver = pool.solver._replace(backend='torch')
    torch.testing.assert_close(out, pool(x))


def test_larger_windows_are_cut_out_for_the_kernels_of_sets():
    x = torch.randn(1, 3, 4, 4)
    pool = LocalROTPool2d(OPTIONS, kernel_size=4)
    out, names = launches_of(pool, x)
    assert 'sinkhorn_forward' in names
    pool.solver = pool.solver._replace(backend='torch')
    torch.testing.assert_close(out, pool(x))


def test_disagreement_warns_once_and_torch_runs(monkeypatch):
    monkeypatch.setattr(check, 'AGREEMENT', -1.0)
    pool, x = GlobalROTPool2d(OPTIONS), torch.randn(2, 3, 2, 2)
    with pytest.warns(
        UserWarning, match=r"disagree with the torch operators in 'output'.*rotp-vision bench --device cpu:0"
    ):
        out, names = launches_of(pool, x)
    assert names == ['softplus_forward']
    pool.solver = pool.solver._replace(backend='torch')
    assert torch.equal(out, pool(x))
    pool.solver = pool.solver._replace(backend='auto')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert launches_of(pool, x)[1] == ['softplus_forward']


def test_a_kernel_that_does_not_compile_warns_and_torch_runs(monkeypatch):
    def broken(*arguments, **constants):
        raise RuntimeError('ptxas fatal')

    monkeypatch.setattr(tiles, 'launch', broken)
    pool, x = GlobalROTPool2d(OPTIONS), torch.randn(2, 3, 2, 2)
    with pytest.warns(UserWarning, match='fail with RuntimeError: ptxas fatal') as caught:
        pool(x)
    assert len(caught) == 2  # of sets, and of softplus
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        pool(x)


@pytest.mark.parametrize('around', ['checkpoint', 'inference', 'autocast', 'no_grad'])
def test_a_check_does_not_mind_what_it_happens_in(around):
    pool, x = GlobalROTPool2d(OPTIONS), torch.randn(1, 3, 2, 2, requires_grad=True)
    if around == 'checkpoint':
        out, _ = launches_of(lambda y: checkpoint(pool, y, use_reentrant=False), x)
        out.sum().backward()
        assert x.grad is not None
    else:
        modes = {'inference': torch.inference_mode, 'no_grad': torch.no_grad}
        mode = torch.autocast('cpu', torch.bfloat16) if around == 'autocast' else modes[around]()
        with mode:
            launches_of(pool, x)
    assert {verdict for verdicts in check._verdicts.values() for verdict in verdicts.values()} == {True}


def test_nothing_is_checked_in_a_transform():
    pool, x = GlobalROTPool2d(OPTIONS).requires_grad_(False), torch.randn(2, 1, 3, 2, 2)
    assert torch.vmap(pool)(x).shape == (2, 1, 3)
    assert not check._verdicts


@pytest.mark.parametrize('dynamic', [False, True])
def test_a_compiler_gets_the_formula_or_kernels_that_are_known(dynamic):
    pool, x = GlobalROTPool2d(OPTIONS), torch.randn(2, 3, 2, 2)
    torch.compiler.reset()
    graphs = []

    def compiler(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == 'call_function'])
        return module

    compiled = torch.compile(pool, fullgraph=True, backend=compiler, dynamic=dynamic)
    compiled(x)
    assert not check._verdicts
    assert not any('rotp_vision' in target for target in graphs[0])
    expected = pool(x)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(pool, fullgraph=True, backend=compiler, dynamic=dynamic)(x), expected)
    assert [target for target in graphs[1] if 'rotp_vision' in target] == [
        'rotp_vision.triton_sinkhorn_coefficients', 'rotp_vision.triton_sinkhorn_pool',
    ]  # fmt: skip
    assert len(graphs) == 2
