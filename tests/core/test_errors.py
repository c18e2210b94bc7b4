"""Every bad input is a ValueError that names the argument, what it must be and what it was."""

import pytest
import torch

from rotp_vision.core import average, make_solver, objective, rot_pool, rot_problem, solve, structural_force
from tests.core.variants import constant

X = torch.zeros(2, 3, 4)
PROBLEM = rot_problem(X)
ALPHA = {'smoothness': 1.0, 'feature_penalty': 1.0, 'sample_penalty': 1.0}
SINKHORN, BADMM = make_solver('sinkhorn'), make_solver('badmm-e')

BAD = {
    'rank': (lambda: rot_problem(torch.zeros(3, 4)), r'features must have shape \(B, D, N\), got \(3, 4\)'),
    'rank 4': (lambda: rot_problem(torch.zeros(2, 3, 4, 4)), r'features must have shape .* got \(2, 3, 4, 4\)'),
    'integers': (lambda: rot_problem(X.long()), 'features must be floating point, got torch.int64'),
    'no samples': (lambda: rot_problem(torch.zeros(2, 3, 0)), r'at least one .* sample, got \(2, 3, 0\)'),
    'no features': (lambda: rot_problem(torch.zeros(2, 0, 4)), r'at least one feature .* got \(2, 0, 4\)'),
    'feature prior': (
        lambda: rot_problem(X, log_feature_prior=torch.zeros(2, 4)),
        r'log_feature_prior must have shape \(2 or 1, 3\), got \(2, 4\)',
    ),
    'sample prior batch': (
        lambda: rot_problem(X, log_sample_prior=torch.zeros(3, 4)),
        r'log_sample_prior must have shape \(2 or 1, 4\), got \(3, 4\)',
    ),
    'sample prior rank': (
        lambda: rot_problem(X, log_sample_prior=torch.zeros(4)),
        r'log_sample_prior must have shape \(2 or 1, 4\), got \(4,\)',
    ),
    'mask dtype': (
        lambda: rot_problem(X, mask=torch.ones(2, 4)),
        r'mask must be a bool tensor of shape \(2, 4\).* got torch.float32',
    ),
    'mask shape': (
        lambda: rot_problem(X, mask=torch.ones(2, 3, dtype=torch.bool)),
        r'mask must be .* of shape \(2, 4\).* of shape \(2, 3\)',
    ),
    'mask empty': (
        lambda: rot_problem(X, mask=torch.tensor([[True] * 4, [False] * 4])),
        r'mask must leave at least one sample in every set, got none in set\(s\) \[1\]',
    ),
    'feature scale': (
        lambda: rot_problem(X, feature_scale='identity'),
        "feature_scale must be one of raw, rms, log, got 'identity'",
    ),
    'sinkhorn without penalties': (
        lambda: rot_pool(PROBLEM, constant(smoothness=1.0), SINKHORN),
        r"solver 'sinkhorn' needs the weight\(s\) feature_penalty, sample_penalty, got smoothness",
    ),
    'badmm without step': (
        lambda: solve(PROBLEM, constant(smoothness=1.0), BADMM),
        r"solver 'badmm-e' needs the weight\(s\) step",
    ),
    'coupled badmm without penalty': (
        lambda: solve(PROBLEM, constant(smoothness=1.0, step=1.0), make_solver('badmm-e-coupled')),
        r"solver 'badmm-e-coupled' needs the weight\(s\) feature_penalty, sample_penalty",
    ),
    'weights of the wrong length': (
        lambda: solve(PROBLEM, {'smoothness': torch.ones(3), 'step': torch.ones(4)}, BADMM),
        r"weight smoothness of solver 'badmm-e' must have shape \(1,\) or \(4,\), got \(3,\)",
    ),
    'a weight without axis': (
        lambda: rot_pool(PROBLEM, constant(**ALPHA) | {'smoothness': torch.tensor(1.0)}, SINKHORN),
        r"weight smoothness of solver 'sinkhorn' must have shape .*, got \(\)",
    ),
    'backend': (
        lambda: rot_pool(PROBLEM, constant(**ALPHA), SINKHORN, backend='triton'),
        "backend must be one of auto, reference, got 'triton'",
    ),
    'coupled in two iterations': (
        lambda: make_solver('badmm-q-coupled', num_iters=2),
        'num_iters of badmm-q-coupled must be at least 3 for its penalties to act, got 2',
    ),
    'objective regularizer': (
        lambda: objective(PROBLEM, X, regularizer='l1', **ALPHA),
        "regularizer must be 'entropic' or 'quadratic', got 'l1'",
    ),
    'similarity': (
        lambda: structural_force(PROBLEM, X, 'l2'),
        "similarity must be 'covariance' or 'cosine', got 'l2'",
    ),
    'solver similarity': (
        lambda: make_solver('badmm-e', structure=True, similarity='l2'),
        "similarity must be one of covariance, cosine, got 'l2'",
    ),
    'similarity without structure': (
        lambda: make_solver('sinkhorn', similarity='cosine'),
        'similarity has no effect without structural term',
    ),
    'pool shapes': (
        lambda: average(X, torch.zeros(2, 3, 5)),
        r'features and log_plan must have the same shape, got \(2, 3, 4\) and \(2, 3, 5\)',
    ),
}


@pytest.mark.parametrize(('call', 'message'), BAD.values(), ids=BAD)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
