"""The Triton kernels for windows against windows cut out and pooled by the torch operators, on CPU by the interpreter.

Not collected by itself: `test_windows` runs this file in a process of its own. By hand:
`TRITON_INTERPRET=1 pytest tests/core/triton/windows_interpreted.py`.
"""

import pytest
import torch
from torch import Tensor

from rotp_vision.core import Solver, Windows
from rotp_vision.core import triton as triton_room
from rotp_vision.core.triton import local_badmm, local_sinkhorn, windows  # noqa: F401 - define their operators
from rotp_vision.layers import LocalROTPool2d
from tests.core.triton.sets_interpreted import assert_close

SOLVERS = {
    'badmm-e': {'solver': 'badmm-e', 'num_modules': 3, 'smoothness': (0.7, 0.5, 0.9), 'step': (0.6, 1.1, 0.8)},
    'badmm-q': {'solver': 'badmm-q', 'num_modules': 3, 'smoothness': (0.7, 0.5, 0.9), 'step': (0.6, 1.1, 0.8)},
    'sinkhorn': {'solver': 'sinkhorn', 'num_inner': 2, 'smoothness': 0.5, 'sample_penalty': 0.4},
}
every_solver = pytest.mark.parametrize('options', SOLVERS.values(), ids=SOLVERS)
STEM = {'kernel_size': 3, 'stride': 2, 'padding': 1}
SMALL = {'kernel_size': 2, 'stride': 1, 'padding': 1}  # for what does not depend on the taps: they take time


def maps(*shape: int, channels_last: bool = False) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def results(options: dict, shape: dict, x: Tensor, backend: str) -> dict[str, Tensor]:
    """The output and every gradient, by name; of the torch backend in float64."""
    dtype = x.dtype if backend == 'triton' else torch.float64
    pool = LocalROTPool2d({**options, 'backend': backend}, x.shape[1], **shape)
    pool = pool if backend == 'triton' else pool.double()
    x = x.detach().to(dtype).requires_grad_()
    out = pool(x)
    inputs = {'x': x} | dict(pool.named_parameters())
    towards = torch.linspace(-1, 2, out.numel()).view(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, list(inputs.values()), towards)
    return {'output': out.detach()} | dict(zip(inputs, grads, strict=True))


def assert_same(options: dict, shape: dict, x: Tensor) -> dict[str, Tensor]:
    got = results(options, shape, x, 'triton')
    assert_close(got, results(options, shape, x, 'torch'))
    return got


CASES = {
    'overlapping, borders': (STEM, (2, 5, 5, 6), False),
    'overlapping, channels last': (STEM, (1, 8, 4, 5), True),
    'every pixel': ({'kernel_size': 3, 'stride': 1, 'padding': 1}, (1, 3, 3, 4), True),
    'no overlap, the last pixels in no window': ({'kernel_size': 2}, (2, 3, 5, 7), False),
    'no overlap, borders, larger than the padding': (
        {'kernel_size': 2, 'stride': 3, 'padding': 1, 'ceil_mode': True}, (1, 3, 6, 7), True,
    ),
    'stride 3': ({'kernel_size': 3, 'stride': 3}, (1, 2, 7, 6), False),
    'uneven and dilated': (
        {'kernel_size': (2, 3), 'stride': (1, 2), 'padding': (0, 1), 'dilation': (2, 1)}, (1, 3, 5, 6), False,
    ),
    'same': ({'kernel_size': 3, 'stride': 2, 'same': True}, (1, 3, 6, 5), False),
}  # fmt: skip


@pytest.mark.parametrize(('shape', 'size', 'channels_last'), CASES.values(), ids=CASES)
def test_windows_everywhere(shape, size, channels_last):
    """Of the solver that takes least; where windows lie is the same for all."""
    assert_same(SOLVERS['sinkhorn'], shape, maps(*size, channels_last=channels_last))


@pytest.mark.parametrize('solver', ['badmm-e', 'badmm-q'])
@pytest.mark.parametrize('case', ['every pixel', 'no overlap, borders, larger than the padding'])
def test_bregman_admm(solver, case):
    shape, size, channels_last = CASES[case]
    assert_same(SOLVERS[solver], shape, maps(*size, channels_last=channels_last))


@every_solver
@pytest.mark.parametrize('view', ['rms', 'log'])
def test_views(options, view):
    shape = STEM if view == 'rms' else {'kernel_size': 2}
    assert_same(options | {'view': view}, shape, maps(1, 3, 4, 3))


@pytest.mark.parametrize(('solver', 'count'), [('badmm-e', 1), ('badmm-e', 5), ('badmm-q', 1), ('badmm-q', 2)])
def test_any_number_of_modules(solver, count):
    assert_same({'solver': solver, 'num_modules': count}, STEM, maps(1, 3, 4, 3))


def test_one_inner_step():
    assert_same({'solver': 'sinkhorn', 'num_inner': 1}, STEM, maps(1, 3, 4, 3))


@pytest.mark.parametrize('gain', ['scalar', 'channel', 'off'])
def test_gain_and_padding_that_counts(gain):
    options = SOLVERS['sinkhorn'] | {'gain': gain}
    assert_same(options, STEM | {'count_include_pad': True}, maps(1, 3, 4, 4))


@every_solver
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_in_and_out(options, dtype):
    """The same numbers as float32 from the rounded map, rounded once at the end."""
    shape = SMALL if dtype == torch.float16 else {'kernel_size': 2}
    x = maps(1, 3, 2, 2).to(dtype)
    got = results(options, shape, x, 'triton')
    for name, value in results(options, shape, x, 'torch').items():
        wanted = dtype if name in ('x', 'output') else torch.float32
        assert got[name].dtype == wanted
        # The gradient that comes in is rounded too, and counts for the weights.
        error = (got[name].double() - value).abs().max()
        assert error <= torch.finfo(dtype).eps * value.abs().max(), name


@pytest.mark.parametrize('channels_last', [False, True])
def test_memory_format_is_kept(channels_last):
    x = maps(2, 3, 2, 4, channels_last=channels_last)
    got = results(SOLVERS['sinkhorn'], SMALL, x, 'triton')
    assert got['x'].stride() == x.stride()
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    assert got['output'].is_contiguous(memory_format=memory_format)


def test_any_strides_without_copies():
    assert_same(SOLVERS['sinkhorn'], SMALL, maps(2, 6, 6, 3)[:, ::2, 1:-1].transpose(2, 3))


def test_neighbours_outside_a_slice_are_not_read():
    """What lies beside the map in memory is not padding: NaN there reaches nothing."""
    whole = torch.full((1, 3, 6, 6), torch.nan)
    whole[:, :, 1:-1, 1:-1] = maps(1, 3, 4, 4)
    got = assert_same(SOLVERS['sinkhorn'], STEM, whole[:, :, 1:-1, 1:-1])
    assert all(value.isfinite().all() for value in got.values())


def test_images_in_chunks(monkeypatch):
    x = maps(2, 3, 2, 3)
    expected = results(SOLVERS['sinkhorn'], SMALL, x, 'triton')
    monkeypatch.setattr(windows, 'BUFFER_ELEMENTS', 1)
    got = results(SOLVERS['sinkhorn'], SMALL, x, 'triton')
    assert all(torch.equal(value, expected[name]) for name, value in got.items())


@every_solver
def test_only_what_is_asked_for(options):
    x = maps(1, 3, 3, 2)
    expected = results(options, SMALL, x, 'triton')
    pool = LocalROTPool2d(options | {'backend': 'triton'}, **SMALL)
    towards = torch.linspace(-1, 2, expected['output'].numel()).view(expected['output'].shape)
    pool(x).backward(towards)
    assert all(torch.equal(value.grad, expected[name]) for name, value in pool.named_parameters())
    x = x.requires_grad_()
    pool.requires_grad_(False)(x).backward(towards)
    assert torch.equal(x.grad, expected['x'])


def test_expanded_gradient():
    """The gradient of a sum is one number behind all entries."""
    x = maps(1, 3, 2, 2).requires_grad_()
    got, expected = (
        torch.autograd.grad(LocalROTPool2d({'backend': backend}, **SMALL).to(dtype)(x.to(dtype)).sum(), x)[0]
        for backend, dtype in (('triton', torch.float32), ('torch', torch.float64))
    )
    assert_close({'x': got}, {'x': expected})


@pytest.mark.parametrize(
    ('options', 'shape', 'channels'),
    [({'prior': 'attention'}, STEM, 2), ({}, {'kernel_size': (1, 4)}, 2), ({}, STEM, 3)],
    ids=['attention', 'larger windows', 'more channels'],
)
def test_others_are_cut_out(options, shape, channels, monkeypatch):
    monkeypatch.setattr(triton_room, 'MAX_CHANNELS', 2)
    monkeypatch.setattr(local_sinkhorn, 'sinkhorn_pool_windows', None)
    torch.manual_seed(0)
    pool = LocalROTPool2d({'solver': 'sinkhorn', 'backend': 'triton', **options}, channels, **shape)
    x = maps(1, channels, 4, 4)
    got = pool(x)
    pool.solver = pool.solver._replace(backend='torch')
    assert_close({'output': got}, {'output': pool.double()(x.double())})


@pytest.mark.parametrize('channels', [1, 16, 17, 64, 256])
@pytest.mark.parametrize('taps', [4, 9])
@pytest.mark.parametrize('backward', [False, True])
def test_a_thread_has_no_more_than_its_registers_hold(channels, taps, backward):
    cut = windows.window_tiling(channels, taps, backward)
    assert cut.block_c >= channels
    values = taps * cut.block_w * cut.block_c / (32 * cut.num_warps)
    assert values <= (9 if backward else 18)
    assert cut.num_warps <= 8  # 255 registers each


@every_solver
def test_opcheck_and_second_derivative(options):
    """Of windows that do not overlap, which have no gather."""
    solver = Solver(options['solver'], backend='triton')
    shape = Windows(2, 2, 2, 2, 0, 0, 1, 1, 1, 2)
    name, option, modules = ('sinkhorn', 2, 1) if solver.name == 'sinkhorn' else ('badmm', solver.name == 'badmm-q', 2)
    x, coefficients = maps(1, 3, 2, 4).requires_grad_(), torch.full((4 * modules + 1,), 0.5, requires_grad=True)
    forward = getattr(torch.ops.rotp_vision, f'triton_local_{name}_pool')
    backward = getattr(torch.ops.rotp_vision, f'triton_local_{name}_pool_backward')
    given = (list(shape), 'rms', option)
    checks = ('test_schema', 'test_autograd_registration', 'test_faketensor')
    torch.library.opcheck(forward.default, (x, coefficients, *given), test_utils=checks)
    out, saved = forward(x, coefficients, *given)
    inputs = (torch.ones_like(out), x.detach(), coefficients.detach(), saved.detach(), [True, True])
    torch.library.opcheck(backward.default, (*inputs, *given), test_utils=checks)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='no second derivative'):
        grad.sum().backward()


def test_compiles_whole_for_any_size():
    torch.compiler.reset()
    pool = LocalROTPool2d(SOLVERS['sinkhorn'] | {'backend': 'triton'}, **SMALL)
    compiled = torch.compile(pool, fullgraph=True, backend='aot_eager', dynamic=True)
    for size in ((1, 3, 2, 5), (2, 3, 4, 2)):
        x = maps(*size).requires_grad_()
        out, expected = compiled(x), pool(x)
        assert torch.equal(out, expected)
        assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected)))


def test_vmap():
    pool = LocalROTPool2d(SOLVERS['sinkhorn'] | {'backend': 'triton'}, **SMALL).requires_grad_(False)
    x = maps(2, 3, 4, 4)
    torch.testing.assert_close(torch.vmap(pool)(x), pool(x))
