"""Forward passes with a pool module, for networks of torchvision whose forward pools by a function in its middle."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchvision.models import DenseNet, MNASNet, MobileNetV2, ShuffleNetV2


def _densenet(self: Any, x: Tensor) -> Tensor:
    return self.classifier(self.rot_pool(F.relu(self.features(x), inplace=True)).flatten(1))


def _mnasnet(self: Any, x: Tensor) -> Tensor:
    return self.classifier(self.rot_pool(self.layers(x)).flatten(1))


def _mobilenet_v2(self: Any, x: Tensor) -> Tensor:
    return self.classifier(self.rot_pool(self.features(x)).flatten(1))


def _shufflenet_v2(self: Any, x: Tensor) -> Tensor:
    x = self.maxpool(self.conv1(x))
    x = self.conv5(self.stage4(self.stage3(self.stage2(x))))
    return self.fc(self.rot_pool(x).flatten(1))


# By class: the method that pools, and its replacement.
FAMILIES: dict[type, tuple[str, Callable[..., Tensor]]] = {
    DenseNet: ('forward', _densenet),
    MNASNet: ('forward', _mnasnet),
    MobileNetV2: ('_forward_impl', _mobilenet_v2),
    ShuffleNetV2: ('_forward_impl', _shufflenet_v2),
}
FAMILY_METHODS: dict[type, str] = {cls: method for cls, (method, _) in FAMILIES.items()}
