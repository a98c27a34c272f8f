"""Learned rotations: orthogonal matrices that reduce the rounding error of what they rotate."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import fail, message, some, warn
from ..tensor import QSpec
from ..tensor._shared import fake_quantize_as, fit
from ..transforms import ChannelMap, Plan, map_channels
from ..transforms._shared import (
    Batch,
    Channels,
    Inapplicable,
    OnNonfinite,
    arguments_of,
    check_mode,
    finite_rows,
    look_at_batches,
    number_of,
    progress_bar,
)
from ._descent import descended
from ._labels import Array

Loss = Callable[[Any, Any], jax.Array]
"""Maps the results with rounded activations, and the float results, to the loss."""

Factors = list[tuple[Array, ...]]
"""For each rotation: orthogonal matrices, float64 [*loops, n, n], or [n, n] for all steps."""


class Options(Protocol):
    """Options of learning rotations; see `rotate`."""

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
    """An operand that is rounded after a rotation.

    Attributes:
      spec: how it is rounded.
      scale: factors of its channels before the rotation, [*loops, *batch, channels].
      loops: the lengths of the loops that it steps with.
    """

    spec: QSpec
    scale: Array
    loops: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LearnedRotation:
    """A rotation that is learned.

    Attributes:
      start: the matrices whose Kronecker product rotates a block of channels, [*loops, n, n], or
        [n, n] for all steps.
      operands: the operands that are rounded after it, by key.
    """

    start: tuple[Array, ...]
    operands: Mapping[str, Operand]

    def maps(self, factors: Sequence[Any]) -> dict[str, "Rounded"]:
        """Returns maps that add the rounding error after a rotation to operands, by key."""
        found = {}
        for key, own in self.operands.items():
            each = (jnp.broadcast_to(x, (*own.loops, *x.shape[-2:])) for x in factors)
            scale = jnp.asarray(own.scale, jnp.float32)
            found[key] = Rounded(scale, tuple(each), spec=own.spec)
        return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounded(ChannelMap):
    """Rotates an operand, rounds it, and rotates it back, so that its weight need not change.

    Attributes:
      spec: how it is rounded; the scale is computed from the value, whether static or not.
    """

    spec: QSpec | None = dataclasses.field(default=None, metadata={"static": True})

    def apply(self, x: jax.Array, channels: Channels) -> jax.Array:
        """Returns the operand with its rounding error."""
        return jax.checkpoint(self._apply, static_argnums=1)(x, channels)

    def _apply(self, x: jax.Array, channels: Channels) -> jax.Array:
        assert self.scale is not None and self.spec is not None
        y = super().apply(x.astype(x.dtype if x.dtype.itemsize > 4 else jnp.float32), channels)
        affine = fit(y, self.spec)
        if not isinstance(affine.scale, jax.Array) or affine.scale.dtype.itemsize == 1:
            affine = None  # powers of two, and scales that are codes, have no gradient
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
    rotations: Sequence[LearnedRotation],
    *,
    progress: bool = False,
    on_nonfinite: OnNonfinite = "error",
) -> tuple[Factors, tuple[float, float]]:
    """Returns the learned factors of rotations, and the loss with the initial and the learned ones.

    Args:
      function: name of the function, for errors.
      options: the options of learning.
      f: the function.
      plan: the plan.
      params: its parameters, in float.
      batches: as in `calibrate_batches`.
      rotations: the rotations.
      progress: whether to show a progress bar.
      on_nonfinite: as in `calibrate_batches`; a batch that is not finite even without such rows is
        left out.
    """
    if not rotations:
        raise fail(
            function,
            "`steps` has nothing to learn.",
            given=f"steps == {options.steps}, and a plan that rounds no operand after a rotation",
            expected="a plan that quantizes activations that are rotated",
            fix="leave `steps` out.",
            error=Inapplicable,
        )
    loss, ignores = options.loss or relative_error, check_mode(function, on_nonfinite)
    batches = [Batch(x) for x in batches]

    def lost(factors: Factors, params: Any, batch: Any, exact: Any) -> jax.Array:
        maps: dict[str, Rounded] = {}
        for rotation, own in zip(rotations, factors, strict=True):
            maps |= rotation.maps(own)
        exact, kept, batch = exact
        found = map_channels(f, plan, maps)(*arguments_of(plan, params, batch))
        if kept is not None:
            found = jax.tree.map(lambda x, own: jnp.where(own, x, 0), found, kept)
        return number_of(function, "loss", loss, found, exact)

    def real(params: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Returns the float results, which of their elements count, if rows are left out, and the
        batch without these rows.
        """
        if not ignores:
            return f(*arguments_of(plan, params, batch)), None, batch
        _, kept = finite_rows(f, plan, *arguments_of(plan, params, batch))
        batch = cleaned(params, batch)
        exact = f(*arguments_of(plan, params, batch))
        return jax.tree.map(lambda x, own: jnp.where(own, x, 0), exact, kept), kept, batch

    def cleaned(params: Any, batch: Any) -> Any:
        """Returns a batch with zeros for rows that are not finite, so that they do not count in
        ranges. Rows with negative infinities are left, if no operand shows them: they are masks.
        """
        part, whole = (jax.tree.map(partial(_finite, least=x), batch) for x in (-jnp.inf, None))
        _, kept = finite_rows(f, plan, *arguments_of(plan, params, part))
        is_good = jnp.all(jnp.stack([jnp.all(x) for x in jax.tree.leaves(kept)]))
        return jax.tree.map(lambda a, b: jnp.where(is_good, a, b), part, whole)

    real, judge = jax.jit(real), jax.jit(jax.value_and_grad(lost))

    def given(factors: Factors, i: int) -> tuple[Any, ...]:
        own = jax.tree.map(partial(jnp.asarray, dtype=jnp.float32), factors)
        return own, params, batches[i], real(params, batches[i])

    def judged(factors: Factors, i: int) -> tuple[float, Any]:
        """Returns the loss of a batch and its gradient, after checking that they are finite."""
        now, slope = judge(*given(factors, i))
        if not all(np.isfinite(x).all() for x in map(np.asarray, jax.tree.leaves((now, slope)))):
            raise ValueError(not_finite(float(now), f"batch {i}"))
        return float(now), slope

    def step(factors: Factors, i: int, length: float) -> Factors:
        rotated = partial(moved, angle=options.learning_rate * length)
        return jax.tree.map(rotated, factors, judged(factors, i)[1])

    def not_finite(lost: float, where: str) -> str:
        return message(
            function,
            "the loss of rounding after rotations is not finite.",
            given=f"a loss of {lost}, or its gradient, on {where}",
            expected="finite results, and a finite loss of them",
            fix="learn from other batches, or pass loss=.",
        )

    look_at_batches(function, f, plan, params, batches, on_nonfinite)
    start = [rotation.start for rotation in rotations]
    if ignores:
        batches = _without_spoilt(function, batches, lambda i: judge(*given(start, i)))
    bar = progress_bar("rotate", "step") if progress else None
    try:
        found = descended(
            start,
            options.steps,
            len(batches),
            options.seed,
            lost=lambda factors, i: judged(factors, i)[0],
            moved=step,
            refuse=lambda lost, count: ValueError(not_finite(lost, f"{count} batches")),
            done=bar.update if bar is not None else lambda: None,
        )
    finally:
        if bar is not None:
            bar.close()
    return found.kept, (found.before, found.after)


def _finite(x: Any, least: float | None) -> Any:
    """Returns a value with zeros for rows that hold a NaN or an infinity other than `least`."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    is_bad = ~jnp.isfinite(x) & (True if least is None else x != least)
    if x.ndim > 1:
        is_bad = is_bad.any(-1, keepdims=True)
    return jnp.where(is_bad, jnp.zeros_like(x), x)


def _without_spoilt(
    function: str, batches: Sequence[Any], judge: Callable[[int], Any]
) -> Sequence[Any]:
    """Returns the batches whose loss and gradient are finite, and warns if there are others."""
    kept, spoilt = [], []
    for i in range(len(batches)):
        leaves = map(np.asarray, jax.tree.leaves(judge(i)))
        (kept if all(np.isfinite(x).all() for x in leaves) else spoilt).append(i)
    if not kept:
        raise fail(
            function,
            "no batch has a finite loss.",
            given=f"{len(batches)} batches",
            expected="finite results on one batch or more",
            fix="find where the NaN or infinities come from.",
        )
    if spoilt:
        warn(
            message(
                function,
                "batches with a loss or a gradient that is not finite were left out.",
                given=f"batches {some(map(str, spoilt))}",
                expected="finite results, also with rounded activations",
                fix="nothing, if the other batches are enough.",
            )
        )
    return [batches[i] for i in kept]


def relative_error(found: Any, exact: Any) -> jax.Array:
    """Returns the squared errors of float results, relative to their squares, summed."""
    total = jnp.float32(0)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            norm = jnp.sum(b**2)
            total += jnp.sum((a - b) ** 2) / jnp.where(norm > 0, norm, 1)
    return total


def moved(q: Array, gradient: Any, angle: float) -> Array:
    """Returns orthogonal matrices after a step against a gradient.

    The length of the step is an angle: the root mean square of the angles by which planes rotate.
    Matrices stay orthogonal, because the step is the Cayley transform of a skew matrix.
    """
    skew = q.mT @ np.asarray(gradient, np.float64)
    skew = skew - skew.mT
    norm = np.sqrt(np.mean(np.sum(skew**2, axis=-1), axis=-1))[..., None, None]
    half, one = skew * (angle / 2 / np.where(norm > 0, norm, 1)), np.eye(q.shape[-1])
    # On the host: XLA on CPU deadlocked when several systems were solved at once.
    return np.linalg.solve((one + half).mT, (q @ (one - half)).mT).mT
