"""Probing: poolings and closed-form classifiers on the maps of a frozen network."""

import json
import re
import shutil

import datasets
import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import rotp_vision
from rotp_vision import PoolOptions, fit_probe
from rotp_vision.cli import main
from rotp_vision.data.cache import CachedMaps
from rotp_vision.evaluation import ImageFiles
from rotp_vision.layers import ROTSetPool
from rotp_vision.probing import joint
from rotp_vision.probing.fit import balanced_difference, balanced_mean
from rotp_vision.probing.joint import train_jointly
from rotp_vision.probing.poolings import Pooling, all_poolings
from rotp_vision.probing.ridge import Linear, RidgeFolds, assign_folds, class_weights


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
    features = torch.randn(30, num_features, generator=generator) * torch.logspace(-2, 2, num_features) + 3
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
    torch.testing.assert_close(half, result.logits(maps), rtol=0, atol=0.02)


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


# Networks and images

CLASSES = ['ant', 'bee', 'cat']


def draw(label, seed, size=64):
    """Noise with a small square whose colour is the class."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(60, 120, (size, size, 3), dtype=np.uint8)
    row, column = rng.integers(0, size - 16, 2)
    pixels[row : row + 16, column : column + 16] = np.eye(3)[label] * 255
    return Image.fromarray(pixels)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A folder of images, three videos of four frames for each class; a parquet file of the same; and weights."""
    place = tmp_path_factory.mktemp('probe')
    rows = []
    for label, name in enumerate(CLASSES):
        for frame in range(12):
            folder = place / 'images' / name / f'video{frame // 4}'
            folder.mkdir(parents=True, exist_ok=True)
            draw(label, 100 * label + frame).save(folder / f'{frame}.png')
            image = {'path': None, 'bytes': (folder / f'{frame}.png').read_bytes()}
            rows.append({'image': image, 'label': label, 'kind': name, 'video': f'{name} {frame // 4}'})
    datasets.Dataset.from_list(rows).to_parquet(place / 'images.parquet')
    torch.manual_seed(0)
    save_file(timm.create_model('test_resnet', num_classes=7).state_dict(), place / 'weights.safetensors')
    return place


def run(place, *changes):
    """`rotp-vision probe` of the folder, with some arguments changed; returns the status."""
    given = {'--model': 'test_resnet', '--checkpoint': place / 'weights.safetensors', '--num-classes': 7}
    given |= {'--data': place / 'images', '--folds': 3, '--workers': 0, '--device': 'cpu'}
    given |= dict(zip(changes[::2], changes[1::2], strict=True))
    train = ['--train'] if given.pop('--train', False) else []
    return main(['probe', *train, *(str(part) for pair in given.items() if pair[1] is not None for part in pair)])


def network(name):
    torch.manual_seed(0)
    if name == 'swin':  # maps with the channels last
        small = {'embed_dim': 16, 'depths': (1, 1), 'num_heads': (2, 2), 'img_size': 64, 'window_size': 4}
        return timm.create_model('swin_tiny_patch4_window7_224', **small)
    if name == 'vit':
        return timm.create_model('test_vit', global_pool='avg', img_size=64)
    if name == 'torchvision':
        return torchvision.models.mobilenet_v3_small(num_classes=5)
    return timm.create_model(name)


@pytest.mark.parametrize('name', ['test_resnet', 'test_convnext', 'test_efficientnet', 'swin', 'vit', 'torchvision'])
def test_the_network_is_what_was_fitted(name, place):
    """Maps and tokens, channels first and last, norm and linear layers between pool and classifier."""
    model = network(name)
    native = {key: value.clone() for key, value in model.state_dict().items()}
    arguments = {'image_size': 64, 'num_folds': 3, 'workers': 0, 'progress': False}
    result = rotp_vision.probe(model, place / 'images', group_by='folder', **arguments)
    assert (result.num_images, result.num_groups, len(result.classifier.bias)) == (36, 9, 3)
    (pool,) = rotp_vision.rot_pools(model).values()
    assert pool.options == result.chosen.pooling.options
    assert isinstance(pool, ROTSetPool) == (name == 'vit')
    same = [key for key, value in model.state_dict().items() if key in native and value.shape == native[key].shape]
    assert all(torch.equal(model.state_dict()[key], native[key]) for key in same)
    assert len(native) - len(same) == 2  # the classifier
    assert all(parameter.requires_grad for parameter in model.parameters())
    # What the pool sees in the network, classified by the result, is what the network returns.
    seen = []
    pool.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    images = torch.randn(5, 3, 64, 64)
    with torch.no_grad():
        logits = model.eval()(images)
    maps = seen[0].permute(0, 3, 1, 2) if name == 'swin' else seen[0]
    torch.testing.assert_close(result.logits(maps), logits, rtol=0, atol=2e-3 * float(logits.std()))


def test_what_is_written_loads_and_is_taken_by_the_other_commands(place, tmp_path, capsys):
    output = tmp_path / 'probed'
    assert run(place, '--group-by', 'folder', '--output', output) == 0
    shown = capsys.readouterr().out
    assert '36 images in 9 groups, 3 classes, 3 folds' in shown
    assert (output / 'probe.md').read_text() in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ['probed']  # the maps are removed
    model = rotp_vision.load_pretrained(output)
    assert (model.num_classes, model.pretrained_cfg['label_names']) == (3, CLASSES)
    assert main(['verify', '--model', str(output), '--images', str(place / 'images'), '--workers', '0']) == 0
    verified = capsys.readouterr().out
    assert 'The classifier was fitted to the pooling that `probe` chose' in verified
    assert verified.splitlines()[-1].endswith(shown.split('\n\nwrote')[0].splitlines()[-1])
    drawn = [*('visualize', '--model', str(output), '--images', str(place / 'images'), '--limit', '2')]
    assert main([*drawn, '--output', str(tmp_path / 'drawn')]) == 0
    assert any(name in (tmp_path / 'drawn' / 'index.html').read_text() for name in CLASSES)
    # It can be probed again, for other classes or with other images.
    again = ['--model', output, '--checkpoint', None, '--num-classes', None]
    assert run(place, *again, '--output', tmp_path / 'again', '--train', True) == 0
    assert '| ROTP, trained' in (tmp_path / 'again' / 'probe.md').read_text()


def test_training_evaluates_what_was_written(place, tmp_path):
    from rotp_vision.training.config import ModelConfig, PoolConfig
    from rotp_vision.training.model import load_for_evaluation

    assert run(place, '--output', tmp_path / 'probed') == 0
    model = load_for_evaluation(str(tmp_path / 'probed'), ModelConfig('test_resnet'), PoolConfig(), 3)
    images = torch.stack([ImageFiles(place / 'images', None)[k][0] for k in (0, 20)]) / 255
    torch.testing.assert_close(model.eval()(images), rotp_vision.load_pretrained(tmp_path / 'probed')(images))


def test_a_parquet_file_is_the_folder_in_another_form(place, tmp_path, capsys):
    assert run(place, '--group-by', 'folder', '--output', tmp_path / 'a') == 0
    first = capsys.readouterr().out
    parquet = ['--data', place / 'images.parquet', '--group-by', 'video']
    assert run(place, *parquet, '--label', 'kind', '--output', tmp_path / 'b') == 0
    assert capsys.readouterr().out.replace('/b', '/a') == first
    assert rotp_vision.load_pretrained(tmp_path / 'b').pretrained_cfg['label_names'] == CLASSES


@pytest.fixture
def computed(monkeypatch):
    """The numbers of the shards that are computed, of eight images each."""
    shards, write = [], CachedMaps.write
    monkeypatch.setattr('rotp_vision.data.cache.MAX_IMAGES', 8)
    monkeypatch.setattr(CachedMaps, 'write', lambda self, new, *args: shards.extend(new) or write(self, new, *args))
    return shards


def test_a_killed_run_goes_on_where_it_was(place, tmp_path, monkeypatch, computed):
    forward, passes = timm.models.ResNet.forward_features, []

    def killed(model, x):
        passes.append(len(x))
        if passes.count(8) == 4:  # in the fourth shard
            raise KeyboardInterrupt
        return forward(model, x)

    monkeypatch.setattr(timm.models.ResNet, 'forward_features', killed)
    with pytest.raises(KeyboardInterrupt):
        run(place, '--output', tmp_path / 'probed')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['probed.maps']
    monkeypatch.setattr(timm.models.ResNet, 'forward_features', forward)
    foreign = tmp_path / 'probed.maps' / 'notes.txt'
    foreign.write_text('not ours')
    computed.clear()
    assert run(place, '--output', tmp_path / 'probed') == 0
    assert computed == [3, 4]
    assert list((tmp_path / 'probed.maps').iterdir()) == [foreign]
    assert run(place, '--output', tmp_path / 'whole') == 0
    one, other = (rotp_vision.load_pretrained(tmp_path / name).state_dict() for name in ('probed', 'whole'))
    torch.testing.assert_close(one, other)


def test_kept_maps_are_used_again_unless_the_images_change(place, tmp_path, computed, capsys):
    cached = ['--cache', tmp_path / 'maps']
    for name, size, expected in (('a', None, 5), ('b', None, 0), ('c', 96, 5)):
        computed.clear()
        assert run(place, *cached, '--image-size', size, '--output', tmp_path / name) == 0
        assert len(computed) == expected
        assert re.findall(r'computing maps: +(\d+)%', capsys.readouterr().err)[-1] == '100'
    assert json.loads((tmp_path / 'c' / 'config.json').read_text())['pretrained_cfg']['input_size'] == [3, 96, 96]


def test_unreadable_images_are_named(place, tmp_path, capsys):
    images = shutil.copytree(place / 'images', tmp_path / 'images')
    for path in ('ant/video0/3.png', 'bee/video1/7.png'):
        (images / path).write_bytes((images / path).read_bytes()[:90])
    assert run(place, '--data', images, '--output', tmp_path / 'probed') == 1
    said = capsys.readouterr().err
    assert all(text in said for text in ('cannot be read, 2 of 36', 'video0/3.png', 'video1/7.png'))
    assert not (tmp_path / 'probed').exists()


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (['--checkpoint', None], 'test_resnet alone has random weights'),
        (['--data', 'nowhere'], 'neither a folder of images nor a parquet file at nowhere'),
        (['--data', '{place}/images/ant', '--group-by', 'folder'], 'of video0, video1, video2 are in one'),
        (['--data', '{place}/images/ant/video0'], 'has no class folders'),
        (['--data', '{place}/weights.safetensors'], 'neither a folder of images nor a parquet file'),
        (['--group-by', 'video'], "can be grouped by 'folder' alone"),
        (['--data', '{place}/images.parquet', '--group-by', 'film'], r'group-by must be .*kind, video.* got .film'),
        (['--data', '{place}/images.parquet', '--label', 'kind', '--group-by', 'kind'], 'of ant, bee, cat are in one'),
        (['--output', '{place}/images'], 'exists'),
        (['--output', '{place}/weights.safetensors/probed'], 'cannot write'),
    ],
)  # fmt: skip
def test_wrong_beginnings_end_before_the_work(place, tmp_path, capsys, monkeypatch, changes, message):
    from rotp_vision.probing import images

    monkeypatch.setattr(images, 'cached_maps', None)
    changes = [change.format(place=place) if isinstance(change, str) else change for change in changes]
    assert run(place, '--output', tmp_path / 'probed', *changes) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_a_classifier_that_cannot_be_replaced_is_refused(place):
    model = timm.create_model('test_resnet')
    model.fc = nn.Linear(model.num_features, 4, bias=False)
    with pytest.raises(ValueError, match='must be linear and have a bias'):
        rotp_vision.probe(model, place / 'images', num_folds=3)
    assert isinstance(model.fc, nn.Linear)
