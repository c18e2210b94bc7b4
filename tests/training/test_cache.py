import copy
import shutil

import pytest
import timm
from PIL import Image
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file

from rotp_vision.data.loading import Schedule, Shard
from rotp_vision.files import check_disk
from rotp_vision.training.cache import FeatureCache
from tests.data.test_cache import LENGTH, written
from tests.training.runs import TINY, Run, images


def test_batches_are_those_of_training_on_images_and_repeats_take_turns(tmp_path):
    for name in ('val', 'train0', 'train1'):
        written(tmp_path, name)
    cache = FeatureCache(tmp_path, (2, 3, 3), LENGTH, LENGTH, 2)
    schedule = Schedule(LENGTH, 4, 1, Shard(1, 2), 5, range(3, 5), 1)
    found = list(cache.train_batches(schedule, workers=0))
    expected = [indices for _, indices in schedule.passes()]
    assert [batch.images[:, 0, 0, 0].int().tolist() for batch in found] == expected
    assert cache[4, [2]].images.equal(cache.train[0][[2]].images)
    assert cache.train[0] is not cache.train[1]
    shares = [batch.labels for rank in range(2) for batch in cache.val_batches(3, Shard(rank, 2))]
    assert sum(map(len, shares)) == LENGTH


def test_size_is_known_before_and_refused_if_the_disk_is_too_small(tmp_path, monkeypatch):
    assert FeatureCache(tmp_path, (512, 7, 7), 1_281_167, 50_000, 1).bytes == (1_281_167 + 50_000) * 512 * 49 * 2
    assert FeatureCache(tmp_path, (2, 3, 3), 10, 5, 3).bytes == 35 * 36
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=10 * 2**30))
    with pytest.raises(OSError, match=r'the maps need 62\.00 GiB .* but 10\.00 GiB are free: buy a disk'):
        check_disk(tmp_path / 'not' / 'yet' / 'there', 62 * 2**30, 'the maps need', 'buy a disk')
    check_disk(tmp_path, 9 * 2**30, '', '')


@pytest.fixture(scope='module')
def stage2(tmp_path_factory):
    """Settings of stage 2 alone, and a run of them with its cache."""
    directory = tmp_path_factory.mktemp('stage2')
    settings = copy.deepcopy(TINY)
    settings['stage1'], settings['model']['checkpoint'] = {'epochs': 0}, str(directory / 'weights.safetensors')
    settings['stage2'] = {'epochs': 1, 'calibrate': 0, 'cache_features': True, 'cache_repeats': 2}
    network = timm.create_model(settings['model']['name'], num_classes=4, **settings['model']['kwargs'])
    save_file(network.state_dict(), settings['model']['checkpoint'])
    run = Run(directory, settings)
    assert run.run('--stage2.cache_dir', str(directory / 'cache')) == 0, run.text
    return settings, run, directory / 'cache'


def test_damaged_and_old_files_are_computed_again(tmp_path, stage2):
    settings, first, cache = stage2
    (directory,) = shutil.copytree(cache, tmp_path / 'cache').iterdir()
    truncated, old, changed = (next(directory.glob(f'{name}-*')) for name in ('train0', 'train1', 'val'))
    truncated.write_bytes(truncated.read_bytes()[:-8])
    save_numpy(load_file(old), old, {'version': '0'})
    tensors = load_file(changed)
    tensors['maps'][3] = 0
    save_numpy(tensors, changed, {'version': '1'})
    run = Run(tmp_path, settings)
    assert run.run('--stage2.cache_dir', str(tmp_path / 'cache')) == 1
    assert f'{truncated.name} in {directory} are damaged and are computed again' in run.text
    assert f'{old.name} in {directory} are of another version and are computed again' in run.text
    assert f'error: {changed} was damaged and has been removed' in run.text
    assert 'Traceback' not in run.text
    assert run.run('--stage2.cache_dir', str(tmp_path / 'cache'), '--resume', 'auto') == 0, run.text
    assert all(value.equal(first.weights[name]) for name, value in run.weights.items())


def test_a_cache_of_another_network_or_other_images_is_not_taken(tmp_path, stage2):
    settings = copy.deepcopy(stage2[0])
    settings['stage2'] |= {'cache_repeats': 0, 'cache_dir': str(tmp_path / 'cache')}
    data = images(tmp_path / 'images')
    settings['data'] = {'path': str(data), 'image_size': 32, 'workers': 0}
    runs = [settings, *(copy.deepcopy(settings) for _ in range(2)), settings, settings]
    runs[1]['model']['kwargs']['output_stride'] = 16
    runs[2]['mixed_precision'] = 'bf16'
    for i, run in enumerate(runs):
        if i == 4:  # other images with the same names
            Image.new('RGB', (40, 40), (255, 255, 255)).save(data / 'train/0/0.png')
        assert Run(tmp_path / str(i), run).run() == 0
        assert len(list((tmp_path / 'cache').iterdir())) == (1, 2, 3, 3, 4)[i]
