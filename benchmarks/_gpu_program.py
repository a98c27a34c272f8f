"""One row as a program: every layer once, in many rounds.

A loop over stacked weights would let XLA:GPU copy each slice before its contraction, so that the
layers are separate arguments, unrolled (a row that is `stacked` shows what the copy costs). Rounds
fill the time of a call, beside which its launch is nothing. Each layer waits for the one before, a
round for its number: else XLA merges layers, and moves what depends on weights alone out of the
loop of rounds. So it does with a transpose, unless the layout is fixed where the layer starts.
Scales are left alone: a multiplication by an array that waits is not fused with a contraction.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _gpu_rows import Row
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

import jqx

BANDWIDTH = 4.3e12  # bytes a second that a copy on an H200 was seen to move
CALL_SECONDS = 5e-3
MAX_ROUNDS = 100
CORNER = 8  # rows and columns of a result that are checked


@dataclass(frozen=True)
class Floor:
    """The least that a layer must do, and the seconds that it takes at the ceilings."""

    operations: int
    bytes: int
    peak: float

    @classmethod
    def of(cls, row: Row, arrays: Any) -> "Floor":
        """Counts operands read once and results written once."""
        sizes = (leaf.size * _bits(leaf.dtype) for leaf in jax.tree.leaves(arrays))
        return cls(row.shape.operations, sum(sizes) // 8, row.variant.peak)

    @property
    def is_arithmetic(self) -> bool:
        return self.operations / self.peak > self.bytes / BANDWIDTH

    @property
    def seconds(self) -> float:
        return max(self.operations / self.peak, self.bytes / BANDWIDTH)

    def rounds(self, layers: int) -> int:
        """Returns how many rounds fill a call."""
        return int(np.clip(CALL_SECONDS / (layers * self.seconds), 1, MAX_ROUNDS))


def _bits(dtype: Any) -> int:
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return int(info(dtype).bits)


def program(row: Row, rounds: int) -> Callable[[Any, Any], Any]:
    """Returns a function of all x and all w, as `arguments` returns them, to the list of all y."""
    layers = _scanned if row.stacked else _unrolled

    def run(xs: Any, ws: Any) -> Any:
        def one_round(_: Any, carry: Any) -> Any:
            number, ys = layers(row, xs, ws, carry[0])
            return number + 1, ys

        shapes = jax.eval_shape(partial(layers, row), xs, ws, jnp.int32(0))
        return lax.fori_loop(0, rounds, one_round, _zeros(shapes))[1]

    return run


def _unrolled(row: Row, xs: list[Any], ws: list[Any], number: jax.Array) -> tuple[Any, list[Any]]:
    """Returns the number that was waited for, and the results."""
    ys: list[Any] = []
    for x, w in zip(xs, ws, strict=True):
        if ys:
            x, w, ys[-1] = _after(ys[-1], x, w)
        else:
            x, w, number = _after(number, x, w)
        ys.append(row.run(x, w))
    return number, ys


def _scanned(row: Row, xs: Any, ws: Any, number: jax.Array) -> tuple[Any, list[Any]]:
    """As `_unrolled`, of stacked operands; the only result is that of the last layer."""
    xs, ws, number = _after(number, xs, ws)
    zeros = _zeros(jax.eval_shape(row.run, *jax.tree.map(lambda leaf: leaf[0], (xs, ws))))
    y, _ = lax.scan(lambda _, layer: (row.run(*layer), None), zeros, (xs, ws))
    return number, [y]


def _after(event: Any, x: Any, w: Any) -> tuple[Any, Any, Any]:
    """Makes the codes of both operands wait for an event, stored as they are; returns all three."""
    leaves, structure = jax.tree.flatten((x, w))
    codes = [i for i, leaf in enumerate(leaves) if leaf is _codes(x) or leaf is _codes(w)]
    held, event = lax.optimization_barrier(([leaves[i] for i in codes], event))
    for i, leaf in zip(codes, held, strict=True):
        leaves[i] = with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim))))
    return *jax.tree.unflatten(structure, leaves), event


def _codes(operand: Any) -> Any:
    return operand.values if isinstance(operand, jqx.QTensor) else operand


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def arguments(row: Row, layers: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Returns the operands of each layer as the arguments of the program."""
    if row.stacked:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    xs, ws = zip(*layers, strict=True)
    return list(xs), list(ws)


def abstract_arguments(row: Row, sharding: Any) -> tuple[Any, Any]:
    """Returns the arguments as shapes on a device that need not be there."""
    key = jax.random.key(0)
    shapes = jax.eval_shape(lambda key: arguments(row, [row.operands(key)] * row.layers), key)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )


def error(row: Row, x: Any, w: Any, y: Any) -> float | None:
    """Returns how far a corner of the result is from float64: norm of the difference over norm.

    The operands are the numbers that the codes stand for, so that what is measured is the
    contraction alone, and the quantization of activations where that is part of it. An int32 result
    is compared with the codes, and must be equal: 0. `None` where the result is another thing.
    """
    if not isinstance(y, jax.Array) or y.ndim != 2 or isinstance(w, tuple):
        return None
    if y.dtype not in (jnp.bfloat16, jnp.int32):
        return None
    as_codes, contracted = y.dtype == jnp.int32, row.variant.contracted
    corners = _corner(x, 0, as_codes), _corner(w, 1 - contracted, as_codes)
    lhs, rhs = (np.asarray(corner).astype(np.float64) for corner in corners)
    expected = lhs @ (rhs.T if contracted else rhs)
    actual = np.asarray(y[:CORNER, :CORNER], np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@partial(jax.jit, static_argnums=(1, 2))
def _corner(operand: Any, axis: int, as_codes: bool) -> jax.Array:
    """Returns the first rows or columns, as codes or in float32."""
    first = (slice(None),) * axis + (slice(0, CORNER),)
    if not isinstance(operand, jqx.QTensor):
        return operand[first].astype(jnp.float32)
    part = operand.unpack()[first]
    return part.codes if as_codes else part.astype(jnp.float32).dequantize()
