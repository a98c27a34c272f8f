"""Products of codes by jqx-cpu beside NumPy, and beside what jqx computes without it: with scales
of rows and columns, in groups, in batches, of rows in groups, and as codes of sums.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src import package_cpu
from jqx._src.contractions.kernels_cpu import plain_sums
from jqx._src.kernels.products_cpu import float_product_cpu, product_cpu

from ..arrays import normal

pytest.importorskip("jqx_cpu")


def chosen(f, *args):
    return [x.cpu.name for x in jqx.formulations(f)(*args)]


def integers(rng, *shape):
    return jnp.asarray(rng.integers(-128, 128, shape), jnp.int8)


SHAPES = (
    (1, 1, 1),
    (1, 64, 4),
    (3, 65, 5),
    (6, 300, 64),
    (24, 7, 70),
    (49, 130, 66),
    (97, 64, 129),
)


def test_sums_are_exact_with_zero_points_of_either_side():
    rng, operands, expected = np.random.default_rng(0), [], []
    for (m, k, n), has_x, has_w in itertools.product(SHAPES, (False, True), (False, True)):
        x, w = integers(rng, 2, m, k), integers(rng, 2, n, k)
        a = integers(rng, 2, m if n % 2 else 1).astype(jnp.int32) if has_x else None
        b = integers(rng, 2, 1 if n % 3 else n).astype(jnp.int32) if has_w else None
        operands.append((x, None, a, w, None, b))
        left, right = (np.asarray(y, np.int64) for y in (x, w))
        left = left if a is None else left - np.asarray(a)[:, :, None]
        right = right if b is None else right - np.asarray(b)[:, :, None]
        expected.append(np.einsum("bmk,bnk->bmn", left, right).astype(np.int32))
    sums = jax.jit(lambda every: [product_cpu(*each) for each in every])(operands)
    for x, y in zip(sums, expected, strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


def test_intermediate_terms_wrap_around_and_the_total_does_not():
    k = 60000
    x, w = (jnp.full((1, 1, k), value, jnp.int8) for value in (127, 100))
    zero = jnp.full((1, 1), 126, jnp.int32)
    (y,) = product_cpu(x, None, zero, w, None, jnp.full((1, 1), 99, jnp.int32)).ravel()
    assert int(y) == k


def test_codes_made_in_a_kernel_equal_those_of_the_ops():
    """Halves, NaN, infinities, the ends of the range, subnormal numbers."""
    edges = np.float32([0.5, 1.5, -2.5, 126.5, 127.5, -128.5, 1e9, np.inf, -np.inf, np.nan, 1e-40])
    x = np.concatenate([edges, np.asarray(normal(0, 501)) * 40]).astype(np.float32)
    rows = jnp.asarray(np.stack([x, x * 3, x / 7]))
    scale = jnp.asarray([[1.0], [3.0], [0.3]])
    spec = jqx.QSpec("int8", jqx.per_axis(0))
    codes = jqx.QTensor.quantize(rows, spec, jqx.calibrators.Affine(scale)).values
    one = jnp.eye(rows.shape[1], dtype=jnp.int8)[None]
    made = product_cpu(rows[None], scale.T, None, one, None, None, low=-127, high=127)
    low = int(codes.min())
    assert low in (-127, -128)
    if low == -128:
        made = product_cpu(rows[None], scale.T, None, one, None, None, low=-128, high=127)
    np.testing.assert_array_equal(made[0], np.asarray(codes, np.int32))


@pytest.mark.parametrize("preset", ["w8a8_dynamic", "w8a8"])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_products_of_codes_are_those_without_it(preset, rows):
    f = lambda w, x: jnp.abs(x @ w["a"]) @ w["b"]  # noqa: E731
    w = {"a": normal(0, 256, 130), "b": normal(1, 130, 72)}
    x = normal(2, rows, 256)
    plan = jqx.make_plan(f, getattr(jqx.presets, preset)())(w, x)
    q = jqx.quantize_params(w, plan)
    packed, affines = jqx.pack_for(q, "cpu"), None
    if preset == "w8a8":
        affines = jqx.affines(plan, jqx.calibrate(f, plan)(w, x)[1])
    # As an argument: XLA would multiply the constants of two scales.
    run = jax.jit(lambda q, x, affines: jqx.convert(f, plan, affines)(q, x))
    forms = ["package_rows"] if rows > 5 else ["package_quantizing"] * 2
    assert chosen(jqx.convert(f, plan, affines), packed, x) == forms
    np.testing.assert_array_equal(run(packed, x, affines), run(q, x, affines), strict=True)
    plain = jqx.QTensor.quantize(x, jqx.QSpec("int8", jqx.per_axis(0)))
    assert chosen(jqx.matmul, plain, packed["a"]) == ["package_codes"]
    np.testing.assert_array_equal(
        jax.jit(jqx.matmul)(plain, packed["a"]), jax.jit(jqx.matmul)(plain, q["a"]), strict=True
    )


def test_products_compose_with_transforms():
    f = lambda w, x: x @ w  # noqa: E731
    w, x = normal(0, 256, 192), normal(1, 5, 3, 256)
    for preset in ("w8a8_dynamic", "w8a16", "w4a16"):
        plan = jqx.make_plan(f, getattr(jqx.presets, preset)())(w, x[0])
        q = jqx.quantize_params(w, plan)
        p, g = jqx.pack_for(q, "cpu"), jqx.convert(f, plan)
        one = jnp.stack([jax.jit(g)(p, each) for each in x])
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * 5), p)
        for axes, operands in (
            ((None, 0), (p, x)),
            ((0, 0), (stack, x)),
            ((0, None), (stack, x[0])),
        ):
            expected = one if axes[1] == 0 else jnp.stack([one[0]] * 5)
            mapped = jax.jit(jax.vmap(g, axes))(*operands)
            np.testing.assert_array_equal(mapped, expected)
        nested = jax.vmap(jax.vmap(g, (None, 0)), (0, None))(stack, x)
        np.testing.assert_array_equal(nested, jnp.stack([one] * 5))
        np.testing.assert_array_equal(g(p, x[0]), one[0])
        if preset == "w8a8_dynamic":
            continue
        c = normal(2, 3, 192)
        weighed = lambda x, q, g=g, c=c: (g(q, x) * c).sum()  # noqa: E731
        gradients = [jax.jit(jax.grad(weighed))(x[0], weight) for weight in (p, q)]
        # Sums of 192 products, in another order.
        size = float((jnp.abs(c) @ jnp.abs(q.dequantize()).T).max())
        np.testing.assert_allclose(*gradients, rtol=0, atol=size * 192 * 2.0**-24)


def test_a_scan_has_the_numbers_of_its_layers_one_by_one():
    layer = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    scanned = lambda w, x: jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]  # noqa: E731
    w, x = normal(0, 4, 192, 192), normal(1, 3, 192)
    for preset in ("w8a8_dynamic", "w4a16"):
        policy = getattr(jqx.presets, preset)()
        plans = jqx.make_plan(scanned, policy)(w, x), jqx.make_plan(layer, policy)(w[0], x)
        q, y = jqx.pack_for(jqx.quantize_params(w, plans[0]), "cpu"), x
        for i in range(len(w)):
            y = jax.jit(jqx.convert(layer, plans[1]))(q[i], y)
        np.testing.assert_array_equal(jax.jit(jqx.convert(scanned, plans[0]))(q, x), y)


def test_a_weight_is_found_in_its_stack():
    """No step copies it: what is in memory beside is smaller than one."""

    def f(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    w, x = normal(0, 4, 512, 512), normal(1, 1, 512)
    for preset in ("w8a8_dynamic", "w4a16"):
        plan = jqx.make_plan(f, getattr(jqx.presets, preset)())(w, x)
        q = jqx.pack_for(jqx.quantize_params(w, plan), "cpu")
        compiled = jax.jit(jqx.convert(f, plan)).lower(q, x).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < q.values.nbytes / 8


def codes_beside(x, x_scale, w, **options):
    return product_cpu(x, x_scale, None, w, None, None, **options)


def floats_beside(k, size, bits=4):
    operands = jnp.zeros((1, 2, k)), jnp.zeros((1, 4, size), jnp.uint8), None, jnp.ones((1, 2, 4))
    return float_product_cpu(*operands, None, bits=bits, is_signed=True)


ROWS, WEIGHT = jnp.zeros((1, 2, 3)), jnp.zeros((1, 4, 3), jnp.int8)


WRONG = {
    "weights are s8": lambda: codes_beside(ROWS, jnp.ones((1, 2)), WEIGHT[:, :, :2]),
    "rows are s8 or f32": lambda: codes_beside(ROWS.astype(jnp.int16), None, WEIGHT),
    "a scale is missing": lambda: codes_beside(ROWS, None, WEIGHT),
    "scales of rows": lambda: codes_beside(ROWS, jnp.ones((1, 5)), WEIGHT),
    "codes are in": lambda: codes_beside(ROWS, jnp.ones((1, 2)), WEIGHT, low=-300),
    "no kernel for such groups": lambda: floats_beside(96, 48),
    "weights are u8": lambda: floats_beside(64, 31),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_buffer_is_an_error_of_xla(text):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jqx_cpu: .*{text}"):
        jax.block_until_ready(WRONG[text]())


GROUPED = (
    jqx.QSpec(jnp.int4, jqx.per_axis(1)),
    jqx.QSpec(jnp.int4, jqx.per_block({0: 32, 1: 1})),
    jqx.QSpec(jnp.uint4, jqx.per_block({0: 64, 1: 1}), symmetric=False),
    jqx.QSpec(jnp.int8, jqx.per_block({0: 64, 1: 1})),
    jqx.QSpec(jnp.uint8, jqx.per_block({0: 128, 1: 1}), symmetric=False),
    jqx.QSpec(jnp.int2, jqx.per_block({0: 128, 1: 1})),
)


COUNTS = (1, 3, 8, 47, 70)


EPS = np.finfo(np.float32).eps


jqx.matmul = jqx.matmul


def weight(spec, k=256, n=130):
    return jqx.pack_for(jqx.QTensor.quantize(normal(1, k, n), spec), "cpu")


def codes(m, k=256):
    return jqx.QTensor.quantize(normal(m, m, k), jqx.QSpec(jnp.int8, jqx.per_axis(0)))


def real(*operands):
    return (np.asarray(x.dequantize() if hasattr(x, "qtype") else x, np.float64) for x in operands)


def test_codes_meet_weights_in_groups():
    pairs = [(codes(m), weight(spec)) for m in COUNTS for spec in GROUPED]
    for pair in pairs:
        (chosen,) = jqx.formulations(jqx.matmul)(*pair)
        assert chosen.cpu.name == "package_groups", pair
    products = jax.jit(lambda every: [jqx.matmul(*pair) for pair in every])(pairs)
    for (x, q), y in zip(pairs, products, strict=True):
        left, right = real(x, q)
        # Sums of codes are exact; those of at most 16 runs, and scales, are rounded.
        bound = np.abs(left) @ np.abs(right)
        assert (np.abs(y - left @ right) <= 32 * EPS * bound).all()


def test_long_sums_do_not_wrap_around():
    """One group of more products than 32 bits hold, of codes, of floats, and of rows in groups."""
    k = 140_000
    x = jqx.QTensor(jnp.full((2, k), 127, jnp.int8), jnp.ones((2, 1)), None, qtype=jnp.int8)
    codes_of_weight = jnp.full((1, 8, k), 127, jnp.int8)
    w = jqx.QTensor(codes_of_weight[0], jnp.ones((8, 1)), None, qtype=jnp.int8)
    experts = jqx.QTensor(codes_of_weight, jnp.ones((1, 8, 1)), None, qtype=jnp.int8)
    experts = experts.transpose(0, 2, 1).pack_for("cpu")
    rows, sizes = x.dequantize(), jnp.array([2])
    products = [jqx.einsum("mk,nk->mn", each, w) for each in (x, rows)]
    products += [jqx.ragged_dot(each, experts, sizes) for each in (x, rows)]
    for y in products:  # exact runs, summed in float32: at most 2,200 of them
        assert (np.abs(y - 127.0**2 * k) <= 2200 * EPS * 127.0**2 * k).all()


def test_codes_with_scales_of_powers_of_two_are_exact():
    x = jqx.QTensor(codes(9).values, jnp.full((9, 1), 0.25), None, qtype=jnp.int8)
    for spec in GROUPED[:2]:
        q = weight(spec)
        q = jqx.QTensor.quantize(
            jnp.round(normal(2, 256, 130)), spec, jqx.calibrators.Affine(jnp.ones(q.scale.shape))
        )
        y = jqx.matmul(x, jqx.pack_for(q, "cpu"))
        left, right = real(x, q)
        np.testing.assert_array_equal(y, left @ right)


def test_derivatives_of_groups_are_those_of_the_plain_form():
    q, m = weight(GROUPED[1]), 8

    def squares(scale, q):
        x = codes(m)
        return jnp.sum(jqx.matmul(jqx.QTensor(x.values, scale, None, qtype=x.qtype), q) ** 2)

    scale = codes(m).scale
    slopes, plain = (jax.grad(squares)(scale, each) for each in (q, q.dequantize()))
    left, right = real(codes(m), q)
    terms = (2 * np.abs(left @ right) * (np.abs(left) @ np.abs(right))).sum(1) / scale.ravel()
    # A sum over 256 products and one over 130 columns, each in another order.
    assert (np.abs(slopes - plain).ravel() <= 2 * 386 * EPS * terms).all()


def test_rows_of_one_scale_each_are_mapped():
    x = normal(0, 3, 4, 256)
    for spec in (GROUPED[1], jqx.QSpec(jnp.int8, jqx.per_axis(1))):
        q = weight(spec)
        for activation in (jqx.QSpec(jnp.int8), jqx.QSpec(jnp.int8, symmetric=False)):
            f = lambda x, s=activation, q=q: jqx.matmul(jqx.QTensor.quantize(x, s), q)  # noqa: E731
            alone = jnp.stack([jax.jit(f)(each) for each in x])
            np.testing.assert_array_equal(jax.jit(jax.vmap(f))(x), alone)


def test_codes_in_a_scan_find_their_weight():
    stack = jax.tree.map(lambda *x: jnp.stack(x), *[weight(GROUPED[1])] * 3)
    x = codes(3)

    @jax.jit
    def run(x, stack):
        return lax.scan(lambda c, q: (c, jqx.matmul(x, q)), None, stack)[1]

    np.testing.assert_array_equal(run(x, stack)[1], jax.jit(jqx.matmul)(x, weight(GROUPED[1])))


@pytest.mark.parametrize("precision", ["default", "bfloat16", lax.Precision.DEFAULT])
def test_default_precision_takes_two_digits(precision):
    for m in (3, 70):
        x, q = normal(m, m, 256), weight(GROUPED[1])
        f = jax.jit(lambda x, q: jqx.matmul(x, q, precision=precision))
        y, exact = f(x, q), jax.jit(jqx.matmul)(x, q)
        left, right = real(x, q)
        step = np.abs(left).max(axis=1, keepdims=True) / 32600
        error = np.abs(y - left @ right)
        # Each number is half a step wrong at most, and floats are summed.
        rounded = 32 * EPS * (np.abs(left) @ np.abs(right))
        assert (error <= (step / 2) * np.abs(right).sum(0) + rounded).all()
        # Three digits have 8 bits more.
        assert (
            np.abs(exact - left @ right) <= step / 2 / 256 * np.abs(right).sum(0) + rounded
        ).all()
    assert "digits = 2 : i32" in f.lower(x, q).as_text()
    assert "digits = 3 : i32" in jax.jit(jqx.matmul).lower(x, q).as_text()


SCORES, MIXED = "btnh,bsnh->bnts", "bnts,bsnh->btnh"


SHARED = (
    jqx.QSpec(jnp.int8, jqx.per_tensor()),
    jqx.QSpec(jnp.int8, jqx.per_axis(0)),
    jqx.QSpec(jnp.uint8, jqx.per_tensor(), symmetric=False),
)


def attended(spec, seed=0, length=70):
    """Queries or keys [2, length, 6, 32], and weights of attention [2, 6, length, length]."""
    return (
        jqx.QTensor.quantize(normal(seed, 2, length, 6, 32), spec),
        jqx.QTensor.quantize(jax.nn.softmax(normal(seed + 1, 2, 6, length, length)), spec),
    )


def attention(q, k, v, p):
    return jqx.einsum(SCORES, q, k), jqx.einsum(MIXED, p, v)


def exact_sums(pattern, x, y):
    """The int64 sums of codes, each less its zero point, times both scales in float32."""
    codes = [
        np.asarray(q.values, np.int64)
        - (0 if q.zero_point is None else np.asarray(q.zero_point, np.int64))
        for q in (x, y)
    ]
    left, right = (np.asarray(q.scale).reshape(-1, 1, 1, 1) for q in (x, y))
    return np.einsum(pattern, *codes).astype(np.float32) * left * right


def test_batches_are_multiplied_exactly():
    operands = []
    for spec in SHARED:
        (q, p), (k, _), (v, _) = (attended(spec, seed) for seed in (0, 2, 4))
        operands.append((q, k, v, p))
    names = {c.cpu.name for each in operands for c in jqx.formulations(attention)(*each)}
    assert names == {"package_batches"}
    products = jax.jit(lambda every: [attention(*each) for each in every])(operands)
    for (q, k, v, p), (scores, mixed) in zip(operands, products, strict=True):
        np.testing.assert_array_equal(scores, exact_sums(SCORES, q, k), strict=True)
        np.testing.assert_array_equal(mixed, exact_sums(MIXED, p, v), strict=True)


def test_batches_are_mapped_and_differentiated():
    (q, _), (k, _) = (attended(SHARED[0], seed) for seed in (0, 2))
    one = jax.jit(lambda q, k: jqx.einsum(SCORES, q, k))(q, k)

    def scores(values, k):
        return jqx.einsum(SCORES, jqx.QTensor(values, q.scale, None, qtype=jnp.int8), k)

    mapped = jax.jit(jax.vmap(scores, (0, None)))(jnp.stack([q.values] * 2), k)
    np.testing.assert_array_equal(mapped, jnp.stack([one] * 2))

    def total(scale, k):
        x = jqx.QTensor(q.values, scale, None, qtype=jnp.int8)
        return jnp.sum(jqx.einsum(SCORES, x, k))

    slope = jax.grad(total)(q.scale, k)
    scores_of_codes = np.asarray(one, np.float64) / np.asarray(q.scale)
    bound = one.size * np.finfo(np.float32).eps * np.abs(scores_of_codes).sum()
    assert np.abs(slope - scores_of_codes.sum()) <= bound


EXPERTS = (
    jqx.QSpec(jnp.int8, jqx.per_axis(0, 2)),
    jqx.QSpec(jnp.uint8, jqx.per_axis(0, 2), symmetric=False),
    jqx.QSpec(jnp.int8, jqx.per_block({0: 1, 1: 32, 2: 1})),
    jqx.QSpec(jnp.int4, jqx.per_block({0: 1, 1: 64, 2: 1})),
    jqx.QSpec(jnp.uint4, jqx.per_block({0: 1, 1: 32, 2: 1}), symmetric=False),
    jqx.QSpec(jnp.int2, jqx.per_block({0: 1, 1: 64, 2: 1})),
    jqx.QSpec(jqx.numerics.nf4, jqx.per_block({0: 1, 1: 32, 2: 1})),
    jqx.QSpec(jnp.float8_e4m3fn, jqx.per_axis(0, 2)),
)


def experts(spec, groups=5, k=128, n=130):
    return jqx.pack_for(jqx.QTensor.quantize(normal(1, groups, k, n), spec), "cpu")


def in_groups(sizes, m):
    """The rows of each group, as slices."""
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), m)
    return [slice(start, stop) for start, stop in zip((0, *ends[:-1]), ends, strict=True)]


SIZES = ([8, 8, 8, 8, 8], [0, 40, 0, 0, 0], [3, -2, 1, 20, 5], [30, 30, 30, 30, 30])


def test_each_group_meets_its_own_matrix():
    x = normal(0, 40, 128)
    codes = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(0), symmetric=False))
    pairs = [(x, experts(spec)) for spec in EXPERTS]
    pairs += [(codes, experts(spec)) for spec in EXPERTS[:2]]
    for lhs, q in pairs:
        (chosen,) = jqx.formulations(jqx.ragged_dot)(lhs, q, jnp.array(SIZES[0]))
        assert chosen.cpu.name == "ragged_package"
    run = jax.jit(
        lambda every, sizes: [[jqx.ragged_dot(*each, s) for s in sizes] for each in every]
    )
    products = run(pairs, [jnp.array(sizes) for sizes in SIZES])
    for (lhs, q), each in zip(pairs, products, strict=True):
        real = lhs.dequantize() if isinstance(lhs, jqx.QTensor) else lhs
        rows, matrices = (np.asarray(a, np.float64) for a in (real, q.dequantize()))
        # Digits are half a unit of 24 bits wrong relative to the largest; then at most four runs or
        # groups of exact sums, three digits each, are scaled and summed in floats.
        largest = np.abs(rows).max(axis=1, keepdims=True)
        for sizes, y in zip(SIZES, each, strict=True):
            expected, bound = np.zeros((2, *y.shape))
            for matrix, rows_of_group in zip(matrices, in_groups(sizes, len(rows)), strict=True):
                expected[rows_of_group] = rows[rows_of_group] @ matrix
                bound[rows_of_group] = largest[rows_of_group] * np.abs(matrix).sum(axis=0)
            assert (np.abs(y - expected) <= 8 * EPS * bound).all()


def test_a_not_finite_row_stays_in_its_place():
    x = normal(0, 40, 128).at[9, 3].set(jnp.nan).at[39, 0].set(jnp.inf)
    for spec in (EXPERTS[0], EXPERTS[3]):
        y = jqx.ragged_dot(x, experts(spec), jnp.array(SIZES[2]))
        assert np.isnan(y[9]).all() and np.isfinite(np.delete(y, 9, 0)).all()
        assert (y[29:] == 0).all()


def test_groups_are_mapped_and_differentiated():
    x, q = normal(0, 3, 40, 128), experts(EXPERTS[3])
    sizes = jnp.array(SIZES[:3])
    expected = jnp.stack([jqx.ragged_dot(x[i], q, sizes[i]) for i in range(3)])
    np.testing.assert_array_equal(
        jax.vmap(lambda x, s: jqx.ragged_dot(x, q, s))(x, sizes), expected
    )

    def squares(f, w):
        return jax.grad(lambda x: jnp.sum(f(x, w, sizes[0]) ** 2))(x[0])

    slopes, plain = squares(jqx.ragged_dot, q), squares(jax.lax.ragged_dot, q.dequantize())
    # Two products of sums of 128 and 130 floats, in another order.
    size = 2 * np.abs(np.asarray(expected[0])) @ np.abs(q.dequantize()).max(0).T
    assert (np.abs(slopes - plain) <= 2 * 260 * EPS * size).all()


def test_sizes_beyond_32_bits_and_the_precision():
    x, q = normal(0, 40, 128), experts(EXPERTS[0])
    sizes = jnp.array([2**32 - 1, 8, 8, 8, 8], jnp.uint32)
    whole = jqx.ragged_dot(x, q, jnp.array([40, 0, 0, 0, 0]))
    np.testing.assert_array_equal(jqx.ragged_dot(x, q, sizes), whole)
    f = jax.jit(lambda x, q, sizes: jqx.ragged_dot(x, q, sizes, precision="default"))
    assert "digits = 2 : i32" in f.lower(x, q, sizes).as_text()


def test_wrong_sizes_are_an_error_of_xla():
    x, w = jnp.zeros((1, 4, 64), jnp.int8), jnp.zeros((3, 8, 64), jnp.int8)
    none, zero = jnp.zeros((0,)), jnp.zeros((0,), jnp.int32)
    options = {"low": np.float32(0), "high": np.float32(0)}
    result = jax.ShapeDtypeStruct((1, 4, 8), jnp.int32)

    def call(step, sizes, x=x):
        operands = x, w, none, zero, none, zero, step, sizes
        return package_cpu.call("product", result, *operands, **options)

    assert (call(zero, jnp.array([1, 2, 1])) == 0).all()
    for words, step, sizes, *rows in [
        (r"sizes are s32\[groups\].*\[2\]", zero, [1, 2]),
        ("groups have no step", jnp.array([0]), [1, 2, 1]),
        ("read by one batch", zero, [1, 2, 1], jnp.zeros((2, 4, 64), jnp.int8)),
    ]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            call(step, jnp.array(sizes), *rows)


LAST = (((1,), (0,)), ((), ()))


SIZES_OF_SUMS = ((1, 128, 300), (7, 300, 130), (100, 128, 256))
OUTPUTS = ((jnp.int8, 3), (jnp.uint8, 128))


def requantizations():
    """Rows, a weight and what makes codes: symmetric or not, with and without a bias."""
    rng, operands = np.random.default_rng(0), []
    for shape, rounding in itertools.product(SIZES_OF_SUMS, jqx.tflite.FixedPointRounding):
        for (qtype, zero_point), has_more in itertools.product(OUTPUTS, (False, True)):
            m, k, n = shape
            x = jqx.QTensor.quantize(normal(1, m, k), jqx.QSpec(jnp.int8, symmetric=not has_more))
            spec = jqx.QSpec(jnp.int8, jqx.per_axis(1))
            w = jqx.pack_for(jqx.QTensor.quantize(normal(2, k, n), spec), "cpu")
            bias = jnp.asarray(rng.integers(-9999, 9999, n), jnp.int32) if has_more else None
            scale = 0.2 if has_more else 2.0**-20  # the latter is a shift to the left
            output = jqx.tflite.Requantization.of(
                x.scale,
                w.scale,
                scale,
                qtype=qtype,
                zero_point=zero_point,
                bias=bias,
                rounding=rounding,
                low=zero_point if has_more else None,
            )
            operands.append((x, w, output))
    return operands


def requantized(x, w, output):
    return jqx.dot_general(x, w, LAST, output=output)


def test_codes_are_those_of_integer_arithmetic():
    operands = requantizations()
    assert {c.cpu.name for each in operands for c in jqx.formulations(requantized)(*each)} == {
        "package_sums"
    }
    codes_of_kernel = jax.jit(lambda every: [requantized(*each).values for each in every])(operands)

    @jax.jit
    def expected(every):
        return [jqx.tflite.requantize(jnp.int32(sums), output).values for sums, output in every]

    def sums_of(x, w):
        zero = 0 if x.zero_point is None else np.asarray(x.zero_point, np.int64)
        left = np.asarray(x.values, np.int64) - zero
        return (left @ np.asarray(w.unpack().values, np.int64)).astype(np.int32)

    codes = expected([(sums_of(x, w), output) for x, w, output in operands])
    for a, b in zip(codes_of_kernel, codes, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    assert all(len(np.unique(each)) > 20 for each in codes[1::2])


def test_codes_of_sums_are_those_of_a_stack_and_of_mapped_rows():
    x, w, output = requantizations()[-1]
    one = requantized(x, w, output).values
    stack = jax.tree.map(lambda *each: jnp.stack(each), *[w] * 3)
    scan = jax.jit(lambda w: lax.scan(lambda i, w: (i, requantized(x, w, output).values), 0, w)[1])
    np.testing.assert_array_equal(scan(stack), jnp.stack([one] * 3), strict=True)
    mapped = jax.tree.map(lambda each: jnp.stack([each] * 3), x)
    many = jax.jit(jax.vmap(lambda x: requantized(x, w, output).values))(mapped)
    np.testing.assert_array_equal(many, jnp.stack([one] * 3), strict=True)


def test_formulations_of_users_come_first():
    x, w, output = requantizations()[-1]
    mine = jqx.extend.Formulation(
        "sums_of_mine",
        "an example",
        ("cpu",),
        lambda case: True,
        lambda lhs, rhs, how: plain_sums(lhs, rhs, how),
        op="dot_general:int32",
    )
    with jqx.extend.using(mine):
        (chosen,) = jqx.formulations(requantized)(x, w, output)
        assert chosen.cpu.name == "sums_of_mine"
