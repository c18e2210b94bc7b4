"""What docs/serving.md promises, beyond its own snippets."""

import subprocess
import sys

import pytest
import timm
import torch
from torchvision.models.feature_extraction import create_feature_extractor

import rotp_vision

images = torch.rand(2, 3, 64, 64)


def network(name):
    torch.manual_seed(0)
    if name == 'registered':
        return timm.create_model('resnet18_rotp_local', num_classes=3).eval()
    return rotp_vision.convert(timm.create_model(name, num_classes=3)).eval()


ALONE = """
import sys

sys.modules['rotp_vision'] = None  # an import of it raises
import torch

file, result = sys.argv[1:]
images, expected = torch.load(result, weights_only=True)
torch.testing.assert_close(torch.export.load(file).module()(images), expected)
"""


@pytest.mark.parametrize('name', ['registered', 'test_resnet'])
def test_an_exported_network_runs_where_rotp_vision_is_not_installed(name, tmp_path):
    model = network(name)
    with torch.no_grad():
        program = torch.export.export(model, (images,))
        torch.save((images, model(images)), tmp_path / 'result.pt')
    torch.export.save(program, tmp_path / 'model.pt2')
    command = [sys.executable, '-c', ALONE, str(tmp_path / 'model.pt2'), str(tmp_path / 'result.pt')]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('name', ['registered', 'test_resnet', 'test_convnext'])
def test_symbolic_traces_and_feature_extractors_need_to_be_told_nothing(name):
    model = network(name)
    (path,) = [path for path, pool in rotp_vision.rot_pools(model).items() if 'global_pool' in path]
    with torch.no_grad():
        traced = torch.fx.symbolic_trace(model)
        assert [node.target for node in traced.graph.nodes if node.target == path] == [path]
        assert torch.equal(traced(images), model(images))
        features = create_feature_extractor(model, [path])(images)
        assert features[path].flatten(1).shape == (2, model.num_features)


def test_functional_gradients_are_those_of_autograd():
    pool = rotp_vision.GlobalROTPool2d().double()
    weights = dict(pool.named_parameters())
    x = torch.rand(2, 5, 3, 3, dtype=torch.float64)

    def total(weights, x):
        return torch.func.functional_call(pool, weights, (x,)).square().sum()

    found = torch.func.grad(total)(weights, x)
    wanted = torch.autograd.grad(pool(x).square().sum(), list(weights.values()))
    torch.testing.assert_close(tuple(found.values()), wanted)
    jacobian = torch.func.jacrev(pool)(x)
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(pool, x))
