"""rotp_vision: regularized optimal transport pooling for every timm model."""

from rotp_vision.calibration import Calibration, calibrate
from rotp_vision.hub import load_pretrained, read_state_dict, save_pretrained
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
from rotp_vision.probing import ProbeResult, fit_probe
from rotp_vision.surgery import FoundPool, convert, describe, find_pools, fold_gain, freeze, revert, rot_pools, views

__version__ = '0.1.0'

__all__ = [
    'Calibration',
    'FoundPool',
    'GlobalROTPool2d',
    'LocalROTPool2d',
    'MixedROTPool2d',
    'PoolOptions',
    'ProbeResult',
    'ROTPResNet',
    'ROTPool',
    'ROTSetFusion',
    'ROTSetPool',
    'calibrate',
    'convert',
    'describe',
    'find_pools',
    'fit_probe',
    'fold_gain',
    'freeze',
    'load_pretrained',
    'pool_options',
    'read_state_dict',
    'revert',
    'rot_pools',
    'save_pretrained',
    'views',
]
