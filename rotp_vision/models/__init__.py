"""timm models with ROT pooling."""

from rotp_vision.models.rotp_resnet import ROTPResNet

__all__ = ['ROTPResNet']
