"""The backend 'torch': operators with explicit gradients, in plain torch, on every device."""

from torch import Tensor

from rotp_vision.core.explicit.badmm import badmm_pool
from rotp_vision.core.explicit.coupled import coupled_badmm_pool
from rotp_vision.core.explicit.ops import decompositions
from rotp_vision.core.explicit.sinkhorn import sinkhorn_pool
from rotp_vision.core.problem import ROTProblem
from rotp_vision.core.solver import Implementation, Solver, register_backend
from rotp_vision.core.weights import StepWeights

__all__ = ['decompositions', 'explicit_pool']


def explicit_pool(
    problem: ROTProblem,
    weights: StepWeights,
    name: str,
    coupled: bool,
    num_inner: int,
    similarity: str,
    implicit: bool,
) -> Tensor:
    """`rot_pool` by an operator with explicit gradients. Can be scripted, unlike `rot_pool`.

    Args:
        problem: the batch of problems.
        weights: of the modules.
        name: the solver; this and the rest are the fields of `Solver`.
        coupled: see `Solver`.
        num_inner: see `Solver`.
        similarity: see `Solver`.
        implicit: see `Solver`.
    """
    features, log_p0, log_q0, mask, view = problem
    if mask is not None:
        log_q0 = log_q0.masked_fill(~mask.squeeze(1), float('-inf'))
    log_p0, log_q0 = log_p0.expand(features.shape[0], -1), log_q0.expand(features.shape[0], -1)
    if name == 'sinkhorn':
        pooled = sinkhorn_pool(features, log_p0, log_q0, weights, view, num_inner, implicit, similarity)
    elif coupled:
        pooled = coupled_badmm_pool(features, log_p0, log_q0, weights, view, name == 'badmm-q', similarity)
    else:
        pooled = badmm_pool(features, log_p0, log_q0, weights, view, name == 'badmm-q', similarity)
    return pooled


def _pool(problem: ROTProblem, weights: StepWeights, solver: Solver) -> Tensor:
    name, coupled, num_inner, similarity, implicit, _ = solver
    return explicit_pool(problem, weights, name, coupled, num_inner, similarity, implicit)


register_backend('torch', Implementation(lambda weights, solver: None, lambda features: None, _pool))
