"""Replacing the pools of any network: find, convert, revert, freeze, fold."""

from rotp_vision.surgery.convert import convert, describe, revert, rot_pools
from rotp_vision.surgery.find import FoundPool, find_pools
from rotp_vision.surgery.fold import fold_gain
from rotp_vision.surgery.freeze import freeze
from rotp_vision.surgery.multi_scale import MultiScale, multi_scale

__all__ = [
    'FoundPool',
    'MultiScale',
    'convert',
    'describe',
    'find_pools',
    'fold_gain',
    'freeze',
    'revert',
    'rot_pools',
    'multi_scale',
]
