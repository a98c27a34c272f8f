"""Rotations that are learned: orthogonal matrices behind which rounding loses less."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import require_that
from .._errors import message
from ..tensor import QSpec
from ..tensor._shared import fake_quantize_as, fit
from ..transforms import ChannelMap, Plan, map_channels
from ..transforms._shared import Channels, Inapplicable, arguments_of, progress_bar
from ._descent import descended
from ._labels import Array

Loss = Callable[[Any, Any], jax.Array]
"""From what the function returns with rounded activations, and in float, to what is lost."""

Factors = list[tuple[Array, ...]]
"""Of each rotation: orthogonal matrices, float64 [*loops, n, n], or [n, n] for all steps."""


class Options(Protocol):
    """How rotations are learned: those of `rotate`."""

    @property
    def steps(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def loss(self) -> Loss | None: ...
    @property
    def seed(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand that is rounded behind a rotation.

    Attributes:
      spec: how it is rounded.
      scale: what its channels are multiplied by before they are rotated, [*loops, *batch,
        channels].
      loops: the lengths of the loops that it steps with.
    """

    spec: QSpec
    scale: Array
    loops: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Turn:
    """A rotation that is learned.

    Attributes:
      start: the matrices whose Kronecker product rotates a block of channels, [*loops, n, n], or
        [n, n] for all steps.
      operands: what is rounded behind it, by key.
    """

    start: tuple[Array, ...]
    operands: Mapping[str, Operand]

    def maps(self, factors: Sequence[Any]) -> dict[str, "Rounded"]:
        """Returns operands with the error that they have behind a rotation, by key."""
        found = {}
        for key, own in self.operands.items():
            each = (jnp.broadcast_to(x, (*own.loops, *x.shape[-2:])) for x in factors)
            scale = jnp.asarray(own.scale, jnp.float32)
            found[key] = Rounded(scale, tuple(each), spec=own.spec)
        return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounded(ChannelMap):
    """Rounds an operand where it is rotated, and turns it back, so that its weight stays as it is.

    Attributes:
      spec: how it is rounded, by a scale of the value at hand, static or not.
    """

    spec: QSpec | None = dataclasses.field(default=None, metadata={"static": True})

    def apply(self, x: jax.Array, channels: Channels) -> jax.Array:
        """Returns the operand with its error."""
        return jax.checkpoint(self._apply, static_argnums=1)(x, channels)

    def _apply(self, x: jax.Array, channels: Channels) -> jax.Array:
        assert self.scale is not None and self.spec is not None
        y = super().apply(x.astype(jnp.promote_types(x.dtype, jnp.float32)), channels)
        affine = fit(y, self.spec)
        if not isinstance(affine.scale, jax.Array) or affine.scale.dtype.itemsize == 1:
            affine = None  # powers of two, and scales that are codes, are constants
        y = fake_quantize_as(y, self.spec, affine)
        y = channels.rotated(y, [jnp.swapaxes(factor, -1, -2) for factor in self.factors])
        back = jnp.where(self.scale == 0, 0, 1 / self.scale)
        return (y * channels.spread(back, y.shape)).astype(x.dtype)


def learned(
    function: str,
    options: Options,
    f: Callable[..., Any],
    plan: Plan,
    params: Any,
    batches: Sequence[Any],
    turns: Sequence[Turn],
    *,
    progress: bool = False,
) -> tuple[Factors, tuple[float, float]]:
    """Returns the factors of rotations, and what is lost with those of the start, and with these.

    Args:
      function: what errors are said of.
      options: how.
      f: the function.
      plan: the plan.
      params: its parameters, in float.
      batches: as in `calibrate_batches`.
      turns: the rotations.
      progress: whether to show a bar.
    """
    require_that(
        turns,
        error=Inapplicable,
        function=function,
        problem="`steps` has nothing to learn.",
        given=f"steps == {options.steps}, and a plan that rounds no operand behind a rotation",
        expected="a plan that quantizes activations that are rotated",
        mend="leave `steps` out.",
    )
    loss = options.loss or relative_error

    def lost(factors: Factors, params: Any, batch: Any, exact: Any) -> jax.Array:
        maps: dict[str, Rounded] = {}
        for turn, own in zip(turns, factors, strict=True):
            maps |= turn.maps(own)
        return loss(map_channels(f, plan, maps)(*arguments_of(plan, params, batch)), exact)

    real = jax.jit(lambda params, batch: f(*arguments_of(plan, params, batch)))
    judge, slope = jax.jit(lost), jax.jit(jax.grad(lost))

    def given(factors: Factors, i: int) -> tuple[Any, ...]:
        own = jax.tree.map(partial(jnp.asarray, dtype=jnp.float32), factors)
        return own, params, batches[i], real(params, batches[i])

    def step(factors: Factors, i: int, length: float) -> Factors:
        turned = partial(moved, angle=options.learning_rate * length)
        return jax.tree.map(turned, factors, slope(*given(factors, i)))

    def refuse(lost: float, count: int) -> Exception:
        text = message(
            function,
            "what rounding behind rotations loses is no number.",
            given=f"a loss of {lost} on {count} batches",
            expected="results, and a loss of them, that are finite",
            mend="learn from other batches, or pass loss=.",
        )
        return Inapplicable(text)

    bar = progress_bar("rotate", "step") if progress else None
    try:
        found = descended(
            [turn.start for turn in turns],
            options.steps,
            len(batches),
            options.seed,
            lost=lambda factors, i: judge(*given(factors, i)),
            moved=step,
            refuse=refuse,
            done=bar.update if bar is not None else lambda: None,
        )
    finally:
        if bar is not None:
            bar.close()
    return found.kept, (found.before, found.after)


def relative_error(found: Any, exact: Any) -> jax.Array:
    """Returns the squared errors of results of floats, relative to their squares, summed."""
    total = jnp.float32(0)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            norm = jnp.sum(b**2)
            total += jnp.sum((a - b) ** 2) / jnp.where(norm > 0, norm, 1)
    return total


def moved(q: Array, gradient: Any, angle: float) -> Array:
    """Returns orthogonal matrices after a step against a gradient, of a length that is an angle:
    the root mean square of those that planes turn by. They stay orthogonal, for it is the Cayley
    transform of a skew matrix.
    """
    skew = q.mT @ np.asarray(gradient, np.float64)
    skew = skew - skew.mT
    norm = np.sqrt(np.mean(np.sum(skew**2, axis=-1), axis=-1))[..., None, None]
    half, one = skew * (angle / 2 / np.where(norm > 0, norm, 1)), np.eye(q.shape[-1])
    # On the host: XLA on CPU has blocked where several systems were solved at once.
    return np.linalg.solve((one + half).mT, (q @ (one - half)).mT).mT
