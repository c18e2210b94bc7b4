"""Solvers by name, the front door, and formulas of a user's own."""

import pytest
import torch

from rotp_vision.core import (
    SOLVERS,
    BregmanADMM,
    Sinkhorn,
    average,
    chunks,
    make_solver,
    register_solver,
    rot_pool,
    rot_problem,
    solve,
)
from rotp_vision.layers import GlobalROTPool2d, LocalROTPool2d, PoolOptions, ROTSetPool, pool_options
from tests.core.variants import BADMM, PLAIN, VARIANTS, constant, every, random, varied_weights

# The average under a plan


def test_the_average_is_that_of_the_row_normalised_plan():
    """The printed formula, eq. "uotp": (X ⊙ diag⁻¹(P1) P) 1."""
    x, plan = random(2, 3, 4), random(2, 3, 4, seed=1).exp()
    for b in range(2):
        expected = (x[b] * (torch.diag(1 / plan[b].sum(1)) @ plan[b])).sum(1)
        torch.testing.assert_close(average(x, plan.log())[b], expected, rtol=1e-12, atol=1e-12)


def test_the_mass_of_a_row_does_not_matter_to_the_average():
    x, log_plan, shift = random(2, 3, 4), random(2, 3, 4, seed=1), 50 * random(2, 3, 1, seed=2)
    torch.testing.assert_close(average(x, log_plan + shift), average(x, log_plan), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_the_average_has_the_dtype_of_the_features(dtype):
    assert average(torch.ones(1, 2, 3, dtype=dtype), torch.zeros(1, 2, 3)).dtype == dtype


# The front door


@every(PLAIN)
@pytest.mark.parametrize('feature_scale', ['raw', 'rms', 'log'])
def test_pooled_features_are_the_average_of_the_features_themselves_under_the_plan(solver, feature_scale):
    problem = rot_problem(random(2, 3, 4), feature_scale=feature_scale, norm_power=torch.tensor([0.5]).double())
    weights = varied_weights(solver)
    expected = average(problem.features, solve(problem, weights, solver))
    for backend in ('auto', 'reference'):
        torch.testing.assert_close(rot_pool(problem, weights, solver, backend=backend), expected)


@pytest.mark.parametrize('gain', [torch.tensor([2.0]), torch.tensor([1.0, 2.0, 3.0])])
def test_gain_is_a_factor_in_the_dtype_of_the_features(gain):
    problem, solver = rot_problem(random(2, 3, 4, dtype=torch.float16)), VARIANTS['sinkhorn']
    weights = varied_weights(solver, torch.float32)
    for backend in ('auto', 'reference'):
        plain, scaled = (rot_pool(problem, weights, solver, given, backend=backend) for given in (None, gain))
        assert torch.equal(scaled, plain * gain.half())


@pytest.mark.parametrize('name', ['sinkhorn', 'sinkhorn covariance', 'badmm-e', 'badmm-q-coupled'])
@pytest.mark.parametrize('backend', ['auto', 'reference'])
def test_an_empty_batch_has_an_empty_result_and_gradients_of_zero(name, backend):
    solver, x = VARIANTS[name], torch.empty(0, 3, 4, dtype=torch.float64, requires_grad=True)
    weights = {key: value.requires_grad_() for key, value in varied_weights(solver).items()}
    pooled = rot_pool(rot_problem(x, feature_scale='rms'), weights, solver, backend=backend)
    assert pooled.shape == (0, 3)
    for grad in torch.autograd.grad(pooled.sum(), [x, *weights.values()], materialize_grads=True, allow_unused=True):
        assert not grad.any()


@every({name: solver for name, solver in VARIANTS.items() if name != 'sinkhorn'})
def test_chunks_keep_the_inputs_alone_and_change_nothing(solver, monkeypatch):
    """The formula under autograd keeps several plans; computed again, some images at a time, it keeps none."""
    x, weights, saved = random(8, 16, 9).requires_grad_(), varied_weights(solver), []
    weights = {name: value.requires_grad_() for name, value in weights.items()}
    monkeypatch.setitem(chunks.ENTRIES, 'formula', (3 * 16 * 9, 3 * 16 * 9))

    def count(tensor):
        saved.append(tensor.numel())
        return tensor

    found, kept = {}, {}
    for backend in ('auto', 'reference'):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            pooled = rot_pool(rot_problem(x), weights, solver, backend=backend)
            kept[backend] = sum(saved)
        found[backend] = [pooled, *torch.autograd.grad(pooled.square().sum(), [x, *weights.values()])]
    assert kept['auto'] <= 1.1 * x.numel()
    assert kept['reference'] > 5 * x.numel()
    torch.testing.assert_close(found['auto'], found['reference'])


# Solvers by name


def test_every_name_makes_a_solver_of_that_name():
    for name in ('sinkhorn', *BADMM):
        assert make_solver(name).name == name
        assert make_solver(name) == make_solver(name, num_iters=4)
    assert make_solver('badmm-q-coupled', num_iters=5) == BregmanADMM('quadratic', coupled=True, num_iters=5)
    assert make_solver('sinkhorn', structure=True).num_weight_sets == 4
    assert make_solver('sinkhorn', structure=True, num_outer=2) == Sinkhorn(num_outer=2, structure=True)


@pytest.mark.parametrize('make', [make_solver, pool_options, GlobalROTPool2d, ROTSetPool])
@pytest.mark.parametrize('name', ['sinkhron', 'badmm', 'sliced'])
def test_a_misspelt_or_unregistered_solver_raises_wherever_it_is_named(make, name):
    with pytest.raises(ValueError, match=f"solver must be one of .*badmm-e, .*, got '{name}'; register_solver"):
        make(name)


@pytest.mark.parametrize(
    ('name', 'option'),
    [('badmm-e', {'num_outer': 2}), ('sinkhorn', {'coupled': True}), ('sinkhorn', {'regularizer': 'entropic'})],
)
def test_an_option_that_a_solver_does_not_take_raises_and_is_named(name, option):
    with pytest.raises(
        ValueError, match=f"{next(iter(option))} has no effect with solver='{name}', which takes num_iters"
    ):
        make_solver(name, **option)


# Formulas of a user's own


@pytest.fixture
def formulas():
    """Two solvers that are known in a test alone: softmax with a temperature, and steps of it towards the priors."""
    before = dict(SOLVERS)

    def softmax(problem, weights):
        return problem.scaled_features() / weights['temperature']

    def steps(problem, weights):
        log_plan = problem.log_feature_prior.unsqueeze(2) + problem.log_sample_prior.unsqueeze(1)
        for smoothness, pull in zip(weights['smoothness'], weights['pull'], strict=True):
            log_plan = log_plan + problem.scaled_features() / smoothness
            log_plan = log_plan - pull / (1 + pull) * log_plan.logsumexp(1, keepdim=True)
        return log_plan

    register_solver('softmax', softmax, {'temperature': 50.0})
    register_solver('steps', steps, {'smoothness': 2.0, 'pull': 0.5}, num_iters=3)
    yield
    SOLVERS.clear()
    SOLVERS.update(before)


registered = pytest.mark.usefixtures('formulas')


@registered
def test_softmax_is_what_one_iteration_of_badmm_is():
    x = random(3, 5, 4, 4)
    ours = GlobalROTPool2d({'solver': 'softmax', 'prior': 'uniform', 'weights': {'temperature': 0.7}}).double()
    known = GlobalROTPool2d({'solver': 'badmm-e', 'prior': 'uniform', 'num_iters': 1, 'step': 0.7}).double()
    torch.testing.assert_close(ours(x), known(x), rtol=1e-6, atol=1e-6)  # starting values are float32
    torch.testing.assert_close(ours.plan(x).sum((1, 2, 3)), torch.ones(3, dtype=torch.float64))


@registered
@pytest.mark.parametrize('feature_scale', ['raw', 'rms', 'log'])
@pytest.mark.parametrize('masked', [False, True])
def test_a_registered_formula_pools_with_its_gradients_in_chunks(feature_scale, masked, monkeypatch):
    """Values and gradients of features, priors and weights, with a batch that does not divide into chunks."""
    x, prior = random(5, 4, 6).requires_grad_(), random(1, 6).requires_grad_()
    mask = torch.arange(6) < torch.tensor([[6], [1], [4], [2], [6]]) if masked else None
    layer = ROTSetPool({'solver': 'steps', 'feature_scale': feature_scale}).double()
    inputs = [x, prior, *layer.parameters()]
    problem = rot_problem(x, log_sample_prior=prior, mask=mask, feature_scale=feature_scale)
    weights = {name: weight() for name, weight in layer.weights.items()}
    expected = average(problem.features, solve(problem, weights, make_solver('steps'))) * layer.gain()
    known = torch.autograd.grad(expected.square().sum(), inputs)
    assert all(grad.abs().max() > 1e-6 for grad in known)
    monkeypatch.setitem(chunks.ENTRIES, 'formula', (2 * 4 * 6, 2 * 4 * 6))
    pooled = layer.pool_sets(x, mask, prior)
    torch.testing.assert_close(pooled, expected)
    torch.testing.assert_close(torch.autograd.grad(pooled.square().sum(), inputs), known)
    with torch.no_grad():
        torch.testing.assert_close(layer.pool_sets(x, mask, prior), pooled)


@registered
def test_a_registered_formula_has_first_and_second_derivatives():
    def pooled(x, smoothness, pull):
        weights = {'smoothness': smoothness, 'pull': pull}
        return rot_pool(rot_problem(x, feature_scale='rms'), weights, make_solver('steps', num_iters=2))

    values = random(2, 3, 4), torch.tensor([0.7, 0.9]).double(), torch.tensor([0.5]).double()
    inputs = tuple(value.requires_grad_() for value in values)
    assert torch.autograd.gradcheck(pooled, inputs)
    assert torch.autograd.gradgradcheck(pooled, inputs)


@registered
def test_a_registered_formula_pools_windows():
    x = random(2, 5, 6, 6)
    layer = LocalROTPool2d(options='softmax', kernel_size=2).double()
    windows = x.unfold(2, 2, 2).unfold(3, 2, 2)  # (2, 5, 3, 3, 2, 2)
    expected = (windows * layer.plan(x)).sum((4, 5)) / layer.plan(x).sum((4, 5))
    torch.testing.assert_close(layer(x), expected)


@registered
def test_options_and_weights_of_a_registered_solver():
    given = {'num_iters': 2, 'smoothness': [1.0, 3.0], 'weights': {'pull': 0.25}, 'prior': 'uniform'}
    options = PoolOptions('steps', **given, feature_scale='log')
    assert options.starting_weights() == {'smoothness': [1.0, 3.0], 'pull': 0.25}
    assert PoolOptions('steps').to_solver().num_weight_sets == 3
    assert pool_options(options.to_dict()) == options
    layer = GlobalROTPool2d(options)
    weights = {name: value.tolist() for name, value in layer.named_weights().items()}
    assert weights == {'smoothness': [1.0, 3.0], 'pull': [0.25, 0.25], 'gain': [1.0]}
    layer.set_weights(pull=2.0)
    assert layer.named_weights()['pull'].tolist() == [2.0, 2.0]
    assert not list(GlobalROTPool2d({'solver': 'steps', 'learn': 'fixed', 'gain': 'off'}).parameters())
    assert [p.numel() for p in ROTSetPool({'solver': 'steps', 'learn': 'shared'}).parameters()] == [1, 1, 1]


@registered
@pytest.mark.parametrize(
    ('given', 'message'),
    [
        ({'solver': 'steps', 'weights': {'pul': 1.0}}, 'pul has no effect with .*reads smoothness, pull'),
        ({'solver': 'sinkhorn', 'weights': {'pull': 1.0}}, 'pull has no effect with .*reads smoothness'),
        ({'solver': 'steps', 'weights': {'pull': -1.0}}, 'pull must be positive'),
        ({'solver': 'steps', 'weights': {'pull': [1.0, 2.0]}}, 'pull must be one number, or a list of 3'),
        ({'solver': 'steps', 'start': 'paper'}, 'starts where it was registered'),
        ({'solver': 'steps', 'step': 1.0}, 'step has no effect'),
        ({'solver': 'steps', 'num_outer': 2}, 'num_outer has no effect'),
        ({'solver': 'steps', 'structure': 2.0}, 'structure has no effect'),
    ],
)
def test_options_that_a_registered_solver_does_not_have(given, message):
    with pytest.raises(ValueError, match=message):
        pool_options(given)


@pytest.mark.parametrize(
    ('name', 'weights', 'message'),
    [
        ('sinkhorn', {}, 'not used by a built-in solver'),
        ('paper', {}, 'not used by a built-in solver'),
        ('mine', {'a b': 1.0}, 'name of its own'),
        ('mine', {'gain': 1.0}, 'name of its own'),
        ('mine', {'forward': 1.0}, 'name of its own'),
        ('mine', {'pull': 0.0}, 'pull must be a positive number'),
        ('mine', {'pull': 'one'}, 'pull must be a positive number'),
    ],
)
def test_bad_registrations(name, weights, message):
    with pytest.raises(ValueError, match=message):
        register_solver(name, lambda problem, weights: problem.scaled_features(), weights)
    assert 'mine' not in SOLVERS


@registered
@pytest.mark.parametrize(('wrong', 'got'), [(lambda x: x.sum(1), r'\(2, 4\)'), (lambda x: 3, 'int')])
def test_a_plan_of_another_shape_is_an_error(wrong, got):
    register_solver('wrong', lambda problem, weights: wrong(problem.scaled_features()), {})
    with pytest.raises(ValueError, match=rf"solver 'wrong' must return a log plan of shape \(2, 3, 4\), got {got}"):
        rot_pool(rot_problem(torch.rand(2, 3, 4)), constant(), make_solver('wrong'))
