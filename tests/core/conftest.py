import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Of tensors as small as these two threads would do nothing but wait for each other."""
    torch.set_num_threads(1)
