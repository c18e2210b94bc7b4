"""Probing a network with images: caching its maps, installing what was fitted, the command line."""

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

import rotp_vision
from rotp_vision.cli import main
from rotp_vision.data.cache import CachedMaps
from rotp_vision.evaluation import ImageFiles
from rotp_vision.layers import ROTSetPool

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
