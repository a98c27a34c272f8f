"""Lazy: an array or QTensor that is made when it is read, and kept by nobody."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from .._calls import called
from .._checks import require_that
from .._errors import message
from .._heap import give_back

_LARGE = 1 << 20
"""Bytes from which on memory is given back first, which takes a millisecond."""


@called("interop.Lazy", "pass its kind, and a function that makes it.")
@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """An array, a QTensor or Segments that is made anew each time it is read. A leaf of pytrees.

    Parameters of a model that is larger than memory have it in the place of arrays, such as
    `archive.map(archive.lazy)`: `jqx.make_plan` takes its shape and dtype, `jqx.quantize_params`
    returns another for what is to be quantized, `jqx.ptq` with rounding to nearest, or layer by
    layer (`jqx.algorithms.gptq`), likewise, and `jqx.save` reads one after another as it writes
    them. What computes on arrays, such as a converted function, takes arrays: `x.read()`.

    Attributes:
      spec: what it is, with `jax.ShapeDtypeStruct` in the place of arrays.
      make: makes it.
      source: says all that its numbers depend on, so that two of one source are equal; an empty
        string where that is not known. `jqx.save(..., resume=True)` keeps what it has written of
        such a source.

    Raises:
      TypeError: it is used as an array.
      ValueError: when it is read: what is made has another structure, shape or dtype.

    Gradient: none; it is no array.

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
        """Its shape, of a QTensor that of its real array."""
        return tuple(self.spec.shape)

    @property
    def dtype(self) -> np.dtype:
        """Its dtype, of a QTensor the real one."""
        return np.dtype(self.spec.dtype)

    @property
    def ndim(self) -> int:
        """Its rank."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        leaves = jax.tree.leaves(self.spec)
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in leaves)

    def read(self) -> Any:
        """Makes it, and returns it; before a large one freed memory goes back to the system."""
        if self.nbytes >= _LARGE:
            give_back()
        found = self.make()
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found)
        kinds = [[_kind(x) for x in jax.tree.leaves(tree)] for tree in (given, self.spec)]
        same = jax.tree.structure(found) == jax.tree.structure(self.spec)
        require_that(
            same and kinds[0] == kinds[1],
            error=ValueError,
            function="interop.Lazy",
            problem="what was made is not what was announced.",
            given=f"{given!r}"[:200],
            expected=f"{self.spec!r}"[:200],
            mend="make both of one function, such as with jax.eval_shape.",
        )
        return found

    def then(self, f: Callable[[Any], Any], said: str | None) -> "Lazy":
        """Returns what a function makes of it, when that is read.

        Args:
          f: the function, of the array and of its kind alike.
          said: all that the result depends on beside the array; `None` where that is not known.
        """
        spec = f(self.spec)
        source = f"{self.source}\n{said}" if self.source and said is not None else ""
        return Lazy(spec, lambda: f(self.read()), source)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        check_read("interop.Lazy", [(None, self)])

    def __repr__(self) -> str:
        return f"Lazy({self.spec!r})"


def _kind(x: Any) -> tuple[Any, ...]:
    return (*x.shape, np.dtype(x.dtype).name)


def check_read(function: str, named: Iterable[tuple[str | None, Any]]) -> None:
    """Raises where one of some leaves, each with its path, is Lazy."""
    for path, leaf in named:
        if isinstance(leaf, Lazy):
            own = "a leaf" if path is None else f"the leaf {path!r}"
            raise TypeError(
                message(
                    function,
                    f"{own} is not read yet.",
                    given=f"{leaf!r}"[:200],
                    expected="arrays: only planning, jqx.save, and jqx.ptq with rounding to "
                    "nearest or layer by layer read leaves when they need them",
                    mend="read them: jax.tree.map(lambda x: x.read(), params).",
                )
            )


def of_kinds(f: Callable[[Any], Any], x: Any) -> Any:
    """Returns what a function makes of arrays, or of their kinds: then nothing is computed."""
    is_kind = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(x))
    return jax.eval_shape(f, x) if is_kind else f(x)


def read(x: Any) -> Any:
    """Returns what a Lazy makes; all else as it is."""
    return x.read() if isinstance(x, Lazy) else x


def abstract(x: Any) -> Any:
    """Returns what a Lazy is; all else as it is."""
    return x.spec if isinstance(x, Lazy) else x
