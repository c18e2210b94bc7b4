"""The Triton backend: its kernels in the interpreter, its errors, and (slow) that they compile for GPUs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rotp_vision.core import Solver, rot_pool, rot_problem, step_weights
from rotp_vision.core import triton as triton_room

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(importlib.util.find_spec('triton') is None, reason='triton is not installed')


def run(*command: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {'PYTHONPATH': str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


BLOCKED = """
import sys

sys.modules['triton'] = None  # an import of it raises
import torch
import rotp_vision

rotp_vision.GlobalROTPool2d()(torch.zeros(1, 2, 2, 2))
kernels = [name for name in sys.modules if name.startswith('rotp_vision.core.triton.')]
assert not kernels, kernels
"""


def test_without_triton_nothing_of_it_is_imported():
    run('-c', BLOCKED)


@needs_triton
def test_kernels_in_the_interpreter():
    """Outputs and every gradient equal the torch path's; see `sets_interpreted`, which this runs."""
    run('-m', 'pytest', '-x', 'tests/core/triton/sets_interpreted.py', TRITON_INTERPRET='1', OMP_NUM_THREADS='1')


@needs_triton
def test_kernels_of_the_default_compile_without_spills(tmp_path):
    """For one GPU, of 7×7 maps; the slow test has the rest."""
    arguments = ('--targets', 'sm_80', '--kinds', 'sets', '--solvers', 'sinkhorn', '--quick')
    run('-m', 'benchmarks.triton_aot', *arguments, TRITON_CACHE_DIR=str(tmp_path))


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize('target', ['sm_80', 'sm_90', 'sm_100', 'gfx942'])
def test_kernels_compile_for_gpus_without_spills(target):
    """Every configuration that 'auto' can choose; what is compiled stays in Triton's cache."""
    run('-m', 'benchmarks.triton_aot', '--targets', target)


def pool(*, weights: dict | None = None, solver: Solver | None = None, dtype=torch.float32, num_samples=4):
    problem = rot_problem(torch.randn(1, 3, num_samples, dtype=dtype))
    given = step_weights(2, smoothness=1.0, step=1.0, **(weights or {}))
    return rot_pool(problem, given, solver or Solver('badmm-e', backend='triton'))


def test_auto_on_cpu_does_not_mean_triton():
    assert pool(solver=Solver('badmm-e', backend='auto')).shape == (1, 3)


def test_needs_a_gpu():
    with pytest.raises(ValueError, match=r"backend 'triton' needs tensors on a GPU, got features on cpu; use backend"):
        pool()


def test_needs_triton(monkeypatch):
    monkeypatch.setattr(triton_room, 'INSTALLED', False)
    with pytest.raises(ValueError, match='pip install triton'):
        pool()


@pytest.mark.parametrize(
    ('message', 'arguments'),
    [
        ('float64', {'dtype': torch.float64}),
        ('at most 256 samples, got 257', {'num_samples': 257}),
        ('no coupled marginals, structural or proximal term', {'weights': {'structure': 0.1}}),
        (
            'no coupled marginals, structural or proximal term',
            {
                'solver': Solver('badmm-e', coupled=True, backend='triton'),
                'weights': {'feature_penalty': 1.0, 'sample_penalty': 1.0},
            },
        ),
        (
            'no coupled marginals, structural or proximal term',
            {
                'solver': Solver('sinkhorn', backend='triton'),
                'weights': {'feature_penalty': 1.0, 'sample_penalty': 1.0, 'proximal': 1.0},
            },
        ),
    ],
)
def test_what_it_cannot_do(message, arguments, monkeypatch):
    monkeypatch.setattr(triton_room, 'INSTALLED', True)
    monkeypatch.setattr(triton_room, 'INTERPRETED', True)
    with pytest.raises(ValueError, match=message):
        pool(**arguments)
