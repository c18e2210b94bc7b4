"""Replacing the pools of any network: find, convert, revert, freeze, fold."""

from rotp_vision.surgery.convert import convert, revert
from rotp_vision.surgery.describe import PoolRow, PoolTable, describe
from rotp_vision.surgery.find import find_pools
from rotp_vision.surgery.fold import fold_gain
from rotp_vision.surgery.freeze import freeze
from rotp_vision.surgery.groups import param_groups
from rotp_vision.surgery.multi_scale import MultiScale, multi_scale
from rotp_vision.surgery.pools import FoundPool, rot_pools

__all__ = [
    'FoundPool',
    'MultiScale',
    'PoolRow',
    'PoolTable',
    'convert',
    'describe',
    'find_pools',
    'fold_gain',
    'freeze',
    'multi_scale',
    'param_groups',
    'revert',
    'rot_pools',
]
