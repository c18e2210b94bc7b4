import copy
import math
import re

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from benchmarks.real_data import NETWORKS, build, images_of
from rotp_vision import GlobalROTPool2d, MixedROTPool2d, PoolOptions, calibrate, convert, rot_pools
from rotp_vision.calibration import fit_gain


class Peaks(nn.Module):
    """Classes are told by the largest value of a channel, under noise that drowns the mean."""

    def __init__(self):
        super().__init__()
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 4)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(4) * 12)
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


@pytest.mark.parametrize('options', ['sinkhorn', 'badmm-e', {'solver': 'badmm-e-coupled'}])
def test_finds_the_sharp_pooling_where_peaks_tell(options):
    model = convert(Peaks(), options, example_input=torch.rand(2, 4, 8, 8))
    report = calibrate(model, [peaks(128, 0), peaks(128, 1)], only='rotp')
    assert report.num_images == 256
    assert report.chosen.loss < 0.8 * report.average_gain.loss
    x, y = peaks(1024, 2)
    with torch.no_grad():
        held_out = F.cross_entropy(model(x), y).item()
    assert held_out == pytest.approx(report.chosen.loss, rel=0.2)  # 256 images judge to within 0.04
    assert report.sentence.startswith('ROTP pays: +')
    assert ' points of top-1 and -' in report.sentence
    assert report.sentence in str(report)
    assert '| installed: ROTP | scale ' in report.table()


def test_fit_gain_finds_the_gain_and_changes_nothing_else():
    model = convert(Peaks(), {'smoothness': 0.3}, example_input=torch.rand(2, 4, 8, 8))
    pool = rot_pools(model)['global_pool']
    batches, (x, y) = [peaks(128, 0), peaks(128, 1)], peaks(1024, 2)
    pool.set_weights(gain=4.0)
    before = pool.named_weights()
    factor = fit_gain(model, batches)
    torch.testing.assert_close(pool.named_weights(), {**before, 'gain': factor * before['gain']})

    def loss(gain):
        pool.set_weights(gain=gain)
        with torch.no_grad():
            return F.cross_entropy(model(x), y).item()

    found = 4.0 * factor
    assert loss(found) < min(loss(0.7 * found), loss(1.4 * found))  # on other images
    pool.set_weights(gain=found)
    assert fit_gain(model, batches) == pytest.approx(1.0, rel=0.02)
    with pytest.raises(ValueError, match='has no gain to fit'):
        fit_gain(convert(Peaks(), {'gain': 'off'}, example_input=torch.rand(2, 4, 8, 8)), batches)


def energies(count, seed):
    """An object, on which all channels are strong and the class's a little more so; elsewhere some channel is."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=generator)
    alone = F.one_hot(torch.randint(4, (count, 8, 8), generator=generator), 4).permute(0, 3, 1, 2)
    x = 2.2 * torch.rand(count, 1, 8, 8, generator=generator) * alone
    thing = 1.2 + 0.3 * torch.randn(count, 4, 3, 3, generator=generator)
    thing[torch.arange(count), y] += 0.3
    x[:, :, 2:5, 4:7] = thing
    return x, y


def test_finds_the_norm_prior_where_energy_tells_the_object():
    model = convert(Peaks(), example_input=torch.rand(2, 4, 8, 8))
    report = calibrate(model, [energies(256, 0)], only='rotp')
    uniform, norm = report.tried[-2], report.chosen
    assert norm.loss < uniform.loss
    pool = model.global_pool
    assert pool.options.prior == 'norm'
    assert pool.named_weights()['norm_power'].item() == pytest.approx(norm.setting.norm_power)
    assert norm.setting.norm_power >= 2
    x, y = energies(1024, 1)
    with torch.no_grad():
        assert F.cross_entropy(model(x), y).item() == pytest.approx(norm.loss, abs=0.1)  # 256 images judge to 0.04
    calibrate(model, [energies(256, 0)], priors=['uniform'], only='rotp')
    assert pool.options.prior == 'uniform'


def test_says_when_there_is_nothing_to_find_and_leaves_the_mean():
    """Features whose mean alone tells the class, each position with as much of it, and a classifier for that mean."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (256,), generator=generator)
    x = torch.randn(256, 4, 8, 8, generator=generator)
    x[torch.arange(256), y] += 0.3
    model = convert(Peaks(), {'smoothness': 1.0}, example_input=torch.rand(2, 4, 8, 8))
    report = calibrate(model, [(x, y)])
    assert report.chosen is None
    assert report.sentence.startswith('Keep average pooling: ROTP has no clear gain')
    weights = model.global_pool.named_weights()
    assert weights['smoothness'].tolist() == [50.0]
    assert weights['gain'].item() == pytest.approx(report.average_gain.gain, rel=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(
            model.global_pool(x).flatten(1), report.average_gain.gain * x.mean((2, 3)), rtol=0, atol=0.05
        )


def test_a_gain_in_the_fourth_digit_is_none():
    """Only images that are right anyway have a peak, a tiny one: sharp pooling is surely better, and hardly."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (64,), generator=generator)
    shown = torch.where(torch.arange(64) % 5 == 0, (y + 1) % 4, y)  # a fifth looks like another class
    x = torch.ones(64, 4, 8, 8)
    x[torch.arange(64), shown] += 0.1
    x[torch.arange(64), shown, 0, 0] += 1e-4 * (shown == y)
    report = calibrate(convert(Peaks(), example_input=x[:2]), [(x, y)])
    gained, error = report.tried[0].loss_difference
    assert -1e-3 < gained < -error
    assert report.chosen is None


def test_fits_and_judges_on_different_images():
    """Labels without meaning: whatever is fitted to them, no pooling is judged to be of use."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(200, 4, 8, 8, generator=generator), torch.randint(4, (200,), generator=generator)
    report = calibrate(convert(Peaks(), example_input=x[:2]), [(x, y)])
    for row in (report.average_gain, report.gem, *report.tried):
        assert row.loss > math.log(4) - 0.02  # what is fitted and judged on the same images can get below


def test_the_gain_alone_is_found():
    model = Peaks()
    with torch.no_grad():
        model.fc.weight.mul_(10.0)
    report = calibrate(convert(model, example_input=torch.rand(2, 4, 8, 8)), [peaks(256, 0)])
    x, y = peaks(256, 0)

    def loss(gain):
        return F.cross_entropy(gain * 120 * x.mean((2, 3)), y).item()

    gain = report.average_gain.gain
    assert loss(gain) < min(loss(0.97 * gain), loss(1.03 * gain)) < loss(1.0)
    assert report.average.gain == 1.0
    assert report.average.loss == pytest.approx(loss(1.0), rel=1e-4)


def test_label_smoothing_holds_back_the_gain_of_images_known_by_heart():
    """Each image is right whatever the gain: without smoothing the largest is the best."""
    y = torch.arange(64) % 4
    x = 0.1 * F.one_hot(y, 4).float()[:, :, None, None].expand(64, 4, 8, 8) + 1e-3 * torch.rand(64, 4, 8, 8)
    model = convert(Peaks(), example_input=x[:2])
    sure, held = (calibrate(model, [(x, y)], label_smoothing=eps).average_gain for eps in (0.0, 0.1))
    assert sure.gain > 10
    logits = held.gain * 12 * x.mean((2, 3))
    for factor in (0.9, 1.1):
        assert F.cross_entropy(logits, y, label_smoothing=0.1) < F.cross_entropy(
            factor * logits, y, label_smoothing=0.1
        )
    assert held.loss == pytest.approx(F.cross_entropy(logits, y, label_smoothing=0.1).item(), rel=1e-3)


def test_installs_a_simpler_pooling_where_it_is_better():
    for data, pool in ((peaks, 'avgmax'), (energies, 'gem')):
        model = convert(Peaks(), example_input=torch.rand(2, 4, 8, 8))
        report = calibrate(model, [data(256, 0)])
        assert report.chosen.setting.pool == model.global_pool.options.pool == pool
        assert report.sentence.startswith('Average + max pays: +' if pool == 'avgmax' else 'GeM pays: +')
        x, y = data(1024, 1)
        with torch.no_grad():
            assert F.cross_entropy(model(x), y).item() == pytest.approx(report.chosen.loss, abs=0.1)


def test_few_images_say_what_they_could_show():
    x, y = torch.rand(80, 4, 8, 8), torch.arange(80) % 4
    report = calibrate(convert(Peaks(), example_input=x[:2]), [(x, y)])
    assert report.chosen is None
    assert re.search(r' 80 images are few: at best they show a gain of more than \d+\.\d points', report.sentence)


def test_the_model_is_otherwise_untouched():
    torch.manual_seed(0)
    model = convert(timm.create_model('test_convnext', num_classes=3), 'sinkhorn').train()
    native = {key: value.clone() for key, value in model.state_dict().items() if 'global_pool' not in key}
    calibrate(model, [(torch.rand(4, 3, 64, 64), torch.tensor([0, 1, 2, 0]))])
    (pool,) = rot_pools(model).values()
    assert model.training
    assert pool.training
    assert all(torch.equal(model.state_dict()[key], value) for key, value in native.items())
    assert not pool._forward_hooks
    assert not pool._forward_pre_hooks


@pytest.mark.parametrize(
    ('options', 'penalty'),
    [
        ({'solver': 'sinkhorn'}, 1),
        ({'solver': 'badmm-e-coupled'}, [1.0, 2.0, 1.0, 1.0]),
        ({'solver': 'sinkhorn', 'structure': 1}, (1.0, 1.0, 2.0, 1.0)),
    ],
)
def test_what_is_scored_is_what_is_left_whatever_moved_before(options, penalty):
    model = convert(Peaks(), options | {'feature_penalty': penalty}, example_input=torch.rand(2, 4, 8, 8))
    model.global_pool.set_weights(feature_penalty=30.0)
    if 'structure' in options:
        model.global_pool.set_weights(structure=30.0)
    x, y = peaks(128, 0)
    assert calibrate(model, [(x, y)], only='rotp').chosen is not None
    expected = torch.tensor(penalty).expand(model.global_pool.options.num_iters or 4)
    weights = model.global_pool.named_weights()
    assert torch.allclose(weights['feature_penalty'], expected.float())

    def loss(factor):
        model.global_pool.set_weights(gain=factor * weights['gain'])
        with torch.no_grad():
            return F.cross_entropy(model(x), y).item()

    assert loss(1.0) < min(loss(0.95), loss(1.05))  # the gain was fitted to the pooling that was installed


def test_attention_priors_stay_and_pools_without_gain_get_none():
    model = convert(
        Peaks(), PoolOptions('badmm-q', prior='attention', gain='off'), example_input=torch.rand(2, 4, 8, 8)
    )
    hidden = model.global_pool.prior.sample_hidden.weight.clone()
    report = calibrate(model, [peaks(128, 0)], only='rotp')
    assert torch.equal(model.global_pool.prior.sample_hidden.weight, hidden)
    assert model.global_pool.gain is None
    assert {row.gain for row in report.rows} == {1.0}


@pytest.mark.parametrize(
    'make',
    [
        lambda: torchvision.models.resnet18(num_classes=3),
        lambda: timm.create_model('test_convnext', num_classes=3),  # a norm after the pooling
        lambda: timm.create_model('test_mambaout', num_classes=3),  # a head that pools by itself
        lambda: timm.create_model('mobilenetv3_small_050', num_classes=3),  # a convolution after the pooling
        lambda: timm.create_model('test_vit', num_classes=3, global_pool='avg', class_token=False, img_size=64),
    ],
)
def test_networks_of_every_kind(make):
    torch.manual_seed(0)
    model = convert(make())
    report = calibrate(model, [(torch.rand(12, 3, 64, 64), torch.arange(12) % 3)], feature_scales=['rms'])
    assert report.num_images == 12
    assert all(math.isfinite(row.loss) for row in report.rows)


def test_networks_of_other_images_and_with_more_in_their_head():
    gray = nn.Sequential(nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    more = timm.create_model('efficientvit_b0', num_classes=4)
    for model, channels in ((gray, 1), (more, 3)):
        batch = torch.randn(4, channels, 64, 64), torch.arange(4)
        assert calibrate(convert(model), [batch], feature_scales=['rms']).num_images == 4


def test_errors():
    with pytest.raises(ValueError, match=r'one global ROT pool, got 0; rotp_vision.convert\(model\) makes one'):
        calibrate(timm.create_model('test_resnet'), [])
    mixed = Peaks()
    mixed.global_pool = MixedROTPool2d.mean_max()
    with pytest.raises(ValueError, match=r'global_pool must be a single pooling .*, got MixedROTPool2d'):
        calibrate(mixed, [])
    mixed.pool = GlobalROTPool2d()
    with pytest.raises(ValueError, match='must have one global ROT pool, got 2: global_pool, pool'):
        calibrate(mixed, [])
    with pytest.raises(ValueError, match='loader must give at least one batch'):
        calibrate(convert(timm.create_model('test_resnet')), [])

    class Leaky(Peaks):
        def forward(self, x):
            return self.forward_head(x) + x[:, :, 0, 0]

    model = convert(Leaky(), example_input=torch.rand(2, 4, 8, 8))
    with pytest.raises(ValueError, match='only through the global pool'):
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
        ([(X[..., :16, :16], Y)], {}, 'maps of 1 positions with a spread of 0 .* leave nothing to calibrate'),
        ([(X * torch.nan, Y)], {}, 'with a spread of nan'),
        ([(X[:0], Y[:0]), (X, Y)], {}, 'a batch of the loader holds no image'),
        ([(X.double(), Y)], {}, r'images of the loader are torch.float64, but the model is torch.float32'),
        ([(X, Y)], {'max_images': 0}, 'max_images must be at least 4, got 0'),
        ([(X[:3], Y[:3])], {}, 'at least 4 images, got 3'),
        ([(X, Y)], {'feature_scales': []}, r'feature_scales must be of raw, rms, log, got \[\]'),
        ([(X, Y)], {'feature_scales': ['rms', 'rms']}, 'feature_scales must name each of them once'),
        ([(X, Y)], {'priors': ['attention']}, 'priors must be of uniform, norm'),
        ([(X, Y)], {'only': 'gem'}, "only must be 'rotp', or '' for all poolings, got 'gem'"),
        ([(X, Y)], {'label_smoothing': 1.0}, r'label_smoothing must lie in \[0, 1\), got 1.0'),
    ],
)
def test_what_cannot_be_calibrated_on_is_said(batches, options, message):
    model = convert(timm.create_model('test_resnet', num_classes=3))
    with pytest.raises(ValueError, match=message):
        calibrate(model, batches, **options)


def test_weights_that_are_not_finite_are_named():
    model = convert(timm.create_model('test_resnet', num_classes=3))
    nn.init.constant_(model.fc.weight, math.nan)
    with pytest.raises(ValueError, match=r'fc\.weight of the model is not finite'):
        calibrate(model, [(X, Y)])


def test_ties_are_not_right():
    model = convert(Peaks(), example_input=torch.rand(2, 4, 8, 8))
    nn.init.zeros_(model.fc.weight)  # all classes have the same logit
    assert [row.top1 for row in calibrate(model, [peaks(32, 0)]).rows] == [0.0] * 7


def test_a_loader_sorted_by_class_is_warned_of():
    x, y = peaks(64, 0)
    order = y.argsort()
    model = convert(Peaks(), example_input=torch.rand(2, 4, 8, 8))
    with pytest.warns(UserWarning, match=r'sorted by class: [23] of 4 classes are among the first 32 images'):
        calibrate(model, [(x[order], y[order])], max_images=32)


@pytest.mark.parametrize('labels', [Y.tolist(), Y.numpy(), Y.to(torch.uint8)], ids=['list', 'array', 'uint8'])
def test_labels_of_any_kind_of_integer(labels):
    model = convert(timm.create_model('test_resnet', num_classes=3))
    expected = calibrate(model, [(X, Y)], feature_scales=['rms']).average_gain.loss
    assert calibrate(model, [(X, labels)], feature_scales=['rms']).average_gain.loss == expected


def test_beats_average_pooling_on_real_images_not_used_for_it(real_data):
    """ResNet-18 on Tiny-ImageNet: calibrated on 250 images, judged on 250 others."""
    network = NETWORKS[2]
    native = build(network, real_data)
    rows = images_of(network, real_data, 500)[:500]
    x, y = torch.stack(rows['x']), torch.tensor(rows['y'])
    model = convert(copy.deepcopy(native))
    report = calibrate(model, [(x[:250], y[:250])])
    with torch.inference_mode():
        judged = torch.cat([model(chunk) for chunk in x[250:].split(100)])
        average = torch.cat([native(chunk) for chunk in x[250:].split(100)])
    assert F.cross_entropy(judged, y[250:]) < F.cross_entropy(average, y[250:])
    assert report.average_gain.loss < report.average.loss
