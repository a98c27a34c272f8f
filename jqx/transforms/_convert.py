"""`convert`: the quantized function on integers."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
from jax.typing import DTypeLike

from .. import _compat
from .._calls import called
from .._checks import require_that
from .._compat import Eqn
from .._errors import message
from .._signatures import P, R
from ..calibrators import Affine
from ..contractions._shared import Pending, may_quantize
from ..numerics._shared import name_of_qtype
from ..policy import Policy
from ..tensor import QTensor
from ..tensor._shared import groups_of
from ._affines import GivenAffines
from ._gathered import Gathered, gathered
from ._interpret import Rules, interpret
from ._origin import Address
from ._partial_sums import PartialSums, partial_sums
from ._plan import Plan
from ._plan_call import as_plan, params_of
from ._quantize_weight import quantize_weight
from ._reach import check_unsupported
from ._site import Operand, Site, Weight
from ._trace import Call, check_function, is_quantized, trace_call
from ._weight import real_of
from ._weight_places import weight_places
from .primitives import CONTRACTIONS, FORMS, Records


@dataclasses.dataclass(frozen=True)
class _Integers(Rules):
    dequantize: bool = False
    partial: PartialSums | None = None
    gather: Gathered | None = None

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
            result = _contracted(eqn, quantized)
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
            return [_contracted(eqn, operands)]
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
        paths = [weight.path for weight in self.plan.weights if weight.spec.qtype == x.qtype]
        rule = f"jqx.Rule({paths[0]!r})" if len(paths) == 1 else 'jqx.Rule("its/path")'
        mend = f"leave a weight in float with {rule} first in the policy, or " if paths else ""
        more = "" if len(paths) < 5 else f" and {len(paths) - 4} more"
        raise NotImplementedError(
            message(
                "convert",
                problem,
                given=f"{x!r} of {' or '.join(map(repr, paths[:4])) or 'an argument'}{more}"
                f"{_compat.at_line_of(eqn)}, in scope {_compat.scope_of(eqn) or '(none)'}",
                expected="contractions, views such as transpose, reshape and slice, and updates",
                mend=f'{mend}pass unsupported="dequantize".',
            )
        )


@called("convert", "call it in two steps: jqx.convert(f, plan, affines)(params, x).")
def convert(
    f: Callable[P, R],
    plan: Plan | Policy,
    affines: GivenAffines = None,
    *,
    unsupported: str = "error",
    partial_dtype: DTypeLike | None = None,
    gather_axes: str | tuple[str, ...] | None = None,
    shardings: Any = None,
) -> Callable[P, R]:
    """Returns `f` with its planned contractions run on integers.

    `simulate(f, plan, affines, backward=jnp.float32)` has the same bits, and gradients. Plain
    `simulate` computes in float, so its results differ from these more with depth.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (then argument 0 holds the parameters).
      affines: scales from `jqx.affines`, for every static activation and output. `"dynamic"`
        computes them from the current values instead. `None` if the plan has no static ones. A
        QTensor has its own scale: pass learned scales of weights to `quantize_params` too.
      unsupported: what to do if a QTensor reaches an operation without a quantized form:
        `"error"`, or `"dequantize"` to continue in float.
      partial_dtype: dtype such as `jnp.bfloat16` or `jnp.float32`, for products whose contracted
        axis is split over several devices. Each device scales its part of the sum, and the parts
        are added in this dtype. `None` leaves it to the compiler, which adds the int32 sums of the
        devices: this is exact, and takes four bytes an element. Scales of activations cover the
        whole axis in both cases. It applies to `dot_general`, also as einsum traces it; everything
        else is left to the compiler.
      gather_axes: name, or names, of the mesh axes along which rows are partitioned too (FSDP).
        Weights are gathered along them where a contraction reads them, as codes and scales. `None`
        leaves it to the compiler. If scales are in blocks, it gathers dequantized floats.
      shardings: how the float weights are sharded, as `jqx.parallel.shardings` takes it, for
        `partial_dtype` and `gather_axes`. `None` if the function is called outside of jit, or if
        the axes of the mesh are explicit: then the arrays carry their shardings.

    Returns:
      A function with the arguments and the result of `f`. Weights may be QTensors and Segments, as
      `quantize_params` makes them; a float weight is quantized on the fly. Any other argument may
      hold QTensors too, such as a cache from `quantize_state`. `f` is traced with arrays of their
      shape and dtype. Contractions read the codes, `dynamic_update_slice` and `select` quantize
      what they write, and values carried by loops, and results, stay quantized. Wrap the function
      in `jax.jit`. In profiles and compiled programs, the name scope `jqx[path:op]` marks each
      contraction.

    Raises:
      TypeError: if `f` is not a function or `plan` is not a plan.
      ValueError: if the plan was made for another function; if `affines`, or a QTensor, does not
        fit it; if a static activation or output has no scale; if `unsupported` is unknown; or if
        `partial_dtype`, `gather_axes` or `shardings` have no effect.
      NotImplementedError: if a QTensor reaches an operation without a quantized form.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w, x = jnp.eye(2) * 3.0, jnp.array([[1.0, -2.0]])
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(w, x)
      >>> jax.jit(jqx.convert(f, plan))(jqx.quantize_params(w, plan), x).round(1)
      Array([[ 3., -6.]], dtype=float32)
    """
    check_function("convert", f)
    params = params_of("convert", plan)
    check_unsupported("convert", unsupported)

    def converted(*args: P.args, **kwargs: P.kwargs) -> R:
        call = trace_call("convert", f, params, args, kwargs)
        known = as_plan("convert", plan, call, params)
        scales = known.scales_of("convert", affines)
        _check_used(shardings, partial_dtype, gather_axes)
        rules = _Integers(known, scales, dequantize=unsupported == "dequantize")
        if partial_dtype is not None or gather_axes is not None:
            named = dict(zip(call.paths, call.leaves, strict=True))
            places = weight_places("convert", known, shardings, named)
            gather = gathered("convert", gather_axes, places)
            parted = places if gather is None else gather.left
            partial = partial_sums("convert", partial_dtype, parted)
            rules = dataclasses.replace(rules, partial=partial, gather=gather)
        leaves = [
            _leaf(leaf, path, known, rules.affines)
            for leaf, path in zip(call.leaves, call.paths, strict=True)
        ]
        out, _ = interpret(call.jaxpr, call.consts, leaves, rules)
        return jax.tree.unflatten(call.out_tree, _results(call, out, rules))

    return converted


def _check_used(shardings: Any, *readers: Any) -> None:
    require_that(
        shardings is None or any(x is not None for x in readers),
        error=ValueError,
        function="convert",
        problem="`shardings` have no effect.",
        given="shardings without partial_dtype or gather_axes",
        expected="a dtype in which parts of sums are added, axes to gather along, or no shardings",
        mend="pass partial_dtype=jnp.bfloat16 or gather_axes, or leave shardings out: arrays keep "
        "theirs.",
    )


def _contracted(eqn: Eqn, operands: Sequence[Any]) -> jax.Array:
    """Evaluates a contraction of arrays and QTensors."""
    if _compat.is_explicit(eqn):
        operands = [x.quantized() if isinstance(x, Pending) else x for x in operands]
    family = CONTRACTIONS[eqn.primitive.name]
    return _compat.as_result_of(eqn, lambda *xs: family.apply(eqn, xs), *operands)


def check_converts(call: Call, plan: Plan) -> None:
    """Traces a converted call without computing it, to raise the errors of `convert`."""
    rules = _Integers(plan)

    def run(given: list[Any]) -> list[Any]:
        pairs = zip(given, call.paths, strict=True)
        leaves = [_leaf(leaf, path, plan, rules.affines) for leaf, path in pairs]
        return interpret(call.jaxpr, call.consts, leaves, rules)[0]

    jax.eval_shape(run, call.leaves)


def _leaf(leaf: Any, path: str | None, plan: Plan, affines: Mapping[str, Affine]) -> Any:
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
        text = message(
            "convert",
            "a QTensor does not fit the plan.",
            given=f"{leaf!r} for the parameter {path!r}",
            expected=f"{name_of_qtype(weight.spec.qtype)} with scale {list(groups.scale_shape)}, "
            f"one for each {list(groups.sizes)} elements, {zero} zero point, in order",
            mend="quantize the parameters with this plan: jqx.quantize_params(params, plan).",
        )
        raise ValueError(text)


def _results(call: Call, out: Sequence[Any], rules: _Integers) -> list[Any]:
    """Returns results in the form of the arguments. An argument that is returned unchanged is the
    same object. Results contain QTensors only if the arguments do.
    """
    given = dict(zip(call.jaxpr.invars, call.leaves, strict=True))
    places = [None if _compat.is_literal(atom) else atom for atom in call.jaxpr.outvars]
    results = [given.get(atom, x) for atom, x in zip(places, out, strict=True)]
    if any(map(is_quantized, call.leaves)):
        return results
    for x in filter(is_quantized, results):
        require_that(
            rules.dequantize,
            error=NotImplementedError,
            function="convert",
            problem="`f` returns a float weight that is quantized on the fly.",
            given=repr(x),
            expected="weights from jqx.quantize_params, which are returned quantized",
            mend="quantize the parameters first, return the weight outside of f, or pass "
            'unsupported="dequantize".',
        )
    return [real_of(x) for x in results]
