"""The accumulators of planned contractions: bounds of the sums of integer codes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.lax import ConvDimensionNumbers

from ... import QSpec, QTensor, per_tensor
from ...calibrators import Affine
from ...extend import Site
from ...numerics import Block, Integer, format_of
from ..compat import Eqn
from ..contractions.problem import INT32_MAX
from ..ops.affine import affine_dequantize, affine_quantize
from ..transforms.rules import CONTRACTIONS
from ..transforms.views import Address
from .intervals import ANY, Interval, contract, least, limits, most, of_value, wide

_DTYPES = (8, 16, 32, 64)

Ends = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Bounds of the sums of one site, over all its channels and layers.

    Attributes:
      path: path of its weight, or its name scope.
      op: the operation.
      lhs: the smallest and the largest code of the left operand, less its zero point; `None` if it
        is in float.
      rhs: the same of the right operand.
      products: number of products summed in integers: those of a block, if scales are in blocks.
      sums: the smallest and the largest sum; `None` if the site does not sum integers.
      how: how jqx computes the sums.
      label: what tables call it; if empty, its path.
    """

    path: str
    op: str
    lhs: Ends | None
    rhs: Ends | None
    products: int
    sums: Ends | None
    how: str
    label: str = ""

    @property
    def bits(self) -> int | None:
        """Bits that the sums take in two's complement."""
        if self.sums is None:
            return None
        return 1 + max((x if x >= 0 else ~x).bit_length() for x in self.sums)

    @property
    def dtype(self) -> str | None:
        """The smallest integer dtype that holds the sums."""
        if self.bits is None:
            return None
        return next((f"int{n}" for n in _DTYPES if self.bits <= n), "more than int64")

    @property
    def used(self) -> float | None:
        """The share of the range of int32 that the sums use; above 1 they overflow it."""
        if self.sums is None:
            return None
        low, high = limits(jnp.int32)
        return max(self.sums[0] / low, self.sums[1] / high, 0.0)

    def merge(self, accumulator: "Accumulator") -> "Accumulator":
        """Returns the union of both, for two steps of a loop."""

        def joined(a: Ends | None, b: Ends | None) -> Ends | None:
            return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))

        lhs, rhs = joined(self.lhs, accumulator.lhs), joined(self.rhs, accumulator.rhs)
        return dataclasses.replace(self, lhs=lhs, rhs=rhs, sums=joined(self.sums, accumulator.sums))


class _Operand(NamedTuple):
    """An operand as used by a site.

    Attributes:
      real: the real values of its codes.
      codes: the codes less their zero points; `None` if they are not integers.
      sizes: number of elements along each axis that share a scale.
      possible: the possible codes of its format, less any zero point.
    """

    real: Interval
    codes: Interval | None
    sizes: Sequence[int]
    possible: Interval | None


def at_site(
    site: Site,
    eqn: Eqn,
    xs: Sequence[Interval],
    affines: Mapping[str, Affine],
    accumulators: dict[Address, Accumulator],
) -> list[Interval]:
    """Records the accumulator of a site, and returns its operands as used by the site."""
    operands = [
        _operand(operand.spec, operand.role == "weight", affines.get(operand.key), x, v.aval)
        for operand, x, v in zip(site.operands, xs, eqn.invars, strict=False)
    ]
    row = _accumulator(site, eqn, operands)
    old = accumulators.get(site.address)
    accumulators[site.address] = row if old is None else old.merge(row)
    return [*(s.real for s in operands), *xs[len(operands) :]]


def of_output(site: Site, x: Interval, affines: Mapping[str, Affine], aval: Any) -> Interval:
    """Returns the result of a site after its quantization."""
    return _operand(site.output, False, affines.get(site.output_key), x, aval).real


def _accumulator(site: Site, eqn: Eqn, operands: Sequence[_Operand]) -> Accumulator:
    lhs, rhs = operands[0], operands[-1]
    ends = [None if s.codes is None else (s.codes.low, s.codes.high) for s in (lhs, rhs)]
    if len(operands) == 1:
        return Accumulator(site.path, site.op, ends[0], None, 0, None, "lookup", site.label)
    axes = (axes.contracted for axes in CONTRACTIONS[eqn.primitive.name].axes(eqn))
    sizes = [_size(lhs, rhs, i, j, eqn) for i, j in zip(*axes, strict=True)]
    products = math.prod(sizes)
    row = Accumulator(site.path, site.op, ends[0], ends[1], products, None, "float", site.label)
    if lhs.codes is None or rhs.codes is None or lhs.possible is None or rhs.possible is None:
        return row
    sums = contract(eqn, lhs.codes, rhs.codes, sizes)
    how = _how(lhs.possible.largest, rhs.possible.largest, row.products)
    return dataclasses.replace(row, sums=(int(sums.low), int(sums.high)), how=how)


def _how(lhs: int, rhs: int, products: int) -> str:
    """Returns how jqx sums products of codes with these magnitudes."""
    if max(lhs, rhs) > 2**16:
        return "refused"
    parts = math.ceil(products * lhs * rhs / INT32_MAX)
    if max(lhs, rhs) > 2**8:
        return "int8 digits, int32" if parts <= 1 else "int8 digits, float32"
    return "int32" if parts <= 1 else f"int32 in {parts} parts, float32"


def _size(lhs: _Operand, rhs: _Operand, i: int, j: int, eqn: Eqn) -> int:
    """Returns how many elements along a pair of axes are summed before a scale changes."""
    n, numbers = eqn.invars[1].aval.shape[j], eqn.params.get("dimension_numbers")
    spatial = isinstance(numbers, ConvDimensionNumbers) and i in numbers.lhs_spec[2:]
    left = n if spatial else lhs.sizes[i]
    return math.gcd(*(size for size in (left, rhs.sizes[j]) if 0 < size < n)) or n


def _operand(
    spec: QSpec | None, is_weight: bool, affine: Affine | None, x: Interval, aval: Any
) -> _Operand:
    if is_weight and x.codes is not None:
        q = x.codes
        possible = _all_codes(q.qtype, q.zero_point is None)
        return _Operand(x, _less_zero_points(q), q.groups.sizes, possible)
    if spec is None:
        return _Operand(x, None, aval.shape, None)
    possible = _all_codes(spec.qtype, spec.symmetric)
    if is_weight:
        return _Operand(x, possible, aval.shape, possible)
    sizes = spec.granularity.groups(aval.shape).sizes
    if affine is not None and not isinstance(spec.qtype, Block):
        real, codes = _static(x, spec, Affine(*affine), aval.dtype)
        return _Operand(real, codes, sizes, possible)
    return _Operand(_near(x, spec), _all_codes(spec.qtype, spec.symmetric, x), sizes, possible)


def _less_zero_points(q: QTensor) -> Interval | None:
    """Returns the codes of a weight, each less its zero point, if they are integers."""
    form = format_of(q.qtype)
    if not isinstance(form, Integer):
        return None
    if form.bits > 16:
        return Interval(int(form.low) - int(form.high), int(form.high) - int(form.low))
    unscaled = dataclasses.replace(q, scale=jnp.ones(q.scale.shape), dtype=jnp.float32)
    return of_value(unscaled.dequantize().astype(jnp.int32))


def _all_codes(qtype: Any, symmetric: bool, x: Interval = ANY) -> Interval | None:
    """Returns the codes less zero points that a dynamic scale may give: they have the signs of the
    values.
    """
    form = format_of(qtype)
    if not isinstance(form, Integer):
        return None
    low, high = int(form.low), int(form.high)
    if not symmetric:
        low, high = low - high, high - low
    return Interval(low if x.low < 0 else 0, high if x.high > 0 else 0)


def _static(
    x: Interval, spec: QSpec, affine: Affine, dtype: Any
) -> tuple[Interval, Interval | None]:
    """Returns the values and the codes less zero points at a given scale; both rise with `x`."""
    scale, zero = affine
    options = {"round_mode": spec.rounding, "numerics": spec.numerics}
    codes = [
        affine_quantize(jnp.full(scale.shape, x, dtype), scale, zero, qtype=spec.qtype, **options)
        for x in (x.low, x.high)
    ]
    reals = (affine_dequantize(q, scale, zero, qtype=spec.qtype, dtype=dtype) for q in codes)
    offset = 0 if zero is None else wide(zero)
    real, less = (
        Interval(least(low), most(high))
        for low, high in (map(wide, reals), (wide(q) - offset for q in codes))
    )
    return real, less if isinstance(format_of(spec.qtype), Integer) else None


def _near(x: Interval, spec: QSpec) -> Interval:
    """Returns the interval of values rounded at a dynamic scale: at most one step further out, for
    the scale of the largest value; twice as far in formats that are not uniform.
    """
    if not isinstance(format_of(spec.qtype), Integer) or math.isinf(x.largest):
        return Interval(2 * min(x.low, 0.0), 2 * max(x.high, 0.0))
    ends = jnp.asarray([-x.largest, x.largest], jnp.float32)
    one_scale = dataclasses.replace(spec, granularity=per_tensor())
    step = float(QTensor.quantize(ends, one_scale).real_scale().max())
    return Interval(
        x.low - step if x.low < 0 else 0.0,
        x.high + step if x.high > 0 else 0.0,
    )
