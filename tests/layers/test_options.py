import dataclasses
import json
import math

import numpy as np
import pytest

from rotp_vision import PoolOptions, ROTPool, pool_options
from rotp_vision.core import Sinkhorn


def test_defaults_have_a_free_scale_and_a_gain():
    options = PoolOptions()
    assert (options.solver, options.feature_scale, options.gain, options.start) == ('sinkhorn', 'rms', 'scalar', 'auto')
    assert (options.num_iters, options.num_outer, options.structure, options.prior) == (None, None, 0.0, None)
    assert options.to_solver() == Sinkhorn(num_iters=4)
    assert options.starting_weights() == {'smoothness': 50.0, 'feature_penalty': 1.0, 'sample_penalty': 150.0}


@pytest.mark.parametrize('solver', ['badmm-e', 'badmm-q', 'sinkhorn'])
def test_the_published_layer_by_every_name(solver):
    options = PoolOptions.paper(solver)
    assert (options.solver, options.feature_scale, options.gain, options.prior) == (solver, 'raw', 'off', 'uniform')
    assert list(options.starting_weights().values()) == pytest.approx([math.log(2)] * len(options.starting_weights()))
    assert pool_options({'preset': 'paper', 'solver': solver}) == options
    assert pool_options('paper', solver=solver) == options
    assert pool_options(json.loads(json.dumps(options.to_dict()))) == options
    assert PoolOptions.paper(solver, feature_scale='rms') == pool_options('paper', solver=solver, feature_scale='rms')


@pytest.mark.parametrize(
    ('options', 'weights'),
    [
        ({'solver': 'sinkhorn'}, {'smoothness', 'feature_penalty', 'sample_penalty'}),
        (
            {'solver': 'sinkhorn', 'structure': 0.1},
            {'smoothness', 'feature_penalty', 'sample_penalty', 'proximal', 'structure'},
        ),
        ({'solver': 'badmm-q'}, {'smoothness', 'step'}),
        ({'solver': 'badmm-e', 'structure': 0.1}, {'smoothness', 'step', 'structure'}),
        ({'solver': 'badmm-e-coupled'}, {'smoothness', 'step', 'feature_penalty', 'sample_penalty'}),
    ],
)
def test_only_weights_that_the_solver_reads_exist(options, weights):
    assert set(pool_options(options).starting_weights()) == weights


def test_options_from_every_form_and_back():
    options = PoolOptions('sinkhorn', feature_scale='log', smoothness=4.0, gain='channel')
    as_json = json.loads(json.dumps(options.to_dict()))
    assert pool_options(as_json) == options
    assert pool_options(options) == options
    assert pool_options('sinkhorn', feature_scale='log', smoothness=4.0, gain='channel') == options
    assert pool_options(None) == PoolOptions()
    assert pool_options(options, start='paper').start == 'paper'
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.solver = 'badmm-e'  # pyright: ignore[reportAttributeAccessIssue]


def test_what_has_no_effect_may_be_given_as_it_is():
    """All options as written beside a network, read back."""
    options = PoolOptions('badmm-q')
    assert pool_options(dataclasses.asdict(options)) == options


def test_numbers_of_numpy_become_pythons():
    given = {'num_iters': np.int64(5), 'num_outer': 2, 'structure': np.float16(0.5), 'smoothness': np.float32(1)}
    options = PoolOptions(**given, proximal=(np.float64(1), 2))
    written = json.loads(json.dumps(options.to_dict()))
    assert written == {**given, 'proximal': [1.0, 2.0]}
    assert pool_options(written) == options


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'solver': 'sinkhron'}, "solver must be one of .*, got 'sinkhron'"),
        ({'solvr': 'sinkhorn'}, 'unknown pooling option.s. solvr; known are solver, num_iters'),
        ({'smoothness': -1.0}, 'smoothness must be positive and finite, got -1.0'),
        ({'smoothness': [1.0, 2.0]}, 'smoothness must be one number, no list'),
        ({'solver': 'badmm-e', 'smoothness': [1.0] * 2}, 'smoothness must be one number, or a list of 4'),
        ({'solver': 'badmm-e', 'smoothness': [1.0] * 4, 'learn': 'shared'}, 'must be one number, no list'),
        ({'structure': -0.1}, 'structure must be a number that is positive, or zero'),
        ({'structure': float('inf')}, 'structure must be positive and finite'),
        ({'smoothness': True}, 'smoothness must be a number, or a list of numbers, got True'),
        ({'smoothness': np.ones(4)}, 'smoothness must be a number, or a list of numbers, got array'),
        ({'num_iters': 0}, 'num_iters must be a positive integer up to 16384, got 0'),
        (
            {'solver': 'badmm-e', 'feature_penalty': 1.0},
            'feature_penalty has no effect .* reads smoothness, step',
        ),
        ({'step': 1.0}, 'step has no effect with Sinkhorn'),
        ({'solver': 'badmm-e', 'num_outer': 2}, "num_outer has no effect with solver='badmm-e'"),
        ({'similarity': 'cosine'}, 'similarity has no effect without structural term; leave it out, or give structure'),
        ({'prior_width': 4}, "prior_width has no effect with prior='uniform'; leave it out, or use prior='attention'"),
        ({'solver': 'badmm-e-coupled', 'num_iters': 2}, 'num_iters of badmm-e-coupled must be at least 3'),
        ({'solver': 'badmm-e', 'num_iters': 1, 'smoothness': 2.0}, 'smoothness has no effect with .* reads step'),
        ({'feature_scale': 'identity'}, 'feature_scale must be one of raw, rms, log'),
        ({'smoothness': 1e-45}, 'smoothness must be a normal float32 number, 1.18e-38 to 3.4e.38, got 1e-45'),
        ({'num_iters': 10**400}, 'num_iters must be a positive integer up to 16384, got one of 1329 bits'),
        (
            {'view': 'rms'},
            "view is now feature_scale, whose value 'identity' is now 'raw'",
        ),
        ({'num_modules': 4}, 'num_modules is now num_iters of Bregman ADMM, num_outer of Sinkhorn'),
        ({'num_inner': 4}, 'num_inner is now num_iters'),
        ({'coupled': True}, "coupled is now part of the solver's name"),
        ({1: 2, 'b': 3}, 'unknown pooling option.s. 1, b'),
        ({'prior': 'learned'}, 'prior must be one of uniform, norm, attention'),
        ({'prior': 'norm', 'prior_width': 4}, "prior_width has no effect with prior='norm'"),
        ({'prior': 'uniform', 'norm_power': 2.0}, "norm_power has no effect with prior='uniform'; leave it out"),
        ({'prior': 'norm', 'norm_power': float('nan')}, 'norm_power must be a finite number, got nan'),
        ({'preset': 'papers'}, "preset must be 'train', 'paper' or 'embedding', or left out, got 'papers'"),
        ({'learn': 'per-module'}, 'learn must be one of per-iteration, shared, fixed'),
        (3, "pooling options must be PoolOptions, a mapping of its fields, a solver .* or 'embedding', got int"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        pool_options(options)


@pytest.mark.parametrize('num_features', ['x', -1, 0, 2.0, True, np.ones(2), 10**400])
def test_bad_num_features(num_features):
    for options in ({'gain': 'channel'}, {}):
        with pytest.raises(ValueError, match='num_features must be a positive integer'):
            ROTPool(options, num_features)
