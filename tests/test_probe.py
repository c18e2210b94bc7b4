"""Probing: poolings and closed-form classifiers on the maps of a frozen network."""

import pytest
import torch
from torch.nn import functional as F

from rotp_vision import fit_probe
from rotp_vision.probing.fit import balanced_accuracy, balanced_difference
from rotp_vision.probing.ridge import RidgeFolds, assign_folds, class_weights


def grouped(num_classes=4, groups_of_class=5, frames=6):
    """Targets and groups of videos of one class each."""
    groups = torch.arange(num_classes * groups_of_class * frames) // frames
    return groups % num_classes, groups


def spotted(targets, size=7, channels=12, strength=3.0, seed=0):
    """Maps of noise whose class shows at one place of each, in the channel of its number."""
    generator = torch.Generator().manual_seed(seed)
    maps = torch.rand(len(targets), channels, size * size, generator=generator)
    places = torch.randint(size * size, (len(targets),), generator=generator)
    maps[torch.arange(len(targets)), targets, places] += strength
    return maps.unflatten(2, (size, size))


# The ridge


@pytest.mark.parametrize('num_features', [7, 60])  # fewer and more than images: 60 are rotated
@pytest.mark.parametrize('left_out', [(1,), (0, 2), ()])
def test_a_fit_solves_its_normal_equations(num_features, left_out):
    generator = torch.Generator().manual_seed(0)
    targets = torch.tensor([0] * 12 + [1] * 5 + [2] * 13)
    features = torch.randn(30, num_features, generator=generator) * torch.logspace(-2, 2, num_features) + 3
    folds = torch.arange(30) % 3
    ridge = RidgeFolds(features, targets, folds, 3, penalty=0.5)
    # The defining problem, in float64 and with the bias as a column: Σ w ‖y − W z − b‖² + λ ‖W‖².
    x, w = features.double(), class_weights(targets).double()
    mean = w @ x
    z = (x - mean) / (w @ (x - mean).square()).sqrt()
    kept = ~torch.isin(folds, torch.tensor(left_out))
    z1 = torch.cat([z, torch.ones(30, 1)], 1)
    root = w[kept].sqrt()[:, None]
    penalty = torch.eye(num_features + 1, dtype=torch.float64) * 0.5 * num_features / kept.sum() * w[kept].sum()
    penalty[-1, -1] = 0
    a = root * z1[kept]
    solution = torch.linalg.solve(a.T @ a + penalty, a.T @ (root * F.one_hot(targets, 3)[kept]))
    if left_out:
        images, logits = ridge.held_out(*left_out)
        assert images.tolist() == (~kept).nonzero().squeeze(1).tolist()
    else:
        images, logits = torch.arange(30), ridge.classifier()(features)
    torch.testing.assert_close(logits.double(), (z1 @ solution)[images], rtol=0, atol=2e-4)


def test_a_constant_feature_is_left_out():
    targets = torch.arange(30) % 3
    features = torch.randn(30, 6)
    with_constant = torch.cat([features, torch.full((30, 2), 7.0)], 1)
    folds = torch.zeros(30, dtype=torch.long)
    classifier = RidgeFolds(with_constant, targets, folds, 3, penalty=0.3).classifier()
    assert not classifier.weight[:, 6:].any()
    plain = RidgeFolds(features, targets, folds, 3, penalty=0.3 * 8 / 6).classifier()
    torch.testing.assert_close(classifier(with_constant), plain(features), rtol=0, atol=1e-5)


def test_classes_weigh_the_same():
    targets = torch.tensor([0] * 90 + [1] * 10)
    weights = class_weights(targets)
    assert float(weights[:90].sum()) == pytest.approx(0.5)
    assert float(weights.sum()) == pytest.approx(1)


# The folds and the score


def test_no_group_is_divided_and_classes_are_spread():
    targets, groups = grouped(num_classes=4, groups_of_class=7, frames=3)
    order = torch.randperm(len(targets))
    folds = assign_folds(targets[order], groups[order], 5)
    for group in range(28):
        assert len(folds[groups[order] == group].unique()) == 1
    counts = torch.zeros(5, 4).index_put((folds, targets[order]), torch.ones(len(order)), accumulate=True)
    assert counts.amin() >= 3  # of 21 images in 7 groups, every fold has a group or two
    assert counts.amax() <= 6
    assert counts.sum(1).amax() - counts.sum(1).amin() <= 3


def test_a_class_of_two_groups_is_in_two_folds():
    targets, groups = grouped(num_classes=3, groups_of_class=2, frames=4)
    folds = assign_folds(targets, groups, 3)
    for k in range(3):
        assert len(folds[targets == k].unique()) == 2


def test_the_standard_error_is_that_over_groups():
    targets, groups = grouped(num_classes=2, groups_of_class=50, frames=4)
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(400):
        ours = torch.randint(2, (100,), generator=generator)[groups].float()  # all frames of a video alike
        draws.append(balanced_difference(ours, torch.zeros(len(ours)), targets, groups))
    spread = torch.tensor([difference for difference, _ in draws]).std()
    said = torch.tensor([error for _, error in draws]).mean()
    assert float(said) == pytest.approx(float(spread), rel=0.1)
    ours = torch.randint(2, (len(targets),), generator=generator).float()
    difference, _ = balanced_difference(ours, 1 - ours, targets, groups)
    assert difference == pytest.approx(balanced_accuracy(ours, targets) - balanced_accuracy(1 - ours, targets))


# The choice


def test_small_objects_are_found():
    targets, groups = grouped()
    maps = spotted(targets)
    result = fit_probe(maps, targets, groups)
    average, ours = result.rows[0], result.rows[-1]
    assert result.chosen is ours
    assert ours.score > average.score + 0.1
    others = spotted(targets, seed=1)
    assert balanced_accuracy((result.predict(others) == targets).float(), targets) > average.score + 0.1
    assert 'ROTP (chosen)' in str(result)
    assert '120 images in 20 groups, 4 classes, 5 folds' in str(result)


def test_average_is_kept_where_nothing_beats_it():
    targets, groups = grouped()
    generator = torch.Generator().manual_seed(0)
    maps = 20 + 4 * torch.randn(len(targets), 12, 5, 5, generator=generator)
    maps[torch.arange(len(targets)), targets] += 2  # everywhere alike: the mean is the best estimate
    result = fit_probe(maps, targets, groups)
    assert result.chosen is result.rows[0]
    assert 'average pooling is chosen' in str(result)
    mean = maps.mean((2, 3))
    torch.testing.assert_close(result.logits(maps), result.classifier(mean))


def test_groups_matter():
    """Noise of a video tells its frames apart from those of others, so that divided groups would flatter the score."""
    targets, groups = grouped()
    generator = torch.Generator().manual_seed(0)
    maps = torch.rand(20, 30, 3, 3, generator=generator)[groups]
    maps = maps + 0.01 * torch.rand(len(targets), 30, 3, 3, generator=generator)
    assert fit_probe(maps, targets).rows[0].score > 0.9
    assert fit_probe(maps, targets, groups).rows[0].score < 0.5


def test_parameters_are_chosen_without_the_fold_they_are_judged_on(monkeypatch):
    """Of many poolings that guess, the best by luck must not score above chance."""
    from rotp_vision.probing import fit
    from rotp_vision.probing.poolings import Pooling, all_poolings

    def guess(seed):
        noise = torch.randn(400, 12, generator=torch.Generator().manual_seed(seed))
        return Pooling('ROTP', f'{seed}', lambda sets: noise[sets[:, 0, 0].long()])

    monkeypatch.setattr(fit, 'all_poolings', lambda: [all_poolings()[0], *map(guess, range(40))])
    targets = torch.arange(200) % 2
    maps = torch.arange(200.0)[:, None, None, None].expand(200, 12, 1, 1)
    result = fit_probe(maps, targets)
    assert result.rows[-1].score < 0.56  # the best of 40 guesses scores about 0.58 on the images it is chosen by


def test_tokens_are_maps_in_another_order():
    targets, groups = grouped()
    maps = spotted(targets)
    tokens = maps.flatten(2).transpose(1, 2)
    of_maps, of_tokens = fit_probe(maps, targets, groups), fit_probe(tokens, targets, groups)
    assert str(of_maps) == str(of_tokens)
    torch.testing.assert_close(of_maps.logits(maps), of_tokens.logits(tokens))


def test_half_precision_is_taken():
    targets, groups = grouped()
    maps = spotted(targets)
    torch.testing.assert_close(
        fit_probe(maps.half(), targets, groups).logits(maps.half()),
        fit_probe(maps, targets, groups).logits(maps),
        rtol=0,
        atol=0.02,
    )


def test_a_neck_comes_before_the_classifier():
    targets, groups = grouped()
    maps = spotted(targets)
    neck = torch.nn.LayerNorm(12, elementwise_affine=False)
    result = fit_probe(maps, targets, groups, neck=neck)
    plain = fit_probe(maps, targets, groups)
    assert [row.score for row in result.rows] != [row.score for row in plain.rows]
    features = neck(result.chosen.pooling(maps.flatten(2)))
    torch.testing.assert_close(result.logits(maps), result.classifier(features))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'targets': torch.zeros(120, dtype=torch.long)}, 'at least two classes, got 0 alone'),
        ({'targets': torch.arange(120) % 2 * 2}, 'there are none of 1'),
        ({'targets': torch.rand(120)}, 'targets must be class indices'),
        ({'targets': torch.arange(7)}, r'targets must be class indices \(120,\)'),
        ({'groups': torch.arange(3)}, r'groups must be integers \(120,\)'),
        ({'groups': torch.arange(120) % 4}, '5 folds need at least as many groups of images, got 4'),
        ({'groups': torch.arange(120) % 4 * 0 + grouped()[0] + 4 * (torch.arange(120) % 2 * (grouped()[0] > 0))},
         'all images of ant are in one'),
        ({'num_folds': 2}, 'at least 3'),
        ({'num_folds': 121}, '121 folds need at least as many'),
        ({'maps': torch.rand(120, 8)}, 'maps must be floating point'),
    ],
)  # fmt: skip
def test_what_cannot_be_probed_is_refused(change, message):
    targets, groups = grouped()
    given = {'maps': torch.rand(120, 8, 2, 2), 'targets': targets, 'groups': groups, 'num_folds': 5} | change
    with pytest.raises(ValueError, match=message):
        fit_probe(**given, class_names=['ant', 'bee', 'cat', 'dog'] if 'are in one' in message else None)
