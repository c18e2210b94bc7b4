"""How the front doors choose a backend, whatever it is made of."""

import pytest
import torch

from rotp_vision.core import (
    Solver,
    Windows,
    backend_lacks,
    positive_weights,
    rot_pool,
    rot_pool_windows,
    rot_problem,
    step_weights,
)
from rotp_vision.core import solver as solver_module

PROBLEM = rot_problem(torch.zeros(2, 3, 4))
WEIGHTS = step_weights(2, smoothness=1.0, step=1.0)
WINDOWS = Windows(2, 2, 2, 2, 0, 0, 1, 1, 2, 2)


def install(monkeypatch, **functions):
    """A backend under a name that exists, which can do everything but what is given otherwise."""
    can = {'refuses': lambda weights, solver: None, 'lacks': lambda features: None, 'pool': lambda *inputs: 'pooled'}
    monkeypatch.delenv(solver_module.OVERRIDE, raising=False)
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


AUTO = Solver('badmm-e')


def backend_on_gpu(monkeypatch, solver=AUTO, weights=WEIGHTS, *, compiling=False, **functions) -> str:
    """Which backend runs, with a Triton backend that does as `functions` say, on what passes for a GPU."""
    install(monkeypatch, **functions)
    for name in ('torch', 'reference'):
        chosen = solver_module._IMPLEMENTATIONS[name]
        monkeypatch.setitem(solver_module._IMPLEMENTATIONS, name, chosen._replace(pool=lambda *inputs, name=name: name))
    monkeypatch.setattr(solver_module, 'on_gpu', lambda features: True)
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: compiling)
    return rot_pool(PROBLEM, weights, solver)


def test_auto_on_a_gpu(monkeypatch):
    trusted = {'trusted': lambda *problem: True}
    assert backend_on_gpu(monkeypatch, **trusted) == 'pooled'
    assert backend_on_gpu(monkeypatch) == 'torch'  # not trusted
    assert backend_on_gpu(monkeypatch, **trusted, refuses=lambda *inputs: 'cannot') == 'torch'
    assert backend_on_gpu(monkeypatch, **trusted, lacks=lambda *inputs: 'has no GPU') == 'torch'
    monkeypatch.setattr(solver_module, 'on_gpu', lambda features: False)
    assert rot_pool(PROBLEM, WEIGHTS, AUTO) == 'torch'


def test_auto_on_a_gpu_while_compiling(monkeypatch):
    assert backend_on_gpu(monkeypatch, trusted=lambda *problem: True, compiling=True) == 'pooled'
    assert backend_on_gpu(monkeypatch, compiling=True) == 'reference'


def test_what_is_not_solved_by_a_backend_is_not_checked(monkeypatch):
    check = {'trusted': lambda *problem: pytest.fail('a check')}
    assert backend_on_gpu(monkeypatch, **check, refuses=lambda *inputs: 'cannot') == 'torch'


@pytest.mark.parametrize('own', ['auto', 'torch', 'triton', 'reference'])
def test_the_environment_overrides(monkeypatch, own):
    for name in ('torch', 'triton', 'reference'):
        backend_on_gpu(monkeypatch, trusted=lambda *problem: False)
        monkeypatch.setenv('ROTP_BACKEND', name)
        assert rot_pool(PROBLEM, WEIGHTS, Solver('badmm-e', backend=own)) == {'triton': 'pooled'}.get(name, name)
    backend_on_gpu(monkeypatch, lacks=lambda features: 'has no time')
    monkeypatch.setenv('ROTP_BACKEND', '')
    assert rot_pool(PROBLEM, WEIGHTS, AUTO) == 'torch'


def test_a_wrong_environment_is_named(monkeypatch):
    monkeypatch.setenv('ROTP_BACKEND', 'cuda')
    with pytest.raises(
        ValueError, match="variable ROTP_BACKEND must be one of auto, torch, triton, reference, got 'cuda'"
    ):
        rot_pool(PROBLEM, WEIGHTS, AUTO)
    install(monkeypatch, lacks=lambda features: 'has no time')
    monkeypatch.setenv('ROTP_BACKEND', 'triton')
    with pytest.raises(
        ValueError, match=r"backend 'triton' \(from the environment variable ROTP_BACKEND\) has no time"
    ):
        rot_pool(PROBLEM, WEIGHTS, AUTO)


@pytest.mark.parametrize('gain', [torch.tensor(2.0), torch.tensor([1.0, 2.0, 3.0])])
def test_gain_is_a_factor_whoever_multiplies(monkeypatch, gain):
    features = torch.randn(2, 3, 4, dtype=torch.float16)
    for backend in ('torch', 'reference'):
        plain, scaled = (
            rot_pool(rot_problem(features), WEIGHTS, Solver('badmm-e', backend=backend), *given)
            for given in ((), (gain,))
        )
        assert torch.equal(scaled, plain * gain.half())
    taken = []
    chosen = install(monkeypatch, pool=lambda *inputs: taken.append(inputs[-1]) or torch.ones(2, 3), takes_gain=True)
    assert torch.equal(rot_pool(PROBLEM, WEIGHTS, chosen, gain), torch.ones(2, 3) * (1 if gain.dim() == 0 else gain))
    assert taken == [gain if gain.dim() == 0 else None]


def test_weights_are_made_by_the_backend_that_reads_them(monkeypatch):
    betas, starts = [torch.zeros(2), torch.tensor(1.0)], [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    chosen = install(monkeypatch, softplus=lambda betas, starts, checked: 'checked' if checked else 'made')
    assert positive_weights(betas, starts, chosen) == 'made'
    for weight, start in zip(positive_weights(betas, starts, AUTO), starts, strict=True):
        assert torch.allclose(weight, start * (1 if weight.dim() else 1.8946), atol=1e-3)
    monkeypatch.setattr(solver_module, 'on_gpu', lambda features: True)
    assert positive_weights(betas, starts, AUTO) == 'checked'
    install(monkeypatch, softplus=lambda betas, starts, checked: None)
    assert len(positive_weights(betas, starts, AUTO)) == 2
