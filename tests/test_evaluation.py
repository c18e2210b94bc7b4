"""Comparing a pooling with average pooling."""

import copy
import math

import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import rotp_vision
from rotp_vision import convert, load_pretrained, save_pretrained
from rotp_vision.cli import main
from rotp_vision.evaluation import ImageFiles, counted_positions, positions_sentence, positions_used
from rotp_vision.layers import MAX_POOL, MEAN_POOL, GlobalROTPool2d, MixedROTPool2d, ROTSetPool

MAPS = torch.randn(3, 5, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(('options', 'expected'), [(MEAN_POOL, 24.0), (MAX_POOL, 1.0)])
def test_average_pooling_uses_all_positions_and_max_pooling_one(options, expected):
    used = positions_used(GlobalROTPool2d(options).double(), MAPS)
    torch.testing.assert_close(used, torch.full((3,), expected, dtype=torch.float64), rtol=1e-4, atol=0)


@pytest.mark.parametrize('layout', ['NCHW', 'NHWC', 'NLC', 'mixed'])
def test_positions_by_their_definition(layout):
    options = {'solver': 'sinkhorn', 'smoothness': 0.7, 'sample_penalty': 0.1}
    sets = MAPS.flatten(2)
    if layout == 'NLC':
        pool, maps = ROTSetPool(options).double(), sets.transpose(1, 2)
        plan = pool.solve_sets(sets).detach()
    elif layout == 'mixed':
        pool, maps = MixedROTPool2d([options, MEAN_POOL]).double(), MAPS
        plan = pool.sets(pool.log_plan(maps)).detach()
    else:
        pool = GlobalROTPool2d(options, input_fmt=layout).double()
        maps = MAPS if layout == 'NCHW' else MAPS.permute(0, 2, 3, 1)
        plan = pool.sets(pool.log_plan(maps)).detach()
    for image, used in enumerate(positions_used(pool, maps).tolist()):
        total, parts = 0.0, 0.0
        for d in range(5):
            weights = plan[image, d].exp() / plan[image, d].exp().sum()
            entropy = -sum(w * math.log(w) for w in weights.tolist())
            share = abs(float((weights * sets[image, d]).sum()))
            total, parts = total + share, parts + share * math.exp(entropy)
        assert used == pytest.approx(parts / total, rel=1e-9)
        assert 1 < used < 24


def test_maps_without_any_feature_are_averaged():
    used = positions_used(GlobalROTPool2d(), torch.zeros(1, 5, 4, 6))
    torch.testing.assert_close(used, torch.tensor([24.0]))


def test_positions_are_counted_in_forward_passes_and_the_model_is_left_as_it_was():
    model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3)).eval()
    with torch.no_grad(), counted_positions(model) as positions:
        for size in (2, 3):
            model(torch.rand(size, 3, 96, 96))
    assert [len(used) for used in positions.used] == [2, 3]
    assert positions.total == 9
    assert not model.global_pool._forward_pre_hooks
    with counted_positions(timm.create_model('test_resnet')) as positions:
        pass
    assert positions.used == []


def test_a_plan_within_a_hundredth_of_uniform_is_called_average_pooling():
    assert positions_sentence(48.9, 49) == 'The plan uses 48.9 of 49 positions: the pooling is still average pooling.'
    assert 'still average' not in positions_sentence(48.4, 49)
    assert positions_sentence(12.345, 49).startswith('The plan uses 12.3 of 49 positions; ')


X, Y = torch.rand(8, 3, 64, 64, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def converted(**options):
    return rotp_vision.convert(timm.create_model('test_resnet', num_classes=3), options)


def test_verify_compares_with_the_native_network_and_leaves_both_as_they_were():
    model = converted(smoothness=0.3).train()
    result = rotp_vision.verify(model, [(X[:5], Y[:5]), (X[5:], Y[5:])])
    with torch.no_grad():
        ours = model.eval()(X)
        native = rotp_vision.revert(model)(X)
    assert result.num_images == 8
    assert result.converted.loss == pytest.approx(float(F.cross_entropy(ours, Y)), rel=1e-5)
    assert result.original.loss == pytest.approx(float(F.cross_entropy(native, Y)), rel=1e-5)
    assert result.largest_difference == pytest.approx(float((ours - native).abs().max()), rel=1e-4)
    assert result.sentence in str(result)


def test_equal_logits_are_wrong():
    model = converted()
    for parameter in model.fc.parameters():
        nn.init.zeros_(parameter)
    result = rotp_vision.verify(model, [(X, Y)])
    assert (result.original.top1, result.converted.top1, result.converted.top5) == (0, 0, 1)
    assert result.sentence.startswith('Keep average pooling')


@pytest.mark.parametrize(
    ('batches', 'message'),
    [
        ([], 'at least one batch'),
        ([(X[:0], Y[:0])], 'holds no image'),
        ([(X.double(), Y)], 'torch.float64, but the model is torch.float32'),
        ([(X * math.nan, Y)], 'fc.bias of the model is not finite'),
    ],
)
def test_what_cannot_be_verified_is_refused(batches, message):
    model = converted()
    if 'finite' in message:
        nn.init.constant_(model.fc.bias, math.nan)
    with pytest.raises(ValueError, match=message):
        rotp_vision.verify(model, batches)


def test_class_folders_are_numbered_as_the_network_numbers_its_classes(tmp_path, capsys):
    for name in ('ant', 'bee', 'cat'):
        (tmp_path / 'images' / name).mkdir(parents=True)
        for file in ('a.png', 'b.png'):
            Image.effect_noise((32, 32), 50).save(tmp_path / 'images' / name / file)
    images = ImageFiles(tmp_path / 'images', None)
    assert images.number_as(['cat', 'ant', 'bee']) == ''
    assert [label for _, label in images] == [1, 1, 2, 2, 0, 0]
    assert images.classes == ['cat', 'ant', 'bee']
    model = convert(timm.create_model('test_resnet', num_classes=3))
    model.pretrained_cfg |= {'num_classes': 3, 'label_names': ['ant', 'bee', 'dog']}
    directory = save_pretrained(model, tmp_path / 'model')
    folder = str(tmp_path / 'images')
    assert main(['verify', '--model', str(directory), '--images', folder, '--workers', '0']) == 0
    assert 'has other class folders than the classes of the network: cat, dog' in capsys.readouterr().out
    native = ['--model', 'test_resnet', '--num-classes', '3', '--random-weights']
    assert main(['convert', *native, '--calibrate', folder, '--output', str(tmp_path / 'fitted')]) == 0
    assert load_pretrained(tmp_path / 'fitted').pretrained_cfg['label_names'] == ['ant', 'bee', 'cat']


def test_the_sentence_names_the_pooling():
    native = timm.create_model('test_resnet', num_classes=3)
    loader = [(torch.rand(4, 3, 64, 64), torch.arange(4) % 3)]
    for options, name in ((None, 'ROTP'), ('gem', 'GeM')):
        assert name in rotp_vision.compare(native, convert(copy.deepcopy(native), options), loader).sentence
