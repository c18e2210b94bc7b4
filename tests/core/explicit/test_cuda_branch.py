"""The operators as they run on a GPU, forced on CPU tensors: without a look at values, in chunks as large as a GPU's.

The tests of the engine and of views, imported here, run once more under the fixture below.
"""

import pytest

from rotp_vision.core.explicit import scratch
from tests.core.explicit.operators import assert_same, every_operator, every_view, leaves
from tests.core.explicit.test_coupled import test_coupled_plans_whose_scale_is_below_zero  # noqa: F401
from tests.core.explicit.test_tape import (  # noqa: F401
    test_any_number_of_modules,
    test_any_spread_of_features_in_float32,
    test_equals_reference,
    test_features_far_from_zero_in_float32,
    test_nan_in_nan_out,
    test_only_what_is_asked_for,
    test_stability_grid_in_float32,
)
from tests.core.explicit.test_view import (  # noqa: F401
    test_masks_and_views,
    test_rms_of_features_whose_squares_overflow,
    test_views_in_float32,
)


@pytest.fixture(autouse=True)
def no_look_at_values(monkeypatch):
    monkeypatch.delitem(scratch.CHUNK_ELEMENTS, 'cpu')


@every_operator
@every_view
def test_channels_last_in_chunks(operator, view, monkeypatch):
    """Of which the last is smaller."""
    monkeypatch.setattr(scratch, 'CHUNK_ELEMENTS_ELSEWHERE', 4 * 8 * 6)
    tensors = leaves(operator, 7, 8, 6)
    tensors['x'] = tensors['x'].detach().mT.contiguous().mT.requires_grad_()
    assert_same(operator, tensors, view=view)
