import re
import shutil
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import rotp_vision
from rotp_vision import PoolOptions
from rotp_vision.cli import main
from rotp_vision.evaluation import ImageFiles


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A folder with images of three classes, and a checkpoint of a small network."""
    place = tmp_path_factory.mktemp('cli')
    rng = np.random.default_rng(0)
    for name in ('ant', 'bee', 'cat'):
        (place / 'images' / name).mkdir(parents=True)
        for i in range(3):
            pixels = rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / 'images' / name / f'{i}.png')
    for part in ('train', 'val'):
        shutil.copytree(place / 'images', place / 'parts' / part)
    torch.manual_seed(0)
    save_file(timm.create_model('test_resnet', num_classes=3).state_dict(), place / 'native.safetensors')
    return place


@pytest.fixture(scope='module')
def saved(place):
    command = ['convert', '--model', 'test_resnet', '--checkpoint', place / 'native.safetensors', '--num-classes', 3]
    assert run(*command, '--output', place / 'converted') == 0
    return place / 'converted'


def run(*arguments):
    return main([str(argument) for argument in arguments])


def test_convert_writes_what_loads(place, saved, capsys):
    model = rotp_vision.load_pretrained(saved)
    native = load_file(place / 'native.safetensors')
    assert all(torch.equal(model.state_dict()[key], value) for key, value in native.items())
    (pool,) = rotp_vision.rot_pools(model).values()
    assert (pool.options.solver, pool.options.feature_scale, pool.options.gain) == ('sinkhorn', 'rms', 'scalar')


def test_convert_with_options_and_calibration(place, capsys):
    command = ['convert', '--model', 'test_resnet', '--checkpoint', place / 'native.safetensors', '--num-classes', 3]
    options = ['--pool', 'badmm-e', '--set', 'num_iters=2', '--where', 'global_pool']
    calibration = ['--calibrate', place / 'images', '--image-size', 96, '--only', 'rotp']
    assert run(*command, *options, *calibration, '--output', place / 'calibrated') == 0
    shown = capsys.readouterr().out
    assert 'global_pool: 9 images' in shown
    (pool,) = rotp_vision.rot_pools(rotp_vision.load_pretrained(place / 'calibrated')).values()
    assert (pool.options.solver, pool.options.num_iters) == ('badmm-e', 2)


@pytest.mark.parametrize(
    ('arguments', 'options'),
    [
        ([], PoolOptions()),
        (['--pool', 'paper', '--set', 'solver=badmm-q', '--set', 'gain=channel'],
         PoolOptions.paper('badmm-q', gain='channel')),
        (['--set', 'prior=norm', '--set', 'start=paper', '--set', 'prior_width=null'],
         PoolOptions(prior='norm', start='paper', prior_width=None)),
    ],
)  # fmt: skip
def test_options_come_from_one_place(tmp_path, arguments, options):
    command = ['convert', '--model', 'test_resnet', '--random-weights', *arguments]
    assert run(*command, '--output', tmp_path / 'new') == 0
    (pool,) = rotp_vision.rot_pools(rotp_vision.load_pretrained(tmp_path / 'new')).values()
    assert pool.options == options


def test_inspect(saved, capsys):
    assert run('inspect', '--model', saved) == 0
    shown = capsys.readouterr().out
    assert 'global_pool' in shown
    assert 'smoothness' in shown
    assert run('inspect', '--model', 'test_resnet') == 0
    shown = capsys.readouterr().out
    for pool in rotp_vision.find_pools(timm.create_model('test_resnet')):
        assert all(text in shown for text in (pool.path, pool.old, pool.reason))


def test_verify_and_revert(place, saved, capsys):
    assert run('verify', '--model', saved, '--images', place / 'images', '--workers', 0) == 0
    shown = capsys.readouterr().out
    assert 'top-1 %' in shown
    assert '9 images of 160 × 160: same prediction' in shown
    assert 'Keep average pooling: ' in shown
    assert run('verify', '--model', saved, '--images', place / 'images' / 'ant', '--workers', 0, '--limit', 2) == 0
    assert 'has no class folders' in capsys.readouterr().out


def test_verify_is_fair_and_explains_itself(place, saved, tmp_path, capsys):
    """A gain by itself scales the logits: it is named, and average pooling is shown with one as well."""
    model = rotp_vision.load_pretrained(saved)
    model.global_pool.set_weights(gain=0.25)
    rotp_vision.save_pretrained(model, tmp_path / 'gain')
    assert run('verify', '--model', tmp_path / 'gain', '--images', place / 'images', '--workers', 0) == 0
    shown = capsys.readouterr().out
    rows = re.findall(r'^(original|average \+ gain|converted)  +(\S+)  +(\S+)', shown, re.MULTILINE)
    assert [name for name, *_ in rows] == ['original', 'average + gain', 'converted']
    assert all(float(loss) > 0 and 0 <= float(top1) <= 100 for _, loss, top1 in rows)
    largest = float(re.search(r'largest logit difference (\S+)', shown)[1])
    beyond = float(re.search(r'the gain of 0.25 scales the logits; .* difference is (\S+)', shown)[1])
    assert beyond < 0.1 * largest
    assert re.search(r'The plan uses \S+ of \d+ positions: the pooling is still average pooling', shown)

    assert run('revert', '--model', saved, '--output', place / 'reverted.safetensors') == 0
    native, reverted = load_file(place / 'native.safetensors'), load_file(place / 'reverted.safetensors')
    assert native.keys() == reverted.keys()
    assert all(torch.equal(native[key], reverted[key]) for key in native)


@pytest.mark.parametrize(
    ('command', 'message'),
    [
        (['convert', '--model', 'test_resnett', '--output', '{place}/new'], 'close matches: test_resnet'),
        (['convert', '--model', 'test_resnet', '--set', 'start', '--output', '{place}/new'], '--set takes NAME=VALUE'),
        (['convert', '--model', 'test_resnet', '--set', 'start=max', '--set', 'start=mean', '--output', '{place}/new'],
         '--set names start twice'),
        (['convert', '--model', 'test_resnet', '--num-classes', '-3', '--output', '{place}/new'],
         '--num-classes must be positive, or 0 for no classifier, got -3'),
        (['convert', '--model', 'torchvision:resnet17', '--output', '{place}/new'], 'not a classification model'),
        (['convert', '--model', 'test_resnet', '--output', '{place}/converted'], 'exists; choose another --output'),
        (['convert', '--model', 'test_vit2', '--checkpoint', '{place}/native.safetensors', '--output', '{place}/new'],
         'does not fit test_vit2'),
        (['convert', '--model', 'test_resnet', '--checkpoint', '{place}/none.pth', '--output', '{place}/new'],
         'there is no checkpoint file'),
        (['verify', '--model', '{place}/converted', '--images', '{place}/none'], 'there is no folder of images'),
        (['verify', '--model', '{place}/converted', '--images', '{place}/images', '--limit', '0'],
         'at least one image'),
        (['inspect', '--model', '{place}/converted', '--checkpoint', 'x.pth'], 'network and weights of its own'),
        (['convert', '--model', 'torchvision:resnet18', '--random-weights', '--calibrate', '{place}/images',
          '--output', '{place}/new'],
         'has 3 class folders, the network 1000'),
        (['convert', '--model', 'test_resnet', '--random-weights', '--num-classes', '2', '--calibrate', '{place}/parts',
          '--output', '{place}/new'],
         'has the folders train, val, which are not classes: give one of them, such as .*/parts/val'),
        (['inspect', '--model', '{place}'], r'has no config\.json; did you mean .*converted'),
        (['visualize', '--model', '{place}/converted', '--images', '{place}/images', '--limit', '0', '--output',
          '{place}/new'],
         '--limit must be at least one image'),
        (['revert', '--model', '{place}/converted', '--output', '{place}/native.safetensors'],
         'exists; choose another --output, or overwrite it with --force'),
        (['revert', '--model', '{place}/converted', '--output', '{place}/x.pth'], 'must end in .safetensors'),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(place, saved, capsys, command, message):
    assert run(*(part.replace('{place}', str(place)) for part in command)) == 1
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert 'Traceback' not in error
    assert not (place / 'new').exists()


@pytest.mark.parametrize('command', ['convert', 'revert', 'visualize'])
@pytest.mark.parametrize('nowhere', ['{place}/native.safetensors', '/proc'])
def test_where_nothing_can_be_written_nothing_is_begun(place, saved, capsys, monkeypatch, command, nowhere):
    """A file is no directory, and nobody may write into /proc, not even root."""
    for work in ('build', 'load_pretrained'):
        monkeypatch.setattr(f'rotp_vision.cli.{work}', None)
    nowhere = nowhere.format(place=place)
    images = ['--images', place / 'images'] if command == 'visualize' else []
    assert run(command, '--model', saved, *images, '--output', f'{nowhere}/x.safetensors') == 1
    assert f'cannot write into {nowhere}' in capsys.readouterr().err


def test_the_advice_for_a_vision_transformer_can_be_followed(tmp_path, capsys):
    command = ['convert', '--model', 'test_vit', '--random-weights', '--output', tmp_path / 'new']
    assert run(*command) == 1
    (advice,) = re.findall(r'\((--model-kwargs \S+)\)', capsys.readouterr().err)
    assert run(*command, *advice.split()) == 0
    (pool,) = rotp_vision.rot_pools(rotp_vision.load_pretrained(tmp_path / 'new')).values()
    assert isinstance(pool, rotp_vision.ROTSetPool)


def test_a_command_says_which_extra_it_needs(place, saved, tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split('.')[0] == 'matplotlib' or 'pictures' in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    assert run('visualize', '--model', saved, '--images', place / 'images', '--output', tmp_path / 'out') == 1
    assert "pip install 'rotp_vision[train]'" in capsys.readouterr().err


def test_a_converted_directory_is_converted_further(place):
    command = ['convert', '--model', 'test_resnet', '--random-weights', '--num-classes', 3, '--where', 'local']
    assert run(*command, '--output', place / 'local') == 0
    assert run('convert', '--model', place / 'local', '--set', 'start=paper', '--output', place / 'both') == 0
    pools = rotp_vision.rot_pools(rotp_vision.load_pretrained(place / 'both'))
    assert len(pools) == len(rotp_vision.rot_pools(rotp_vision.load_pretrained(place / 'local'))) + 1
    assert pools['global_pool'].named_weights()['smoothness'].tolist() == pytest.approx([0.6931], rel=1e-3)


def test_verify_builds_the_original_that_is_named(place, saved, capsys):
    command = ['verify', '--model', saved, '--images', place / 'images', '--workers', 0]
    checkpoint = ['--checkpoint', place / 'native.safetensors']
    assert run(*command, '--original', 'test_resnet', *checkpoint) == 0
    assert run(*command, *checkpoint, '--model-kwargs', 'drop_rate=0.5') == 0  # the network that was converted
    first, second = capsys.readouterr().out.split('pooling  ')[1:]
    assert first == second
    assert run(*command, *checkpoint, '--model-kwargs', 'depth=5') == 1
    assert 'depth' in capsys.readouterr().err
    assert run(*command, '--original', saved, *checkpoint) == 1
    assert 'weights of its own' in capsys.readouterr().err


def test_verify_a_registered_model(place, tmp_path, capsys):
    torch.manual_seed(0)
    rotp_vision.save_pretrained(timm.create_model('resnet18_rotp', num_classes=3), tmp_path / 'saved')
    command = ['verify', '--model', tmp_path / 'saved', '--images', place / 'images', '--workers', 0]
    assert run(*command, '--image-size', 64) == 0
    assert '9 images of 64 × 64: same prediction' in capsys.readouterr().out


def test_the_image_size_of_calibration_is_saved_and_used(place, tmp_path, capsys):
    command = ['convert', '--model', 'test_resnet', '--checkpoint', place / 'native.safetensors', '--num-classes', 3]
    calibration = ['--calibrate', place / 'images', '--image-size', 96]
    assert run(*command, *calibration, '--output', tmp_path / 'new') == 0
    assert rotp_vision.load_pretrained(tmp_path / 'new').pretrained_cfg['input_size'] == [3, 96, 96]
    assert run('verify', '--model', tmp_path / 'new', '--images', place / 'images', '--workers', 0) == 0
    assert '9 images of 96 × 96' in capsys.readouterr().out
    images = ['--images', place / 'images', '--limit', 1]
    assert run('visualize', '--model', tmp_path / 'new', *images, '--output', tmp_path / 'a') == 0
    assert run('visualize', '--model', tmp_path / 'new', *images, '--output', tmp_path / 'b', '--image-size', 160) == 0
    shapes = [(tmp_path / name / 'index.html').read_text() for name in 'ab']
    assert shapes[0] != shapes[1]


def test_images_are_evenly_spread_and_labels_told_apart(place, tmp_path):
    files = ImageFiles(place / 'images', None, limit=5).files
    assert [file.parent.name for file in files] == ['ant', 'ant', 'bee', 'bee', 'cat']
    assert len(ImageFiles(place / 'images', None, limit=100)) == 9
    images = shutil.copytree(place / 'images', tmp_path / 'images')
    shutil.copy(images / 'ant' / '0.png', images / '0.png')
    assert 'outside its class folders' in ImageFiles(images, None).why_no_labels(3)


def test_a_broken_image_is_named(place, saved, tmp_path, capsys):
    (tmp_path / 'broken.jpg').write_bytes(b'no image')
    assert run('verify', '--model', saved, '--images', tmp_path, '--workers', 0) == 1
    assert 'broken.jpg is not an image that can be read' in capsys.readouterr().err


def test_visualize(place, saved, tmp_path, capsys):
    images = [place / 'images', place / 'images' / 'ant', place / 'images' / 'bee' / '0.png']
    assert run('visualize', '--model', saved, '--images', *images, '--limit', 2, '--output', tmp_path / 'out') == 0
    assert (tmp_path / 'out' / 'sheet.png').stat().st_size > 10_000
    titles = re.findall('<h2>(.*?)</h2>', (tmp_path / 'out' / 'index.html').read_text())
    assert titles == ['ant/0.png', 'bee/1.png', '0.png', '1.png', '0.png']
    assert '5 of 13 images drawn' in capsys.readouterr().out
