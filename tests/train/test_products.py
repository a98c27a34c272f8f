"""The three products of a layer, beside NumPy products of operands that NumPy rounds."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jqx
from jqx import recipes
from jqx._src.tensor.products import FIXED_SIGNS
from jqx._src.train.products import layer, multiplied, prepared
from jqx.recipes import Product, Products, Rounded

RNG = np.random.default_rng(0)
X, W, DY = (
    RNG.standard_t(4, size=shape).astype("f4") for shape in ((2, 24, 48), (2, 40, 48), (2, 24, 40))
)


def groups(x, size):
    """Runs along the last axis, with zeros at the end: [batch, kept, runs, size]."""
    padded = np.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % size)))
    return padded.reshape(*x.shape[:2], -1, size)


def runs(x, size, to_grid):
    """An operand that is rounded in runs along the last axis."""
    parts = groups(x.astype("f4"), size)
    real = to_grid(parts, np.abs(parts).max(-1, keepdims=True))
    return real.astype("f8").reshape(*x.shape[:2], -1)[..., : x.shape[-1]]


def squares(x, size, to_grid):
    """An operand that is rounded in squares of its last two axes."""
    rows, columns = -x.shape[1] % size, -x.shape[2] % size
    padded = np.pad(x.astype("f4"), ((0, 0), (0, rows), (0, columns)))
    batch, height, width = padded.shape
    parts = padded.reshape(batch, height // size, size, width // size, size)
    real = to_grid(parts, np.abs(parts).max((2, 4), keepdims=True)).astype("f8")
    return real.reshape(padded.shape)[:, : x.shape[1], : x.shape[2]]


def cast(x, dtype):
    return x.astype(dtype).astype("f4")


def int8(x, largest):
    scale = largest / np.float32(127)
    return np.rint(x / scale) * scale


def of_float(dtype):
    high = np.float32(ml_dtypes.finfo(dtype).max)

    def to_grid(x, largest):
        scale = largest / high
        scale = np.where(scale == 0, np.float32(1), scale)
        return cast(x / scale, dtype) * scale

    return to_grid


def mxfp8(x, largest):
    scale = np.exp2(np.ceil(np.log2(largest / np.float32(448))))
    return cast(x / scale, ml_dtypes.float8_e4m3fn) * scale


def nvfp4(x, largest):
    """Scales in e4m3 under one scale for each member of the batch."""
    scale = largest / np.float32(6)
    inner = scale.reshape(len(x), -1).max(1).reshape(-1, *[1] * (x.ndim - 1)) / np.float32(448)
    scale = cast(scale / inner, ml_dtypes.float8_e4m3fn) * inner
    return cast(np.clip(x / scale, -6, 6), ml_dtypes.float4_e2m1fn) * scale


def tensor(x, to_grid):
    """An operand with one scale."""
    return to_grid(x, np.abs(x).max(keepdims=True)).astype("f8")


def hadamard(x):
    """The transform of NVIDIA's recipe along the last axis."""
    matrix = np.array([[1]])
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix = np.diag(FIXED_SIGNS) @ matrix / 4
    return (groups(x, 16) @ matrix.astype("f4")).reshape(*x.shape[:2], -1)


E4M3, E5M2 = of_float(ml_dtypes.float8_e4m3fn), of_float(ml_dtypes.float8_e5m2)

EXPECTED = {
    "int8": {
        "x": lambda x: runs(x, x.shape[-1], int8),
        "wgrad": lambda x: cast(x, ml_dtypes.bfloat16).astype("f8"),
    },
    "int8 in runs": {
        "x": lambda x: runs(x, x.shape[-1], int8),
        "wgrad": lambda x: runs(x, 8, int8),
    },
    "fp8": {"x": lambda x: tensor(x, E4M3), "dy": lambda x: tensor(x, E5M2)},
    "fp8_rowwise": {"x": lambda x: runs(x, x.shape[-1], E4M3)},
    "fp8_block": {"x": lambda x: runs(x, 16, E4M3), "w": lambda x: squares(x, 16, E4M3)},
    "mxfp8": {"x": lambda x: runs(x, 32, mxfp8)},
}
"""How NumPy rounds: `x`, and `w`, `dy` and both operands of wgrad if they differ."""

RECIPES = {
    "int8": recipes.int8(),
    "int8 in runs": recipes.int8(wgrad="int8:group=8"),
    "fp8": recipes.fp8(),
    "fp8_rowwise": recipes.fp8_rowwise(),
    "fp8_block": recipes.fp8_block(block=16),
    "mxfp8": recipes.mxfp8(),
}


def products_of(recipe):
    return recipe.rules[-1][1]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_products_are_those_of_operands_that_numpy_rounds(name):
    products, expected = products_of(RECIPES[name]), EXPECTED[name]
    x, w = expected["x"], expected.get("w", expected["x"])
    dy = expected.get("dy", x)
    in_wgrad = expected.get("wgrad")

    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: layer(x, w, products, None), x, w)
        return y, *pull(dy)[:2]

    y, dx, dw = jax.jit(run)(X, W, DY)
    is_rounded = products.backward_from == "rounded"
    again = {"x": x(X).astype("f4"), "w": w(W).astype("f4")} if is_rounded else {"x": X, "w": W}
    turned = {name: a.swapaxes(1, 2) for name, a in (again | {"dy": DY}).items()}
    pairs = [
        (y, x(X), w(W)),
        (dx, dy(DY), w(turned["w"])),
        (dw, (in_wgrad or dy)(turned["dy"]), (in_wgrad or x)(turned["x"])),
    ]
    for result, lhs, rhs in pairs:
        exact = np.einsum("bms,bns->bmn", lhs, rhs)
        np.testing.assert_allclose(result, exact, rtol=0, atol=2e-6 * np.abs(exact).max())


def test_operands_of_nvfp4_are_those_of_numpy():
    products = products_of(recipes.nvfp4())
    run, square = (
        np.asarray(prepared(a, products.forward, i, None).dequantize())
        for i, a in enumerate((X, W))
    )
    np.testing.assert_allclose(run, runs(X, 16, nvfp4), rtol=1e-6)
    np.testing.assert_allclose(square, squares(W, 16, nvfp4), rtol=1e-6)
    rows = X.swapaxes(1, 2)
    turned = prepared(rows, products.wgrad, 0, None).dequantize()
    transformed = hadamard(rows)
    rounded = runs(transformed, 16, nvfp4)
    different = np.abs(turned - rounded) > 1e-6 * np.abs(rounded).max()
    assert different.mean() < 0.01  # the transform is a float product, and some values are ties


# Products that draw random numbers.

RUN = jqx.QSpec("nvfp4", jqx.per_group(16, tail=True))
SR = Rounded(RUN, "stochastic")
EDEN = Rounded(jqx.QSpec("nvfp4", jqx.per_group(16)), "eden")
INT8 = Rounded(jqx.QSpec("int8", jqx.per_channel()), "stochastic")
MXFP8 = Rounded(jqx.QSpec("mxfp8_e4m3", calibrator=jqx.calibrators.ceil), "stochastic")
RANDOM = {
    "nvfp4 stochastic": Product(SR, SR),
    "nvfp4 stochastic, hadamard": Product(SR, SR, hadamard=16),
    "eden 32": Product(EDEN, EDEN, hadamard=32),
    "eden 128": Product(EDEN, EDEN, hadamard=128),
    "int8": Product(INT8, INT8),
    "mxfp8": Product(MXFP8, MXFP8),
    "nearest, hadamard": Product(RUN, RUN, hadamard=32),
}
DRAWS = 256


def spread(product, x, w):
    """The squared error of a product relative to its square, and the squared bias of the mean of
    the draws, times their number, relative to the error.
    """
    draws = jax.jit(
        lambda keys: jax.lax.map(
            lambda key: multiplied(prepared(x, product, 0, key), prepared(w, product, 1, key)), keys
        )
    )(jax.random.split(jax.random.key(1), DRAWS))
    exact = np.einsum("bms,bns->bmn", x.astype("f8"), w.astype("f8"))
    draws = np.asarray(draws, "f8")
    error = ((draws - exact) ** 2).mean()
    bias = ((draws.mean(0) - exact) ** 2).mean()
    return error / (exact**2).mean(), DRAWS * bias / error


@pytest.mark.parametrize("name", RANDOM)
def test_stochastic_products_are_right_in_the_mean_and_nearest_ones_are_not(name):
    x, w = (RNG.standard_t(4, size=(1, n, 256)).astype("f4") for n in (32, 48))
    error, bias = spread(RANDOM[name], x, w)
    if name.startswith("nearest"):
        assert bias > 1.3
    else:
        assert 0.85 < bias < 1.15
    if name.startswith("eden"):  # measured .41 of the error of stochastic rounding, .052
        assert error < 0.5 * 0.052


def test_the_same_key_gives_the_same_bits_and_another_key_others():
    products = products_of(recipes.quartet2(hadamard=32))

    @jax.jit
    def gradients(key):
        _, pull = jax.vjp(lambda x, w: layer(x, w, products, key), X, W)
        return pull(jnp.asarray(DY))

    first, again, other = (gradients(jax.random.key(i)) for i in (0, 0, 1))
    assert all(bool((a == b).all()) for a, b in zip(first, again, strict=True))
    assert all(bool((a != b).any()) for a, b in zip(first, other, strict=True))


def test_the_transform_of_a_forward_product_is_undone_where_the_backward_pass_rounds_its_operands():
    """With operands in int16, rounding hardly matters, and the gradients are those of float."""
    fine = jqx.QSpec("int16", jqx.per_channel())
    floats = (jnp.float32, jnp.float32)
    products = Products(Product(fine, fine, hadamard=16), floats, floats, "rounded")

    @jax.jit
    def gradients(x, w, dy):
        return jax.vjp(lambda x, w: layer(x, w, products, jax.random.key(0)), x, w)[1](dy)

    expected = np.einsum("bmn,bns->bms", DY, W), np.einsum("bmn,bms->bns", DY, X)
    for found, exact in zip(gradients(X, W, DY), expected, strict=True):
        # half a step of 16 bits is 2**-16 of the largest number of a row
        np.testing.assert_allclose(found, exact, rtol=0, atol=2.0**-12 * np.abs(exact).max())


# What is kept for the backward pass.


@pytest.mark.parametrize(
    ("name", "most"),
    [("int8", 0.26), ("fp8", 0.26), ("fp8_block", 0.3), ("mxfp8", 0.3), ("nvfp4", 0.3)],
)
def test_operands_are_kept_in_codes(name, most):
    """Bytes of what the backward pass keeps, relative to both operands in float32. Formats of 4
    bits take a byte for each code in arrays of JAX.
    """
    products = products_of(RECIPES.get(name) or getattr(recipes, name)())
    x, w = (jax.ShapeDtypeStruct(shape, "f4") for shape in ((1, 256, 512), (1, 384, 512)))
    key = jax.random.key(0) if products.needs_key else None
    run = lambda x, w: layer(x, w, products, key)  # noqa: E731
    _, pull = jax.eval_shape(lambda x, w: jax.vjp(run, x, w), x, w)
    kept = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(pull)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )
    assert kept < most * 4 * (x.size + w.size)


# Errors.

PAIR = (RUN, RUN)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Product(EDEN, EDEN, hadamard=16), "biased below"),
        (lambda: Product(EDEN, EDEN, hadamard=32, signs="fixed"), "random signs"),
        (lambda: Product(RUN, RUN, hadamard=17), "not a power of two: 17"),
        (lambda: Product(RUN, RUN, hadamard=32, signs="fixed"), "16 fixed signs"),
        (lambda: Product("int8", 3), "neither a spec nor a float dtype: 3"),
        (lambda: Rounded("int8", "eden"), "int8 has no scales in a float format"),
        (lambda: Rounded("uint8:asymmetric", "stochastic"), "is for symmetric specs"),
        (lambda: Rounded("int8", "up"), "`rounding` is unknown: 'up'"),
        (lambda: Products("int8", "int8", "int8"), "forward"),
        (lambda: Products(PAIR, PAIR, PAIR, "codes"), "`backward_from`"),
        (lambda: recipes.Recipe("mine", [None]), "rules"),
        (lambda: recipes.Recipe("mine", {".*": Product(RUN, RUN)}), "pass Products"),
        (
            lambda: recipes.Recipe(
                "mine", {".*": Products(("int8", "bfloat16"), (RUN, RUN), (RUN, RUN))}
            ),
            "has an operand in bfloat16",
        ),
    ],
)
def test_recipes_that_make_no_sense_are_refused(make, text):
    with pytest.raises((TypeError, ValueError), match=text):
        make()
