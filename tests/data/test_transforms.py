import io

import numpy as np
import pytest
import torch
from PIL import Image, JpegImagePlugin
from timm.data import create_transform

from rotp_vision.data.config import DataConfig
from rotp_vision.data.loading import Schedule, Shard, train_batches
from rotp_vision.data.sources import open_sources
from rotp_vision.data.transforms import normalized, preprocessing, transforms
from rotp_vision.data.workers import seeded
from rotp_vision.images import UnreadableImage, open_image

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
    schedule = Schedule(12, 12, 1, Shard(0, 1), 3, range(2, 3))
    (batch,) = train_batches(source, transform, config, schedule)
    ((_, order),) = schedule.passes()
    erased = 0
    for image, index in zip(normalized(batch.images, *NORMS), order, strict=True):
        with seeded(3, 2, index):
            expected = plain(source.read(index)[0])
        filled = (expected == 0).all(0)  # with the mean color, which is rounded here
        assert image[:, ~filled].equal(expected[:, ~filled])
        assert image[:, filled].abs().lt(0.5 / 255 / 0.22).all()
        erased += bool(filled.any())
    assert 2 < erased < 12


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
