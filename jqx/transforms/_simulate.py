"""`simulate`: the quantized function in floating point, differentiable."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from .._checks import require_that
from .._compat import Eqn
from ..calibrators import Affine
from ..gradients import draws
from ..policy import Policy
from ..tensor import QSpec, fake_quantize_as
from ._interpret import Rules, interpret
from ._make_plan import as_plan, params_of
from ._plan import Plan, Site
from ._trace import check_function, is_quantized, trace_call
from .primitives import Records


@dataclasses.dataclass(frozen=True)
class _FakeQuantize(Rules):
    def round(self, x: Any, spec: QSpec, name: str) -> jax.Array:
        """Rounds to the grid of a spec, with random numbers of its own for each name."""
        key = None
        if draws(spec.gradient) and self.key is not None:
            key = jax.random.fold_in(self.key, zlib.crc32(name.encode()))
        return fake_quantize_as(jnp.asarray(x), spec, self.affines.get(name), key)

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        rounded = [
            x  # a weight was rounded before its first use
            if operand.role == "weight" or operand.spec is None
            else self.round(x, operand.spec, operand.key)
            for operand, x in zip(site.operands, operands, strict=False)
        ]
        (result,) = _compat.bind(eqn, [*rounded, *operands[len(rounded) :]])
        if site.output is not None:
            result = self.round(result, site.output, site.output_key)
        return result, {}


def simulate(
    f: Callable[..., Any],
    plan: Plan | Policy,
    affines: Mapping[str, Affine] | None = None,
    *,
    key: jax.Array | None = None,
) -> Callable[..., Any]:
    """Returns `f` with its quantization simulated in floating point, for training and evaluation.

    Weights are rounded to their grid before their first use, activations (and outputs) at their
    sites, each with the gradient estimator of its spec. The contractions run in float.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (its parameters are argument 0 then).
      affines: scales from `jqx.affines`; `None` takes every scale from the values at hand. Weights
        take theirs from the values at hand too, unless `affines` has an entry `<path>:weight`.
      key: random key, for specs whose gradient estimator draws numbers; a new one for each step.

    Returns:
      A function of the arguments of `f` with its result. QTensors among the arguments are
      dequantized.

    Raises:
      TypeError: `f` is no function or `plan` no plan.
      ValueError: the plan was made for another function, `affines` does not fit it, or `key` is
        missing or has no use.

    Gradient: with respect to all float arguments, and to given scales; scales from the values at
      hand count as constants. Inside `jax.custom_jvp` and `jax.custom_vjp` the rule of the user
      holds, evaluated in float: scales that are used there alone get a gradient of zero.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> f = lambda w, x: (x @ w).sum()
      >>> w, x = jnp.array([[0.3], [1.0]]), jnp.ones((1, 2))
      >>> plan = jqx.make_plan(f, jqx.presets.w8a16(weight={"qtype": jnp.int2}))(w, x)
      >>> jqx.simulate(f, plan)(w, x)
      Array(1., dtype=float32)
      >>> jax.grad(jqx.simulate(f, plan))(w, x)
      Array([[1.],
             [1.]], dtype=float32)
    """
    check_function("simulate", f)
    params = params_of("simulate", plan)

    def simulated(*args: Any, **kwargs: Any) -> Any:
        call = trace_call("simulate", f, params, args, kwargs)
        known = as_plan("simulate", plan, call, params)
        known.check_affines("simulate", affines)
        _check_key_is_used(known, key)
        rules = _FakeQuantize(known, affines or {}, key)
        leaves = []
        for leaf, path in zip(call.leaves, call.paths, strict=True):
            weight = known.weight_at(path)
            if is_quantized(leaf):
                leaf = leaf.dequantize()
            elif weight is not None:
                leaf = rules.round(leaf, weight.spec, weight.key)
            leaves.append(leaf)
        out, _ = interpret(call.jaxpr, call.consts, leaves, rules)
        return jax.tree.unflatten(call.out_tree, out)

    return simulated


def _check_key_is_used(plan: Plan, key: jax.Array | None) -> None:
    specs = [weight.spec for weight in plan.weights]
    for site in plan.sites:
        specs += [operand.spec for operand in site.operands if operand.role == "activation"]
        specs.append(site.output)
    require_that(
        key is None or any(spec is not None and draws(spec.gradient) for spec in specs),
        error=ValueError,
        function="simulate",
        problem="`key` has no use.",
        given="a key, and no spec whose gradient estimator draws random numbers",
        expected="key=None",
        mend="drop key, or use an estimator such as jqx.gradients.stochastic.",
    )
