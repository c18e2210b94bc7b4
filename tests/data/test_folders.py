import os
from pathlib import Path

import pytest
from timm.data.readers.reader_image_folder import find_images_and_targets

from rotp_vision.data.folders import read_folder


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def relative(root: Path) -> dict[str, int]:
    found = read_folder(root)
    return {os.path.relpath(file, root): label for file, label in zip(found.files, found.labels, strict=True)}


def test_classes_are_those_of_timm(tmp_path):
    names = ['n10', 'n9', 'N2', 'b', 'Ab', 'aa', '1', '02', '10']
    touch(*(tmp_path / name / f'{k}.jpg' for name in names for k in range(2)))
    samples, classes = find_images_and_targets(str(tmp_path))
    found = read_folder(tmp_path)
    assert found.classes == list(classes)
    assert dict(zip(found.files, found.labels, strict=True)) == dict(samples)


def test_names_that_differ_in_case_only_have_one_order(tmp_path):
    touch(tmp_path / 'cat' / '0.jpg', tmp_path / 'Cat' / '0.jpg')
    assert read_folder(tmp_path).classes == ['Cat', 'cat']


def test_subfolders_extensions_and_images_outside_class_folders(tmp_path):
    touch(
        tmp_path / 'a' / 'deep' / 'deeper' / '0.PNG',
        tmp_path / 'a' / 'notes.txt',
        tmp_path / 'b.jpg' / '1.jpeg',
        tmp_path / '2.webp',
    )
    (tmp_path / 'nothing').mkdir()
    assert relative(tmp_path) == {'2.webp': -1, 'a/deep/deeper/0.PNG': 0, 'b.jpg/1.jpeg': 1}
    assert read_folder(tmp_path).empty == ['nothing']


def test_a_directory_is_read_once(tmp_path):
    touch(tmp_path / 'images' / 'a' / '0.jpg', tmp_path / 'images' / 'b' / '1.jpg')
    root = tmp_path / 'images'
    (root / 'loop').symlink_to('.')
    (root / 'parent').symlink_to(tmp_path)
    (root / 'a' / 'loop').symlink_to('..')
    (root / 'a' / 'other').symlink_to('../b')
    assert relative(root) == {'a/0.jpg': 0, 'b/1.jpg': 1}
    assert read_folder(root).empty == []
    (root / '0').symlink_to('b')  # the same images under a second class
    assert relative(root) == {'a/0.jpg': 0, 'b/1.jpg': 1}
    assert read_folder(root).empty == ['0']


def test_links_to_class_folders_and_files_are_followed(tmp_path):
    touch(tmp_path / 'store' / 'x' / '0.jpg', tmp_path / 'store' / 'y.jpg')
    root = tmp_path / 'images'
    root.mkdir()
    (root / 'a').symlink_to(tmp_path / 'store' / 'x')
    (root / 'b').mkdir()
    (root / 'b' / '1.jpg').symlink_to(tmp_path / 'store' / 'y.jpg')
    assert relative(root) == {'a/0.jpg': 0, 'b/1.jpg': 1}


@pytest.mark.skipif(not hasattr(os, 'mkfifo'), reason='this system has no named pipes')
def test_only_regular_files_and_dangling_links_are_images(tmp_path):
    touch(tmp_path / 'a' / '0.jpg')
    os.mkfifo(tmp_path / 'a' / 'pipe.jpg')
    (tmp_path / 'a' / 'link_to_pipe.jpg').symlink_to('pipe.jpg')
    (tmp_path / 'a' / 'dangling.jpg').symlink_to('missing')
    (tmp_path / 'a' / 'itself.jpg').symlink_to('itself.jpg')
    (tmp_path / 'a' / 'itself').symlink_to('itself')
    assert relative(tmp_path) == {'a/0.jpg': 0, 'a/dangling.jpg': 0, 'a/itself.jpg': 0}


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r'there is no folder of images at .*nowhere'):
        read_folder(tmp_path / 'nowhere')
    (tmp_path / 'a').mkdir()
    with pytest.raises(ValueError, match='there are no images in'):
        read_folder(tmp_path)
