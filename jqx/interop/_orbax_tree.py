"""Trees that Orbax saves and restores, in which unsigned codes of 2 and 4 bits are stored as
signed ones, since its storage (TensorStore) lacks the unsigned ones.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._calls import called
from .._errors import fail

_STORED = {jnp.dtype(jnp.uint4): jnp.int4, jnp.dtype(jnp.uint2): jnp.int2}
"""The stored dtype with the same bits, for dtypes that cannot be stored."""


@called("interop.to_orbax", "pass the tree to save.")
def to_orbax(tree: Any) -> Any:
    """Returns a tree of QTensors and arrays with dtypes that Orbax stores.

    Orbax saves QTensors unchanged, each device its part, and restores them to any mesh. The
    exceptions are codes of `jnp.uint4` and `jnp.uint2`: this function returns them as int4 and int2
    with the same bits. `from_orbax` inverts it.

    Args:
      tree: any pytree. Arrays may be `jax.ShapeDtypeStruct`, with or without a sharding: such a
        tree, for example from `jqx.parallel.shardings`, is the target of a restore.

    Returns:
      The same tree. Arrays stay where they are, and arrays of other dtypes are the same objects.
      Use the result only with Orbax: its QTensors may have codes whose dtype is not that of their
      format.

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


@called("interop.from_orbax", "pass the restored tree, and like=, a tree like the saved one.")
def from_orbax(stored: Any, like: Any) -> Any:
    """Returns a restored tree, saved from the result of `to_orbax`, in its original dtypes.

    Args:
      stored: the tree that Orbax restored.
      like: the tree that was passed to `to_orbax`, or one with its shapes and dtypes, abstract or
        not.

    Raises:
      ValueError: if the trees differ, or an array does not have the dtype that was stored.
    """
    shapes = jax.tree.structure(stored), jax.tree.structure(like)
    if shapes[0] != shapes[1]:
        raise fail(
            "interop.from_orbax",
            "the trees differ.",
            given=f"{shapes[0]}"[:300],
            expected=f"{shapes[1]}"[:300],
            fix="restore with to_orbax(like) as the target, and pass the same `like`.",
        )

    def back(x: Any, kind: Any) -> Any:
        dtype = np.dtype(kind.dtype)
        expected = np.dtype(_STORED.get(dtype, dtype))
        if not (x.dtype == expected and tuple(x.shape) == tuple(kind.shape)):
            raise fail(
                "interop.from_orbax",
                "an array differs from the one that was stored.",
                given=f"{x.dtype}{list(x.shape)}",
                expected=f"{expected}{list(kind.shape)}, for {dtype}",
                fix="restore with to_orbax(like) as the target, and pass the same `like`.",
            )
        return _viewed(x, dtype)

    return jax.tree.map(back, stored, like)


def _viewed(x: Any, dtype: Any) -> Any:
    """Returns the same bits in another dtype, on the same devices."""
    if x.dtype == dtype:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    if isinstance(x, np.ndarray):
        return x.view(dtype)
    return lax.bitcast_convert_type(x, dtype)
