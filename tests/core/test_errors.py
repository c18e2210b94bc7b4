"""Every bad input is a ValueError that names the argument, what it must be and what it was."""

import pytest
import torch

from rotp_vision.core import (
    Solver,
    StepWeights,
    badmm,
    objective,
    pool,
    rot_problem,
    sinkhorn,
    solve,
    step_weights,
    structural_force,
)

X = torch.zeros(2, 3, 4)
PROBLEM = rot_problem(X)
ONE = torch.ones(1)
FULL = step_weights(2, smoothness=1.0, feature_penalty=1.0, sample_penalty=1.0, step=1.0, structure=1.0)
ALPHA = {'smoothness': 1.0, 'feature_penalty': 1.0, 'sample_penalty': 1.0}

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
    'zero weight': (lambda: step_weights(1, smoothness=0.0), 'smoothness must be positive and finite, got 0.0'),
    'negative weight': (
        lambda: step_weights(1, smoothness=1.0, feature_penalty=-1.0),
        'feature_penalty must be positive and finite, got -1.0',
    ),
    'negative in list': (
        lambda: step_weights(2, smoothness=1.0, step=[1.0, -2.0]),
        r'step must be positive and finite, got \[1.0, -2.0\]',
    ),
    'infinite weight': (
        lambda: step_weights(1, smoothness=1.0, proximal=float('inf')),
        'proximal must be positive and finite, got inf',
    ),
    'not a number': (
        lambda: step_weights(1, smoothness=1.0, structure=float('nan')),
        'structure must be positive and finite, got nan',
    ),
    'weights of the wrong length': (
        lambda: step_weights(3, smoothness=[1.0, 2.0]),
        r'smoothness must be one number or 3, one per module, got \(2,\)',
    ),
    'no modules': (lambda: step_weights(0, smoothness=1.0), 'num_modules must be at least 1, got 0'),
    'uneven weights': (
        lambda: badmm(PROBLEM, StepWeights(torch.ones(2), step=torch.ones(3))),
        "must have one entry per module each, got lengths {'smoothness': 2, 'step': 3}",
    ),
    'uneven structure': (
        lambda: badmm(PROBLEM, StepWeights(ONE, step=ONE, structure=torch.ones(2))),
        "must have one entry per module each, got lengths .*'structure': 2",
    ),
    'uneven proximal': (
        lambda: sinkhorn(PROBLEM, FULL._replace(proximal=torch.ones(3)), 1),
        "must have one entry per module each, got lengths .*'proximal': 3",
    ),
    'sinkhorn without penalties': (
        lambda: sinkhorn(PROBLEM, StepWeights(ONE), 1),
        r'sinkhorn needs the weight\(s\) feature_penalty, sample_penalty, got None',
    ),
    'badmm without step': (lambda: badmm(PROBLEM, StepWeights(ONE)), r'badmm needs the weight\(s\) step, got None'),
    'coupled badmm without penalty': (
        lambda: badmm(PROBLEM, FULL._replace(sample_penalty=None), coupled=True),
        r'coupled badmm needs the weight\(s\) sample_penalty, got None',
    ),
    'no inner steps': (lambda: sinkhorn(PROBLEM, FULL, 0), 'num_inner must be at least 1, got 0'),
    'regularizer': (lambda: badmm(PROBLEM, FULL, regularizer='l1'), "regularizer must be 'entropic' or .* got 'l1'"),
    'objective regularizer': (
        lambda: objective(PROBLEM, X, regularizer='l1', **ALPHA),
        "regularizer must be 'entropic' or 'quadratic', got 'l1'",
    ),
    'similarity': (
        lambda: structural_force(PROBLEM, X, 'l2'),
        "similarity must be 'covariance' or 'cosine', got 'l2'",
    ),
    'solver similarity': (
        lambda: solve(PROBLEM, FULL, Solver('badmm-e', similarity='l2')),
        "similarity must be 'covariance' or 'cosine', got 'l2'",
    ),
    'solver': (lambda: solve(PROBLEM, FULL, Solver('badmm')), "solver must be one of .*, got 'badmm'"),
    'pool shapes': (
        lambda: pool(X, torch.zeros(2, 3, 5)),
        r'features and log_plan must have the same shape, got \(2, 3, 4\) and \(2, 3, 5\)',
    ),
}


@pytest.mark.parametrize(('call', 'message'), BAD.values(), ids=BAD)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
