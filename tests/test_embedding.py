"""Feature vectors: scores, whitening, the embedder, and folders embedded into files."""

import csv
import json
import math

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from torch.nn import functional as F

import rotp_vision
from rotp_vision.cli import main
from rotp_vision.embedding import embed_folder, embedder, folder, scores
from rotp_vision.embedding.scores import choose, mean_over_groups, retrieval
from rotp_vision.embedding.whitening import Spectrum, project
from rotp_vision.images import UnreadableImage
from rotp_vision.layers import PoolOptions, any_pool_options


def small(**kwargs):
    torch.manual_seed(0)
    return timm.create_model('test_resnet', **kwargs).eval()


def make(**kwargs):
    return rotp_vision.Embedder(small(), image_size=32, **kwargs)


def draw(value):
    rng = np.random.default_rng(value)
    return Image.fromarray(rng.integers(0, 255, (40, 48, 3), dtype=np.uint8))


@pytest.fixture
def images(tmp_path):
    """Two classes of four groups of two images, and a file that is none."""
    for name in 'ab':
        for group in range(4):
            place = tmp_path / 'images' / name / f'{group}'
            place.mkdir(parents=True)
            for i in range(2):
                draw(10 * group + i).save(place / f'{i}.png')
    (tmp_path / 'images' / 'a' / 'broken.png').write_text('not an image')
    return tmp_path / 'images'


# Scores


def slow_scores(features, labels, groups):
    """R@1, R@5, AP and kNN of each query, one image at a time."""
    rows = []
    for query in range(len(features)):
        others = [k for k in range(len(features)) if groups[k] != groups[query]]
        order = sorted(others, key=lambda k: -float(features[k] @ features[query]))
        right = [bool(labels[k] == labels[query]) for k in order]
        if not any(right):
            rows.append([math.nan] * 4)
            continue
        precisions = [sum(right[: k + 1]) / (k + 1) for k in range(len(right)) if right[k]]
        votes = [int(labels[k]) for k in order[:10]]
        most = max(votes, key=lambda label: (votes.count(label), -votes.index(label)))
        knn = float(most == labels[query])
        rows.append([float(right[0]), float(any(right[:5])), sum(precisions) / len(precisions), knn])
    return torch.tensor(rows).T


def test_retrieval_is_what_a_loop_finds_whatever_the_blocks(monkeypatch):
    torch.manual_seed(0)
    features = F.normalize(torch.randn(40, 3))
    labels, groups = torch.randint(4, (40,)), torch.randint(12, (40,))
    labels[0] = 9  # alone in its class
    expected = slow_scores(features.double(), labels, groups)
    expected[3, expected[3].isnan()] = math.nan
    found = torch.stack(retrieval(features, labels, groups))
    torch.testing.assert_close(found[:3], expected[:3], equal_nan=True)
    assert (found[3] - expected[3]).nan_to_num().abs().mean() < 0.1  # ties may go to another class
    monkeypatch.setattr(scores, '_BLOCK', 90)
    torch.testing.assert_close(torch.stack(retrieval(features, labels, groups)), found, equal_nan=True)


def test_means_over_groups():
    values, groups = torch.tensor([1.0, 1.0, 0.0, 0.0, math.nan]), torch.tensor([0, 0, 1, 1, 2])
    mean, error = mean_over_groups(values, groups)
    assert (mean, error) == pytest.approx((0.5, math.sqrt(2 * (0.25**2 + 0.25**2))))
    alone = mean_over_groups(values)[1]  # every image its own group: s / √n
    assert alone == pytest.approx(float(values[:4].std() / 2))


def test_a_choice_is_judged_on_other_groups():
    torch.manual_seed(0)
    labels, groups = torch.arange(80) % 4, torch.arange(80)
    preset = (torch.rand(80) < 0.5).float()
    noise = {str(k): (torch.rand(80) < 0.5).float() for k in range(20)}  # the best of them is better by luck
    assert choose({'preset': preset} | noise, 'preset', labels, groups).name == 'preset'
    better = choose({'preset': preset, 'better': (torch.rand(80) < 0.9).float()}, 'preset', labels, groups)
    assert better.name == better.best == 'better'
    assert better.gain > 2 * better.error
    with pytest.raises(ValueError, match='at least 4 groups, but 4 classes have fewer'):
        choose({'preset': preset}, 'preset', labels, torch.arange(80) % 3)


@pytest.mark.parametrize('count', [5, 50])
def test_whitening_is_its_formula(count):
    features = F.normalize(torch.randn(count, 12, dtype=torch.float64))
    covariance = torch.cov(features.T, correction=0)
    spectrum = Spectrum.of(features)
    shrunk = torch.eye(12) + covariance / (3.0 * covariance.trace() / 12)
    matrix = spectrum.whitening(3.0)
    torch.testing.assert_close(matrix @ matrix, torch.linalg.inv(shrunk))
    centred = features - features.mean(0)
    torch.testing.assert_close(project(features, spectrum.mean, matrix), F.normalize(centred @ matrix))


# The embedder


def test_every_kind_of_input_gives_the_same_vectors(tmp_path):
    import datasets

    made = make()
    pictures = [draw(k) for k in range(3)]
    paths = [tmp_path / f'{k}.png' for k in range(3)]
    for picture, path in zip(pictures, paths, strict=True):
        picture.save(path)
    prepared = torch.stack([made.transform(picture) for picture in pictures])
    features = made.model.forward_head(made.model.forward_features(prepared), pre_logits=True)
    vectors = made(prepared)
    torch.testing.assert_close(vectors, F.normalize(features))
    assert vectors.dtype == torch.float32
    table = datasets.Dataset.from_dict({'image': list(map(str, paths))}).cast_column('image', datasets.Image())
    labelled = torch.utils.data.TensorDataset(prepared, torch.arange(3))
    for given in (pictures, paths, table['image'], torch.utils.data.DataLoader(labelled, 3)):
        assert torch.equal(made(given), vectors)
    torch.testing.assert_close(made(str(paths[1]), workers=1), vectors[1:2])
    with pytest.raises(UnreadableImage, match=r'nothing\.png'):
        made([paths[0], tmp_path / 'nothing.png'])
    with pytest.raises(ValueError, match='at least one image'):
        made([])


def test_the_pool_is_that_of_the_preset_and_the_network_is_copied():
    native = small()
    made = rotp_vision.Embedder(native)
    assert rotp_vision.rot_pools(made.model)['global_pool'].options == PoolOptions.embedding()
    assert type(native.global_pool).__name__ == 'SelectAdaptivePool2d'
    own = rotp_vision.Embedder(rotp_vision.convert(small(), 'gem'))
    assert own.model.global_pool.options.pool == 'gem'


X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_logits_of_the_same_pass_and_networks_without_classifier():
    made = make()
    vectors, logits = made(X, return_logits=True)
    torch.testing.assert_close(logits, made.model(X))
    without = rotp_vision.Embedder(small(num_classes=0))
    without.model.load_state_dict(made.model.state_dict(), strict=False)
    assert torch.equal(without(X), vectors)
    with pytest.raises(ValueError, match='no classifier'):
        without(X, return_logits=True)
    other = rotp_vision.Embedder(torchvision.models.mobilenet_v3_small())  # layers between pool and classifier
    vectors, logits = other(X, return_logits=True)
    assert vectors.shape == (2, 1024)
    torch.testing.assert_close(logits, other.model(X))
    (again,) = other.pools_for([any_pool_options('avg')])
    assert torch.equal(other(X), vectors)
    assert other.features(X, pools=[again])[0][0].shape == (2, 1024)
    headless = torchvision.models.resnet18()
    headless.fc = torch.nn.Identity()
    assert rotp_vision.Embedder(headless)(X).shape == (2, 512)


def test_class_tokens_keep_their_own_pooling(tmp_path):
    vit = timm.create_model('test_vit')
    with pytest.raises(ValueError, match=r'class token.*With pool=None'):
        rotp_vision.Embedder(vit)
    made, images = rotp_vision.Embedder(vit, None), torch.randn(2, 3, 160, 160)
    made.save(tmp_path / 'saved')
    assert torch.equal(rotp_vision.Embedder.load(tmp_path / 'saved')(images), made(images))


@pytest.mark.parametrize(
    'options', [{}, {'pool': {'pool': 'gem', 'norm_power': 2.0}, 'precision': 'bfloat16'}], ids=str
)
def test_a_query_embeds_identically_after_loading(options, tmp_path):
    made, pictures = make(**options), [draw(k) for k in range(6)]
    before = made(pictures)
    for shrinkage in (math.inf, 10.0):
        made.fit(pictures, shrinkage)
        fitted = made(pictures)
        torch.testing.assert_close(fitted, project(before, made.mean, made.matrix))
        made.save(tmp_path / 'saved', force=True)
        again = rotp_vision.Embedder.load(tmp_path / 'saved')
        assert torch.equal(again(pictures), fitted)
    assert torch.equal(again.fit(before, math.inf).mean, before.double().mean(0).float())
    with pytest.raises(ValueError, match='exists'):
        made.save(tmp_path / 'saved')
    with pytest.raises(ValueError, match=r'no embedder\.json'):
        rotp_vision.Embedder.load(tmp_path)


# Folders


def embedded(images, output, **options):
    found = embed_folder(make(), images, output, workers=0, batch_size=3, progress=False, **options)
    return found, {path.relative_to(output): path.read_bytes() for path in output.rglob('*') if path.is_file()}


def test_files_of_a_folder(images, tmp_path):
    result, _ = embedded(images, tmp_path / 'out', group_by='folder', whiten=True, neighbours=3)
    rows = list(csv.DictReader((tmp_path / 'out' / 'metadata.csv').open()))
    vectors = np.load(tmp_path / 'out' / 'embeddings.npy')
    assert (len(rows), vectors.shape, vectors.dtype) == (17, (16, 96), np.float32)
    assert [row['file'] for row in rows if not row['row']] == ['a/broken.png'] == list(result.unreadable)
    assert 'cannot identify' in next(row['error'] for row in rows if row['error'])
    saved = rotp_vision.Embedder.load(tmp_path / 'out' / 'embedder')
    query = next(row for row in rows if row['file'] == 'b/2/1.png')
    torch.testing.assert_close(saved(images / 'b/2/1.png')[0], torch.from_numpy(vectors[int(query['row'])]))
    assert set(result.scores) == {'preset embedding', 'average', 'GeM', 'preset embedding, whitened'}
    # Each group of a class has a twin in the other, so that every query finds the other class first.
    assert all(row['R@1'][0] == 0 for row in result.scores.values())
    page = json.loads((tmp_path / 'out' / 'embeddings.json').read_text())
    assert (page['network'], page['dimensions'], page['whitened']) == ('test_resnet', 96, True)
    assert 'unreadable files: 1' in str(result)
    with Image.open(tmp_path / 'out' / 'neighbours.png') as sheet:
        assert sheet.width > 600


def test_an_interrupted_run_ends_with_the_same_bytes(images, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, 'PART', 4)
    _, whole = embedded(images, tmp_path / 'out')
    (tmp_path / 'out').rename(tmp_path / 'whole')
    write, count = folder._Parts._write, 0

    def interrupted(self, *args):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        write(self, *args)

    monkeypatch.setattr(folder._Parts, '_write', interrupted)
    with pytest.raises(KeyboardInterrupt):
        embedded(images, tmp_path / 'out')
    result, continued = embedded(images, tmp_path / 'out')
    assert count == 6  # five parts, one of them twice
    assert continued == whole
    assert str(result).count('±') == 12
    with pytest.raises(ValueError, match='overwrite it with force'):
        embedded(images, tmp_path / 'out')
    assert embedded(images, tmp_path / 'out', force=True)[1] == whole


def test_choosing_a_pooling_keeps_the_preset_without_a_clear_gain(images, tmp_path, monkeypatch):
    result, _ = embedded(images, tmp_path / 'out', group_by='folder', fit='mAP')
    assert result.choice.name == 'preset embedding'
    assert 'preset embedding stays' in str(result)
    assert set(folder.CANDIDATES) <= set(result.scores)
    (images / 'loose.png').write_bytes((images / 'a/0/0.png').read_bytes())
    with pytest.raises(ValueError, match='several class folders'):
        embedded(images, tmp_path / 'other', fit='mAP')
    assert embedded(images, tmp_path / 'other')[0].scores == {}
    clear = scores.Choice('max', 'max', 0.1, 0.01)
    monkeypatch.setattr(folder, 'choose', lambda *args: clear)
    (images / 'loose.png').unlink()
    result, _ = embedded(images, tmp_path / 'max', fit='R@1')
    assert 'chosen: max' in str(result)
    saved = rotp_vision.Embedder.load(tmp_path / 'max' / 'embedder')
    assert saved.model.global_pool.options.pool == 'max'


def test_command_line(images, tmp_path, capsys):
    torch.save({'state_dict': small().state_dict()}, tmp_path / 'mine.pth')
    arguments = ['embed', '--model', 'test_resnet', '--checkpoint', str(tmp_path / 'mine.pth'), '--images', str(images)]
    arguments += ['--output', str(tmp_path / 'out'), '--workers', '0', '--pool', 'gem', '--set', 'power=4']
    assert main(arguments) == 0
    assert 'own pooling' in capsys.readouterr().out
    assert main(arguments) == 1
    assert 'overwrite it with force' in capsys.readouterr().err
    saved = embedder.Embedder.load(tmp_path / 'out' / 'embedder')
    assert saved.model.global_pool.options.power == 4.0
