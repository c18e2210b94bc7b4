import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Of tensors as small as these two threads would do nothing but wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
