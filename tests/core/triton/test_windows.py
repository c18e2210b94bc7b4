"""The Triton backend of local pooling: its kernels in the interpreter, and what it says where it cannot run."""

import pytest
import torch

from rotp_vision.core import Windows, rot_pool_windows
from rotp_vision.core import triton as triton_room
from rotp_vision.core.triton import check
from rotp_vision.layers import LocalROTPool2d
from tests.core.triton.test_sets import needs_triton, run


@needs_triton
def test_kernels_in_the_interpreter():
    """Outputs and every gradient equal the torch path's; see `windows_interpreted`, which this runs."""
    run('-m', 'pytest', '-x', 'tests/core/triton/windows_interpreted.py', TRITON_INTERPRET='1', OMP_NUM_THREADS='1')


def pool(dtype=torch.float32, **options) -> torch.Tensor:
    layer = LocalROTPool2d({'backend': 'triton'} | options, kernel_size=3, stride=2, padding=1)
    return layer(torch.zeros(1, 3, 4, 4, dtype=dtype))


def test_auto_on_cpu_does_not_mean_triton():
    assert pool(backend='auto').shape == (1, 3, 2, 2)
    layer, maps = LocalROTPool2d(kernel_size=3), torch.zeros(1, 3, 4, 4)
    assert rot_pool_windows(maps, layer.weights(), layer.solver, Windows(3, 3, 1, 1, 0, 0, 1, 1, 2, 2)) is None


def test_needs_a_gpu():
    with pytest.raises(ValueError, match=r"backend 'triton' needs tensors on a GPU, got features on cpu; use backend"):
        pool()


@pytest.mark.parametrize(
    ('message', 'options'),
    [
        ('float64', {'dtype': torch.float64}),
        ('no coupled marginals, structural or proximal term', {'structure': 0.1}),
        ('no coupled marginals, structural or proximal term', {'solver': 'badmm-e', 'coupled': True}),
        ('no coupled marginals, structural or proximal term', {'solver': 'sinkhorn', 'num_modules': 2}),
    ],
)
def test_what_it_cannot_do(message, options, monkeypatch):
    monkeypatch.setattr(triton_room, 'INSTALLED', True)
    monkeypatch.setattr(triton_room, 'INTERPRETED', True)
    # The weights are made first, and there is no interpreter here to make them.
    monkeypatch.setattr(check, 'is_traced', lambda tensor: True)
    with pytest.raises(ValueError, match=message):
        pool(**options)
