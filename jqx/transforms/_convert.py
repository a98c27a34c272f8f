"""`convert`: the quantized function on integers."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from .. import _compat
from .._checks import require_that
from .._compat import Eqn
from .._errors import message
from ..calibrators import Affine
from ..numerics import name_of_qtype
from ..policy import Policy
from ..tensor import QTensor, groups_of
from ._affines import GivenAffines
from ._interpret import Rules, interpret
from ._make_plan import as_plan, params_of
from ._origin import Address
from ._plan import Operand, Plan, Site, Weight
from ._quantize_params import quantize_weight
from ._trace import check_function, is_quantized, trace_call
from .primitives import CONTRACTIONS, FORMS, Records

UNSUPPORTED = ("error", "dequantize")


@dataclasses.dataclass(frozen=True)
class _Integers(Rules):
    dequantize: bool = False

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        quantized = [
            self._quantized(operand, x) for operand, x in zip(site.operands, operands, strict=False)
        ]
        quantized += operands[len(quantized) :]
        result = CONTRACTIONS[eqn.primitive.name].apply(eqn, quantized)
        if site.output is not None:
            affine = self.affines.get(site.output_key)
            result = QTensor.quantize(result, site.output, affine).dequantize()
        return result, {}

    def scope(self, here: Address) -> AbstractContextManager[Any]:
        name = self.plan.name_at(here)
        return contextlib.nullcontext() if name is None else jax.named_scope(f"jqx[{name}]")

    def _quantized(self, operand: Operand, x: Any) -> Any:
        if operand.role == "weight" or operand.spec is None:
            return x
        return QTensor.quantize(x, operand.spec, self.affines.get(operand.key))

    def unsupported(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        return _compat.bind(eqn, [self.dense(eqn, x) if is_quantized(x) else x for x in operands])

    def dense(self, eqn: Eqn, x: Any) -> jax.Array:
        if self.dequantize:
            return x.dequantize()
        name = eqn.primitive.name
        problem = f"a quantized weight reaches `{name}`, which has no quantized form."
        if name in FORMS:
            problem = f"a quantized weight is carried or returned by `{name}`, which holds arrays."
        if name in CONTRACTIONS:
            problem = f"a quantized weight reaches a `{name}` that the plan leaves in float."
        paths = [weight.path for weight in self.plan.weights if weight.spec.qtype == x.qtype]
        rule = f"jqx.Rule({paths[0]!r})" if len(paths) == 1 else 'jqx.Rule("its/path")'
        more = "" if len(paths) < 5 else f" and {len(paths) - 4} more"
        raise NotImplementedError(
            message(
                "convert",
                problem,
                given=f"{x!r} of {' or '.join(map(repr, paths[:4]))}{more}, "
                f"at {_compat.line_of(eqn)}, in scope {_compat.scope_of(eqn) or '(none)'}",
                expected="planned contractions, and views such as transpose, reshape and slice",
                mend=f"leave that weight in float with {rule} first in the policy, or "
                'pass unsupported="dequantize".',
            )
        )


def convert(
    f: Callable[..., Any],
    plan: Plan | Policy,
    affines: GivenAffines = None,
    *,
    unsupported: str = "error",
) -> Callable[..., Any]:
    """Returns `f` with its planned contractions run on integers.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (its parameters are argument 0 then).
      affines: scales from `jqx.affines`, of every static activation and output; `"dynamic"` takes
        them from the values at hand instead. `None` where the plan has no static ones.
      unsupported: what to do where a quantized weight reaches an operation without a quantized
        form: `"error"`, or `"dequantize"` to go on in float.

    Returns:
      A function of the arguments of `f` with its result. Weights may be QTensors, as
      `quantize_params` makes them; a float weight is quantized on the fly. Wrap it in `jax.jit`.
      In profiles and compiled programs, the name scope `jqx[path:op]` marks each contraction.

    Raises:
      TypeError: `f` is no function or `plan` no plan.
      ValueError: the plan was made for another function; `affines`, or a QTensor, does not fit it;
        a static activation or output has no scale; `unsupported` is unknown.
      NotImplementedError: a quantized weight reaches an operation without a quantized form.

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
    require_that(
        unsupported in UNSUPPORTED,
        error=ValueError,
        function="convert",
        problem="`unsupported` is unknown.",
        given=f"unsupported == {unsupported!r}",
        expected=f"one of {', '.join(map(repr, UNSUPPORTED))}",
        mend="leave it at 'error', or pass 'dequantize'.",
    )

    def converted(*args: Any, **kwargs: Any) -> Any:
        call = trace_call("convert", f, params, args, kwargs)
        known = as_plan("convert", plan, call, params)
        scales = known.scales_of("convert", affines)
        rules = _Integers(known, scales, dequantize=unsupported == "dequantize")
        leaves = [
            _leaf(leaf, path, known, rules.affines)
            for leaf, path in zip(call.leaves, call.paths, strict=True)
        ]
        out, _ = interpret(call.jaxpr, call.consts, leaves, rules)
        return jax.tree.unflatten(call.out_tree, [_result(x, rules.dequantize) for x in out])

    return converted


def _leaf(leaf: Any, path: str | None, plan: Plan, affines: Mapping[str, Affine]) -> Any:
    """Returns a leaf as the plan wants it: a planned weight quantized, all else as it is."""
    weight = plan.weight_at(path)
    if is_quantized(leaf):
        _check_weight(leaf, path, weight)
        return leaf
    if weight is None:
        return leaf
    return quantize_weight(leaf, weight.spec, affines.get(weight.key))


def _check_weight(leaf: QTensor, path: str | None, weight: Weight | None) -> None:
    where = "an argument that holds no weights" if path is None else f"the parameter {path!r}"
    given = f"{leaf!r} for {where}"
    if weight is None:
        expected = "a float array; the plan does not quantize it"
        fits = False
    else:
        groups = groups_of("convert", weight.spec, leaf.shape)
        zero = "without" if weight.spec.symmetric else "with"
        expected = (
            f"{name_of_qtype(weight.spec.qtype)} with scale {list(groups.scale_shape)}, "
            f"one for each {list(groups.sizes)} elements, {zero} zero point"
        )
        fits = (
            leaf.qtype == weight.spec.qtype
            and leaf.groups == groups
            and (leaf.zero_point is None) == weight.spec.symmetric
        )
    require_that(
        fits,
        error=ValueError,
        function="convert",
        problem="a QTensor does not fit the plan.",
        given=given,
        expected=expected,
        mend="quantize the parameters with this plan: jqx.quantize_params(params, plan).",
    )


def _result(x: Any, dequantize: bool) -> Any:
    if not is_quantized(x):
        return x
    require_that(
        dequantize,
        error=NotImplementedError,
        function="convert",
        problem="`f` returns a quantized weight.",
        given=repr(x),
        expected="results that are computed",
        mend='return it outside of f, or pass unsupported="dequantize".',
    )
    return x.dequantize()
