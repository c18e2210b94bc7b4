import os
from pathlib import Path

import pytest
import torch

# Some virtual machines announce AMX and die of the first tile that torch's bfloat16 products load. Read at first use.
os.environ.setdefault('ONEDNN_MAX_CPU_ISA', 'AVX512_CORE_FP16')


def pytest_configure(config):
    if hasattr(config, 'workerinput'):  # one of several processes of pytest-xdist, which share the cores
        torch.set_num_threads(1)
        os.environ.setdefault('OMP_NUM_THREADS', '1')


def pytest_addoption(parser):
    parser.addoption(
        '--real-data',
        type=Path,
        metavar='DIRECTORY',
        help='run the tests on real images and weights too; the directory is laid out as benchmarks/real_data.py says',
    )


@pytest.fixture
def real_data(request):
    """The directory of `--real-data`, without which the test is skipped."""
    directory = request.config.getoption('--real-data')
    if directory is None:
        pytest.skip('needs real images and weights: give --real-data DIRECTORY')
    return directory


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    """Whatever ran before."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
