"""The solvers: tensors in, plan out. Imports torch only; knows neither vision nor modules."""

from rotp_vision.core.badmm import badmm
from rotp_vision.core.ops import decompositions
from rotp_vision.core.pool import pool
from rotp_vision.core.problem import Regularizer, ROTProblem, objective, rot_problem
from rotp_vision.core.sinkhorn import sinkhorn
from rotp_vision.core.solver import (
    BACKENDS,
    SOLVERS,
    Backend,
    Solver,
    SolverName,
    explicit_pool,
    rot_pool,
    solve,
)
from rotp_vision.core.structure import Similarity, structural_force
from rotp_vision.core.weights import StepWeights, step_weights
from rotp_vision.core.windows import Windows, has_window_kernel, rot_pool_windows

__all__ = [
    'BACKENDS',
    'SOLVERS',
    'Backend',
    'ROTProblem',
    'Regularizer',
    'Similarity',
    'Solver',
    'SolverName',
    'StepWeights',
    'Windows',
    'badmm',
    'decompositions',
    'explicit_pool',
    'has_window_kernel',
    'objective',
    'pool',
    'rot_pool',
    'rot_pool_windows',
    'rot_problem',
    'sinkhorn',
    'solve',
    'step_weights',
    'structural_force',
]
