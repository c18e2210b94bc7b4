import numpy as np
import pytest
from PIL import Image


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
