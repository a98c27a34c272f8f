"""QTensors made of NumPy arrays, and what they stand for."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import jqx

from ..numerics.oracles import as_float64, as_int64, code_range, codes_of

SHAPES = ((2, 3, 4), (3, 1, 2), (5,))


def tensor(codes: Any, qtype: Any, scale: Any = None, zero_point: Any = None, **fields: Any) -> Any:
    """A QTensor of NumPy codes; its scale is 1 unless it is given."""
    codes = codes_of(codes, qtype)
    scale = np.ones((1,) * codes.ndim) if scale is None else scale
    return jqx.QTensor(
        jnp.asarray(codes),
        jnp.asarray(np.asarray(scale, np.float32)),
        None if zero_point is None else jnp.asarray(codes_of(zero_point, qtype)),
        qtype=qtype,
        **fields,
    )


def random_codes(rng: np.random.Generator, qtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Codes of the whole range of a format, as int64."""
    low, high = code_range(qtype)
    return rng.integers(low, high + 1, shape)


def kept(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a scale with an entry for each index of `axes`."""
    return tuple(n if i in axes else 1 for i, n in enumerate(shape))


def random_tensor(
    rng: np.random.Generator,
    qtype: Any,
    shape: Sequence[int],
    axes: Sequence[int] = (),
    zero_point_axes: Sequence[int] | None = None,
    **fields: Any,
) -> jqx.QTensor:
    """A QTensor of any codes, whose scales all differ; `None` for no zero point."""
    scale = rng.uniform(0.01, 1, kept(shape, axes))
    zero_point = None
    if zero_point_axes is not None:
        zero_point = random_codes(rng, qtype, kept(shape, zero_point_axes))
    return tensor(random_codes(rng, qtype, shape), qtype, scale, zero_point, **fields)


def differences(q: jqx.QTensor) -> np.ndarray:
    """The codes less their zero points, as int64."""
    zero = 0 if q.zero_point is None else as_int64(q.zero_point)
    return as_int64(q.values) - zero


def reals(q: Any) -> np.ndarray:
    """The real values of an array or QTensor, in float64."""
    return differences(q) * as_float64(q.scale) if isinstance(q, jqx.QTensor) else as_float64(q)


@st.composite
def qtensors(draw: st.DrawFn, shapes: Sequence[tuple[int, ...]] = SHAPES) -> jqx.QTensor:
    """QTensors of all granularities, with a zero point for each scale, for fewer, or for none."""
    shape = draw(st.sampled_from(shapes))
    axes = draw(st.sets(st.sampled_from(range(len(shape)))))
    zero_point_axes = draw(st.none() | st.sets(st.sampled_from(sorted(axes) or [0])))
    if zero_point_axes is not None:
        zero_point_axes &= axes
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    qtype = draw(st.sampled_from(["int4", "int8", "uint8"]))
    return random_tensor(rng, qtype, shape, axes, zero_point_axes)
