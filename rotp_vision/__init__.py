"""rotp_vision: regularized optimal transport pooling for every timm model."""

from rotp_vision.layers import (
    GlobalROTPool2d,
    LocalROTPool2d,
    MixedROTPool2d,
    PoolOptions,
    ROTPool,
    ROTSetFusion,
    ROTSetPool,
    pool_options,
)
from rotp_vision.models import ROTPResNet

__version__ = '0.1.0'

__all__ = [
    'GlobalROTPool2d',
    'LocalROTPool2d',
    'MixedROTPool2d',
    'PoolOptions',
    'ROTPResNet',
    'ROTPool',
    'ROTSetFusion',
    'ROTSetPool',
    'pool_options',
]
