"""Contractions in NumPy, written without jqx, and what a program contracts."""

import itertools
import math
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jqx
from jqx._src.contractions.formulation import Choice

from ..tensor.tensors import kept, random_codes, tensor

Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class Layout(NamedTuple):
    """Shapes of two operands, and which of their axes are contracted and batched."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    numbers: Numbers

    @property
    def rhs_kept(self) -> list[int]:
        """The axes of the right operand that the result has."""
        contracted = {axis % len(self.rhs) for axis in self.numbers[0][1]}
        return [axis for axis in range(len(self.rhs)) if axis not in contracted]

    @property
    def swapped(self) -> Numbers:
        """The dimension numbers of the operands in the other order."""
        (lhs, rhs), (lhs_batch, rhs_batch) = self.numbers
        return ((rhs, lhs), (rhs_batch, lhs_batch))

    @property
    def products(self) -> int:
        """How many products each element of the result sums."""
        return math.prod(self.rhs[axis] for axis in self.numbers[0][1])


MATRICES = (((1,), (0,)), ((), ()))
NEGATIVE = "negative axes"
LAYOUTS = {
    "matrices": Layout((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
    "right transposed": Layout((3, 4), (5, 4), (((1,), (1,)), ((), ()))),
    "both transposed": Layout((4, 3), (5, 4), (((0,), (1,)), ((), ()))),
    "vectors": Layout((6,), (6,), (((0,), (0,)), ((), ()))),
    "vector and matrix": Layout((4,), (4, 5), (((0,), (0,)), ((), ()))),
    "free axes on both sides": Layout((2, 4, 3), (5, 4, 2), (((1,), (1,)), ((), ()))),
    "heads": Layout((2, 3), (3, 4, 5), (((1,), (0,)), ((), ()))),
    "heads on the left": Layout((3, 4, 5), (2, 3), (((0,), (1,)), ((), ()))),
    "batch": Layout((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,)))),
    "batch axes anywhere": Layout((4, 2, 3), (5, 4, 2), (((0,), (1,)), ((1,), (2,)))),
    "two batch axes, crossed": Layout((2, 3, 4, 5), (3, 4, 2), (((2,), (1,)), ((0, 1), (2, 0)))),
    "batch and nothing free": Layout((2, 4), (2, 4), (((1,), (1,)), ((0,), (0,)))),
    "several contracted axes": Layout((2, 3, 4), (4, 5, 2), (((2, 0), (0, 2)), ((), ()))),
    "everything contracted": Layout((2, 3), (2, 3), (((0, 1), (0, 1)), ((), ()))),
    "nothing contracted": Layout((2, 3), (4,), (((), ()), ((), ()))),
    "one product": Layout((3, 1), (1, 5), (((1,), (0,)), ((), ()))),
    "no product": Layout((3, 0), (0, 5), (((1,), (0,)), ((), ()))),
    "no rows": Layout((0, 4), (4, 5), (((1,), (0,)), ((), ()))),
    NEGATIVE: Layout((2, 3, 4), (2, 4, 5), (((-1,), (-2,)), ((-3,), (-3,)))),
}
LARGE = {
    "matrices": Layout((3, 131), (131, 127), MATRICES),
    "right transposed": Layout((3, 131), (127, 131), (((1,), (1,)), ((), ()))),
    "both transposed": Layout((128, 7), (160, 128), (((0,), (1,)), ((), ()))),
    "one row": Layout((1, 128), (128, 160), MATRICES),
    "vector": Layout((128,), (128, 160), (((0,), (0,)), ((), ()))),
    "one column": Layout((3, 2**14), (2**14, 1), MATRICES),
    "two vectors": Layout((2**14,), (2**14,), (((0,), (0,)), ((), ()))),
    "heads": Layout((2, 3, 128), (128, 4, 40), (((2,), (0,)), ((), ()))),
    "batch": Layout((4, 3, 64), (4, 64, 96), (((2,), (1,)), ((0,), (0,)))),
    "batch axes anywhere": Layout((64, 4, 3), (96, 64, 4), (((0,), (1,)), ((1,), (2,)))),
    "batch and nothing free": Layout((160, 128), (160, 128), (((1,), (1,)), ((0,), (0,)))),
    "two axes contracted, crossed": Layout((16, 3, 8), (8, 160, 16), (((0, 2), (2, 0)), ((), ()))),
    "everything contracted": Layout((128, 160), (128, 160), (((0, 1), (0, 1)), ((), ()))),
}
"""Contractions whose right operand is so large that it is not simply converted; 127 and 131 are
primes, so that slices leave a rest.
"""

FEW = {
    name: LARGE[name]
    for name in ("matrices", "both transposed", "one column", "batch axes anywhere")
}
"""Those that differ most."""

UNIT = 2.0**-24
"""Half the distance from 1 to the next float32: the largest relative error of one rounding."""


def gamma(roundings: int) -> float:
    """The largest relative error of a product of that many float32 roundings.

    N. J. Higham, "Accuracy and Stability of Numerical Algorithms", lemma 3.1.
    """
    return roundings * UNIT / (1 - roundings * UNIT)


def near(error: float, layers: int, terms: int) -> float:
    """How far two programs may be apart in an error that both measure, relative to it.

    A `relative_error` is the square of a difference of two results, over that of their size. Each
    result sums `terms` products in each of its layers, off by half a unit in the last place each;
    two programs so differ by four times that.
    """
    return 2 * 4 * layers * terms * 2.0**-25 / error**0.5


def contraction(lhs: np.ndarray, rhs: np.ndarray, numbers: Numbers) -> np.ndarray:
    """`lax.dot_general` of NumPy arrays, in their own arithmetic; axes may be negative."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers
    names = iter(string.ascii_letters)
    left = [next(names) for _ in range(lhs.ndim)]
    right = [next(names) for _ in range(rhs.ndim)]
    for i, j in [
        *zip(lhs_contracting, rhs_contracting, strict=True),
        *zip(lhs_batch, rhs_batch, strict=True),
    ]:
        right[j] = left[i]
    batch = [left[i] for i in lhs_batch]
    free = [name for name in left if name not in right] + [n for n in right if n not in left]
    terms = [f"{''.join(left)},{''.join(right)}", "".join(batch + free)]
    return np.einsum("->".join(terms), lhs, rhs)


def exact_tensor(
    rng: np.random.Generator,
    qtype: Any,
    shape: Sequence[int],
    axes: Sequence[int] = (),
    zero_point: bool = True,
    **fields: Any,
) -> jqx.QTensor:
    """A QTensor with powers of two as scales, each index of `axes` having its own.

    Contracted with small integers, it gives sums that float32 holds exactly in any order.
    """
    scale = np.ldexp(1.0, rng.integers(-4, 5, kept(shape, axes)))
    zero = random_codes(rng, qtype, kept(shape, axes)) if zero_point else None
    return tensor(random_codes(rng, qtype, shape), qtype, scale, zero, **fields)


def small_integers(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """float32 integers from -8 to 8."""
    return rng.integers(-8, 9, shape).astype(np.float32)


def dots(f: Callable[..., Any], *args: Any) -> list[Any]:
    """The equations of `f`, at any depth, that contract: their operands and results are typed."""
    return [e for e in equations_of(f, *args) if e.primitive.name == "dot_general"]


def chosen(f: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
    """The names of the formulations of `f`: on CPU, and elsewhere."""
    return [(c.cpu.name, c.elsewhere.name) for c in jqx.formulations(f)(*args)]


def as_elsewhere(monkeypatch: Any) -> None:
    """Computes contractions as on platforms that have no formulation of their own."""
    compute = Choice.compute
    monkeypatch.setattr(
        Choice, "compute", lambda self, *args: compute(Choice(*[self.default] * 5), *args)
    )


def dtypes(atoms: Sequence[Any]) -> list[str]:
    """The names of the dtypes of an equation's operands or results."""
    return [atom.aval.dtype.name for atom in atoms]


def equations_of(f: Callable[..., Any], *args: Any) -> list[Any]:
    """The equations of `f`, at any depth."""
    return list(_equations(jax.make_jaxpr(f)(*args)))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        leaves = itertools.chain.from_iterable(map(jax.tree.leaves, eqn.params.values()))
        for inner in leaves:
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from _equations(inner)
