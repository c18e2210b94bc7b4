"""Drawn options, shapes, layouts and masks: valid ones compute what the float64 reference does, others are refused."""

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rotp_vision
from rotp_vision import GlobalROTPool2d, LocalROTPool2d, PoolOptions, ROTSetPool, pool_options

SOLVERS = ('sinkhorn', 'badmm-e', 'badmm-q', 'badmm-e-coupled', 'badmm-q-coupled')
WEIGHTS = ('smoothness', 'feature_penalty', 'sample_penalty', 'step', 'proximal')


def quick_and_slow(quick: int, slow: int):
    """Run a test on few examples, the same every time, and on many under the mark `slow`."""
    marks = [pytest.mark.slow, pytest.mark.timeout(3600)]
    return pytest.mark.parametrize('examples', [quick, pytest.param(slow, marks=marks)])


def check(examples: int, function: Any, **strategies: st.SearchStrategy):
    """Call `function` with drawn arguments."""
    health = [HealthCheck.too_slow, HealthCheck.data_too_large]
    limits = settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=health
    )
    limits(given(**strategies)(function))()


@st.composite
def valid_options(draw: st.DrawFn) -> dict[str, Any]:
    """Every option given outright, each from all that it may be beside the others."""
    solver = draw(st.sampled_from(SOLVERS))
    options: dict[str, Any] = {
        'solver': solver,
        'num_iters': draw(st.sampled_from([None, 3, 4, 5] if solver.endswith('coupled') else [None, 1, 2, 3, 5])),
        'start': draw(st.sampled_from(['auto', 'train', 'paper', 'mean', 'max'])),
        'learn': draw(st.sampled_from(['per-iteration', 'shared', 'fixed'])),
        'structure': draw(st.sampled_from([0.0, 0.0, 0.003, 0.3])),
        'feature_scale': draw(st.sampled_from(['raw', 'rms', 'log'])),
        'gain': draw(st.sampled_from(['off', 'scalar', 'channel'])),
        'prior': draw(st.sampled_from(['uniform', 'norm', 'attention'])),
    }
    if solver == 'sinkhorn':
        options['num_outer'] = draw(st.sampled_from([None, 1, 2, 3]))
    if options['structure']:
        options['similarity'] = draw(st.sampled_from(['covariance', 'cosine']))
    if options['prior'] == 'norm':
        options['norm_power'] = draw(st.sampled_from([None, -0.5, 2]))
    if options['prior'] == 'attention':
        options['prior_width'] = draw(st.sampled_from([None, 2]))
    plain = PoolOptions(**options)
    for name in plain.starting_weights():
        kinds = ['left', 'number', *(['list'] if options['learn'] != 'shared' else [])]
        kind = 'left' if name == 'structure' else draw(st.sampled_from(kinds))
        numbers = [10 ** draw(st.floats(-1, 2)) for _ in range(plain.to_solver().num_weight_sets)]
        if kind != 'left':
            options[name] = numbers[0] if kind == 'number' else numbers
    return options


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides."""
    if layout == 'channels_last':
        return x.contiguous(memory_format=torch.channels_last)
    if layout == 'sliced':
        return torch.cat([x, x], 3)[..., : x.shape[3]]
    return x.transpose(2, 3).contiguous().transpose(2, 3) if layout == 'transposed' else x


def outputs(pool: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """What a pool returns, and its gradients by the input and by the weights."""
    x = x.detach().requires_grad_()
    pooled = pool(x, mask=mask) if mask is not None else pool(x)
    weight = torch.linspace(-1, 1, pooled.numel(), dtype=pooled.dtype).view_as(pooled)
    inputs = [x, *(parameter for parameter in pool.parameters() if parameter.requires_grad)]
    found = torch.autograd.grad((pooled * weight).sum(), inputs, allow_unused=True)
    pairs = zip(found, inputs, strict=True)
    return [pooled.detach(), *(torch.zeros_like(one) if grad is None else grad for grad, one in pairs)]


@quick_and_slow(15, 2000)
@pytest.mark.parametrize('kind', ['map', 'set', 'windows'])
def test_layers_compute_what_the_reference_does(kind, examples):
    def compare(options, shape, layout, scale, seed):
        torch.manual_seed(seed)
        x, mask = scale * torch.randn(shape, dtype=torch.float64), None
        layer: Any = partial(GlobalROTPool2d, num_features=shape[1])
        if kind == 'windows':
            kernel = min(3, *shape[2:])
            layer = partial(LocalROTPool2d, kernel, 1 + seed % 2, seed % 2 if kernel > 1 else 0, num_features=shape[1])
        elif kind == 'set':
            layer, x = partial(ROTSetPool, num_features=shape[1]), x.flatten(2).mT
            mask = torch.rand(x.shape[:2]) < 0.7 if seed % 2 else None
            if mask is not None:
                mask[:, 0] = True
        pool, reference = (layer(options=options | known).double() for known in ({}, {'backend': 'reference'}))
        reference.load_state_dict(pool.state_dict())
        given = laid_out(x, layout) if x.dim() == 4 else x
        theirs = outputs(reference, x, mask)
        # Of a gradient that is zero in truth, the rounding of the largest is left.
        slack = 1e-8 * max(1e-3, *(float(value.abs().max()) for value in theirs))
        for ours, other in zip(outputs(pool, given, mask), theirs, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-6, atol=slack)
        narrow = outputs(pool.float(), given.float(), mask)
        assert all(value.isfinite().all() for value in narrow)
        # Some problems are ill-conditioned; there the formula in float32 is no better.
        formula = outputs(reference.float(), x.float(), mask)
        error, their_error = (float((one[0] - theirs[0]).abs().max()) for one in (narrow, formula))
        assert error <= max(1e-2 * float(x.abs().max()), 1e-8, 2 * their_error)

    check(
        examples,
        compare,
        options=valid_options(),
        shape=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5)),
        layout=st.sampled_from(['contiguous', 'channels_last', 'sliced', 'transposed']),
        scale=st.sampled_from([0.1, 1.0, 10.0]),
        seed=st.integers(0, 10**6),
    )


@quick_and_slow(200, 2000)
def test_options_survive_a_mapping_and_json(examples):
    def survive(options):
        known = pool_options(options)
        assert pool_options(known.to_dict()) == pool_options(json.loads(json.dumps(known.to_dict()))) == known

    check(examples, survive, options=valid_options())


@quick_and_slow(4, 200)
def test_options_survive_a_saved_model(examples):
    def survive(options):
        model = rotp_vision.convert(timm.create_model('test_resnet', num_classes=3), options).eval()
        with TemporaryDirectory() as folder:
            rotp_vision.save_pretrained(model, Path(folder, 'saved'))
            again = rotp_vision.load_pretrained(Path(folder, 'saved')).eval()
        assert again.global_pool.options == model.global_pool.options
        x = torch.rand(1, 3, 64, 64)
        with torch.no_grad():
            torch.testing.assert_close(again(x), model(x))

    check(examples, survive, options=valid_options())


NOT_WORDS = ['x', '', None, 3, 1.5, True, [], {}, b'sinkhorn', ('rms',), np.array(['rms', 'log']), float('nan')]
NOT_COUNTS = [0, -1, 2.0, '3', True, [2], np.array([2, 2]), 10**400, -(10**400), float('nan'), 1j, {}]
NOT_NUMBERS = [-1.0, -1, float('nan'), float('inf'), '1', True, np.ones(2), 10**400, 1e300, 1e-45, -(10**400), {}, 1j]
NOT_WEIGHTS = [*NOT_NUMBERS, 0, 0.0, [], [1.0, 'x'], [1.0] * 9, [10**400] * 2, [[1.0]], object(), torch.ones(2), 'abc']
INVALID: dict[str, list[Any]] = {
    **dict.fromkeys(('solver', 'start', 'learn', 'feature_scale', 'gain', 'backend'), NOT_WORDS),
    **{name: [word for word in NOT_WORDS if word is not None] for name in ('prior', 'similarity')},
    **dict.fromkeys(('num_iters', 'num_outer', 'prior_width'), NOT_COUNTS),
    'structure': [*NOT_NUMBERS, None, [0.1]],
    'norm_power': ['1', True, float('nan'), float('inf'), np.ones(2), 10**400, 1e300, 1j, [2.0]],
    **dict.fromkeys(WEIGHTS, NOT_WEIGHTS),
    'unknown': [1],
}


@quick_and_slow(300, 5000)
def test_invalid_options_are_refused_by_their_names(examples):
    def refuse(options, wrong):
        name, value = wrong
        with pytest.raises(ValueError, match=name):
            pool_options(options | {name: value})

    pairs = [(name, value) for name, values in INVALID.items() for value in values]
    check(examples, refuse, options=valid_options(), wrong=st.sampled_from(pairs))
