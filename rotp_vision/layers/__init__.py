"""Pooling layers, built on the solvers of `rotp_vision.core`."""

from rotp_vision.layers.base import ROTPool
from rotp_vision.layers.global_pool import GlobalROTPool2d
from rotp_vision.layers.hierarchical_pool import FusionPlans, MixedROTPool2d, ROTSetFusion
from rotp_vision.layers.local_pool import LocalROTPool2d
from rotp_vision.layers.options import MAX_POOL, MEAN_POOL, PoolOptions, pool_options
from rotp_vision.layers.set_pool import ROTSetPool
from rotp_vision.layers.simple import (
    AnyPoolOptions,
    AvgMaxPool2d,
    GeMPool2d,
    SimplePool,
    SimplePoolOptions,
    any_pool_options,
)

__all__ = [
    'MAX_POOL',
    'MEAN_POOL',
    'AnyPoolOptions',
    'AvgMaxPool2d',
    'FusionPlans',
    'GeMPool2d',
    'GlobalROTPool2d',
    'LocalROTPool2d',
    'MixedROTPool2d',
    'PoolOptions',
    'ROTPool',
    'ROTSetFusion',
    'ROTSetPool',
    'SimplePool',
    'SimplePoolOptions',
    'any_pool_options',
    'pool_options',
]
