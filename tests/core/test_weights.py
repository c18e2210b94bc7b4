"""The weights of the modules."""

import torch

from rotp_vision.core import step_weights


def test_one_number_is_shared_by_all_modules():
    weights = step_weights(3, smoothness=0.5, step=[1.0, 2.0, 3.0])
    assert weights.smoothness.tolist() == [0.5, 0.5, 0.5]
    assert weights.step is not None
    assert weights.step.tolist() == [1.0, 2.0, 3.0]
    assert weights.feature_penalty is None
    assert weights.sample_penalty is None
    assert weights.structure is None
    assert weights.proximal is None


def test_no_structure_is_none():
    assert step_weights(2, smoothness=0.5, structure=0.0).structure is None
    assert step_weights(2, smoothness=0.5, structure=0).structure is None


def test_tensors_keep_their_gradient():
    smoothness, step = torch.tensor(0.5, requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)
    weights = step_weights(2, smoothness=smoothness, step=step)
    assert weights.step is not None
    (weights.smoothness * weights.step).sum().backward()
    assert smoothness.grad == 3.0
    assert step.grad is not None
    assert step.grad.tolist() == [0.5, 0.5]


def test_dtype_is_that_asked_for():
    assert step_weights(1, smoothness=0.1, dtype=torch.float64).smoothness.item() == 0.1
