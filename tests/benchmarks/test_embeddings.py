"""The benchmark of feature vectors: its peers, its choices, and that what is written follows from its results."""

import torch
from torch.nn import functional as F

from benchmarks import embeddings
from benchmarks.embeddings import AS_IS, Results, crow, rmac


def test_report_and_docs_say_what_the_results_say():
    assert embeddings.is_current()


def test_peers_are_their_formulas():
    maps = torch.rand(2, 5, 7, 7) * (torch.rand(2, 5, 7, 7) > 0.3)
    sums = maps.sum(1)
    spatial = (sums / sums.square().sum((1, 2), keepdim=True).sqrt()).sqrt()
    present = (maps > 0).float().mean((2, 3))
    expected = torch.einsum('bchw,bhw->bc', maps, spatial) * (present.sum(1, keepdim=True) / present).log()
    torch.testing.assert_close(crow(maps), expected, rtol=1e-4, atol=1e-5)
    corners = [maps[:, :, y : y + 4, x : x + 4].amax((2, 3)) for y in (0, 3) for x in (0, 3)]
    regions = [maps.amax((2, 3)), *corners]
    torch.testing.assert_close(rmac(maps, scales=2), sum(F.normalize(region) for region in regions))


def row(images, setting, recall, network='A'):
    cell = {'network': network, 'images': images, 'px': '224'}
    return cell | {'pooling': 'ROTP', 'setting': setting, 'after': AS_IS, 'R@1': str(recall), 'mAP': str(recall)}


def test_a_setting_is_scored_where_it_was_not_chosen():
    rows = [row('birds', 'x', 90), row('birds', 'y', 50), row('tiles', 'x', 60), row('tiles', 'y', 65)]
    results = Results(rows)
    assert results.choose('ROTP') == ('ROTP', 'x')  # regret 5 against 40
    assert results.choose('ROTP', without='birds') == ('ROTP', 'y')
    assert results.mean(('ROTP', 'x'), AS_IS, 'R@1') == 75


def test_positions_of_two_sizes_are_one_set():
    maps = [torch.rand(3, 4, 7, 7).half(), torch.rand(3, 4, 9, 9).half()]
    average = embeddings.pooled(embeddings.SETTINGS[0], maps)
    both = torch.cat([one.float().flatten(2) for one in maps], 2)
    torch.testing.assert_close(average, both.mean(2))
