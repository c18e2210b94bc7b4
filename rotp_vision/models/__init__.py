"""timm models with ROT pooling, and a small network for generated images."""

from rotp_vision.models.plain_net import plain_net
from rotp_vision.models.rotp_resnet import ROTPResNet

__all__ = ['ROTPResNet', 'plain_net']
