"""The parts of the evidence on hand-made numbers, and the whole command on generated images."""

import argparse
import io

import numpy as np
import pytest
import torch
from datasets import Dataset, Image
from PIL import Image as Pillow
from torch import nn

from benchmarks import evidence, evidence_classes, probe, real_data
from benchmarks.evidence_poolings import (
    ALONE,
    AVERAGE,
    GEM,
    INSTALLED,
    OURS,
    PEERS,
    Maps,
    gem,
    judge_peers,
    mean_max,
)
from benchmarks.evidence_report import Setting, of_classes, verdict
from benchmarks.real_data import NETWORKS, maps_of
from rotp_vision.layers import MixedROTPool2d

RESNET = NETWORKS[0]


def test_mean_max_is_the_mixed_pooling():
    x = torch.rand(3, 8, 4, 4)
    mixed = MixedROTPool2d.mean_max()
    with torch.no_grad():
        mixed.omega.copy_(torch.tensor([0.7, 0.3]).log())
    assert torch.allclose(mean_max(0.7)(x.flatten(2)), mixed(x), atol=1e-5)


@pytest.fixture(scope='module')
def halved():
    """Maps whose mean says the class once it is halved, and a classifier: a gain of 1/2 is right."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(6, (80,), generator=generator)
    maps = torch.rand(80, 8, 3, 3, generator=generator)
    maps[torch.arange(80), labels] += 0.2
    classifier = nn.Linear(8, 6).requires_grad_(False)
    classifier.weight.copy_(8 * torch.eye(6, 8))
    classifier.bias.copy_(torch.linspace(0, 1, 6))
    return Maps([maps], labels), classifier


def test_peers_choose_on_some_images_and_are_judged_on_others(halved):
    maps, classifier = halved
    fit, judged = torch.arange(40), torch.arange(40, 80)
    outcomes = judge_peers(list(PEERS), classifier, maps, fit, judged)

    def loss(images, power, gain):
        logits = classifier(gain * gem(power)(maps.sets(images)))
        return nn.functional.cross_entropy(logits, maps.labels[images], reduction='none')

    assert torch.allclose(outcomes[AVERAGE].loss, loss(judged, 1.0, 1.0), atol=1e-4)
    chosen = outcomes[GEM].setting
    power, gain = (float(part.split()[-1]) for part in chosen.split(', '))
    assert torch.allclose(outcomes[GEM].loss, loss(judged, power, gain), atol=2e-2)  # the gain is printed in short
    best = loss(fit, power, gain).mean()
    assert best < min(loss(fit, power, factor * gain).mean() for factor in (0.9, 1.1))
    assert all(best <= loss(fit, other, gain).mean() + 1e-4 for other in (1.25, 2.0, 5.0) if other != power)


def test_labels_are_drawn_from_other_groups_than_those_judged():
    groups = torch.arange(120) // 4
    targets = groups % 3
    fit, judged = evidence_classes.draw(targets, groups, 5, seed=1)
    assert targets[fit].bincount().tolist() == [5, 5, 5]
    assert not set(groups[fit].tolist()) & set(groups[judged].tolist())
    assert len(groups[fit][targets[fit] == 0].unique()) == 5  # as many groups as images
    assert not torch.equal(evidence_classes.draw(targets, groups, 5, seed=2)[0], fit)


def setting(task, family, **scores):
    shares = {name: torch.full((4,), score / 4) for name, score in scores.items()}
    return Setting('ResNet-50', family, task, shares, {}, dict.fromkeys(scores, ''))


def test_regret_and_verdict():
    one = setting('a', 'plain', **{AVERAGE: 60.0, GEM: 64.0, OURS: 63.0})
    two = setting('b', 'small objects', **{AVERAGE: 40.0, GEM: 41.0, OURS: 45.0})
    assert one.regrets == {AVERAGE: 4.0, GEM: 0.0, OURS: 1.0}
    assert one.difference(OURS, AVERAGE) == pytest.approx((3.0, 3.0, 3.0))
    lines = verdict([one, two])
    assert f'{OURS} 0.50, {GEM} 2.00, {AVERAGE} 4.50. Ours is number 1 of 3' in lines[0]
    assert 'gains +5.00 points' in lines[2]
    assert 'the worst in 1 of them: ResNet-50, c' in verdict([setting('c', 'plain', **{AVERAGE: 2.0, OURS: 1.0})])[1]


def test_the_interval_is_over_groups():
    """Three images of one group that are right together are one event, not three."""
    judged = torch.arange(6)
    found = {
        'targets': torch.tensor([0, 0, 0, 1, 1, 1]),
        'groups': torch.tensor([4, 4, 4, 7, 8, 9]),
        'runs': [
            {'labels': 5, 'judged': judged, 'setting': {}, 'right': {OURS: torch.ones(6), AVERAGE: torch.zeros(6)}}
        ],
    }
    result = of_classes('ResNet-50', 'foda15', found, 5)
    assert result.scores == pytest.approx({OURS: 100.0, AVERAGE: 0.0})
    assert len(result.shares[OURS]) == 4
    assert sorted(result.shares[OURS].tolist()) == pytest.approx([100 / 6, 100 / 6, 100 / 6, 50.0])
    _, low, high = result.difference(OURS, AVERAGE)
    assert low < 70 < 130 < high


BUILDERS = """
import timm, torch

def resnet50_v1_in1k():
    torch.manual_seed(0)
    return timm.create_model('test_resnet', num_classes=4)
"""


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """A data directory with a tiny network and generated photos, whose colour tells the class."""
    root = tmp_path_factory.mktemp('data')
    (root / 'images').mkdir()
    (root / 'builders.py').write_text(BUILDERS)
    random = np.random.default_rng(0)

    def rows(count, classes, label):
        made = []
        for i in range(count):
            pixels = random.integers(0, 120, (64, 80, 3), dtype=np.uint8)
            pixels[10:40, 10:50, i % classes % 3] = 255
            file = io.BytesIO()
            Pillow.fromarray(pixels).save(file, 'PNG')
            made.append(
                {
                    'image': {'bytes': file.getvalue(), 'path': None},
                    label: i % classes,
                    'group': str(i // classes),
                    'file': f'{i}.png',
                }
            )
        return made

    for name, count, classes, label in (('in1k_dev', 40, 4, 'imagenet_index'), ('foda15', 45, 3, 'label')):
        table = Dataset.from_list(rows(count, classes, label)).cast_column('image', Image())
        table.to_parquet(root / 'images' / f'{name}.parquet')
    boxes = ''.join(f'{i}.png,80,64,10,10,{20 if i % 2 else 50},40\n' for i in range(40))
    (root / 'images' / 'in1k_dev_boxes.csv').write_text('file,width,height,x0,y0,x1,y1\n' + boxes)
    return root


def test_interrupted_maps_resume(data, tmp_path, monkeypatch):
    monkeypatch.setattr(real_data, 'SHARD', 8)
    model = real_data.build(RESNET, data)
    whole, labels = maps_of(RESNET, model, data, tmp_path / 'a', 20, 'half-sharp')
    calls = 0

    def stop(x, forward=model.forward_features):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return forward(x)

    monkeypatch.setattr(model, 'forward_features', stop)
    with pytest.raises(KeyboardInterrupt):
        maps_of(RESNET, model, data, tmp_path / 'b', 20, 'half-sharp')
    again, same = maps_of(RESNET, model, data, tmp_path / 'b', 20, 'half-sharp')
    assert calls == 2 + 2  # of three shards the first was kept
    assert torch.equal(again, whole)
    assert torch.equal(same, labels)


def test_command(data, tmp_path, monkeypatch, capsys):
    """Judges, keeps the results, resumes, and puts tables and plots at their marks on the page."""
    monkeypatch.setattr(torch, 'set_flush_denormal', lambda _: None)  # other tests count on them
    monkeypatch.setattr(evidence_classes, 'LABELS', (5,))
    monkeypatch.setattr(evidence_classes, 'TRAINED_LABELS', 5)
    monkeypatch.setattr(evidence_classes, 'SPLITS', (0,))
    monkeypatch.setattr(evidence_classes, 'STEPS', 2)
    page = tmp_path / 'EVIDENCE.md'
    tables = ('verdict', 'tasks_regret', 'tasks_scores_resnet', 'tasks_differences', 'tasks_losses', 'two_scales')
    page.write_text(''.join(f'<!-- table: {name} -->\n<!-- end -->\n' for name in tables))
    command = ['--data', str(data), '--cache', str(tmp_path / 'maps'), '--output', str(tmp_path / 'out')]
    command += ['--page', str(page), '--threads', '1', '--fit', '20', '--networks', 'resnet50_v1_in1k']
    command += ['--tasks', 'plain', '224 + 384', '--classes', 'foda15']
    evidence.main(command)
    assert 'images, each judged by choices' in capsys.readouterr().out
    first = page.read_text('utf-8')
    assert all(
        f'| {name} |' in first for name in (*PEERS, OURS, INSTALLED, ALONE, *evidence_classes.TRAINED, '224 + 384 px')
    )
    assert 'foda15, 5 labels' in first
    assert '| box under 15 % |' in first
    assert (tmp_path / 'figures' / 'evidence_regret.png').stat().st_size > 5000
    monkeypatch.setattr(evidence, 'run_task', lambda *_: pytest.fail('judged twice'))
    evidence.main(command)
    assert page.read_text('utf-8') == first


def test_probe_judges_every_image_in_the_order_of_the_file(data, tmp_path):
    args = argparse.Namespace(data=data, cache=tmp_path, limit=None)
    maps, targets, groups = probe.load(RESNET, 'foda15', args)
    assert targets.tolist() == [i % 3 for i in range(45)]
    assert groups.unique(return_counts=True)[1].tolist() == [3] * 15
    right, chosen = probe.judge(maps, targets, groups, 5)
    assert all(len(values) == 45 for values in right.values())
    assert f'| {probe.CHOICE} |' in probe.report(right, targets, groups, chosen)
