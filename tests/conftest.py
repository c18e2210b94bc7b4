import os

import pytest
import torch

# Some virtual machines announce AMX and die of the first tile that torch's bfloat16 products load. Read at first use.
os.environ.setdefault('ONEDNN_MAX_CPU_ISA', 'AVX512_CORE_FP16')


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    """Whatever ran before."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
