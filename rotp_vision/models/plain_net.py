"""A small network for generated images, registered in timm."""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.efficientnet import EfficientNet

__all__ = ['plain_net']

default_cfgs = generate_default_cfgs(
    {
        'plain_net': {
            'url': '',
            'num_classes': 1000,
            'input_size': (3, 64, 64),
            'pool_size': (16, 16),
            'crop_pct': 1.0,
            'interpolation': 'bicubic',
            'mean': (0.5, 0.5, 0.5),
            'std': (0.5, 0.5, 0.5),
            'first_conv': 'conv_stem',
            'classifier': 'classifier',
            'license': 'mit',
        }
    }
)


@register_model
def plain_net(pretrained: bool = False, **kwargs: Any) -> EfficientNet:
    """Four convolutions, whose maps of an image of 64 px have 16 × 16 positions; there are no pretrained weights."""
    blocks = decode_arch_def([['cn_r1_k3_s2_c24'], ['cn_r1_k3_s1_c32'], ['cn_r1_k3_s1_c32']])
    kwargs = {'block_args': blocks, 'stem_size': 16, 'num_features': 0} | kwargs
    return build_model_with_cfg(EfficientNet, 'plain_net', pretrained, **kwargs)
