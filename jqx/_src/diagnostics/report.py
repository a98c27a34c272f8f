"""`report`: the effect of a plan on the weights, in numbers; colours and names that pictures and
pages share.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ... import Plan, QTensor, RoundMode, quantize_params
from ...calibrators import Affine
from ...extend import QType, Site
from ...numerics import format_of
from ..checks import added, as_real, called, check_instance
from ..errors import fail, some
from ..table import Table, Tabular, decibels
from ..tensor.layout import permuted_axis, taken
from ..tensor.segments import read
from ..transforms.arguments import check_concrete, check_plan
from ..transforms.paths import by_argument
from ..transforms.quantize_params import named_leaves
from ..transforms.trace import is_array, is_quantized


@dataclasses.dataclass(frozen=True)
class WeightError:
    """The effect of quantization on one weight.

    Attributes:
      path: path of the weight.
      scheme: its format, and which elements share a scale.
      bits: bits per weight, including scales and zero points, if codes are packed.
      bytes_before: bytes of the float array.
      bytes_after: bytes of the QTensor in its current layout; an unpacked int4 code takes one byte.
      low: the smallest of the float values; NaN if one is NaN or there are none.
      high: the largest of them, or NaN as in `low`.
      clipped: share of the elements that are outside the range of their group by more than half a
        step; infinities count, NaN does not.
      dead: number of groups that dequantize to zeros: their scale is 0, or all their codes.
      sqnr: signal-to-noise ratio, `10 log10(sum x**2 / sum (x - q)**2)`, in decibels; inf if the
        two are equal, -inf if there is only noise, NaN if `x` or `q` are not all finite.
      size: number of elements; 0 if a file of an older release does not say.
    """

    path: str
    scheme: str
    bits: float
    bytes_before: int
    bytes_after: int
    low: float
    high: float
    clipped: float
    dead: int
    sqnr: float
    size: int = added(0)

    @property
    def bytes_packed(self) -> int:
        """Bytes with codes packed, as `jqx.save` writes them."""
        return math.ceil(round(self.bits * self.size) / 8) if self.size else self.bytes_after


@dataclasses.dataclass(frozen=True)
class Report(Tabular):
    """The result of `report`. Prints as a table, also in a notebook.

    Attributes:
      weights: the effect of quantization on each weight, in the order of the plan.
      kept: bytes of the parameters that are not quantized.
      sites: number of contractions that are quantized.
      skipped: number of contractions that are not.
      macs: share of the multiply-adds that is quantized; NaN if a size was symbolic.
      codes: the algorithm of `jqx.ptq` that chose the codes; empty if it is not known.
    """

    weights: tuple[WeightError, ...]
    kept: int
    sites: int
    skipped: int
    macs: float
    codes: str = added("")

    @property
    def bytes_before(self) -> int:
        """Bytes of all parameters in float."""
        return self.kept + sum(weight.bytes_before for weight in self.weights)

    @property
    def bytes_after(self) -> int:
        """Bytes of all parameters in memory: a code of less than 8 bits takes one if not packed."""
        return self.kept + sum(weight.bytes_after for weight in self.weights)

    @property
    def bytes_packed(self) -> int:
        """Bytes of all parameters with codes packed, as in files of `jqx.save`. (There a zero point
        of less than 8 bits takes a byte; here it is packed too.)
        """
        return self.kept + sum(weight.bytes_packed for weight in self.weights)

    @property
    def faults(self) -> tuple[WeightError, ...]:
        """The weights with clipped values, or with groups in which all codes mean zero."""
        return tuple(weight for weight in self.weights if weight.dead or weight.clipped)

    def table(self) -> Table:
        """Returns the rows as text."""
        rows = [
            (
                w.path or "(argument)",
                w.scheme,
                f"{w.bits:.2f}",
                f"{w.bytes_before:,}",
                f"{w.bytes_after:,}",
                f"{w.low:.3g} to {w.high:.3g}",
                f"{100 * w.clipped:.2g} %" if w.clipped > 0 else "-",
                str(w.dead or "-"),
                decibels(w.sqnr),
            )
            for w in self.weights
        ]
        head = ("path", "scheme", "bits", "bytes", "quantized", "range", "clipped", "dead")
        float_bytes, quantized_bytes = self.bytes_before, self.bytes_after
        footer = f"{float_bytes:,} bytes of parameters become {quantized_bytes:,}"
        footer += f" ({float_bytes / quantized_bytes:.2f} times fewer)" if quantized_bytes else ""
        if 0 < self.bytes_packed < quantized_bytes:
            ratio = f"{float_bytes / self.bytes_packed:.2f}"
            footer += f", with packed codes, as in a file, {self.bytes_packed:,} ({ratio})"
        count = self.sites + self.skipped
        footer += f"; {self.sites} of {count} contractions quantized"
        if not math.isnan(self.macs):
            footer += f", {100 * self.macs:.1f} % of the multiply-adds"
        if self.codes:
            footer += f"\ncodes: {self.codes}"
        return Table((*head, "SQNR dB"), tuple(rows), footer, texts=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict for `json.dumps`; infinite and NaN values are `None`."""
        names = ("bytes_before", "bytes_after", "bytes_packed")
        return super().to_dict() | {name: getattr(self, name) for name in names}


@called("report", "pass the plan first: jqx.report(plan, params).")
def report(plan: Plan, params: Any, affines: Mapping[str, Affine] | None = None) -> Report:
    """Returns the effect of a plan on the weights: format, bits, bytes, range, error.

    Args:
      plan: from `make_plan`.
      params: the float parameters that it was made for; a tuple of arguments if there are several.
        They are quantized here one at a time; `jqx.interop.Lazy` ones are read for that, and then
        dropped.
      affines: scales of weights that were learned, as `quantize_params` takes them; `None` has them
        computed from the weights.

    Raises:
      TypeError: if `plan` is not a `Plan`.
      ValueError: if a parameter is missing, quantized already, or abstract.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> params = {"a": jnp.ones((64, 8)), "b": jnp.zeros((8, 64)), "bias": jnp.zeros(64)}
      >>> f = lambda p, x: (x @ p["a"]) @ p["b"] + p["bias"]
      >>> plan = jqx.make_plan(f, jqx.presets.w8a16())(params, jnp.ones((2, 64)))
      >>> found = jqx.report(plan, params)
      >>> found.bytes_before, found.bytes_after, [w.path for w in found.faults]
      (4352, 1568, ['b'])
    """
    check_plan("report", plan, params, order="report(plan, params)")
    check_concrete("report", params)
    return report_of(plan, params, lambda: quantize_params(params, plan, affines))


def report_of(plan: Plan, params: Any, quantize: Callable[[], Any]) -> Report:
    """Returns the effect of quantization on the weights; `quantize` returns the quantized ones."""
    leaves = _named(plan, params)
    abstract = [path for path, x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    if abstract:
        problem = f"the parameters have no values, only shapes: {some(map(repr, abstract))}."
        fix = "pass float arrays, or print the plan, which needs no values."
        raise fail("report", problem, fix=fix)
    floats, quantized = dict(leaves), dict(_named(plan, quantize()))

    macs = [item.macs for item in (*plan.sites, *plan.skipped)]
    counted = [n for n in macs if n is not None]
    complete = len(counted) == len(macs) and sum(counted) > 0
    return Report(
        weights=tuple(
            measure(read(floats[w.path]), read(quantized[w.path]), w.path) for w in plan.weights
        ),
        kept=sum(x.nbytes for path, x in leaves if plan.weight_at(path) is None),
        sites=len(plan.sites),
        skipped=len(plan.skipped),
        macs=sum(counted[: len(plan.sites)]) / sum(counted) if complete else math.nan,
    )


def _named(plan: Plan, params: Any) -> list[tuple[str | None, Any]]:
    """Returns the leaves of parameters with their paths, which start with the position if there are
    several arguments; `None` for leaves that are not weights.
    """
    named = named_leaves("report", by_argument(plan.params, params), plan)
    return [(path, x) for path, x in named if is_quantized(x) or is_array(x)]


# The effect of quantization on one weight: size, range, clipping, dead groups, noise.
#
# A number is clipped if it is outside the range of its group by more than half of the outermost
# step: then its error is larger than that of rounding alone. So the largest number of a group,
# which determines its scale, is not clipped, whichever way the scale was rounded.

_CHUNK = 1 << 20
"""Number of elements that are summed in float64 at a time."""


_ULPS = 2.0**-20
"""Upper bound of the float32 error of a quotient and a sum, relative to the largest number."""


def measure(x: ArrayLike, q: QTensor, path: str = "") -> WeightError:
    """Returns the effect of quantization on a weight.

    Args:
      x: the float array, of the shape of `q`.
      q: the quantized array.
      path: path of the weight, stored in the result.

    Raises:
      TypeError: if `x` is not floating point, or `q` is not a QTensor.
      ValueError: if their shapes differ.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> from jqx._src.diagnostics.report import measure
      >>> x = jnp.array([[1.0, -127.0], [0.0, 0.0]])
      >>> error = measure(x, jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(0))), "w")
      >>> error.scheme, error.bits, error.dead, error.sqnr
      ('int8 per_axis(0)', 24.0, 1, inf)
    """
    x = as_real("report", "x", x)
    check_instance("report", "q", q, QTensor, fix="pass QTensor.quantize(x, spec).")
    if x.shape != q.shape:
        problem = f"`x` and `q` have different shapes: {x.shape} and {q.shape}."
        raise fail("report", problem, fix="pass the array that q was made from.")
    clipped, dead = _count(x, q, *limits_of(format_of(q.qtype)))
    values = np.asarray(x)
    return WeightError(
        path=path,
        scheme=scheme_of(q),
        bits=bits_of(q) / x.size if x.size else 0.0,
        bytes_before=x.nbytes,
        bytes_after=q.nbytes,
        low=float(values.min()) if x.size else math.nan,
        high=float(values.max()) if x.size else math.nan,
        clipped=_total(clipped) / max(x.size, 1),
        dead=_total(dead) if x.size else 0,
        sqnr=sqnr(values, np.asarray(q.dequantize())),
        size=x.size,
    )


def _total(counts: jax.Array) -> int:
    return int(np.asarray(counts).sum(dtype=np.int64))


@partial(jax.jit, static_argnames=("low", "high"))
def _count(x: jax.Array, q: QTensor, low: float, high: float) -> tuple[Any, Any]:
    """Returns how many elements of each group are clipped, and which groups are dead."""
    groups, y = q.groups, in_steps(x, q)
    outside = groups.join((y < low) | (y > high)).astype(jnp.int32)
    return groups.reduce(jnp.sum, outside, 0), groups.largest_magnitude(q.dequantize()) == 0


def in_steps(x: jax.Array, q: QTensor) -> jax.Array:
    """Returns an array in steps of the scale of a QTensor, relative to its offset and zero point;
    in the order of its values, split into groups.
    """
    groups, scale, offset = q.groups, q.real_scale(), q.real_offset()
    wide = jnp.dtype(jnp.float64 if jnp.float64 in (x.dtype, scale.dtype) else jnp.float32)
    axis = None if q.order is None else permuted_axis(q.order)
    if q.order is not None and axis is not None:
        x = taken(x, q.order, axis)
    y = groups.split(x).astype(wide)
    if offset is not None:
        y -= groups.split_scale(offset).astype(wide)
    y /= groups.split_scale(scale).astype(wide)
    return y if q.zero_point is None else y + groups.split_scale(q.zero_point).astype(wide)


def limits_of(form: QType) -> tuple[float, float]:
    """Returns the range of a format, extended by half of its outermost steps and a few units in the
    last place of float32: rounding a zero point at a tie leaves a number just at half a step.
    """
    slack = _ULPS * max(abs(form.low), abs(form.high))
    if form.uniform:
        return form.low - 0.5 - slack, form.high + 0.5 + slack
    ends = np.array([form.low, form.high], np.float32)
    inside = jnp.asarray(np.nextafter(ends, ends[::-1]))
    above = float(form.round(inside[:1], RoundMode.UP)[0])
    below = float(form.round(inside[1:], RoundMode.DOWN)[0])
    halves = (above - form.low) / 2, (form.high - below) / 2
    return form.low - halves[0] - slack, form.high + halves[1] + slack


def sqnr(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the SQNR of `y` for `x` in decibels; see `WeightError`. Sums are float64."""
    signal = noise = 0.0
    x, y = x.reshape(-1), y.reshape(-1)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, x.size, _CHUNK):
            a = x[start : start + _CHUNK].astype(np.float64)
            b = a - y[start : start + _CHUNK].astype(np.float64)
            signal, noise = signal + float(a @ a), noise + float(b @ b)
    return sqnr_of(signal, noise)


def sqnr_of(signal: float, noise: float) -> float:
    """Returns the SQNR in decibels, from the energies of the values and of their errors."""
    if not math.isfinite(signal + noise):
        return math.nan
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def bits_of(q: QTensor) -> int:
    """Returns the total bits of a QTensor with all codes packed."""
    bits = format_of(q.qtype).bits
    total = bits * q.size
    for part in (q.scale, q.offset, q.order):
        if part is not None:
            total += bits_of(part) if isinstance(part, QTensor) else 8 * part.nbytes
    return total if q.zero_point is None else total + bits * q.zero_point.size


def scheme_of(q: QTensor) -> str:
    """Returns the format of a QTensor, which elements share a scale, and if it has zero points."""
    asymmetric = "" if q.zero_point is None else " asymmetric"
    asymmetric += "" if q.offset is None else " with offsets"
    asymmetric += "" if q.order is None else " permuted"
    return f"{format_of(q.qtype).name} {q.groups}{asymmetric}"


# Short names of formats: those of sites, and those of weights in pictures.

_BLOCK = re.compile(r"per_block\(\{([^}]*)\}\)")


def scheme_of_site(site: Site) -> str:
    """Returns how the operands of a site are quantized: `float x int4 per_group(32)`."""
    return " x ".join(str(operand.spec) if operand.spec else "float" for operand in site.operands)


def short_scheme(scheme: str) -> str:
    """Returns a scheme in which blocks along one axis are groups: `int4 per_group(32)`."""

    def grouped(match: re.Match[str]) -> str:
        sizes = [part.split(":")[1].strip() for part in match[1].split(",") if ":" in part]
        long = [size for size in sizes if size != "1"]
        return f"per_group({long[0]})" if len(long) == 1 else match[0]

    return _BLOCK.sub(grouped, scheme).replace(", tail=True", "")


# Pictures and pages: colours, and the order, common parts and groups of names.

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""The palette of Okabe and Ito, for any kind of colour vision."""

OTHERS = "#8a8a8a"
"""The colour after the last one of the palette, and of parts that are not quantized."""

ACCENT = "#D55E00"
"""The colour of highlights."""

_PARTS = re.compile(r"\d+|\D+")
_COMPONENT = re.compile(r"[/.]?[^/.\[]+|\[[^\]]*\]?|[/.]")


class Group(NamedTuple):
    """Consecutive rows that belong together, such as those of one layer.

    Attributes:
      name: common prefix of their names; empty if there is none.
      start: index of the first row.
      stop: index after the last row.
    """

    name: str
    start: int
    stop: int


def in_model_order(names: Sequence[str]) -> list[int]:
    """Returns the order in which names are shown: the given order, which is that of the model; but
    with numbers in natural order if the names are sorted as text, as JAX sorts the keys of a dict.
    """
    order = list(range(len(names)))
    components = [re.split(r"[/.]", name) for name in names]
    if list(names) == sorted(names) or components == sorted(components):
        return sorted(order, key=lambda i: _natural(names[i]))
    return order


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a key that sorts numbers by their value."""
    components = re.split(r"[/.]", name)
    parts = [part for component in components for part in [*_PARTS.findall(component), ""]]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def shortened(names: Sequence[str]) -> tuple[list[str], str]:
    """Returns names without the first and last components that all share, and these as a pattern.
    It is empty if there is only one name; no name is left empty.
    """
    split = [_COMPONENT.findall(name) for name in names]
    limit = max(0, min(map(len, split)) - 1) if len(split) > 1 else 0
    start = min(limit, _shared(split))
    if start and any(parts[start].strip("/.[]").isdecimal() for parts in split):
        start -= 1  # a number needs the word before it
    end = min(limit - start, _shared([parts[::-1] for parts in split]))
    prefix, suffix = "".join(split[0][:start]), "".join(split[0][len(split[0]) - end :])
    short = [name[len(prefix) : len(name) - len(suffix)].lstrip("/.") for name in names]
    return short, f"{prefix}{'/' * bool(prefix)}…{suffix}" if prefix or suffix else ""


def _shared(names: Sequence[Sequence[str]]) -> int:
    """Returns how many first components all names have in common."""
    same = (len(set(parts)) == 1 for parts in zip(*names, strict=False))
    return sum(itertools.takewhile(bool, same))


def groups_of(names: Sequence[str]) -> list[Group]:
    """Returns names in groups of consecutive names that begin with the same layer, or with the same
    parent if there are no layer numbers.
    """
    groups: list[Group] = []
    for row, name in enumerate(names):
        layer = _group(name)
        if groups and layer and groups[-1].name == layer:
            groups[-1] = groups[-1]._replace(stop=row + 1)
        else:
            groups.append(Group(layer, row, row + 1))
    return groups


def _group(name: str) -> str:
    *parts, leaf_name = _COMPONENT.findall(name) or [""]
    if leaf_name.strip("/.").isdecimal():
        return ""  # a number alone is not a name
    for i, part in enumerate(parts):
        if any(map(str.isdecimal, part)):
            return "".join(parts[: i + 1])
    return "".join(parts)


def within(name: str, group: str) -> str:
    """Returns the rest of a name within its group."""
    return name[len(group) :].lstrip("/.")


def cut(text: str, limit: int = 44) -> str:
    """Returns text of at most `most` characters: the start and end of longer text."""
    if len(text) <= limit:
        return text
    end = 2 * limit // 3
    return f"{text[: limit - 1 - end]}…{text[-end:]}"


def color_of(index: int) -> str:
    """Returns the colour of a kind: of the palette, as long as it has one."""
    return COLORS[index] if index < len(COLORS) else OTHERS
