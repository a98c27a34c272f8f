"""QSpec: how one operand is quantized."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jax.typing import DTypeLike

from .. import calibrators, numerics
from .._added import added
from .._calls import called
from .._checks import check_instance, normalize_axes, shown
from .._errors import fail
from .._treescope import changed_fields
from ..calibrators import Calibrator, Granularity, absmax
from ..calibrators._shared import PerGroup, is_without_blocks, per_axis, per_group, per_tensor
from ..gradients import Gradient, ste
from ..gradients._shared import check_estimator
from ..numerics import Block, Integer, Numerics, QType, format_of, ngraph
from ..numerics._shared import RoundMode, as_qtype
from ..ops._shared import check_round_mode, check_symmetric

_PER_TENSOR = per_tensor()


def _instead(name: str) -> str | None:
    """Returns what to write in place of a field of a spec that does not exist."""
    if name in ("axis", "axes", "ch_axis", "channel_axis", "channelwise_axes"):
        return 'write jqx.QSpec("int8", jqx.per_axis(0)), or jqx.per_channel() in a policy.'
    if name in ("group_size", "block_size", "tile_size", "group", "block"):
        return 'write jqx.QSpec("int4", jqx.per_group(32)).'
    return None


@called(
    "QSpec", 'the format sets the number of bits: jqx.QSpec("int4", jqx.per_group(32)).', _instead
)
@dataclasses.dataclass(frozen=True)
class QSpec:
    """How one operand is quantized: its format, granularity, and how the scale is found.

    Attributes:
      qtype: a number format: a dtype such as `jnp.int8` or `jnp.float8_e4m3fn`, a value of
        `jqx.numerics`, or the name of either, such as `"int4"` or `"nf4"`.
      granularity: which elements share a scale: `jqx.per_tensor()`, `jqx.per_axis(...)`,
        `jqx.per_block(...)`, or, relative to the axes that a contraction keeps,
        `jqx.per_channel()`, `jqx.per_token()` and `jqx.per_group(size)`. `None` means per tensor;
        for a block format, groups of its size.
      symmetric: whether the zero point is zero; only integer formats have zero points.
      calibrator: finds the range, a value of `jqx.calibrators`.
      dynamic: for activations, whether the range is computed from the values in each call.
      round_mode: one of the nine modes; `None` takes that of `numerics`.
      gradient: the gradient estimator for simulated quantization, a value of `jqx.gradients`.
      stacked: axes along which the array is a stack of arrays, for formats whose scales are
        quantized (nvfp4). Each array of the stack then has its own second scale, as if it had been
        quantized alone. Plans find these axes: layers that a scan steps over, batch axes of a
        contraction, the groups of `ragged_dot`.
      numerics: the runtime whose integer arithmetic is followed, a value of `jqx.numerics` such as
        `jqx.numerics.torchao`.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: `symmetric` is True for an unsigned `qtype`, or False for a format without zero
        points; the granularity has another block size than a block format; the estimator does not
        fit the format; `stacked` is given for a format whose scales are not quantized.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.QSpec(jnp.int8, jqx.per_axis(1)).granularity.scale_shape((3, 4))
      (1, 4)
      >>> str(jqx.QSpec(jqx.numerics.mxfp4))
      'mxfp4 per_group(32)'
    """

    qtype: DTypeLike | QType
    granularity: Granularity = None  # type: ignore[assignment]  # resolved below
    symmetric: bool = True
    calibrator: Calibrator = absmax
    dynamic: bool = False
    round_mode: RoundMode | None = None
    gradient: Gradient = ste
    numerics: Numerics = ngraph
    stacked: tuple[int, ...] = added(())

    __treescope_repr__ = changed_fields

    def __post_init__(self) -> None:
        qtype = as_qtype("QSpec", "qtype", self.qtype, "Quantized")
        object.__setattr__(self, "qtype", qtype)
        form = format_of(qtype)
        if self.granularity is None:
            of_blocks = isinstance(form, Block)
            default = per_group(form.size) if of_blocks else _PER_TENSOR
            object.__setattr__(self, "granularity", default)
        if self.round_mode is not None:
            check_round_mode("QSpec", self.round_mode)
        check_estimator("QSpec", self.gradient, uniform=form.uniform)
        _check_granularity(self.granularity)
        for field, kind, package, example in (
            ("calibrator", Calibrator, calibrators, "absmax"),
            ("numerics", Numerics, numerics, "onnx"),
        ):
            value = getattr(self, field)
            fix = f"pass {_of_package(package, value, kind, example)}."
            check_instance("QSpec", field, value, kind, fix=fix)
        if not isinstance(form, Integer) and self.numerics != ngraph:
            raise fail(
                "QSpec",
                "`numerics` applies only to integer formats.",
                given=f"numerics {self.numerics} for {form.name}",
                expected="an integer qtype",
                fix="drop numerics, or pass an integer qtype.",
            )
        for field in ("symmetric", "dynamic"):
            check_instance(
                "QSpec",
                field,
                getattr(self, field),
                bool,
                fix=f"pass {field}=True or {field}=False.",
            )
        check_symmetric("QSpec", qtype, self.symmetric)
        if isinstance(form, Block):
            _check_blocks(form, self.granularity)
        _check_stacked(form, self.stacked)

    @property
    def rounding(self) -> RoundMode:
        """The round mode: the one given, or that of `numerics`."""
        return self.round_mode or self.numerics.round_mode

    def resolve(self, rank: int, kept: Sequence[int], stacked: Sequence[int] = ()) -> "QSpec":
        """Returns the spec of a site, with an absolute granularity, for an array of `rank` axes.
        `kept` are the axes that the contraction keeps, `stacked` the axes of a stack.
        """
        own = {*normalize_axes("QSpec", self.stacked, rank, argument="stacked"), *stacked}
        return dataclasses.replace(
            self,
            granularity=self.granularity.resolve(rank, kept),
            stacked=tuple(sorted(own)) if is_two_level(format_of(self.qtype)) else (),
        )

    def of_second_scale(self, rank: int) -> Granularity:
        """Returns which scales of an array of `rank` axes share a second scale."""
        axes = normalize_axes("QSpec", self.stacked, rank, argument="stacked")
        return per_axis(*axes) if axes else _PER_TENSOR

    def __str__(self) -> str:
        parts = [format_of(self.qtype).name, str(self.granularity)]
        if not self.symmetric:
            parts.append("asymmetric")
        if self.calibrator != absmax:
            parts.append(str(self.calibrator))
        if self.dynamic:
            parts.append("dynamic")
        if self.numerics != ngraph:
            parts.append(str(self.numerics))
        if self.stacked:
            parts.append(f"stacked({', '.join(map(str, self.stacked))})")
        return " ".join(parts)


def is_two_level(form: QType) -> bool:
    """Whether the scales of a format are themselves quantized."""
    return isinstance(form, Block) and form.two_level


def _check_granularity(granularity: Any) -> None:
    """Checks that it is a granularity; the error suggests the one that a name or function means."""
    if callable(getattr(granularity, "groups", None)) and not isinstance(granularity, type):
        return
    name = getattr(granularity, "__name__", granularity)
    known = _BY_NAME.get(re.sub(r"per_?|[^a-z]", "", name.lower())) if isinstance(name, str) else ""
    if type(granularity) is int:
        known = f"jqx.per_group({granularity})"
    raise fail(
        "QSpec",
        "`granularity` is not a granularity.",
        given=f"granularity == {shown(granularity)}"
        if isinstance(granularity, (str, int))
        else f"an object of type {type(granularity).__name__}",
        expected="jqx.per_tensor(), per_channel(), per_token(), per_group(size), per_axis(axis), "
        "per_block({axis: size}), or a value of yours with a method groups",
        fix=f"pass {known or 'for example jqx.per_channel()'}.",
        error=TypeError,
    )


_BY_NAME = {
    "channel": "jqx.per_channel()",
    "token": "jqx.per_token()",
    "tensor": "jqx.per_tensor()",
    "axis": "jqx.per_axis(0), with the axes that have their own scale",
    "group": "jqx.per_group(32), with the size of a group",
    "block": "jqx.per_block({0: 32}), with the sizes of a block",
}
"""What is meant by the name of a granularity."""


def _of_package(package: Any, value: Any, kind: type, example: str) -> str:
    """Returns the value of a package with that name, or an example."""
    named = isinstance(value, str) and isinstance(getattr(package, value, None), kind)
    return f"{package.__name__}.{value}" if named else f"for example {package.__name__}.{example}"


def _check_stacked(form: QType, stacked: Sequence[int]) -> None:
    if not (isinstance(stacked, tuple) and all(type(axis) is int for axis in stacked)):
        raise fail(
            "QSpec",
            "`stacked` does not name axes.",
            given=f"stacked == {stacked!r}",
            expected="a tuple of integers",
            fix="pass for example stacked=(0,).",
            error=TypeError,
        )
    if stacked and not is_two_level(form):
        raise fail(
            "QSpec",
            f"{form.name} has no second scale, so `stacked` has no effect.",
            given=f"stacked == {stacked}",
            expected="a format whose scales are quantized, such as jqx.numerics.nvfp4",
            fix="drop stacked; the granularity sets which axes have their own scale.",
        )


def _check_blocks(form: Block, granularity: Granularity) -> None:
    """Checks the block size, as far as it is known without an array."""
    other = isinstance(granularity, PerGroup) and granularity.size != form.size
    if not (not other and not is_without_blocks(granularity)):
        raise fail(
            "QSpec",
            f"{form.name} has blocks of {form.size} elements.",
            given=f"granularity {granularity}",
            expected=f"per_group({form.size}), or per_block of {form.size} elements",
            fix="leave granularity out, or pass one of these.",
        )
