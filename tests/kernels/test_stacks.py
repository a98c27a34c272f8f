"""Layers in a scan: kernels find the weight of a step in the stack; nothing slices its codes."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import numerics
from jqx._src import compat
from jqx._src.tensor.segments import OneOf, alone

from ..arrays import normal
from .stepwise import on

LAYERS, N, EXPERTS, ROWS = 3, 64, 4, 10
PLATFORMS = ("tpu", "gpu")
TOKEN = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)
SCHEMES = {
    "int8": (jqx.QSpec(jnp.int8, jqx.per_group(32)), None),
    "nf4": (jqx.QSpec(numerics.nf4, jqx.per_group(32)), None),
    "nvfp4": (jqx.QSpec(numerics.nvfp4, jqx.per_group(16)), None),
    "int8 beside int8": (jqx.QSpec(jnp.int8, jqx.per_group(32)), TOKEN),
}


def layers(w, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


def backwards(w, x):
    step = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
    return jax.lax.scan(step, x, w, reverse=True, unroll=2)[0]


def einsums(w, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(jnp.einsum("mk,kn->mn", h, w)), None), x, w)[0]


def turned(w, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w.T), None), x, w)[0]


def recomputed(w, x):
    step = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    return jax.lax.scan(step, x, w)[0]


def experts(w, x):
    sizes = jnp.asarray([3, 0, 5, 1])
    return jax.lax.scan(lambda h, w: (jnp.tanh(jax.lax.ragged_dot(h, w, sizes)), None), x, w)[0]


def quantized(f, name, shape, target):
    weight, activation = SCHEMES[name]
    w, x = normal(0, *shape) / 8, normal(1, ROWS, N)
    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(weight=weight, activation=activation)]))(w, x)
    q = jqx.quantize_params(w, plan)
    return jqx.convert(f, plan), q, jqx.pack_for(q, target), x


def of_slices(run, *args):
    """Runs a function whose kernels are given slices."""
    taken = OneOf.of
    with mock.patch.object(OneOf, "of", lambda stack, step: alone(taken(stack, step))):
        return jax.jit(lambda *args: run(*args))(*args)


def operands_of_kernels(jaxpr):
    """Returns the shapes that kernels in a jaxpr read, each a list."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            found.append([v.aval.shape for v in eqn.invars])
        for inner in compat.sub_jaxprs(eqn):
            found += operands_of_kernels(inner)
    return found


FORMS = (layers, backwards, einsums, turned, recomputed, experts)


@pytest.mark.many
@pytest.mark.parametrize("target", PLATFORMS)
@pytest.mark.parametrize("f", FORMS)
def test_a_kernel_is_given_the_stack(f, target):
    shape = (LAYERS, EXPERTS, N, N) if f is experts else (LAYERS, N, N)
    run, plain, packed, x = quantized(f, "int8", shape, target)
    with on(target):
        jaxpr = jax.make_jaxpr(run)(packed, x).jaxpr
        y = jax.jit(run)(packed, x)
        np.testing.assert_array_equal(y, of_slices(run, packed, x))
    (read,) = operands_of_kernels(jaxpr)
    assert shape in read and shape[1:] not in read
    np.testing.assert_allclose(y, jax.jit(run)(plain, x), rtol=0, atol=1e-5)


@pytest.mark.many
@pytest.mark.parametrize("target", PLATFORMS)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_finds_its_codes(name, target):
    run, plain, packed, x = quantized(layers, name, (LAYERS, N, N), target)
    with on(target):
        y, slope = jax.jit(jax.value_and_grad(lambda q, x: run(q, x).sum(), argnums=1))(packed, x)
        by_slices = of_slices(jax.value_and_grad(lambda q, x: run(q, x).sum(), 1), packed, x)
        jax.tree.map(np.testing.assert_array_equal, (y, slope), by_slices)
    by = jax.jit(jax.value_and_grad(lambda q, x: run(q, x).sum(), argnums=1))
    expected, gradient = by(plain, x)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(slope, gradient, rtol=0, atol=1e-5)


def test_scales_get_the_gradients_of_their_own_layer():
    run, plain, packed, x = quantized(layers, "int8", (LAYERS, N, N), "tpu")
    loss = lambda scale, q: run(jqx.QTensor(q.values, scale, **fields(q)), x).sum()  # noqa: E731
    with on("tpu"):
        found = jax.jit(jax.grad(loss))(packed.scale, packed)
    expected = jax.jit(jax.grad(loss))(plain.scale, plain)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def fields(q):
    return {"qtype": q.qtype, "dtype": q.dtype, "layout": q.layout}


def nested(w, x):
    return jax.lax.scan(lambda h, w: (layers(w, h), None), x, w)[0]


def branched(w, x):
    def step(h, w):
        return jax.lax.cond(h.sum() > 0, lambda h: h @ w, lambda h: jnp.tanh(h @ w), h), None

    return jax.lax.scan(step, x, w)[0]


def handed_on(w, x):
    step = lambda c, w: ((jnp.tanh(c[0] @ w), w), w)  # noqa: E731
    (h, last), all_ = jax.lax.scan(step, (x, w[0]), w)
    return layers(all_, h @ last)


@pytest.mark.parametrize("f", [nested, branched, handed_on])
def test_weights_go_where_arrays_go(f):
    shape = (2, LAYERS, N, N) if f is nested else (LAYERS, N, N)
    run, plain, packed, x = quantized(f, "int8", shape, "tpu")
    with on("tpu"):
        y = jax.jit(run)(packed, x)
    np.testing.assert_allclose(y, jax.jit(run)(plain, x), rtol=0, atol=1e-5)


def test_inside_vmap():
    run, plain, packed, x = quantized(layers, "int8", (LAYERS, N, N), "tpu")
    many = jnp.stack([x, -x])
    with on("tpu"):
        y = jax.jit(jax.vmap(run, in_axes=(None, 0)))(packed, many)
    expected = jax.jit(jax.vmap(run, in_axes=(None, 0)))(plain, many)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


def test_on_another_platform_a_step_reads_a_slice():
    run, plain, packed, x = quantized(layers, "nf4", (LAYERS, N, N), "tpu")
    np.testing.assert_allclose(jax.jit(run)(packed, x), jax.jit(run)(plain, x), atol=1e-5)


def test_one_of_a_stack_is_a_qtensor_that_knows_it():
    stack = jqx.QTensor.quantize(normal(0, LAYERS, N, N), jqx.QSpec(jnp.int8, jqx.per_axis(0, 2)))
    stack = stack.pack_for("tpu")

    @jax.jit
    def second(i):
        one = OneOf.of(stack, i)
        assert one.T.all_values is stack.values and one.stored.all_values is stack.values
        assert one.astype(jnp.bfloat16).all_values is None and type(alone(one)) is jqx.QTensor
        same = jax.tree.unflatten(*reversed(jax.tree.flatten(one)))
        assert isinstance(same, OneOf) and same.all_values is stack.values
        return one.dequantize(), alone(one)

    real, q = second(jnp.int32(1))
    np.testing.assert_array_equal(real, stack[1].dequantize())
    np.testing.assert_array_equal(q.values, stack.values[1])
