"""rotp_vision: regularized optimal transport pooling for every timm model.

Names are imported when they are first used, so that `import rotp_vision.layers` needs torch alone. The models are
registered in timm as soon as both packages are imported, in whichever order.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rotp_vision.calibration import Calibration, calibrate
    from rotp_vision.core import register_solver
    from rotp_vision.evaluation import Comparison, compare, verify
    from rotp_vision.hub import load_pretrained, push_to_hub, read_state_dict, save_pretrained
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
        revert,
        rot_pools,
    )

__version__ = '0.2.0'

__all__ = [
    'MAX_POOL',
    'MEAN_POOL',
    'Calibration',
    'Comparison',
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
    'find_pools',
    'fit_probe',
    'fold_gain',
    'freeze',
    'load_pretrained',
    'pool_options',
    'probe',
    'push_to_hub',
    'read_state_dict',
    'register_solver',
    'revert',
    'rot_pools',
    'save_pretrained',
    'multi_scale',
    'verify',
]

# Where the names above are, those modules first that import least.
_PLACES = ('core', 'layers', 'surgery', 'models', 'calibration', 'evaluation', 'hub', 'probing')


def __getattr__(name: str) -> Any:
    if name in __all__:
        modules = (importlib.import_module(f'{__name__}.{place}') for place in _PLACES)
        value = next(getattr(module, name) for module in modules if hasattr(module, name))
    elif not name.startswith('_') and importlib.util.find_spec(f'{__name__}.{name}'):
        value = importlib.import_module(f'{__name__}.{name}')
    else:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _AfterTimm(MetaPathFinder):
    """Registers our models right after timm was imported, for `import rotp_vision` before `import timm`."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != 'timm':
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            importlib.import_module(f'{__name__}.registration')

        spec.loader.exec_module = run_and_register
        return spec


if sys.modules.get('timm'):
    importlib.import_module(f'{__name__}.registration')
else:
    sys.meta_path.insert(0, _AfterTimm())
