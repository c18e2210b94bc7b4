"""The operator of Sinkhorn without outer steps and structure: the formula's numbers and gradients, in little memory."""

import math

import pytest
import torch
from torch import Tensor

from rotp_vision.core import chunks, make_solver, rot_pool, rot_problem
from rotp_vision.core import sinkhorn as sinkhorn_module
from rotp_vision.layers import GlobalROTPool2d, PoolOptions
from tests.core.variants import constant, random
from tests.memory import most_memory

SOLVER = make_solver('sinkhorn')
WEIGHTS = ('smoothness', 'feature_penalty', 'sample_penalty')
both_scales = pytest.mark.parametrize('feature_scale', ['raw', 'rms'])


@pytest.fixture(params=[True, False], ids=['reads', 'blind'])
def reads(request, monkeypatch):
    """Whether the operator may look at values, which it must not on a GPU."""
    if not request.param:
        never_read(monkeypatch)
    return request.param


def never_read(monkeypatch):
    monkeypatch.setattr(sinkhorn_module, 'reads_values', lambda x: False)


@pytest.fixture
def runs(monkeypatch):
    """How often the operator has run."""
    calls, apply = [], sinkhorn_module._SinkhornPool.apply

    def counted(*inputs):
        calls.append(1)
        return apply(*inputs)

    monkeypatch.setattr(sinkhorn_module._SinkhornPool, 'apply', counted)
    return calls


def results(inputs: dict[str, Tensor], *, mask=None, feature_scale='rms', backend='auto', solver=SOLVER):
    """The pooled features and the gradient of every input, by name."""
    inputs = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    priors = [inputs.get(name) for name in ('log_p0', 'log_q0')]
    problem = rot_problem(inputs['x'], *priors, mask, feature_scale, inputs.get('power'))
    pooled = rot_pool(problem, {name: inputs[name] for name in WEIGHTS}, solver, backend=backend)
    towards = random(*pooled.shape, seed=9).to(pooled.dtype)
    grads = torch.autograd.grad(pooled, list(inputs.values()), towards)
    return {'pooled': pooled.detach()} | dict(zip(inputs, grads, strict=True))


def error(got: Tensor, exact: Tensor, size: float | None = None) -> float:
    """The largest error, relative to `size` or else to the largest value; infinite if it is not a number."""
    size = float(exact.abs().max()) if size is None else size
    return float((got.double() - exact).abs().max().nan_to_num(math.inf)) / max(size, 1e-300)


def weights_of(temperature: float, ratio: float, feature_penalty: float = 1.0) -> dict[str, Tensor]:
    return constant(
        torch.float32,
        smoothness=temperature,
        feature_penalty=feature_penalty,
        sample_penalty=temperature * ratio,
    )


def double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in inputs.items()}


# The formula, in float64

MASK = torch.arange(7) < torch.tensor([[7], [1], [4]])
PRIORS = {'log_p0': random(3, 5, seed=1), 'log_q0': random(3, 7, seed=2)}
PRIORS['log_p0'][1, 2] = PRIORS['log_q0'][0, 3] = -torch.inf
GIVEN = {
    'nothing': {},
    'priors': PRIORS,
    'shared priors': {name: value[:1] for name, value in PRIORS.items()},
    'a prior of features alone': {'log_p0': PRIORS['log_p0']},
    'the norm': {'power': torch.tensor([1.5], dtype=torch.float64)},
    'priors and the norm': PRIORS | {'power': torch.tensor([-0.7], dtype=torch.float64)},
}


@both_scales
@pytest.mark.parametrize('given', GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize('mask', [None, MASK], ids=['', 'masked'])
@pytest.mark.parametrize('temperature', [50.0, 0.2])
def test_equals_the_formula_in_any_chunks_and_strides(
    feature_scale, given, mask, temperature, reads, monkeypatch, runs
):
    """Warm, where T allows it, and cold; not a number behind the mask."""
    x = random(3, 5, 7)
    if mask is not None:
        x = x.masked_fill(~mask.unsqueeze(1), torch.nan)
    inputs = {'x': x, **given, **double(weights_of(temperature, 3.0))}
    expected = results(inputs, mask=mask, feature_scale=feature_scale, backend='reference')
    for num_sets, strided in ((3, x), (2, x), (1, x.mT.contiguous().mT)):
        monkeypatch.setitem(chunks.ENTRIES, 'operator', (num_sets * 5 * 7, num_sets * 5 * 7))
        got = results(inputs | {'x': strided}, mask=mask, feature_scale=feature_scale)
        for name, value in expected.items():
            assert error(got[name], value) < 1e-9, name
        if mask is not None:
            assert (got['x'][~mask.unsqueeze(1).expand_as(x)] == 0).all()
    # On a GPU raw maps and priors of any size take the formula.
    assert len(runs) == (3 if reads or (feature_scale == 'rms' and not {'log_p0', 'log_q0'} & set(given)) else 0)


@pytest.mark.parametrize('num_iters', [1, 2, 7])
def test_equals_the_formula_after_any_number_of_iterations(num_iters):
    solver, inputs = (
        make_solver('sinkhorn', num_iters=num_iters),
        {'x': random(2, 5, 7), **double(weights_of(0.2, 3.0))},
    )
    expected = results(inputs, solver=solver, backend='reference')
    for name, got in results(inputs, solver=solver).items():
        assert error(got, expected[name]) < 1e-9, name


@both_scales
@pytest.mark.parametrize('mask', [None, MASK[:2, :4]], ids=['', 'masked'])
def test_gradients_equal_differences(feature_scale, mask, reads):
    def pooled(x, log_p0, log_q0, power, *values):
        problem = rot_problem(x, log_p0, log_q0, mask, feature_scale, power)
        return rot_pool(problem, dict(zip(WEIGHTS, values, strict=True)), SOLVER)

    for temperature in (20.0, 0.2):
        inputs = [random(2, 3, 4), PRIORS['log_p0'][:2, :3], random(2, 4), GIVEN['the norm']['power']]
        inputs += double(weights_of(temperature, 3.0)).values()
        assert torch.autograd.gradcheck(pooled, [value.detach().requires_grad_() for value in inputs])


@pytest.mark.parametrize('frozen', [{'x'}, {'log_p0', 'log_q0', 'power', *WEIGHTS}])
def test_inputs_that_are_frozen_change_no_other_gradient(frozen):
    inputs = {'x': random(3, 5, 7), **GIVEN['priors and the norm'], **double(weights_of(0.2, 3.0))}
    expected = results(inputs)
    used = {name: value.detach().requires_grad_(name not in frozen) for name, value in inputs.items()}
    problem = rot_problem(used['x'], used['log_p0'], used['log_q0'], None, 'rms', used['power'])
    pooled = rot_pool(problem, {name: used[name] for name in WEIGHTS}, SOLVER)
    free = [name for name in used if name not in frozen]
    grads = torch.autograd.grad(pooled, [used[name] for name in free], random(3, 5, seed=9))
    for name, grad in zip(free, grads, strict=True):
        assert torch.equal(grad, expected[name]), name


# Rounding, in float32


def features(kind: str) -> Tensor:
    """Maps as a rectifier leaves them, of channels of different sizes."""
    x = (random(4, 128, 49, seed=3) * 1.5 - 0.5).relu() * random(4, 128, 1, seed=4).abs() * 3
    if kind == 'ten dead positions':
        x[:, :, 5:15] = 0
    return {'+100': x + 100, '× 1e4': x * 1e4}.get(kind, x).float()


def assert_as_accurate_as_the_formula(inputs, feature_scale='rms', mask=None):
    """Errors against the formula in float64 at most twice those of the formula in float32, or 2e-6.

    Of the pooled features and their gradients relative to the largest value. Of the sum of which a weight's gradient
    consists little may be left; it is a relative change of all s x, hence times the weight and relative to Σ |∂x x|.
    """
    exact = double(inputs)
    expected = results(exact, mask=mask, feature_scale=feature_scale, backend='reference')
    plain = results(inputs, mask=mask, feature_scale=feature_scale, backend='reference')
    got = results(inputs, mask=mask, feature_scale=feature_scale)
    total = float((expected['x'] * exact['x']).nan_to_num(0.0).abs().sum())  # not a number where masked
    sizes = {name: total / float(exact[name]) for name in exact if name in (*WEIGHTS, 'power')}
    wrong = {}
    for name, value in expected.items():
        ours, its = (error(found[name], value, sizes.get(name)) for found in (got, plain))
        if not ours <= max(2 * its, 2e-6):
            wrong[name] = f'{ours:.1e}, the formula {its:.1e}'
    assert not wrong


TEMPERATURES = (50.0, 2.0, 0.05, 0.003)


@both_scales
@pytest.mark.parametrize('ratio', [3.0, 100.0, 1000.0])
@pytest.mark.parametrize('temperature', [*TEMPERATURES, 0.6])  # which is next to where the start turns cold
@pytest.mark.parametrize('kind', ['ReLU', '+100', '× 1e4', 'ten dead positions'])
def test_float32_is_as_accurate_as_the_formula(feature_scale, temperature, ratio, kind, monkeypatch):
    inputs = {'x': features(kind), **weights_of(temperature, ratio)}
    assert_as_accurate_as_the_formula(inputs, feature_scale)
    if feature_scale == 'rms':  # on a GPU a raw map takes the formula
        never_read(monkeypatch)
        assert_as_accurate_as_the_formula(inputs)


MASK_49 = torch.arange(49) % torch.tensor([[2], [5], [9], [50]]) > 0
OUT = torch.zeros(1, 49).masked_fill(torch.arange(49) < 7, -torch.inf)  # leaves out the first row of a map
CONDITIONS = {
    'a mask': {},
    'priors': {'log_p0': random(4, 128, seed=5).float(), 'log_q0': random(4, 49, seed=6).float()},
    'a prior of -inf': {'log_q0': OUT},
    'a prior of -100': {'log_q0': OUT.clamp_min(-100.0)},
    'a feature prior of -inf': {'log_p0': torch.zeros(1, 128).masked_fill(torch.arange(128) < 9, -torch.inf)},
    'the norm': {'power': torch.tensor([2.0])},
    'bfloat16': {},
}


@both_scales
@pytest.mark.parametrize('temperature', TEMPERATURES)
@pytest.mark.parametrize('condition', CONDITIONS)
def test_float32_is_as_accurate_as_the_formula_with(feature_scale, temperature, condition, reads):
    x = features('ReLU')
    mask = MASK_49 if condition == 'a mask' else None
    if mask is not None:
        x = x.masked_fill(~mask.unsqueeze(1), torch.nan)
    if condition == 'bfloat16':
        x = x.bfloat16().float()
    inputs = {'x': x, **CONDITIONS[condition], **weights_of(temperature, 100.0)}
    assert_as_accurate_as_the_formula(inputs, feature_scale, mask)


def test_sums_that_are_next_to_underflow_are_as_accurate_as_the_formula():
    """Raw features of one set, of sizes among which some sums are about 1e-38: what is divided by them may overflow."""
    for seed in range(75, 135):
        x = random(1, 8, 9, seed=seed).abs()
        inputs = {'x': (x / x.max() * (10 + seed / 3)).float(), **weights_of(0.05, 1000.0)}
        expected = results(double(inputs), feature_scale='raw', backend='reference')
        for name, got in results(inputs, feature_scale='raw').items():
            assert got.isfinite().all(), (seed, name)
            if name in ('pooled', 'x'):
                assert error(got, expected[name]) < 1e-3, (seed, name)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype, reads):
    inputs = {'x': features('ReLU').to(dtype), **weights_of(0.05, 3.0)}
    got, wide = results(inputs), results(inputs | {'x': inputs['x'].float()})
    assert got['pooled'].dtype == got['x'].dtype == dtype
    assert torch.equal(got['pooled'], wide['pooled'].to(dtype))
    for name in WEIGHTS:
        assert got[name].dtype == torch.float32
    # Only the incoming gradient is rounded before it is used.
    assert error(got['x'], wide['x'].double()) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize('size', [1e-20, 1e-3, 1e15, 1e30])
def test_features_of_any_size_give_the_same_plan(size, reads):
    """The root mean square is taken without squares that over- or underflow; far below its floor the plan is flat."""
    x = features('ReLU')
    got = results({'x': x * size, **weights_of(2.0, 3.0)})
    expected = results({'x': x.double() * size, **double(weights_of(2.0, 3.0))}, backend='reference')
    for name in ('pooled', 'x'):
        assert error(got[name], expected[name]) < 2e-6, name
    assert all(value.isfinite().all() for value in got.values())


# Modes of torch


@pytest.mark.parametrize('temperature', [50.0, 0.05])
def test_reduced_precision_of_matrix_products_is_not_felt(temperature, reads):
    inputs = {'x': features('ReLU'), **weights_of(temperature, 3.0)}
    before = torch.get_float32_matmul_precision()
    assert before == 'highest'
    try:
        for precision in ('high', 'medium'):
            torch.set_float32_matmul_precision(precision)
            assert_as_accurate_as_the_formula(inputs)
    finally:
        torch.set_float32_matmul_precision(before)


def test_deterministic_algorithms_give_the_same_bits():
    inputs = {'x': features('ReLU'), **GIVEN['the norm'], **weights_of(0.05, 3.0)}
    inputs['power'] = inputs['power'].float()
    expected = results(inputs)
    try:
        torch.use_deterministic_algorithms(True)
        got = results(inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_autocast_changes_neither_the_result_nor_gradients_that_are_taken_within(reads):
    inputs = {'x': features('ReLU'), **CONDITIONS['priors'], **weights_of(0.05, 3.0)}
    expected = results(inputs)
    with torch.autocast('cpu', torch.bfloat16):
        got = results(inputs)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


# Corners and memory


def test_where_a_sum_underflows_a_cpu_takes_the_formula(runs):
    """Features that are hardly held to p0 and whose maximum lies where all others are small."""
    inputs = {'x': features('ten dead positions'), **weights_of(0.003, 1000.0, feature_penalty=1e-3)}
    got, expected = results(inputs), results(inputs, backend='reference')
    assert runs
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize('num_samples', [49, 196])
def test_just_above_the_start_that_is_refused_nothing_underflows(num_samples, monkeypatch):
    never_read(monkeypatch)
    least = math.sqrt(num_samples) / 20
    x = features('ten dead positions').repeat(1, 1, num_samples // 49)
    for temperature in (0.003, 0.9 * least):
        inputs = {'x': x, **weights_of(temperature, 100.0, 1.01 * least - temperature)}
        starts = {name: float(inputs[name]) for name in WEIGHTS}
        assert SOLVER.refusal(rot_problem(x, feature_scale='rms'), starts) is None
        assert_as_accurate_as_the_formula(inputs)


def test_a_start_that_may_underflow_is_refused_where_values_cannot_be_read():
    sharp = PoolOptions(smoothness=0.003, feature_penalty=0.01)
    assert GlobalROTPool2d(sharp)(torch.rand(2, 3, 7, 7)).isfinite().all()
    maps = torch.empty(2, 3, 7, 7, device='meta')
    layer = GlobalROTPool2d(sharp).to('meta')
    with pytest.raises(ValueError, match=r"on meta smoothness \+ feature_penalty .* 0\.35 .* backend='reference'"):
        layer(maps)
    for options in (
        PoolOptions(),
        PoolOptions(smoothness=0.003),
        PoolOptions(backend='reference', **{'smoothness': 0.003, 'feature_penalty': 0.01}),
    ):
        assert GlobalROTPool2d(options).to('meta')(maps).shape == (2, 3)


@both_scales
def test_an_empty_batch_pools_to_an_empty_batch(feature_scale, reads):
    got = results({'x': torch.empty(0, 5, 7), **weights_of(2.0, 3.0)}, feature_scale=feature_scale)
    assert got['pooled'].shape == (0, 5)
    assert got['x'].shape == (0, 5, 7)
    assert all(float(got[name]) == 0 for name in WEIGHTS)


def test_backward_keeps_little_more_than_the_map():
    """At 7 × 7 in float32: 1.15 times the map."""
    x, kept = torch.rand(8, 512, 49, requires_grad=True), {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rot_pool(rot_problem(x, feature_scale='rms'), weights_of(50.0, 3.0), SOLVER)
    size = x.untyped_storage().nbytes()
    assert x.untyped_storage().data_ptr() in kept
    assert sum(kept.values()) <= 1.15 * size


def test_inference_needs_less_memory_than_the_batch():
    x = torch.rand(128, 512, 49)
    with torch.no_grad():
        most = most_memory(lambda: rot_pool(rot_problem(x, feature_scale='rms'), weights_of(50.0, 3.0), SOLVER))
    assert most < x.untyped_storage().nbytes()
