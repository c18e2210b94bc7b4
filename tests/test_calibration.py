import copy
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import rotp_vision
from benchmarks.real_data import NETWORKS, build, images_of
from rotp_vision import PoolOptions, calibrate, convert, rot_pools

DATA = Path(__file__).parents[2] / 'shared' / 'data'


class Peaks(nn.Module):
    """Classes are told by the largest value of a channel, under noise that drowns the mean."""

    def __init__(self):
        super().__init__()
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 4)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(4) * 4)
            self.fc.bias.zero_()

    def forward_head(self, x):
        return self.fc(self.global_pool(x).flatten(1))

    def forward(self, x):
        return self.forward_head(x)


def peaks(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 4, 8, 8, generator=generator)
    y = torch.randint(4, (count,), generator=generator)
    pixel = torch.randint(64, (count,), generator=generator)
    x.flatten(2)[torch.arange(count), y, pixel] += 0.6
    return x, y


@pytest.mark.parametrize('options', ['sinkhorn', 'badmm-e', {'solver': 'badmm-e', 'coupled': True}])
def test_finds_the_sharp_pooling_where_peaks_tell(tmp_path, options):
    options = rotp_vision.pool_options(options, gain='scalar')
    model = convert(Peaks(), options, example_input=torch.rand(2, 4, 8, 8))
    report = calibrate(model, [peaks(128, 0), peaks(128, 1)])
    assert report.num_images == 256
    assert report.best.loss < 0.7 * report.average.loss
    x, y = peaks(256, 2)
    with torch.no_grad():
        held_out = F.cross_entropy(model(x), y).item()
    assert held_out == pytest.approx(report.best.loss, rel=0.2)
    assert '(chosen)' in report.table(limit=3)
    report.plot(tmp_path / 'plot.png')
    assert (tmp_path / 'plot.png').stat().st_size > 5000


def test_the_model_is_left_at_the_best_trial_and_otherwise_untouched():
    model = convert(timm.create_model('test_convnext', num_classes=3), PoolOptions('sinkhorn', gain='scalar'))
    model.train()
    native = {key: value.clone() for key, value in model.state_dict().items() if 'global_pool' not in key}
    report = calibrate(model, [(torch.rand(4, 3, 64, 64), torch.tensor([0, 1, 2, 0]))], temperatures=[10.0, 1.0])
    (pool,) = rot_pools(model).values()
    assert pool.view == pool.options.view == report.best.view
    assert pool.named_weights()['smoothness'].item() == pytest.approx(report.best.temperature, rel=1e-5)
    assert pool.named_weights()['gain'].item() == pytest.approx(report.best.gain, rel=1e-5)
    assert model.training
    assert all(torch.equal(model.state_dict()[key], value) for key, value in native.items())
    assert not pool._forward_hooks
    assert len(report.trials) == 6


@pytest.mark.parametrize(
    ('options', 'penalty'),
    [
        ({'solver': 'sinkhorn'}, 1),
        ({'solver': 'sinkhorn'}, 1.0),
        ({'solver': 'badmm-e', 'coupled': True}, [1.0, 2.0, 1.0, 1.0]),
        ({'solver': 'sinkhorn', 'structure': 1}, (1.0, 1.0, 2.0, 1.0)),
    ],
)
def test_what_is_scored_is_what_is_left_whatever_moved_before(options, penalty):
    torch.manual_seed(0)
    options = options | {'gain': 'scalar', 'feature_penalty': penalty}
    model = convert(timm.create_model('test_resnet', num_classes=3), options).eval()
    model.global_pool.set_weights(feature_penalty=30.0)
    if 'structure' in options:
        model.global_pool.set_weights(structure=30.0)
    x, y = 5 * torch.randn(8, 3, 64, 64), torch.arange(8) % 3
    best = calibrate(model, [(x, y)], temperatures=[1.0, 0.1]).best
    expected = torch.tensor(penalty).expand(model.global_pool.options.modules)
    assert torch.allclose(model.global_pool.named_weights()['feature_penalty'], expected.float())
    with torch.no_grad():
        assert F.cross_entropy(model(x), y).item() == pytest.approx(best.loss, rel=1e-4)


def test_torchvision_and_pools_without_gain():
    model = convert(torchvision.models.resnet18(num_classes=3), 'badmm-q')
    report = calibrate(
        model, [(torch.rand(4, 3, 64, 64), torch.tensor([0, 1, 2, 0]))], temperatures=[3.0], views=['rms']
    )
    assert report.best.gain == 1.0
    assert report.best.loss == report.best.raw_loss


def test_networks_of_other_images_and_with_more_in_their_head():
    gray = nn.Sequential(nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    more = timm.create_model('efficientvit_b0', num_classes=4)
    for model, channels in ((gray, 1), (more, 3)):
        batch = torch.randn(4, channels, 64, 64), torch.arange(4)
        assert calibrate(convert(model), [batch], temperatures=[1.0, 10.0]).num_images == 4


def test_errors():
    with pytest.raises(ValueError, match='one global ROT pooling, got 0: convert the model first'):
        calibrate(timm.create_model('test_resnet'), [])
    with pytest.raises(ValueError, match='loader must give at least one batch'):
        calibrate(convert(timm.create_model('test_resnet')), [])

    class Leaky(Peaks):
        def forward(self, x):
            return self.forward_head(x) + x[:, :, 0, 0]

    model = convert(Leaky(), example_input=torch.rand(2, 4, 8, 8))
    with pytest.raises(ValueError, match='through the global pooling alone'):
        calibrate(model, [peaks(8, 0)])


X, Y = torch.linspace(-2, 2, 4 * 3 * 64 * 64).sin().view(4, 3, 64, 64), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ('batches', 'options', 'message'),
    [
        ([{'image': X, 'label': Y}], {}, r'loader must give batches of \(images, class indices\), got dict'),
        ([(X, Y, Y)], {}, 'loader must give batches of'),
        ([(X[0], Y[0])], {}, r'images of the loader must be floating point \(B, C, H, W\)'),
        ([(X.byte(), Y)], {}, r"as the model's transform makes them, got torch\.uint8"),
        ([(X, Y + 1)], {}, 'class indices from 0 to 2, as the model has 3 classes, got 1 to 3'),
        ([(X, Y - 1)], {}, 'got -1 to 1'),
        ([(X, F.one_hot(Y).float())], {}, r'labels of the loader must be class indices \(4,\), got .* \(4, 3\)'),
        ([(X, Y[:3])], {}, 'labels of the loader must be class indices'),
        ([(X, Y), (X[:, :, :32], Y)], {}, r'images of one size, got \(3, 64, 64\) and \(3, 32, 64\)'),
        (
            [(X[..., :16, :16], Y)],
            {},
            'a map of 1 × 1 with a spread of 0 over its positions leaves nothing to calibrate',
        ),
        ([(X * torch.nan, Y)], {}, 'with a spread of nan'),
        ([(X, Y)], {'max_images': 0}, 'max_images must be at least 1, got 0'),
        ([(X, Y)], {'temperatures': []}, 'temperatures must hold something to try'),
        ([(X, Y)], {'temperatures': [1.0, 0.0]}, 'temperatures above zero'),
        ([(X, Y)], {'views': []}, 'views and temperatures must hold'),
    ],
)
def test_what_cannot_be_calibrated_on_is_said(batches, options, message):
    model = convert(timm.create_model('test_resnet', num_classes=3))
    with pytest.raises(ValueError, match=message):
        calibrate(model, batches, **options)


@pytest.mark.parametrize('labels', [Y.tolist(), Y.numpy(), Y.to(torch.uint8)], ids=['list', 'array', 'uint8'])
def test_labels_of_any_kind_of_integer(labels):
    model = convert(timm.create_model('test_resnet', num_classes=3))
    expected = calibrate(model, [(X, Y)], temperatures=[1.0], views=['rms']).best.loss
    assert calibrate(model, [(X, labels)], temperatures=[1.0], views=['rms']).best.loss == expected


@pytest.mark.skipif(not DATA.exists(), reason='needs the real images and weights of ../shared/data')
def test_beats_average_pooling_on_real_images_not_used_for_it():
    """ResNet-18 on Tiny-ImageNet: calibrated on 250 images, judged on 250 others."""
    network = NETWORKS[2]
    native = build(network, DATA)
    rows = images_of(network, DATA, 500)[:500]
    x, y = torch.stack(rows['x']), torch.tensor(rows['y'])
    model = convert(copy.deepcopy(native))
    report = calibrate(model, [(x[:250], y[:250])])
    with torch.inference_mode():
        judged = torch.cat([model(chunk) for chunk in x[250:].split(100)])
        average = torch.cat([native(chunk) for chunk in x[250:].split(100)])
    assert F.cross_entropy(judged, y[250:]) < F.cross_entropy(average, y[250:])
    assert report.best.loss < report.average.loss
