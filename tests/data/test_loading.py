import multiprocessing
import shutil
from collections import namedtuple

import pytest
import torch

from rotp_vision.data import workers as module
from rotp_vision.data.config import DataConfig
from rotp_vision.data.loading import (
    Schedule,
    Shard,
    split_batch,
    train_batches,
    val_loader,
)
from rotp_vision.data.sources import open_sources
from rotp_vision.data.transforms import transforms
from rotp_vision.data.workers import check_shared_memory, iterate, random_state

NORM = ((0.5,) * 3, (0.5,) * 3)
ALONE = Shard(0, 1)


def batches(config, *, epoch=1, epochs=1, start=0, shard=ALONE, accumulation=1, seed=0):
    source, _ = open_sources(config, 0)
    transform, _ = transforms(config, *NORM)
    schedule = Schedule(len(source), 4, accumulation, shard, seed, range(epoch, epoch + epochs), start)
    return list(train_batches(source, transform, config, schedule))


def generated(**changes):
    settings = {'source': 'generated', 'image_size': 24, 'train_images': 18, 'val_images': 7, 'workers': 0}
    return DataConfig(**(settings | {'auto_augment': 'rand-m5-inc1', 'random_erasing': 0.5} | changes))


def assert_same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.images.dtype == torch.uint8
        assert one.images.equal(other.images)
        assert one.labels.equal(other.labels)


def test_a_batch_depends_on_epoch_and_step_alone():
    whole = batches(generated())
    assert len(whole) == 4  # the last 2 of 18 images are left out
    before = random_state()
    assert_same(whole[2:], batches(generated(), start=2))
    assert_same(whole[1:], batches(generated(workers=2), start=1))
    after = random_state()  # which loading does not change
    assert before['python'] == after['python']
    assert before['torch'].equal(after['torch'])
    assert before['numpy'][1].equal(after['numpy'][1])
    other = batches(generated(), epoch=2)
    assert not other[0].images.equal(whole[0].images)
    # Workers go on from one epoch to the next.
    assert_same([*whole[3:], *other], batches(generated(workers=2), start=3, epochs=2))


def test_workers_ship_bytes_and_live_for_the_stage():
    config = generated(workers=2, image_size=16)
    train, val = open_sources(config, 0)
    transform, evaluation = transforms(config, *NORM)
    stage = train_batches(train, transform, config, Schedule(18, 4, 1, ALONE, 0, range(3)))
    workers = set()
    for batch in stage:
        assert batch.images.dtype == torch.uint8
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert batch.images.is_shared()
        workers.add(frozenset(child.pid for child in multiprocessing.active_children()))
    assert len(workers) == 1
    loader = val_loader(val, evaluation, config, 3, ALONE)
    seen = []
    for _ in range(2):
        assert sum(len(batch.labels) for batch in iterate(loader)) == 7
        seen.append({child.pid for child in multiprocessing.active_children()} - set(*workers))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2


def test_shared_memory_that_is_too_small_is_said(monkeypatch):
    disk = namedtuple('disk', 'free')
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: disk(64 * 2**20))
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    monkeypatch.setattr(module.Path, 'is_dir', lambda path: True)
    check_shared_memory(0, 2**30)
    check_shared_memory(8, 2 * 2**20)
    with pytest.raises(OSError, match=r'2 × 8 data workers hold up to 96 MiB in /dev/shm, which has 64 MiB .*shm-size'):
        check_shared_memory(8, 3 * 2**20)


@pytest.mark.parametrize('accumulation', [1, 2])
def test_a_step_has_the_same_images_on_any_number_of_processes(accumulation):
    alone = batches(generated(), accumulation=accumulation)
    pair = [batches(generated(), accumulation=accumulation, shard=Shard(rank, 2)) for rank in range(2)]
    for number, batch in enumerate(alone):
        assert torch.cat([side[number].images for side in pair]).equal(batch.images)


def test_an_epoch_is_a_permutation():
    seen = [index for _, batch in Schedule(16, 4, 2, ALONE, 0, range(3, 4)).passes() for index in batch]
    assert sorted(seen) == list(range(16))
    assert seen != sorted(seen)
    with pytest.raises(ValueError, match='multiple of processes × accumulation = 3 × 2, got 8'):
        split_batch(8, 3, 2)


@pytest.mark.parametrize('processes', [1, 2, 3])
def test_evaluation_sees_every_image_exactly_once(processes):
    config = generated(val_images=10, num_classes=5)
    _, source = open_sources(config, 0)
    _, transform = transforms(config, *NORM)
    shares = [
        list(iterate(val_loader(source, transform, config, 3, Shard(rank, processes)))) for rank in range(processes)
    ]
    images = torch.cat([batch.images for share in shares for batch in share])
    direct = torch.stack([transform(source.read(index)[0]) for index in range(10)]).permute(0, 3, 1, 2)
    order = sorted(range(10), key=lambda index: (index % processes, index))
    assert images.equal(direct[order])


def test_an_unreadable_image_is_named_and_replaced_in_training_alone(folder):
    config = DataConfig(path=str(folder), image_size=16, workers=0)
    found = batches(config)
    assert [name for batch in found for name in batch.broken] == [str(folder / 'train/a/1.png')]
    assert all(len(batch.labels) == 4 for batch in found)
    assert_same(found[1:], batches(config, start=1))
    _, source = open_sources(config, 0)
    found = list(val_loader(source, transforms(config, *NORM)[1], config, 1, ALONE))
    assert [len(batch.labels) for batch in found] == [1, 1, 1, 1, 1, 1, 0]
    assert found[-1].broken == [str(folder / 'val/b/2.png')]
