"""Lazy: an array or QTensor that is created each time it is read, and not stored."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from .._calls import called
from .._checks import shown
from .._errors import fail
from .._heap import give_back

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
        found = self.make()
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found)
        kinds = [[_kind(x) for x in jax.tree.leaves(tree)] for tree in (given, self.spec)]
        same = jax.tree.structure(found) == jax.tree.structure(self.spec)
        if not (same and kinds[0] == kinds[1]):
            raise fail(
                "interop.Lazy",
                "the result of `make` does not match `spec`.",
                given=shown(given),
                expected=shown(self.spec),
                fix="derive `spec` from `make`, such as with jax.eval_shape.",
            )
        return found

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


def _kind(x: Any) -> tuple[Any, ...]:
    return (*x.shape, np.dtype(x.dtype).name)


def check_read(function: str, named: Iterable[tuple[str | None, Any]]) -> None:
    """Raises if one of some leaves, each with its path, is Lazy."""
    for path, leaf in named:
        if isinstance(leaf, Lazy):
            own = "a leaf" if path is None else f"the leaf {path!r}"
            raise fail(
                function,
                f"{own} has not been read yet.",
                given=f"{leaf!r}"[:200],
                expected="arrays: only planning, jqx.save, and jqx.ptq with rounding to "
                "nearest or layer by layer accept Lazy leaves",
                fix="read them: jax.tree.map(lambda x: x.read(), params).",
                error=TypeError,
            )


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
