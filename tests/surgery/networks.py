"""Small networks, one of each kind of pooling."""

from collections.abc import Callable
from typing import NamedTuple

import timm
import torch
import torchvision
from timm.models.mlp_mixer import MlpMixer
from timm.models.repvit import RepVit
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torchvision.models import DenseNet, MNASNet, MobileNetV2, ShuffleNetV2


class Own(nn.Module):
    """A user's network: convolutions, a pool, a classifier."""

    def __init__(self, pool: nn.Module | None = None, width: int = 8):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.squash = nn.AdaptiveAvgPool2d(1) if pool is None else pool
        self.drop = nn.Dropout(0.5)
        self.classify = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.drop(self.squash(self.features(x)).flatten(1)))


class Case(NamedTuple):
    """How to make a network, the size of an image that it takes, and what is to be found."""

    make: Callable[[], nn.Module]
    size: int
    path: str
    output: str
    layout: str = 'NCHW'

    @property
    def kind(self) -> str:
        return 'tokens' if self.layout == 'NLC' else 'global'


def _swin() -> nn.Module:
    return SwinTransformer(img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(1, 2))


CASES = {
    'resnet': Case(lambda: timm.create_model('test_resnet'), 64, 'global_pool', 'flatten'),
    'convnext': Case(lambda: timm.create_model('test_convnext'), 64, 'head.global_pool', 'keep dims'),
    'efficientnet': Case(lambda: timm.create_model('test_efficientnet'), 64, 'global_pool', 'flatten'),
    'mobilenetv3': Case(lambda: timm.create_model('mobilenetv3_small_050'), 64, 'global_pool', 'keep dims'),
    'nfnet': Case(lambda: timm.create_model('test_nfnet'), 64, 'head.global_pool', 'flatten'),
    'swin': Case(_swin, 32, 'head.global_pool', 'flatten', 'NHWC'),
    'repvit': Case(lambda: RepVit(embed_dim=(16, 32), depth=(1, 1), mlp_ratio=2), 32, 'rot_pool', 'flatten'),
    'mambaout': Case(lambda: timm.create_model('test_mambaout'), 64, 'head.rot_pool', 'flatten', 'NHWC'),
    'vit': Case(
        lambda: timm.create_model('test_vit', global_pool='avg', img_size=32), 32, 'rot_pool', 'flatten', 'NLC'
    ),
    'mixer': Case(
        lambda: MlpMixer(img_size=64, patch_size=16, num_blocks=1, embed_dim=16), 64, 'rot_pool', 'flatten', 'NLC'
    ),
    'tv_resnet': Case(torchvision.models.resnet18, 64, 'avgpool', 'keep dims'),
    'tv_densenet': Case(lambda: DenseNet(8, (2, 2), 16), 64, 'rot_pool', 'keep dims'),
    'tv_mnasnet': Case(lambda: MNASNet(0.25), 64, 'rot_pool', 'flatten'),
    'tv_mobilenet': Case(lambda: MobileNetV2(width_mult=0.25), 64, 'rot_pool', 'keep dims'),
    'tv_shufflenet': Case(lambda: ShuffleNetV2([1, 1, 1], [24, 16, 32, 64, 128]), 64, 'rot_pool', 'flatten'),
    'own': Case(Own, 16, 'squash', 'keep dims'),
}
NAMES = list(CASES)


def make(name: str) -> tuple[nn.Module, Tensor]:
    """A network in evaluation mode whose random weights respond to the image, and an input."""
    torch.manual_seed(0)
    model = CASES[name].make().eval()
    x = torch.randn(2, 3, CASES[name].size, CASES[name].size)
    for module in model.modules():  # statistics of the data keep a deep random network from falling silent
        if isinstance(module, nn.BatchNorm2d):
            module.train()
            module.momentum = 1.0
    with torch.no_grad():
        for parameter in model.parameters():  # some layers start at zero, which would hide what comes before
            if not parameter.any():
                parameter.normal_(0, 0.1)
        model(x)
    return model.eval(), x
