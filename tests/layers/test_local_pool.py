import itertools

import numpy as np
import pytest
import torch
from torch import nn

from rotp_vision import LocalROTPool2d, PoolOptions
from rotp_vision.core import chunks
from rotp_vision.layers import MAX_POOL, MEAN_POOL
from tests.memory import most_memory

GRID = list(itertools.product((1, 2, 3), (1, 2, 3), (0, 1), (1, 2), (False, True)))


@pytest.mark.parametrize(('kernel', 'stride', 'padding', 'dilation', 'ceil_mode'), GRID)
def test_shapes_and_maximum_as_torch(kernel, stride, padding, dilation, ceil_mode):
    if 2 * padding > kernel:
        with pytest.raises(ValueError, match='padding must be at most half of kernel_size'):
            LocalROTPool2d(kernel_size=kernel, padding=padding)
        return
    shape = (kernel, stride, padding, dilation)
    native = nn.MaxPool2d(*shape, ceil_mode=ceil_mode)
    pool = LocalROTPool2d(*shape, ceil_mode=ceil_mode, options=MAX_POOL)
    for size in ((7, 8), (5, 5)):
        x = torch.randn(2, 3, *size)
        torch.testing.assert_close(pool(x), native(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ('kernel', 'stride', 'padding', 'ceil_mode'), [(3, 2, 1, False), (2, 2, 0, True), (3, 1, 1, True)]
)
def test_mean_limit_is_average_pooling_that_does_not_count_padding(kernel, stride, padding, ceil_mode):
    x = torch.randn(2, 3, 7, 7)
    native = nn.AvgPool2d(kernel, stride, padding, ceil_mode=ceil_mode, count_include_pad=False)
    pool = LocalROTPool2d(options=MEAN_POOL, kernel_size=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode)
    torch.testing.assert_close(pool(x), native(x))


def test_same_padding_as_tensorflow():
    for size, kernel, stride in ((7, 3, 2), (8, 3, 2), (5, 2, 2)):
        pool = LocalROTPool2d(options=MAX_POOL, kernel_size=kernel, stride=stride, same=True)
        x = torch.randn(1, 2, size, size)
        after = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        padded = nn.functional.pad(x, (after // 2, after - after // 2) * 2, value=-torch.inf)
        torch.testing.assert_close(pool(x), nn.functional.max_pool2d(padded, kernel, stride), rtol=1e-4, atol=1e-4)


def test_a_window_is_a_set_of_its_own():
    x = torch.rand(2, 5, 4, 6)
    pool = LocalROTPool2d(options=PoolOptions('badmm-e', feature_scale='rms'), kernel_size=2)
    windows = nn.functional.unfold(x, 2, stride=2).view(2, 5, 4, 6).permute(0, 3, 1, 2).reshape(12, 5, 4)
    expected = pool.pool_sets(windows).view(2, 2, 3, 5).permute(0, 3, 1, 2)
    torch.testing.assert_close(pool(x), expected)


@pytest.mark.parametrize('limit', [1, 300])
@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
def test_chunks_change_nothing(monkeypatch, memory_format, limit):
    pool = LocalROTPool2d(3, 2, 1, options=PoolOptions(prior='norm', smoothness=1.0)).double()
    pool.set_weights(norm_power=2.0)
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()
    prior = torch.randn(2, 9, 9, dtype=torch.float64, requires_grad=True)

    def run():
        pooled = pool(x, prior)
        return [pooled, *torch.autograd.grad(pooled.square().sum(), [x, prior, *pool.parameters()])]

    whole = run()
    monkeypatch.setitem(chunks.ENTRIES, 'windows', (limit, limit))
    for one, other in zip(run(), whole, strict=True):
        torch.testing.assert_close(one, other)


def test_gradcheck():
    torch.manual_seed(0)
    pool = LocalROTPool2d(options='sinkhorn', kernel_size=2, stride=1, padding=1).double()
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(pool, (x,))


def test_unbatched_and_bad_input():
    pool = LocalROTPool2d(kernel_size=3)
    assert pool(torch.rand(2, 6, 6)).shape == (2, 2, 2)
    with pytest.raises(ValueError, match=r'x must be a feature map \(B, C, H, W\) or \(C, H, W\), got \[4, 4\]'):
        pool(torch.rand(4, 4))
    with pytest.raises(ValueError, match=r'padding 0.* does not fit a map of height 2'):
        pool(torch.rand(1, 1, 2, 5))
    with pytest.raises(ValueError, match='kernel_size must be one or two integers of at least 1, got 0'):
        LocalROTPool2d(kernel_size=0)
    with pytest.raises(ValueError, match='stride must be one or two integers'):
        LocalROTPool2d(kernel_size=2, stride=(1, 2, 3))


@pytest.mark.parametrize('name', ['kernel_size', 'stride', 'padding', 'dilation'])
@pytest.mark.parametrize('value', [2.5, True, (2, 1.0), '2', np.ones(2)])
def test_sizes_are_integers(name, value):
    with pytest.raises(ValueError, match=f'{name} must be one or two integers of at least [01], got'):
        LocalROTPool2d(**{'kernel_size': 2, name: value})


def test_sizes_of_numpy():
    pool = LocalROTPool2d(kernel_size=np.int64(2), stride=[np.int32(1), 1])
    assert (pool.windows.kernel_size, pool.windows.stride) == ((2, 2), (1, 1))
    assert {type(size) for size in pool.windows.kernel_size + pool.windows.stride} == {int}


def test_training_memory_is_bounded():
    """(8, 64, 112, 112), 3×3 stride 2, whose windows are twice as large: output, gradients and a chunk's work."""
    torch.set_num_threads(1)
    pool = LocalROTPool2d(3, 2, 1, options='paper')
    x = torch.rand(8, 64, 112, 112, requires_grad=True)
    most, size = most_memory(lambda: pool(x).sum().backward()), x.untyped_storage().nbytes()
    assert most < 6 * size


def test_an_empty_batch():
    assert LocalROTPool2d(kernel_size=2)(torch.rand(0, 4, 8, 8)).shape == (0, 4, 4, 4)
