import math

import pytest
import torch
from torch.nn import functional as F

from rotp_vision import PoolOptions, ROTPool
from rotp_vision.core import scale_features
from rotp_vision.layers.parameters import AttentionPrior, PositiveWeight


@pytest.mark.parametrize('learn', ['per-iteration', 'shared', 'fixed'])
def test_starting_values_mean_what_they_say(learn):
    options = PoolOptions.paper(
        'badmm-e-coupled', learn=learn, structure=0.2, smoothness=0.3, feature_penalty=5.0, step=1e3
    )
    layer = ROTPool(options)
    weights = layer.named_weights()
    expected = {'structure': 0.2, 'smoothness': 0.3, 'feature_penalty': 5.0, 'step': 1e3, 'sample_penalty': math.log(2)}
    assert set(weights) == set(expected)
    for name, value in expected.items():
        assert weights[name].shape == ((1,) if learn == 'shared' else (4,))
        torch.testing.assert_close(weights[name], torch.full_like(weights[name], value))
    assert len(list(layer.parameters())) == (0 if learn == 'fixed' else 5)


def test_one_value_per_iteration():
    layer = ROTPool(PoolOptions('badmm-e', num_iters=3, smoothness=[1.0, 2.0, 3.0]))
    assert layer.named_weights()['smoothness'].tolist() == pytest.approx([1.0, 2.0, 3.0])
    assert ROTPool({'smoothness': [2.0]}).to('meta').pool_sets(torch.empty(2, 3, 4, device='meta')).shape == (2, 3)


def test_the_papers_start_is_the_papers_softplus():
    weight = PositiveWeight(math.log(2))
    with torch.no_grad():
        weight.beta.fill_(1.7)
    torch.testing.assert_close(weight(), F.softplus(torch.tensor([1.7])))


def test_set_weights():
    layer = ROTPool('sinkhorn')
    layer.set_weights(smoothness=4.0, gain=1.5)
    assert layer.named_weights()['smoothness'].item() == pytest.approx(4.0)
    assert layer.named_weights()['gain'].item() == pytest.approx(1.5)
    with pytest.raises(ValueError, match="no weight 'step'; it has smoothness, feature_penalty"):
        layer.set_weights(step=1.0)
    with pytest.raises(ValueError, match='a weight must be positive and finite'):
        layer.set_weights(smoothness=0.0)


@pytest.mark.parametrize('width', [None, 3])
def test_attention_prior_is_the_papers(width):
    torch.manual_seed(0)
    prior = AttentionPrior(4, width).double()
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    feature_logits, sample_logits = prior(x)
    v, w = prior.sample_hidden.weight, prior.sample_score.weight
    u = prior.feature_score.weight
    if width is not None:
        u = u @ prior.feature_hidden.weight
    assert u.shape == (4, 4)
    for b in range(2):
        torch.testing.assert_close(sample_logits[b], (w @ torch.tanh(v @ x[b])).flatten())
        torch.testing.assert_close(feature_logits[b], u @ x[b] @ torch.ones(5, dtype=torch.float64))


def test_attention_prior_reaches_the_plan():
    torch.manual_seed(0)
    layer = ROTPool(
        PoolOptions.paper('sinkhorn', prior='attention', smoothness=1e8, feature_penalty=1e16, sample_penalty=1e16), 4
    ).double()
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    attention = layer.prior(x)[1].softmax(1)
    torch.testing.assert_close(layer.pool_sets(x), torch.einsum('bdn,bn->bd', x, attention), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('feature_scale', ['rms', 'log'])
def test_masked_samples_do_not_change_the_scale(feature_scale):
    x = torch.rand(1, 3, 6)
    mask = torch.tensor([[True, True, False, True, False, True]])
    seen = scale_features(x.masked_fill(~mask, 0.0), feature_scale, mask.unsqueeze(1))
    torch.testing.assert_close(seen[..., mask[0]], scale_features(x[..., mask[0]], feature_scale))


def test_rms_is_scale_free_and_flat_at_silent_channels():
    x = torch.rand(2, 3, 9)
    scale = torch.tensor([1.0, 100.0, 0.5]).view(1, 3, 1)
    torch.testing.assert_close(scale_features(x * scale, 'rms'), scale_features(x, 'rms'), rtol=1e-4, atol=1e-4)
    silent = torch.zeros(1, 3, 9, requires_grad=True)
    scale_features(silent, 'rms').sum().backward()
    assert torch.isfinite(silent.grad).all()
    assert silent.grad.abs().max() <= 1001


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('width', [None, 2])
def test_an_attention_prior_in_half_precision_is_that_of_its_numbers(dtype, width):
    prior = AttentionPrior(3, width).to(dtype)
    x = torch.full((1, 3, 196), 800.0, dtype=dtype)  # whose sum is beyond the largest half
    with torch.no_grad():
        features, samples = prior(x)
        expected, _ = prior.double()(x.double())
    assert samples.isfinite().all()
    assert features.double() == pytest.approx(expected, rel=2e-2, abs=2e-2 * float(expected.abs().max()))


@pytest.mark.parametrize('size', [1e-3, 1.0, 1e9, 1e11, 1e14, 1e19, 1e30])
def test_rms_has_gradients_at_any_size(size):
    x = (torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).clamp(-2, 2) * size).requires_grad_()
    weight = torch.linspace(-1, 1, 30).view(2, 3, 5)
    seen = scale_features(x, 'rms')
    (seen * weight).sum().backward()
    wide = x.detach().double().requires_grad_()
    expected = wide * (wide.square().mean(2, keepdim=True) + 1e-6).rsqrt()
    (expected * weight).sum().backward()
    assert seen.double().allclose(expected, rtol=1e-5)
    assert x.grad is not None
    assert wide.grad is not None
    assert (x.grad.double() * size).allclose(wide.grad * size, rtol=1e-4, atol=1e-5)


def test_a_weight_is_set_to_normal_numbers_only():
    weight = PositiveWeight(1.0)
    for value in (1e-45, 1e300):
        with pytest.raises(ValueError, match='a weight must be'):
            weight.set(value)
