"""Files that somebody else made: nothing in them runs, nothing in them calls out, and what is broken has a name."""

import copy
import json
import os
import socket
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import rotp_vision
from rotp_vision import hub
from rotp_vision.cli import main
from rotp_vision.data.config import DataConfig
from rotp_vision.data.loading import TrainImages, ValImages
from rotp_vision.data.sources import FolderSource
from rotp_vision.data.transforms import transforms
from rotp_vision.images import FORMATS, UnreadableImage, open_image
from rotp_vision.training.checkpoint import Progress, save_checkpoint
from rotp_vision.training.config import ModelConfig, PoolConfig, RunConfig
from rotp_vision.training.finish import export
from rotp_vision.training.model import build_model, load_for_evaluation


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A pickle of weights that runs code, read by a timm that lets it."""
    load = timm.models.load_state_dict
    by_default = partial(load, weights_only=False)
    monkeypatch.setattr(hub.weights, 'load_state_dict', by_default)
    monkeypatch.setattr('timm.models._helpers.load_state_dict', by_default)
    monkeypatch.setattr('timm.models._builder.load_state_dict', by_default)
    from_path = timm.models._hub.load_state_dict_from_path
    monkeypatch.setattr('timm.models._builder.load_state_dict_from_path', partial(from_path, weights_only=False))
    path = tmp_path / 'evil.pth'
    weights = timm.create_model('test_resnet', num_classes=3).state_dict()
    torch.save({'state_dict': weights, 'extra': Touches(tmp_path / 'ran')}, path)
    yield path
    assert not (tmp_path / 'ran').exists()


@pytest.fixture
def saved(tmp_path):
    model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
    return rotp_vision.save_pretrained(model, tmp_path / 'saved')


def described(saved, **changes):
    """A directory whose config.json says something else of its native network."""
    config = json.loads((saved / 'config.json').read_text())
    config['model_args'] |= changes
    (saved / 'config.json').write_text(json.dumps(config))
    return saved


def test_a_pickle_runs_nothing_by_the_command_line(evil, tmp_path, capsys):
    source = ('--model', 'test_resnet', '--num-classes', '3', '--checkpoint', str(evil))
    assert main(['convert', *source, '--output', str(tmp_path / 'out')]) == 1
    assert main(['inspect', *source]) == 1
    assert capsys.readouterr().err.count('could run code on loading') == 2


def test_what_is_no_checkpoint_is_refused(evil, tmp_path):
    (tmp_path / 'text.pth').write_text('hello')
    torch.save([1, 2], tmp_path / 'list.pth')
    for path, message in (
        (evil, 'could run code on loading'),
        (tmp_path / 'text.pth', r'is not (read|a checkpoint)'),
        (tmp_path / 'list.pth', 'checkpoint'),
        (tmp_path / 'nothing.pth', 'there is no checkpoint file'),
    ):
        with pytest.raises(ValueError, match=message):
            rotp_vision.read_state_dict(path)


def test_a_pickle_runs_nothing_in_training(evil):
    with pytest.raises(ValueError, match='could run code'):
        build_model(ModelConfig('test_resnet', checkpoint=str(evil)), 3)
    with pytest.raises(ValueError, match='could run code'):
        load_for_evaluation(str(evil), ModelConfig('test_resnet'), PoolConfig(), 3)


@pytest.mark.parametrize(
    'load', [rotp_vision.load_pretrained, lambda path: timm.create_model(f'local-dir:{path}', True)]
)
def test_a_pickle_in_a_directory_runs_nothing(evil, saved, load):
    (saved / 'model.safetensors').unlink()
    (saved / 'pytorch_model.bin').write_bytes(evil.read_bytes())
    with pytest.raises(ValueError, match=r'has no model\.safetensors'):
        load(saved)


def test_a_pickle_that_a_description_names_runs_nothing(evil, saved, capsys):
    directory = described(saved, base_args={'checkpoint_path': str(evil)})
    with pytest.raises(ValueError, match='network test_resnet does not take: checkpoint_path'):
        rotp_vision.load_pretrained(directory)
    assert main(['inspect', '--model', str(directory)]) == 1


@pytest.mark.parametrize(
    'changes',
    [
        {'base': 'hf-hub:timm/test_resnet.r160_in1k'},
        {'base': 'local-dir:/tmp'},
        {'base': 'https://example.org/network'},
        {'base_args': {'pretrained': True}},
        {'base_args': {'pretrained': True, 'pretrained_cfg_overlay': {'url': 'https://example.org/w.pth'}}},
        {'base_args': {'pretrained_cfg': {'url': 'https://example.org/w.pth'}}},
        {'base': 'torchvision:resnet18', 'base_args': {'weights': 'DEFAULT'}},
        {'base': 'torchvision:resnet18', 'weights': 'DEFAULT'},
        {'checkpoint_path': '/nowhere/weights.pth'},
        {'base': 'rotp_converted', 'base_args': {'base': 'hf-hub:timm/test_resnet.r160_in1k'}},
    ],
)
def test_a_description_calls_nobody(saved, changes, monkeypatch):
    def call(*args, **kwargs):
        raise AssertionError('called out')

    monkeypatch.setattr(socket, 'getaddrinfo', call)
    monkeypatch.setattr(socket.socket, 'connect', call)
    with pytest.raises(ValueError, match=r'config\.json'):
        rotp_vision.load_pretrained(described(saved, **changes))


def test_arguments_of_a_network_are_its_own():
    hub.refuse_foreign('resnet18', {'channels': [8] * 4, 'output_stride': 8, 'norm_layer': 'groupnorm', 'in_chans': 1})
    hub.refuse_foreign('efficientnet_b0', {'bn_eps': 1e-3, 'drop_path_rate': 0.1})
    hub.refuse_foreign('vit_small_patch16_224.augreg_in1k', {'img_size': 96, 'dynamic_img_size': True})
    hub.refuse_foreign('torchvision:resnet18', {'num_classes': 3, 'width_per_group': 32})


@pytest.mark.parametrize(
    'make',
    [
        lambda: rotp_vision.PoolOptions(num_iters=10**9),
        lambda: rotp_vision.GlobalROTPool2d({'num_outer': 10**9}),
        lambda: timm.create_model('resnet18_rotp', rotp={'prior': 'attention', 'prior_width': 10**9}),
        lambda: rotp_vision.multi_scale(rotp_vision.convert(timm.create_model('test_resnet')), (64, 10**9)),
    ],
)
def test_what_sizes_something_is_bounded(make):
    with pytest.raises(ValueError, match='must be a positive integer up to 16384, got 1000000000'):
        make()


# Images


def postscript(path):
    path.write_bytes(b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n')


def bomb(path):
    """A few bytes that would become gigabytes."""
    Image.new('1', (40000, 40000)).save(path, 'PNG')


def broken_avif(path):
    Image.effect_noise((64, 64), 50).save(path, 'AVIF')
    path.write_bytes(path.read_bytes()[:-200])


def text(path):
    path.write_text('no image')


@pytest.mark.parametrize('make', [postscript, bomb, broken_avif, text])
def test_a_broken_image_has_a_name_wherever_it_is_read(tmp_path, saved, make, capsys, monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError('started another program')

    monkeypatch.setattr('subprocess.Popen', start)
    monkeypatch.setattr('subprocess.check_call', start)
    for name in ('ant', 'bee', 'cat'):
        (tmp_path / 'images' / name).mkdir(parents=True)
        Image.effect_noise((40, 40), 50).save(tmp_path / 'images' / name / 'whole.png')
    file = tmp_path / 'images/cat/cat.jpg'
    make(file)
    with pytest.raises(UnreadableImage) as caught:
        open_image(file)
    assert caught.value.name == str(file)

    source = FolderSource(tmp_path / 'images')
    train, val = transforms(DataConfig(image_size=32), (0.5,) * 3, (0.5,) * 3)
    assert TrainImages(source, train, 0)[0, 2].broken == [str(file)]
    assert ValImages(source, val)[2][:3] == (None, -1, [str(file)])

    weights = tmp_path / 'native.safetensors'
    save_file(timm.create_model('test_resnet', num_classes=3).state_dict(), weights)
    folder, output = ('--images', str(tmp_path / 'images')), ('--output', str(tmp_path / 'out'))
    convert = ('convert', '--model', 'test_resnet', '--num-classes', '3', '--checkpoint', str(weights))
    for command in (
        ('verify', '--model', str(saved), *folder, '--workers', '0'),
        ('visualize', '--model', str(saved), *folder, *output),
        (*convert, '--calibrate', str(tmp_path / 'images'), *output),
    ):
        assert main([*command]) == 1
        shown = capsys.readouterr().err.splitlines()[-1]
        assert shown.startswith(f'rotp-vision {command[0]}: {file} is not an image that can be read: '), shown


def test_verify_says_in_one_line_what_a_data_worker_could_not_read(tmp_path, saved, capsys):
    (tmp_path / 'images').mkdir()
    Image.effect_noise((40, 40), 50).save(tmp_path / 'images/a.png')
    text(tmp_path / 'images/b.png')
    assert main(['verify', '--model', str(saved), '--images', str(tmp_path / 'images'), '--workers', '2']) == 1
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1].startswith(f'rotp-vision verify: {tmp_path}/images/b.png is not an image that can')
    assert 'Traceback' not in shown


def test_sixteen_bits_are_scaled(tmp_path):
    grey = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    for name in ('a.png', 'a.tiff'):
        Image.fromarray(grey).save(tmp_path / name)
        seen = np.asarray(open_image(tmp_path / name))
        assert np.abs(seen.astype(int) - np.arange(256).reshape(16, 16, 1)).max() <= 1
    Image.fromarray(grey.astype(np.float32) / 65535).save(tmp_path / 'float.tiff')
    with pytest.raises(UnreadableImage, match='floating point have no known range'):
        open_image(tmp_path / 'float.tiff')
    os.mkfifo(tmp_path / 'pipe.png')
    with pytest.raises(UnreadableImage, match='not a regular file'):
        open_image(tmp_path / 'pipe.png')


def test_random_weights_are_converted_only_where_asked_for(tmp_path, saved, capsys):
    command = ('convert', '--model', 'test_resnet', '--output', str(tmp_path / 'out'))
    assert main([*command]) == 1
    assert 'give --checkpoint or --pretrained, or say --random-weights' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()
    assert main([*command, '--random-weights']) == 0
    assert main(['convert', '--model', str(saved), '--random-weights', '--output', str(tmp_path / 'other')]) == 1
    assert 'comes with weights: leave --random-weights out' in capsys.readouterr().err


@pytest.mark.parametrize(('mask', 'mode'), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_are_readable_as_the_umask_says(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        native = timm.create_model('test_resnet', num_classes=3)
        export(copy.deepcopy(native), RunConfig(model=ModelConfig('test_resnet')), tmp_path / 'native', ['a'])
        vision = build_model(ModelConfig('torchvision:squeezenet1_1'), 3)
        export(vision, RunConfig(model=ModelConfig('torchvision:squeezenet1_1')), tmp_path / 'vision', ['a'])
        rotp_vision.save_pretrained(rotp_vision.convert(native), tmp_path / 'converted')
        save_checkpoint(tmp_path / 'checkpoints', Progress(), {}, {'weight': torch.ones(1)})
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob('*') if path.is_file()]
    assert len(files) == 7
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == dict.fromkeys(
        (path.name for path in files), oct(mode)
    )


def test_formats_are_those_of_pictures():
    assert {'JPEG', 'PNG', 'WEBP'} <= set(FORMATS)
    assert not {'EPS', 'WMF', 'PSD'} & set(FORMATS)
