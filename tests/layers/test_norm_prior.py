"""The prior q0_n ∝ ‖x_n‖^β in every layer, solver and backend."""

import json
import math
from dataclasses import replace

import pytest
import torch

from rotp_vision import GlobalROTPool2d, LocalROTPool2d, PoolOptions, ROTPool, ROTSetPool, pool_options
from rotp_vision.core import FLOOR, average, log_norm, rot_problem, scale_features, solve

SOLVERS = [
    {'solver': 'sinkhorn'},
    {'solver': 'badmm-e'},
    {'solver': 'badmm-q'},
    {'solver': 'badmm-e-coupled'},
    {'solver': 'badmm-q-coupled'},
    {'solver': 'sinkhorn', 'structure': 0.1},
]
every_solver = pytest.mark.parametrize('solver', SOLVERS, ids=lambda s: '-'.join(map(str, s.values())))


def layer(solver, power=1.5, **options):
    made = ROTPool(PoolOptions(**solver, prior='norm', smoothness=0.8, **options)).double()
    made.set_weights(norm_power=power)
    return made


@every_solver
@pytest.mark.parametrize('backend', ['auto', 'reference'])
def test_is_the_solver_with_that_prior(solver, backend):
    made = layer(solver, backend=backend)
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    q0 = torch.stack([torch.tensor([math.hypot(*column) ** 1.5 for column in one.T.tolist()]) for one in x]).double()
    problem = rot_problem(scale_features(x, 'rms'), log_sample_prior=q0.log())
    weights = {name: weight() for name, weight in made.weights.items()}
    expected = average(x, solve(problem, weights, made.solver))
    torch.testing.assert_close(made.pool_sets(x), expected, rtol=1e-6, atol=1e-8)


def test_alone_it_is_the_mean_weighted_by_norms():
    made = layer({'solver': 'sinkhorn'}, power=2.0)
    made.set_weights(smoothness=1e8, feature_penalty=1e16, sample_penalty=1e16)
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    energy = x.square().sum(1, keepdim=True)
    torch.testing.assert_close(made.pool_sets(x), (x * energy).sum(2) / energy.sum(2), rtol=1e-5, atol=1e-6)


@every_solver
def test_starts_uniform_with_a_gradient(solver):
    made = ROTPool(PoolOptions(**solver, prior='norm', smoothness=0.8)).double()
    assert made.named_weights()['norm_power'] == 0
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    uniform = ROTPool(PoolOptions(**solver, smoothness=0.8)).double()
    pooled = made.pool_sets(x)
    torch.testing.assert_close(pooled, uniform.pool_sets(x), rtol=1e-12, atol=1e-12)
    pooled.square().sum().backward()
    assert made.prior.power.grad.abs() > 1e-4


@every_solver
def test_order_and_padding_do_not_matter(solver):
    made = layer(solver)
    x = torch.randn(1, 5, 7, dtype=torch.float64)
    order = torch.randperm(7)
    expected = made.pool_sets(x)
    torch.testing.assert_close(made.pool_sets(x[..., order]), expected, rtol=1e-10, atol=1e-10)
    padded = torch.cat([x, torch.full((1, 5, 2), torch.nan, dtype=torch.float64)], 2).requires_grad_()
    mask = (torch.arange(9) < 7)[None]
    pooled = made.pool_sets(padded, mask)
    torch.testing.assert_close(pooled, expected, rtol=1e-10, atol=1e-10)
    pooled.sum().backward()
    assert torch.equal(padded.grad[..., 7:], torch.zeros(1, 5, 2, dtype=torch.float64))
    assert padded.grad.isfinite().all()


@pytest.mark.parametrize('solver', SOLVERS[:3], ids=lambda s: s['solver'])
@pytest.mark.parametrize('feature_scale', ['raw', 'log'])
@pytest.mark.parametrize('scale', [0.0, 1e-30, 1e-3, 1e15, 1e30])
def test_finite_at_any_scale(solver, feature_scale, scale):
    made = layer(solver, feature_scale=feature_scale).float()
    x = (scale * torch.randn(2, 64, 9)).requires_grad_()
    pooled = made.pool_sets(x)
    (pooled / max(scale, 1e-3)).sum().backward()
    assert pooled.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in made.parameters())


def test_norms_far_from_one_and_at_the_floor():
    x = torch.tensor([[[3e30, 0.0, 1e-9, 3.0], [4e30, 0.0, 1e-9, 4.0]]])
    expected = torch.tensor([[math.log(5) + 30 * math.log(10), math.log(FLOOR), math.log(FLOOR), math.log(5)]])
    torch.testing.assert_close(log_norm(x), expected)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    x = (100 * torch.rand(2, 2048, 49)).to(dtype)
    made = ROTPool(PoolOptions(prior='norm')).to(dtype)
    made.set_weights(norm_power=4.0, smoothness=2.0)
    wide = ROTPool(PoolOptions(prior='norm'))
    wide.set_weights(norm_power=4.0, smoothness=2.0)
    pooled = made.pool_sets(x)
    assert pooled.dtype == dtype
    torch.testing.assert_close(pooled.float(), wide.pool_sets(x.float()), rtol=1e-2, atol=0.1)


def test_in_maps_windows_and_tokens():
    options = PoolOptions(prior='norm', smoothness=1.0)
    x = torch.rand(2, 6, 4, 4)
    plain = GlobalROTPool2d(options)
    plain.set_weights(norm_power=3.0)
    expected = plain(x)
    tokens = ROTSetPool(options)
    tokens.load_state_dict(plain.state_dict())
    torch.testing.assert_close(tokens(x.flatten(2).transpose(1, 2)), expected)
    window = LocalROTPool2d(options=options, kernel_size=4)
    window.load_state_dict(plain.state_dict())
    torch.testing.assert_close(window(x).flatten(1), expected)
    assert not torch.allclose(expected, GlobalROTPool2d(options)(x), rtol=1e-3)


def test_power_can_be_set_read_and_saved():
    made = ROTPool(PoolOptions(prior='norm'))
    made.set_weights(norm_power=-0.5)
    assert made.named_weights()['norm_power'] == -0.5
    other = ROTPool(PoolOptions(prior='norm'))
    other.load_state_dict(made.state_dict())
    assert other.named_weights()['norm_power'] == -0.5
    with pytest.raises(ValueError, match='norm prior must be one finite number, got nan'):
        made.set_weights(norm_power=float('nan'))
    assert not list(ROTPool(PoolOptions(prior='norm', learn='fixed', gain='off')).parameters())


@pytest.mark.parametrize('learn', ['per-iteration', 'fixed'])
def test_the_power_starts_where_the_options_say(learn):
    options = pool_options({'prior': 'norm', 'norm_power': 2, 'learn': learn})
    assert options == pool_options(json.loads(json.dumps(options.to_dict())))
    made = ROTPool(options)
    assert made.named_weights()['norm_power'] == 2
    made.set_weights(norm_power=-0.5)
    made.set_options(replace(options, feature_scale='log'))
    assert made.named_weights()['norm_power'] == -0.5
    made.reset_parameters()
    assert made.named_weights()['norm_power'] == 2
    made.set_options(replace(options, norm_power=None))
    assert made.named_weights()['norm_power'] == 0
    assert ('prior.power' in dict(made.named_parameters())) == (learn != 'fixed')


def test_options_can_be_changed_in_place():
    made = GlobalROTPool2d(PoolOptions('sinkhorn', prior='attention'), 4).double().eval()
    score = made.prior.sample_hidden.weight.clone()
    made.set_options(PoolOptions('sinkhorn', prior='attention', feature_scale='log'))
    assert torch.equal(made.prior.sample_hidden.weight, score)
    made.set_options({'solver': 'sinkhorn', 'prior': 'norm', 'smoothness': 3.0})
    assert made.options == PoolOptions('sinkhorn', prior='norm', smoothness=3.0)
    assert not made.prior.training
    x = torch.rand(2, 4, 3, 3, dtype=torch.float64)
    fresh = GlobalROTPool2d(made.options).double()
    torch.testing.assert_close(made(x), fresh(x), rtol=0, atol=0)
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in fresh.named_parameters()]
    assert made.prior.power.dtype == torch.float64
    made.set_options('sinkhorn')
    assert set(made.state_dict()) == set(GlobalROTPool2d('sinkhorn').state_dict())
