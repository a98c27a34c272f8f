"""Hypothesis strategies that the property tests share.

Shapes, formats and axes come from small fixed sets: each new combination is a new compilation.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jqx import RoundMode
from jqx._src.numerics.qtype import INTEGERS

from .oracles.numerics import code_range, codes_of

law = settings(max_examples=50, deadline=None)

SHAPE = (2, 3, 4)
NEAREST = [mode for mode in RoundMode if mode.name.startswith("NEAREST")]

qtypes = st.sampled_from(INTEGERS)
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


@dataclasses.dataclass(frozen=True)
class Affine:
    """Operands of one affine quantization of an array of `SHAPE`."""

    x: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray
    qtype: str
    axes: tuple[int, ...]

    @property
    def scale_along_x(self) -> np.ndarray:
        """`scale` with the rank of `x`."""
        return along(self.scale, self.axes)

    @property
    def zero_point_along_x(self) -> np.ndarray:
        """`zero_point` with the rank of `x`."""
        return along(self.zero_point, self.axes)


def along(parameter: np.ndarray, axes: Sequence[int], rank: int = len(SHAPE)) -> np.ndarray:
    """Lines a parameter up with the axes, in increasing order, that it has entries for."""
    shape = [1] * rank
    for axis, size in zip(sorted(axes), parameter.shape, strict=True):
        shape[axis] = size
    return parameter.reshape(shape)


@st.composite
def affines(
    draw: st.DrawFn,
    qtypes: st.SearchStrategy[str] = qtypes,
    axes: st.SearchStrategy[tuple[int, ...]] = axes_of_shape,
    exponents: int = 20,
) -> Affine:
    """Operands whose quotients `x / scale` lie from 2**-20 to 2**20, many of them near ties."""
    qtype, axes = draw(qtypes), draw(axes)
    shape = tuple(SHAPE[axis] for axis in axes)
    scale = draw(scales(shape, exponents))
    units = draw(reals())
    return Affine(
        x=(units * along(scale, axes)).astype(np.float32),
        scale=scale,
        zero_point=draw(zero_points(qtype, shape)),
        qtype=qtype,
        axes=axes,
    )
