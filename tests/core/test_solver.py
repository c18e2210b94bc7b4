"""How the front doors choose a backend, whatever it is made of."""

import pytest
import torch

from rotp_vision.core import Solver, Windows, backend_lacks, rot_pool, rot_pool_windows, rot_problem, step_weights
from rotp_vision.core import solver as solver_module

PROBLEM = rot_problem(torch.zeros(2, 3, 4))
WEIGHTS = step_weights(2, smoothness=1.0, step=1.0)
WINDOWS = Windows(2, 2, 2, 2, 0, 0, 1, 1, 2, 2)


def install(monkeypatch, **functions):
    """A backend under a name that exists, which can do everything but what is given otherwise."""
    can = {'refuses': lambda weights, solver: None, 'lacks': lambda features: None, 'pool': lambda *inputs: 'pooled'}
    monkeypatch.setitem(solver_module._IMPLEMENTATIONS, 'triton', solver_module.Implementation(**(can | functions)))
    return Solver('badmm-e', backend='triton')


def test_the_chosen_backend_runs(monkeypatch):
    chosen = install(monkeypatch)
    assert rot_pool(PROBLEM, WEIGHTS, chosen) == 'pooled'
    assert isinstance(rot_pool(PROBLEM, WEIGHTS, Solver('badmm-e')), torch.Tensor)


@pytest.mark.parametrize('reason', ['refuses', 'lacks'])
def test_a_backend_that_cannot_says_why(monkeypatch, reason):
    chosen = install(monkeypatch, **{reason: lambda *inputs: 'has no time'})
    with pytest.raises(ValueError, match="backend 'triton' has no time; use backend 'auto' or 'torch'"):
        rot_pool(PROBLEM, WEIGHTS, chosen)
    assert (backend_lacks('triton', PROBLEM.features) == 'has no time') == (reason == 'lacks')


def test_windows_are_left_to_the_caller_where_a_backend_has_nothing_for_them(monkeypatch):
    maps = torch.zeros(1, 3, 4, 4)
    assert rot_pool_windows(maps, WEIGHTS, install(monkeypatch), WINDOWS) is None
    chosen = install(monkeypatch, pool_windows=lambda *inputs: 'pooled windows')
    assert rot_pool_windows(maps, WEIGHTS, chosen, WINDOWS) == 'pooled windows'


def test_a_missing_weight_is_named_whatever_the_backend(monkeypatch):
    for chosen in (install(monkeypatch), Solver('badmm-e'), Solver('badmm-e', backend='reference')):
        with pytest.raises(ValueError, match=r'badmm needs the weight\(s\) step'):
            rot_pool(PROBLEM, step_weights(2, smoothness=1.0), chosen)


def test_implicit_gradients_need_an_operator():
    weights = step_weights(1, smoothness=1.0, feature_penalty=1.0, sample_penalty=1.0)
    with pytest.raises(ValueError, match="backend 'reference' has no implicit gradients"):
        rot_pool(PROBLEM, weights, Solver('sinkhorn', implicit=True, backend='reference'))
