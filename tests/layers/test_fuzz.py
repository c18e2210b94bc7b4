"""Random options: whatever is valid computes what the reference does, whatever is not is refused by its name."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from rotp_vision import PoolOptions, ROTPool, pool_options

WEIGHTS = ('smoothness', 'feature_penalty', 'sample_penalty', 'step', 'proximal')


def valid_options(rng: random.Random) -> dict[str, Any]:
    """Every option given outright, each from all that it may be beside the others."""
    solver = rng.choice(['sinkhorn', 'badmm-e', 'badmm-q', 'badmm-e-coupled', 'badmm-q-coupled'])
    options: dict[str, Any] = {
        'solver': solver,
        'num_iters': rng.choice([None, 3, 4, 5] if solver.endswith('coupled') else [None, 1, 2, 3, 5]),
        'start': rng.choice(['auto', 'train', 'paper', 'mean', 'max']),
        'learn': rng.choice(['per-iteration', 'shared', 'fixed']),
        'structure': rng.choice([0.0, 0.0, 10 ** rng.uniform(-3, 0)]),
        'feature_scale': rng.choice(['raw', 'rms', 'log']),
        'gain': rng.choice(['off', 'scalar', 'channel']),
        'prior': rng.choice(['uniform', 'norm', 'attention']),
    }
    if solver == 'sinkhorn':
        options['num_outer'] = rng.choice([None, 1, 2, 3])
    if options['structure']:
        options['similarity'] = rng.choice(['covariance', 'cosine'])
    if options['prior'] == 'norm':
        options['norm_power'] = rng.choice([None, -0.5, 2])
    if options['prior'] == 'attention':
        options['prior_width'] = rng.choice([None, 2])
    plain = PoolOptions(**options)
    num_weight_sets = plain.to_solver().num_weight_sets
    for name in plain.starting_weights():
        kind = rng.choice(['left', 'number', 'list'])
        if name == 'structure' or kind == 'left' or (kind == 'list' and options['learn'] == 'shared'):
            continue
        numbers = [10 ** rng.uniform(-1, 2) for _ in range(num_weight_sets)]
        options[name] = numbers[0] if kind == 'number' else numbers
    return options


def pooled_and_gradients(pool: ROTPool, x: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    pooled = pool.pool_sets(x, mask)
    weight = torch.linspace(-1, 1, pooled.numel(), dtype=pooled.dtype).view_as(pooled)
    # A weight may not matter, such as a feature penalty of one feature.
    inputs = [x, *(parameter for parameter in pool.parameters() if parameter.requires_grad)]
    found = torch.autograd.grad((pooled * weight).sum(), inputs, allow_unused=True)
    pairs = zip(found, inputs, strict=True)
    return [pooled.detach(), *(torch.zeros_like(one) if grad is None else grad for grad, one in pairs)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_valid_options_compute_what_the_reference_does():
    rng = random.Random(17)
    torch.set_num_threads(1)
    wrong = []
    for number in range(2000):
        options = valid_options(rng)
        generator = torch.Generator().manual_seed(number)
        batch, features, samples = rng.randint(1, 3), rng.randint(1, 6), rng.randint(1, 9)
        x = torch.randn(batch, features, samples, generator=generator, dtype=torch.float64) * rng.choice([0.1, 1, 10])
        mask = None
        if rng.random() < 0.3:
            mask = torch.rand(batch, samples, generator=generator) < 0.7
            mask[:, 0] = True
        torch.manual_seed(number)
        pool = ROTPool(options, features).double()
        reference = ROTPool(options | {'backend': 'reference'}, features).double()
        reference.load_state_dict(pool.state_dict())
        ours, theirs = pooled_and_gradients(pool, x, mask), pooled_and_gradients(reference, x, mask)
        # Of a gradient that is zero in truth, the rounding of the largest is left.
        slack = 1e-8 * max(1e-3, *(float(value.abs().max()) for value in theirs))
        for one, other in zip(ours, theirs, strict=True):
            if not torch.allclose(one, other, rtol=1e-6, atol=slack):
                wrong.append((number, options, tuple(x.shape), float((one - other).abs().max())))
                break
        narrow = pooled_and_gradients(pool.float(), x.float(), mask)
        if not all(bool(value.isfinite().all()) for value in narrow):
            wrong.append((number, options, tuple(x.shape), 'not finite in float32'))
            continue
        # Some problems are ill-conditioned; there the formula in float32 is no better.
        formula = reference.float().pool_sets(x.float(), mask).detach()
        error, theirs_too = (float((one - theirs[0]).abs().max()) for one in (narrow[0], formula))
        if error > max(1e-2 * float(x.abs().max()), 1e-8, 2 * theirs_too):
            wrong.append((number, options, tuple(x.shape), 'float32', error))
    assert not wrong, f'{len(wrong)} of 2000, the first: {wrong[:5]}'


NOT_WORDS = ['x', '', None, 3, 1.5, True, [], {}, b'sinkhorn', ('rms',), np.array(['rms', 'log']), float('nan')]
NOT_COUNTS = [0, -1, 2.0, '3', True, [2], np.array([2, 2]), 10**400, -(10**400), float('nan'), 1j, {}]
NOT_NUMBERS = [-1.0, -1, float('nan'), float('inf'), '1', True, np.ones(2), 10**400, 1e300, 1e-45, -(10**400), {}, 1j]
NOT_WEIGHTS = [*NOT_NUMBERS, 0, 0.0, [], [1.0, 'x'], [1.0] * 9, [10**400] * 2, [[1.0]], object(), torch.ones(2), 'abc']
INVALID = {
    **dict.fromkeys(('solver', 'start', 'learn', 'feature_scale', 'gain', 'backend'), NOT_WORDS),
    **{name: [word for word in NOT_WORDS if word is not None] for name in ('prior', 'similarity')},
    **dict.fromkeys(('num_iters', 'num_outer', 'prior_width'), NOT_COUNTS),
    'structure': [*NOT_NUMBERS, None, [0.1]],
    'norm_power': ['1', True, float('nan'), float('inf'), np.ones(2), 10**400, 1e300, 1j, [2.0]],
    **dict.fromkeys(WEIGHTS, NOT_WEIGHTS),
}


def test_invalid_options_are_refused_by_their_names():
    rng = random.Random(17)
    wrong = []
    for _ in range(1000):
        options = valid_options(rng)
        name = rng.choice([*INVALID, 'unknown'])
        value = rng.choice(INVALID.get(name, [1]))
        try:
            pool_options(options | {name: value})
        except ValueError as error:
            if name not in str(error):
                wrong.append((name, repr(value)[:40], options, str(error)))
        except Exception as error:
            wrong.append((name, repr(value)[:40], options, repr(error)))
        else:
            wrong.append((name, repr(value)[:40], options, 'accepted'))
    assert not wrong, f'{len(wrong)} of 1000, the first: {wrong[:5]}'
