import json
import math

import pytest
import torch

from rotp_vision.layers import AvgMaxPool2d, GeMPool2d, PoolOptions, SimplePoolOptions, any_pool_options, pool_options

EVERY = [{'power': p, 'norm_power': power} for p in (1.0, 3.0) for power in (0.0, 2.0)]
every = pytest.mark.parametrize('options', EVERY, ids=lambda options: '-'.join(map(str, options.values())))


def expected(x, power=3.0, norm_power=0.0, eps=1e-6):
    q = x.square().sum(1, keepdim=True).sqrt() ** norm_power
    q = q / q.sum((2, 3), keepdim=True)
    clamped = x if power == 1 else x.clamp(min=eps)
    return (q * clamped**power).sum((2, 3)) ** (1 / power)


@every
def test_is_its_formula_in_both_formats(options):
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    pool = GeMPool2d(**options).double()
    torch.testing.assert_close(pool(x), expected(x, **options), rtol=1e-10, atol=1e-12)
    nhwc = x.permute(0, 2, 3, 1)
    torch.testing.assert_close(GeMPool2d(**options, input_fmt='NHWC').double()(nhwc), pool(x))
    assert GeMPool2d(**options, flatten=False)(x).shape == (2, 5, 1, 1)
    assert GeMPool2d(**options, flatten=False, input_fmt='NHWC')(nhwc).shape == (2, 1, 1, 5)


@every
def test_gradcheck(options):
    learn = options != EVERY[0]
    pool = GeMPool2d(**options, learn=learn).double()
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in pool.named_parameters()]
    assert names == ['power'] * (options['power'] != 1) + ['prior.power'] * (options['norm_power'] != 0)
    values = [p.detach().clone().requires_grad_() for p in pool.parameters()]

    def pooled(x, *values):
        return torch.func.functional_call(pool, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(pooled, (x, *values))


@pytest.mark.parametrize('scale', [1e-30, 1.0, 1e30])
@pytest.mark.parametrize('p', [0.1, 3.0, 20.0])
def test_any_scale_and_exponent(scale, p):
    """x^p itself leaves the range of float32 at most of these."""
    x = torch.rand(2, 5, 3, 4)
    x[:, 0] = 0.0
    torch.testing.assert_close(GeMPool2d(p, eps=1e-6 * scale)(scale * x) / scale, GeMPool2d(p)(x), rtol=1e-4, atol=0)
    pool, x = GeMPool2d(p, norm_power=2.0, learn=True), (scale * x).requires_grad_()
    (pool(x) / max(scale, 1e-3)).sum().backward()
    assert all(value.grad.isfinite().all() for value in (x, *pool.parameters()))


def test_large_exponents_become_the_maximum():
    x = torch.rand(2, 5, 3, 4)
    torch.testing.assert_close(GeMPool2d(1e4)(x), x.amax((2, 3)), rtol=1e-3, atol=0)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@every
def test_half_precision_is_computed_in_float32(options, dtype):
    x = (100 * torch.rand(2, 64, 7, 7)).to(dtype)
    pool = GeMPool2d(**options)
    assert torch.equal(pool(x), pool(x.float()).to(dtype))
    assert torch.equal(pool.to(dtype)(x), GeMPool2d(**options)(x))
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(pool(x), GeMPool2d(**options)(x))


def test_timm_pool_protocol_state_and_repr():
    pool = GeMPool2d(2.5, 1.5, learn=True)
    assert (pool.pool_type, pool.feat_mult(), pool.is_identity(), pool.flatten) == ('rotp', 1, False, True)
    shapes = {name: tuple(value.shape) for name, value in pool.state_dict().items()}
    assert shapes == {'power': (1,), 'prior.power': (1,)}
    assert not list(GeMPool2d(2.5, 1.5).parameters())
    assert set(GeMPool2d(2.5, 1.5).state_dict()) == {'power', 'prior.power'}
    assert not GeMPool2d(1.0).state_dict()
    assert 'power=2.5' in repr(pool)
    with torch.no_grad():
        for parameter in pool.parameters():
            parameter.fill_(7.0)
    pool.reset_parameters()
    assert [float(value) for value in pool.state_dict().values()] == [2.5, 1.5]


def test_native_weights_start_a_pool_on_the_meta_device():
    with torch.device('meta'):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), GeMPool2d(2.5, 1.5))
    repr(model)
    native = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1)).state_dict()
    model.to_empty(device='cpu').load_state_dict(native)
    assert [float(value) for value in model[1].state_dict().values()] == [2.5, 1.5]


@every
def test_compiles_as_one_graph_for_every_batch_size(options):
    pool = GeMPool2d(**options, learn=options != EVERY[0])
    compiled = torch.compile(pool, fullgraph=True, dynamic=True, backend='aot_eager')
    for batch in (2, 3):
        x = torch.rand(batch, 4, 3, 3, requires_grad=True)
        towards = torch.rand(batch, 4)
        inputs = [x, *pool.parameters()]
        ours, theirs = (torch.autograd.grad(one(x), inputs, towards) for one in (pool, compiled))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'power': 0.0}, 'power must be positive and finite, got 0.0'),
        ({'power': math.inf, 'norm_power': 1.0}, 'norm_power has no effect'),
        ({'power': math.inf, 'learn': True}, 'learn has no effect'),
        ({'power': '3'}, "power must be a finite number, got '3'"),
        ({'eps': -1.0}, 'eps must be positive'),
        ({'norm_power': math.nan}, 'norm_power must be a finite number, got nan'),
        ({'power': 1.0, 'learn': True}, 'learn has no effect'),
        ({'input_fmt': 'NLC'}, "input_fmt must be 'NCHW', 'NHWC' or 'NCL', got 'NLC'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        GeMPool2d(**options)


def test_maximum_and_half_of_both():
    x = torch.randn(2, 5, 3, 4)
    average, largest = x.mean((2, 3)), x.amax((2, 3))
    assert torch.equal(GeMPool2d(math.inf)(x), largest)
    torch.testing.assert_close(AvgMaxPool2d()(x), (average + largest) / 2)
    assert AvgMaxPool2d(False, 'NHWC')(x.permute(0, 2, 3, 1)).shape == (2, 1, 1, 5)


POOLS = ['avg', 'max', 'avgmax', 'gem', {'pool': 'gem', 'norm_power': 1.0}, {'pool': 'avg', 'norm_power': 2.0}]


@pytest.mark.parametrize('given', POOLS, ids=str)
def test_masked_tokens_do_not_count(given):
    pool = any_pool_options(given).make()
    tokens = torch.randn(2, 6, 4)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    tokens[1, 4:] = math.nan
    torch.testing.assert_close(pool(tokens, mask)[1:], pool(tokens[1:, :4]))
    torch.testing.assert_close(pool(tokens[:1]), pool(tokens[:1].mT.reshape(1, 4, 3, 2)))


@pytest.mark.parametrize('given', POOLS, ids=str)
def test_options_are_read_from_a_layer_and_from_json(given):
    options = any_pool_options(given)
    assert options.make().options == options
    assert any_pool_options(json.loads(json.dumps(options.to_dict()))) == options
    assert any_pool_options(options, **{}) == options


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        ({'pool': 'mean'}, "pool must be one of avg, max, avgmax, gem, got 'mean'"),
        ({'pool': 'gem', 'feature_scale': 'rms'}, 'no option feature_scale; known are pool, power'),
        ({'pool': 'avg', 'power': 2.0}, 'power has no effect'),
        ({'pool': 'max', 'norm_power': 2.0}, 'norm_power and learn have no effect'),
        ({'pool': 'avg', 'learn': True}, 'learn has no effect with the mean'),
        ({'pool': 'gem', 'power': -1.0}, 'power must be positive'),
    ],
)
def test_bad_names_and_numbers(given, message):
    with pytest.raises(ValueError, match=message):
        any_pool_options(given)


def test_everything_else_is_a_rot_pool():
    assert any_pool_options('embedding', norm_power=1.0) == PoolOptions.embedding(norm_power=1.0)
    assert any_pool_options({'preset': 'embedding'}) == PoolOptions.embedding()
    assert any_pool_options() == PoolOptions()
    with pytest.raises(ValueError, match='gem'):
        pool_options('gem')
    assert any_pool_options(SimplePoolOptions('gem'), power=4).power == 4.0
