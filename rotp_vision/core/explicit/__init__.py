"""The backend 'torch': operators with explicit gradients, in plain torch, on every device."""

import torch
from torch import Tensor

from rotp_vision.core.explicit.badmm import badmm_coefficients
from rotp_vision.core.explicit.coupled import coupled_coefficients
from rotp_vision.core.explicit.sinkhorn import sinkhorn_coefficients
from rotp_vision.core.problem import ROTProblem
from rotp_vision.core.solver import Implementation, Solver, register_backend
from rotp_vision.core.weights import StepWeights

__all__ = ['explicit_pool']


def explicit_pool(
    problem: ROTProblem,
    weights: StepWeights,
    name: str,
    coupled: bool,
    num_inner: int,
    similarity: str,
) -> Tensor:
    """`rot_pool` by an operator with explicit gradients. Can be scripted, unlike `rot_pool`.

    What comes after the weights are the fields of a `Solver`.
    """
    features, log_p0, log_q0, mask, view = problem
    if mask is not None:
        log_q0 = log_q0.masked_fill(~mask.squeeze(1), float('-inf'))
    log_p0, log_q0 = log_p0.expand(features.shape[0], -1), log_q0.expand(features.shape[0], -1)
    similarity = '' if weights.structure is None else similarity
    quadratic = name == 'badmm-q'
    if name == 'sinkhorn':
        coefficients = sinkhorn_coefficients(weights).to(log_p0.dtype)
        return torch.ops.rotp_vision.sinkhorn_pool(features, log_p0, log_q0, coefficients, view, similarity, num_inner)
    if coupled:
        coefficients = coupled_coefficients(weights, quadratic).to(log_p0.dtype)
        return torch.ops.rotp_vision.coupled_badmm_pool(
            features, log_p0, log_q0, coefficients, view, similarity, quadratic
        )
    coefficients = badmm_coefficients(weights, quadratic).to(log_p0.dtype)
    return torch.ops.rotp_vision.badmm_pool(features, log_p0, log_q0, coefficients, view, similarity, quadratic)


def _pool(problem: ROTProblem, weights: StepWeights, solver: Solver) -> Tensor:
    name, coupled, num_inner, similarity, _ = solver
    return explicit_pool(problem, weights, name, coupled, num_inner, similarity)


register_backend('torch', Implementation(lambda weights, solver: None, lambda features: None, _pool))
