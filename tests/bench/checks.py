"""What the transforms promise of every model, checked on one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

import jqx
from jqx.presets import w4a16, w8a8, w8a8_dynamic, w8a16

CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")

POLICIES = {"w8a8": w8a8(), "w8a8 dynamic": w8a8_dynamic(), "w8a16": w8a16(), "w4a16": w4a16()}
ERRORS = {
    "w8a8": (0.016, 0.016),
    "w8a8 dynamic": (0.016, 0.016),
    "w8a16": (0.016,),
    "w4a16": (0.1,),
}
"""Relative errors of what is rounded: weights, activations. Codes of 8 bits are off by peak / rms /
127 / sqrt(12), 0.016 where the peak is 7 times the root mean square; those of 4 bits, in blocks of
32 normal numbers whose peak is 2.4, by 2.4 / 7 / sqrt(12) = 0.1.
"""


@dataclasses.dataclass(frozen=True)
class Model:
    """A function of parameters and a batch.

    Attributes:
      f: its result is any pytree; integers in it, such as tokens, must be equal.
      params: random ones.
      batches: arguments after `params`: the first to be tried, all to calibrate with.
      depth: how many contractions with weights stand one behind another.
    """

    f: Callable[..., Any]
    params: Any
    batches: tuple[tuple[Any, ...], ...]
    depth: int

    @functools.cached_property
    def result(self) -> Any:
        """That of the first batch in float."""
        return jax.jit(self.f)(self.params, *self.batches[0])


def floats(tree):
    """Returns all floats of a tree in one vector."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    parts = [np.float64(x).ravel() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return np.concatenate(parts) if parts else np.zeros(0)


def relative(a, b):
    """Relative L2 difference of all floats."""
    a, b = floats(a), floats(b)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300)


def cosine(a, b):
    """Cosine of the angle between all floats."""
    a, b = floats(a), floats(b)
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def least_cosine(policy, depth):
    """Independent errors add in squares; `e` in the result takes e**2 / 2 from the cosine."""
    return 1 - depth * sum(e**2 for e in ERRORS[policy]) / 2


def contractions(jaxpr):
    """Counts those in a jaxpr and in all that it holds."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name in CONTRACTIONS
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                count += contractions(getattr(value, "jaxpr", value))
    return count


def _is_jaxpr(x):
    return isinstance(x, (Jaxpr, ClosedJaxpr))


def check_all_are_listed(model, plan):
    """The plan lists every contraction of the function that is of any use to its result.

    JAX takes dead ones out of all but `while`, in whose bodies the plan may list fewer.
    """
    listed = [x for x in (*plan.sites, *plan.skipped) if x.op in CONTRACTIONS]
    jaxpr = jax.make_jaxpr(model.f)(model.params, *model.batches[0]).jaxpr
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)
    count = contractions(live)
    assert len(listed) == count or ("while[" in str(live) and 0 < len(listed) < count)


def calibrated(model, plan):
    """Returns scales where the plan needs some; what calibrates gives the float result."""
    if not plan.static_specs():
        return None
    observe = jax.jit(jqx.calibrate(model.f, plan))
    stats = None
    for batch in model.batches[::-1]:
        result, new = observe(model.params, *batch)
        stats = new if stats is None else jqx.merge_stats(plan, stats, new)
    # The same operations, fused otherwise: an ulp or so at each of some hundred steps.
    assert relative(result, model.result) <= 1e-5
    return jqx.affines(plan, stats)


def check(model, policy, *, gradient=False, bits=True):
    """Checks all promises under a policy, and returns what `convert` gives.

    `bits`: whether `simulate(backward=)` has its bits, as everywhere but in custom derivatives.
    """
    args = model.batches[0]
    plan = jqx.make_plan(model.f, POLICIES[policy])(model.params, *args)
    check_all_are_listed(model, plan)
    affines = calibrated(model, plan)
    q = jqx.quantize_params(model.params, plan)
    integers = jax.jit(jqx.convert(model.f, plan, affines))(q, *args)
    simulate = functools.partial(jqx.simulate, model.f, plan, affines)
    simulated = jax.jit(simulate())(model.params, *args)
    assert jax.tree.structure(integers) == jax.tree.structure(model.result)
    noise = relative(simulated, model.result)
    if len(ERRORS[policy]) == 1:
        real = jax.jit(model.f)(jqx.dequantize_params(q), *args)
        # Scales come after sums in place of before: some roundings of float32 at each layer.
        for other in (real, simulated):
            check_equal(integers, other, 1e-5 * model.depth)
    else:
        # Sums in float32 tip codes over ties. At worst all later roundings go another way: then
        # the two are like independent ones, sqrt(2) times as far apart as each is from float.
        tipped = np.sqrt(2) * noise + 1e-5
        check_equal(integers, simulated, tipped)
        training = jax.jit(simulate(backward=jnp.float32))(model.params, *args)
        check_equal(integers, training, 0 if bits else tipped)
    if floats(integers).size:
        assert cosine(integers, model.result) >= least_cosine(policy, model.depth)
    if gradient:
        check_gradient(model, simulate())
    return integers


def check_equal(a, b, tolerance):
    """Floats as near as that; integers the same."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_array_equal(x, y)
    assert relative(a, b) <= tolerance


def check_gradient(model, simulated):
    """It is finite and points where that in float does."""

    def loss(f):
        def value(params, *args):
            return sum(jnp.mean(y**2) for y in jax.tree.leaves(f(params, *args)))

        return jax.jit(jax.grad(value))(model.params, *model.batches[0])

    gradient = loss(simulated)
    assert np.isfinite(floats(gradient)).all()
    assert cosine(gradient, loss(model.f)) >= 0.9
