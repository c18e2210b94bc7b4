"""The solvers: tensors in, plan out. Imports torch only; knows neither vision nor modules."""

import rotp_vision.core.triton  # noqa: F401 - registers its backend
from rotp_vision.core.badmm import badmm
from rotp_vision.core.explicit import explicit_pool
from rotp_vision.core.pool import pool
from rotp_vision.core.problem import VIEW_FLOOR, Regularizer, ROTProblem, View, objective, rot_problem, view_of
from rotp_vision.core.registered import SOLVERS, register_solver, transforms_active
from rotp_vision.core.sinkhorn import sinkhorn
from rotp_vision.core.solver import (
    BACKENDS,
    Backend,
    Solver,
    Windows,
    backend_lacks,
    positive_weights,
    reads_masked,
    rot_pool,
    rot_pool_windows,
    solve,
)
from rotp_vision.core.structure import Similarity, structural_force
from rotp_vision.core.weights import StepWeights, scaled_softplus, step_weights

__all__ = [
    'BACKENDS',
    'SOLVERS',
    'VIEW_FLOOR',
    'Backend',
    'ROTProblem',
    'Regularizer',
    'Similarity',
    'Solver',
    'StepWeights',
    'View',
    'Windows',
    'backend_lacks',
    'badmm',
    'explicit_pool',
    'objective',
    'pool',
    'positive_weights',
    'reads_masked',
    'register_solver',
    'rot_pool',
    'rot_pool_windows',
    'rot_problem',
    'scaled_softplus',
    'sinkhorn',
    'solve',
    'step_weights',
    'structural_force',
    'transforms_active',
    'view_of',
]
