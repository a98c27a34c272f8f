"""Granularity: which elements share a scale. It resolves to a scale shape, then is forgotten."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np

from .._checks import normalize_axes, require_that
from .._errors import message


class Granularity(Protocol):
    """A frozen, hashable value that says which elements share a scale.

    Attributes:
      is_relative: whether it has a meaning only at a site, by the axes a contraction keeps.
    """

    is_relative: ClassVar[bool]

    def resolve(self, rank: int, kept: Sequence[int]) -> "Granularity":
        """Returns the absolute form at a site, for an operand that keeps the axes `kept`."""
        ...

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scale of an array of `shape`: its rank, each dim dividing."""
        ...


@dataclasses.dataclass(frozen=True)
class PerAxis:
    """One scale for each index along `axes`; shared along all other axes."""

    is_relative: ClassVar[bool] = False

    axes: tuple[int, ...] = ()

    def resolve(self, rank: int, kept: Sequence[int]) -> "PerAxis":
        """Returns itself with non-negative axes."""
        return PerAxis(normalize_axes("per_axis", self.axes, rank))

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns `shape` with 1 in place of every axis that is not in `axes`."""
        axes = normalize_axes("per_axis", self.axes, len(shape))
        return tuple(n if i in axes else 1 for i, n in enumerate(shape))

    def __str__(self) -> str:
        return f"per_axis{self.axes}" if len(self.axes) != 1 else f"per_axis({self.axes[0]})"


@dataclasses.dataclass(frozen=True)
class PerTensor(PerAxis):
    """One scale for the whole array: no axis has its own."""

    axes: tuple[int, ...] = dataclasses.field(default=(), init=False)

    def resolve(self, rank: int, kept: Sequence[int]) -> "PerTensor":
        """Returns itself."""
        return self

    def __str__(self) -> str:
        return "per_tensor"


@dataclasses.dataclass(frozen=True)
class PerKeptAxis:
    """One scale for each index of every axis that a contraction keeps; known only at a site."""

    is_relative: ClassVar[bool] = True

    name: str

    def resolve(self, rank: int, kept: Sequence[int]) -> PerAxis:
        """Returns `per_axis` of the kept axes, or `per_tensor` where there are none."""
        axes = normalize_axes(self.name, tuple(kept), rank)
        return PerAxis(axes) if axes else PerTensor()

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Raises: the axes are those of a contraction, and there is none here."""
        raise ValueError(
            message(
                self.name,
                f"{self.name}() is relative to a contraction and has no meaning outside of one.",
                given=f"an array of shape {tuple(shape)} and no contraction",
                expected="an absolute granularity",
                mend="name the axes that have their own scale: jqx.per_axis(...).",
            )
        )

    def __str__(self) -> str:
        return self.name


def per_tensor() -> Granularity:
    """Returns the granularity of one scale for the whole array.

    Example:
      >>> import jqx
      >>> jqx.per_tensor().scale_shape((3, 4))
      (1, 1)
    """
    return PerTensor()


def per_axis(*axes: int) -> Granularity:
    """Returns the granularity of one scale for each index along `axes`.

    Args:
      *axes: axis numbers, as in NumPy; negatives count from the end.

    Raises:
      TypeError: an axis is not an integer.
      ValueError: no axis is given; later, where an array lacks one of them.

    Example:
      >>> import jqx
      >>> jqx.per_axis(-1).scale_shape((3, 4))
      (1, 4)
    """
    require_that(
        all(isinstance(a, (int, np.integer)) and not isinstance(a, bool) for a in axes),
        error=TypeError,
        function="per_axis",
        problem="axes must be integers.",
        given=f"{axes!r}",
        expected="integers, as in per_axis(0) or per_axis(0, 2)",
        mend="pass the axis numbers themselves, not a list.",
    )
    require_that(
        axes,
        error=ValueError,
        function="per_axis",
        problem="no axis given.",
        given="per_axis()",
        expected="one axis or more",
        mend="pass the axes that have their own scale, or use jqx.per_tensor().",
    )
    return PerAxis(tuple(map(int, axes)))


def per_channel() -> Granularity:
    """Returns one scale for each index of every axis that a contraction keeps.

    A relative form, resolved at a site: for `x @ w` it is axis 1 of `w`, for `x @ w.T` axis 0.
    Batch axes of the contraction are kept as well.

    Example:
      >>> import jqx
      >>> jqx.per_channel().resolve(rank=2, kept=(1,)).scale_shape((3, 4))
      (1, 4)
    """
    return PerKeptAxis("per_channel")


def per_token() -> Granularity:
    """Returns `per_channel()` under the name that activations use: one scale for each token.

    Example:
      >>> import jqx
      >>> jqx.per_token().resolve(rank=3, kept=(0, 1)).scale_shape((2, 5, 8))
      (2, 5, 1)
    """
    return PerKeptAxis("per_token")
