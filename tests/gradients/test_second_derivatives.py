"""Derivatives of gradients: forward over reverse and reverse over reverse, for every estimator."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import gradients


@dataclasses.dataclass(frozen=True)
class Centered:
    """A linear rule of a user that mixes the elements of the cotangent."""

    def bwd(self, x, low, high, levels, cotangent):
        return cotangent - cotangent.mean(), jnp.zeros_like(cotangent), jnp.zeros_like(cotangent)


LINEAR = {
    "ste": gradients.ste,
    "ste_unclipped": gradients.ste_unclipped,
    "lsq": gradients.lsq,
    "lsq_plus": gradients.lsq_plus,
    "pact": gradients.pact,
    "parq": gradients.parq(0.0),
    "a user's": Centered(),
}
KEYS = jax.random.split(jax.random.key(0), 3)
W, V = jax.random.uniform(KEYS[0], (6, 3)), jax.random.normal(KEYS[1], (6, 3))
X = jax.random.normal(KEYS[2], (4, 6))


def loss(w):
    return (jnp.tanh(X @ w) ** 2).sum()


def hessian_products(f, w, v):
    grad = jax.grad(f)
    return (
        jax.jvp(grad, (w,), (v,))[1],
        jax.grad(lambda w: jnp.vdot(grad(w), v))(w),
    )


def test_the_second_derivative_is_that_of_the_rule_in_every_mode():
    """All values are inside the range, where each rule is a linear map A: A^T H(rounded w) A v."""
    quantizers = {
        "affine": lambda w, g: jqx.quantize_dequantize(
            w, jnp.float32(1 / 64), qtype=jnp.int8, gradient=g
        ),
        "limits": lambda w, g: jqx.fake_quantize(w, -2.0, 2.0, -2.0, 2.0, levels=129, gradient=g),
    }

    def run(w, v):
        return {
            (name, kind): hessian_products(lambda w, g=g, q=q: loss(q(w, g)), w, v)
            for name, g in LINEAR.items()
            for kind, q in quantizers.items()
            if kind == "affine" or name in ("lsq", "a user's")
        }

    found = jax.jit(run)(W, V)
    for (name, kind), each in found.items():
        center = (lambda x: x - x.mean()) if name == "a user's" else (lambda x: x)
        rounded = quantizers[kind](W, gradients.ste)
        expected = center(jax.jvp(jax.grad(loss), (rounded,), (center(V),))[1])
        for mode, got in zip(("jvp(grad)", "grad(vdot(grad))"), each, strict=True):
            # Sums of six products of float32 numbers of about 1.
            np.testing.assert_allclose(got, expected, atol=2e-5, err_msg=f"{name} {kind} {mode}")


def test_scales_that_are_learned_have_second_derivatives_in_both_modes():
    def of_scale(scale):
        return loss(jqx.quantize_dequantize(W, scale, qtype="int4", gradient=gradients.lsq))

    scale = jnp.float32(0.11)
    forward, reverse = jax.jit(lambda s: hessian_products(of_scale, s, jnp.float32(1)))(scale)
    assert forward != 0
    np.testing.assert_allclose(forward, reverse, rtol=1e-4)


def test_the_integers_of_a_simulation_say_that_they_have_no_second_derivative():
    f = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    plan = jqx.make_plan(f, jqx.presets.w8a8_dynamic())(W, X)
    grad = jax.grad(lambda w: jqx.simulate(f, plan, backward=jnp.float32)(w, X).sum())
    for twice in (lambda: jax.jvp(grad, (W,), (V,)), lambda: jax.grad(lambda w: grad(w).sum())(W)):
        with pytest.raises(NotImplementedError, match=r"backward=.+ has no second derivatives"):
            jax.eval_shape(twice)


def parts_and_whole(gradient):
    """Returns the gradient of the scale of a batch, and of its parts by each way to cut it."""
    xs = jax.random.normal(jax.random.key(3), (4, 2, 16))

    def of(scale, x):
        return (jqx.quantize_dequantize(x, scale, qtype="int4", gradient=gradient) ** 2).sum()

    grad = jax.grad(of)
    scale = jnp.float32(0.3)
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((min(4, jax.device_count()),), ("d",), axis_types=kinds)
    spec = jax.sharding.PartitionSpec

    def on_devices(scale, xs):
        scale = jax.lax.pcast(scale, ("d",), to="varying")
        return jax.lax.psum(jax.vmap(grad, (None, 0))(scale, xs).sum(), "d")

    def run(scale, xs):
        return {
            "whole": grad(scale, xs),
            "batches": sum(grad(scale, x) for x in xs),
            "vmap": jax.vmap(grad, (None, 0))(scale, xs).sum(),
            "scan": jax.lax.scan(lambda s, x: (s + grad(scale, x), None), jnp.float32(0), xs)[0],
            "shard_map": jax.shard_map(
                on_devices, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec()
            )(scale, xs),
        }

    found = jax.jit(run)(scale, xs)
    return found.pop("whole"), found


def test_the_gradient_of_a_scale_adds_up_over_parts_if_elements_are_given():
    kind = gradients.LearnedStep
    whole, parts = parts_and_whole(kind(elements=128))
    for name, got in parts.items():
        np.testing.assert_allclose(got, whole, rtol=1e-5, err_msg=name)
    counted, halves = parts_and_whole(kind())
    np.testing.assert_allclose(whole, counted, rtol=1e-6)  # the whole batch has 128 elements
    np.testing.assert_allclose(halves["vmap"], 2 * counted, rtol=1e-5)


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"elements": 1.5}, TypeError, "`elements` has the wrong type"),
        ({"elements": 0}, ValueError, "`elements` is out of range"),
        (
            {"elements": 8, "gradient_scale": False},
            ValueError,
            "has no effect with gradient_scale=False",
        ),
    ],
)
def test_elements_that_have_no_meaning_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        gradients.LearnedStep(**given)


def test_plans_store_the_number_of_elements():
    spec = jqx.QSpec(jnp.int8, gradient=gradients.LearnedStep(elements=128))
    f = lambda w, x: x @ w  # noqa: E731
    policy = jqx.Policy([jqx.Rule(weight=spec)])
    plan = jqx.make_plan(f, policy)(W, X)
    assert jqx.Plan.from_dict(plan.to_dict()) == plan
    assert "elements" not in str(
        jqx.make_plan(f, jqx.presets.w8a16(weight={"gradient": gradients.lsq}))(W, X).to_dict()
    )
