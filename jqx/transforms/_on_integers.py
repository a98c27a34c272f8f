"""The rules of `convert`: contractions run on integers."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax

from .. import _compat
from .._compat import Eqn
from .._errors import fail, some
from ..calibrators import Affine
from ..contractions._shared import Pending, may_quantize
from ..numerics._shared import name_of_qtype
from ..policy._shared import pattern_of
from ..tensor import QTensor
from ..tensor._shared import groups_of
from ._gathered import Gathered
from ._interpret import Rules
from ._origin import Address
from ._partial_sums import PartialSums
from ._plan import Plan
from ._quantize_weight import quantize_weight
from ._reach import reaching
from ._site import Operand, Site, Weight
from ._trace import Call, is_quantized
from ._weight import real_of
from .primitives import CONTRACTIONS, FORMS, Records


@dataclasses.dataclass(frozen=True)
class OnIntegers(Rules):
    """Evaluates sites on codes."""

    dequantize: bool = False
    partial: PartialSums | None = None
    gather: Gathered | None = None
    call: Call | None = None

    function: ClassVar[str | None] = "convert"

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        if self.gather is not None:
            pairs = zip(site.operands, operands, strict=False)
            own = [self.gather.weight(operand, x) for operand, x in pairs]
            operands = [*own, *operands[len(own) :]]
        known = [
            self._quantized(operand, x, site.op, operands)
            for operand, x in zip(site.operands, operands, strict=False)
        ]
        quantized = [*known, *operands[len(known) :]]
        result = None if self.partial is None else self.partial.contract(site, eqn, quantized)
        if result is None:
            result = contracted(eqn, quantized)
        if site.output is not None:
            affine = self.affines.get(site.output_key)
            result = QTensor.quantize(result, site.output, affine).dequantize()
        return result, {}

    def scope(self, here: Address) -> AbstractContextManager[Any]:
        name = self.plan.name_at(here)
        return contextlib.nullcontext() if name is None else jax.named_scope(f"jqx[{name}]")

    def _quantized(self, operand: Operand, x: Any, op: str, operands: Sequence[Any]) -> Any:
        if operand.role == "weight" or operand.spec is None or is_quantized(x):
            return x
        rows = Pending(x, operand.spec, self.affines.get(operand.key))
        kernel = any(may_quantize(rows.spec, other) for other in operands if other is not x)
        return rows if kernel and op in ("dot_general", "ragged_dot") else rows.quantized()

    def contract(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        try:
            return [contracted(eqn, operands)]
        except (ValueError, NotImplementedError):
            if not (self.dequantize and any(map(is_quantized, operands))):
                raise
        return _compat.bind(eqn, list(map(real_of, operands)))

    def dense(self, eqn: Eqn | None, x: Any) -> Any:
        if self.dequantize or not is_quantized(x):
            return real_of(x)
        assert eqn is not None
        name = eqn.primitive.name
        problem = f"a quantized array reaches `{name}`, which has no quantized form."
        if name in FORMS:
            problem = f"a quantized array is carried by `{name}` in place of an array."
        held = [] if self.call is None else reaching(self.call, self.plan, eqn)
        paths = [path for path, _ in held if path is not None and self.plan.weight_at(path)]
        fix = "pass it as an array, x.dequantize()"
        if paths or not held:
            rule = repr(pattern_of(paths[0])) if len(paths) == 1 else '"its/path"'
            fix = f"leave it in float with jqx.Rule({rule}) first in the policy"
        raise fail(
            "convert",
            problem,
            given=f"{x!r} of {some(name for _, name in held) if held else 'a weight'}"
            f"{_compat.at_line_of(eqn)}, in scope {_compat.scope_of(eqn) or '(none)'}",
            expected="contractions, views such as transpose, reshape and slice, and updates",
            fix=f'{fix}, or convert with jqx.convert(f, plan, affines, unsupported="dequantize").',
            error=NotImplementedError,
        )


def contracted(eqn: Eqn, operands: Sequence[Any]) -> jax.Array:
    """Evaluates a contraction of arrays and QTensors."""
    if _compat.is_explicit(eqn):
        operands = [x.quantized() if isinstance(x, Pending) else x for x in operands]
    family = CONTRACTIONS[eqn.primitive.name]
    return _compat.as_result_of(eqn, lambda *xs: family.apply(eqn, xs), *operands)


def quantized_leaf(leaf: Any, path: str | None, plan: Plan, affines: Mapping[str, Affine]) -> Any:
    """Returns a leaf as the plan needs it: a planned weight is quantized, all else is unchanged."""
    weight = plan.weight_at(path)
    if weight is None:
        return leaf
    if is_quantized(leaf):
        _check_weight(leaf, path, weight)
        return leaf
    return quantize_weight(leaf, weight.spec, affines.get(weight.key))


def _check_weight(leaf: QTensor, path: str | None, weight: Weight) -> None:
    groups = groups_of("convert", weight.spec, leaf.shape)
    zero = "without" if weight.spec.symmetric else "with"
    if not (
        leaf.qtype == weight.spec.qtype
        and leaf.groups == groups
        and (leaf.zero_point is None) == weight.spec.symmetric
        and leaf.offset is leaf.order is None
    ):
        raise fail(
            "convert",
            "a QTensor does not fit the plan.",
            given=f"{leaf!r} for the parameter {path!r}",
            expected=f"{name_of_qtype(weight.spec.qtype)} with scale {list(groups.scale_shape)}, "
            f"one for each {list(groups.sizes)} elements, {zero} zero point, in order",
            fix="quantize the parameters with this plan: jqx.quantize_params(params, plan).",
        )
