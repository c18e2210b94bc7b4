"""The factored structural term against the materialised matrices."""

import pytest
import torch

from rotp_vision.core import rot_problem, structural_force
from tests.core import oracle
from tests.core.variants import random


@pytest.mark.parametrize('similarity', ['covariance', 'cosine'])
@pytest.mark.parametrize('shape', [(9, 4), (4, 9), (5, 5), (3, 1), (1, 3)])
def test_equals_materialised_matrices(similarity, shape):
    x, plan = random(2, *shape), random(2, *shape, seed=1).exp()
    force = structural_force(rot_problem(x), plan, similarity)
    for b in range(2):
        torch.testing.assert_close(force[b], oracle.structural_force(x[b], plan[b], similarity), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('similarity', ['covariance', 'cosine'])
@pytest.mark.parametrize('shape', [(9, 5), (3, 5)])
def test_masked_samples_do_not_count(similarity, shape):
    x, mask = random(2, *shape), torch.tensor([[True, False, True, True, False], [False, True, True, True, True]])
    plan = random(2, *shape, seed=1).exp() * mask.unsqueeze(1)
    force = structural_force(rot_problem(x, mask=mask), plan, similarity)
    for b in range(2):
        expected = oracle.structural_force(x[b][:, mask[b]], plan[b][:, mask[b]], similarity)
        torch.testing.assert_close(force[b][:, mask[b]], expected, rtol=1e-12, atol=1e-12)
        assert (force[b][:, ~mask[b]] == 0).all()


def test_never_forms_a_matrix_larger_than_the_features():
    """At D = 300, N = 4 a (D, D) matrix would be 75 times the size of X."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    for shape in [(1, 300, 4), (1, 4, 300)]:
        x = random(*shape)
        with Watch():
            structural_force(rot_problem(x), x.exp())
        assert largest == x.numel()
