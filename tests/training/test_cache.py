import copy
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from rotp_vision.training.cache import CachedMaps, CachePlan, FeatureCache, fingerprint, shard_file, write_shard
from rotp_vision.training.config import DataConfig
from rotp_vision.training.data import Batch, Schedule, Shard
from tests.training.runs import TINY, Run
from tests.training.test_train import images

LENGTH = 11


def maps_of(indices):
    return torch.stack([torch.full((2, 3, 3), float(index)) + torch.arange(9.0).view(3, 3) / 16 for index in indices])


def write(directory, part, processes, missing=()):
    for rank in range(processes):
        indices = list(range(rank, LENGTH, processes))
        chunks = [indices[first : first + 2] for first in range(0, len(indices), 2)]
        batches = (
            Batch(maps_of(chunk), torch.tensor([-1 if index in missing else index % 4 for index in chunk]), [])
            for chunk in chunks
        )
        write_shard(shard_file(directory, part, Shard(rank, processes)), batches, lambda maps: maps, len(indices))


@pytest.mark.parametrize('processes', [1, 3])
def test_any_image_is_read_from_the_shards_of_all_processes(tmp_path, processes):
    write(tmp_path, 'val', processes, missing={4})
    cached = CachedMaps(tmp_path, 'val', processes)
    assert (len(cached), cached.readable) == (LENGTH, LENGTH - 1)
    batch = cached[[7, 0, 10]]
    assert batch.images.dtype == torch.float16
    assert batch.images.float().equal(maps_of([7, 0, 10]))
    assert batch.labels.tolist() == [3, 0, 2]
    assert cached[[3, 4]].images.float().equal(maps_of([3]))  # an unreadable image has no map


def test_batches_are_those_of_training_on_images_and_views_take_turns(tmp_path):
    for part in ('val', 'train0', 'train1'):
        write(tmp_path, part, 2)
    cache = FeatureCache(tmp_path, 2, 2)
    schedule = Schedule(LENGTH, 4, 1, Shard(1, 2), 5, range(3, 5), 1)
    found = list(cache.train_batches(schedule, workers=0))
    expected = [indices for _, indices in schedule.passes()]
    assert [batch.images[:, 0, 0, 0].int().tolist() for batch in found] == expected
    assert cache[4, [2]].images.equal(cache.train[0][[2]].images)
    assert cache.train[0] is not cache.train[1]
    shares = [batch.labels for rank in range(2) for batch in cache.val_batches(3, Shard(rank, 2))]
    assert sum(map(len, shares)) == LENGTH


def test_an_interrupted_shard_does_not_exist(tmp_path):
    def batches():
        yield Batch(maps_of([0]), torch.tensor([0]), [])
        raise KeyboardInterrupt

    file = shard_file(tmp_path, 'val', Shard(0, 1))
    with pytest.raises(KeyboardInterrupt):
        write_shard(file, batches(), lambda maps: maps, 2)
    assert not file.exists()


def test_values_beyond_float16_are_refused(tmp_path):
    batch = Batch(torch.full((1, 2, 3, 3), 1e5), torch.tensor([0]), [])
    with pytest.raises(ValueError, match='does not fit float16'):
        write_shard(shard_file(tmp_path, 'val', Shard(0, 1)), iter([batch]), lambda maps: maps, 1)


def test_size_is_known_before_and_refused_where_the_disk_is_too_small(tmp_path, monkeypatch):
    plan = CachePlan((512, 7, 7), 1_281_167, 50_000, 1)
    assert plan.bytes == (1_281_167 + 50_000) * 512 * 49 * 2
    assert CachePlan((2, 3, 3), 10, 5, 3).bytes == 35 * 36
    write(tmp_path, 'val', 1)
    on_disk = np.load(shard_file(tmp_path, 'val', Shard(0, 1))).nbytes
    assert CachePlan((2, 3, 3), 0, LENGTH, 0).bytes == on_disk
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=10 * 2**30))
    with pytest.raises(OSError, match=r'needs 62\.\d\d GiB .* but 10\.00 GiB are free'):
        plan.check_disk(tmp_path / 'not' / 'yet' / 'there')
    CachePlan((2, 3, 3), 10, 5, 3).check_disk(tmp_path)


def test_fingerprint_knows_what_maps_depend_on():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2), torch.nn.Linear(2, 2))
    model[:2].requires_grad_(False)
    data = DataConfig()
    first = fingerprint(model, data, 0, 1)
    with torch.no_grad():
        model[2].weight.add_(1)  # trained: no map depends on it
    assert fingerprint(model, DataConfig(workers=1), 0, 1) == first
    assert fingerprint(model, DataConfig(image_size=96), 0, 1) != first
    assert fingerprint(model, data, 1, 1) != first
    assert fingerprint(model, data, 0, 2) != first
    assert fingerprint(model, data, 0, 1, ['bf16']) != first
    model[1].running_mean.add_(1)
    assert fingerprint(model, data, 0, 1) != first


def zero_half(directory):
    file = directory / 'train0-0of1.npy'
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def shift_labels(directory):
    file = directory / 'train0-0of1-labels.npy'
    np.save(file, np.roll(np.load(file), 1))


def swap_views(directory):
    for file in directory.glob('train0*'):
        other = file.with_name(file.name.replace('train0', 'train1'))
        kept = file.read_bytes()
        file.write_bytes(other.read_bytes())
        other.write_bytes(kept)


def empty(directory):
    (directory / 'val-0of1.npy').write_bytes(b'')


def truncate_labels(directory):
    file = directory / 'val-0of1-labels.npy'
    file.write_bytes(file.read_bytes()[:-8])


@pytest.fixture(scope='module')
def stage2(tmp_path_factory):
    """Settings of stage 2 alone, and a run of them with its cache."""
    place = tmp_path_factory.mktemp('stage2')
    settings = copy.deepcopy(TINY)
    settings['stage1'], settings['model']['checkpoint'] = {'epochs': 0}, str(place / 'weights.safetensors')
    settings['stage2'] = {'epochs': 1, 'calibrate': 0, 'cache_features': True, 'cache_views': 2}
    network = timm.create_model(settings['model']['name'], num_classes=4, **settings['model']['kwargs'])
    save_file(network.state_dict(), settings['model']['checkpoint'])
    run = Run(place, settings)
    assert run.run('--stage2.cache_dir', str(place / 'cache')) == 0, run.text
    return settings, run, place / 'cache'


@pytest.mark.parametrize('damage', [zero_half, shift_labels, swap_views, empty, truncate_labels])
def test_a_damaged_cache_is_computed_anew(tmp_path, stage2, damage):
    settings, first, cache = stage2
    (directory,) = shutil.copytree(cache, tmp_path / 'cache').iterdir()
    damage(directory)
    run = Run(tmp_path, settings)
    assert run.run('--stage2.cache_dir', str(tmp_path / 'cache')) == 0, run.text
    assert run.text.count('are damaged and are computed again') == 1
    ours, theirs = (load_file(one.checkpoints[-1] / 'model.safetensors') for one in (run, first))
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_other_images_of_the_same_names_have_a_cache_of_their_own(tmp_path, stage2):
    settings = copy.deepcopy(stage2[0])
    settings['stage2'] |= {'cache_views': 0, 'cache_dir': str(tmp_path / 'cache')}
    data = images(tmp_path / 'images')
    settings['data'] = {'path': str(data), 'image_size': 32, 'workers': 0}
    assert Run(tmp_path / 'first', settings).run() == 0
    Image.new('RGB', (40, 40), (255, 255, 255)).save(data / 'train/0/0.png')
    run = Run(tmp_path / 'second', settings)
    assert run.run() == 0, run.text
    assert 'computing' in run.text
    assert len(list((tmp_path / 'cache').iterdir())) == 2


def test_a_cache_of_another_network_or_other_images_is_not_taken(tmp_path, stage2):
    settings = copy.deepcopy(stage2[0])
    settings['stage2'] |= {'cache_views': 0, 'cache_dir': str(tmp_path / 'cache')}
    runs = [settings, copy.deepcopy(settings), copy.deepcopy(settings), settings]
    runs[1]['model']['kwargs']['output_stride'] = 16
    runs[2]['mixed_precision'] = 'bf16'
    for i, run in enumerate(runs):
        assert Run(tmp_path / str(i), run).run() == 0
    assert len(list((tmp_path / 'cache').iterdir())) == 3
