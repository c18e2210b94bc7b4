"""The backend 'torch': operators with explicit gradients, in plain torch, on every device."""

import torch
from torch import Tensor

from rotp_vision.core.explicit.badmm import badmm_pool
from rotp_vision.core.explicit.coupled import coupled_badmm_pool
from rotp_vision.core.explicit.ops import decompositions
from rotp_vision.core.explicit.sinkhorn import sinkhorn_pool
from rotp_vision.core.problem import ROTProblem
from rotp_vision.core.solver import Implementation, Solver, register_backend
from rotp_vision.core.weights import StepWeights

__all__ = ['decompositions']


def _pool(problem: ROTProblem, weights: StepWeights, solver: Solver) -> Tensor:
    features, log_p0, log_q0, mask, view = problem
    if mask is not None:
        log_q0 = log_q0.masked_fill(~mask.squeeze(1), -torch.inf)
    batch = features.shape[0]
    inputs = features, log_p0.expand(batch, -1), log_q0.expand(batch, -1), weights, view
    if solver.name == 'sinkhorn':
        return sinkhorn_pool(*inputs, solver.num_inner, solver.implicit, solver.similarity)
    pool = coupled_badmm_pool if solver.coupled else badmm_pool
    return pool(*inputs, solver.name == 'badmm-q', solver.similarity)


register_backend('torch', Implementation(lambda weights, solver: None, lambda features: None, _pool))
