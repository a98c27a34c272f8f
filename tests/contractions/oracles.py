"""Contractions in NumPy, written without jqx, and what a program contracts."""

import itertools
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import jqx

from ..tensor.tensors import kept, random_codes, tensor

Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]

UNIT = 2.0**-24
"""Half the distance from 1 to the next float32: the largest relative error of one rounding."""


def gamma(roundings: int) -> float:
    """The largest relative error of a product of that many float32 roundings.

    N. J. Higham, "Accuracy and Stability of Numerical Algorithms", lemma 3.1.
    """
    return roundings * UNIT / (1 - roundings * UNIT)


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
    return [e for e in _equations(jax.make_jaxpr(f)(*args)) if e.primitive.name == "dot_general"]


def dtypes(atoms: Sequence[Any]) -> list[str]:
    """The names of the dtypes of an equation's operands or results."""
    return [atom.aval.dtype.name for atom in atoms]


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        leaves = itertools.chain.from_iterable(map(jax.tree.leaves, eqn.params.values()))
        for inner in leaves:
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from _equations(inner)
