"""The three products of a layer, beside NumPy products of operands that NumPy rounds."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jqx
from jqx import recipes
from jqx._src.contractions import scaled
from jqx._src.tensor.products import FIXED_SIGNS
from jqx._src.train.products import layer, multiplied, prepared
from jqx.recipes import Product, Products, Rounded


def heavy(seed, *shape):
    """Random values with heavy tails, as activations and gradients have them."""
    return np.random.default_rng(seed).standard_t(4, size=shape).astype("f4")


X, W, DY = heavy(0, 2, 24, 48), heavy(1, 2, 40, 48), heavy(2, 2, 24, 40)


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


SYLVESTER = np.array([[1]])
for _ in range(4):
    SYLVESTER = np.block([[SYLVESTER, SYLVESTER], [SYLVESTER, -SYLVESTER]])
TRANSFORM = (np.diag(FIXED_SIGNS) @ SYLVESTER / 4).astype("f4")
"""The transform of NVIDIA's recipe."""


def hadamard(x, matrix=TRANSFORM):
    """The transform along the last axis; with the transposed matrix, its inverse."""
    return (groups(x, 16) @ matrix).reshape(*x.shape[:2], -1)


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


@pytest.mark.parametrize("name", ["nvfp4", *EXPECTED])
def test_the_order_in_memory_changes_no_number(name):
    """Operands are rounded in it, and products read codes in either order."""
    products = products_of(RECIPES.get(name) or recipes.nvfp4())

    @jax.jit
    def both(x, w):
        operands = []
        for product in (products.forward, products.dgrad, products.wgrad):
            for i, operand in enumerate((x, w)):
                if product.needs_key or product.hadamard:
                    continue
                alike = [prepared(operand, product, i, None, is_turned=t) for t in (False, True)]
                operands.append([x.dequantize() if hasattr(x, "scale") else x for x in alike])
        return operands

    operands = both(jnp.asarray(X), jnp.asarray(W))
    assert len(operands) == (2 if name == "nvfp4" else 6)
    for expected, result in operands:
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("turned", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_order_in_memory_changes_no_gradient(batch, turned):
    """Products of 16-bit floats are merged with transposes, also of their results."""
    products = products_of(recipes.int8())

    def run(x, w, dy, turned):
        y, pull = jax.vjp(lambda x, w: layer(x, w, products, None, turned=turned), x, w)
        return y, *(d.swapaxes(1, 2) if t else d for d, t in zip(pull(dy), turned, strict=True))

    args = [a[:batch] for a in (X, W, DY)]
    for result, expected in zip(
        jax.jit(run, static_argnums=3)(*args, turned),
        jax.jit(run, static_argnums=3)(*args, (False, False)),
        strict=True,
    ):
        if result.shape != expected.shape:
            expected = expected.swapaxes(1, 2)
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_the_form_for_gpus_and_tpus_is_the_same_product(name):
    """Elements times the scales of blocks are exact in bfloat16."""
    product = products_of(getattr(recipes, name)()).forward

    @jax.jit
    def forms_of(x, w):
        operands = [prepared(a, product, i, None) for i, a in enumerate((x, w))]
        assert all(map(scaled.has_blocks_exact_in_bfloat16, operands))
        forms = [scaled.exact_product]
        if all(map(scaled.has_scaled_bytes, operands)):
            forms.append(scaled.scaled_product)
        return [multiplied(*operands), *(form(*operands) for form in forms)]

    expected, *results = forms_of(*(jnp.asarray(a[..., :32]) for a in (X, W)))
    assert len(results) == (2 if name == "mxfp8" else 1)
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


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
DRAWS = 1024


def drawn(f):
    """The results of a function of a key, for many keys, [keys, ...]."""
    keys = jax.random.split(jax.random.key(1), DRAWS)
    return jax.jit(lambda keys: jax.lax.map(f, keys))(keys)


def spread(draws, lhs, rhs):
    """The squared error of draws of a product relative to its square, and the squared bias of their
    mean, times their number, relative to the error.
    """
    exact = np.einsum("bms,bns->bmn", lhs.astype("f8"), rhs.astype("f8"))
    draws = np.asarray(draws)
    error = np.square(draws - exact).mean()
    bias = np.square(draws.mean(0, dtype="f8") - exact).mean()
    return error / np.square(exact).mean(), DRAWS * bias / error


ALSO_IN_NVFP4 = ("nvfp4 stochastic", "nvfp4 stochastic, hadamard")
"""Slow, since the recipe is tested below."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] if x in ALSO_IN_NVFP4 else []) for x in RANDOM],
)
def test_stochastic_products_are_right_in_the_mean_and_nearest_ones_are_not(name):
    product = RANDOM[name]
    x, w = heavy(33, 1, 24, 128), heavy(34, 1, 32, 128)
    draws = drawn(
        lambda key: multiplied(prepared(x, product, 0, key), prepared(w, product, 1, key))
    )
    error, bias = spread(draws, x, w)
    if name.startswith("nearest"):
        assert bias > 1.3
    else:
        # Blocks of 32 mix outliers too little, and a thousand draws show the bias that is left.
        assert 0.85 < bias < (1.4 if name == "eden 32" else 1.15)
    if name.startswith("eden"):  # measured .41 of the error of stochastic rounding, .052
        assert error < 0.5 * 0.052


NVFP4, QUARTET2 = (products_of(make()) for make in (recipes.nvfp4, recipes.quartet2))
NEAREST = Product(RUN, RUN, hadamard=128)
BACKWARD = {
    "nvfp4": NVFP4,
    "quartet2": QUARTET2,
    "nvfp4, nearest": Products(
        NVFP4.forward, (RUN, NVFP4.dgrad.rhs), Product(RUN, RUN, hadamard=16, signs="fixed")
    ),
    "quartet2, nearest": Products(QUARTET2.forward, NEAREST, NEAREST, "rounded"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] if x != "nvfp4" else []) for x in BACKWARD],
)
def test_both_backward_products_of_a_recipe_are_right_in_the_mean(name):
    """Right is the product of the operands as it receives them. nvfp4 rounds w, and x after its
    transform, to nearest in the backward pass too; quartet2 receives both as the forward product
    has rounded them. dy arrives as a float.
    """
    products = BACKWARD[name]
    rows = 64 if name.startswith("nvfp4") else 128  # a block of the transform
    x, w, dy = heavy(3, 1, rows, 32), heavy(4, 1, rows, 32), heavy(5, 1, rows, rows)

    def gradients(key):
        return jax.vjp(lambda x, w: layer(x, w, products, key), x, w)[1](jnp.asarray(dy))

    dx, dw = drawn(gradients)
    received = [prepared(a, products.forward, i, None).dequantize() for i, a in enumerate((x, w))]
    if name.startswith("nvfp4"):
        transformed = prepared(x.swapaxes(1, 2), products.wgrad, 0, None).dequantize()
        received[0] = hadamard(transformed, TRANSFORM.T).swapaxes(1, 2)
    x, w = map(np.asarray, received)
    biases = [
        spread(dx, dy, w.swapaxes(1, 2))[1],
        spread(dw, dy.swapaxes(1, 2), x.swapaxes(1, 2))[1],
    ]
    if name.endswith("nearest"):
        assert min(biases) > 1.3
    else:
        assert 0.85 < min(biases) and max(biases) < 1.15


# Micro-batches.

ROWS_OF_THEIR_OWN = {
    "int8": (True, True),
    "fp8_block": (True, True),
    "mxfp8": (True, True),
    "fp8_rowwise": (True, False),
    "fp8": (False, False),
}
"""Whether the scales of the operands of forward and dgrad, and those of wgrad, do not depend on how
many micro-batches the rows are in: per tensor they do; per row they do in wgrad, which sums rows.
"""


@pytest.mark.parametrize("name", ROWS_OF_THEIR_OWN)
def test_micro_batches_have_the_codes_of_the_large_batch_where_rows_have_scales(name):
    """And the sum of their gradients is its gradient, but for rounding in float32."""
    products = products_of(RECIPES[name])
    x, w, dy = heavy(3, 1, 128, 64), heavy(4, 1, 48, 64), heavy(5, 1, 128, 48)

    def run(x, dy):
        turned = x.swapaxes(1, 2), dy.swapaxes(1, 2)
        rows = [prepared(x, products.forward, 0, None), prepared(dy, products.dgrad, 0, None)]
        columns = [prepared(a, products.wgrad, i, None) for i, a in enumerate(turned)]
        gradients = jax.vjp(lambda x, w: layer(x, w, products, None), x, w)[1](dy)
        return jax.tree.leaves(rows), jax.tree.leaves(columns), gradients

    @jax.jit
    def both(x, dy):
        parts = [a.reshape(4, 1, 32, -1) for a in (x, dy)]
        return run(x, dy), jax.lax.map(lambda part: run(*part), parts)

    large, parts = jax.tree.map(np.asarray, both(x, dy))
    for which, axis, expected in zip((0, 1), (1, 2), ROWS_OF_THEIR_OWN[name], strict=True):
        joined = [np.concatenate([*a], axis) for a in parts[which]]
        assert expected == all(map(np.array_equal, joined, large[which]))
    dx, dw = large[2]
    joined = np.concatenate([*parts[2][0]], 1), parts[2][1].sum(0)
    for found, exact, expected in zip(joined, (dx, dw), ROWS_OF_THEIR_OWN[name], strict=True):
        error = np.abs(found - exact).max() / np.abs(exact).max()
        assert error < 1e-6 if expected else error > 1e-3


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
    [
        *(("int8", 0.26), ("fp8", 0.26), ("fp8_block", 0.3), ("mxfp8", 0.3)),
        *(("nvfp4", 0.15), ("quartet2", 0.15)),
    ],
)
def test_operands_are_kept_in_codes(name, most):
    """Bytes of what the backward pass keeps, relative to both operands in float32. It keeps no
    floats of 4 or 8 bits, which XLA on CPU converts one by one.
    """
    products = products_of(RECIPES.get(name) or getattr(recipes, name)())
    x, w = (jax.ShapeDtypeStruct(shape, "f4") for shape in ((1, 256, 512), (1, 384, 512)))
    key = jax.random.key(0) if products.needs_key else None
    run = lambda x, w: layer(x, w, products, key)  # noqa: E731
    _, pull = jax.eval_shape(lambda x, w: jax.vjp(run, x, w), x, w)
    kept = [
        leaf
        for leaf in jax.tree.leaves(pull)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in kept) < most * 4 * (x.size + w.size)
    floats = {leaf.dtype for leaf in kept if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert all(jnp.finfo(dtype).bits > 8 for dtype in floats)


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
