"""The solvers: tensors in, plan out. Imports torch only; knows neither vision nor modules."""

from rotp_vision.core.badmm import BregmanADMM
from rotp_vision.core.problem import (
    FLOOR,
    FeatureScale,
    Regularizer,
    ROTProblem,
    log_norm,
    objective,
    rot_problem,
    scale_features,
)
from rotp_vision.core.sinkhorn import Sinkhorn
from rotp_vision.core.solver import (
    PENALTY,
    SOLVERS,
    Backend,
    Solver,
    Start,
    Weights,
    average,
    make_solver,
    register_solver,
    rot_pool,
    solve,
)
from rotp_vision.core.structure import Similarity, structural_force
from rotp_vision.core.windows import Windows, cut_windows, pool_windows, share_inside

__all__ = [
    'FLOOR',
    'PENALTY',
    'SOLVERS',
    'Backend',
    'BregmanADMM',
    'FeatureScale',
    'ROTProblem',
    'Regularizer',
    'Similarity',
    'Sinkhorn',
    'Solver',
    'Start',
    'Weights',
    'Windows',
    'average',
    'cut_windows',
    'log_norm',
    'make_solver',
    'objective',
    'pool_windows',
    'register_solver',
    'rot_pool',
    'rot_problem',
    'scale_features',
    'share_inside',
    'solve',
    'structural_force',
]
