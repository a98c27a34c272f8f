"""Granularity: which elements share a scale. It resolves to the shape of a scale."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, NoReturn, Protocol

from .._calls import called
from .._checks import check_instance, normalize_axes, shown
from .._errors import fail
from ._arguments import check_group_size, check_integers, check_size_known, check_tail
from ._groups import Groups


class Granularity(Protocol):
    """A frozen, hashable value that specifies which elements share a scale.

    Attributes:
      is_relative: whether it depends on a site, through the axes that a contraction keeps.
    """

    is_relative: ClassVar[bool]

    def resolve(self, rank: int, kept: Sequence[int]) -> "Granularity":
        """Returns the absolute granularity for an operand of this rank that keeps axes `kept`."""
        ...

    def groups(self, shape: Sequence[int]) -> Groups:
        """Returns which elements of an array of `shape` share a scale."""
        ...

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scale of an array of `shape`; both have the same rank."""
        ...


class _ByGroups(abc.ABC):
    """Takes the shape of a scale from the groups."""

    @abc.abstractmethod
    def groups(self, shape: Sequence[int]) -> Groups:
        """Returns which elements of an array of `shape` share a scale."""

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scale of an array of `shape`; both have the same rank."""
        return self.groups(shape).scale_shape


@dataclasses.dataclass(frozen=True)
class PerAxis(_ByGroups):
    """One scale for each index along `axes`, shared along all other axes."""

    is_relative: ClassVar[bool] = False

    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", check_integers("per_axis", "axes", self.axes))

    def resolve(self, rank: int, kept: Sequence[int]) -> "PerAxis":
        """Returns itself with non-negative axes."""
        return PerAxis(normalize_axes("per_axis", self.axes, rank))

    def groups(self, shape: Sequence[int]) -> Groups:
        """Returns blocks of size 1 along `axes`, and of the full axis length along all others."""
        axes = normalize_axes("per_axis", self.axes, len(shape))
        sizes = tuple(1 if i in axes else n for i, n in enumerate(shape))
        return Groups(tuple(shape), sizes)

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
class PerBlock(_ByGroups):
    """One scale for each block, shared along the axes that are not named.

    Attributes:
      sizes: (axis, block size) pairs.
      tail: whether the last block along an axis may be smaller.
    """

    is_relative: ClassVar[bool] = False

    sizes: tuple[tuple[int, int], ...]
    tail: bool = False

    def __post_init__(self) -> None:
        pairs = self.sizes if isinstance(self.sizes, tuple) else (self.sizes,)
        found = tuple(check_integers("per_block", "sizes", pair, count=2) for pair in pairs)
        if not (found and all(1 <= size < 2**31 for _, size in found)):
            raise fail(
                "per_block",
                "there are no blocks." if not found else "a block has no elements.",
                given=f"sizes == {shown(dict(found))}",
                expected="a size of 1 or more for one axis or more",
                fix="pass for example {0: 32}, or use jqx.per_tensor().",
            )
        object.__setattr__(self, "sizes", found)
        check_tail("per_block", self.tail)

    def resolve(self, rank: int, kept: Sequence[int]) -> "PerBlock":
        """Returns itself with non-negative axes."""
        axes = [normalize_axes("per_block", axis, rank)[0] for axis, _ in self.sizes]
        return PerBlock(
            tuple(sorted(zip(axes, (size for _, size in self.sizes), strict=True))), self.tail
        )

    def groups(self, shape: Sequence[int]) -> Groups:
        """Returns the blocks; raises if a size does not divide its axis and there is no tail."""
        sizes = dict(self.resolve(len(shape), ()).sizes)
        if len(sizes) != len(self.sizes):
            raise fail(
                "per_block",
                "an axis is named twice.",
                given=f"{self} for shape {tuple(shape)}",
                expected="each axis once",
                fix="name each axis once, counted from the front or from the end.",
            )
        for axis, size in sizes.items():
            check_size_known("per_block", self, shape, axis, size)
        found = tuple(min(sizes.get(i, n), n) for i, n in enumerate(shape))
        for axis, size in sizes.items():
            _check_divides("per_block", str(self), shape, axis, size, self.tail)
        return Groups(tuple(shape), found)

    def __str__(self) -> str:
        return f"per_block({dict(self.sizes)}{', tail=True' if self.tail else ''})"


@dataclasses.dataclass(frozen=True)
class PerRun(_ByGroups):
    """One scale for each run of `size` elements along `axes`, flattened with the last axis fastest;
    every index of all other axes has its own scales. This is what `per_group` resolves to.

    With a tail a run holds as many whole inner axes as fit: 27 elements of a 3x3 kernel for 32.
    """

    is_relative: ClassVar[bool] = False

    axes: tuple[int, ...]
    size: int
    tail: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", check_integers("per_group", "axes", self.axes))
        object.__setattr__(self, "size", check_group_size(self.size))
        check_tail("per_group", self.tail)

    def resolve(self, rank: int, kept: Sequence[int]) -> "PerRun":
        """Returns itself."""
        return self

    def groups(self, shape: Sequence[int]) -> Groups:
        """Returns the blocks that make up the runs; raises if there are none."""
        sizes, rest = [1] * len(shape), self.size
        for axis in reversed(normalize_axes("per_group", self.axes, len(shape))):
            n = shape[axis]
            check_size_known("per_group", self, shape, axis, rest)
            if n <= rest and (self.tail or n == 0 or rest % n == 0):
                sizes[axis], rest = n, rest // n if n else 1
                continue
            _check_divides("per_group", str(self), shape, axis, rest, self.tail)
            sizes[axis], rest = min(rest, n), 1
        if rest != 1 and not self.tail:
            raise fail(
                "per_group",
                f"axes {self.axes} hold fewer than {self.size} elements.",
                given=f"{self} for shape {tuple(shape)}",
                expected=f"{self.size} elements or more, or tail=True",
                fix="use a smaller group, or pass tail=True.",
            )
        return Groups(tuple(shape), tuple(sizes))

    def __str__(self) -> str:
        return f"per_group({self.size}{', tail=True' if self.tail else ''}) along {self.axes}"


def _check_divides(
    function: str, name: str, shape: Sequence[int], axis: int, size: int, tail: bool
) -> None:
    if not tail and shape[axis] % size != 0:
        raise fail(
            function,
            f"blocks of {size} do not divide axis {axis}.",
            given=f"{name} for shape {tuple(shape)}",
            expected=f"a size that divides {shape[axis]}, or tail=True",
            fix="pass tail=True for a smaller last block, or another size.",
        )


class _Relative:
    """Raises for `groups` and `scale_shape`: the axes come from a contraction."""

    is_relative: ClassVar[bool] = True

    def groups(self, shape: Sequence[int]) -> NoReturn:
        """Raises, because there is no contraction here."""
        self.scale_shape(shape)

    def scale_shape(self, shape: Sequence[int]) -> NoReturn:
        """Raises, because there is no contraction here."""
        name = str(self) if "(" in str(self) else f"{self}()"
        raise fail(
            name.partition("(")[0],
            f"{name} is relative to a contraction and has no meaning outside of one.",
            given=f"an array of shape {tuple(shape)} and no contraction",
            expected="an absolute granularity",
            fix="name the axes that have their own scales: jqx.per_axis(...), or blocks along "
            "axes: jqx.per_block({axis: size}).",
        )


@dataclasses.dataclass(frozen=True)
class PerKeptAxis(_Relative):
    """One scale for each index of every axis that a contraction keeps; resolved at a site."""

    name: str

    def __post_init__(self) -> None:
        fix = "pass for example 'per_channel'."
        check_instance("per_channel", "name", self.name, str, fix=fix)

    def resolve(self, rank: int, kept: Sequence[int]) -> PerAxis:
        """Returns `per_axis` of the kept axes, or `per_tensor` if there are none."""
        axes = normalize_axes(self.name, tuple(kept), rank)
        return PerAxis(axes) if axes else PerTensor()

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class PerGroup(_Relative):
    """`per_channel` with blocks of `size` along the contracted axes; resolved at a site."""

    size: int
    tail: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_group_size(self.size))
        check_tail("per_group", self.tail)

    def resolve(self, rank: int, kept: Sequence[int]) -> PerRun:
        """Returns runs along the axes that are not kept."""
        axes = normalize_axes("per_group", tuple(kept), rank)
        return PerRun(tuple(i for i in range(rank) if i not in axes), self.size, self.tail)

    def __str__(self) -> str:
        return f"per_group({self.size}{', tail=True' if self.tail else ''})"


def is_without_blocks(granularity: Granularity) -> bool:
    """Whether a scale never has blocks, whatever the array."""
    return isinstance(granularity, (PerAxis, PerKeptAxis))


def _axes_instead(name: str) -> str | None:
    """Returns what to write in place of an argument of `per_axis`."""
    return "pass the axes by position: jqx.per_axis(0)." if name.startswith("ax") else None


@called("per_tensor", "it takes no arguments; jqx.per_axis(0) takes axes.")
def per_tensor() -> Granularity:
    """Returns the granularity of one scale for the whole array.

    Example:
      >>> import jqx
      >>> jqx.per_tensor().scale_shape((3, 4))
      (1, 1)
    """
    return PerTensor()


@called("per_axis", "pass the axes by position: jqx.per_axis(0).", _axes_instead)
def per_axis(*axes: int) -> Granularity:
    """Returns the granularity of one scale for each index along `axes`.

    Args:
      *axes: axis numbers, as in NumPy; negative numbers count from the end.

    Raises:
      TypeError: if an axis is not an integer.
      ValueError: if no axis is given; on use, if an array does not have one of them.

    Example:
      >>> import jqx
      >>> jqx.per_axis(-1).scale_shape((3, 4))
      (1, 4)
    """
    if not axes:
        raise fail(
            "per_axis",
            "no axis given.",
            given="per_axis()",
            expected="one axis or more",
            fix="pass the axes that have their own scales, or use jqx.per_tensor().",
        )
    return PerAxis(axes)


@called("per_channel", "it takes no arguments: the axes are those that a contraction keeps.")
def per_channel() -> Granularity:
    """Returns one scale for each index of every axis that a contraction keeps.

    The granularity is relative and is resolved at a site: for `x @ w` it is axis 1 of `w`, for
    `x @ w.T` axis 0. Batch axes of the contraction are kept as well.

    Example:
      >>> import jqx
      >>> jqx.per_channel().resolve(rank=2, kept=(1,)).scale_shape((3, 4))
      (1, 4)
    """
    return PerKeptAxis("per_channel")


@called("per_block", "pass the sizes of a block: jqx.per_block({0: 32}).")
def per_block(sizes: Mapping[int, int], tail: bool = False) -> Granularity:
    """Returns the granularity of one scale for each block.

    Args:
      sizes: the block size along each axis; negative axes count from the end. An axis that is not
        named shares one scale. With size 1 each index of the axis has its own scale.
      tail: whether the last block along an axis may be smaller.

    Raises:
      TypeError: if an axis or a size is not an integer, or `sizes` is not a dict.
      ValueError: if no axis is given, or a size is below 1; on use, if a size does not divide its
        axis and `tail` is False.

    Example:
      >>> import jqx
      >>> jqx.per_block({0: 32, 1: 1}).scale_shape((64, 3))
      (2, 3)
      >>> jqx.per_block({0: 32}, tail=True).scale_shape((100, 3))
      (4, 1)
    """
    check_instance("per_block", "sizes", sizes, Mapping, fix="pass a dict such as {0: 32}.")
    return PerBlock(tuple(sizes.items()), tail)


@called("per_group", "pass the size of a group: jqx.per_group(32).")
def per_group(size: int, tail: bool = False) -> Granularity:
    """Returns `per_channel()` with blocks of `size` along the axes that a contraction sums over.

    The granularity is relative and is resolved at a site: for `x @ w` it has blocks along axis 0 of
    `w`, one row of blocks for each index of axis 1. Several contracted axes are flattened into one,
    with the last axis fastest.

    Args:
      size: number of elements that share a scale.
      tail: whether groups may be smaller: the last group along an axis, and all groups if several
        contracted axes do not divide `size` (27 elements of a 3x3 kernel share a scale for 32).

    Raises:
      TypeError: if `size` is not an integer.
      ValueError: if `size` is below 1; on use, if it does not divide and `tail` is False.

    Example:
      >>> import jqx
      >>> jqx.per_group(32).resolve(rank=2, kept=(1,)).scale_shape((64, 3))
      (2, 3)
    """
    return PerGroup(size, tail)


@called("per_token", "it takes no arguments: the axes are those that a contraction keeps.")
def per_token() -> Granularity:
    """Returns `per_channel()` under the name used for activations: one scale for each token.

    Example:
      >>> import jqx
      >>> jqx.per_token().resolve(rank=3, kept=(0, 1)).scale_shape((2, 5, 8))
      (2, 5, 1)
    """
    return PerKeptAxis("per_token")
