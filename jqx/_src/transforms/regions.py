"""Regions of a converted function that one kernel of jqx-cpu computes: products of codes with
weights laid out for it, batches of products of floats or codes as in attention, and what is
computed of each row between them.

Rows are what lies along one axis: the last one of the first product. While equations are evaluated
in their order, those that compute each row from the same row of their operands are recorded, from
the first product on; the other axes may change their order. Equations that read recorded rows in
another way wait, so that more products of the same rows are recorded. The region ends where a
product reads the result of what waits, or at the end of the function: then all recorded values that
are still needed are computed, and what waits after them.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat, package_cpu
from ..compat import Eqn
from ..contractions.formulation import is_using
from ..contractions.kernels_cpu import are_float_batches
from ..contractions.problem import Product
from ..contractions.rows import are_multiplied, is_multiplied
from ..numerics.lookup import format_of
from ..numerics.runtimes import RoundMode, ngraph
from ..statistics.calibrators import Affine, absmax
from ..tensor.layout import is_flipped
from ..tensor.qtensor import QTensor
from ..tensor.spec import QSpec
from .recorded import BatchSite, Later, RecordedRows, Row, WeightSite, is_float, type_of_codes
from .rules import float_how
from .views import is_coded

FEW = 16
"""Rows from which on a region is faster than its products one by one, whose columns several threads
share.
"""

FEW_OF_FLOATS = 32
"""The same of products of floats."""

MANY = 2**18
"""Products of numbers from which on batches of products are recorded."""


class Recorder:
    """Records the equations of a function that are computed in regions."""

    def __init__(self) -> None:
        self._region: RecordedRows | None = None
        self._waiting: list[tuple[Sequence[Any], Any, list[Later]]] = []

    def site(
        self,
        eqn: Eqn,
        operands: Sequence[Any],
        scope: AbstractContextManager[Any],
        spec: QSpec,
        affine: Affine | None,
        evaluate: Callable[..., jax.Array],
    ) -> list[Any] | None:
        """Records a product of an activation, which is quantized by a spec, and a weight; returns
        `None` if it is not recorded. `scope` is its name scope, and `evaluate` computes it from
        both operands and the given scale.
        """
        (_, right), _ = eqn.params["dimension_numbers"]
        x, weight, shape = _computed(operands[0]), operands[1], eqn.invars[0].aval.shape
        if is_coded(x) or not _are_rows(eqn, FEW):
            return None
        if not _quantizes(shape, spec, affine, weight, right[0]):
            return None
        region, x = self._of_rows(x, shape[:-1])
        note = WeightSite(scope, ((spec, affine),), evaluate, weight, right[0])
        return region.recorded(eqn, [x, weight], note)

    def batches(
        self,
        eqn: Eqn,
        operands: Sequence[Any],
        scope: AbstractContextManager[Any],
        quantized: Sequence[tuple[QSpec, Affine | None]],
        evaluate: Callable[..., jax.Array],
    ) -> list[Any] | None:
        """Records a product of two activations, each quantized by a spec and a given scale, as in
        attention; returns `None` if it is not recorded. `evaluate` computes it from both operands
        and their scales.
        """
        if any(map(is_coded, operands)) or not _are_quantized(eqn, quantized):
            return None
        operands = list(map(_computed, operands))
        note = BatchSite(scope, tuple(quantized), evaluate)
        results = self._in_region(eqn, operands, note)
        return self._begun(eqn, operands, note) if results is None else results

    def equation(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any] | None:
        """Records an equation that is no site; returns `None` if it is not recorded."""
        if not eqn.outvars or compat.is_explicit(eqn) or any(map(is_coded, operands)):
            return None
        operands = list(map(_computed, operands))
        results = self._in_region(eqn, operands)
        if results is not None or eqn.primitive.name != "dot_general":
            return results
        if _are_rows(eqn, FEW_OF_FLOATS) and eqn.invars[1].aval.ndim == 2:
            region, x = self._of_rows(operands[0], eqn.invars[0].aval.shape[:-1])
            return region.recorded(eqn, [x, _computed(operands[1])])
        return self._begun(eqn, operands)

    def _in_region(
        self, eqn: Eqn, operands: list[Any], note: BatchSite | None = None
    ) -> list[Any] | None:
        """Records an equation of rows in their region."""
        if self._region is None or not any(isinstance(x, Row) for x in operands):
            return None
        return self._region.recorded(eqn, operands, note)

    def _begun(
        self, eqn: Eqn, operands: list[Any], note: BatchSite | None = None
    ) -> list[Any] | None:
        """Records a large product of batches as the first one of a region."""
        if not _are_batches(eqn):
            return None
        self.end()
        self._region = RecordedRows(eqn.outvars[0].aval.shape[:-1])
        return self._region.recorded(eqn, list(map(_computed, operands)), note)

    def _of_rows(self, x: Any, lead: tuple[int, ...]) -> tuple[RecordedRows, Any]:
        """Returns the region of an operand with rows along its last axis, and the operand."""
        if _is_later(x) and not isinstance(x, Row):
            self.end()
        x = _computed(x)
        if self._region is None or not self._region.has_rows(x, lead):
            self.end()
            self._region = RecordedRows(lead)
        return self._region, _computed(x)

    def wait(
        self, eqn: Eqn, operands: Sequence[Any], evaluate: Callable[[list[Any]], list[Any]]
    ) -> list[Any] | None:
        """Lets an equation wait if it reads what is not computed yet; returns `None` if not."""
        if eqn.effects or not any(map(_is_later, operands)):
            return None
        results = [Later() for _ in eqn.outvars]
        self._waiting.append((operands, evaluate, results))
        return list(results)

    def settled(self, operands: Sequence[Any]) -> list[Any]:
        """Returns operands as arrays. The region ends if one of them is not computed yet."""
        if any(map(_is_later, operands)):
            self.end()
        return list(map(_computed, operands))

    def end(self) -> None:
        """Computes the recorded rows that are still needed, and evaluates what waits for them."""
        region, self._region = self._region, None
        waiting, self._waiting = self._waiting, []
        if region is not None:
            region.compute()
        for operands, evaluate, results in waiting:
            arrays = evaluate(list(map(_computed, operands)))
            for result, array in zip(results, arrays, strict=True):
                result.array = array


def recorder() -> Recorder | None:
    """Returns what records regions, if jqx-cpu is installed and JAX runs on CPUs, unless the user
    has given other formulations of products.
    """
    is_used = package_cpu.is_installed() and jax.default_backend() == "cpu"
    has_others = any(map(is_using, ("dot_general", "dot_general:float")))
    return Recorder() if is_used and not has_others else None


def _is_later(x: Any) -> bool:
    return isinstance(x, Later) and x.array is None


def _computed(x: Any) -> Any:
    return x if not isinstance(x, Later) or x.array is None else x.array


def _are_rows(eqn: Eqn, few: int) -> bool:
    """Whether an equation is a product of so many rows of float32, along the last axis, and of what
    they all meet.
    """
    (left, right), batch = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    is_of_rows = tuple(left) == (len(shape) - 1,) and batch == ((), ()) and len(right) == 1
    if not is_of_rows or not all(map(is_float, (eqn.invars[0].aval, eqn.outvars[0].aval))):
        return False
    return all(isinstance(n, int) for n in shape) and math.prod(shape[:-1]) >= few


def _are_batches(eqn: Eqn) -> bool:
    """Whether an equation is a large product of two batches of matrices of float32."""
    lhs, rhs = (atom.aval for atom in eqn.invars)
    case = Product(lhs, rhs, float_how(eqn))
    (left, _), (batch, _) = eqn.params["dimension_numbers"]
    return len(left) == 1 and rhs.ndim == len(batch) + 2 and are_float_batches(case, MANY)


def _quantizes(
    shape: tuple[int, ...], spec: QSpec, affine: Affine | None, weight: Any, axis: int
) -> bool:
    """Whether the kernel computes the codes of an activation, and multiplies them by a weight."""
    if not isinstance(weight, QTensor):
        return False
    codes = _codes_by_kernel(shape, len(shape) - 1, spec, affine)
    return codes is not None and is_multiplied(codes, weight, axis)


def _are_quantized(eqn: Eqn, quantized: Sequence[tuple[QSpec, Affine | None]]) -> bool:
    """Whether the kernel computes the codes of one operand of a product, rows, and multiplies them
    by those of the other one, which are all computed before.
    """
    contracting, _ = eqn.params["dimension_numbers"]
    if not all(is_float(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
        return False
    shapes = [atom.aval.shape for atom in eqn.invars]
    if len(contracting[0]) != 1 or not all(isinstance(n, int) for s in shapes for n in s):
        return False
    x, y = (
        _codes_by_kernel(shape, axis, *by)
        for shape, (axis,), by in zip(shapes, contracting, quantized, strict=True)
    )
    if x is None or y is None:
        return False
    return are_multiplied(x, y, shapes[0][contracting[0][0]])


def _codes_by_kernel(
    shape: tuple[int, ...], axis: int, spec: QSpec, affine: Affine | None
) -> QTensor | None:
    """Returns the types of the codes of an array, if the kernel computes them as a spec does: by
    one given scale, or by the largest magnitude of each row, which lies along an axis.
    """
    is_plain = spec.numerics == ngraph and spec.rounding is RoundMode.NEAREST_TOWARD_EVEN
    flipped = is_flipped(format_of(spec.qtype))
    if affine is None:
        is_known = spec.calibrator == absmax and spec.symmetric and not flipped
    else:
        is_known = affine.scale.size == 1 and affine.scale.dtype == jnp.float32
        is_known = is_known and (affine.zero_point is not None or not flipped)
    if not (is_plain and is_known):
        return None
    codes = type_of_codes(shape, spec, affine)
    one_each = tuple(1 if i == axis else n for i, n in enumerate(shape))
    return codes if affine is not None or codes.scale.shape == one_each else None
