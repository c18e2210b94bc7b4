import pytest
import torch

from rotp_vision import MixedROTPool2d, ROTPool, ROTSetFusion, ROTSetPool


def test_mixed_mean_max_is_the_papers():
    x = torch.randn(3, 4, 5, 5)
    pool = MixedROTPool2d.mean_max()
    with torch.no_grad():
        pool.omega.copy_(torch.tensor([1.0, -0.5]))
    omega = torch.sigmoid(torch.tensor(1.5))
    expected = omega * x.mean((2, 3)) + (1 - omega) * x.amax((2, 3))
    torch.testing.assert_close(pool(x), expected, rtol=1e-5, atol=1e-5)


def test_gated_mean_max_depends_on_the_image():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, 5)
    pool = MixedROTPool2d.mean_max(gated=True, num_features=4)
    torch.testing.assert_close(pool(x), (x.mean((2, 3)) + x.amax((2, 3))) / 2, rtol=1e-5, atol=1e-5)
    torch.nn.init.normal_(pool.gate.weight)
    omega = pool.gate(x.mean((2, 3))).softmax(1)
    expected = omega[:, :1] * x.mean((2, 3)) + omega[:, 1:] * x.amax((2, 3))
    torch.testing.assert_close(pool(x), expected, rtol=1e-5, atol=1e-5)
    assert omega.std(0).max() > 1e-3


def test_heads_are_pooled_each_and_then_fused():
    x = torch.rand(2, 4, 5, 5)
    pool = MixedROTPool2d(['sinkhorn', 'badmm-e', 'badmm-q'], 'badmm-e', flatten=False)
    heads = torch.stack([ROTPool(name).pool_sets(x.flatten(2)) for name in ('sinkhorn', 'badmm-e', 'badmm-q')], 2)
    torch.testing.assert_close(pool(x).flatten(1), ROTSetPool('badmm-e')(heads.transpose(1, 2)))
    pool(x).sum().backward()
    assert all(p.grad is not None for p in pool.parameters())


def test_half_precision_keeps_the_limits():
    x = torch.randn(2, 8, 7, 7)
    for dtype in (torch.float16, torch.bfloat16):
        pool = MixedROTPool2d.mean_max().to(dtype)
        torch.testing.assert_close(pool(x.to(dtype)), MixedROTPool2d.mean_max()(x.to(dtype).float()).to(dtype))


def test_a_file_without_one_of_the_heads_is_an_error():
    pool = MixedROTPool2d(['sinkhorn', 'badmm-e'])
    state = {key: value for key, value in pool.state_dict().items() if not key.startswith('heads.1')}
    with pytest.raises(RuntimeError, match='Missing key'):
        pool.load_state_dict(state)
    pool.load_state_dict({})  # of a native network


def test_mixed_errors():
    with pytest.raises(ValueError, match='heads must be at least two pooling options'):
        MixedROTPool2d(['sinkhorn'])
    with pytest.raises(ValueError, match='num_features must be given for a gated pooling'):
        MixedROTPool2d(['sinkhorn', 'badmm-e'], gated=True)
    with pytest.raises(ValueError, match='the fusing pooling learns its own prior'):
        MixedROTPool2d(['sinkhorn', 'badmm-e'], {'prior': 'attention'}, 4)


def test_set_fusion_is_two_poolings_with_a_network_between():
    x = torch.rand(2, 3, 4, 5, 5)
    network = torch.nn.Linear(4, 6)
    fuse = ROTSetFusion('sinkhorn', 'badmm-e', network)
    within = torch.stack([ROTPool('sinkhorn').pool_sets(x[:, m].flatten(2)) for m in range(3)], 1)
    torch.testing.assert_close(fuse(x), ROTSetPool('badmm-e')(network(within)))
    torch.testing.assert_close(fuse(x.flatten(3).transpose(2, 3)), fuse(x))


def test_set_fusion_leaves_out_what_is_masked():
    torch.manual_seed(0)
    x = torch.rand(2, 3, 5, 4)
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    mask[:, 2] = False
    mask[1, 0, 3:] = False
    fuse = ROTSetFusion('sinkhorn', 'badmm-e', torch.nn.Linear(4, 4))
    fused = fuse(x.masked_fill(~mask.unsqueeze(3), float('nan')), mask)
    torch.testing.assert_close(fused[0], fuse(x[:1, :2])[0])
    ragged = torch.stack([fuse.within.pool_sets(x[1:, 0, :3].mT), fuse.within.pool_sets(x[1:, 1].mT)], 1)
    torch.testing.assert_close(fused[1], fuse.between.pool_sets(fuse.network(ragged).mT)[0])
    with pytest.raises(ValueError, match='mask must be a bool tensor of shape'):
        fuse(x, mask[:, :2])
    with pytest.raises(ValueError, match='x must be maps'):
        fuse(x[0])
