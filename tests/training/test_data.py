import io
import multiprocessing
import random
import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch
from PIL import Image, JpegImagePlugin
from timm.data import create_transform

from rotp_vision.images import UnreadableImage, open_image
from rotp_vision.training import data
from rotp_vision.training.config import DataConfig
from rotp_vision.training.data import (
    Batch,
    Schedule,
    Shard,
    check_shared_memory,
    collate,
    normalized,
    on_device,
    preprocessing,
    seeded,
    split_batch,
    train_batches,
    transforms,
    val_loader,
)
from rotp_vision.training.processes import iterate, random_state
from rotp_vision.training.sources import data_changes, decode_row, hold_out, inventory, open_sources

NORM = ((0.5,) * 3, (0.5,) * 3)
ALONE = Shard(0, 1)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """12 training and 7 validation images of 2 classes, of which train/a/1.png and val/b/2.png cannot be read."""
    root = tmp_path_factory.mktemp('images')
    rng = np.random.default_rng(0)
    for split, counts in (('train', (6, 6)), ('val', (4, 3))):
        for name, count in zip('ab', counts, strict=True):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                file = root / split / name / f'{number}.png'
                Image.fromarray(rng.integers(0, 256, (24, 20, 3), np.uint8)).save(file)
    for broken in ('train/a/1.png', 'val/b/2.png'):
        content = (root / broken).read_bytes()
        (root / broken).write_bytes(content[: len(content) // 2])
    return root


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
        assert one.erased is other.erased is None or one.erased.equal(other.erased)
        assert one.labels.equal(other.labels)


def test_a_batch_depends_on_epoch_and_step_alone():
    whole = batches(generated())
    assert len(whole) == 4  # the last 2 of 18 images are left out
    random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
    assert_same(whole[2:], batches(generated(), start=2))
    assert_same(whole[1:], batches(generated(workers=2), start=1))
    other = batches(generated(), epoch=2)
    assert not other[0].images.equal(whole[0].images)
    # Workers go on from one epoch to the next.
    assert_same([*whole[3:], *other], batches(generated(workers=2), start=3, epochs=2))


NORMS = [torch.tensor(values) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
PLAIN = tuple(tuple(values.tolist()) for values in NORMS)


def by_timm(config, **training):
    """timm's own transform, from an image to a normalised tensor."""
    return create_transform(**preprocessing(config, *PLAIN), **training)


def training_of(config):
    names = ('scale', 'ratio', 'hflip', 'color_jitter', 'auto_augment')
    return {name: getattr(config, name) for name in names} | {'is_training': True, 're_prob': config.random_erasing}


@pytest.mark.parametrize('changes', [{}, {'color_jitter': 0.4}, {'auto_augment': 'rand-m9-mstd0.5-inc1'}], ids=str)
def test_augmentation_is_that_of_timm(changes):
    """Bit for bit, where no pixel is resized: flips, jitter, RandAugment and erasing."""
    config = DataConfig(
        **{'source': 'generated', 'image_size': 24, 'train_images': 12, 'workers': 0, 'hflip': 0.5},
        **{'scale': (1.0, 1.0), 'ratio': (1.0, 1.0), 'random_erasing': 0.5, **changes},
    )
    source, _ = open_sources(config, 0)
    transform, plain = transforms(config, *PLAIN)[0], by_timm(config, **training_of(config))
    (batch,) = train_batches(source, transform, config, Schedule(12, 12, 1, ALONE, 3, range(2, 3)))
    ((_, order),) = Schedule(12, 12, 1, ALONE, 3, range(2, 3)).passes()
    found = normalized(batch.images, *NORMS, batch.erased)
    for image, index in zip(found, order, strict=True):
        with seeded(3, 2, index):
            expected = plain(source.read(index)[0])
        assert image.equal(expected)
    assert 2 < int(batch.erased.any(1).sum()) < 12


def photo(size):
    """A smooth random image, as large photos are."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (3, 4, 3), np.uint8))
    return small.resize(size, Image.Resampling.BICUBIC)


def test_a_crop_is_that_of_timm_but_for_rounding():
    config = DataConfig(path='x', image_size=64, workers=0)
    transform, plain = transforms(config, *PLAIN)[0], by_timm(config, **training_of(config))
    image = photo((200, 150))
    for seed in range(8):
        with seeded(seed):
            found = transform(transform.decode(image.copy()))
        with seeded(seed):
            expected = plain(image)
        levels = (normalized(found.permute(2, 0, 1)[None], *NORMS)[0] - expected) * NORMS[1][:, None, None] * 255
        assert levels.abs().max() < 2.5
        assert levels.abs().mean() < 0.5


def jpeg(image, **options):
    file = io.BytesIO()
    image.save(file, 'JPEG', quality=95, **options)
    file.seek(0)
    return file


@pytest.mark.parametrize('mode', ['RGB', 'L', 'CMYK'])
def test_large_jpegs_are_decoded_at_a_fraction_of_their_size_for_training_alone(mode, monkeypatch):
    settings = {'path': 'x', 'image_size': 32, 'workers': 0, 'scale': (0.5, 1.0)}
    drafts, full = (transforms(DataConfig(**settings, draft=draft), *PLAIN)[0] for draft in (True, False))
    image = photo((500, 401)).convert(mode)
    for seed in range(4):
        with seeded(seed):
            top, left, height, width = drafts.crop.get_params(image, drafts.crop.scale, drafts.crop.ratio)
        with seeded(seed):
            found = open_image(jpeg(image), None, drafts.decode)
        factor = 8 if min(height, width) >= 256 else 4
        box = [round(edge / factor) for edge in (left, top, left + width, top + height)]
        expected = image.convert('RGB').reduce(factor).crop(box)
        assert found.size == expected.size
        assert np.abs(np.asarray(found).astype(int) - np.asarray(expected)).mean() < 2.5  # of 255
        with seeded(seed):
            assert open_image(jpeg(image), None, full.decode).size == (width, height)

    def draft(*args):
        raise AssertionError('drafted')

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, 'draft', draft)
    _, evaluation = transforms(DataConfig(**settings), *PLAIN)
    for decode in (evaluation.decode, full.decode):
        open_image(jpeg(image), None, decode)
    with pytest.raises(UnreadableImage, match='drafted'):
        open_image(jpeg(image), None, drafts.decode)


def test_evaluation_is_that_of_timm_bit_for_bit():
    config = DataConfig(path='x', image_size=48, crop_pct=0.9)
    _, transform = transforms(config, *PLAIN)
    image = open_image(jpeg(photo((211, 150))))
    found = normalized(transform(image).permute(2, 0, 1)[None], *NORMS)[0]
    assert found.equal(by_timm(config)(image))


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
    monkeypatch.setattr(data.Path, 'is_dir', lambda path: True)
    check_shared_memory(0, 2**30)
    check_shared_memory(8, 2 * 2**20)
    with pytest.raises(OSError, match=r'2 × 8 data workers hold up to 96 MiB in /dev/shm, which has 64 MiB .*shm-size'):
        check_shared_memory(8, 3 * 2**20)


def test_the_next_batch_is_copied_while_one_is_in_use(monkeypatch):
    """The order of what is queued on a GPU, without one."""
    queued = []

    class Stream:
        def __init__(self, *args):
            pass

        def __enter__(self):
            queued.append('side')

        def __exit__(self, *args):
            queued.append('main')

        def wait_stream(self, other):
            queued.append('wait')

    class Tensor:
        def __init__(self, name):
            self.name = name

        def record_stream(self, stream):
            queued.append(f'hold {self.name}')

    monkeypatch.setattr(torch.cuda, 'Stream', Stream)
    monkeypatch.setattr(torch.cuda, 'stream', lambda stream: stream)
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda device: Stream())

    def prepare(batch):
        queued.append(f'copy {batch.broken[0]}')
        return batch

    batches = (Batch(Tensor(f'i{n}'), Tensor(f'l{n}'), [f'{n}']) for n in range(3))
    for batch in on_device(batches, prepare, torch.device('cuda', 0)):
        queued.append(f'use {batch.broken[0]}')
    copies = [['side', f'copy {n}', 'main'] for n in range(3)]
    waits = [['wait', f'hold i{n}', f'hold l{n}'] for n in range(3)]
    expected = [*copies[0], *waits[0], *copies[1], 'use 0', *waits[1], *copies[2], 'use 1', *waits[2], 'use 2']
    assert queued == expected
    assert [batch.images for batch in on_device([Batch(1, 2, [])], lambda b: b, torch.device('cpu'))] == [1]


def test_images_that_are_held_out_are_trained_on_by_nobody():
    source, _ = open_sources(generated(train_images=40), 0)
    train, held = hold_out(source, 8, 5)
    assert sorted([*train.indices, *held.indices]) == list(range(40))
    assert len(held) == 8
    assert np.array_equal(hold_out(source, 8, 5)[1].indices, held.indices)
    assert not np.array_equal(hold_out(source, 8, 6)[1].indices, held.indices)
    assert np.array_equal(held.read(3)[0], source.read(held.indices[3])[0])


def test_a_batch_without_a_readable_image_is_empty():
    batch = collate([data.Sample(None, -1, ['a'])])
    assert (len(batch.labels), batch.broken, batch.erased) == (0, ['a'], None)


def test_loading_leaves_the_generators_alone():
    before = random_state()
    batches(generated())
    batches(generated(workers=1))
    after = random_state()
    assert before['python'] == after['python']
    assert before['torch'].equal(after['torch'])
    assert before['numpy'][1].equal(after['numpy'][1])


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


def test_an_unreadable_training_image_is_replaced_and_named(folder):
    config = DataConfig(path=str(folder), image_size=16, workers=0)
    found = batches(config)
    broken = [name for batch in found for name in batch.broken]
    assert broken == [str(folder / 'train/a/1.png')]
    assert all(len(batch.labels) == 4 for batch in found)
    assert_same(found[1:], batches(config, start=1))


def test_an_unreadable_validation_image_is_left_out_and_named(folder):
    config = DataConfig(path=str(folder), image_size=16, workers=0)
    _, source = open_sources(config, 0)
    _, transform = transforms(config, *NORM)
    found = list(val_loader(source, transform, config, 3, ALONE))
    assert sum(len(batch.labels) for batch in found) == 6
    assert [name for batch in found for name in batch.broken] == [str(folder / 'val/b/2.png')]


def test_wrong_folders_are_refused_before_anything_runs(folder, tmp_path):
    def refusal(**settings):
        with pytest.raises(ValueError, match=r'\w') as info:
            open_sources(DataConfig(**settings), 0)
        return str(info.value)

    assert 'existing directory' in refusal(path=str(tmp_path / 'nowhere'))
    assert 'no ' in refusal(path=str(folder), val_split='test')
    assert 'data.num_classes is 1000 but 2' in refusal(path=str(folder), num_classes=1000)
    for split, names in (('train', 'abc'), ('val', 'abd')):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            Image.new('RGB', (8, 8)).save(tmp_path / split / name / '0.png')
    assert 'only one of them has c, d' in refusal(path=str(tmp_path))
    (tmp_path / 'train/c/0.png').unlink()
    assert 'holds no image' in refusal(path=str(tmp_path))
    (tmp_path / 'empty/train').mkdir(parents=True)
    (tmp_path / 'empty/val').mkdir()
    assert "split 'train'" in refusal(path=str(tmp_path / 'empty'))
    assert '2 to 8' in refusal(source='generated', num_classes=9)


@pytest.fixture(scope='module')
def parquet(folder, tmp_path_factory):
    """The same images as parquet files (in shards, with the images' bytes) and as an arrow copy."""
    import datasets

    root = tmp_path_factory.mktemp('hub')
    splits = {}
    for split in ('train', 'val'):
        files = sorted((folder / split).rglob('*.png'))
        rows = [{'image': {'bytes': f.read_bytes(), 'path': f.name}, 'label': 'ab'.index(f.parent.name)} for f in files]
        kinds = datasets.Features(
            {'image': datasets.Image(decode=False), 'label': datasets.ClassLabel(names=['a', 'b'])}
        )
        splits[split] = datasets.Dataset.from_list(rows, features=kinds)
        (root / 'parquet').mkdir(exist_ok=True)
        for number in range(2):
            splits[split].shard(2, number).to_parquet(root / 'parquet' / f'{split}-{number}.parquet')
    datasets.DatasetDict(splits).save_to_disk(root / 'arrow')
    return root


@pytest.mark.parametrize('kind', ['parquet', 'arrow'])
def test_hub_copies_give_the_folders_images(folder, parquet, kind):
    hub = DataConfig(source='hf', path=str(parquet / kind), image_size=16, workers=0)
    _, source = open_sources(hub, 0)
    assert source.classes == ['a', 'b']
    _, expected = open_sources(DataConfig(path=str(folder)), 0)
    assert np.array_equal(source.read(4)[0], expected.read(4)[0])
    _, transform = transforms(hub, *NORM)
    found = list(val_loader(source, transform, hub, 4, ALONE))
    assert sum(len(batch.labels) for batch in found) == 6
    assert sum(len(batch.broken) for batch in found) == 1


def stream(parquet, **changes):
    settings = {'source': 'hf', 'path': str(parquet / 'parquet'), 'streaming': True, 'image_size': 16, 'workers': 0}
    return DataConfig(**(settings | {'train_images': 12, 'val_images': 7, 'shuffle_buffer': 5} | changes))


@pytest.mark.parametrize('workers', [0, 2])
def test_a_stream_continues_where_it_was(parquet, workers, monkeypatch):
    monkeypatch.setattr('datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN', 0)

    config = stream(parquet, workers=workers)
    source, _ = open_sources(config, 0)
    transform, _ = transforms(config, *NORM)

    def batches_from(epoch, start):
        schedule = Schedule(16, 2, 1, ALONE, 0, range(epoch, 3), start)  # of more images than there are: it goes round
        return list(train_batches(source, transform, config, schedule))

    whole = batches_from(1, 0)
    assert [len(batch.labels) for batch in whole] == [2] * 16
    assert any(batch.broken for batch in whole)
    assert_same(whole[3:], batches_from(1, 3))
    assert_same(whole[8:], batches_from(2, 0))


@pytest.mark.parametrize('kind', ['parquet', 'arrow'])
def test_an_inventory_of_a_hub_set_is_the_same_until_the_set_is_another(parquet, tmp_path, kind):
    import datasets

    def train(path):
        source, _ = open_sources(DataConfig(source='hf', path=str(path)), 0)
        return {'train': inventory(source)}

    before = train(parquet / kind)
    assert data_changes(before, train(parquet / kind)) == []
    splits = datasets.load_from_disk(str(parquet / 'arrow'))
    splits['train'] = splits['train'].select(range(11, -1, -1))
    splits.save_to_disk(tmp_path / 'other')
    assert data_changes(before, train(tmp_path / 'other')) == ['train: other files, as many as before']


@pytest.mark.parametrize('names', [['a', 'b'], None])
@pytest.mark.parametrize('label', [None, -1, 2**40])
def test_a_wrong_label_is_said_in_one_sentence(tmp_path, label, names):
    import datasets

    image = {'bytes': (b'no image'), 'path': None}
    kinds = {'image': datasets.Image(decode=False), 'label': datasets.Value('int64')}
    rows = datasets.Dataset.from_list([{'image': image, 'label': 1}] * 3 + [{'image': image, 'label': label}])
    rows = rows.cast(datasets.Features(kinds))
    if names:
        rows = rows.cast_column('label', datasets.Value('int64'))
        rows.info.features['label'] = rows.features['label'] = datasets.ClassLabel(names=names)
    datasets.DatasetDict({'train': rows, 'val': rows}).save_to_disk(tmp_path / 'wrong')
    with pytest.raises(ValueError, match=f'class numbers from 0 to .*, got {label} in train'):
        open_sources(DataConfig(source='hf', path=str(tmp_path / 'wrong')), 0)


def test_rows_of_a_stream_without_image_or_of_no_class_are_broken():
    config = DataConfig(source='hf', path='x')
    for row, name in (
        ({'image': None, 'label': 0}, 'train[3]'),
        ({'image': {'bytes': None, 'path': None}, 'label': 0}, 'train[3]'),
        ({'image': {'bytes': b'', 'path': None}, 'label': None}, 'train[3] (of label None)'),
        ({'image': {'bytes': b'', 'path': None}, 'label': -1}, 'train[3] (of label -1)'),
        ({'image': {'bytes': b'', 'path': None}, 'label': 2}, 'train[3] (of label 2)'),
    ):
        with pytest.raises(UnreadableImage) as caught:
            decode_row(row, config, 2, 'train[3]')
        assert caught.value.name == name


@pytest.mark.parametrize('processes', [1, 2])
def test_evaluation_of_a_stream_sees_every_image_once(parquet, processes):
    config = stream(parquet)
    _, source = open_sources(config, 0)
    _, transform = transforms(config, *NORM)
    found = [b for rank in range(processes) for b in val_loader(source, transform, config, 2, Shard(rank, processes))]
    assert sum(len(batch.labels) for batch in found) == 6
    assert sum(len(batch.broken) for batch in found) == 1


def test_a_stream_of_unknown_size_or_column_is_refused(parquet, monkeypatch):
    import datasets

    rows = datasets.Dataset.from_dict({'image': ['x'], 'label': [0]}).to_iterable_dataset()
    monkeypatch.setattr(datasets, 'load_dataset', lambda *args, **kwargs: rows)
    monkeypatch.setattr(rows.info, 'splits', None)
    with pytest.raises(ValueError, match=r'give data\.train_images'):
        open_sources(stream(parquet, path='some/name', train_images=None), 0)
    with pytest.raises(ValueError, match=r'data.label_key must be one of the columns image, label'):
        open_sources(stream(parquet, path='some/name', label_key='class'), 0)


def test_labels_of_a_saved_set_are_checked(tmp_path):
    import datasets

    def rows(labels, kind):
        columns = {'image': datasets.Image(decode=False), 'label': kind}
        images = [{'bytes': b'', 'path': None}] * len(labels)
        return datasets.Dataset.from_dict({'image': images, 'label': labels}, datasets.Features(columns))

    def named(*names):
        return datasets.ClassLabel(names=list(names))

    number, text = datasets.Value('int64'), datasets.Value('string')
    cases = {
        'same classes in the same order': ([0, 1], named('a', 'b'), [0, 1], named('b', 'a')),
        'only one of them has 2, 3': ([0, 1], number, [0, 3], number),
        'must hold class numbers from 0.*class_encode_column': (['cat', 'dog'], text, ['cat', 'dog'], text),
        'numbers from 0 to .*, got -1 in val': ([0, 1], number, [-1, -1], number),
    }
    for i, (message, (train, train_kind, val, val_kind)) in enumerate(cases.items()):
        splits = datasets.DatasetDict(train=rows(train, train_kind), val=rows(val, val_kind))
        splits.save_to_disk(tmp_path / str(i))
        with pytest.raises(ValueError, match=message):
            open_sources(DataConfig(source='hf', path=str(tmp_path / str(i))), 0)
    datasets.DatasetDict(train=rows([0, 1, 2], number), val=rows([0, 1], number)).save_to_disk(tmp_path / 'fewer')
    assert len(open_sources(DataConfig(source='hf', path=str(tmp_path / 'fewer')), 0)[0].classes) == 3
    rows([0, 1], number).save_to_disk(tmp_path / 'single')
    with pytest.raises(ValueError, match='one set of images, not several'):
        open_sources(DataConfig(source='hf', path=str(tmp_path / 'single')), 0)
