"""Probing: poolings and closed-form classifiers on the maps of a frozen network."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rotp_vision import PoolOptions, fit_probe
from rotp_vision.probing import joint
from rotp_vision.probing.fit import balanced_difference, balanced_mean
from rotp_vision.probing.joint import train_jointly
from rotp_vision.probing.poolings import Pooling, all_poolings
from rotp_vision.probing.ridge import Linear, RidgeFolds, assign_folds, class_weights
from rotp_vision.probing.temperature import expected_calibration_error, fit_temperature


def grouped(num_classes=4, groups_of_class=5, frames=6):
    """Targets and groups of videos of one class each."""
    groups = torch.arange(num_classes * groups_of_class * frames) // frames
    return groups % num_classes, groups


def spotted(targets, size=7, channels=12, strength=3.0, seed=0):
    """Maps of noise whose class shows at one position, in the channel of its number."""
    generator = torch.Generator().manual_seed(seed)
    maps = torch.rand(len(targets), channels, size * size, generator=generator)
    positions = torch.randint(size * size, (len(targets),), generator=generator)
    maps[torch.arange(len(targets)), targets, positions] += strength
    return maps.unflatten(2, (size, size))


# The ridge


@pytest.mark.parametrize('num_features', [7, 60])  # fewer and more than images: the dual problem
@pytest.mark.parametrize('left_out', [(1,), (0, 2), ()])
def test_a_fit_solves_its_normal_equations(num_features, left_out):
    generator = torch.Generator().manual_seed(0)
    targets = torch.tensor([0] * 12 + [1] * 5 + [2] * 13)
    features = torch.randn(30, num_features, generator=generator) * torch.logspace(-0.3, 0.3, num_features) + 3
    folds = torch.arange(30) % 3
    ridge = RidgeFolds(features, targets, folds, 3, penalty=0.5)
    # The defining problem, in float64 and with the bias as a column: Σ w ‖y − W z − b‖² + λ ‖W‖².
    x = features.double()
    z = (x - x.mean(0)) / x.std(0, correction=0)
    kept = ~torch.isin(folds, torch.tensor(left_out))
    z1 = torch.cat([z, torch.ones(30, 1)], 1)
    root = class_weights(targets[kept]).double().sqrt()[:, None]
    penalty = torch.eye(num_features + 1, dtype=torch.float64) * 0.5 * num_features / kept.sum()
    penalty[-1, -1] = 0
    a = root * z1[kept]
    solution = torch.linalg.solve(a.T @ a + penalty, a.T @ (root * F.one_hot(targets, 3)[kept]))
    if left_out:
        images, logits = ridge.held_out(*left_out)
        assert images.tolist() == (~kept).nonzero().squeeze(1).tolist()
    else:
        images, logits = torch.arange(30), ridge.classifier()(features)
    torch.testing.assert_close(logits.double(), (z1 @ solution)[images], rtol=0, atol=2e-4)


@pytest.mark.parametrize('num_features', [7, 60])
def test_labels_of_a_fold_do_not_change_its_own_logits(num_features):
    features, targets, folds = torch.randn(30, num_features), torch.arange(30) % 3, torch.arange(30) // 10
    _, logits = RidgeFolds(features, targets, folds, 3).held_out(0)
    others = torch.where(folds == 0, 0, targets)
    assert torch.equal(RidgeFolds(features, others, folds, 3).held_out(0)[1], logits)


def test_a_constant_feature_is_left_out():
    targets, features, folds = torch.arange(30) % 3, torch.randn(30, 6), torch.zeros(30, dtype=torch.long)
    with_constant = torch.cat([features, torch.full((30, 2), 7.0)], 1)
    classifier = RidgeFolds(with_constant, targets, folds, 3, penalty=0.3).classifier()
    plain = RidgeFolds(features, targets, folds, 3, penalty=0.3 * 8 / 6).classifier()
    torch.testing.assert_close(classifier(with_constant), plain(features), rtol=0, atol=1e-5)


def test_a_feature_that_hardly_varies_does_not_explode_on_other_images():
    targets, features, folds = torch.arange(30) % 3, torch.randn(30, 6), torch.zeros(30, dtype=torch.long)
    features[:, 5] *= 1e-5
    classifier = RidgeFolds(features, targets, folds, 3).classifier()
    far = torch.tensor([[0.0] * 5 + [1.0]])
    assert float((classifier(far) - classifier(torch.zeros(1, 6))).abs().max()) < 1


def test_classes_weigh_the_same():
    weights = class_weights(torch.tensor([0] * 90 + [1] * 10))
    assert float(weights[:90].sum()) == pytest.approx(float(weights[90:].sum())) == pytest.approx(0.5)


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
    targets, groups = grouped(num_classes=3, groups_of_class=2, frames=4)
    folds = assign_folds(targets, groups, 3)
    assert [len(folds[targets == k].unique()) for k in range(3)] == [2, 2, 2]


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
    assert difference == pytest.approx(balanced_mean(ours, targets) - balanced_mean(1 - ours, targets))


# The temperature


def test_a_temperature_makes_probabilities_of_outputs():
    logits = 3 * torch.randn(4000, 5)
    targets = logits.softmax(1).multinomial(1).squeeze(1)
    fitted = fit_temperature(logits / 7, targets, torch.arange(4000) % 5)
    assert fitted.factor == pytest.approx(7, rel=0.05)
    assert fitted.cross_entropy == pytest.approx(
        [float(F.cross_entropy(logits / t, targets)) for t in (7, 1)], rel=1e-3
    )
    assert fitted.calibration_error[0] > 0.3 > 0.03 > fitted.calibration_error[1]


def test_calibration_error_by_hand():
    """Two images of confidence 0.9 and two of 0.5, of which the first and the third are right."""
    logits = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.5001, 0.4999], [0.5001, 0.4999]]).log()
    assert expected_calibration_error(logits, torch.tensor([0, 1, 0, 1])) == pytest.approx(0.2, abs=1e-3)


def test_the_classifier_of_a_probe_gives_probabilities():
    targets, groups = grouped(num_classes=4, groups_of_class=20)
    result = fit_probe(spotted(targets, strength=1.0), targets, groups)
    others = spotted(targets, strength=1.0, seed=1)
    logits = result.logits(others)
    assert expected_calibration_error(logits, targets) < 0.1
    assert float(F.cross_entropy(logits, targets)) == pytest.approx(result.temperature.cross_entropy[1], rel=0.2)
    assert str(result.temperature) in str(result)


# The choice


def test_small_objects_are_found():
    targets, groups = grouped()
    maps = spotted(targets)
    result = fit_probe(maps, targets, groups)
    average, ours = result.rows[0], result.rows[-1]
    assert result.chosen is ours
    assert ours.score > average.score + 0.1
    others = spotted(targets, seed=1)
    assert balanced_mean((result.predict(others) == targets).float(), targets) > average.score + 0.1
    assert result.sentence.startswith('ROTP pays: +')
    assert '120 images in 20 groups, 4 classes, 5 folds' in str(result)


def test_average_is_kept_where_nothing_beats_it():
    targets, groups = grouped()
    generator = torch.Generator().manual_seed(0)
    maps = 20 + 4 * torch.randn(len(targets), 12, 5, 5, generator=generator)
    maps[torch.arange(len(targets)), targets] += 2  # everywhere alike: the mean is the best estimate
    result = fit_probe(maps, targets, groups)
    assert result.chosen is result.rows[0]
    assert 'Keep average pooling: ROTP has no clear gain' in str(result)
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

    def guess(seed):
        noise = torch.randn(400, 12, generator=torch.Generator().manual_seed(seed))
        return Pooling('guess', f'{seed}', lambda sets: noise[sets[:, 0, 0].long()], PoolOptions())

    monkeypatch.setattr(fit, 'all_poolings', lambda: [all_poolings()[0], *map(guess, range(40))])
    targets = torch.arange(200) % 2
    maps = torch.arange(200.0)[:, None, None, None].expand(200, 12, 1, 1)
    result = fit_probe(maps, targets)
    assert result.rows[-1].score < 0.56  # the best of 40 guesses scores about 0.58 on the images it is chosen by


def test_tokens_and_half_precision_give_the_same():
    targets, groups = grouped()
    maps = spotted(targets)
    result = fit_probe(maps, targets, groups)
    tokens = fit_probe(maps.flatten(2).transpose(1, 2), targets, groups)
    assert str(tokens) == str(result)
    half = fit_probe(maps.half(), targets, groups).logits(maps.half())
    torch.testing.assert_close(half.softmax(1), result.logits(maps).softmax(1), rtol=0, atol=0.02)


def test_a_neck_comes_before_the_classifier():
    targets, groups = grouped()
    maps = spotted(targets)
    neck = nn.LayerNorm(12, elementwise_affine=False)
    result = fit_probe(maps, targets, groups, neck=neck)
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
        ({'maps': torch.full((120, 8, 2, 2), torch.inf)}, 'maps must be finite'),
    ],
)  # fmt: skip
def test_what_cannot_be_probed_is_refused(change, message):
    targets, groups = grouped()
    given = {'maps': torch.rand(120, 8, 2, 2), 'targets': targets, 'groups': groups, 'num_folds': 5} | change
    with pytest.raises(ValueError, match=message):
        fit_probe(**given, class_names=['ant', 'bee', 'cat', 'dog'] if 'are in one' in message else None)


# Training


def test_pooling_and_classifier_are_trained_together():
    targets, groups = grouped()
    maps = spotted(targets)
    result = fit_probe(maps, targets, groups)
    trained = train_jointly(result, maps, targets, groups)
    row = trained.rows[-1]
    assert [row.name for row in trained.rows] == [*(row.name for row in result.rows), 'ROTP, trained']
    assert row.score > result.rows[0].score  # of average pooling
    start, end = (row.pooling.pool.named_weights() for row in (result.rows[-1], row))
    assert max(abs(float(end[name] / start[name]) - 1) for name in start) > 0.02
    assert not torch.is_grad_enabled() or not trained.logits(maps).requires_grad


@pytest.mark.parametrize('helps', [True, False])
def test_what_was_trained_is_kept_only_if_it_helps(helps, monkeypatch):
    targets, groups = grouped()
    maps = spotted(targets, strength=0.3)
    maps[:, 11, 0, 0] = 0.001 * targets  # so that the pretended pooling, and no other, tells the class
    result = fit_probe(maps, targets, groups)

    def pretended(start, maps, targets, num_classes, neck, bar):
        pooling = Pooling('ROTP, trained', '', lambda sets: 1000 * sets[:, 11, :1])
        classes = torch.arange(float(num_classes))
        return pooling, Linear(2 * classes[:, None] * helps, -classes.square())  # the nearest class

    monkeypatch.setattr(joint, '_train', pretended)
    trained = joint.train_jointly(result, maps, targets, groups)
    assert trained.rows[-1].score == pytest.approx(1.0 if helps else 0.25)
    assert trained.chosen is (trained.rows[-1] if helps else result.chosen)
    assert trained.classifier is (result.classifier if not helps else trained.classifier)
