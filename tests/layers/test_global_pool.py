import copy
import pickle

import pytest
import torch

from rotp_vision import GlobalROTPool2d, PoolOptions, pool_options
from rotp_vision.core import average, rot_problem, solve
from rotp_vision.layers import GeMPool2d

SOLVERS = ['sinkhorn', 'badmm-e', 'badmm-q', 'badmm-e-coupled']


@pytest.mark.parametrize('options', SOLVERS)
def test_is_the_core_solver_on_the_flattened_map(options):
    layer = GlobalROTPool2d(pool_options(options, feature_scale='raw', smoothness=0.5, start='mean'))
    x = torch.rand(2, 6, 3, 5)
    sets = x.flatten(2)
    weights = {name: torch.tensor([value]) for name, value in layer.options.starting_weights().items()}
    expected = average(sets, solve(rot_problem(sets), weights, layer.solver))
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize('num_iters', [1, 2, 3])
@pytest.mark.parametrize('solver', ['badmm-e', 'badmm-q'])
def test_every_parameter_that_exists_gets_a_gradient(solver, num_iters):
    options = PoolOptions(solver + '-coupled' * (num_iters == 3), num_iters=num_iters, structure=0.1)
    layer = GlobalROTPool2d(options)
    layer(torch.rand(2, 6, 3, 5)).square().sum().backward()
    assert not [name for name, p in layer.named_parameters() if p.grad is None]


def test_one_iteration_is_softmax_pooling():
    x = torch.rand(2, 6, 3, 5)
    weights = (x.flatten(2) / 0.4).softmax(2)
    layer = GlobalROTPool2d(PoolOptions('badmm-e', num_iters=1, step=0.4, feature_scale='raw', start='mean'))
    torch.testing.assert_close(layer(x), (x.flatten(2) * weights).sum(2))


def test_shapes_and_formats():
    x = torch.rand(2, 6, 3, 5)
    layer = GlobalROTPool2d('sinkhorn')
    expected = layer(x)
    assert expected.shape == (2, 6)
    assert GlobalROTPool2d('sinkhorn', flatten=False)(x).shape == (2, 6, 1, 1)
    nhwc = x.permute(0, 2, 3, 1).contiguous()
    torch.testing.assert_close(GlobalROTPool2d('sinkhorn', input_fmt='NHWC')(nhwc), expected)
    assert GlobalROTPool2d('sinkhorn', input_fmt='NHWC', flatten=False)(nhwc).shape == (2, 1, 1, 6)
    torch.testing.assert_close(layer(x.to(memory_format=torch.channels_last)), expected)
    for height, width in ((1, 1), (7, 7), (14, 9)):
        assert layer(torch.rand(1, 6, height, width)).shape == (1, 6)


def test_timm_pool_protocol_and_repr():
    layer = GlobalROTPool2d('sinkhorn', flatten=True)
    assert (layer.pool_type, layer.feat_mult(), layer.is_identity(), layer.flatten) == ('rotp', 1, False, True)
    assert "solver='sinkhorn', flatten=True, input_fmt='NCHW'" in repr(layer)
    assert 'smoothness): PositiveWeight(5)' in repr(layer)
    repr(GlobalROTPool2d('sinkhorn').to('meta'))


def test_mean_start_hardly_differs_from_the_mean_yet_can_leave_it():
    """At most exp(spread of the scaled features / temperature) from the mean: 1.087 for log, whose spread is 8.3."""
    torch.manual_seed(0)
    x = torch.relu(torch.randn(4, 32, 7, 7)) * 2
    for solver in ('sinkhorn', 'badmm-e', 'badmm-q'):
        for feature_scale in ('raw', 'rms', 'log'):
            layer = GlobalROTPool2d(
                PoolOptions(solver, start='mean', feature_scale=feature_scale, prior='attention'), 32
            )
            pooled = layer(x)
            mean = x.mean((2, 3))
            assert ((pooled - mean).abs() / mean).max() < 0.087
            pooled.square().sum().backward()
            moving = [name for name, p in layer.named_parameters() if p.grad is not None and p.grad.abs().max() > 0]
            assert 'weights.smoothness.beta' in moving
            assert 'prior.sample_score.weight' in moving


def test_mean_start_can_be_left_by_an_optimizer():
    """From a temperature of 50 to near max pooling within 300 steps of AdamW: the target is the maximum."""
    torch.manual_seed(0)
    layer = GlobalROTPool2d(PoolOptions('sinkhorn', start='mean', gain='off'))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
    x = torch.relu(torch.randn(8, 16, 7, 7))
    target = x.amax((2, 3))
    first = (layer(x) - target).square().mean().item()
    for _ in range(300):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.02 * first
    assert layer.named_weights()['smoothness'].item() < 1.0


def test_the_log_scale_is_gem_in_its_limits():
    """With φ = log the pooling is Σ x^(1+s) / Σ x^s, s = 1 / α1, which meets GeM's (mean x^p)^(1/p) three times:
    p = 1 (the mean), p → ∞ (the maximum), and for features of small contrast at s = (p - 1) / 2 to second order."""
    torch.manual_seed(0)

    def rotp(x, s):
        fixed = PoolOptions(
            'sinkhorn', feature_scale='log', smoothness=1 / s, feature_penalty=1.0, sample_penalty=1e-12
        )
        return GlobalROTPool2d(fixed).double()(x)

    x = torch.rand(2, 4, 5, 5, dtype=torch.float64) + 0.5
    torch.testing.assert_close(rotp(x, 1e-9), x.mean((2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(rotp(x, 1e4), x.amax((2, 3)), rtol=1e-3, atol=0)
    errors = []
    for contrast in (0.1, 0.01):
        flat = 10 + contrast * x
        for p in (1.5, 3.0):
            rise = (GeMPool2d(p)(flat) - flat.mean((2, 3))).abs().max()
            errors.append(((rotp(flat, (p - 1) / 2) - GeMPool2d(p)(flat)).abs().max() / rise).item())
    assert max(errors[:2]) < 0.05
    assert max(errors[2:]) < 0.005


@pytest.mark.parametrize('gain', ['scalar', 'channel'])
def test_gain_scales_the_output(gain):
    x = torch.rand(2, 5, 3, 3)
    layer = GlobalROTPool2d({'gain': gain}, 5)
    plain = layer(x)
    layer.set_weights(gain=2.0)
    torch.testing.assert_close(layer(x), 2 * plain)
    assert layer.gain.beta.shape == ((1,) if gain == 'scalar' else (5,))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_kept_and_half_precision_solves_in_float32(dtype):
    x = (torch.rand(2, 5, 3, 3) * 3).to(dtype)
    layer = GlobalROTPool2d('badmm-e').to(dtype)
    pooled = layer(x)
    assert pooled.dtype == dtype
    if dtype != torch.float64:
        torch.testing.assert_close(pooled, GlobalROTPool2d('badmm-e')(x.float()).to(dtype), rtol=2e-2, atol=2e-3)


def test_loading_native_weights_starts_the_pool_and_a_part_is_an_error():
    layer = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), GlobalROTPool2d({'smoothness': 3.0}))
    layer[1].set_weights(smoothness=7.0)
    native = {k: v + 1 for k, v in layer.state_dict().items() if k.startswith('0.')}
    layer.load_state_dict(native)
    assert layer[1].named_weights()['smoothness'].item() == pytest.approx(3.0)
    full = layer.state_dict()
    full.pop('1.weights.smoothness.beta')
    with pytest.raises(RuntimeError, match=r'Missing key.*1\.weights\.smoothness\.beta'):
        layer.load_state_dict(full)
    with pytest.raises(RuntimeError, match=r'Missing key.*0\.bias'):
        layer.load_state_dict({'0.weight': native['0.weight']})


def test_copies_and_pickles():
    layer = GlobalROTPool2d(PoolOptions('sinkhorn', prior='attention', gain='channel'), 4)
    x = torch.rand(2, 4, 3, 3)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


def test_bad_input():
    with pytest.raises(ValueError, match=r'x must be a feature map with 4 axes \(NCHW\), got \[2, 3, 4\]'):
        GlobalROTPool2d()(torch.rand(2, 3, 4))
    with pytest.raises(ValueError, match="input_fmt must be 'NCHW', 'NHWC' or 'NCL', got 'NLC'"):
        GlobalROTPool2d(input_fmt='NLC')
    with pytest.raises(ValueError, match="num_features must be given for prior='attention'"):
        GlobalROTPool2d({'prior': 'attention'})
    with pytest.raises(ValueError, match='at least one feature and one sample'):
        GlobalROTPool2d()(torch.rand(2, 3, 0, 4))
