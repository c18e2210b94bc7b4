"""rotp_vision: regularized optimal transport pooling for every timm model.

Importing the package registers its models in timm if timm is installed. The public names are imported when they are
first used, so that `rotp_vision.layers` works with torch alone.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rotp_vision.calibration import Calibration as Calibration
    from rotp_vision.calibration import calibrate as calibrate
    from rotp_vision.core import register_solver as register_solver
    from rotp_vision.evaluation import Comparison as Comparison
    from rotp_vision.evaluation import compare as compare
    from rotp_vision.evaluation import verify as verify
    from rotp_vision.hub import load_pretrained as load_pretrained
    from rotp_vision.hub import push_to_hub as push_to_hub
    from rotp_vision.hub import read_state_dict as read_state_dict
    from rotp_vision.hub import save_pretrained as save_pretrained
    from rotp_vision.layers import MAX_POOL as MAX_POOL
    from rotp_vision.layers import MEAN_POOL as MEAN_POOL
    from rotp_vision.layers import GlobalROTPool2d as GlobalROTPool2d
    from rotp_vision.layers import LocalROTPool2d as LocalROTPool2d
    from rotp_vision.layers import MixedROTPool2d as MixedROTPool2d
    from rotp_vision.layers import PoolOptions as PoolOptions
    from rotp_vision.layers import ROTPool as ROTPool
    from rotp_vision.layers import ROTSetFusion as ROTSetFusion
    from rotp_vision.layers import ROTSetPool as ROTSetPool
    from rotp_vision.layers import pool_options as pool_options
    from rotp_vision.models import ROTPResNet as ROTPResNet
    from rotp_vision.probing import ProbeResult as ProbeResult
    from rotp_vision.probing import fit_probe as fit_probe
    from rotp_vision.probing import probe as probe
    from rotp_vision.surgery import FoundPool as FoundPool
    from rotp_vision.surgery import convert as convert
    from rotp_vision.surgery import describe as describe
    from rotp_vision.surgery import find_pools as find_pools
    from rotp_vision.surgery import fold_gain as fold_gain
    from rotp_vision.surgery import freeze as freeze
    from rotp_vision.surgery import multi_scale as multi_scale
    from rotp_vision.surgery import revert as revert
    from rotp_vision.surgery import rot_pools as rot_pools

__version__ = '0.3.0'

# The modules that hold the public names.
_MODULES = {
    'MAX_POOL': 'layers',
    'MEAN_POOL': 'layers',
    'Calibration': 'calibration',
    'Comparison': 'evaluation',
    'FoundPool': 'surgery',
    'GlobalROTPool2d': 'layers',
    'LocalROTPool2d': 'layers',
    'MixedROTPool2d': 'layers',
    'PoolOptions': 'layers',
    'ProbeResult': 'probing',
    'ROTPResNet': 'models',
    'ROTPool': 'layers',
    'ROTSetFusion': 'layers',
    'ROTSetPool': 'layers',
    'calibrate': 'calibration',
    'compare': 'evaluation',
    'convert': 'surgery',
    'describe': 'surgery',
    'find_pools': 'surgery',
    'fit_probe': 'probing',
    'fold_gain': 'surgery',
    'freeze': 'surgery',
    'load_pretrained': 'hub',
    'multi_scale': 'surgery',
    'pool_options': 'layers',
    'probe': 'probing',
    'push_to_hub': 'hub',
    'read_state_dict': 'hub',
    'register_solver': 'core',
    'revert': 'surgery',
    'rot_pools': 'surgery',
    'save_pretrained': 'hub',
    'verify': 'evaluation',
}
__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = globals()[name] = getattr(importlib.import_module(f'{__name__}.{_MODULES[name]}'), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if importlib.util.find_spec('timm'):
    importlib.import_module(f'{__name__}.hub')  # registers rotp_converted and, by importing models, the ResNets
