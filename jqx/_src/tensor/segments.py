"""Segments: one array as consecutive parts along an axis, each quantized in its own way."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from ..checks import called, normalize_axes, shown
from ..errors import fail, some
from ..heap import give_back
from .layout import refuse_as_array
from .qtensor import QTensor, flatten, rebuilt

# Lazy: an array or QTensor that is created each time it is read, and not stored.


_LARGE = 1 << 20
"""From this number of bytes on, freed memory is returned to the system first, in a millisecond."""


@called("interop.Lazy", "pass its shape and dtype, and a function that creates it.")
@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """An array, a QTensor or Segments that is created each time it is read. A leaf of pytrees.

    Lazy leaves replace the arrays in the parameters of a model that is larger than memory, as in
    `archive.map(archive.lazy)`. `jqx.make_plan` uses their shape and dtype. `jqx.quantize_params`
    returns a Lazy for each weight to quantize; so does `jqx.ptq` with rounding to nearest, or layer
    by layer (`jqx.algorithms.gptq`). `jqx.save` reads one after another while it writes them.
    Functions that compute on arrays, such as a converted function, need arrays: `x.read()`.

    Attributes:
      spec: its structure, with `jax.ShapeDtypeStruct` in place of arrays.
      make: a function that creates it.
      source: identifies everything that its numbers depend on, so that two with the same source
        are equal; an empty string if that is not known. `jqx.save(..., resume=True)` keeps files
        that it has already written from the same source.

    Raises:
      TypeError: it is used as an array.
      ValueError: on reading, if the result has another structure, shape or dtype than `spec`.

    Gradient: none; it is not an array.

    Example:
      >>> import jax, jqx, numpy as np
      >>> x = jqx.interop.Lazy(jax.ShapeDtypeStruct((2,), "f4"), lambda: np.ones(2, np.float32))
      >>> x.shape, x.read()
      ((2,), array([1., 1.], dtype=float32))
    """

    spec: Any
    make: Callable[[], Any]
    source: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; for a QTensor the shape of the real array."""
        return tuple(self.spec.shape)

    @property
    def dtype(self) -> np.dtype:
        """Its dtype; for a QTensor the dtype of the real array."""
        return np.dtype(self.spec.dtype)

    @property
    def ndim(self) -> int:
        """Its rank."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        leaves = jax.tree.leaves(self.spec)
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in leaves)

    def read(self) -> Any:
        """Creates and returns it. Before a large one, freed memory is returned to the system."""
        if self.nbytes >= _LARGE:
            give_back()
        tree = self.make()
        spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        specs = (spec, self.spec)
        kinds = [[(*x.shape, np.dtype(x.dtype)) for x in jax.tree.leaves(s)] for s in specs]
        if jax.tree.structure(tree) != jax.tree.structure(self.spec) or kinds[0] != kinds[1]:
            problem = "the result of `make` does not match `spec`."
            fix = f"derive `spec` from `make` with jax.eval_shape; it is {shown(self.spec)}."
            raise fail("interop.Lazy", problem, given=shown(spec), fix=fix)
        return tree

    def then(self, f: Callable[[Any], Any], key: str | None) -> "Lazy":
        """Returns a Lazy that applies a function to this one when it is read.

        Args:
          f: the function; it takes the array, and also its `spec`.
          key: everything else that the result depends on; `None` if that is not known.
        """
        spec = f(self.spec)
        source = f"{self.source}\n{key}" if self.source and key is not None else ""
        return Lazy(spec, lambda: f(self.read()), source)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        check_read("interop.Lazy", [(None, self)])

    def __repr__(self) -> str:
        return f"Lazy({self.spec!r})"


def check_read(function: str, named: Iterable[tuple[str | None, Any]]) -> None:
    """Raises if one of some leaves, each with its path, is Lazy."""
    for path, leaf in named:
        if isinstance(leaf, Lazy):
            problem = f"{'a leaf' if path is None else f'the leaf {path!r}'} has not been read yet."
            fix = "read them: jax.tree.map(lambda x: x.read(), params)."
            raise fail(function, problem, given=f"{leaf!r}"[:200], fix=fix, error=TypeError)


def of_kinds(f: Callable[[Any], Any], x: Any) -> Any:
    """Applies a function to arrays, or to their shapes and dtypes without computing anything."""
    is_kind = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(x))
    return jax.eval_shape(f, x) if is_kind else f(x)


def read(x: Any) -> Any:
    """Reads a Lazy; returns anything else unchanged."""
    return x.read() if isinstance(x, Lazy) else x


def has_lazy(tree: Any) -> bool:
    """Whether a leaf of a tree is read when it is needed."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Lazy))
    return any(isinstance(x, Lazy) for x in leaves)


def abstract(x: Any) -> Any:
    """Returns the spec of a Lazy; anything else unchanged."""
    return x.spec if isinstance(x, Lazy) else x


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
        if not parts:
            raise fail("Segments", "there are no parts.", fix="pass QTensors or arrays, in order.")
        for part in parts:
            if not (hasattr(part, "shape") and hasattr(part, "dtype") and len(part.shape) > 0):
                kind = type(part).__name__
                problem = f"a part ({kind}) is neither a QTensor nor an array of one axis or more."
                fix = "pass for example jqx.Segments([q, w[4:]])."
                raise fail("Segments", problem, fix=fix, error=TypeError)
        (axis,) = normalize_axes("Segments", axis, parts[0].ndim, argument="axis")
        kinds = [(jnp.dtype(part.dtype).name, list(part.shape)) for part in parts]
        if len({(name, *shape[:axis], None, *shape[axis + 1 :]) for name, shape in kinds}) != 1:
            problem = f"the parts differ in dtype, or in shape along other axes than {axis}."
            facts = some(f"{name}{shape}" for name, shape in kinds)
            raise fail("Segments", problem, given=facts, fix="pass parts of one array.")
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "axis", axis)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The start of each part along the axis, and the end of the last one."""
        return tuple(itertools.accumulate((p.shape[self.axis] for p in self.parts), initial=0))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        head = tuple(self.parts[0].shape)
        return (*head[: self.axis], self.bounds[-1], *head[self.axis + 1 :])

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
        array = f"{self.dtype.name}{list(self.shape)} along axis {self.axis}"
        return f"Segments({array}: {', '.join(shown)}, {self.nbytes:,} bytes)"


def _form(part: Any) -> str:
    if not isinstance(part, QTensor):
        return jnp.dtype(part.dtype).name
    text = repr(part).removeprefix("QTensor(")
    name, _, shape_and_scale = text.partition("[")
    groups = shape_and_scale.partition("] ")[2].partition(", scale")[0]
    return f"{name} {groups}" if groups else name


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
    lambda segments: (segments.parts, segments.axis),
)
export.register_pytree_node_serialization(
    Segments,
    serialized_name="jqx.Segments",
    serialize_auxdata=lambda axis: json.dumps(axis).encode(),
    deserialize_auxdata=lambda data: json.loads(data),
)


# One array of a stack of QTensors, for kernels that read its codes from the stack.
#
# A compiler cannot fuse a slice into a kernel: the slice that a step of a loop takes from a stack
# is copied before the kernel reads it. So the kernel gets the whole stack and the index of the
# slice. Everything else uses the slice itself.


class StackSlice(QTensor):
    """A QTensor that is a slice of a stack. Its views are plain QTensors without the stack, unless
    they leave the codes in place.

    Attributes:
      all_values: the values of the whole stack, with one more leading axis; `None` without a stack.
      step: the index of this slice, int32, shape ().
    """

    all_values: ClassVar[Any] = None
    step: ClassVar[Any] = None

    @classmethod
    def of(cls, stack: QTensor, step: jax.Array) -> "StackSlice":
        """Returns one slice of a stack. Every leaf of the stack must have its leading axis."""
        q = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, step, keepdims=False), stack)
        return _stack_slice(stack.values, step, *flatten(q))

    def transpose(self, *axes: Any) -> QTensor:
        return self._with_stack(super().transpose(*axes))

    @property
    def in_memory_order(self) -> QTensor:
        return self._with_stack(super().in_memory_order)

    def _with_stack(self, q: QTensor) -> QTensor:
        if q.values is not self.values:
            return without_stack(q)
        return _stack_slice(self.all_values, self.step, *flatten(q))


def without_stack(x: Any) -> Any:
    """Returns a QTensor without its stack; anything else unchanged."""
    if not isinstance(x, StackSlice):
        return x
    leaves, static = flatten(x)
    return rebuilt(QTensor, static, leaves)


def codes_and_index(q: QTensor) -> tuple[jax.Array, jax.Array | None]:
    """Returns the codes of a QTensor and `None`, or those of its stack and the index into it."""
    if isinstance(q, StackSlice) and q.all_values is not None:
        return q.all_values, q.step
    return q.values, None


def _stack_slice(all_values: Any, step: Any, leaves: Any, static: Any) -> StackSlice:
    q = rebuilt(StackSlice, static, leaves)
    object.__setattr__(q, "all_values", all_values)
    object.__setattr__(q, "step", step)
    return q


def _flatten_stack_slice(q: StackSlice) -> tuple[tuple, tuple]:
    leaves, static = flatten(q)
    return (q.all_values, q.step, leaves), static


def _unflatten_stack_slice(static: Any, children: Any) -> StackSlice:
    all_values, step, leaves = children
    return _stack_slice(all_values, step, leaves, static)


jax.tree_util.register_pytree_node(StackSlice, _flatten_stack_slice, _unflatten_stack_slice)
