"""Working memory of the explicit operators, and exponentials that cannot underflow."""

import math

import pytest
import torch

from rotp_vision.core.explicit.scratch import (
    CHUNK_ELEMENTS,
    ChunkSize,
    Exponents,
    Scratch,
    chunks,
    exponent_limit,
    exponentials,
    extremes,
)


def start(num_sets: int, num_features: int, num_samples: int, dtype=torch.float32) -> Scratch:
    scratch = Scratch(torch.empty(num_sets, num_features, num_samples), num_sets, dtype)
    scratch.start(num_sets)
    return scratch


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('dim', [1, 2])
@pytest.mark.parametrize('shifted', [True, False])
def test_an_exponential_is_zero_or_far_from_underflow(dtype, dim, shifted):
    """One that underflows takes a hundred times longer, and what it is multiplied by too."""
    limit = exponent_limit(dtype)
    y = torch.linspace(-10 * limit, 0, 4 * 8 * 6, dtype=dtype).view(4, 8, 6)
    y[:, :, -1] = y[:, -1:, -1] = 0.0  # so that no sum is too small without a shift
    exponents = Exponents(summable=not shifted, may_underflow=True)
    scratch = start(4, 8, 6, dtype)
    in_unit = scratch.unit * y
    y = in_unit.double() / scratch.unit
    got, total, top = exponentials(in_unit, dim, scratch, exponents)
    assert (top is not None) == shifted
    expected = (y - y.amax(dim, keepdim=True) if shifted else y).exp()
    expected, rtol = expected.to(dtype), 1e-12 if shifted and dtype == torch.float64 else 1e-6
    torch.testing.assert_close(total, expected.sum(dim, keepdim=True), rtol=rtol, atol=0)
    kept = got[got > 0]
    assert kept.min() > math.exp(-limit) * 0.99
    torch.testing.assert_close(got, expected.where(got > 0, torch.zeros_like(got)), rtol=1e-5, atol=0)
    assert (expected[got == 0] <= 1.01 * math.exp(-limit / 2)).all()


def test_a_masked_sample_has_no_exponential():
    masked = torch.tensor([False, True, False]).expand(2, 1, 3)
    for summable, hidden in ((True, 0.0), (False, -torch.inf)):
        y = torch.randn(2, 4, 3).masked_fill(masked, hidden)
        got, total, _ = exponentials(y, 2, start(2, 4, 3), Exponents(summable, not summable), masked)
        assert torch.equal(got[:, :, 1], torch.zeros(2, 4))
        torch.testing.assert_close(total, got[:, :, [0, 2]].sum(2, keepdim=True))


def test_memory_that_nobody_holds_is_used_again():
    scratch = start(4, 8, 6)
    first, second = scratch.take(), scratch.take()
    assert first.shape == second.shape == (4, 8, 6)
    assert first.data_ptr() != second.data_ptr()
    place = first.data_ptr()
    del first
    scratch.start(2)
    third, fourth = scratch.take(samples_last=True), scratch.take()
    assert third.data_ptr() == place
    assert third.is_contiguous()
    assert third.shape == fourth.shape == (2, 8, 6)
    assert len({x.data_ptr() for x in (second, third, fourth)}) == 3


def test_a_stack_is_contiguous_and_fits_a_smaller_chunk():
    scratch = start(4, 8, 6)
    for num_sets in (4, 4, 2):
        scratch.start(num_sets)
        whole, buffers = scratch.stack(3)
        for i, buffer in enumerate(buffers):
            assert buffer.shape == (num_sets, 8, 6)
            buffer.fill_(i)
        assert torch.equal(whole, torch.arange(3.0).unsqueeze(1).expand(3, num_sets * 8 * 6))


@pytest.mark.parametrize(
    ('num_sets', 'most', 'threads', 'sizes'),
    [
        (32, 5, 2, [4] * 8),  # not 5, of which one thread would do three
        (32, 10, 2, [8] * 4),  # not 10, 10, 10 and 2
        (9, 4, 1, [3] * 3),
        (7, 6, 2, [4, 3]),
        (3, 8, 2, [3]),
        (3, 1, 2, [1] * 3),
        (0, 4, 2, []),
    ],
)
def test_chunks_are_even(monkeypatch, num_sets, most, threads, sizes):
    monkeypatch.setattr(torch, 'get_num_threads', lambda: threads)
    monkeypatch.setitem(CHUNK_ELEMENTS, 'cpu', most * 48 / threads)
    slices = [sets for sets, _ in chunks(torch.empty(num_sets, 8, 6), ChunkSize(), torch.float32)]
    assert [r.stop - r.start for r in slices] == sizes
    assert [i for r in slices for i in range(r.start, r.stop)] == list(range(num_sets))


def test_products_have_a_set_for_every_thread(monkeypatch):
    """However large a set is, unless the batch is to be cut finer."""
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 4)
    monkeypatch.setitem(CHUNK_ELEMENTS, 'cpu', 8)

    def size(chunk_size: ChunkSize) -> int:
        (sets, _), *_ = chunks(torch.empty(32, 8, 6), chunk_size, torch.float32)
        return sets.stop

    assert size(ChunkSize()) == 1
    assert size(ChunkSize(multiplies=True)) == 4
    assert size(ChunkSize(multiplies=True, parts=16)) == 2


def test_extremes_whatever_is_contiguous():
    values = torch.randn(3, 5, 7)
    assert extremes(values) == extremes(values.mT.contiguous().mT) == (values.min().item(), values.max().item())
