"""From which values an estimator moves the limits of a range."""

import jax
import pytest

from jqx import gradients
from jqx._src.gradients.estimators import moves_limits

EXPECTED = {
    "ste": (False, True),
    "ste_unclipped": (False, False),
    "lsq": (True, True),
    "pact": (False, True),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_it_is_found_by_an_example(name):
    found = []
    jax.eval_shape(lambda: found.append(moves_limits(getattr(gradients, name))))  # while it traces
    assert found == [EXPECTED[name]]
