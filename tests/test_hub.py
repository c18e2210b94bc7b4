import ast
import json
import os
import re
import sys
import warnings
from functools import partial
from pathlib import Path

import huggingface_hub
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
from tests.hub_stand_in import stand_in

x = torch.linspace(-2, 2, 2 * 3 * 64 * 64).sin().view(2, 3, 64, 64)


def converted(name='test_efficientnet', **kwargs):
    torch.manual_seed(0)
    model = convert(timm.create_model(name, num_classes=5, **kwargs)).eval()
    for pool in rotp_vision.rot_pools(model).values():
        pool.set_weights(smoothness=3.0, gain=1.3)
    return model


def test_a_converted_model_comes_back_in_one_line(tmp_path):
    model = converted(in_chans=1)
    gray = x[:, :1]
    directory = save_pretrained(model, tmp_path / 'out', model_args={'in_chans': 1})
    assert sorted(os.listdir(tmp_path)) == ['out']
    assert sorted(os.listdir(directory)) == ['README.md', 'config.json', 'model.safetensors']
    assert torch.equal(load_pretrained(directory)(gray), model(gray))
    from_timm = timm.create_model(f'local-dir:{directory}', pretrained=True).eval()
    assert torch.equal(from_timm(gray), model(gray))
    finetuned = timm.create_model(f'local-dir:{directory}', pretrained=True, num_classes=2)
    assert finetuned(gray).shape == (2, 2)
    weights = rotp_vision.rot_pools(finetuned)['global_pool'].named_weights()
    assert weights['smoothness'].tolist() == pytest.approx([3.0])
    assert timm.create_model(f'local-dir:{directory}', pretrained=True, features_only=True)(gray)


def test_saving_again_what_was_loaded(tmp_path):
    model = converted()
    once = load_pretrained(save_pretrained(model, tmp_path / 'one'))
    for i, base in enumerate([None, 'test_efficientnet']):
        twice = load_pretrained(save_pretrained(once, tmp_path / f'again{i}', base=base))
        assert torch.equal(twice(x), model(x))


def built(name, **kwargs):
    """A network whose arguments timm does not record."""
    return timm.model_entrypoint(name)(**kwargs)


@pytest.mark.parametrize(
    'make', [lambda **kwargs: convert(built('resnet18', **kwargs)), partial(built, 'resnet18_rotp')]
)
def test_what_would_come_back_as_another_network_is_said(tmp_path, make):
    model = make(output_stride=8).eval()
    with pytest.warns(
        UserWarning, match=r'layer3\.0\.\S+ is Conv2d.* here and would be Conv2d.* when loaded\); pass .* as model_args'
    ):
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
    for i, model in enumerate([frozen, folded, other_classes, listed, *synced]):
        state = torch.random.get_rng_state()
        save_pretrained(model, tmp_path / str(i))
        assert torch.equal(torch.random.get_rng_state(), state)


def test_torchvision_and_registered_models(tmp_path):
    torch.manual_seed(0)
    model = convert(torchvision.models.resnet18(num_classes=4), where='all').eval()
    save_pretrained(model, tmp_path / 'tv', base='torchvision:resnet18')
    assert torch.equal(load_pretrained(tmp_path / 'tv')(x), model(x))
    ours = timm.create_model(
        'resnet18_rotp_local', num_classes=4, rotp=PoolOptions('sinkhorn', feature_scale='log')
    ).eval()
    save_pretrained(ours, tmp_path / 'ours')
    assert torch.equal(load_pretrained(tmp_path / 'ours')(x), ours(x))


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
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4, **arguments).eval()
    assert torch.equal(load_pretrained(save_pretrained(model, tmp_path / 'out'))(x), model(x))


@pytest.mark.parametrize('in_chans', [1, 2, 4, 6])
def test_images_of_other_than_three_channels(tmp_path, in_chans):
    image = torch.randn(2, in_chans, 64, 64)
    for i, model in enumerate([converted(in_chans=in_chans), timm.create_model('resnet18_rotp', in_chans=in_chans)]):
        once = load_pretrained(save_pretrained(model.eval(), tmp_path / f'once{i}'))
        twice = load_pretrained(save_pretrained(once, tmp_path / f'twice{i}'))
        assert torch.equal(once(image), model(image))
        assert torch.equal(twice(image), model(image))


@pytest.mark.parametrize('in_chans', [1, 3])
def test_images_whose_pixels_become_channels(tmp_path, in_chans):
    small = {'layers': [1, 1, 1, 1], 'width_factor': 0.25}
    model = convert(timm.create_model('tresnet_m', num_classes=5, in_chans=in_chans, **small)).eval()
    loaded = load_pretrained(save_pretrained(model, tmp_path / 'out', model_args=small))
    assert torch.equal(loaded(x[:, :in_chans]), model(x[:, :in_chans]))


def test_local_pools_are_not_dropped_in_silence(tmp_path):
    model = convert(timm.create_model('resnet18', num_classes=3), where='all')
    directory = save_pretrained(model, tmp_path / 'out')
    for arguments in ({'features_only': True}, {'global_pool': 'avg'}):
        with pytest.raises(ValueError, match='local ROT pools'):
            load_pretrained(directory, **arguments)


def test_force_replaces_three_files_and_touches_nothing_else(tmp_path):
    directory = save_pretrained(converted(), tmp_path / 'out')
    (directory / 'notes').mkdir()
    (directory / 'notes' / 'README.md').write_text('mine')
    link = tmp_path / 'link'
    link.symlink_to(directory, target_is_directory=True)
    node = directory.stat().st_ino, (directory / 'notes').stat().st_ino
    save_pretrained(converted(), link, force=True)
    assert link.is_symlink()
    assert (directory.stat().st_ino, (directory / 'notes').stat().st_ino) == node
    assert sorted(os.listdir(directory)) == ['README.md', 'config.json', 'model.safetensors', 'notes']
    assert (directory / 'notes' / 'README.md').read_text() == 'mine'
    (tmp_path / 'file').write_text('mine')
    with pytest.raises(ValueError, match='not a directory'):
        save_pretrained(converted(), tmp_path / 'file', force=True)
    assert (tmp_path / 'file').read_text() == 'mine'


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

    with monkeypatch.context() as patch:
        patch.setattr(rotp_vision.hub.save, 'save_config_for_hf', full_disk)
        with pytest.raises(OSError, match='No space left'):
            save_pretrained(model, directory, force=True)
    assert os.listdir(tmp_path) == ['out']
    assert load_file(directory / 'model.safetensors').keys() == before.keys()
    rotp_vision.rot_pools(model)['global_pool'].set_weights(gain=2.0)
    save_pretrained(model, directory, force=True)
    assert torch.equal(load_pretrained(directory)(x), model(x))
    assert os.listdir(tmp_path) == ['out']


def test_errors_of_saving(tmp_path):
    with pytest.raises(ValueError, match='no pool of rotp_vision to save'):
        save_pretrained(timm.create_model('test_resnet'), tmp_path / 'out')
    with pytest.raises(ValueError, match='base must name the native network'):
        save_pretrained(convert(torchvision.models.resnet18()), tmp_path / 'out')
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
    model = convert(torchvision.models.resnet18(num_classes=3))
    first, second = tmp_path / 'first', tmp_path / 'second'
    save_pretrained(model, first, base='torchvision:resnet18')
    config = json.loads((first / 'config.json').read_text())
    config['pretrained_cfg'] |= {'input_size': [3, 96, 96], 'crop_pct': 1.0}
    (first / 'config.json').write_text(json.dumps(config))
    save_pretrained(load_pretrained(first), second)
    found = resolve_model_data_config(load_pretrained(second))
    assert (list(found['input_size']), found['crop_pct']) == ([3, 96, 96], 1.0)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickles_that_could_run_code_are_refused(tmp_path):
    made = tmp_path / 'made'
    torch.save({'state_dict': {}, 'extra': Malicious(str(made))}, tmp_path / 'bad.pth')
    with pytest.raises(ValueError, match='could run code on loading'):
        read_state_dict(tmp_path / 'bad.pth')
    assert not made.exists()
    (tmp_path / 'text.pth').write_text('hello')
    with pytest.raises(ValueError, match=r'is not (read|a checkpoint)'):
        read_state_dict(tmp_path / 'text.pth')
    torch.save([1, 2], tmp_path / 'list.pth')
    with pytest.raises(ValueError, match='checkpoint'):
        read_state_dict(tmp_path / 'list.pth')
    with pytest.raises(ValueError, match='there is no checkpoint file'):
        read_state_dict(tmp_path / 'nothing.pth')


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
    config = json.loads((directory / 'config.json').read_text())
    config['model_args']['base'] = 'antigravity:fly'
    (directory / 'config.json').write_text(json.dumps(config))
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
    assert (front['library_name'], front['pipeline_tag'], front['base_model']) == (
        'rotp_vision',
        'image-classification',
        'timm/test',
    )
    assert front['model-index'][0]['results'][0]['metrics'] == [{'type': 'top-1 %', 'value': 76.1}]
    assert 'needs the package rotp_vision' in text
    assert f"rotp_vision.load_pretrained('{tmp_path / 'out'}')" in text
    assert '| smoothness | 3 |' in text
    assert '| gain | 1.3 |' in text
    assert '| top-1 % | 76.1 |' in text
    assert 'licence cc-by-4.0 for the weights of timm/test' in text
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


class Wrapper(nn.Module):
    """As transformers wraps a network of timm."""

    def __init__(self):
        super().__init__()
        self.timm_model = converted()


def test_a_wrapper_of_transformers_is_told_what_to_save(tmp_path):
    with pytest.raises(ValueError, match=r'save_pretrained\(model\.timm_model, directory\)'):
        save_pretrained(Wrapper(), tmp_path / 'out', base='test_efficientnet')


# The Hugging Face Hub, as a stand-in on this machine


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The repositories of a hub to which everything is sent that would go to huggingface.co."""
    with stand_in() as (address, repositories):
        monkeypatch.setattr(huggingface_hub.constants, 'ENDPOINT', address)
        url = address + '/{repo_id}/resolve/{revision}/{filename}'
        monkeypatch.setattr(huggingface_hub.constants, 'HUGGINGFACE_CO_URL_TEMPLATE', url)
        monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
        for name in list(os.environ):
            if name.lower().endswith('_proxy'):
                monkeypatch.delenv(name)
        huggingface_hub.close_session()
        yield repositories
        huggingface_hub.close_session()


def test_a_published_model_is_loaded_by_timm_and_by_us(hub):
    model = converted()
    where = rotp_vision.push_to_hub(model, 'me/model', metrics={'top-1 %': 76.1}, license='mit', token='hf_x')
    assert where.startswith('http://127.0.0.1:')
    assert sorted(set(hub['me/model']) - {'.gitattributes'}) == ['README.md', 'config.json', 'model.safetensors']
    card = hub['me/model']['README.md'].decode()
    assert "rotp_vision.load_pretrained('hf-hub:me/model')" in card
    assert "timm.create_model('hf-hub:me/model', pretrained=True)" in card
    assert '| top-1 % | 76.1 |' in card
    assert 'license: mit' in card
    for loaded in (
        load_pretrained('hf-hub:me/model'),
        load_pretrained('hf-hub:me/model@main'),
        timm.create_model('hf-hub:me/model', pretrained=True).eval(),
    ):
        assert torch.equal(loaded(x), model(x))


def test_an_own_network_is_published(hub):
    model = convert(Own()).eval()
    rotp_vision.push_to_hub(model, 'me/own', base=Own, token='hf_x')
    assert torch.equal(load_pretrained('hf-hub:me/own', base=Own)(x), model(x))


def test_what_timm_publishes_is_loaded_again(hub):
    model = calibrated(converted()).eval()
    timm.models.push_to_hf_hub(model, 'me/timm', token='hf_x', safe_serialization=True)
    assert torch.equal(timm.create_model('hf-hub:me/timm', pretrained=True).eval()(x), model(x))
