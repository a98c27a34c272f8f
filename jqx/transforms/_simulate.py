"""`simulate`: the quantized function in floating point, differentiable."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from .._compat import Eqn
from ..calibrators import Affine
from ..policy import Policy
from ..tensor import fake_quantize_as
from ._interpret import Records, interpret
from ._make_plan import as_plan, params_of
from ._plan import Plan, Site
from ._trace import check_function, is_quantized, trace_call


@dataclasses.dataclass(frozen=True)
class _FakeQuantize:
    plan: Plan
    affines: Mapping[str, Affine]

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        rounded = [
            x  # a weight was rounded before its first use
            if operand.role == "weight" or operand.spec is None
            else fake_quantize_as(jnp.asarray(x), operand.spec, self.affines.get(operand.key))
            for operand, x in zip(site.operands, operands, strict=True)
        ]
        (result,) = _compat.bind(eqn, rounded)
        if site.output is not None:
            result = fake_quantize_as(result, site.output, self.affines.get(site.output_key))
        return result, {}

    def unsupported(self, eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
        raise AssertionError("simulation binds no QTensor")


def simulate(
    f: Callable[..., Any], plan: Plan | Policy, affines: Mapping[str, Affine] | None = None
) -> Callable[..., Any]:
    """Returns `f` with its quantization simulated in floating point, for training and evaluation.

    Weights are rounded to their grid before their first use, activations (and outputs) at their
    sites, each with the gradient estimator of its spec. The contractions run in float.

    Args:
      f: the function that the plan was made for.
      plan: a `Plan`, or a `Policy` to plan the call with (its parameters are argument 0 then).
      affines: scales from `jqx.affines`; `None` takes every scale from the values at hand. Weights
        take theirs from the values at hand too, unless `affines` has an entry `<path>:weight`.

    Returns:
      A function of the arguments of `f` with its result. QTensors among the arguments are
      dequantized.

    Raises:
      TypeError: `f` is no function or `plan` no plan.
      ValueError: the plan was made for another function, or `affines` does not fit it.

    Gradient: with respect to all float arguments, and to given scales; scales from the values at
      hand count as constants.

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
        given = affines or {}
        leaves = []
        for leaf, path in zip(call.leaves, call.paths, strict=True):
            weight = known.weight_at(path)
            if is_quantized(leaf):
                leaf = leaf.dequantize()
            elif weight is not None:
                leaf = fake_quantize_as(jnp.asarray(leaf), weight.spec, given.get(weight.key))
            leaves.append(leaf)
        out, _ = interpret(call.jaxpr, call.consts, leaves, _FakeQuantize(known, given))
        return jax.tree.unflatten(call.out_tree, out)

    return simulated
