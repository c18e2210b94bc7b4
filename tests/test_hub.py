import ast
import json
import os
import re
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import yaml
from safetensors.torch import load_file, save_file
from timm.data import resolve_model_data_config
from timm.layers import convert_sync_batchnorm
from torch import nn

import rotp_vision
from rotp_vision import PoolOptions, convert, load_pretrained, read_state_dict, save_pretrained

x = torch.linspace(-2, 2, 2 * 3 * 64 * 64).sin().view(2, 3, 64, 64)


def converted(name='test_efficientnet', **kwargs):
    torch.manual_seed(0)
    model = convert(timm.create_model(name, num_classes=5, **kwargs)).eval()
    for pool in rotp_vision.rot_pools(model).values():
        pool.set_weights(smoothness=3.0, gain=1.3)
    return model


def test_a_converted_model_comes_back_in_one_line(tmp_path):
    model = converted()
    directory = save_pretrained(model, tmp_path / 'out')
    assert sorted(os.listdir(tmp_path)) == ['out']
    assert sorted(os.listdir(directory)) == ['README.md', 'config.json', 'model.safetensors']
    assert torch.equal(load_pretrained(directory)(x), model(x))
    from_timm = partial(timm.create_model, f'local-dir:{directory}', pretrained=True)
    assert torch.equal(from_timm().eval()(x), model(x))
    finetuned = from_timm(num_classes=2)
    assert finetuned(x).shape == (2, 2)
    assert float(rotp_vision.rot_pools(finetuned)['global_pool'].named_weights()['smoothness']) == pytest.approx(3.0)
    assert from_timm(features_only=True)(x)


def built(name, **kwargs):
    """A network whose arguments timm does not record."""
    return timm.model_entrypoint(name)(**kwargs)


@pytest.mark.parametrize(
    'make', [lambda **kwargs: convert(built('resnet18', **kwargs)), partial(built, 'resnet18_rotp')]
)
def test_what_would_come_back_as_another_network_is_said(tmp_path, make):
    model = make(output_stride=8).eval()
    with pytest.warns(UserWarning, match=r'layer3\.0\.\S+ is Conv2d.* and would be Conv2d.*; pass .* as model_args'):
        save_pretrained(model, tmp_path / 'warned')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        directory = save_pretrained(model, tmp_path / 'right', model_args={'output_stride': 8})
    assert torch.equal(load_pretrained(directory)(x), model(x))


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize(
    'make',
    [
        lambda: convert(timm.create_model('test_vit', global_pool='avg', img_size=96, num_classes=3)),
        lambda: convert(timm.create_model('test_resnet', stem_width=32, in_chans=1, num_classes=3), where='all'),
        lambda: timm.create_model('resnet18_rotp_local', output_stride=8, rotp=PoolOptions('sinkhorn'), num_classes=3),
        lambda: load_pretrained(save_pretrained(converted('test_resnet', stem_width=32), 'once')),
        lambda: convert(rotp_vision.revert(load_pretrained(save_pretrained(converted(in_chans=1), 'once')))),
        lambda: calibrated(converted()),
    ],
)
@pytest.mark.parametrize('save', [save_pretrained, partial(timm.models.save_for_hf, safe_serialization=True)])
def test_arguments_and_options_are_saved_by_us_and_by_timm(tmp_path, monkeypatch, make, save):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = make().eval()
    model.reset_classifier(4)
    images = torch.randn(2, model.in_chans, 96, 96)
    save(model, tmp_path / 'out')
    assert torch.equal(load_pretrained(tmp_path / 'out')(images), model(images))
    again = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True, num_classes=2)
    assert again(images).shape == (2, 2)
    assert {path: pool.options for path, pool in rotp_vision.rot_pools(again).items()} == {
        path: pool.options for path, pool in rotp_vision.rot_pools(model).items()
    }


def calibrated(model):
    """As `calibrate` leaves it: other options and weights than those it was converted with."""
    pool = rotp_vision.rot_pools(model)['global_pool']
    pool.set_options(PoolOptions(prior='norm', feature_scale='log'))
    pool.set_weights(norm_power=1.5)
    return rotp_vision.fold_gain(model)


def test_a_reverted_model_is_saved_under_its_own_name(tmp_path):
    model = timm.create_model('test_resnet', num_classes=3, in_chans=1).eval()
    before = dict(model.pretrained_cfg), dict(model._model_args), type(model)
    rotp_vision.revert(convert(model))
    assert (dict(model.pretrained_cfg), dict(model._model_args), type(model)) == before


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    tokens = convert(built('test_vit', global_pool='avg', num_classes=3))
    with pytest.raises(ValueError, match=r'could not build this network \(ValueError: .*model_args'):
        save_pretrained(tokens, tmp_path / 'out')
    wide = convert(built('test_resnet', stem_width=32))
    with pytest.raises(ValueError, match=r'conv1\.0\.weight is \(32, .*\) here and would be \(16, .* model_args'):
        save_pretrained(wide, tmp_path / 'out')
    assert os.listdir(tmp_path) == []
    assert load_pretrained(save_pretrained(tokens, tmp_path / 'out', model_args={'global_pool': 'avg'}))


@pytest.mark.filterwarnings('error')
def test_nothing_is_said_of_what_comes_back(tmp_path):
    frozen, folded, other_classes = converted(), converted(), converted()
    rotp_vision.freeze(frozen.train())
    rotp_vision.fold_gain(folded)
    other_classes.reset_classifier(7)
    listed = convert(timm.create_model('test_resnet', in_chans=1), {'solver': 'badmm-e', 'step': (1, 2, 3, 4)})
    synced = [nn.SyncBatchNorm.convert_sync_batchnorm(converted('test_resnet')), convert_sync_batchnorm(converted())]
    for i, model in enumerate((frozen, folded, other_classes, listed, *synced)):
        state = torch.random.get_rng_state()
        save_pretrained(model, tmp_path / str(i))
        assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ('name', 'arguments'),
    [
        ('resnet18_rotp_q', {'rotp': {'solver': 'badmm-e', 'feature_scale': 'rms'}}),
        ('resnet18_rotp_e', {'rotp': {'solver': 'sinkhorn', 'gain': 'scalar'}}),
        ('resnet18_rotp_local', {'rotp_stem': {'solver': 'badmm-e'}}),
        ('resnet18_rotp_local', {'global_pool': 'avg'}),
    ],
)
def test_a_variant_comes_back_with_its_own_options(tmp_path, name, arguments):
    model = timm.create_model(name, num_classes=4, **arguments).eval()
    assert torch.equal(load_pretrained(save_pretrained(model, tmp_path / 'out'))(x), model(x))


@pytest.mark.parametrize('in_chans', [1, 4])
@pytest.mark.parametrize('make', [converted, partial(timm.create_model, 'resnet18_rotp')])
def test_images_of_other_than_three_channels(tmp_path, make, in_chans):
    image, model = torch.randn(2, in_chans, 64, 64), make(in_chans=in_chans).eval()
    once = load_pretrained(save_pretrained(model, tmp_path / 'once'))
    twice = load_pretrained(save_pretrained(once, tmp_path / 'twice'))
    assert torch.equal(once(image), model(image))
    assert torch.equal(twice(image), model(image))


def test_images_whose_pixels_become_channels(tmp_path):
    small = {'layers': [1, 1, 1, 1], 'width_factor': 0.25}
    model = convert(timm.create_model('tresnet_m', num_classes=5, in_chans=1, **small)).eval()
    loaded = load_pretrained(save_pretrained(model, tmp_path / 'out', model_args=small))
    assert torch.equal(loaded(x[:, :1]), model(x[:, :1]))


def test_local_pools_are_not_dropped_in_silence(tmp_path):
    model = convert(timm.create_model('resnet18', num_classes=3), where='all')
    directory = save_pretrained(model, tmp_path / 'out')
    for arguments in ({'features_only': True}, {'global_pool': 'avg'}):
        with pytest.raises(ValueError, match='local ROT pools'):
            load_pretrained(directory, **arguments)


def test_force_replaces_three_files_and_touches_nothing_else(tmp_path):
    model = converted()
    directory = save_pretrained(model, tmp_path / 'out')
    (directory / 'notes').mkdir()
    (directory / 'notes' / 'README.md').write_text('mine')
    link = tmp_path / 'link'
    link.symlink_to(directory, target_is_directory=True)
    node = directory.stat().st_ino, (directory / 'notes').stat().st_ino
    rotp_vision.rot_pools(model)['global_pool'].set_weights(gain=2.0)
    save_pretrained(model, link, force=True)
    assert link.is_symlink()
    assert (directory.stat().st_ino, (directory / 'notes').stat().st_ino) == node
    assert sorted(os.listdir(directory)) == ['README.md', 'config.json', 'model.safetensors', 'notes']
    assert (directory / 'notes' / 'README.md').read_text() == 'mine'
    assert torch.equal(load_pretrained(directory)(x), model(x))


def test_an_interrupted_replacement_is_not_taken_for_a_model(tmp_path, monkeypatch):
    directory = save_pretrained(converted(), tmp_path / 'out')
    move, moved = Path.replace, []

    def interrupted(self, target):
        moved.append(move(self, target))
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, 'replace', interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(converted(), directory, force=True)
    assert [path.name for path in moved] == ['model.safetensors']
    with pytest.raises(ValueError, match=r'has no config\.json'):
        load_pretrained(directory)


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path, monkeypatch):
    model = converted()
    directory = save_pretrained(model, tmp_path / 'out')
    before = load_file(directory / 'model.safetensors')
    with pytest.raises(ValueError, match='exists; choose another directory'):
        save_pretrained(model, directory)

    def full_disk(*args, **kwargs):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(rotp_vision.hub.save, 'save_config_for_hf', full_disk)
    for target in (directory, tmp_path / 'new'):
        with pytest.raises(OSError, match='No space left'):
            save_pretrained(model, target, force=True)
    assert os.listdir(tmp_path) == ['out']
    assert load_file(directory / 'model.safetensors').keys() == before.keys()


def test_errors_of_saving(tmp_path):
    (tmp_path / 'file').write_text('mine')
    for model, target, message in (
        (timm.create_model('test_resnet'), 'out', 'no pool of rotp_vision to save'),
        (convert(Own()), 'out', 'base must name the native network'),
        (converted(), 'file', 'not a directory'),
        (Wrapper(), 'out', r'save_pretrained\(model\.timm_model, directory\)'),
    ):
        with pytest.raises(ValueError, match=message):
            save_pretrained(model, tmp_path / target, force=True)
    assert (tmp_path / 'file').read_text() == 'mine'
    with pytest.raises(ValueError, match=r'has no config\.json'):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    'wrap',
    [
        lambda state: state,
        lambda state: {'state_dict': state, 'epoch': 3},
        lambda state: {'model': {f'module.{key}': value for key, value in state.items()}},
        lambda state: {'state_dict': {'w': torch.zeros(1)}, 'state_dict_ema': state},
        lambda state: {'state_dict': {f'_orig_mod.{key}': value for key, value in state.items()}},
    ],
    ids=['plain', 'state_dict', 'ddp', 'ema', 'compiled'],
)
def test_checkpoints_of_every_kind(tmp_path, wrap):
    state = timm.create_model('test_resnet').state_dict()
    torch.save(wrap(state), tmp_path / 'checkpoint.pth.tar')
    read = read_state_dict(tmp_path / 'checkpoint.pth.tar')
    assert read.keys() == state.keys()
    assert all(torch.equal(read[key], state[key]) for key in state)


def test_a_torchvision_network_keeps_how_it_sees_images(tmp_path):
    model = convert(torchvision.models.squeezenet1_1(num_classes=3), where=['classifier.3']).eval()
    first, second = tmp_path / 'first', tmp_path / 'second'
    seen = {'input_size': [3, 96, 96], 'crop_pct': 1.0}
    save_pretrained(model, first, base='torchvision:squeezenet1_1')
    rewritten(first, lambda config: config['pretrained_cfg'].update(seen))
    loaded = load_pretrained(save_pretrained(load_pretrained(first), second))
    assert torch.equal(loaded(x), model(x))
    found = resolve_model_data_config(loaded)
    assert {'input_size': list(found['input_size']), 'crop_pct': found['crop_pct']} == seen


def rewritten(directory, change):
    """The directory with another config.json."""
    config = json.loads((directory / 'config.json').read_text())
    (directory / 'config.json').write_text(json.dumps(change(config) or config))
    return directory


def test_damaged_files_are_named(tmp_path):
    directory = save_pretrained(convert(timm.create_model('test_resnet', num_classes=3)), tmp_path / 'model')
    weights, config = directory / 'model.safetensors', directory / 'config.json'
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match='may be incomplete'):
        load_pretrained(directory)
    for text in ('{}', '{', '[]', '{"architecture": 5}', '{"architecture": "rotp_converted"}', '[' * 200_000):
        config.write_text(text)
        with pytest.raises(ValueError, match='is not what save_pretrained wrote'):
            load_pretrained(directory)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda c: c.update(architecture='resnet18'), 'network resnet18 does not take: base, base_args, format, pools'),
        (lambda c: c['model_args'].update(base=5), 'base in config.json must be the name'),
        (lambda c: c['model_args'].update(pools=['global_pool']), 'pools in config.json must be options'),
        (lambda c: c['model_args'].update(folded='global_pool'), 'folded in config.json must be a list'),
        (lambda c: c['model_args'].update(folded=['nowhere']), "'folded': nowhere"),
        (lambda c: c['model_args'].update(format=2), 'reads up to 1: upgrade'),
        (lambda c: c.update(rotp_format=2), 'newer rotp_vision: upgrade'),
        (lambda c: c.update(num_classes=10**9), 'num_classes .* at most 1048576'),
        (lambda c: c['model_args'].update(base_args={'norm_layer': 'nothing'}), 'test_efficientnet cannot be built'),
        (lambda c: c['model_args'].update(base_args={'act_layer': 'nothing'}), 'test_efficientnet cannot be built'),
        (lambda c: c['model_args'].update(base_args={'stem_size': 10**9}), 'stem_size .* at most 16384'),
        (lambda c: c['model_args'].update(pools={'global_pool': {'num_iters': 10**9}}), 'num_iters .* at most 16384'),
    ],
)
def test_a_wrong_config_gets_one_clear_sentence(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained(rewritten(save_pretrained(converted(), tmp_path / 'out'), change))


@pytest.mark.parametrize(
    ('old', 'now'),
    [
        ({'view': 'rms'}, 'view is now feature_scale'),
        ({'solver': 'badmm-e', 'num_modules': 4}, 'num_modules is now num_iters'),
        ({'solver': 'badmm-e', 'coupled': True}, "coupled is now part of the solver's name"),
        ({'learn': 'per-module'}, 'learn must be one of per-iteration'),
    ],
)
def test_models_of_version_0_2_name_the_new_option(tmp_path, old, now):
    def described(config):
        del config['model_args']['format']
        config['model_args']['pools'] = {'global_pool': old}

    with pytest.raises(ValueError, match=now):
        load_pretrained(rewritten(save_pretrained(converted(), tmp_path / 'out'), described))
    ours = save_pretrained(timm.create_model('resnet18_rotp', num_classes=3), tmp_path / 'ours')
    with pytest.raises(ValueError, match=now):
        load_pretrained(rewritten(ours, lambda config: config['model_args'].update(rotp=old)))


def test_weights_of_version_0_2_are_refused(tmp_path):
    directory = save_pretrained(converted(), tmp_path / 'out')
    state = load_file(directory / 'model.safetensors')
    state['global_pool.gain.beta'] = state['global_pool.gain.beta'].squeeze()
    save_file(state, directory / 'model.safetensors')
    with pytest.raises(ValueError, match=r'saved by rotp_vision 0\.2'):
        load_pretrained(directory)


# A network of the user's own


class Own(nn.Module):
    """Neither timm's nor torchvision's; it pools by a module."""

    def __init__(self, width=8, num_classes=3):
        super().__init__()
        self.body = nn.Conv2d(3, width, 3, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, images):
        return self.classifier(self.pool(self.body(images)).flatten(1))


class WithPool(Own):
    def __init__(self, width=8):
        super().__init__(width)
        self.pool = rotp_vision.GlobalROTPool2d({'feature_scale': 'log'}, width)


class Wrapper(nn.Module):
    """As transformers wraps a network of timm."""

    def __init__(self):
        super().__init__()
        self.timm_model = converted()


@pytest.mark.parametrize('make', [lambda **kwargs: convert(Own(**kwargs), 'sinkhorn'), WithPool])
def test_an_own_network_comes_back_through_the_callable_that_builds_it(tmp_path, make):
    base = WithPool if make is WithPool else Own
    model = make(width=5).eval()
    rotp_vision.rot_pools(model)['pool'].set_weights(smoothness=2.0, gain=1.5)
    save_pretrained(model, tmp_path / 'out', base=base, model_args={'width': 5})
    assert torch.equal(load_pretrained(tmp_path / 'out', base=base)(x), model(x))
    assert f'base={base.__name__})  # tests.test_hub:{base.__name__}' in (tmp_path / 'out' / 'README.md').read_text()
    for load in (load_pretrained, lambda path: timm.create_model(f'local-dir:{path}', pretrained=True)):
        with pytest.raises(ValueError, match=r'your own network, .*base=YourNetwork'):
            load(tmp_path / 'out')
    with pytest.raises(ValueError, match='do not fit'):
        load_pretrained(tmp_path / 'out', base=base, width=6)


def test_errors_of_own_networks(tmp_path):
    with pytest.raises(ValueError, match=r'body\.weight is \(5, .* here and would be \(8, .* model_args'):
        save_pretrained(convert(Own(5)), tmp_path / 'out', base=Own)
    with pytest.raises(ValueError, match='model_args must hold plain values'):
        save_pretrained(convert(Own()), tmp_path / 'out', base=Own, model_args={'width': object()})
    directory = save_pretrained(converted(), tmp_path / 'timm')
    with pytest.raises(ValueError, match=r'holds test_efficientnet, .*: load it without base'):
        load_pretrained(directory, base=Own)


def test_loading_an_own_network_imports_nothing(tmp_path):
    directory = save_pretrained(convert(Own()), tmp_path / 'out', base=Own)
    rewritten(directory, lambda config: config['model_args'].update(base='antigravity:fly'))
    with pytest.raises(ValueError, match='antigravity:fly'):
        load_pretrained(directory)
    assert load_pretrained(directory, base=Own)
    assert 'antigravity' not in sys.modules


# The model card


def test_the_card_says_what_it_is_and_what_it_needs(tmp_path):
    model = converted()
    model.pretrained_cfg |= {'license': 'cc-by-4.0', 'hf_hub_id': 'timm/test'}
    text = (save_pretrained(model, tmp_path / 'out', metrics={'top-1 %': 76.1}) / 'README.md').read_text()
    front = yaml.safe_load(text.split('---')[1])
    wanted = {'library_name': 'rotp_vision', 'pipeline_tag': 'image-classification', 'base_model': 'timm/test'}
    assert front.items() >= wanted.items()
    assert front['model-index'][0]['results'][0]['metrics'] == [{'type': 'top-1 %', 'value': 76.1}]
    for part in (
        'needs the package rotp_vision',
        f"rotp_vision.load_pretrained('{tmp_path / 'out'}')",
        '| smoothness | 3 |',
        '| top-1 % | 76.1 |',
        'licence cc-by-4.0 for the weights of timm/test',
    ):
        assert part in text
    text = (save_pretrained(model, tmp_path / 'mit', license='mit') / 'README.md').read_text()
    assert yaml.safe_load(text.split('---')[1])['license'] == 'mit'


def test_the_card_escapes_what_others_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metrics = {'<img src=x onerror=alert(1)>': '# heading\n| cell |', 'f1': 0.5}
    text = (save_pretrained(converted(), "it's", metrics=metrics) / 'README.md').read_text()
    assert '<img' not in text.split('---', 2)[2]
    assert '\n# heading' not in text
    assert r'&lt;img src=x onerror=alert(1)&gt; | \# heading \| cell \| |' in text
    (line,) = re.findall(r'load_pretrained\((.*)\)', text)
    assert ast.literal_eval(line) == "it's"
