import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rotp_vision.data import cache as module
from rotp_vision.data.cache import CachedMaps, DamagedMaps, fingerprint
from rotp_vision.data.config import DataConfig
from rotp_vision.data.loading import Batch

LENGTH = 11


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(module, 'MAX_IMAGES', 4)


def maps_of(indices):
    return torch.stack([torch.full((2, 3, 3), float(index)) + torch.arange(9.0).view(3, 3) / 16 for index in indices])


def written(directory, name='val', missing=(), interrupted_after=None):
    """Maps of images of which those `missing` cannot be read."""
    cached = CachedMaps(directory, name, LENGTH, (2, 3, 3))
    shards = [shard for shard in range(cached.num_shards) if cached.state(shard) != 'ready']

    def batches():
        for number, indices in enumerate(indices for shard in shards for indices in cached.batches(shard, 3)):
            if number == interrupted_after:
                raise KeyboardInterrupt
            labels = [-1 if index in missing else index % 4 for index in indices]
            yield Batch(maps_of(indices), torch.tensor(labels), [])

    computed = list(cached.write(shards, 3, batches(), lambda maps: maps))
    return cached, sum(len(batch.labels) for batch in computed)


def test_any_image_is_read_from_the_shards(tmp_path):
    cached, computed = written(tmp_path, missing={4})
    assert (cached.num_shards, computed) == (3, LENGTH)
    assert (len(cached), cached.readable) == (LENGTH, LENGTH - 1)
    batch = cached[[7, 0, 10]]
    assert batch.images.dtype == torch.float16
    assert batch.images.float().equal(maps_of([7, 0, 10]))
    assert batch.labels.tolist() == [3, 0, 2]
    assert cached[[3, 4]].images.float().equal(maps_of([3]))  # an unreadable image has no map
    assert len(cached[[4]].labels) == 0
    maps, labels = cached.read(range(LENGTH))
    assert labels.tolist() == [0, 1, 2, 3, -1, 1, 2, 3, 0, 1, 2]
    assert torch.from_numpy(maps).float().equal(maps_of(range(LENGTH)))


def test_an_interrupted_computation_continues_with_the_next_shard(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path, interrupted_after=3)  # in the second shard
    cached = CachedMaps(tmp_path, 'val', LENGTH, (2, 3, 3))
    assert [cached.state(shard) for shard in range(3)] == ['ready', 'missing', 'missing']
    assert written(tmp_path)[1] == LENGTH - 4
    assert [cached.state(shard) for shard in range(3)] == ['ready'] * 3
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize('damage', ['emptied', 'truncated', 'another shape'])
def test_a_file_of_another_size_is_damaged_before_it_is_read(tmp_path, damage):
    cached, _ = written(tmp_path)
    file, content = cached.file(1), cached.file(1).read_bytes()
    if damage == 'another shape':
        tensors = load_file(file)
        save_file(tensors | {'maps': tensors['maps'][:, :1].copy()}, file, {'version': module.VERSION})
    else:
        file.write_bytes(b'' if damage == 'emptied' else content[:-8])
    assert [cached.state(shard) for shard in range(3)] == ['ready', 'damaged', 'ready']


def test_an_older_file_is_of_another_version(tmp_path):
    cached, _ = written(tmp_path)
    save_file(load_file(cached.file(0)), cached.file(0), {'version': '0'})
    assert cached.state(0) == 'of another version'
    assert written(tmp_path)[1] == 4


@pytest.mark.parametrize('damage', ['a map', 'labels', 'another file'])
def test_other_content_is_noticed_when_it_is_read(tmp_path, damage):
    cached, _ = written(tmp_path)
    tensors = load_file(cached.file(1))
    if damage == 'a map':
        tensors['maps'][2] = 0
    elif damage == 'labels':
        tensors['labels'] = np.roll(tensors['labels'], 1)
    else:
        tensors = load_file(written(tmp_path, 'train0')[0].file(1))
    save_file(tensors, cached.file(1), {'version': module.VERSION})
    cached = CachedMaps(tmp_path, 'val', LENGTH, (2, 3, 3))
    assert cached.state(1) == 'ready'
    cached.read(range(4))
    with pytest.raises(DamagedMaps, match='damaged and has been removed: run again'):
        cached.read([6])
    assert cached.state(1) == 'missing'
    assert written(tmp_path)[0].read([6])[1] == [2]


def test_values_beyond_float16_are_refused(tmp_path):
    cached = CachedMaps(tmp_path, 'val', 1, (2, 3, 3))
    batch = Batch(torch.full((1, 2, 3, 3), 1e5), torch.tensor([0]), [])
    with pytest.raises(ValueError, match='does not fit float16'):
        list(cached.write([0], 1, [batch], lambda maps: maps))


def test_a_full_disk_is_an_error_of_the_system(tmp_path, monkeypatch):
    def full(*args):
        raise SafetensorError('No space left on device')

    monkeypatch.setattr(module, 'save_file', full)
    with pytest.raises(OSError, match=r'cannot write .*val-00000of00003\.safetensors: No space left'):
        written(tmp_path)


def test_fingerprint_knows_the_frozen_weights_and_the_facts():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2), torch.nn.Linear(2, 2))
    model[:2].requires_grad_(False)
    first = fingerprint(model, vars(DataConfig()), 0)
    with torch.no_grad():
        model[2].weight.add_(1)  # trained: no map depends on it
    assert fingerprint(model, vars(DataConfig()), 0) == first
    assert fingerprint(model, vars(DataConfig(image_size=96)), 0) != first
    assert fingerprint(model, vars(DataConfig()), 1) != first
    model[1].running_mean.add_(1)
    assert fingerprint(model, vars(DataConfig()), 0) != first
