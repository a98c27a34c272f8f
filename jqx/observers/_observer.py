"""The contract of an observer: which statistic of an operand a site records."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import export, lax

from ..tensor import QSpec

T = TypeVar("T")
Axes = tuple[int, ...]

Weight = Callable[..., Any]
"""From the arguments of a function, less its parameters, to how much each of its rows counts."""


def serializable(cls: type[T]) -> type[T]:
    """Lets `jax.export` serialize functions that take or return values of a NamedTuple."""
    name = f"jqx.observers.{cls.__name__}"
    return export.register_namedtuple_serialization(cls, serialized_name=name)


class Patches(NamedTuple):
    """How a convolution takes patches of an image.

    Attributes:
      kernel: sizes of the kernel along the spatial axes.
      strides: one for each of these.
      padding: (low, high) for each.
      lhs_dilation: one for each.
      rhs_dilation: likewise.
      axes: which axes of image and kernel are which.
      groups: feature groups.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    axes: lax.ConvDimensionNumbers
    groups: int

    def of_image(self, x: jax.Array) -> jax.Array:
        """Returns the patches of an image as rows, [groups, rows, channels x taps]; of one group
        without the first axis.
        """
        found = lax.conv_general_dilated_patches(
            x.transpose(self.axes.lhs_spec),
            self.kernel,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            precision=lax.Precision.HIGHEST,
        )
        rows = jnp.moveaxis(found, 1, -1)
        rows = rows.reshape(-1, self.groups, rows.shape[-1] // self.groups).transpose(1, 0, 2)
        return rows[0] if self.groups == 1 else rows

    def of_kernel(self, x: jax.Array) -> jax.Array:
        """Returns a kernel as the matrices that these rows are multiplied by."""
        x = x.transpose(self.axes.rhs_spec)
        rows = x.reshape(self.groups, x.shape[0] // self.groups, -1)
        return rows[0] if self.groups == 1 else rows


@dataclasses.dataclass(frozen=True)
class ObservedSite:
    """What an observer is told of a contraction, and of the operand of it that it looks at.

    Axes are those of this operand, in one step of the loops around the site. An axis of a
    convolution along which the kernel slides is neither contracted nor kept.

    Attributes:
      path: key path of its weight, or its name scope, as the plan has it.
      op: `dot_general`, `conv_general_dilated`, `ragged_dot` or `gather`.
      side: which operand: `lhs`, `rhs`, or `out` for the result.
      role: what it is: `activation`, `weight` or `result`.
      has_weight: whether an operand of the contraction is a weight.
      contracted: the axes that are summed over, in the order in which they meet those of the other
        operand.
      kept: the axes that the result has, those of `batch` among them.
      batch: the axes along which each array of a stack meets another one, in the order of the
        contraction: experts, for example.
      spec: how the plan quantizes the operand, its granularity absolute; `None` for float.
      channels: of a result beside a weight, the axes that the weight makes; of an operand none.
      patches: of a convolution, how it takes patches; `None` for all else.
      experts: of a `ragged_dot`, how many matrices there are; `None` for all else.
      sizes: of a `ragged_dot`, how many rows are multiplied by each of them, int32; only where an
        operand is observed.
      weights: how much each element of the operand counts, for an observer that has a `weight`:
        float32, of its rank, size 1 where all along an axis count alike; `None` where all count 1,
        and where no operand is observed.
    """

    path: str
    op: str
    side: Literal["lhs", "rhs", "out"]
    role: Literal["activation", "weight", "result"]
    has_weight: bool
    contracted: Axes
    kept: Axes
    batch: Axes
    spec: QSpec | None
    channels: Axes = ()
    patches: Patches | None = None
    experts: int | None = None
    sizes: jax.Array | None = dataclasses.field(default=None, compare=False)
    weights: jax.Array | None = dataclasses.field(default=None, compare=False)

    def reduced(self, rank: int) -> Axes:
        """Returns the axes that a statistic of each channel is taken over: those of an operand of
        that rank that are neither contracted nor of `batch`.
        """
        own = {*self.contracted, *self.batch}
        return tuple(axis for axis in range(rank) if axis not in own)

    def rows(self, x: jax.Array) -> jax.Array:
        """Returns the operand as rows of what is contracted: `[*batch, rows, channels]`, several
        contracted axes as one, the last the fastest. Of a convolution the rows are patches, its
        groups are a batch, and the taps of the kernel are the fastest.
        """
        if self.patches is not None:
            of = self.patches.of_image if self.side == "lhs" else self.patches.of_kernel
            return of(x)
        reduced = self.reduced(x.ndim)
        count, size = (
            math.prod(x.shape[axis] for axis in axes) for axes in (reduced, self.contracted)
        )
        stack = tuple(x.shape[axis] for axis in self.batch)
        return x.transpose(*self.batch, *reduced, *self.contracted).reshape(*stack, count, size)

    def row_weights(self, x: jax.Array) -> jax.Array | None:
        """Returns how much each of the rows counts, `[*batch, rows]`: as much as that element of it
        which counts most; `None` where all count 1.
        """
        if self.weights is None:
            return None
        return self.rows(jnp.broadcast_to(self.weights, x.shape)).max(-1, initial=0)

    def expert_of_rows(self, count: int) -> jax.Array:
        """Returns which matrix of a `ragged_dot` each row of the operand is multiplied by, int32;
        the number of matrices where it is none.
        """
        assert self.sizes is not None
        ends = jnp.cumsum(self.sizes)
        return jnp.sum(lax.iota(ends.dtype, count)[:, None] >= ends[None], axis=1, dtype=jnp.int32)


class Observer(abc.ABC):
    """A frozen, hashable value that says which statistic of an operand a site records.

    Its statistics are a pytree of arrays and form a monoid: `merge` is associative and `empty` its
    unit, so batches, steps of loops, branches and devices may be combined in any grouping. `empty`,
    `observe` and `merge` give one structure, with the same shapes and dtypes, that do not depend on
    the size of a batch. All three are traced, also under `jax.vmap`.

    `str(observer)` names it in the statistics: `stats["layer0/w:dot_general:lhs@hessian"]`. By
    default that is the name of its class in lower case; one with parameters shows them there.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> class Largest(jqx.observers.Observer):
      ...     def empty(self, operand, site):
      ...         return jnp.zeros(())
      ...
      ...     def observe(self, x, site):
      ...         return jnp.abs(x).max(initial=0)
      ...
      ...     def merge(self, a, b):
      ...         return jnp.maximum(a, b)
      >>> f = lambda w, x: x @ w
      >>> w, x = jnp.eye(2), jnp.array([[1.0, -3.0]])
      >>> plan = jqx.make_plan(f, jqx.presets.w8a16())(w, x)
      >>> _, stats = jqx.calibrate(f, plan, observers={".*": Largest()})(w, x)
      >>> stats
      {':dot_general:lhs@largest': Array(3., dtype=float32)}

    Attributes:
      weight: a function of the arguments of the function that is calibrated, less its parameters,
        that says how much rows count; `site.weights` has it where an operand is observed. `None`:
        all count 1.
    """

    weight: ClassVar[Weight | None] = None

    def looks_at(self, site: ObservedSite) -> bool:
        """Whether it records the statistic of an operand: by default of activations that a weight
        is multiplied by.
        """
        return site.role == "activation" and site.has_weight

    @abc.abstractmethod
    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> Any:
        """Returns the statistics of no values, for an operand of that shape and dtype."""

    @abc.abstractmethod
    def observe(self, x: jax.Array, site: ObservedSite) -> Any:
        """Returns the statistics of one operand: in float, of its own dtype."""

    @abc.abstractmethod
    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both."""

    def __str__(self) -> str:
        return type(self).__name__.lower()
