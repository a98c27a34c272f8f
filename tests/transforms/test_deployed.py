"""`simulate(..., backward=)` where XLA optimizes it: bits of what is deployed, and what is kept."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx

from ..models.transforms import normal


def test_what_is_evaluated_is_what_is_deployed():
    """In float a code is now and then the other of two, and layers amplify that."""

    def f(params, x):
        def layer(x, w):
            return x + jax.nn.gelu(x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) @ w), None

        return lax.scan(layer, x, params["layers"])[0] @ params["head"]

    params = {"layers": normal(0, 24, 32, 32) / 3, "head": normal(1, 32, 8)}
    x = normal(2, 1024, 32)
    plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(params, x)

    @jax.jit
    def results(params, x):
        converted = jqx.convert(f, plan)(jqx.quantize_params(params, plan), x)
        exact = jqx.simulate(f, plan, backward=jnp.float32)(params, x)
        return converted, exact, jqx.simulate(f, plan)(params, x)

    converted, exact, simulated = results(params, x)
    np.testing.assert_array_equal(exact, converted)
    assert np.abs(simulated - converted).max() > 1e-4 * np.abs(converted).max()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of what XLA on CPU keeps")
def test_codes_are_kept_for_the_backward_pass_not_their_quotients():
    """Of a weight that no other operation divides: its quotients would be the root of a fusion."""

    def f(w, x):
        return jax.nn.relu(x @ w)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 512), (64, 256))]
    simulated = jqx.simulate(f, jqx.presets.w8a8_dynamic(), "dynamic", backward=jnp.float32)
    step = jax.value_and_grad(lambda w, x: simulated(w, x).sum(), (0, 1))
    program = jax.jit(step).lower(*shapes).compile().as_text()
    assert re.search(r"s8\[256,512\]\S* (fusion|convert)", program)
    assert not re.search(r"ROOT \S+ = f32\[256,512\]\S* divide", program)
