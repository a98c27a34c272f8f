"""Contraction primitives: the sites of a function, and those known but not yet quantized."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from ..._compat import Eqn
from ...contractions import Dimensions, dot_general


@dataclasses.dataclass(frozen=True)
class Contraction:
    """How one contraction primitive of two operands is read and evaluated.

    Attributes:
      kept: the axes of each operand that the result has.
      pattern: what of its parameters a plan depends on; no sizes.
      macs: how many multiply-adds it takes.
      apply: evaluates it on arrays and QTensors.
    """

    kept: Callable[[Eqn], tuple[tuple[int, ...], tuple[int, ...]]]
    pattern: Callable[[Eqn], str]
    macs: Callable[[Eqn], int]
    apply: Callable[[Eqn, Any, Any], jax.Array]


def _dimensions(eqn: Eqn) -> Dimensions:
    lhs, rhs = (v.aval for v in eqn.invars)
    return Dimensions.of(eqn.params["dimension_numbers"], lhs.ndim, rhs.ndim)


def _kept(eqn: Eqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    dimensions = _dimensions(eqn)
    return dimensions.lhs_kept, dimensions.rhs_kept


def _macs(eqn: Eqn) -> int:
    contracted = _dimensions(eqn).contracted_size(eqn.invars[0].aval)
    return math.prod(eqn.outvars[0].aval.shape) * contracted


def _apply(eqn: Eqn, lhs: Any, rhs: Any) -> jax.Array:
    return dot_general(
        lhs,
        rhs,
        eqn.params["dimension_numbers"],
        precision=eqn.params["precision"],
        preferred_element_type=eqn.outvars[0].aval.dtype,
    )


CONTRACTIONS: dict[str, Contraction] = {
    "dot_general": Contraction(_kept, lambda eqn: repr(_dimensions(eqn).numbers), _macs, _apply)
}

UNQUANTIZED: dict[str, tuple[str, int]] = {
    "conv_general_dilated": ("conv_general_dilated", 1),
    "ragged_dot_general": ("ragged_dot", 1),
    "gather": ("gather", 0),
}
"""Primitives that policies name but that have no rule: `op`, and which operand is a weight."""
