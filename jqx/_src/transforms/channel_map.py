"""Maps of the channels of a value, which algorithms insert at sites."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..checks import added
from ..compat import Eqn
from ..statistics.statistics import ObservedSite
from .rules import CONTRACTIONS
from .walk import HIDDEN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChannelMap:
    """A map of the channels of an operand of a contraction, or of its result:
    `min((x * scale) @ rotation + shift, clip)`. Each part is optional.

    The channels of an operand are the axes that are summed over. Those of a result are the axes
    that come from the weight. Leading axes `loops` are the scans that step over the weight, as
    in the statistics of `jqx.extend`.

    Attributes:
      scale: `[*loops, *batch, channels]`, or `None`.
      factors: square matrices `[*loops, n, n]`. The rotation is their Kronecker product, applied to
        each block of as many channels. Without factors there is no rotation.
      shift: like `scale`.
      clip: the largest value of a channel, like `scale`; NaN stays.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.ChannelMap(scale=jnp.array([1.0, 0.5])).scale
      Array([1. , 0.5], dtype=float32)
    """

    scale: jax.Array | None = None
    factors: tuple[jax.Array, ...] = ()
    shift: jax.Array | None = None
    clip: jax.Array | None = added(None)  # noqa: RUF009

    def apply(self, x: jax.Array, channels: "Channels") -> jax.Array:
        """Returns a value with its channels mapped, in its own dtype."""
        y = x.astype(x.dtype if x.dtype.itemsize > 4 else jnp.float32)
        if self.scale is not None:
            y = y * channels.spread(self.scale.astype(y.dtype), y.shape)
        if self.factors:
            y = channels.rotated(y, [factor.astype(y.dtype) for factor in self.factors])
        if self.shift is not None:
            y = y + channels.spread(self.shift.astype(y.dtype), y.shape)
        if self.clip is not None:
            y = jnp.minimum(y, channels.spread(self.clip.astype(y.dtype), y.shape))
        return y.astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """A correction that is added to the result of a product `x w` of an activation and a weight:
    `(x a) b`, two narrow products. `x` is the activation after its maps, as the weight receives it.

    Attributes:
      a: `[*loops, *batch, channels, rank]`.
      b: `[*loops, *batch, rank, channels of the result]`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w, x = jnp.zeros((3, 2)), jnp.array([[1.0, 2.0, 3.0]])
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8())(w, x)
      >>> own = jqx.LowRank(jnp.ones((3, 1)), jnp.array([[1.0, 10.0]]))
      >>> jqx.map_channels(f, plan, {":dot_general:out": own})(w, x)
      Array([[ 6., 60.]], dtype=float32)
    """

    a: jax.Array
    b: jax.Array

    def apply(
        self, y: jax.Array, result: "Channels", x: jax.Array, operand: "Channels"
    ) -> jax.Array:
        """Returns the result of a product with the correction added.

        Args:
          y: the result.
          result: the channels of the result.
          x: the operand that is not a weight.
          operand: the channels of that operand.
        """

        def correct(y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            stack = len(operand.batch)
            free = [i for i in range(x.ndim) if i not in (*operand.batch, *operand.axes)]
            rows = x.transpose(*operand.batch, *free, *operand.axes)
            count = math.prod(rows.shape[stack + len(free) :])
            rows = rows.reshape(*rows.shape[:stack], -1, count).astype(a.dtype)
            low = jnp.matmul(jnp.matmul(rows, a), b)
            low = low.reshape(
                *(x.shape[i] for i in (*operand.batch, *free)), *(y.shape[i] for i in result.axes)
            )
            others = [i for i in range(y.ndim) if i not in (*result.batch, *result.axes)]
            order = (*result.batch, *others, *result.axes)
            return y + low.transpose(sorted(range(y.ndim), key=order.__getitem__)).astype(y.dtype)

        correct.__name__ = HIDDEN
        return jax.jit(correct)(y, x, self.a, self.b)


class Channels(NamedTuple):
    """The axes of a value that are its channels, in order, and its batch axes."""

    batch: tuple[int, ...]
    axes: tuple[int, ...]

    @classmethod
    def of_operand(cls, observed: ObservedSite) -> "Channels":
        """Returns the channels that a site sums over."""
        return cls(observed.batch, observed.contracted)

    @classmethod
    def of_result(cls, eqn: Eqn, side: int) -> "Channels":
        """Returns the channels of the result that come from the weight, operand `side`."""
        name, rank = eqn.primitive.name, eqn.outvars[0].aval.ndim
        if name == "conv_general_dilated":
            return cls((), (eqn.params["dimension_numbers"].out_spec[1],))
        if name == "gather":
            return cls((), tuple(eqn.params["dimension_numbers"].offset_dims))
        axes = CONTRACTIONS[name].axes(eqn)[side]
        stack = len(axes.batch) if name == "dot_general" else 0
        count = len([axis for axis in axes.kept if axis not in axes.batch])
        count = 1 if name != "dot_general" else count
        start = stack if side == 0 else rank - count
        return cls(tuple(range(stack)), tuple(range(start, start + count)))

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of one number for each channel, [*batch, channels]."""
        return *(sizes[axis] for axis in self.batch), math.prod(sizes[axis] for axis in self.axes)

    def spread(self, x: Any, shape: Sequence[int]) -> Any:
        """Returns numbers [*batch, channels] in the axes of a value, size 1 along all others."""
        axes = (*self.batch, *self.axes)
        x = x.reshape([shape[axis] for axis in axes])
        x = x.transpose(sorted(range(len(axes)), key=axes.__getitem__))
        return x.reshape([n if axis in axes else 1 for axis, n in enumerate(shape)])

    def rotated(self, x: jax.Array, factors: Sequence[jax.Array]) -> jax.Array:
        """Returns a value with each block of its channels multiplied by the Kronecker product."""

        def rotate(x: jax.Array, factors: Sequence[jax.Array]) -> jax.Array:
            moved = jnp.moveaxis(x, self.axes, range(-len(self.axes), 0))
            sizes, rows = [len(factor) for factor in factors], moved.shape[: -len(self.axes)]
            blocks = math.prod(moved.shape[len(rows) :]) // math.prod(sizes)
            y = moved.reshape(*rows, blocks, *sizes)
            for i, factor in enumerate(factors):
                axis = i - len(factors)
                y = jnp.moveaxis(y, axis, -1)
                y = jnp.matmul(y, factor, precision=jax.lax.Precision.HIGHEST)
                y = jnp.moveaxis(y, -1, axis)
            return jnp.moveaxis(y.reshape(moved.shape), range(-len(self.axes), 0), self.axes)

        rotate.__name__ = HIDDEN
        return jax.jit(rotate)(x, list(factors))


Map = ChannelMap | LowRank


Maps = Mapping[str, Map | Sequence[Map]]
"""Maps by the key of an operand or a result, such as `w:dot_general:lhs`; several in order."""
