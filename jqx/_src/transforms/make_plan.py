"""`make_plan`: from a function and a policy to a plan. Nothing is computed."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ..checks import called
from ..policy import Policy, check_policy
from ..signatures import P
from .convert import check_reach
from .hoist import Hoisted
from .known_values import check_unsupported
from .paths import Names, Params, Weights, check_names
from .plan import Plan
from .plan_call import plan_call
from .trace import TracedOnce, as_params, check_function, trace_call


@called("make_plan", "call it in two steps: jqx.make_plan(f, policy)(params, x).")
def make_plan(
    f: Callable[P, Any],
    policy: Policy,
    *,
    params: Params = 0,
    names: Names = None,
    unsupported: str = "error",
) -> Callable[P, Plan]:
    """Returns a function of the arguments of `f` that plans which contractions are quantized, and
    how.

    The uses of one weight are decided together, by the first rule that matches any of them: all
    take the same codes, or all stay in float. Code that no result needs is not part of a plan.

    If rules select steps of a scan over stacked weights, such as `layers[0]`, `layers[-2:]` or
    `layers[1:3]/mlp/.*`, the scan is split there. Each part is a scan, and its contractions are
    sites with paths such as `layers/w[0:1]`, which rules may use again. Negative steps count from
    the end. All weights that the scan steps over are split with it (as are other scans over them):
    `quantize_params` makes them `jqx.Segments`. The scan may be inside jit, remat, cond, while and
    other scans, and its weights may pass through views that keep the steps apart.

    If an alternative in the path of a rule matches nothing, as in `(embed|haed)/kernel`, and the
    rule is not optional, a `UserWarning` names it.

    Args:
      f: any JAX function; it is traced, never changed.
      policy: an ordered list of rules; the first that matches a contraction applies.
      params: position, or positions, of the arguments that hold weights.
      names: names to use instead of key paths, for rules, plans and scales. Either a dict such as
        `{"0": "embed", "cache": None}`, which renames a path and everything below it (`None`: it
        holds no weights), or a function from a tuple of JAX's keys to a name. The plan keeps the
        names. By default a name is the keys joined by `/`, without the key of the value of an
        `nnx.Variable`.
      unsupported: what to do if a weight to be quantized also reaches an operation without a
        quantized form: `"error"`, or `"dequantize"` to plan it for `jqx.convert` with the same
        argument. (`jqx.simulate` runs it in any case.)

    Returns:
      `plan(*args, **kwargs) -> Plan`, where the arguments may be arrays or
      `jax.ShapeDtypeStruct` values. The plan holds for any batch size. For type checkers its
      parameters are those of `f`, and a `jax.ShapeDtypeStruct` is not an array: pass the result of
      `jax.eval_shape`, or use `typing.cast`.

    Raises:
      TypeError: if `f` is not a function, `policy` is not a `Policy`, or a name is not a string.
      ValueError: if a rule matches nothing; if two rules give one weight different specs; if a spec
        does not fit its contraction; if a path in `names` does not exist; if two weights have the
        same name; or if a rule selects steps that a scan does not have, or steps over more than one
        axis of the weight.
      NotImplementedError: if a weight to be quantized reaches an operation without a quantized form
        (this error is also a ValueError, since another policy fits); or if a scan would be split
        inside a `shard_map` or a custom derivative rule, or a weight reaches it through an
        operation that mixes its steps.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> def f(params, x):
      ...     return jax.nn.relu(x @ params["w"]) @ params["v"].T
      >>> params = {"w": jnp.ones((4, 8)), "v": jnp.ones((3, 8))}
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(params, jnp.ones((2, 4)))
      >>> [(weight.path, str(weight.spec)) for weight in plan.weights]
      [('w', 'int8 per_axis(1)'), ('v', 'int8 per_axis(0)')]
    """
    check_function("make_plan", f)
    check_policy("make_plan", policy)
    check_unsupported("make_plan", unsupported)
    check_names("make_plan", names)
    weights = Weights(as_params("make_plan", params), names, splits=policy)
    return planner(f, policy, weights, unsupported)


def planner(
    f: Callable[..., Any], policy: Policy, weights: Weights, unsupported: str = "error"
) -> Callable[..., Plan]:
    """Returns the result of `make_plan`; weights may be split differently from the policy."""

    def plan(*args: Any, **kwargs: Any) -> Plan:
        call = trace_call("make_plan", f, weights, args, kwargs, lazy=True)
        planned = plan_call("make_plan", call, policy, weights)
        if unsupported == "error":
            check_reach("make_plan", call, planned)
        function = f.f if isinstance(f, TracedOnce) else f
        if isinstance(function, Hoisted):
            planned = dataclasses.replace(planned, hoisted=function.hoisting)
        return planned

    return plan
