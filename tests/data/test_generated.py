import numpy as np
import pytest

from rotp_vision.data.config import DataConfig
from rotp_vision.data.generated import CLASSES, generate
from rotp_vision.data.sources import open_sources


def pixels(*args, **kwargs):
    return np.asarray(generate(*args, **kwargs)[0]).astype(int)


def test_an_image_depends_on_seed_split_and_index_alone():
    first = pixels(3, 0, 5, 48)
    np.random.seed(0)  # noqa: NPY002
    generate(3, 0, 4, 48)
    assert (pixels(3, 0, 5, 48) == first).all()
    for other in ((4, 0, 5), (3, 1, 5), (3, 0, 6)):
        assert (pixels(*other, 48) != first).mean() > 0.5


def test_classes_take_turns():
    assert [generate(0, 0, index, 32)[1] for index in range(10)] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert [generate(0, 0, index, 32, num_classes=3)[1] for index in range(4)] == [0, 1, 2, 0]
    assert len(CLASSES) == 8


def test_the_object_is_small_and_anywhere(monkeypatch):
    import rotp_vision.data.generated as generated

    centres, areas = [], []
    flat = np.full((64, 64, 3), 0.5, np.float32)
    monkeypatch.setattr(generated, 'texture', lambda rng, size: flat.copy())
    for index in range(64):
        seen = abs(pixels(0, 0, index, 64) - 127).max(-1) > 12
        areas.append(seen.mean())
        centres.append(np.argwhere(seen).mean(0))
    assert min(areas) > 0.002
    assert max(areas) < 0.08
    assert np.std(centres, axis=0).min() > 8


def test_the_most_frequent_kind_has_four_objects_of_ten(monkeypatch):
    import rotp_vision.data.generated as generated

    drawn = []
    monkeypatch.setattr(generated, 'draw_object', lambda rng, image, shape, radius, centre: drawn.append(shape))
    for index in range(6):
        drawn.clear()
        _, label = generate(0, 0, index, 64, 'most frequent', 6)
        counts = {shape: drawn.count(shape) for shape in drawn}
        assert counts.pop(CLASSES[label]) == 4
        assert len(drawn) == 10
        assert max(counts.values()) <= 2


def test_a_source_repeats_its_images():
    train, val = open_sources(DataConfig(source='generated', question='most frequent', image_size=32), 0)
    assert train.classes == val.classes == list(CLASSES[:6])
    first, again = (np.asarray(train.read(3)[0]) for _ in range(2))
    assert (first == again).all()
    with pytest.raises(ValueError, match=r'num_classes must be 6 for data.question .most frequent., got 4'):
        open_sources(DataConfig(source='generated', question='most frequent', num_classes=4), 0)
