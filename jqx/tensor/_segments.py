"""Segments: one array as consecutive parts along an axis, each quantized in its own way."""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import export

from .._calls import called
from .._checks import normalize_axes
from .._errors import fail
from ._fields import refuse_as_array
from ._lazy import Lazy, abstract, read
from ._qtensor import QTensor


@called("Segments", "pass the parts in order: jqx.Segments([first, second]).")
@dataclasses.dataclass(frozen=True, eq=False, init=False)
class Segments:
    """One array in consecutive parts along an axis: QTensors of any formats, and arrays.

    `quantize_params` returns Segments for the weights of a scan if rules give its steps different
    formats, such as `layers[0]` in int8 and the others in int4. The functions that `convert` and
    `simulate` return accept Segments in place of the weight, and run one scan per part without
    joining them. Segments are a pytree of their parts.

    Attributes:
      parts: QTensors and arrays of the same rank, the same dtype, and the same shape except for the
        length of `axis`.
      axis: the axis along which the parts are consecutive, counted from the first.

    Raises:
      TypeError: a part is neither a QTensor nor an array.
      ValueError: there are no parts, or their shapes or dtypes do not fit.

    Gradient: `dequantize` is linear in the scales of its QTensors, and the identity for arrays.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> q = jqx.QTensor.quantize(jnp.ones((3, 2, 2)), jqx.QSpec("int4", jqx.per_axis(0)))
      >>> stack = jqx.Segments([jnp.zeros((1, 2, 2)), q])
      >>> stack.shape, stack.bounds
      ((4, 2, 2), (0, 1, 4))
      >>> stack
      Segments(float32[4, 2, 2] along axis 0: [0:1] float32, [1:4] int4 per_axis(0), 40 bytes)
      >>> stack.dequantize()[:, 0, 0]
      Array([0., 1., 1., 1.], dtype=float32)
    """

    parts: tuple[Any, ...]
    axis: int = 0

    __array_ufunc__: ClassVar[None] = None

    def __init__(self, parts: Sequence[QTensor | jax.Array], axis: int = 0) -> None:
        parts = tuple(parts)
        _check_parts(parts)
        (axis,) = normalize_axes("Segments", axis, parts[0].ndim, argument="axis")
        kinds = {(*_without(part.shape, axis), jnp.dtype(part.dtype).name) for part in parts}
        if len(kinds) != 1:
            raise fail(
                "Segments",
                f"the parts differ in dtype, or in shape along other axes than {axis}.",
                given=", ".join(_kind(part) for part in parts[:4]),
                expected=f"one dtype, and one shape except for axis {axis}",
                fix="pass parts of one array.",
            )
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "axis", axis)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The start of each part along the axis, and the end of the last one."""
        return tuple(itertools.accumulate((p.shape[self.axis] for p in self.parts), initial=0))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        first = tuple(self.parts[0].shape)
        return (*first[: self.axis], self.bounds[-1], *first[self.axis + 1 :])

    @property
    def ndim(self) -> int:
        """Rank of the whole array."""
        return len(self.parts[0].shape)

    @property
    def size(self) -> int:
        """Number of elements of the whole array."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the real array."""
        return jnp.dtype(self.parts[0].dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, as JAX counts them."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self.parts))

    def dequantize(self) -> jax.Array:
        """Returns the real array: the parts, dequantized and joined."""
        real = [p.dequantize() if isinstance(p, QTensor) else jnp.asarray(p) for p in self.parts]
        return jnp.concatenate(real, self.axis)

    if not TYPE_CHECKING:  # for NumPy's types, anything with `__array__` is an array

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            """Raises, as for a QTensor."""
            fix = "pass segments.dequantize() for the real array."
            refuse_as_array("Segments", "Segments are not an array.", self, fix)

    def __repr__(self) -> str:
        if not all(hasattr(part, "shape") and hasattr(part, "dtype") for part in self.parts):
            return f"Segments({', '.join(map(repr, self.parts))}, axis={self.axis})"
        shown = [
            f"[{start}:{stop}] {_form(part)}"
            for part, (start, stop) in zip(self.parts, itertools.pairwise(self.bounds), strict=True)
        ]
        whole = f"{self.dtype.name}{list(self.shape)} along axis {self.axis}"
        return f"Segments({whole}: {', '.join(shown)}, {self.nbytes:,} bytes)"


def _check_parts(parts: tuple[Any, ...]) -> None:
    if not parts:
        raise fail(
            "Segments",
            "there are no parts.",
            given="no parts",
            expected="one QTensor or array, or more",
            fix="pass the parts in order.",
        )
    for part in parts:
        if not isinstance(part, QTensor) and not (
            hasattr(part, "shape") and hasattr(part, "dtype") and len(part.shape) > 0
        ):
            raise fail(
                "Segments",
                "a part is neither a QTensor nor an array of one axis or more.",
                given=f"an object of type {type(part).__name__}",
                expected="QTensors and arrays",
                fix="pass for example jqx.Segments([q, w[4:]]).",
                error=TypeError,
            )


def _without(shape: Sequence[int], axis: int) -> tuple[Any, ...]:
    return (*shape[:axis], None, *shape[axis + 1 :])


def _kind(part: Any) -> str:
    return f"{jnp.dtype(part.dtype).name}{list(part.shape)}"


def _form(part: Any) -> str:
    if not isinstance(part, QTensor):
        return jnp.dtype(part.dtype).name
    own = repr(part).removeprefix("QTensor(")
    name, _, rest = own.partition("[")
    groups = rest.partition("] ")[2].partition(", scale")[0]
    return f"{name} {groups}" if groups else name


def _flatten(segments: Segments) -> tuple[tuple[Any, ...], int]:
    return segments.parts, segments.axis


def _flatten_with_keys(segments: Segments) -> tuple[tuple[Any, ...], int]:
    keys = map(jax.tree_util.SequenceKey, range(len(segments.parts)))
    return tuple(zip(keys, segments.parts, strict=True)), segments.axis


def unchecked_segments(parts: Sequence[Any], axis: int) -> Segments:
    """Returns Segments without checks: a tree may hold anything in place of arrays."""
    segments = object.__new__(Segments)
    object.__setattr__(segments, "parts", tuple(parts))
    object.__setattr__(segments, "axis", axis)
    return segments


jax.tree_util.register_pytree_with_keys(
    Segments,
    _flatten_with_keys,
    lambda axis, parts: unchecked_segments(tuple(parts), axis),
    _flatten,
)
export.register_pytree_node_serialization(
    Segments,
    serialized_name="jqx.Segments",
    serialize_auxdata=lambda axis: json.dumps(axis).encode(),
    deserialize_auxdata=lambda data: json.loads(data),
)


def lazy_parts(x: Lazy) -> list[Lazy]:
    """Returns the parts of lazy Segments, each as a Lazy."""
    return [x.then(partial(_part_of, i), f"part {i}") for i in range(len(x.spec.parts))]


def lazy_segments(parts: Sequence[Lazy], axis: int) -> Lazy:
    """Returns lazy parts as one Lazy of Segments."""
    spec = unchecked_segments([abstract(x) for x in parts], axis)
    sources = [x.source for x in parts]
    source = "\n".join([f"along {axis}", *sources]) if all(sources) else ""
    return Lazy(spec, lambda: unchecked_segments(list(map(read, parts)), axis), source)


def _part_of(place: int, x: Any) -> Any:
    return x.parts[place]
