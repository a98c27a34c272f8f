"""The interface of an observer: which statistic of an operand a site records."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import export, lax

from .._checks import as_count
from ..tensor import QSpec

T = TypeVar("T")
Axes = tuple[int, ...]

Weight = Callable[..., Any]
"""Maps the arguments of a function, without its parameters, to the weights of its rows."""


def serializable(cls: type[T]) -> type[T]:
    """Lets `jax.export` serialize functions that take or return this NamedTuple."""
    name = f"jqx.observers.{cls.__name__}"
    return export.register_namedtuple_serialization(cls, serialized_name=name)


class Patches(NamedTuple):
    """How a convolution takes patches of an image.

    Attributes:
      kernel: sizes of the kernel along the spatial axes.
      strides: stride of the kernel along each spatial axis.
      padding: (low, high) along each spatial axis.
      lhs_dilation: dilation of the image along each spatial axis.
      rhs_dilation: dilation of the kernel along each spatial axis.
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
        """Returns the patches of an image as rows, [groups, rows, channels x taps]; without the
        first axis if there is one group.
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
        """Returns a kernel as the matrices that multiply these rows."""
        x = x.transpose(self.axes.rhs_spec)
        rows = x.reshape(self.groups, x.shape[0] // self.groups, -1)
        return rows[0] if self.groups == 1 else rows


@dataclasses.dataclass(frozen=True)
class ObservedSite:
    """What an observer knows about a contraction and about the operand that it observes.

    Axes are those of this operand, in one step of the loops around the site. An axis of a
    convolution along which the kernel slides is neither contracted nor kept.

    Attributes:
      path: key path of its weight, or its name scope, as in the plan.
      op: `dot_general`, `conv_general_dilated`, `ragged_dot` or `gather`.
      side: which operand: `lhs`, `rhs`, or `out` for the result.
      role: `activation`, `weight` or `result`.
      has_weight: whether an operand of the contraction is a weight.
      contracted: the axes that are summed over, paired in order with those of the other operand.
      kept: the axes that the result keeps, including those of `batch`.
      batch: the batch axes, in the order of the contraction; for example an axis of experts. Along
        them each array of a stack is contracted with one array of the other operand.
      spec: how the plan quantizes the operand, with absolute granularity; `None` for float.
      channels: for a result of a contraction with a weight, the axes that come from the weight;
        empty for an operand.
      patches: for a convolution, how it takes patches; otherwise `None`.
      experts: for a `ragged_dot`, the number of matrices; otherwise `None`.
      sizes: for a `ragged_dot`, the number of rows that each matrix multiplies, int32; given only
        while an operand is observed.
      weights: how much each element of the operand counts, for an observer that has a `weight`:
        float32, with the rank of the operand, and size 1 along an axis whose elements all count the
        same. `None` if all count 1, and while no operand is observed. With `on_nonfinite="ignore"`
        all observers have weights, and a row that is not finite has the weight -1, and holds 0.
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
        """Returns the axes over which a statistic of each channel is taken: those of an operand of
        this rank that are neither contracted nor in `batch`.
        """
        own = {*self.contracted, *self.batch}
        return tuple(axis for axis in range(rank) if axis not in own)

    def rows(self, x: jax.Array) -> jax.Array:
        """Returns the operand as rows of contracted values: `[*batch, rows, channels]`. Several
        contracted axes are flattened into one, with the last axis fastest. For a convolution the
        rows are patches, its groups are a batch, and the taps of the kernel are fastest.
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
        """Returns how much each row counts, `[*batch, rows]`: as much as the element of the row
        that counts most, but 0 for a patch with a pixel that is not finite; `None` if all count 1.
        """
        if self.weights is None:
            return None
        own = self.rows(jnp.broadcast_to(self.weights, x.shape))
        most = own.max(-1, initial=0)
        return most if self.patches is None else jnp.where(own.min(-1, initial=0) < 0, 0, most)

    def expert_of_rows(self, count: int) -> jax.Array:
        """Returns which matrix of a `ragged_dot` multiplies each row of the operand, int32; the
        number of matrices for a row that none multiplies.
        """
        assert self.sizes is not None
        ends = jnp.cumsum(as_count(self.sizes, count))
        return jnp.sum(lax.iota(ends.dtype, count)[:, None] >= ends[None], axis=1, dtype=jnp.int32)


class Observer(abc.ABC):
    """A frozen, hashable value that specifies which statistic of an operand a site records.

    Its statistics are a pytree of arrays and form a monoid: `merge` is associative and `empty` is
    its unit. So batches, steps of loops, branches and devices can be combined in any grouping.
    `empty`, `observe` and `merge` return the same structure, with the same shapes and dtypes, which
    do not depend on the size of a batch. All three are traced, also under `jax.vmap`.

    `str(observer)` names it in the statistics: `stats["layer0/w:dot_general:lhs@hessian"]`. By
    default it is the name of the class in lower case. An observer with parameters should show them.

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
      weight: a function of the arguments of the calibrated function, without its parameters, that
        returns how much rows count. While an operand is observed, `site.weights` holds the result.
        `None`: all rows count 1.
    """

    weight: ClassVar[Weight | None] = None

    def looks_at(self, site: ObservedSite) -> bool:
        """Whether the observer records the operand: by default any activation that is multiplied by
        a weight.
        """
        return site.role == "activation" and site.has_weight

    @abc.abstractmethod
    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> Any:
        """Returns the statistics of no values, for an operand of this shape and dtype."""

    @abc.abstractmethod
    def observe(self, x: jax.Array, site: ObservedSite) -> Any:
        """Returns the statistics of one operand, given in float in its own dtype."""

    @abc.abstractmethod
    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both."""

    def __str__(self) -> str:
        return type(self).__name__.lower()
