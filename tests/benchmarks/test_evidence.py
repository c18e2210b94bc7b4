"""Metrics of the evidence on hand-made numbers, and the whole command on tiny random maps."""

import pytest
import torch
from scipy import stats
from torch import nn

from benchmarks import evidence, small_objects
from benchmarks.evidence_poolings import (
    AVERAGE,
    AVERAGE_GAIN,
    GAINS,
    POOLINGS,
    POWERS,
    MeanMax,
    Outcome,
    PowerMean,
    Recipe,
    calibration_error,
    choose_start,
    fit,
    judge,
    paired_test,
    per_image,
    split,
)
from benchmarks.paper import Results
from rotp_vision.layers import MixedROTPool2d

TINY = Recipe(fit=40, choose=20, judge=24, batch=10)


@pytest.fixture(scope='module')
def data():
    """Maps (images, 8, 3, 3) whose mean says the class once it is halved: a gain of 1/2 is right."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(6, (80,), generator=generator)
    maps = torch.rand(80, 8, 3, 3, generator=generator)
    maps[torch.arange(80), labels] += 1.0
    classifier = nn.Linear(8, 6)
    with torch.no_grad():
        classifier.weight.copy_(8 * torch.eye(6, 8))
        classifier.bias.zero_()
    return maps, labels, classifier.requires_grad_(False)


def test_split_is_disjoint_seeded_and_of_the_sizes_asked_for():
    to_fit, to_judge = split(100, TINY, seed=1)
    assert (len(to_fit), len(to_judge)) == (40, 24)
    assert not set(to_fit.tolist()) & set(to_judge.tolist())
    assert torch.equal(split(100, TINY, seed=1)[1], to_judge)
    assert not torch.equal(split(100, TINY, seed=2)[1], to_judge)
    with pytest.raises(ValueError, match='fit must leave images of 40'):
        split(40, TINY, seed=0)


def test_calibration_error():
    # Two bins of fifteen: 3 images at 0.9 of which 2 are right, 1 at 0.5 which is right.
    confidence, correct = torch.tensor([0.9, 0.9, 0.9, 0.5]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    expected = 3 / 4 * abs(2 / 3 - 0.9) + 1 / 4 * abs(1 - 0.5)
    assert calibration_error(confidence, correct) == pytest.approx(expected, rel=1e-6)
    assert calibration_error(torch.ones(5), torch.ones(5)) == 0
    # In one bin the two errors, of opposite sign, cancel in part: accuracy 3/4, mean confidence 0.8.
    assert calibration_error(confidence, correct, num_bins=1) == pytest.approx(0.8 - 3 / 4, rel=1e-6)


def test_paired_test_agrees_with_scipy():
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(5000, generator=generator, dtype=torch.float64)
    theirs = ours + 0.3 * torch.randn(5000, generator=generator, dtype=torch.float64) + 0.01
    change, error, p = paired_test(ours - theirs)
    expected = stats.ttest_rel(ours, theirs)
    assert change == pytest.approx((ours - theirs).mean().item())
    assert change / error == pytest.approx(expected.statistic)
    assert p == pytest.approx(expected.pvalue, rel=1e-2)  # t with 4999 degrees of freedom against normal
    assert paired_test(torch.zeros(10)) == (0.0, 0.0, 1.0)


def test_per_image_averages_over_the_seeds_that_judged_the_image():
    def outcome(index, loss):
        loss = torch.tensor(loss)
        return Outcome(torch.tensor(index), loss, loss, loss, loss)

    ours = [outcome([0, 1], [3.0, 5.0]), outcome([1, 3], [2.0, 1.0])]
    theirs = [outcome([0, 1], [1.0, 1.0]), outcome([1, 3], [0.0, 1.0])]
    assert per_image(ours, theirs, 'loss', 5).tolist() == [2.0, 3.0, 0.0]
    with pytest.raises(ValueError, match='the same images'):
        per_image(ours, theirs[::-1], 'loss', 5)


def test_judge(data):
    maps, labels, classifier = data
    index = torch.tensor([4, 7, 9])
    outcome = judge(POOLINGS[AVERAGE](8), classifier, maps, labels, index)
    logits = classifier(maps[index].mean((2, 3)))
    assert torch.allclose(outcome.loss, logits.log_softmax(1)[range(3), labels[index]].neg())
    assert outcome.top1.tolist() == (logits.argmax(1) == labels[index]).float().tolist()


def test_start_is_the_best_of_the_grid(data):
    maps, labels, classifier = data
    pool = PowerMean(gain=True)
    choose_start(pool, classifier, maps, labels)

    def loss(power, gain):
        pooled = maps.flatten(2).pow(power).mean(2).pow(1 / power)
        return nn.functional.cross_entropy(classifier(gain * pooled), labels).item()

    assert (pool.power().item(), pool.gain().item()) == pytest.approx(
        min(((power, gain) for power in POWERS for gain in GAINS), key=lambda pair: loss(*pair))
    )


def test_mean_max_is_the_mixed_pooling():
    x = torch.rand(3, 8, 4, 4)
    mixed, plain = MixedROTPool2d.mean_max(), MeanMax()
    plain.set_share(0.7)
    with torch.no_grad():
        mixed.omega.copy_(plain.omega)
    assert torch.allclose(plain(x), mixed(x), atol=1e-5)
    assert torch.allclose(plain(x), 0.7 * x.mean((2, 3)) + 0.3 * x.amax((2, 3)))


@pytest.mark.parametrize('name', POOLINGS)
def test_every_pooling_is_fitted(data, name):
    maps, labels, classifier = data
    torch.manual_seed(0)
    pool = POOLINGS[name](8)
    to_fit, to_judge = split(len(labels), TINY, seed=0)
    before = [parameter.detach().clone() for parameter in pool.parameters()]
    fit(pool, classifier, maps, labels, to_fit, TINY, seed=0)
    assert all(not torch.equal(old, new) for old, new in zip(before, pool.parameters(), strict=True))
    assert judge(pool, classifier, maps, labels, to_judge).loss.isfinite().all()


def test_command(data, tmp_path, monkeypatch, capsys):
    """Fits, keeps, goes on where it was, and puts tables and plots in their places on the page."""
    maps, labels, classifier = data
    model = nn.Module()
    model.get_classifier = lambda: classifier
    monkeypatch.setattr(evidence, 'build', lambda *_: model)
    monkeypatch.setattr(evidence, 'maps_of', lambda *_: (maps, labels))
    monkeypatch.setattr(evidence, 'Recipe', lambda: TINY)
    monkeypatch.setattr(torch, 'set_flush_denormal', lambda _: None)  # other tests count on them
    names = (AVERAGE, AVERAGE_GAIN, 'Sinkhorn rms, gain')
    monkeypatch.setattr(evidence, 'POOLINGS', {name: POOLINGS[name] for name in names})
    page = tmp_path / 'EVIDENCE.md'
    page.write_text('<!-- table: resnet50_v1_in1k_poolings -->\n<!-- end -->\n')
    command = ['--data', '.', '--networks', 'resnet50_v1_in1k', '--seeds', '2', '--threads', '1']
    command += ['--output', str(tmp_path / 'out'), '--page', str(page)]
    evidence.main(command)
    assert capsys.readouterr().out.count('cross-entropy') == 6
    first = page.read_text('utf-8')
    assert all(f'| {name} |' in first for name in names)
    assert (tmp_path / 'figures' / 'evidence_poolings.png').exists()
    evidence.main(command)
    assert capsys.readouterr().out.count('cross-entropy') == 0
    assert page.read_text('utf-8') == first


def test_small_objects(tmp_path, monkeypatch):
    monkeypatch.setattr(small_objects, 'RADII', (0.1, 0.2))
    results = Results(tmp_path)
    small_objects.report(results, seeds=1, num_train=32, num_test=8, epochs=1)
    table = results.tables['small_objects_sizes']
    assert all(name in table for name in (*small_objects.FROM_SCRATCH, small_objects.FITTED_AFTERWARDS))
    assert [path.name for path in results.figures] == ['small_objects.png']
