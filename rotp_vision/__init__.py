"""rotp_vision: regularized optimal transport pooling for every timm model.

Importing the package registers its models in timm. Without timm, `rotp_vision.layers` works with torch alone.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rotp_vision.core import register_solver
from rotp_vision.layers import (
    MAX_POOL,
    MEAN_POOL,
    GlobalROTPool2d,
    LocalROTPool2d,
    MixedROTPool2d,
    PoolOptions,
    ROTPool,
    ROTSetFusion,
    ROTSetPool,
    pool_options,
)

__version__ = '0.3.0'
__all__ = [
    'MAX_POOL',
    'MEAN_POOL',
    'Calibration',
    'Comparison',
    'Embedder',
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
    'compare',
    'convert',
    'describe',
    'embed_folder',
    'find_pools',
    'fit_probe',
    'fold_gain',
    'freeze',
    'load_pretrained',
    'multi_scale',
    'param_groups',
    'pool_options',
    'probe',
    'push_to_hub',
    'read_state_dict',
    'register_solver',
    'revert',
    'rot_pools',
    'save_pretrained',
    'verify',
]

if TYPE_CHECKING:
    from rotp_vision.pictures import visualize as visualize

if find_spec('timm'):
    from rotp_vision.calibration import Calibration, calibrate
    from rotp_vision.embedding import Embedder, embed_folder
    from rotp_vision.evaluation import Comparison, compare, verify
    from rotp_vision.hub import load_pretrained, push_to_hub, read_state_dict, save_pretrained
    from rotp_vision.models import ROTPResNet
    from rotp_vision.probing import ProbeResult, fit_probe, probe
    from rotp_vision.surgery import (
        FoundPool,
        convert,
        describe,
        find_pools,
        fold_gain,
        freeze,
        multi_scale,
        param_groups,
        revert,
        rot_pools,
    )


def __getattr__(name: str) -> Any:
    if name == 'visualize':  # needs matplotlib, which comes with an extra
        return importlib.import_module('rotp_vision.pictures').visualize
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
