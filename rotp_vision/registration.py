"""Registers our models in timm; imported as soon as timm is.

It may run while a module of ours waits for timm, so it imports none but those that need timm and the layers alone.
"""

from dataclasses import replace
from typing import Any

from timm.models import generate_default_cfgs, get_pretrained_cfg, register_model
from torch import nn

import rotp_vision.models.rotp_resnet  # noqa: F401 - registers the ResNets

_resnet18 = get_pretrained_cfg('resnet18')
assert _resnet18 is not None
default_cfgs = generate_default_cfgs({'rotp_converted': replace(_resnet18, url='', hf_hub_id=None, tag=None)})


@register_model
def rotp_converted(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Any network with converted pools, as `save_pretrained` describes it in config.json; by default a ResNet-18."""
    from rotp_vision.hub import build_converted

    return build_converted(pretrained, **kwargs)
