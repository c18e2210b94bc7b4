import pytest
import torch

from rotp_vision import PoolOptions, ROTSetPool

OPTIONS = [
    PoolOptions('sinkhorn'),
    PoolOptions('badmm-e', structure=0.1, feature_scale='rms'),
    PoolOptions('badmm-q', feature_scale='log', prior='attention', prior_width=3),
]


@pytest.mark.parametrize('options', OPTIONS, ids=lambda o: o.solver)
def test_padded_equals_packed_equals_one_by_one(options):
    torch.manual_seed(0)
    pool = ROTSetPool(options, 4)
    lengths = [5, 1, 3]
    packed = torch.rand(9, 4)
    padded = torch.full((3, 6, 4), float('nan'))
    mask = torch.zeros(3, 6, dtype=torch.bool)
    alone = []
    for i, one in enumerate(packed.split(lengths)):
        padded[i, : len(one)], mask[i, : len(one)] = one, True
        alone.append(pool(one.unsqueeze(0)))
    expected = torch.cat(alone)
    torch.testing.assert_close(pool(packed, lengths=lengths), expected)
    torch.testing.assert_close(pool(packed, lengths=torch.tensor(lengths)), expected)
    padded.requires_grad_()
    pooled = pool(padded, mask)
    torch.testing.assert_close(pooled, expected)
    pooled.sum().backward()
    assert torch.equal(padded.grad[~mask], torch.zeros_like(padded.grad[~mask]))
    assert torch.isfinite(padded.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in pool.parameters())


def test_vmap_over_masked_sets():
    pool, x, mask = ROTSetPool(PoolOptions(prior='norm')), torch.rand(2, 3, 4, 5), torch.rand(2, 3, 4) > 0.5
    mask[..., 0] = True
    expected = torch.stack([pool(*one) for one in zip(x, mask, strict=True)])
    torch.testing.assert_close(torch.vmap(pool)(x, mask), expected)


def test_bad_input():
    pool = ROTSetPool()
    with pytest.raises(ValueError, match=r'x must be sets of shape \(B, N, D\), or .*, got \(3, 4\)'):
        pool(torch.rand(3, 4))
    with pytest.raises(ValueError, match='add up to 4 with least 1 for x of shape'):
        pool(torch.rand(5, 4), lengths=[3, 1])
    with pytest.raises(ValueError, match='lengths must be positive'):
        pool(torch.rand(3, 4), lengths=[3, 0])
    with pytest.raises(ValueError, match='got none in set'):
        pool(torch.rand(2, 3, 4), torch.tensor([[True] * 3, [False] * 3]))
