"""Trees that Orbax saves and restores: unsigned codes of 2 and 4 bits in the place of signed ones,
which its storage (TensorStore) lacks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._calls import called
from .._checks import require_that

_STORED = {jnp.dtype(jnp.uint4): jnp.int4, jnp.dtype(jnp.uint2): jnp.int2}
"""What has the bits of the dtypes that are not stored."""


@called("interop.to_orbax", "pass the tree that is to be saved.")
def to_orbax(tree: Any) -> Any:
    """Returns a tree of QTensors and arrays in dtypes that Orbax stores.

    Orbax saves QTensors as they are, each device its part, and restores them to any mesh, but for
    codes of `jnp.uint4` and `jnp.uint2`: here they are int4 and int2 of the same bits.
    `from_orbax` inverts it.

    Args:
      tree: any pytree. Arrays may be `jax.ShapeDtypeStruct`, with a sharding or without one: what
        is to be restored is asked for by such a tree, of `jqx.parallel.shardings` for example.

    Returns:
      The same tree; arrays stay where they are, and those of other dtypes are the very same. It is
      for Orbax alone: QTensors in it may hold codes of another dtype than their format has.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec("uint4", symmetric=False)
      >>> q = jqx.QTensor.quantize(jnp.array([[0.0, 15.0]]), spec)
      >>> stored = jqx.interop.to_orbax({"w": q})
      >>> stored["w"].values
      Array([[-8, -1]], dtype=int4)
      >>> jqx.interop.from_orbax(stored, like={"w": q})["w"].values
      Array([[8, 15]], dtype=uint4)
    """
    return jax.tree.map(lambda x: _viewed(x, _STORED.get(np.dtype(x.dtype), x.dtype)), tree)


@called("interop.from_orbax", "pass what was restored, and like=, a tree such as was saved.")
def from_orbax(stored: Any, like: Any) -> Any:
    """Returns what was saved of a tree that `to_orbax` made, in the dtypes that it had.

    Args:
      stored: as Orbax restores it.
      like: the tree that was given to `to_orbax`, or one of its shapes and dtypes, abstract or not.

    Raises:
      ValueError: the trees differ, or an array has a dtype that is not what was stored.
    """
    shapes = jax.tree.structure(stored), jax.tree.structure(like)
    require_that(
        shapes[0] == shapes[1],
        error=ValueError,
        function="interop.from_orbax",
        problem="the trees differ.",
        given=f"{shapes[0]}"[:300],
        expected=f"{shapes[1]}"[:300],
        mend="restore with to_orbax(like) as the target, and pass the same `like`.",
    )

    def back(x: Any, kind: Any) -> Any:
        dtype = np.dtype(kind.dtype)
        expected = np.dtype(_STORED.get(dtype, dtype))
        require_that(
            x.dtype == expected and tuple(x.shape) == tuple(kind.shape),
            error=ValueError,
            function="interop.from_orbax",
            problem="an array is not what was stored.",
            given=f"{x.dtype}{list(x.shape)}",
            expected=f"{expected}{list(kind.shape)}, for {dtype}",
            mend="restore with to_orbax(like) as the target, and pass the same `like`.",
        )
        return _viewed(x, dtype)

    return jax.tree.map(back, stored, like)


def _viewed(x: Any, dtype: Any) -> Any:
    """Returns the same bits in another dtype, where they lie."""
    if x.dtype == dtype:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    if isinstance(x, np.ndarray):
        return x.view(dtype)
    return lax.bitcast_convert_type(x, dtype)
