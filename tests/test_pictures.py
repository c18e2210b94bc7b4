"""Pictures: the maps say what the network computes, and the files hold what they should."""

import base64
import io
import re

import pytest
import timm
import torch
from PIL import Image
from torch import nn

import rotp_vision
from rotp_vision.layers import GlobalROTPool2d, MixedROTPool2d, ROTSetPool
from rotp_vision.pictures import evidence, plot_looked, plot_weights, pool_maps, visualize

CHANNELS, CLASSES = 6, 4


class Net(nn.Module):
    """A convolution, a pool, what lies between, and a classifier."""

    def __init__(self, pool, between=None, classifier=None, layout='NCHW', last=lambda x: x):
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.pool = pool
        self.between = between or nn.Dropout(0.5)
        self.fc = classifier or nn.Linear(CHANNELS, CLASSES)
        self.layout = layout
        self.last = last

    def forward(self, x):
        x = self.conv(x).relu()
        if self.layout == 'NHWC':
            x = x.permute(0, 2, 3, 1)
        if self.layout == 'NLC':
            x = x.flatten(2).transpose(1, 2)
        return self.last(self.fc(self.between(self.pool(x))).flatten(1))


def images(batch=2, height=5, width=7, dtype=torch.float64):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(0), dtype=dtype)


def net(*args, seed=0, **kwargs):
    torch.manual_seed(seed)
    return Net(*args, **kwargs).double()


def gained(pool):
    """The pool with a gain that is not one, different for each channel where there is one for each."""
    gain = pool.named_weights()['gain']
    pool.set_weights(gain=torch.linspace(0.5, 2.0, gain.numel()).view_as(gain))
    return pool


SHARP = {'smoothness': 0.3, 'sample_penalty': 0.3}
NETS = {
    'sinkhorn': lambda: net(GlobalROTPool2d({'solver': 'sinkhorn', 'smoothness': 0.2})),
    'badmm-e': lambda: net(GlobalROTPool2d({'solver': 'badmm-e', 'smoothness': 0.3, 'step': 0.3})),
    'badmm-q-coupled': lambda: net(GlobalROTPool2d('badmm-q-coupled')),
    'gain': lambda: net(gained(GlobalROTPool2d(SHARP | {'gain': 'scalar', 'feature_scale': 'rms'}))),
    'gain per channel': lambda: net(gained(GlobalROTPool2d(SHARP | {'gain': 'channel'}, CHANNELS))),
    'attention': lambda: net(GlobalROTPool2d(SHARP | {'prior': 'attention'}, CHANNELS)),
    'NHWC': lambda: net(GlobalROTPool2d(SHARP, input_fmt='NHWC'), layout='NHWC'),
    'mixed': lambda: net(MixedROTPool2d(['badmm-e', SHARP])),
    'tokens': lambda: net(ROTSetPool(SHARP), layout='NLC'),
    '1 × 1 convolution': lambda: net(
        GlobalROTPool2d(SHARP, flatten=False), classifier=nn.Conv2d(CHANNELS, CLASSES, 1, bias=False)
    ),
}
every_net = pytest.mark.parametrize('make', NETS.values(), ids=NETS)


@every_net
def test_evidence_sums_to_the_logit_minus_the_bias(make):
    model, x = make(), images()
    with torch.no_grad():
        logits = model.eval()(x)
    maps = pool_maps(model, x)
    assert torch.equal(maps.logits, logits)
    for class_index in (None, 2, [3, 0]):
        found = evidence(maps, class_index)
        assert found.rotp.shape == (2, 5, 7)
        chosen = logits.gather(1, found.class_index.view(2, 1)).squeeze(1)
        torch.testing.assert_close(found.rotp.sum((1, 2)), chosen - found.bias, rtol=0, atol=1e-12)
    assert found.class_index.tolist() == [3, 0]
    torch.testing.assert_close(evidence(maps).class_index, logits.argmax(1))


@every_net
def test_weight_has_mass_one_and_lies_on_the_grid(make):
    model, x = make(), images()
    maps = pool_maps(model, x)
    torch.testing.assert_close(maps.weight.sum((1, 2)), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-12)
    assert maps.weight.shape == (2, 5, 7)


def test_weight_by_its_definition():
    """The mean of the rows of the plan, each in proportion to the size of its pooled feature."""
    model = NETS['gain per channel']()
    maps = pool_maps(model, images())
    rows = model.pool.solve_sets(maps.average.flatten(2) * 35).softmax(2)
    sizes = maps.contributions.sum((2, 3)).abs()
    expected = sum(sizes[:, d, None] * rows[:, d] for d in range(CHANNELS)) / sizes.sum(1, keepdim=True)
    torch.testing.assert_close(maps.weight.flatten(1), expected.detach())


@pytest.mark.parametrize('layout', ['NCHW', 'NHWC', 'NLC'])
def test_weight_is_high_where_the_features_are(layout):
    """A bright position gets the most weight, and the map shows it there."""
    options = {'solver': 'sinkhorn', 'smoothness': 0.5, 'sample_penalty': 1e-3}
    model = net(ROTSetPool(options) if layout == 'NLC' else GlobalROTPool2d(options, input_fmt=layout), layout=layout)
    nn.init.dirac_(model.conv.weight)
    x = torch.zeros(1, 3, 5, 7, dtype=torch.float64)
    x[0, :, 1, 5] = 3.0
    assert pool_maps(model, x).weight.flatten().argmax() == 1 * 7 + 5  # row 1, column 5


def test_average_evidence_is_that_of_average_pooling():
    model, x = net(gained(GlobalROTPool2d(SHARP | {'gain': 'scalar'}))), images()
    found = evidence(pool_maps(model, x), 1)
    model.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with torch.no_grad():
        logits = model.eval()(x)
    torch.testing.assert_close(found.average.sum((1, 2)) + found.bias, logits[:, 1], rtol=0, atol=1e-12)


def test_model_is_left_as_it_was():
    model = net(GlobalROTPool2d()).train()
    pool_maps(model, images())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: net(GlobalROTPool2d(), between=nn.LayerNorm(CHANNELS)), r'between \(LayerNorm\), fc \(Linear\)'),
        (lambda: net(GlobalROTPool2d(), between=nn.Linear(CHANNELS, CHANNELS)), r'between \(Linear\), fc \(Linear\)'),
        (lambda: net(GlobalROTPool2d(), classifier=nn.Identity()), 'no classifier follows'),
        (lambda: net(GlobalROTPool2d(), last=torch.tanh), 'a function is applied before or after fc'),
    ],
    ids=['norm', 'hidden layer', 'no classifier', 'function'],
)
def test_evidence_needs_a_classifier_directly_after_the_pool(make, message):
    maps = pool_maps(make(), images())
    with pytest.raises(ValueError, match=f'directly after the pool pool, but .*{message}'):
        evidence(maps)


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match=r'one global ROT pool, got 0; rotp_vision.convert\(model\) makes one'):
        pool_maps(net(nn.AdaptiveAvgPool2d(1)), images())
    with pytest.raises(ValueError, match=r'class_index must lie in 0 … 3, got 4'):
        evidence(pool_maps(net(GlobalROTPool2d()), images()), 4)
    pool = MixedROTPool2d([{'gain': 'scalar'}, 'sinkhorn'])
    pool.heads[0].set_weights(gain=3.0)
    with pytest.raises(ValueError, match='must be the average of its features under its plan'):
        pool_maps(net(pool), images())
    model = net(ROTSetPool(), layout='NLC')
    model.conv = nn.Sequential(nn.Conv2d(3, CHANNELS, 1), nn.AdaptiveAvgPool2d((7, 1))).double()
    with pytest.raises(ValueError, match='7 tokens do not form a grid over an image of 7 × 5'):
        pool_maps(model, images(height=7, width=5))
    with pytest.raises(ValueError, match='images must name at least one'):
        visualize(net(GlobalROTPool2d()), [], tmp_path)
    with pytest.raises(ValueError, match='titles must name every image, got 2 for 1'):
        visualize(net(GlobalROTPool2d()), ['one.jpg'], tmp_path, titles=['one', 'two'])


# Files


@pytest.fixture
def files(tmp_path):
    pixels = torch.randint(0, 255, (2, 90, 120, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    paths = [tmp_path / 'one.jpg', tmp_path / 'two & <three>.png']
    for path, image in zip(paths, pixels, strict=True):
        Image.fromarray(image.numpy()).save(path)
    return paths


@pytest.mark.parametrize(('name', 'panels'), [('test_resnet', 4), ('test_convnext', 2)])
def test_sheet_and_page(files, tmp_path, name, panels):
    """A ResNet has a linear classifier after its pool; a ConvNeXt has a norm, so the page goes without evidence."""
    model = rotp_vision.convert(timm.create_model(name, num_classes=3), 'sinkhorn')
    output = tmp_path / 'new' / 'pictures'
    sheet, page = visualize(
        model, files, output, class_names=['<b>', '$x', '\\frac$_{$'], data_config={'input_size': (3, 64, 96)}
    )
    assert sorted(path.name for path in output.iterdir()) == ['index.html', 'sheet.png']
    text = page.read_text('utf-8')
    pictures = [
        Image.open(io.BytesIO(base64.b64decode(code)))
        for code in re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    ]
    assert len(pictures) == 2
    assert all(picture.width == 290 * panels for picture in pictures)
    assert Image.open(sheet).size == (290 * panels, sum(picture.height for picture in pictures))
    words = re.sub(r'base64,[^"]+', '', text)  # in which any letters may follow each other
    for foreign in ('<script', 'http', '<b>', '<three>'):
        assert foreign not in words
    assert 'two &amp; &lt;three&gt;.png' in text
    assert ('No evidence maps: ' in text) == (panels == 2)
    assert 'α1, smoothness' in text


def test_class_names_of_the_model_and_what_is_left_out_are_on_the_page(files, tmp_path):
    model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3))
    model.pretrained_cfg = model.pretrained_cfg | {'num_classes': 3, 'label_names': ['ant', 'bee', 'cat']}
    config = {'input_size': (3, 64, 64)}
    _, page = visualize(model, files, tmp_path / 'some', data_config=config, total=400)
    assert '2 of 400 images are drawn.' in page.read_text('utf-8')
    assert re.search(r'<p>(ant|bee|cat) [\d.]+ %', page.read_text('utf-8'))
    model.pretrained_cfg = model.pretrained_cfg | {'label_names': ['ant', 'bee']}  # of other classes
    _, page = visualize(model, files, tmp_path / 'all', data_config=config, total=2)
    assert 'images are drawn' not in page.read_text('utf-8')
    assert '<p>class ' in page.read_text('utf-8')


def test_a_flat_plan_looks_flat_and_the_scale_is_the_same_in_every_picture():
    image = torch.rand(8, 8, 3, generator=torch.Generator().manual_seed(0)).numpy()
    flat = torch.full((2, 2), 0.25)
    sharp = torch.tensor([[0.97, 0.01], [0.01, 0.01]])
    scales = []
    for weights in ([flat, flat * 1.001], [sharp, flat]):
        figure = plot_looked([image, image], weights, ['one', 'two'])
        *_, bar = figure.axes
        scales.append(bar.get_ylim())
        layers = [axes.images[1].get_array()[..., 3] for axes in figure.axes if len(axes.images) == 2]
        assert len(layers) == 2
        for weight, layer in zip(weights, layers, strict=True):
            # The colours are transparent where all positions have the same weight.
            assert (layer.max() < 0.01) == (weight is not sharp)
    assert scales[0] == scales[1] == (0, 4)


def test_weights_over_epochs(tmp_path):
    table = tmp_path / 'weights.csv'
    rows = ['1,pool.step,0,0.5', '1,pool.step,1,2.0', '1,pool.gain,0,1.0', '2,pool.step,0,0.7', '2,pool.step,1,3.0']
    table.write_text('\n'.join(['epoch,weight,iteration,value', *rows]))
    panels = {axes.get_title(): axes for axes in plot_weights(table).axes if axes.get_title()}
    assert list(panels) == ['ρ, step\npool', 'gain\npool']
    lines = [line.get_xydata().tolist() for line in panels['ρ, step\npool'].lines]
    assert lines == [[[1.0, 0.5], [2.0, 0.7]], [[1.0, 2.0], [2.0, 3.0]]]
    table.write_text('epoch,value\n')
    with pytest.raises(ValueError, match=r"missing \['iteration', 'weight'\]"):
        plot_weights(table)
    table.write_text('epoch,weight,iteration,value\n')
    with pytest.raises(ValueError, match='at least one weight'):
        plot_weights(table)
