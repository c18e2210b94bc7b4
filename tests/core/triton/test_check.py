"""When 'auto' means Triton on a GPU: the check at first use, and what stands against it."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rotp_vision.core.triton import check
from tests.core.triton.test_sets import needs_triton, run

CONFIGURATION = check.Configuration('sets', 'cuda:0', 'sinkhorn', 'torch.float32', 'rms')
ON_GPU, ON_CPU = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
RIGHT = {'output': torch.ones(2, 3), 'features': torch.ones(2, 3, 4), 'step': torch.ones(2), 'gain': torch.ones(())}


@needs_triton
def test_with_kernels_in_the_interpreter():
    """See `auto_interpreted`, which this runs."""
    run('-m', 'pytest', '-x', 'tests/core/triton/auto_interpreted.py', TRITON_INTERPRET='1', OMP_NUM_THREADS='1')


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(check, '_verdicts', {})


def capturing(monkeypatch, value: bool) -> None:
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: value)


def test_nothing_is_checked_while_a_graph_is_captured(monkeypatch):
    capturing(monkeypatch, True)
    assert not check.trusted(CONFIGURATION, (64, 16), lambda: pytest.fail('a check'), ON_GPU)
    capturing(monkeypatch, False)
    assert check.trusted(CONFIGURATION, (64, 16), lambda: (RIGHT, RIGHT), ON_GPU)
    capturing(monkeypatch, True)  # now what is known of the configuration counts
    assert check.trusted(CONFIGURATION, (64, 16), lambda: pytest.fail('a check'), ON_GPU)
    assert check.trusted(CONFIGURATION, (16, 64), lambda: pytest.fail('a check'), ON_GPU)
    assert not check.trusted(CONFIGURATION._replace(view='log'), (64, 16), lambda: pytest.fail('a check'), ON_GPU)


def test_one_tile_that_failed_is_enough_where_nothing_can_be_checked(monkeypatch):
    wrong = RIGHT | {'step': torch.tensor([1.0, 1.1])}
    assert check.trusted(CONFIGURATION, (1,), lambda: (RIGHT, RIGHT), ON_CPU)
    assert check.known(*CONFIGURATION)
    with pytest.warns(UserWarning, match=r"in 'step', by 0.1 of 1 .*tile \(2,\).*--device cuda:0"):
        assert not check.trusted(CONFIGURATION, (2,), lambda: (wrong, RIGHT), ON_CPU)
    assert check.trusted(CONFIGURATION, (1,), lambda: pytest.fail('a second check'), ON_CPU)
    assert not check.known(*CONFIGURATION)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not check.trusted(CONFIGURATION, (2,), lambda: pytest.fail('a second check'), ON_CPU)


@pytest.mark.parametrize(
    ('name', 'error', 'agrees'),
    [
        ('output', 9e-5, True), ('output', 2e-4, False), ('features', 2e-4, False), ('features', float('nan'), False),
        ('step', 9e-4, True), ('step', 2e-3, False), ('gain', float('nan'), False), ('gain', 2e-3, False),
    ],
)  # fmt: skip
def test_what_agreement_is(name, error, agrees):
    got = {key: value + error if key == name else value for key, value in RIGHT.items()}
    assert (check.disagreement(got, {key: value.double() for key, value in RIGHT.items()}) is None) == agrees


def test_too_little_memory_is_no_verdict():
    def results():
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        check.trusted(CONFIGURATION, (1,), results, ON_CPU)
    assert check.trusted(CONFIGURATION, (1,), lambda: (RIGHT, RIGHT), ON_CPU)


def test_traces():
    x = torch.zeros(2)
    assert not check.is_traced(x)
    assert not check.is_traced(torch.nn.Parameter(x))
    with FakeTensorMode() as mode:
        assert check.is_traced(x)  # whatever is made now has no values
    assert check.is_traced(mode.from_tensor(x))
    seen = []
    torch.vmap(lambda y: seen.append(check.is_traced(y)) or y)(x)
    torch.func.grad(lambda y: seen.append(check.is_traced(y)) or y.sum())(x)
    torch.jit.trace(lambda y: seen.append(check.is_traced(y)) or y + 1, x, check_trace=False)
    torch.fx.experimental.proxy_tensor.make_fx(lambda y: seen.append(check.is_traced(y)) or y + 1)(x)
    assert seen == [True] * 4
