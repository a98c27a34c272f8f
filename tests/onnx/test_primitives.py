"""Functions of JAX as models of ONNX, beside JAX, in onnxruntime."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jqx
from jqx.extend import onnx_rules
from jqx.interop import to_onnx

from ..arrays import normal
from .runtime import assert_close, exported, run

RNG = np.random.default_rng(0)
X, Y, M = normal(0, 4, 6, 5), normal(1, 4, 1, 5), normal(2, 7, 5)
INTS = RNG.integers(-9, 9, (2, 4, 6)).astype("i4")
BOOLS = RNG.integers(0, 2, (2, 4, 6)).astype(bool)
ROWS = np.array([0, 2, 1, 3], "i4")
IMAGE, KERNEL = normal(3, 2, 9, 8, 4), normal(4, 3, 3, 4, 6)
NHWC = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def each(*functions):
    return lambda *args: [f(*args) for f in functions]


def conv(image, kernel, *args, **options):
    return lax.conv_general_dilated(image, kernel, *args, **NHWC, **options)


CASES = {
    "functions": (
        each(
            jnp.abs,
            jnp.exp,
            jnp.tanh,
            jnp.sin,
            jnp.cos,
            jnp.floor,
            jnp.ceil,
            jnp.sign,
            jnp.round,
            lax.round,
            jnp.square,
            jax.nn.sigmoid,
            lax.erf,
            lax.erfc,
            jnp.expm1,
            lax.cbrt,
            jnp.exp2,
            jnp.arctan,
            jnp.sinh,
            jnp.cosh,
            jnp.arcsinh,
            jnp.isfinite,
            jnp.isnan,
            jnp.negative,
            jax.nn.relu,
            jax.nn.gelu,
            jax.nn.silu,
            jax.nn.softplus,
            jax.nn.softmax,
            jax.nn.log_softmax,
            lambda x: lax.reduce_precision(x, 8, 7),
        ),
        X,
    ),
    "functions of positive numbers": (
        each(
            jnp.log,
            jnp.sqrt,
            lax.rsqrt,
            jnp.log1p,
            lambda x: x**1.7,
            lambda x: x**3,
            lambda x: x**-2,
            jnp.reciprocal,
            lambda x: jnp.arccosh(x + 1),
            jnp.log2,
        ),
        jnp.abs(X) + 0.1,
    ),
    "two operands": (
        each(
            jnp.add,
            jnp.subtract,
            jnp.multiply,
            jnp.divide,
            jnp.maximum,
            jnp.minimum,
            lax.rem,
            lambda x, y: jnp.power(jnp.abs(x), y),
            jnp.greater,
            jnp.less_equal,
            jnp.equal,
            jnp.not_equal,
            lambda x, y: jnp.where(x > y, x, y),
            lambda x, y: jnp.clip(x, -0.5, 0.5),
            jnp.mod,
            jnp.floor_divide,
        ),
        X,
        jnp.broadcast_to(Y, X.shape),
    ),
    "integers": (
        each(
            jnp.add,
            jnp.subtract,
            jnp.multiply,
            lambda x, y: lax.div(x, y + 20),
            lambda x, y: lax.rem(x, y + 20),
            lambda x, y: x // (y + 20),
            lambda x, y: x % (y + 20),
            jnp.bitwise_and,
            jnp.bitwise_or,
            jnp.bitwise_xor,
            lambda x, y: ~x,
            jnp.maximum,
            jnp.less,
            lambda x, y: jnp.abs(x),
            lambda x, y: jnp.sign(x),
            lambda x, y: -x,
            lambda x, y: x << 2,
            lambda x, y: lax.shift_right_logical(x, jnp.int32(2)),
            lambda x, y: x**2,
            lambda x, y: x.astype(jnp.int8),
            lambda x, y: x.astype(bool),
        ),
        *INTS,
    ),
    "logic": (
        each(
            jnp.logical_and,
            jnp.logical_or,
            jnp.logical_xor,
            lambda x, y: ~x,
            jnp.equal,
            jnp.greater,
            lambda x, y: x.astype(jnp.float32),
            lambda x, y: jnp.any(x, 0),
            lambda x, y: jnp.all(x, 1),
            lambda x, y: jnp.where(x, 1.0, 2.0),
            lambda x, y: jnp.pad(x, 1),
        ),
        *BOOLS,
    ),
    "shapes": (
        each(
            lambda x: x.reshape(24, 5),
            lambda x: x.transpose(2, 0, 1),
            lambda x: x[None],
            lambda x: x[:, 0],
            lambda x: x[1:3, ::2],
            lambda x: jnp.flip(x, 1),
            lambda x: jnp.concatenate([x, x], 1),
            lambda x: jnp.pad(x, ((1, 2), (0, 0), (3, 0))),
            lambda x: lax.pad(x, 0.0, ((1, -1, 2), (0, 0, 0), (-1, 2, 1))),
            lambda x: jnp.tile(x, (1, 2, 1)),
            lambda x: jnp.repeat(x, 2, 1),
            lambda x: jnp.stack([x, x], 1),
            lambda x: jnp.unstack(x, axis=1),
            lambda x: jnp.split(x, 3, 1),
            lambda x: jnp.roll(x, 2, 1),
            jnp.tril,
            lambda x: x.ravel()[3:7],
        ),
        X,
    ),
    "reductions": (
        each(
            jnp.sum,
            lambda x: x.sum(1),
            lambda x: x.mean((0, 2)),
            lambda x: x.max(1),
            lambda x: x.min(-1),
            lambda x: x.prod(0),
            lambda x: x.argmax(1),
            lambda x: x.argmin(-1),
            lambda x: jnp.cumsum(x, 1),
            lambda x: lax.cumsum(x, 1, reverse=True),
            lambda x: x.var(1),
            jnp.std,
            lambda x: jax.nn.logsumexp(x, 1),
            lambda x: jnp.sort(x, 1),
            lambda x: jnp.argsort(x, 1),
            lambda x: lax.top_k(x, 3),
            lambda x: jnp.median(x, 1),
        ),
        X,
    ),
    "lookups and updates": (
        each(
            lambda x, i: x[i],
            lambda x, i: x[:, i],
            lambda x, i: jnp.take(x, i + 1, axis=0),
            lambda x, i: jnp.take(x, i, axis=2, mode="clip"),
            lambda x, i: jnp.take_along_axis(x, i[:, None, None] % 5, axis=2),
            lambda x, i: x[i, i],
            lambda x, i: x.at[i].set(0.0, mode="clip"),
            lambda x, i: x.at[i].add(1.0),
            lambda x, i: x.at[:, i].mul(2.0),
            lambda x, i: x.at[0, i].max(0.3),
            lambda x, i: lax.dynamic_slice(x, (i[3], 0, i[1]), (2, 3, 2)),
            lambda x, i: lax.dynamic_update_slice(x, jnp.ones((2, 6, 2)), (i[3], 0, i[1])),
            lambda x, i: jax.vmap(lambda row, j: row[j])(x, i),
            lambda x, i: jax.nn.one_hot(i, 7),
            lambda x, i: jnp.arange(6) + i[0],
        ),
        X,
        ROWS,
    ),
    "products": (
        each(
            lambda x, y: jnp.einsum("abc,abd->acd", x, x),
            lambda x, y: jnp.einsum("abc,dc->abd", x, y),
            lambda x, y: jnp.einsum("abc,dbc->ad", x, x),
            lambda x, y: jnp.einsum("abc,dc->dab", x, y),
            lambda x, y: x @ y.T,
            lambda x, y: jnp.einsum("abc,c->ab", x, y[0]),
            lambda x, y: y[0] @ y[1],
            lambda x, y: jnp.einsum("abc,dec->abde", x, x),
            lambda x, y: jnp.einsum("abc,ac->ab", x, x[:, 0]),
            lambda x, y: jnp.outer(y[0], y[1]),
            lambda x, y: jax.nn.dot_product_attention(x[None], x[None], x[None], is_causal=True),
        ),
        X,
        M,
    ),
    "convolutions": (
        each(
            lambda x, k: conv(x, k, (2, 1), "SAME"),
            lambda x, k: conv(x, k, (1, 1), ((1, 2), (0, 1)), rhs_dilation=(2, 1)),
            lambda x, k: conv(x, k, (1, 1), ((1, 1), (2, 1)), lhs_dilation=(2, 2)),
            lambda x, k: conv(x, k[:, :, :1, :4], (1, 1), "SAME", feature_group_count=4),
            lambda x, k: lax.reduce_window(
                x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"
            ),
            lambda x, k: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
            lambda x, k: lax.reduce_window(
                x, jnp.inf, lax.min, (1, 2, 2, 1), (1, 1, 2, 1), "VALID"
            ),
        ),
        IMAGE,
        KERNEL,
    ),
    "control flow": (
        each(
            lambda x, i: lax.cond(i[0] > 0, lambda x: x + 1, lambda x: x * 2, x),
            lambda x, i: lax.switch(i[1], [lambda x: x, lambda x: x * 2, lambda x: x - 3], x),
            lambda x, i: lax.while_loop(
                lambda s: s[0] < i[1] + 4, lambda s: (s[0] + 1, s[1] * 1.5), (0, x)
            ),
            lambda x, i: lax.fori_loop(0, i[1] + 3, lambda j, c: c + j * x[:, 0].sum(), x),
            lambda x, i: lax.scan(lambda c, r: (c + r.sum(), r * c), 0.0, x),
            lambda x, i: lax.scan(lambda c, r: (c + r.sum(), r * c), 0.0, x, reverse=True),
            lambda x, i: jax.checkpoint(jnp.sin)(x),
        ),
        X,
        ROWS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_functions_give_what_they_give_in_jax(name):
    f, *args = CASES[name]
    assert_close(exported(f, *args), jax.jit(f)(*args))


def test_digits_near_zero_are_kept():
    f = lambda x: (jnp.expm1(x * 1e-4), jnp.log1p(x * 1e-4))  # noqa: E731
    for found, expected in zip(exported(f, X), f(X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_open_sizes_are_those_of_the_inputs():
    """One model for batches and lengths of any size."""
    b, n = export.symbolic_shape("b, n")

    def f(w, x):
        h = jnp.tanh(x @ w).reshape(x.shape[0], x.shape[1], 2, 4)
        scores = jnp.einsum("bshd,bthd->bhst", h, h) / x.shape[1]
        seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        mixed = jnp.einsum("bhst,bthd->bshd", shares, h).reshape(*x.shape[:2], 8)
        return jnp.concatenate([mixed, x], 1), mixed.mean((0, 1))

    w = normal(5, 8, 8)
    model = to_onnx(f, w)(jax.ShapeDtypeStruct((b, n, 8), jnp.float32))
    for shape in ((1, 3, 8), (4, 5, 8)):
        x = normal(6, *shape)
        assert_close(run(model, x), f(w, x))


def test_operations_along_open_sizes():
    b, n = export.symbolic_shape("b, n")

    def f(_, x):
        signs = x > 0
        yield x.max(1), x.min(), x.argmax(1), signs.any(1), signs.sum(), jnp.sort(x, 1)
        yield x[:, jnp.array([0, 9])], x[:, -1], jnp.cumsum(x, 1), lax.integer_pow(x, 0)
        yield jax.nn.one_hot(x[..., 0].astype(jnp.int32), 5), x.astype(jnp.int8)
        yield jqx.quantize(x, jnp.array([0.1, 0.2, 0.3, 0.4]), qtype="int8", axes=2)
        yield jqx.quantize(x, jnp.abs(x).max(axis=(1, 2)), qtype="int8", axes=0)

    model = to_onnx(lambda _, x: list(f(_, x)), {})(jax.ShapeDtypeStruct((b, n, 4), jnp.float32))
    for shape in ((1, 2, 4), (3, 5, 4)):
        x = np.asarray(normal(7, *shape))
        assert_close(run(model, x), jax.jit(lambda x: list(f(None, x)))(x))


def test_names_are_those_of_the_places():
    f = lambda p, batch, scale: {"y": batch["x"] @ p["w"], "z": scale}  # noqa: E731
    model = to_onnx(f, {"w": normal(0, 5, 2)})({"x": X}, jnp.float32(2))
    assert [x.name for x in model.graph.input] == ["input[0]['x']", "input[1]"]
    assert [x.name for x in model.graph.output] == ["output['y']", "output['z']"]


def test_what_has_no_form_is_refused_with_its_line():
    cases = [
        (lambda x: lax.igamma(x, x), "`igamma` has no rule for ONNX, at .*test_primitives"),
        (lambda x: lax.reduce_precision(x, 4, 3), "to 4 and 3 bits has no form"),
    ]
    for f, text in cases:
        with pytest.raises(NotImplementedError, match=text):
            to_onnx(lambda _, x: f(x), {})(X)  # noqa: B023


def test_rules_of_users_write_their_primitives():
    def hypotenuse(graph, equation, x, y):
        squares = [graph.add("Mul", a, a) for a in (x, y)]
        return graph.add("Sqrt", graph.add("Add", *squares))

    def gelu(graph, equation, x):
        return graph.add("Gelu", x, domain="com.microsoft")

    def largest(graph, equation, x):
        count = np.array([equation.params["k"]])
        values, indices = graph.add_many("TopK", 2, x, count, axis=0)
        return values, graph.cast(indices, np.int32)

    f = lambda x: lax.igamma(x, jnp.full_like(x, 3.0))  # noqa: E731
    with onnx_rules({"igamma": hypotenuse}), onnx_rules({"tanh": gelu, "top_k": largest}):
        assert_close(exported(f, X), jnp.hypot(X, jnp.full_like(X, 3.0)))
        assert_close(exported(jnp.tanh, X), jax.nn.gelu(X, approximate=False))
        found = exported(lambda x: lax.top_k(x, 2)[0], X[0, 0])
        assert_close(found, lax.top_k(X[0, 0], 2)[0])
    with pytest.raises(NotImplementedError, match=r"jqx.extend.onnx_rules"):
        exported(f, X)
    for result in (3, None, ["a", "b"]):
        with onnx_rules({"tanh": lambda *_, result=result: result}):
            with pytest.raises(TypeError, match="the rule for the primitive 'tanh' returned"):
                exported(jnp.tanh, X)
    for rules, text in (
        ({"tanh": 3}, "is not a function, but 3"),
        ([], "rules"),
        ({"dot_general": gelu}, "'dot_general' cannot have another rule"),
        ({"cond": gelu}, "'cond' cannot"),
    ):
        with pytest.raises((TypeError, ValueError), match=text), onnx_rules(rules):
            pass
