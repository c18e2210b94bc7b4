"""What the pooling asks of a GPU: launches and bytes, counted with tensors that have no values.

The counter raises where an operation runs on the CPU, mixes devices or looks at a value.
"""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.launches import GLOBAL, STEM, WINDOWS, count
from rotp_vision.layers import GlobalROTPool2d, LocalROTPool2d, ROTSetPool
from tests.core.triton.test_sets import needs_triton

# Layer as `convert` installs it, map, backend: launches, and at most so many GB, of forward and backward in float32.
TABLE = {
    'badmm-e': (lambda: GlobalROTPool2d('badmm-e'), GLOBAL, 'triton', 17, 1.1),
    'badmm-q': (lambda: GlobalROTPool2d('badmm-q'), GLOBAL, 'triton', 17, 1.1),
    'sinkhorn': (lambda: GlobalROTPool2d(), GLOBAL, 'triton', 19, 1.3),
    'badmm-e of the stem': (lambda: LocalROTPool2d('badmm-e', **WINDOWS), STEM, 'triton', 8, 7.0),
    'sinkhorn of the stem': (lambda: LocalROTPool2d(**WINDOWS), STEM, 'triton', 8, 7.0),
    'norm prior of the stem': (lambda: LocalROTPool2d({'prior': 'norm'}, **WINDOWS), STEM, 'triton', 264, 64.0),
    'badmm-e of the stem without Triton': (lambda: LocalROTPool2d('badmm-e', **WINDOWS), STEM, 'torch', 5652, 531.0),
    'badmm-e without Triton': (lambda: GlobalROTPool2d('badmm-e'), GLOBAL, 'torch', 533, 25.5),
    'sinkhorn without Triton': (lambda: GlobalROTPool2d(), GLOBAL, 'torch', 450, 22.0),
}


@needs_triton
@pytest.mark.filterwarnings('ignore:Accessing the data pointer of FakeTensor')  # by chunks of windows
@pytest.mark.parametrize(('make', 'shape', 'backend', 'launches', 'gigabytes'), TABLE.values(), ids=TABLE)
def test_table(make, shape, backend, launches, gigabytes):
    counted, names = count(make, shape, backend=backend)
    assert counted.launches <= launches, names
    assert counted.gigabytes <= gigabytes, names


@needs_triton
def test_half_precision_moves_half_of_it():
    wide, half = (count(lambda: GlobalROTPool2d(), GLOBAL, dtype=dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    assert half.launches == wide.launches
    assert half.bytes < 0.6 * wide.bytes


@needs_triton
def test_a_frozen_network_needs_no_gradient_of_the_map():
    frozen, trained = (count(lambda: GlobalROTPool2d(), GLOBAL, frozen=frozen)[0] for frozen in (True, False))
    assert frozen.bytes <= trained.bytes - 4 * math.prod(GLOBAL)


class Masked(nn.Module):
    """Sets of which the last samples are masked."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.pool, self.masked = ROTSetPool(), masked

    def forward(self, x):
        mask = x.new_ones(x.shape[0], 49, dtype=torch.bool).tril() if self.masked else None
        return self.pool(x.flatten(2).mT, mask)


@needs_triton
def test_masked_features_are_not_copied():
    """Not the features, 0.1 GB, and not their gradient: what a mask adds are vectors of samples."""
    masked, whole = (count(lambda m=m: Masked(masked=m), GLOBAL)[0] for m in (True, False))
    assert masked.gigabytes < whole.gigabytes + 0.001


VARIANTS = {
    'norm prior': lambda: GlobalROTPool2d({'prior': 'norm'}),
    'attention': lambda: GlobalROTPool2d({'prior': 'attention', 'gain': 'channel'}, 32),
    'log': lambda: GlobalROTPool2d({'view': 'log', 'learn': 'shared'}),
    'paper': lambda: GlobalROTPool2d('paper'),
    'windows': lambda: LocalROTPool2d(kernel_size=3, stride=2, padding=1),
    'large windows': lambda: LocalROTPool2d(kernel_size=4, stride=3, padding=2),
}
WITHOUT_TRITON = {
    'coupled': lambda: GlobalROTPool2d({'solver': 'badmm-e', 'coupled': True, 'num_modules': 3}),
    'badmm-e with structure': lambda: GlobalROTPool2d({'solver': 'badmm-e', 'structure': 0.1, 'num_modules': 2}),
    'sinkhorn with structure': lambda: GlobalROTPool2d({'structure': 0.1, 'num_modules': 2}),
    'log': VARIANTS['log'],
    'windows': VARIANTS['windows'],
}


@needs_triton
@pytest.mark.parametrize('make', VARIANTS.values(), ids=VARIANTS)
def test_everything_stays_on_the_device(make):
    for dtype, channels_last in ((torch.float32, False), (torch.bfloat16, True)):
        counted, _ = count(make, (2, 32, 7, 7), dtype=dtype, channels_last=channels_last)
        assert 0 < counted.launches < 80


@needs_triton
@pytest.mark.parametrize('make', WITHOUT_TRITON.values(), ids=WITHOUT_TRITON)
def test_everything_stays_on_the_device_without_triton(make):
    assert count(make, (2, 32, 7, 7), backend='torch', dtype=torch.bfloat16)[0].launches > 60


@needs_triton
def test_the_counter_notices():
    class OnCpu(nn.Module):
        def forward(self, x):
            return x.cpu() * 2

    class Looks(nn.Module):
        def forward(self, x):
            return x * float(x.detach().sum())

    with pytest.raises(RuntimeError, match='on cpu'):
        count(OnCpu, (2, 3, 4, 4), frozen=False)
    with pytest.raises(Exception, match=r'data-dependent|DataDependent|local_scalar_dense'):
        count(Looks, (2, 3, 4, 4))


def test_fake_cuda_tensors():
    """Forward alone, for without a GPU torch runs no backward of these."""
    with FakeTensorMode(), torch.device('cuda'):
        for make in (*VARIANTS.values(), *WITHOUT_TRITON.values()):
            out = make()(torch.empty(2, 32, 7, 7, requires_grad=True))
            assert out.device == torch.device('cuda:0')
        masked = ROTSetPool()(torch.empty(2, 7, 32), torch.ones(2, 7, dtype=torch.bool))
        assert masked.device == torch.device('cuda:0')
