"""`convert`: the quantized function on integers, and its errors, which planning raises too."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from .. import compat
from ..checks import called
from ..errors import fail, message
from ..policy import Policy, pattern_of
from ..signatures import P, R
from .integers import OnIntegers, quantized_leaf
from .interpret import interpret
from .known_values import Escape, check_unsupported, followed, known_values
from .operands import real_of
from .partitioned import gathered, partial_sums, weight_shardings
from .plan import GivenAffines, Plan
from .plan_call import as_plan, params_of
from .trace import Call, check_function, is_quantized, trace_call


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
        call = _without_stacks(trace_call("convert", f, params, args, kwargs))
        fitted = as_plan("convert", plan, call, params)
        scales = fitted.scales_of("convert", affines)
        if shardings is not None and partial_dtype is None and gather_axes is None:
            problem = "`shardings` have no effect without partial_dtype or gather_axes."
            raise fail("convert", problem, fix="pass one of these, or leave shardings out.")
        rules = OnIntegers(fitted, scales, dequantize=unsupported == "dequantize", call=call)
        if partial_dtype is not None or gather_axes is not None:
            named = dict(zip(call.paths, call.leaves, strict=True))
            shardings_of = weight_shardings("convert", fitted, shardings, named)
            gather = gathered("convert", gather_axes, shardings_of)
            parted = shardings_of if gather is None else gather.left
            partial = partial_sums("convert", partial_dtype, parted)
            rules = dataclasses.replace(rules, partial=partial, gather=gather)
        leaves = [
            quantized_leaf(leaf, path, fitted, rules.affines)
            for leaf, path in zip(call.leaves, call.paths, strict=True)
        ]
        out, _ = interpret(call.jaxpr, call.consts, leaves, rules)
        return jax.tree.unflatten(call.out_tree, _results(call, out, rules))

    return converted


def _without_stacks(call: Call) -> Call:
    """Returns a call without the stacks that the function returns as they are given. Joining their
    parts, which may have several formats, has no quantized form, and `_results` needs no stack.
    """
    if not call.returned:
        return call
    outvars = enumerate(call.jaxpr.outvars)
    remaining = [call.jaxpr.invars[0] if i in call.returned else atom for i, atom in outvars]
    jaxpr = compat.without_dead(call.jaxpr.replace(outvars=remaining))
    return dataclasses.replace(call, jaxpr=jaxpr)


def _results(call: Call, out: Sequence[Any], rules: OnIntegers) -> list[Any]:
    """Returns results in the form of the arguments. An argument that is returned unchanged is the
    same object. Results contain QTensors only if the arguments do.
    """
    leaf_of = dict(zip(call.jaxpr.invars, call.leaves, strict=True))
    atoms = [None if compat.is_literal(atom) else atom for atom in call.jaxpr.outvars]
    results = [leaf_of.get(atom, x) for atom, x in zip(atoms, out, strict=True)]
    results = [call.returned.get(i, x) for i, x in enumerate(results)]
    if any(map(is_quantized, call.leaves)):
        return results
    for x in filter(is_quantized, results):
        if not rules.dequantize:
            problem = f"`f` returns a float weight that is quantized on the fly: {x!r}."
            fix = "pass jqx.quantize_params(params, plan), or leave the weight out of the result."
            raise fail("convert", problem, fix=fix, error=NotImplementedError)
    return [real_of(x) for x in results]


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
        rules = OnIntegers(plan)

        def run(inputs: list[Any]) -> list[Any]:
            pairs = zip(inputs, call.paths, strict=True)
            leaves = [quantized_leaf(leaf, path, plan, {}) for leaf, path in pairs]
            return interpret(call.jaxpr, call.consts, leaves, rules)[0]

        try:
            jax.eval_shape(run, call.leaves)
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
