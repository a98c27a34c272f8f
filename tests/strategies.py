"""Hypothesis strategies that the property tests share.

Shapes, formats and axes come from small fixed sets: each new combination is a new compilation.
"""

from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jqx import RoundMode
from jqx.numerics import INTEGERS

from .numerics.oracles import code_range, codes_of

law = settings(max_examples=50, deadline=None)

SHAPE = (2, 3, 4)
NEAREST = [mode for mode in RoundMode if mode.name.startswith("NEAREST")]

qtypes = st.sampled_from(INTEGERS)
round_modes = st.sampled_from(list(RoundMode))
nearest_modes = st.sampled_from(NEAREST)
axes_of_shape = st.sets(st.sampled_from(range(len(SHAPE)))).map(lambda s: tuple(sorted(s)))
permutations = st.permutations(range(len(SHAPE))).map(tuple)


def reals(shape: Sequence[int] = SHAPE) -> st.SearchStrategy[np.ndarray]:
    """float32 arrays with magnitudes from 2**-20 to 2**20, halves and zeros among them."""
    elements = st.one_of(
        st.integers(-600, 600).map(lambda n: n / 2),
        st.floats(2.0**-20, 2.0**20, width=32),
        st.floats(-(2.0**20), -(2.0**-20), width=32),
    )
    return hnp.arrays(np.float32, shape, elements=elements)


def scales(shape: Sequence[int] = (), exponents: int = 20) -> st.SearchStrategy[np.ndarray]:
    """Positive float32 arrays with magnitudes spread evenly over binades."""
    mantissas = hnp.arrays(np.float32, shape, elements=st.floats(1, 2, width=32))
    powers = hnp.arrays(np.int32, shape, elements=st.integers(-exponents, exponents))
    return st.builds(lambda m, p: np.ldexp(m, p).astype(np.float32), mantissas, powers)


def zero_points(qtype: str, shape: Sequence[int] = ()) -> st.SearchStrategy[np.ndarray]:
    """Arrays of any codes of a format."""
    low, high = code_range(qtype)
    elements = st.integers(low, high)
    return hnp.arrays(np.int64, shape, elements=elements).map(lambda z: codes_of(z, qtype))
