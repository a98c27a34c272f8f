"""The rules of `convert`: contractions run on integers, which weights cannot follow the views of
the function as planned, and which reach an operation without a quantized form.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax

from .. import compat
from ..compat import Eqn
from ..contractions.problem import Pending, may_wait, quantize_pending
from ..errors import fail, message, some
from ..policy import pattern_of
from ..statistics.calibrators import Affine
from ..tensor.grid import groups_of
from ..tensor.qtensor import QTensor
from ..tensor.segments import abstract
from .find import Found
from .higher_order import Records
from .interpret import Rules, interpret
from .known_values import Escape, followed, known_values, reaching
from .partitioned import Gathered, PartialSums
from .plan import Operand, Plan, Site, Weight
from .quantize_params import quantize_weight
from .regions import Recorder, recorder
from .rules import CONTRACTIONS, in_float
from .trace import Call, is_quantized
from .views import Address, is_coded, real_of
from .walk import HOLDING


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
            gathered_operands = [self.gather.weight(operand, x) for operand, x in pairs]
            operands = [*gathered_operands, *operands[len(gathered_operands) :]]
        codes_of_operands = [
            self._quantized(operand, x, site.op, operands)
            for operand, x in zip(site.operands, operands, strict=False)
        ]
        quantized = [*codes_of_operands, *operands[len(codes_of_operands) :]]
        result = None if self.partial is None else self.partial.contract(site, eqn, quantized)
        if result is None:
            result = contracted(eqn, quantized)
        if site.output is not None:
            affine = self.affines.get(site.output_key)
            result = QTensor.quantize(result, site.output, affine).dequantize()
        return result, {}

    def recorder(self) -> Recorder | None:
        return None if self.partial is not None or self.gather is not None else recorder()

    def recorded(
        self, recorder: Recorder, eqn: Eqn, operands: Sequence[Any], address: Address | None, /
    ) -> list[Any] | None:
        if address is None or not self.holds_plan(eqn, address):
            return recorder.equation(eqn, operands)
        if eqn.primitive.name != "dot_general" or compat.is_explicit(eqn):
            return None
        site = self.plan.site_at(address)
        if site is None or site.output is not None:
            return None
        x, weight = site.operands
        spec, other = x.spec, weight.spec
        if x.role != "activation" or spec is None:
            return None
        affine, scope = self.affines.get(x.key), self.scope(address)

        def evaluate(value: jax.Array, affine: Affine | None, codes: Any) -> jax.Array:
            return contracted(eqn, [QTensor.quantize(value, spec, affine), codes])

        if weight.role == "weight":
            return recorder.site(eqn, operands, scope, spec, affine, evaluate)
        if other is None:
            return None

        def of_both(x: jax.Array, y: jax.Array, *affines: Affine | None) -> jax.Array:
            return evaluate(x, affines[0], QTensor.quantize(y, other, affines[1]))

        quantized = (spec, affine), (other, self.affines.get(weight.key))
        return recorder.batches(eqn, operands, scope, quantized, of_both)

    def scope(self, address: Address) -> AbstractContextManager[Any]:
        name = self.plan.name_at(address)
        return contextlib.nullcontext() if name is None else jax.named_scope(f"jqx[{name}]")

    def _quantized(self, operand: Operand, x: Any, op: str, operands: Sequence[Any]) -> Any:
        if operand.role == "weight" or operand.spec is None or is_quantized(x):
            return x
        spec, affine = operand.spec, self.affines.get(operand.key)
        waits = any(may_wait(spec, value) for value in operands if value is not x)
        if waits and op in ("dot_general", "ragged_dot"):
            return Pending.of(x, spec, affine)
        return QTensor.quantize(x, spec, affine)

    def contract(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        try:
            return [contracted(eqn, operands)]
        except (ValueError, NotImplementedError):
            if not (self.dequantize and any(map(is_quantized, operands))):
                raise
        return compat.bind(eqn, list(map(real_of, operands)))

    def in_float(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        return in_float(eqn, operands)

    def dense(self, eqn: Eqn | None, x: Any) -> Any:
        if self.dequantize or not is_quantized(x):
            return real_of(x)
        assert eqn is not None
        name = eqn.primitive.name
        problem = f"a quantized array reaches `{name}`, which has no quantized form."
        if name in HOLDING:
            problem = f"a quantized array is carried by `{name}` in place of an array."
        weight_names = [] if self.call is None else reaching(self.call, self.plan, eqn)
        paths = [path for path, _ in weight_names if path is not None and self.plan.weight_at(path)]
        fix = "pass it as an array, x.dequantize()"
        if paths or not weight_names:
            rule = repr(pattern_of(paths[0])) if len(paths) == 1 else '"its/path"'
            fix = f"leave it in float with jqx.Rule({rule}) first in the policy"
        details = f"{x!r} of {some(n for _, n in weight_names) if weight_names else 'a weight'}"
        details += f"{compat.at_line_of(eqn)}, in scope {compat.scope_of(eqn) or '(none)'}"
        fix += ', or convert with jqx.convert(f, plan, affines, unsupported="dequantize").'
        raise fail("convert", problem, given=details, fix=fix, error=NotImplementedError)


def contracted(eqn: Eqn, operands: Sequence[Any]) -> jax.Array:
    """Evaluates a contraction of arrays and QTensors."""
    if compat.is_explicit(eqn):
        operands = list(map(quantize_pending, operands))
    family = CONTRACTIONS[eqn.primitive.name]
    return compat.as_result_of(eqn, lambda *xs: family.apply(eqn, xs), *operands)


def quantized_leaves(call: Call, leaves: Sequence[Any], rules: OnIntegers) -> list[Any]:
    """Returns the leaves of a call as its plan needs them: planned weights are quantized, all else
    is unchanged.
    """

    def quantized(leaf: Any, path: str | None) -> Any:
        weight = rules.plan.weight_at(path)
        if weight is None:
            return leaf
        if not is_quantized(leaf):
            return quantize_weight(leaf, weight.spec, rules.affines.get(weight.key))
        _check_weight(leaf, path, weight)
        return leaf

    return list(map(quantized, leaves, call.paths))


def _evaluate_shapes(call: Call, rules: OnIntegers) -> None:
    """Evaluates a call as `convert` would, with shapes in place of arrays."""

    def run(leaves: list[Any]) -> list[Any]:
        inputs = quantized_leaves(call, leaves, rules)
        return list(map(real_of, interpret(call.jaxpr, call.consts, inputs, rules)[0]))

    jax.eval_shape(run, list(map(abstract, call.leaves)))


def _check_weight(leaf: QTensor, path: str | None, weight: Weight) -> None:
    spec, groups = weight.spec, groups_of("convert", weight.spec, leaf.shape)
    is_alike = leaf.qtype == spec.qtype and leaf.groups == groups
    is_plain = leaf.offset is None and leaf.order is None
    if not (is_alike and is_plain and (leaf.zero_point is None) == spec.symmetric):
        problem = f"a QTensor does not fit the plan, which has {spec} for {path!r}."
        expected = f"scale {list(groups.scale_shape)}, one for each {list(groups.sizes)} elements"
        fix = "quantize the parameters with this plan: jqx.quantize_params(params, plan)."
        raise fail("convert", problem, given=repr(leaf), expected=expected, fix=fix)


# Which weights cannot be quantized as planned, because scales in blocks cannot follow the views of
# the function.


def unfollowed(call: Call, plan: Plan, sites: Sequence[tuple[Site, Found]]) -> dict[str, str]:
    """Returns the paths of weights whose scales cannot follow the views on the way to a site, each
    with the reason.

    Only scales in blocks can fail to follow, and those of joined weights, each of which becomes a
    block. If views change an axis in blocks or join weights, or a kernel of a convolution is in
    blocks, the function is traced once as `convert` would.
    """
    changed = {site.name: _changed(plan, call, item) for site, item in sites}
    if not any(changed.values()):
        return {}
    trial = _Trial(plan)
    _evaluate_shapes(call, trial)
    reasons: dict[str, str] = {}
    for name in (site.name for site, _ in sites if site.name in trial.failed):
        for path, views in changed[name].items():
            reason = f"scales of {path!r} cannot follow its {views}"
            if not views:
                reason = trial.failed[name].partition(": ")[2].rstrip(".")
            shared = plan.weight_at(path)
            if shared is not None and shared.sites > 1:
                reason += f" at {name}"
            reasons.setdefault(path, reason)
    return reasons


def _changed(plan: Plan, call: Call, item: Found) -> dict[str, str]:
    """Returns the paths of the weights whose contraction may have no quantized form, each with the
    views that change an axis in blocks or join weights: those that have any, and kernels of
    convolutions in blocks.
    """
    parts = [part for origin in item.origins if origin for part in origin.parts]
    is_kernel = item.op == "conv_general_dilated"
    leaves = {}
    for part in parts:
        weight = plan.weight_at(part.path)
        if weight is None or not (is_kernel or part.moved or part.cut):
            continue
        shape = tuple(call.leaves[call.paths.index(part.path)].shape)
        groups = groups_of("make_plan", weight.spec, shape)
        names = {
            name for axis, name in part.moved | part.cut if groups.is_blocked(axis) or name == _JOIN
        }
        if names or (is_kernel and any(map(groups.is_blocked, range(len(shape))))):
            leaves[part.path] = " and ".join(f"`{name}`" for name in sorted(names))
    return leaves


_JOIN = "concatenate"


@dataclasses.dataclass(frozen=True)
class _Trial(OnIntegers):
    """Rules of `convert` that go on in float where a scale cannot follow.

    Attributes:
      failed: the names of the sites that were computed in float, with the errors.
    """

    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        pairs = zip(site.operands, operands, strict=False)
        decoded = [
            x
            for operand, x in pairs
            if operand.role == "weight" and operand.spec and not is_coded(x)
        ]
        if not decoded:
            try:
                return super().at_site(site, eqn, operands)
            except (ValueError, NotImplementedError) as error:
                self.failed[site.name] = str(error).splitlines()[0]
        self.failed.setdefault(site.name, "")
        return compat.bind(eqn, list(map(real_of, operands)))[0], {}

    def view(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any] | None:
        try:
            return super().view(eqn, operands)
        except ValueError:
            return compat.bind(eqn, list(map(real_of, operands)))

    def contract(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        return self.unsupported(eqn, operands)

    def dense(self, eqn: Eqn | None, x: Any) -> Any:
        return real_of(x)


# Raises the errors of `convert` when planning, with the name of the weight.


class Unsupported(NotImplementedError, ValueError):
    """A policy quantizes a weight that reaches an operation without a quantized form."""


def check_reach(function: str, call: Call, plan: Plan) -> None:
    """Raises if a weight of a plan reaches an operation without a quantized form."""
    codes, _ = followed(call, {weight.path for weight in plan.weights})
    if codes.escapes:
        escape = codes.escapes[0]
        is_hoistable = id(escape.eqn) in known_values(call).inner
        fix = "use jqx.hoist, or ptq(hoist='all'); " if is_hoistable else ""
        raise _refusal(function, plan, escape, fix)
    if codes.mixed:  # whether their formats agree is known only when the call is traced
        try:
            _evaluate_shapes(call, OnIntegers(plan))
        except NotImplementedError as error:
            raise _refusal(function, plan, codes.mixed[0]) from error


def _refusal(function: str, plan: Plan, escape: Escape, fix: str = "") -> Unsupported:
    path = min(escape.paths)
    spec = next(weight.spec for weight in plan.weights if weight.path == path)
    problem = f"the weight {path!r}, which the policy quantizes, {escape.how}."
    details = f"{spec}{compat.at_line_of(escape.eqn)}"
    details += f", in scope {escape.scope}" if escape.scope else ""
    fix += f"leave it in float with jqx.Rule({pattern_of(path)!r}) first in the policy; or pass "
    fix += 'unsupported="dequantize" to both jqx.make_plan and jqx.convert.'
    return Unsupported(message(function, problem, given=details, fix=fix))
