"""Regions: contractions and what is computed between them, by one kernel."""

import pathlib
import subprocess
import sys
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jqx
from jqx._src import package_cpu
from jqx._src.contractions import rows as contractions_of_rows
from jqx._src.kernels.rows_cpu import (
    INPUT,
    OF_BLOCK,
    OPS,
    Result,
    RowProgram,
    Step,
    Value,
    rows_cpu,
)

pytest.importorskip("jqx_cpu")

DYNAMIC = jqx.presets.w8a8_dynamic("w.*")


@pytest.fixture(autouse=True)
def _with_rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def pair(f, params, *args, policy=DYNAMIC, affines="dynamic"):
    """Returns a converted function, and its weights for kernels and without a layout."""
    plan = jqx.make_plan(f, policy)(params, *args)
    weights = jqx.quantize_params(params, plan)
    converted = jqx.convert(f, plan, affines)
    return converted, jqx.pack_for(weights, "cpu"), weights


def in_float(f, params, *args):
    """Returns a converted function of which nothing is quantized."""
    return jqx.convert(f, jqx.make_plan(f, jqx.Policy([]))(params, *args))


def names(f, *args):
    return [found.cpu.name for found in jqx.formulations(f)(*args)]


def is_near(x, y, most=2e-6, flips=0.05):
    """Whether values are equal but for the last bits, and a few rows where these have changed a
    code, by one step of its scale.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    scale = np.abs(y[np.isfinite(y)]).max(initial=1e-30)
    away = np.abs(x - y) > most * scale
    same = np.isnan(x) == np.isnan(y)
    return same.all() and np.nanmean(away) <= flips and np.nanmax(np.abs(x - y)) < 0.05 * scale


# Functions of numbers, beside float64.

UNARY = {
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "tanh": np.tanh,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "erf": np.vectorize(__import__("math").erf),
    "erfc": np.vectorize(__import__("math").erfc),
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


@pytest.mark.parametrize("width", [1, 15, 16, 1000])
def test_functions_of_numbers_are_those_of_float64_to_the_last_bits(width):
    x = np.random.default_rng(0).normal(size=(7, width)).astype(np.float32) * 4
    x.flat[:6] = [0, np.inf, -np.inf, np.nan, 100, -100] if width > 1 else [0, 1, -1, 2, 9, -9]
    for op, of_float64 in UNARY.items():
        values = Value(INPUT, 0, width, (width,)), Value(OF_BLOCK, 0, width)
        program = RowProgram((7,), values, (0.0,), (Step(op, 1, (0,)),), (Result(1, (0,)),))
        (y,) = rows_cpu(program, [jnp.asarray(x)], [])
        with np.errstate(all="ignore"):
            expected = of_float64(x.astype(np.float64)).astype(np.float32).astype(np.float64)
        y = np.asarray(y)
        least = 2e-7 if op in ("erf", "erfc") else 1.2e-38  # XLA makes subnormal numbers zero
        near = np.abs(y - expected) <= 4e-7 * np.abs(expected) + least
        assert (near | np.equal(expected, y) | (np.isnan(expected) & np.isnan(y))).all(), op


def test_the_steps_are_those_of_the_kernel():
    header = (package_cpu.__file__.rpartition("jqx/")[0] + "cpu/src/rows.h",)
    text = open(header[0]).read().partition("enum Op")[2].partition("kOps")[0]
    found = [x.strip().removeprefix("k") for x in text.partition("{")[2].split(",") if x.strip()]
    assert [x.lower() for x in found] == [x.replace("_", "") for x in OPS]


# Whole functions, beside the same function without kernels.


def layer(p, x, subscripts="...k,kn->...n"):
    """A layer of a transformer behind its attention: a bias, a residual, a norm, an MLP."""
    x = x + (jnp.einsum(subscripts, x, p["w0"]) + p["b0"])
    h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    h = jax.nn.gelu(jnp.einsum(subscripts, h, p["w1"]) + p["b1"], approximate=False)
    return x + jnp.einsum(subscripts, h, p["w2"]), (h * h).sum(-1)


def weights_of(seed, d, h):
    shapes = {"w0": (d, d), "w1": (d, h), "w2": (h, d), "b0": (d,), "b1": (h,)}
    return {name: 0.1 * random(seed + i, *s) for i, (name, s) in enumerate(shapes.items())}


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([(16,), (17,), (3, 25), (1, 64), (2, 1, 50), (200,), (1200,)]),
    st.sampled_from([(32, 64), (40, 136), (72, 8), (65, 200)]),
    st.integers(0, 9),
)
def test_a_layer_is_that_without_kernels(lead, sizes, seed):
    p, x = weights_of(seed, *sizes), random(seed, *lead, sizes[0])
    f, packed, plain = pair(layer, p, x)
    assert names(f, packed, x) == ["package_rows"]
    for y, expected in zip(jax.jit(f)(packed, x), jax.jit(f)(plain, x), strict=True):
        assert y.shape == expected.shape and is_near(y, expected)


@pytest.mark.parametrize(
    "activation",
    [{}, {"symmetric": False}, {"qtype": "uint8", "symmetric": False}, {"qtype": "int4"}],
    ids=str,
)
def test_static_scales(activation):
    p, x = weights_of(0, 64, 96), random(0, 40, 64)
    minmax = {"calibrator": jqx.calibrators.minmax} if "symmetric" in activation else {}
    weight = {"qtype": "uint8", "symmetric": False, **minmax} if "symmetric" in activation else {}
    policy = jqx.presets.w8a8("w.*", weight=weight, activation=activation | minmax)
    plan = jqx.make_plan(layer, policy)(p, x)
    _, stats = jqx.calibrate(layer, plan)(p, x)
    affines = jqx.affines(plan, stats)
    weights = jqx.quantize_params(p, plan)
    f = jax.jit(jqx.convert(layer, plan, affines))
    packed = jqx.pack_for(weights, "cpu")
    assert names(f, packed, x) == ["package_rows"]
    assert is_near(f(packed, x)[0], f(weights, x)[0])


def test_products_of_one_array_share_its_codes_if_scales_are_equal(monkeypatch):
    p, x = {"w0": random(0, 64, 96), "w1": random(1, 64, 96)}, random(2, 40, 64)
    plan = jqx.make_plan(lambda p, x: (x @ p["w0"]) * (x @ p["w1"]), jqx.presets.w8a8("w.*"))(p, x)
    one, other = (
        jqx.calibrators.Affine(jnp.full((1, 1), scale, jnp.float32)) for scale in (0.03, 0.04)
    )
    weights, programs = jqx.pack_for(jqx.quantize_params(p, plan), "cpu"), []

    def kept(program, *args):
        programs.append(program)
        return rows_cpu(program, *args)

    monkeypatch.setattr(contractions_of_rows, "rows_cpu", kept)
    first, second = (key for site in plan.sites for key in site.static_specs())
    for affines, count in (({first: one, second: one}, 1), ({first: one, second: other}, 2)):
        f = jqx.convert(lambda p, x: (x @ p["w0"]) * (x @ p["w1"]), plan, affines)
        jax.jit(f).lower(weights, x)
        assert [step.op for step in programs[-1].steps].count("quantize") == count


def test_integers_of_one_product_are_those_without_kernels_to_the_bit():
    p, x = {"w": random(1, 96, 80)}, random(2, 33, 96).at[3, 5].set(jnp.nan).at[4].set(0)
    f, packed, plain = pair(lambda p, x: x @ p["w"], p, x)
    assert names(f, packed, x) == ["package_rows"]
    np.testing.assert_array_equal(jax.jit(f)(packed, x), jax.jit(f)(plain, x))


def test_values_that_are_read_elsewhere_are_computed_too():
    def f(p, x):
        y = x @ p["w0"] + p["b0"]
        return (y.reshape(4, 10, -1).sum(1), jnp.sort(y, axis=0), y @ p["w1"])

    p, x = weights_of(3, 32, 48), random(4, 40, 32)
    converted, packed, plain = pair(f, p, x)
    assert names(converted, packed, x) == ["package_rows"]  # what reads `y` otherwise waits
    for y, expected in zip(converted(packed, x), converted(plain, x), strict=True):
        assert is_near(y, expected)


@settings(max_examples=10, deadline=None)
@given(
    lead=st.sampled_from([(32,), (40, 1), (3, 100), (260,), (9, 128)]),
    sizes=st.tuples(st.integers(2, 200), st.integers(2, 200)),
    turned=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_layer_of_floats_is_that_without_kernels(lead, sizes, turned, seed):
    d, h = sizes
    p, x = weights_of(seed, d, h), random(seed, *lead, d)
    f = partial(layer, subscripts="...k,nk->...n") if turned else layer
    p = jax.tree.map(lambda w: w.T, p) if turned else p
    converted = in_float(f, p, x)
    assert names(converted, p, x) == ["package_rows"]
    for y, expected in zip(jax.jit(converted)(p, x), f(p, x), strict=True):
        assert y.shape == expected.shape and is_near(y, expected, flips=0)


@pytest.mark.parametrize("rows, d, h", [(40, 1024, 1024), (700, 1100, 4100), (130, 2048, 70)])
def test_large_weights_and_those_whose_rows_are_a_power_of_two_apart(rows, d, h):
    p = {"a": random(0, d, h) / d**0.5, "b": random(1, h, d) / h**0.5}
    x = random(2, rows, d)

    def f(p, x):
        return nn.relu(x @ p["a"]) @ p["b"]

    converted = in_float(f, p, x)
    assert names(converted, p, x) == ["package_rows"]
    assert is_near(jax.jit(converted)(p, x), f(p, x), flips=0)


def check_with_threads():
    """Layers whose rows or steps threads share. With the eight devices of these tests a kernel has
    one thread, so this runs in a process of its own.
    """
    for rows in (40, 300, 1200):
        p, x = weights_of(5, 520, 2050), random(6, rows, 520)
        turned = jax.tree.map(lambda w: w.T, p)
        floats, exact = in_float(layer, p, x), layer(p, x)
        by_columns = in_float(partial(layer, subscripts="...k,nk->...n"), turned, x)
        codes, packed, plain = pair(layer, p, x)
        expected = jax.jit(codes)(plain, x)
        for f, q, results in (
            (floats, p, exact),
            (by_columns, turned, exact),
            (codes, packed, expected),
        ):
            f = jax.jit(f)
            for _ in range(4):  # the first call wakes threads
                for y, result in zip(f(q, x), results, strict=True):
                    assert is_near(y, result, flips=0.05 if q is packed else 0), rows


def test_threads_share_rows_and_steps():
    code = "from tests.package_cpu.test_rows import check_with_threads as check; check()"
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr


def test_products_of_floats_are_in_the_regions_of_those_of_codes():
    p, x = weights_of(3, 64, 96), random(4, 50, 64)
    policy = jqx.presets.w8a8_dynamic("w1")
    converted, packed, plain = pair(layer, p, x, policy=policy)
    assert names(converted, packed, x) == ["package_rows"]
    for y, expected in zip(
        jax.jit(converted)(packed, x), jax.jit(converted)(plain, x), strict=True
    ):
        assert is_near(y, expected)


def test_one_product_of_floats_alone_is_that_of_jax():
    p, x = {"w": random(0, 64, 64)}, random(1, 64, 64)
    converted = in_float(lambda p, x: x @ p["w"] + 1, p, x)
    assert "jqx_cpu" not in jax.jit(converted).lower(p, x).compile().as_text()


def test_few_rows_are_multiplied_one_product_at_a_time():
    p, x = weights_of(5, 256, 512), random(6, 4, 256)
    f, packed, _ = pair(layer, p, x)
    assert "package_rows" not in names(f, packed, x)


# Attention.


def attention(x, mask, heads, groups):
    b, t, width = x.shape
    q = x.reshape(b, t, heads, width // heads)
    k = v = x[..., : width // groups].reshape(b, t, heads // groups, width // heads)
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("masked", ["no", "keys", "causal"])
def test_attention_is_that_without_kernels(groups, masked):
    b, t, heads = 3, 70, 4
    x, p = random(7, b, t, 128), {"w": random(8, 128, 128) * 0.1}
    masks = {
        "no": None,
        "keys": (jnp.arange(t) < 50)[None, None, None],
        "causal": jnp.tril(jnp.ones((t, t), bool))[None, None],
    }

    def f(p, x):
        return attention(x @ p["w"], masks[masked], heads, groups)

    converted, packed, _ = pair(f, p, x)
    assert names(converted, packed, x) == ["package_rows"] * 2
    expected = jax.jit(lambda y: attention(y, masks[masked], heads, groups))(
        jqx.convert(lambda p, x: x @ p["w"], DYNAMIC)(p, x)
    )
    assert is_near(jax.jit(converted)(packed, x), expected, flips=0)


@pytest.mark.parametrize("op", ["convert", "simulate"])
@pytest.mark.parametrize("planned", ["both", "values"])
def test_products_of_attention_that_a_plan_quantizes_are_not_left_in_float(op, planned):
    def f(p, x):
        q = k = v = (x @ p["w"]).reshape(2, 64, 4, 32)
        with jax.named_scope("scores"):
            scores = jnp.einsum("bthd,bshd->bhts", q, k)
        with jax.named_scope("values"):
            mix = jax.jit(lambda p, v: jnp.einsum("bhts,bshd->bthd", p, v))
            return mix(jax.nn.softmax(scores), v)

    spec = jqx.QSpec("int4", jqx.per_token(), dynamic=True)
    scopes = {"both": "(scores|values)", "values": "values"}[planned]
    rule = jqx.Rule(f"{scopes}/.*", activation=spec)
    p, x = {"w": random(21, 128, 128) * 0.1}, random(22, 2, 64, 128)
    plan = jqx.make_plan(f, jqx.Policy([rule]))(p, x)
    assert len(plan.sites) == (2 if planned == "both" else 1)
    options = {"backward": jnp.float32} if op == "simulate" else {}
    transformed = getattr(jqx, op)(f, plan, "dynamic", **options)
    found = transformed(p, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package_cpu, "is_installed", lambda: False)
        expected = transformed(p, x)
    assert is_near(found, expected) and not is_near(found, f(p, x))


def of_codes(f, *args, spec="int8:tensor"):
    """Returns a function whose products of activations are of codes with calibrated scales, and the
    same without kernels.
    """
    plan = jqx.make_plan(f, jqx.Policy([jqx.Rule(".*", activation=spec)]))({}, *args)
    affines = "dynamic"
    if "dynamic" not in spec:
        affines = jqx.affines(plan, jqx.calibrate(f, plan)({}, *args)[1])
    converted = jqx.convert(f, plan, affines)

    def plain(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(package_cpu, "is_installed", lambda: False)
            return converted(*args)

    return converted, plain


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "spec",
    ["int8:tensor", "int8:tensor:asymmetric", "uint8:tensor:asymmetric", "int8:token:dynamic"],
)
def test_attention_of_codes_is_one_region(spec, groups):
    x, mask = random(30, 3, 70, 128), jnp.tril(jnp.ones((70, 70), bool))[None, None]
    converted, plain = of_codes(lambda _, x: attention(x, mask, 4, groups), x, spec=spec)
    assert names(converted, {}, x) == ["package_rows"]
    found = jax.jit(converted)({}, x)
    assert is_near(found, jax.jit(plain)({}, x))
    assert not is_near(found, attention(x, mask, 4, groups))


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 3),
    st.tuples(st.integers(60, 150), st.integers(60, 150), st.integers(20, 80)),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_sums_of_codes_in_attention_are_exact(batch, sizes, turned, seed):
    rows, steps, d = sizes
    rng = np.random.default_rng(seed)
    whole = (rng.integers(-127, 128, (batch, 4, n, d)) for n in (rows, steps, steps))
    q, k, v = (jnp.asarray(x, jnp.float32).at[0, 0, 0, 0].set(127) for x in whole)  # of scale 1
    k = jnp.swapaxes(k, 2, 3) if turned else k

    def f(_, q, k, v):
        scores = jnp.einsum("bhtd,bhds->bhts" if turned else "bhtd,bhsd->bhts", q, k)
        return scores, jnp.einsum("bhts,bhsd->bhtd", jnp.clip(scores, 0, 127), v)

    converted, _ = of_codes(f, q, k, v)
    assert names(converted, {}, q, k, v) == ["package_rows"]
    scores, mixed = map(np.asarray, jax.jit(converted)({}, q, k, v))
    q, k, v = (np.asarray(x, np.int64) for x in (q, k, v))
    expected = q @ (k if turned else np.swapaxes(k, 2, 3))
    np.testing.assert_array_equal(scores, expected.astype(np.float32))
    np.testing.assert_array_equal(mixed, (np.clip(expected, 0, 127) @ v).astype(np.float32))


def test_attention_of_codes_composes_and_takes_what_is_no_number():
    x = random(33, 2, 64, 128)
    converted, plain = of_codes(lambda _, x: attention(x, None, 4, 1), x)

    def pulled(f):
        return jax.jit(jax.grad(lambda x: (f({}, x) ** 2).sum()))(x)

    assert is_near(pulled(converted), pulled(plain))
    several = jnp.stack([x, -x, 2 * x])
    mapped = jax.jit(jax.vmap(converted, (None, 0)))({}, several)
    assert is_near(mapped, jnp.stack([plain({}, x) for x in several]))
    looped = jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, converted({}, x)), 0, x)[1])(several)
    np.testing.assert_array_equal(looped, mapped)
    odd = x.at[0, 3, 5].set(jnp.nan).at[1, 2].set(jnp.inf).at[1, 7, 100].set(-jnp.inf)
    assert is_near(jax.jit(converted)({}, odd), jax.jit(plain)({}, odd))


def test_scores_that_are_summed_along_another_axis_are_evaluated_as_they_are():
    def f(p, x):
        q, k = x.reshape(2, 40, 4, 32), (x @ p["w"]).reshape(2, 40, 4, 32)
        scores = jnp.einsum("bthd,bshd->bhts", q, k)
        return jnp.einsum("bhts,bthd->bshd", jax.nn.softmax(scores, axis=2), q)

    p, x = {"w": random(9, 128, 128) * 0.1}, random(10, 2, 40, 128)
    converted, packed, plain = pair(f, p, x)
    np.testing.assert_array_equal(converted(packed, x), converted(plain, x))


# Transforms of JAX.


def test_regions_compose_with_vmap_grad_scan_and_remat():
    p, x = weights_of(11, 32, 64), random(12, 3, 20, 32)
    f, packed, plain = pair(lambda p, x: layer(p, x)[0], p, x[0])
    one_by_one = jnp.stack([f(packed, each) for each in x])
    np.testing.assert_array_equal(jax.vmap(f, (None, 0))(packed, x), one_by_one)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), packed, packed)
    np.testing.assert_array_equal(jax.vmap(f)(stacked, x[:2]), one_by_one[:2])
    np.testing.assert_array_equal(
        jax.lax.scan(lambda _, each: ((), f(packed, each)), (), x)[1], one_by_one
    )

    def loss(x, weights):
        return jnp.sum(jax.checkpoint(f)(weights, x) ** 2)

    assert is_near(jax.grad(loss)(x[0], packed), jax.grad(loss)(x[0], plain))


def test_layers_in_a_scan_read_their_weights_from_the_stack():
    stack = jax.tree.map(lambda *x: jnp.stack(x), *(weights_of(i, 32, 64) for i in range(3)))
    x = random(20, 20, 32)

    def f(p, x):
        return jax.lax.scan(lambda x, one: (layer(one, x)[0], ()), x, p)[0]

    policy = jqx.presets.w8a8_dynamic("w.*")
    converted, packed, plain = pair(f, stack, x, policy=policy)
    assert names(converted, packed, x) == ["package_rows"]
    assert is_near(jax.jit(converted)(packed, x), jax.jit(converted)(plain, x))
    text = jax.jit(converted).lower(packed, x).compile().as_text()
    assert "s8[3,64,32]" in next(line for line in text.splitlines() if "jqx_cpu_rows" in line)


def test_a_derivative_rule_of_the_user_counts():
    @jax.custom_jvp
    def clipped(x):
        return jnp.maximum(x, 0.0)

    clipped.defjvp(lambda primals, tangents: (clipped(*primals), 7.0 * tangents[0]))
    p, x = weights_of(13, 32, 32), random(14, 24, 32)
    f, packed, plain = pair(lambda p, x: clipped(x @ p["w0"] + x), p, x)
    assert names(f, packed, x) == ["package_rows"]
    found, expected = (jax.jvp(partial(f, w), (x,), (x,))[1] for w in (packed, plain))
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found).max() > 10


def test_a_module_of_flax_is_one_region():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(64)(nn.LayerNorm()(nn.Dense(48)(x)))
            return nn.relu(y) * nn.silu(nn.Dense(64)(x))

    module, x = Block(), random(15, 2, 30, 40)
    params = module.init(jax.random.key(0), x)
    f, packed, plain = pair(module.apply, params, x, policy=jqx.presets.w8a8_dynamic(".*kernel"))
    assert names(f, packed, x) == ["package_rows"]
    assert is_near(f(packed, x), f(plain, x))


def test_explain_names_the_products_of_a_region():
    p, x = weights_of(18, 32, 64), random(19, 3, 20, 32)
    f, packed, _ = pair(layer, p, x)
    found = jqx.explain(f, packed, x)
    assert [(site.path, site.executed_as) for site in found.sites] == [
        ("w0", "codes"),
        ("w1", "codes"),
        ("w2", "codes"),
    ]
    (product,) = found["w1"][0].contractions
    assert product.runs == "jqx_cpu_rows" and product.operands == ("s8[60,32]", "s8[64,32]")


def test_explain_names_the_products_of_attention():
    x = random(34, 2, 70, 128)

    def f(_, x):
        q, k = x.reshape(2, 70, 4, 32), -x.reshape(2, 70, 4, 32)
        with jax.named_scope("scores"):
            weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        with jax.named_scope("mixed"):
            mixed = jnp.einsum("bhts,bshd->bhtd", weights, k)
        with jax.named_scope("summed"):
            return mixed + jnp.einsum("bhts,bshd->bhtd", weights * 2, k)

    converted, _ = of_codes(f, x)
    found = jqx.explain(converted, {}, x)
    products = [(site.path.split("/")[0], *site.contractions) for site in found.sites]
    assert [(path, c.runs, c.operands, c.result) for path, c in products] == [
        ("scores", "jqx_cpu_rows", ("s8[560,32]", "s8[2,70,4,32]"), "f32[560,70]"),
        ("mixed", "jqx_cpu_rows", ("s8[560,70]", "s8[2,70,4,32]"), "f32[560,32]"),
        ("summed", "jqx_cpu_rows", ("s8[560,70]", "s8[2,70,4,32]"), "f32[560,32]"),
    ]


def test_programs_for_other_platforms_and_exports_are_those_of_the_function():
    p, x = weights_of(16, 32, 64), random(17, 20, 32)
    f, packed, plain = pair(lambda p, x: layer(p, x)[0], p, x)
    exported = jax.export.export(jax.jit(f), platforms=["cpu", "cuda"])(packed, x)
    assert "jqx_cpu" not in exported.mlir_module()
    assert is_near(exported.call(packed, x), f(plain, x))
