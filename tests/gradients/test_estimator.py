"""What decides derivatives: estimators of users and of jqx, through ops, specs and simulations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx import gradients
from jqx._src.gradients.estimators import StraightThrough, moves_limits

from ..oracles.refusals import assert_refused


@dataclasses.dataclass(frozen=True)
class Weighted:
    """Multiplies the cotangent by fixed factors, wherever `x` lies."""

    x: float
    low: float
    high: float

    def bwd(self, x, low, high, levels, cotangent):
        return self.x * cotangent, self.low * cotangent, self.high * cotangent


@dataclasses.dataclass(frozen=True)
class Inspecting:
    """Checks what every estimator is promised, and returns the cotangent for `x` alone."""

    levels: int
    dtype: str
    shape: tuple[int, ...]
    range_shape: tuple[int, ...]

    def bwd(self, x, low, high, levels, cotangent):
        assert levels == self.levels and isinstance(levels, int)
        assert x.shape == cotangent.shape == self.shape
        assert low.shape == high.shape == self.range_shape
        for array in (x, low, high, cotangent):
            assert array.dtype == jnp.dtype(self.dtype)
        ordered = jnp.where(low <= high, cotangent, jnp.nan * cotangent)
        return ordered, jnp.zeros_like(x), jnp.zeros_like(x)


class Unhashable:
    __hash__ = None

    def bwd(self, x, low, high, levels, cotangent):
        return cotangent, cotangent, cotangent


class WithoutRule:
    pass


def f32(*values):
    return np.float32(values)


def test_a_custom_estimator_decides_the_gradients_of_quantize_dequantize():
    x, scale, z = f32(-100, 0.3, 100), np.float32(0.5), np.int8(3)

    def loss(x, scale):
        y = jqx.quantize_dequantize(x, scale, z, qtype=jnp.int8, gradient=Weighted(2, 3, 5))
        return (y * f32(1, 10, 100)).sum()

    for f in (jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
        dx, dscale = f(x, scale)
        np.testing.assert_array_equal(dx, [2, 20, 200])
        assert dscale == 111 * (3 * (-128 - 3) + 5 * (127 - 3))


def test_a_custom_estimator_decides_the_gradients_of_fake_quantize():
    """y = ol + (c - il) * ratio with ratio 2, and the estimator is the derivative of c."""
    operands = (f32(0.5, 1), *f32(0, 2, 1, 5))

    def loss(*operands):
        return jqx.fake_quantize(*operands, levels=9, gradient=Weighted(3, 5, 7)).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*operands)
    dx, d_il, d_ih, d_ol, d_oh = (np.asarray(g).tolist() for g in gradients)
    u = 0.25 + 0.5
    assert dx == [2 * 3, 2 * 3]
    assert d_il == 2 * 2 * 5 + 2 * (u - 2)
    assert d_ih == 2 * 2 * 7 - 2 * u
    assert d_ol == 2 - u
    assert d_oh == u


@pytest.mark.parametrize("inverted", [False, True])
def test_an_inverted_input_range_hands_the_estimator_ordered_limits(inverted):
    """The limit that clips below is `input_high` then, and takes what the estimator gives it."""
    ends = (2, 0) if inverted else (0, 2)

    def loss(x, il, ih):
        gradient = Weighted(0, 5, 7)
        return jqx.fake_quantize(x, il, ih, 0.0, 4.0, levels=5, gradient=gradient).sum()

    d_il, d_ih = jax.grad(loss, argnums=(1, 2))(f32(1), *f32(*ends))
    ratio, u = (-2, 0.5) if inverted else (2, 0.5)
    low, high = (7, 5) if inverted else (5, 7)
    assert d_il == ratio * (low + u - 1)
    assert d_ih == ratio * (high - u)


def test_limits_of_an_inverted_input_range_have_the_gradient_of_their_results():
    """`x == input_low` gives `output_low` by the formula; what is above, or not above the lower
    limit, gives a constant.
    """

    def f(x):
        return jqx.fake_quantize(x, 2.0, -1.0, -3.0, 5.0, levels=256).sum()

    assert jax.grad(f)(f32(-2, -1, 0.5, 2, 2.5)).tolist() == [0, 0, *[np.float32(-8 / 3)] * 2, 0]


@pytest.mark.parametrize(
    "dtype, wide", [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32")]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_an_estimator_sees_limits_with_kept_dims_in_order_and_the_computing_dtype(
    dtype, wide, sign
):
    dtype = jnp.dtype(dtype)
    x = np.linspace(-2, 2, 12).reshape(3, 4).astype(dtype)
    scale = (sign * np.array([0.1, 0.2, 0.3])).astype(dtype)

    def affine(x):
        gradient = Inspecting(16, wide, (3, 4), (3, 1))
        y = jqx.quantize_dequantize(x, scale, qtype=jnp.uint4, axes=0, gradient=gradient)
        return y.astype(jnp.float32).sum()

    def limits(x):
        il, ih = (np.full(4, v, dtype) for v in (-sign, sign))
        gradient = Inspecting(7, wide, (3, 4), (1, 4))
        y = jqx.fake_quantize(x, il, ih, -1.0, 1.0, levels=7, gradient=gradient)
        return y.astype(jnp.float32).sum()

    for loss in (affine, limits):
        gradient = jax.jit(jax.grad(loss))(x)
        assert gradient.dtype == dtype
        assert not np.any(np.isnan(np.asarray(gradient).astype(np.float32)))


def test_an_estimator_is_not_consulted_forward():
    x = np.linspace(-9, 9, 50, dtype=np.float32)
    for gradient in (Weighted(9, 9, 9), Inspecting(0, "float64", (), ())):
        y = jqx.quantize_dequantize(x, 0.1, qtype=jnp.int8, gradient=gradient)
        np.testing.assert_array_equal(y, jqx.quantize_dequantize(x, 0.1, qtype=jnp.int8))
        y = jqx.fake_quantize(x, -1.0, 1.0, -1.0, 1.0, levels=8, gradient=gradient)
        np.testing.assert_array_equal(y, jqx.fake_quantize(x, -1.0, 1.0, -1.0, 1.0, levels=8))


def test_two_estimators_of_one_class_do_not_share_a_trace():
    def slope(factor):
        gradient = Weighted(factor, 0, 0)
        return jax.grad(
            lambda x: jqx.quantize_dequantize(x, 1.0, qtype=jnp.int8, gradient=gradient)
        )(np.float32(0.2))

    assert [float(slope(factor)) for factor in (1, 2, 1)] == [1, 2, 1]


def test_a_custom_estimator_works_under_vmap():
    x = f32(-3, 0.2, 9).reshape(3, 1)
    f = jax.grad(
        lambda x: jqx.quantize_dequantize(x, 0.25, qtype=jnp.int4, gradient=Weighted(4, 0, 0)).sum()
    )
    np.testing.assert_array_equal(jax.vmap(f)(x), np.full((3, 1), 4))


@dataclasses.dataclass(frozen=True)
class Doubling:
    """A surrogate: twice the clamped value, forward and backward."""

    needs_key = False

    def surrogate(self, x, low, high, levels, key):
        return 2 * jnp.clip(x, low, high)


def test_a_rule_of_ones_own_is_taken_for_formats_without_uniform_levels():
    def f(x):
        return jqx.quantize_dequantize(x, 1.0, qtype="nf4", gradient=Weighted(3, 0, 0)).sum()

    assert jax.grad(f)(f32(-0.4, 0.3)).tolist() == [3, 3]


def product(w, x):
    return (x @ w).sum()


@pytest.mark.parametrize("gradient", [Weighted(3, 0, 0), Doubling()], ids=str)
def test_an_estimator_of_ones_own_works_through_a_spec_and_simulate(gradient):
    w, x = f32([0.3, -1.1], [-0.7, 0.9]), np.ones((1, 2), np.float32)
    plan = jqx.make_plan(product, jqx.presets.w8a16(weight={"gradient": gradient}))(w, x)
    f = jax.jit(jax.value_and_grad(jqx.simulate(product, plan)))
    y, dw = f(w, x)
    plain = jqx.make_plan(product, jqx.presets.w8a16())(w, x)
    expected = jqx.simulate(product, plain)(w, x)
    surrogate = isinstance(gradient, Doubling)
    np.testing.assert_allclose(y, 2 * -0.6 if surrogate else expected, atol=1e-6)
    np.testing.assert_array_equal(dw, np.full((2, 2), 2 if surrogate else 3))


@pytest.mark.parametrize("name", ["lsq", "pact", "lsq_plus", "ste_unclipped"])
def test_the_estimators_work_through_a_spec_and_simulate(name):
    w, x = f32([0.3, -1.1], [-0.7, 0.9]), np.ones((1, 2), np.float32)
    weight = {"gradient": getattr(jqx.gradients, name)}
    plan = jqx.make_plan(product, jqx.presets.w8a16(weight=weight))(w, x)
    dw = jax.jit(jax.grad(jqx.simulate(product, plan)))(w, x)
    np.testing.assert_allclose(dw, np.ones((2, 2)), atol=0.01)


CALLS = {
    "quantize_dequantize": functools.partial(jqx.quantize_dequantize, scale=1.0, qtype=jnp.int8),
    "fake_quantize": functools.partial(
        jqx.fake_quantize, input_low=0.0, input_high=1.0, output_low=0.0, output_high=1.0, levels=4
    ),
}


NO_ESTIMATORS = [
    *(None, "ste", 1.0, WithoutRule(), Unhashable(), jnp.sin),
    *(StraightThrough, [gradients.ste]),
]


@pytest.mark.parametrize("op", CALLS)
def test_what_is_no_estimator_is_refused(op):
    """A class is none; a spec refuses what the ops refuse."""
    for gradient in NO_ESTIMATORS:
        assert_refused(
            functools.partial(CALLS[op], gradient=gradient),
            (f32(1, 2),),
            TypeError,
            op,
            "`gradient` is not a gradient estimator",
            f"an object of type {type(gradient).__name__}",
            "hashable",
            "bwd(x, low, high, levels, cotangent)",
            "jqx.gradients.ste",
        )
    for gradient in NO_ESTIMATORS[1:]:
        with pytest.raises(TypeError, match="not a gradient estimator"):
            jqx.QSpec(jnp.int8, gradient=gradient)


EXPECTED = {
    "ste": (False, True),
    "ste_unclipped": (False, False),
    "lsq": (True, True),
    "pact": (False, True),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_it_is_found_by_an_example(name):
    moves = []
    jax.eval_shape(lambda: moves.append(moves_limits(getattr(gradients, name))))  # while it traces
    assert moves == [EXPECTED[name]]


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

    products = jax.jit(run)(W, V)
    for (name, kind), each in products.items():
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

    results = jax.jit(run)(scale, xs)
    return results.pop("whole"), results


def test_the_gradient_of_a_scale_adds_up_over_parts_if_elements_are_given():
    kind = gradients.LearnedStep
    whole, parts = parts_and_whole(kind(elements=128))
    for name, got in parts.items():
        np.testing.assert_allclose(got, whole, rtol=1e-5, err_msg=name)
    counted, halves = parts_and_whole(kind())
    np.testing.assert_allclose(whole, counted, rtol=1e-6)  # the whole batch has 128 elements
    np.testing.assert_allclose(halves["vmap"], 2 * counted, rtol=1e-5)


def test_plans_store_the_number_of_elements():
    spec = jqx.QSpec(jnp.int8, gradient=gradients.LearnedStep(elements=128))
    f = lambda w, x: x @ w  # noqa: E731
    policy = jqx.Policy([jqx.Rule(weight=spec)])
    plan = jqx.make_plan(f, policy)(W, X)
    assert jqx.Plan.from_dict(plan.to_dict()) == plan
    assert "elements" not in str(
        jqx.make_plan(f, jqx.presets.w8a16(weight={"gradient": gradients.lsq}))(W, X).to_dict()
    )
