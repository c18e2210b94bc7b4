"""`plan` and `log_plan` of every layer: with its own axes, of mass one, and what its output is the average under."""

import pytest
import torch
from torch.nn import functional as F

from rotp_vision.layers import (
    MAX_POOL,
    MEAN_POOL,
    GlobalROTPool2d,
    LocalROTPool2d,
    MixedROTPool2d,
    ROTPool,
    ROTSetFusion,
    ROTSetPool,
)

SOLVERS = [
    {'solver': 'badmm-e', 'start': 'paper'},
    {'solver': 'sinkhorn', 'start': 'paper', 'feature_scale': 'raw', 'prior': 'norm'},
    {'solver': 'badmm-q-coupled', 'start': 'paper', 'gain': 'off'},
]
every_solver = pytest.mark.parametrize('options', SOLVERS, ids=lambda options: options['solver'])


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def average(x, plan, axes):
    """Each feature's mean under its row of the plan."""
    return (x * plan).sum(axes) / plan.sum(axes)


def assert_is_plan(plan, axes):
    assert bool((plan >= 0).all())
    mass = plan.sum(axes)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=1e-10, atol=0)


@every_solver
@pytest.mark.parametrize('layout', ['NCHW', 'NHWC'])
@pytest.mark.parametrize('given', [False, True], ids=['', 'prior'])
def test_global(options, layout, given):
    x = random(2, 5, 3, 4)
    x = x if layout == 'NCHW' else x.permute(0, 2, 3, 1)
    prior = {'log_sample_prior': random(2, 3, 4) + 1} if given else {}
    for pool in (GlobalROTPool2d(options, 5, input_fmt=layout), MixedROTPool2d([options, MEAN_POOL], input_fmt=layout)):
        pool.double()
        if pool.gain is not None:
            pool.set_weights(gain=1.0)
        plan = pool.plan(x, **prior)
        assert plan.shape == x.shape
        assert torch.equal(plan, pool.log_plan(x, **prior).exp())
        assert_is_plan(plan, (1, 2, 3))
        torch.testing.assert_close(average(x, plan, (2, 3) if layout == 'NCHW' else (1, 2)), pool(x, **prior))


@every_solver
@pytest.mark.parametrize('shape', [{'kernel_size': 3, 'stride': 2, 'padding': 1}, {'kernel_size': (2, 3)}])
def test_local(options, shape):
    x, prior = random(2, 5, 7, 6), random(2, 7, 6) + 1
    pool = LocalROTPool2d(options=options, num_features=5, **shape).double()
    for given in (None, prior, prior[:1]):
        plan, pooled = pool.plan(x, given), pool(x, given)
        assert plan.shape == (*pooled.shape, *pool.windows.kernel_size)
        assert_is_plan(plan, (1, 4, 5))
        (pad_h, pad_w), (kernel_h, kernel_w) = pool.windows.padding, pool.windows.kernel_size
        padded = F.pad(x, (pad_w, pad_w, pad_h, pad_h))
        windows = padded.unfold(2, kernel_h, pool.windows.stride[0]).unfold(3, kernel_w, pool.windows.stride[1])
        torch.testing.assert_close(average(windows, plan, (4, 5)), pooled)
    assert torch.equal(pool.plan(x[0]), pool.plan(x)[0])
    if pool.windows.padding == (1, 1):
        assert torch.equal(plan[:, :, 0, :, 0], torch.zeros_like(plan[:, :, 0, :, 0]))


@every_solver
def test_sets(options):
    pool = ROTSetPool(options, 5).double()
    x, mask = random(3, 6, 5), torch.arange(6) < torch.tensor([[6], [1], [4]])
    prior = random(3, 6) + 1
    plan = pool.plan(x, mask, prior)
    assert plan.shape == x.shape
    assert_is_plan(plan, (1, 2))
    assert torch.equal(plan[~mask], torch.zeros_like(plan[~mask]))
    assert bool(pool.log_plan(x, mask)[~mask].eq(-torch.inf).all())
    pooled = pool(x, mask, prior)
    torch.testing.assert_close(average(x, plan, 1), pooled)
    packed = {'x': x[mask], 'log_sample_prior': prior[mask], 'lengths': [6, 1, 4]}
    torch.testing.assert_close(pool(**packed), pooled)
    torch.testing.assert_close(pool.plan(**packed), plan[mask])


@every_solver
@pytest.mark.parametrize('maps', [False, True], ids=['sets', 'maps'])
def test_fusion(options, maps):
    network = torch.nn.Linear(5, 3).double()
    fuse = ROTSetFusion(options, options, network).double()
    x, prior = (random(2, 4, 5, 2, 3), random(2, 4, 2, 3)) if maps else (random(2, 4, 6, 5), random(2, 4, 6))
    mask = None
    if not maps:
        mask = torch.ones(2, 4, 6, dtype=torch.bool)
        mask[0, 1, 3:], mask[1, 3] = False, False
    plans = fuse.plan(x, mask, prior)
    assert plans.within.shape == x.shape
    assert plans.between.shape == (2, 4, 3)
    samples = (3, 4) if maps else 2
    assert_is_plan(plans.between, (1, 2))
    assert_is_plan(plans.within, (2, 3, 4) if maps else (2, 3))
    given = x if mask is None else x.masked_fill(~mask.unsqueeze(3), 0.0)
    features = network(average(given, plans.within, samples))
    torch.testing.assert_close(average(features, plans.between, 1), fuse(x, mask, prior))
    if mask is not None:
        assert torch.equal(plans.between[1, 3], torch.zeros(3, dtype=torch.float64))


def test_a_prior_of_your_own_weights_the_mean():
    """Closed form: in the limit of the mean, the average under q0."""
    x, prior = random(2, 5, 4, 6), random(2, 4, 6)
    q0 = prior.flatten(1).softmax(1).view(2, 1, 4, 6)
    torch.testing.assert_close(
        GlobalROTPool2d(MEAN_POOL).double()(x, log_sample_prior=prior), (x * q0).sum((2, 3)), rtol=1e-6, atol=1e-6
    )
    tokens, weights = x.flatten(2).mT, prior.flatten(1)
    torch.testing.assert_close(
        ROTSetPool(MEAN_POOL).double()(tokens, log_sample_prior=weights), (x * q0).sum((2, 3)), rtol=1e-6, atol=1e-6
    )
    local = LocalROTPool2d(options=MEAN_POOL, kernel_size=2).double()
    share = prior.exp().unsqueeze(1)
    expected = F.avg_pool2d(x * share, 2) / F.avg_pool2d(share, 2)
    torch.testing.assert_close(local(x, log_sample_prior=prior), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(GlobalROTPool2d(MAX_POOL).double()(x), x.amax((2, 3)), rtol=1e-5, atol=1e-5)


def test_bad_priors():
    x = torch.rand(2, 5, 4, 6)
    for pool in (GlobalROTPool2d(), LocalROTPool2d(kernel_size=2), MixedROTPool2d([MEAN_POOL, MAX_POOL])):
        with pytest.raises(ValueError, match=r'log_sample_prior must have shape .*4, 6\).*got \[2, 24\]'):
            pool(x, torch.rand(2, 24))
    with pytest.raises(ValueError, match=r'packed sets must have shape \(5,\)'):
        ROTSetPool()(torch.rand(5, 3), log_sample_prior=torch.rand(2, 3), lengths=[2, 3])
    with pytest.raises(ValueError, match='got both'):
        ROTSetPool()(torch.rand(5, 3), torch.ones(2, 3, dtype=torch.bool), lengths=[2, 3])
    with pytest.raises(ValueError, match=r'log_sample_prior must have shape \(2, 3, 4\)'):
        ROTSetFusion()(torch.rand(2, 3, 4, 5), log_sample_prior=torch.rand(3, 4))
    with pytest.raises(NotImplementedError, match='solve_sets'):
        ROTPool().plan(x)
