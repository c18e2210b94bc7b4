import copy
import math

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rotp_vision
from rotp_vision import calibrate, convert, freeze, load_pretrained, multi_scale, revert, save_pretrained
from rotp_vision.cli import main
from rotp_vision.evaluation import ImageFiles, compare
from rotp_vision.pictures import pool_maps
from rotp_vision.surgery import MultiScale

x = torch.linspace(-2, 2, 2 * 3 * 96 * 96).sin().view(2, 3, 96, 96)
NETWORKS = {
    'resnet': ('test_resnet', {}),
    'convnext': ('test_convnext', {}),  # a norm layer between pool and classifier
    'mobilenetv3': ('mobilenetv3_small_050', {}),  # a convolution between them
    'mambaout': ('test_mambaout', {}),  # NHWC
    'vit': ('test_vit', {'global_pool': 'avg', 'dynamic_img_size': True}),  # tokens, a class token first
    'native': ('resnet18_rotp', {}),
}


def converted(name: str = 'resnet', **kwargs):
    torch.manual_seed(0)
    architecture, more = NETWORKS[name]
    model = timm.create_model(architecture, num_classes=5, **more, **kwargs)
    model = model if name == 'native' else convert(model)
    for pool in rotp_vision.rot_pools(model).values():
        pool.set_weights(smoothness=1.0)
    return model.eval()


@pytest.mark.parametrize('name', NETWORKS)
def test_the_maps_of_all_sizes_are_pooled_as_one_set(name):
    """The input of the pool is that of each size, one after the other, times its gain."""
    model = converted(name)
    made = multi_scale(model, (64, 96), crop_pct=(1, 1))
    made.gain.set([1.5, 0.5])
    (pool,) = rotp_vision.rot_pools(model).values()
    seen = []
    pool.register_forward_pre_hook(lambda _, args: seen.append(args[0]))

    def sets(inputs):
        return inputs.transpose(1, 2) if inputs.dim() == 3 else pool.sets(inputs)

    small = F.interpolate(x, (64, 64), mode='bilinear', antialias=True)
    with torch.no_grad():
        logits = made(x)
        model(small), model(x)
    together, first, second = map(sets, seen)
    assert made.positions(x) == [first.shape[2], second.shape[2]]
    assert torch.equal(together, torch.cat([1.5 * first, 0.5 * second], 2))
    assert logits.shape == (2, 5)
    # The head reads nothing else: the same pooled features give the same logits.
    with torch.no_grad():
        pooled = pool.pool_sets(together)
    handle = pool.register_forward_hook(lambda *_: pool.shaped(pooled) if hasattr(pool, 'shaped') else pooled)
    assert torch.allclose(model(x), logits, atol=1e-5)
    handle.remove()


def test_images_of_your_own():
    made = multi_scale(converted(), (64, 96))
    assert torch.equal(made(made.resized(x)), made(x))
    assert made([x[..., :64, :64], x[..., 32:, 32:]]).shape == (2, 5)
    with pytest.raises(ValueError, match='2 batches of images, one for each size, got 3'):
        made([x, x, x])
    with pytest.raises(ValueError, match=r'a shorter side of 96, .* or be a list of batches, got 64 × 64'):
        made(x[..., :64, :64])


def test_all_sizes_are_cut_out_of_one_image():
    """Each shows its share of the image about the centre; what need not be downscaled is not touched."""
    made = multi_scale(converted(), (48, 96), crop_pct=(0.5, 1.0))
    small, large = made.resized(x)
    assert torch.equal(small, x[..., 24:72, 24:72])
    assert torch.equal(large, x)
    narrow = multi_scale(converted(), (32, 96), crop_pct=(0.5, 1.0)).resized(x)[0]
    assert torch.equal(narrow, F.interpolate(small, (32, 32), mode='bilinear', antialias=True))


def test_no_image_is_upscaled():
    """If a smaller size shows more than the largest one, the image is larger than that."""
    made = multi_scale(converted(), (96, 64), crop_pct=(0.75, 1.0))
    config = resolve_model_data_config(made)
    assert (config['input_size'], config['crop_pct']) == ((3, 128, 128), 1.0)
    image = torch.rand(1, 3, 128, 256)
    large, small = made.resized(image)
    assert torch.equal(large, image[..., 16:112, 32:224])
    assert small.shape[2:] == (64, 128)
    assert multi_scale(converted(), (96, 64), crop_pct=(0.96 * 0.75, 0.96)).side == 128
    model = converted()
    assert multi_scale(model, (64, 96)).crop_pct == (resolve_model_data_config(model)['crop_pct'], 1.0)


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    """Eight photos of five classes in folders, each larger than the sizes."""
    root = tmp_path_factory.mktemp('photos')
    random = np.random.default_rng(0)
    for i in range(10):
        folder = root / str(i % 5)
        folder.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 255, (150, 200, 3), dtype=np.uint8)).save(folder / f'{i}.png')
    return root


def test_the_transform_makes_each_image_from_the_photo(photos):
    """As timm's own for that size and crop; a loader makes lists of batches, which everything takes."""
    model = converted()
    made = multi_scale(copy.deepcopy(model), (64, 96), crop_pct=(0.8, 1.0))
    images = ImageFiles(photos, made.transform())
    config = resolve_model_data_config(model)
    alone = [
        ImageFiles(photos, create_transform(**config | {'input_size': (3, size, size), 'crop_pct': crop}))
        for size, crop in ((64, 0.8), (96, 1.0))
    ]
    for image, one in zip(images[3][0], alone, strict=True):
        assert torch.equal(image, one[3][0])
    loader = DataLoader(images, batch_size=5, num_workers=1)
    batch, _ = next(iter(loader))
    assert [tuple(image.shape) for image in batch] == [(5, 3, 64, 64), (5, 3, 96, 96)]
    assert calibrate(made, loader).num_images == 10
    result = compare(model, made, loader, labelled=True)  # a network of one size gets the first
    with torch.no_grad():
        logits = torch.cat([model(small) for small, _ in DataLoader(alone[0], batch_size=5)])
    loss = F.cross_entropy(logits, torch.tensor([label for _, label in alone[0]]))
    assert result.original.loss == pytest.approx(float(loss), rel=1e-5)
    assert result.average_gain is not None


def test_verify_reads_each_size_from_the_photo(photos, tmp_path, monkeypatch):
    save_pretrained(multi_scale(converted(), (64, 96)), tmp_path / 'two')
    monkeypatch.setattr(MultiScale, 'resized', lambda *_: pytest.fail('one image instead of a list'))
    assert main(['verify', '--model', str(tmp_path / 'two'), '--images', str(photos), '--workers', '0']) == 0


@pytest.mark.parametrize(
    ('make', 'arguments', 'message'),
    [
        (
            lambda: timm.create_model('test_resnet'),
            (),
            r'one global ROT pool, got 0; .*convert\(model\) makes',
        ),
        (lambda: convert(torchvision.models.resnet18()), (), 'must have forward_features and forward_head, as timm'),
        (
            lambda: convert(timm.create_model('vit_tiny_patch16_224', global_pool='avg', depth=1, img_size=64)),
            ((64, 96),),
            r'does not take images of 96 × 96 .* dynamic_img_size=True',
        ),
        (lambda: multi_scale(converted(), (64, 96)), (), 'multi-scale already'),
        (converted, ((64,),), 'two or more image sides'),
        (converted, (64,), 'two or more image sides'),
        (converted, ((64, -64),), 'sizes must be a positive integer up to 16384, got -64'),
        (converted, ((64, 96), (1.0,)), r'one share in \(0, 1\] for each of the sizes \(64, 96\)'),
        (converted, ((64, 96), (0.875, 1.5)), r'one share in \(0, 1\] for each of the sizes \(64, 96\)'),
        (converted, ((64, 96), 'all'), r'one share in \(0, 1\] for each of the sizes \(64, 96\)'),
        (lambda: nn.DataParallel(converted()), (), 'before it is wrapped or compiled'),
    ],
)
def test_what_cannot_be_multi_scale(make, arguments, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        multi_scale(model, *arguments)


def test_a_head_that_does_more_than_pool_is_refused():
    model = converted()
    model.forward_head = lambda features, pre_logits=False: model.fc(model.global_pool(features[:, :, 1:]))
    with pytest.raises(ValueError, match='head must do nothing to the map before its pool'):
        multi_scale(model, (64, 96))
    model.forward_features = lambda x: (x, x)
    with pytest.raises(ValueError, match='must return one map'):
        multi_scale(model, (64, 96))


def two_sizes(count: int, seed: int):
    """Maps as images: the class shows at one position, which only the larger size resolves."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 4, 16, 16, generator=generator)
    targets = torch.randint(4, (count,), generator=generator)
    positions = torch.randint(256, (count,), generator=generator)
    images.flatten(2)[torch.arange(count), targets, positions] += 0.6
    return images, targets


class Peaks(nn.Module):
    """The images are the maps; those of the smaller size, which say little, are three times too strong."""

    num_classes = 4

    def __init__(self):
        super().__init__()
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 4)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(4) * 12)
            self.fc.bias.zero_()

    def forward_features(self, x):
        return x * 3 if x.shape[2] == 8 else x

    def forward_head(self, x, pre_logits=False):
        return self.fc(self.global_pool(x).flatten(1))

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


def test_calibrate():
    """It beats the first size alone, and says what it will do on other images."""
    made = multi_scale(convert(Peaks(), example_input=torch.rand(2, 4, 8, 8)), (8, 16), crop_pct=(1, 1))
    images, targets = two_sizes(256, 0)
    same = calibrate(copy.deepcopy(made), [(made.resized(images), targets)], only='rotp')
    report = calibrate(made, [(images, targets)], only='rotp')
    assert str(same) == str(report)
    assert report.chosen is not None
    assert report.chosen.top1 > report.average.top1 + 0.1
    images, targets = two_sizes(512, 1)
    with torch.no_grad():
        loss = F.cross_entropy(made(images), targets)
    assert float(loss) == pytest.approx(report.chosen.loss, rel=0.2)
    gains = [math.exp(gain) for gain in report.chosen.setting.size_gains]
    assert gains[1] > 1.2
    assert made.gain().tolist() == pytest.approx(gains, rel=1e-4)
    assert f'sizes times 1, {gains[1]:.2g}' in str(report)
    with pytest.raises(ValueError, match='must be floating point'):
        calibrate(made, [([images, None], targets)])


def test_compare_and_revert():
    made = multi_scale(converted(), (64, 96))
    result = compare(revert(copy.deepcopy(made)), made, [(x, torch.tensor([0, 1]))], labelled=True)
    assert result.num_images == 2
    assert result.average_gain is not None
    assert 'of 13 positions' in result.positions


def test_training_learns_the_gains():
    made = freeze(multi_scale(converted(), (64, 96)))
    trained = [name for name, parameter in made.named_parameters() if parameter.requires_grad]
    assert 'gain.beta' in trained
    assert all(name == 'gain.beta' or name.startswith('model.global_pool.') for name in trained)
    F.cross_entropy(made(x), torch.tensor([0, 1])).backward()
    assert made.gain.beta.grad.abs().min() > 0
    assert made.no_weight_decay() >= {'gain.beta'}


@pytest.mark.parametrize('name', ['resnet', 'vit', 'native'])
def test_saved_and_loaded(tmp_path, name):
    made = multi_scale(converted(name), (64, 96), crop_pct=(0.75, 0.9)).eval()
    made.gain.set([1.5, 0.5])
    more = NETWORKS[name][1]
    once = load_pretrained(save_pretrained(made, tmp_path / 'one', model_args=more))
    assert torch.equal(once(x), made(x))
    assert (once.sizes, once.crop_pct, once.side) == ((64, 96), (0.75, 0.9), 96)
    assert str(once.transform()) == str(made.transform())
    assert tuple(resolve_model_data_config(once)['input_size']) == (3, 96, 96)
    again = load_pretrained(save_pretrained(once, tmp_path / 'two', model_args=more))
    assert torch.equal(again(x), made(x))
    other = timm.create_model(f'local-dir:{tmp_path / "one"}', pretrained=True, num_classes=2)
    assert other(x).shape == (2, 2)
    assert other.gain().tolist() == pytest.approx([1.5, 0.5])
    with pytest.raises(ValueError, match='several sizes'):
        timm.create_model(f'local-dir:{tmp_path / "one"}', pretrained=True, features_only=True)


def test_compiled_and_exported():
    made = multi_scale(converted(), (64, 96)).eval()
    made.gain.set([1.5, 0.5])
    with torch.no_grad():
        expected = made(x)
        compiled = torch.compile(made, fullgraph=True, backend='aot_eager')
        assert torch.allclose(compiled(x), expected, atol=1e-5)
    batch = torch.export.Dim('batch', min=1, max=64)
    program = torch.export.export(made, (x,), dynamic_shapes=({0: batch},))
    assert torch.allclose(program.module()(x[:1]), expected[:1], atol=1e-5)
    given = made.resized(x)
    program = torch.export.export(made, (given,), dynamic_shapes=([{0: batch}, {0: batch}],))
    assert torch.allclose(program.module()([image[:1] for image in given]), expected[:1], atol=1e-5)
    assert torch.allclose(compiled(given), expected, atol=1e-5)


def test_maps_are_not_drawn():
    with pytest.raises(ValueError, match='do not form one map'):
        pool_maps(multi_scale(converted(), (64, 96)), x)


def test_half_precision():
    made = multi_scale(converted().bfloat16(), (64, 96))
    assert made(x.bfloat16()).dtype == torch.bfloat16
