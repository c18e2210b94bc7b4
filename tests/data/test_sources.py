import os
import shutil

import numpy as np
import pytest
from PIL import Image

from rotp_vision.data import sources
from rotp_vision.data.config import DataConfig
from rotp_vision.data.sources import FolderSource, HubSource, data_changes, hold_out, inventory, open_sources
from rotp_vision.images import UnreadableImage


def generated(**changes):
    return DataConfig(**({'source': 'generated', 'image_size': 24, 'train_images': 40, 'val_images': 7} | changes))


def test_images_that_are_held_out_are_trained_on_by_nobody():
    source, _ = open_sources(generated(), 0)
    train, held = hold_out(source, 8, 5)
    assert sorted([*train.indices, *held.indices]) == list(range(40))
    assert len(held) == 8
    assert np.array_equal(hold_out(source, 8, 5)[1].indices, held.indices)
    assert not np.array_equal(hold_out(source, 8, 6)[1].indices, held.indices)
    assert np.array_equal(held.read(3)[0], source.read(held.indices[3])[0])


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
    Image.new('RGB', (8, 8)).save(tmp_path / 'train/c/0.png')
    Image.new('RGB', (8, 8)).save(tmp_path / 'train/0.png')
    assert '1 images outside class folders' in refusal(path=str(tmp_path))
    (tmp_path / 'empty/train').mkdir(parents=True)
    (tmp_path / 'empty/val').mkdir()
    assert 'there are no images in' in refusal(path=str(tmp_path / 'empty'))
    assert '2 to 8' in refusal(source='generated', num_classes=9)


@pytest.mark.parametrize('small', [True, False])
def test_a_folder_is_known_by_its_files(tmp_path, monkeypatch, small):
    if not small:
        monkeypatch.setattr(sources, 'SMALL', 0)
    for name in 'ab':
        (tmp_path / 'first' / name).mkdir(parents=True)
        Image.new('RGB', (8, 8)).save(tmp_path / 'first' / name / '0.png')

    def digests(root='first'):
        return FolderSource(tmp_path / root).digests()

    before = digests()
    shutil.copytree(tmp_path / 'first', tmp_path / 'copy')  # with the times
    assert digests('copy') == before
    file = tmp_path / 'copy/a/0.png'
    os.utime(file, (0, 0))
    assert digests('copy')['files'] == before['files']
    assert (digests('copy') == before) == small
    content, times = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    file.write_bytes(content)  # as long as before
    assert digests('copy') != before
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (digests('copy')['files'] != before['files']) == small
    (tmp_path / 'first/a/dangling.png').symlink_to('nowhere')
    assert digests() != before
    with pytest.raises(UnreadableImage, match='dangling'):
        FolderSource(tmp_path / 'first').read(1)


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
    for index in (0, 4):
        assert np.array_equal(source.read(index)[0], expected.read(index)[0])
        assert source.read(index)[1] == expected.read(index)[1]
    with pytest.raises(UnreadableImage):  # the truncated file
        source.read(6)


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
    assert data_changes(before, train(tmp_path / 'other')) == [
        'train: other files, or other contents, as many as before'
    ]


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


def test_a_row_without_an_image_is_unreadable():
    import datasets

    kinds = {'image': datasets.Image(decode=False), 'label': datasets.Value('int64')}
    for image in (None, {'bytes': b'', 'path': None}):
        rows = datasets.Dataset.from_dict({'image': [image], 'label': [0]}, datasets.Features(kinds))
        with pytest.raises(UnreadableImage) as caught:
            HubSource(rows, 'train').read(0)
        assert caught.value.name == 'train[0]'


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


def test_a_missing_column_is_refused():
    import datasets

    rows = datasets.Dataset.from_dict({'image': ['x'], 'label': [0]})
    with pytest.raises(ValueError, match=r'data.label_key must be one of the columns image, label'):
        HubSource(rows, 'train', label_key='class')
