"""Quantized state: QTensors that are no weights, as arguments, carries and results."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import Mesh, PartitionSpec

import jqx
from jqx import numerics
from jqx.diagnostics import sensitivity

from ..arrays import assert_same, on_device
from ..models.transforms import eighths, relative

BATCH, TIME, HEADS, WIDTH = SHAPE = (2, 6, 2, 32)
OWN = {0: 1, 1: 1, 2: 1}
FORMATS = {
    "int8": jqx.QSpec(jnp.int8, jqx.per_token()),
    "uint8 with zero points": jqx.QSpec(
        jnp.uint8, jqx.per_token(), symmetric=False, calibrator=jqx.calibrators.minmax
    ),
    "int4": jqx.QSpec(jnp.int4, jqx.per_token()),
    "nf4": jqx.QSpec(numerics.nf4, jqx.per_token()),
    "e4m3": jqx.QSpec(jnp.float8_e4m3fn, jqx.per_token()),
    "mxfp8": jqx.QSpec(numerics.mxfp8_e4m3, jqx.per_group(32)),
    "int8, one scale": (jqx.QSpec(jnp.int8), jqx.calibrators.Affine(jnp.full((1,) * 4, 1 / 32))),
}
W4 = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int4, jqx.per_group(16)))])
TRANSFORMS = {
    "convert": jqx.convert,
    "simulate": jqx.simulate,
    "simulate on integers": partial(jqx.simulate, backward=jnp.float32),
    "calibrate": lambda f, plan: lambda *args: jqx.calibrate(f, plan)(*args)[0],
}


def fourth_bits(seed, *shape):
    """Multiples of 1/8 that int4 holds exactly, in groups of 16 rows."""
    codes = np.random.default_rng(seed).integers(-7, 8, shape)
    codes[..., ::16, :] = 7
    return on_device(codes / 8, jnp.float32)


def params():
    return {"qkv": fourth_bits(0, 3, 64, HEADS * WIDTH), "out": fourth_bits(1, HEADS * WIDTH, 64)}


def xs(steps=TIME):
    return eighths(2, steps, BATCH, 64)


def empty(name, shape=SHAPE):
    return jqx.quantize_state({"k": jnp.zeros(shape), "v": jnp.zeros(shape)}, {".*": FORMATS[name]})


def heads(p, x):
    """Query, key and value of one token, each (batch, 1, heads, width)."""
    return [(x @ w).reshape(BATCH, 1, HEADS, WIDTH) for w in p["qkv"]]


def attend(q, cache, t, einsum=jnp.einsum):
    scores = einsum("bqhd,bkhd->bhqk", q, cache["k"]) / 8
    shares = jax.nn.softmax(jnp.where(jnp.arange(TIME) <= t, scores, -jnp.inf))
    return einsum("bhqk,bkhd->bqhd", shares, cache["v"]).reshape(BATCH, HEADS * WIDTH)


def written(p, x, cache, t, update):
    """The query of a token, and the cache with its key and value."""
    q, k, v = heads(p, x)
    return q, {name: update(cache[name], y, (0, t, 0, 0)) for name, y in {"k": k, "v": v}.items()}


def step(p, x, cache, t):
    """One token through attention over a cache: plain JAX, that knows of no QTensor."""
    q, cache = written(p, x, cache, t, lax.dynamic_update_slice)
    return attend(q, cache, t) @ p["out"], cache


def by_hand(p, x, cache, t):
    """The same written with QTensors, which are dequantized before they are read."""
    q, cache = written(p, x, cache, t, jqx.dynamic_update_slice)
    return attend(q, jqx.dequantize_params(cache), t) @ p["out"], cache


def with_qtensors(p, x, cache, t):
    """The same with QTensors alone."""
    q, cache = written(p, x, cache, t, jqx.dynamic_update_slice)
    return attend(q, cache, t, jqx.einsum) @ p["out"], cache


def loop(f, p, inputs, cache):
    """All tokens, one compiled step."""

    def body(carry, x):
        cache, t = carry
        y, cache = f(p, x, cache, t)
        return (cache, t + 1), y

    (cache, _), ys = lax.scan(body, (cache, jnp.int32(0)), inputs)
    return ys, cache


def planned():
    return jqx.make_plan(step, W4)(params(), xs()[0], empty("int8"), 0), params()


def assert_loops(name, expected, f):
    """All transforms of a step give in a loop what another step does: the cache code for code."""
    plan, p = planned()
    steps = expected, *(transform(f, plan) for transform in TRANSFORMS.values())
    run = jax.jit(lambda *args: [loop(f, *args) for f in steps])
    (y, cache), *others = run(p, xs(), empty(name))
    for actual, written in others:
        assert relative(actual, y) < 2e-6  # float32 sums of at most 64 products, in another order
        for key in cache:
            assert_same(written[key], cache[key])


@pytest.mark.many
@pytest.mark.parametrize("name", FORMATS)
def test_a_decoder_reads_and_writes_a_quantized_cache(name):
    assert_loops(name, by_hand, step)


def test_a_function_that_handles_qtensors_itself_may_be_transformed():
    assert_loops("int8", with_qtensors, with_qtensors)


# What a function may do with state, each beside the same on QTensors.


def carried_by_scan(c, x):
    return lax.scan(lambda c, t: (put(c, x[t], t), t), c, jnp.arange(3))[0]


def carried_by_while(c, x):
    def body(s):
        return put(s[0], x[s[1]], s[1]), s[1] + 1

    return lax.while_loop(lambda s: s[1] < 3, body, (c, jnp.int32(0)))[0]


def carried_by_fori(c, x):
    return lax.fori_loop(0, 3, lambda t, c: put(c, x[t], t), c)


def stepped_over(c, x):
    """Each step of the scan has one index of the batch."""
    rows = x.transpose(1, 0, *range(2, x.ndim))
    one_row = lambda _, part: (None, put_row(*part))  # noqa: E731
    return lax.scan(one_row, None, (c, rows))[1]


def chosen_by_cond(c, x):
    return lax.cond(x[0, 0, 0, 0] > 0, lambda c: put(c, x[0], 0), lambda c: put(c, x[1], 1), c)


def written_or_not(c, x):
    return lax.cond(x[0, 0, 0, 0] > 9, lambda c: put(c, x[0], 0), lambda c: c, c)


def reset_or_not(c, x):
    return lax.cond(x[0, 0, 0, 0] > 9, jnp.zeros_like, lambda c: put(c, x[0], 0), c)


def chosen_by_select(c, x):
    return jnp.where(x[0, 0, 0, 0] > 9, c, put(c, x[0], 0))


def in_jit(c, x):
    return jax.jit(put)(c, x[0], 2)


def in_remat(c, x):
    return jax.checkpoint(put, static_argnums=2)(c, x[0], 2)


def seen_through_views(c, x):
    c = tokens_of(c)
    return jnp.stack([c[:4], c[4:8]])[1] * 2


def tokens_of(c):
    return c.transpose(1, 0, 2, 3).reshape(TIME * BATCH, HEADS, WIDTH)


def sliced(c, x):
    return lax.dynamic_slice_in_dim(c, jnp.int32(x[0, 0, 0, 0] > 9), 2, axis=1)


def before_the_start(c, x):
    return put(lax.dynamic_slice_in_dim(c, -9, 3, axis=1), x[0], -5)


def put(c, x, t):
    return lax.dynamic_update_slice(c, x[:, None], (0, t, 0, 0))


def put_row(c, x):
    return lax.dynamic_update_slice(c, x[:1], (0, 0, 0))


def write(tokens):
    """What is to come of a cache: the tokens at some places written, one after another."""

    def expected(c, x):
        for t, row in tokens:
            c = jqx.dynamic_update_slice(c, x[row][:, None], (0, t, 0, 0))
        return c

    return expected


FLOWS = {
    carried_by_scan: write([(0, 0), (1, 1), (2, 2)]),
    carried_by_while: write([(0, 0), (1, 1), (2, 2)]),
    carried_by_fori: write([(0, 0), (1, 1), (2, 2)]),
    stepped_over: write([(0, 0)]),
    chosen_by_cond: write([(0, 0)]),
    written_or_not: write([]),
    reset_or_not: write([(0, 0)]),
    chosen_by_select: write([(0, 0)]),
    in_jit: write([(2, 0)]),
    in_remat: write([(2, 0)]),
    seen_through_views: lambda c, x: (
        c.transpose(1, 0, 2, 3).reshape(-1, HEADS, WIDTH)[4:8].scaled(2.0)
    ),
    sliced: lambda c, x: c[:, :2],
    before_the_start: lambda c, x: write([(0, 0)])(c[:, :3], x),
}
NOTHING = jqx.Policy([])


def filled(name):
    """A cache with numbers in it."""
    q = empty(name)["k"]
    write = jax.jit(lambda q, x: jqx.dynamic_update_slice(q, x, (0, 0, 0, 0)))
    return write(q, eighths(7, *SHAPE))


@pytest.mark.many
@pytest.mark.parametrize("name", ["int8", "uint8 with zero points", "nf4"])
def test_state_flows_through_every_form(name):
    """All flows and transforms in one compiled program."""
    c, x = filled(name), eighths(3, 3, BATCH, HEADS, WIDTH).at[0, 0, 0, 0].set(1.0)

    def f(p, c, x):
        return {flow.__name__: flow(c, x) for flow in FLOWS}

    @jax.jit
    def run(c, x):
        expected = {flow.__name__: expected(c, x) for flow, expected in FLOWS.items()}
        return expected, [transform(f, NOTHING)({}, c, x) for transform in TRANSFORMS.values()]

    expected, others = run(c, x)
    for actual in others:
        for key, q in expected.items():
            assert_same(actual[key], q)


def test_a_mask_chooses_codes_where_it_cuts_no_scale():
    """A token comes from the array or from the cache; both as they are by themselves."""
    c, x = filled("int8"), eighths(4, *SHAPE)
    mask = jnp.arange(TIME)[None, :, None, None] == jnp.array([1, 3])[:, None, None, None]
    f = lambda p, c, x: jnp.where(mask, x, c)  # noqa: E731
    whole = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8, jqx.per_axis(0, 1, 2)))
    token_mask = np.broadcast_to(mask, SHAPE)
    for transform in TRANSFORMS.values():
        actual = jax.jit(transform(f, NOTHING))({}, c, x)
        np.testing.assert_array_equal(actual.values, np.where(token_mask, whole.values, c.values))
        np.testing.assert_array_equal(
            actual.scale, np.where(token_mask[..., :1], whole.scale, c.scale)
        )


def test_a_mask_that_cuts_a_scale_keeps_it_beside_an_array():
    c, x = filled("int8, one scale"), eighths(4, *SHAPE)
    mask = eighths(5, *SHAPE) > 0
    actual = jqx.convert(lambda p, c, x: jnp.where(mask, x, c), NOTHING)({}, c, x)
    token_codes = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8), jqx.calibrators.Affine(c.scale))
    expected = np.where(mask, token_codes.values, c.values)
    np.testing.assert_array_equal(actual.values, expected)
    np.testing.assert_array_equal(actual.scale, c.scale)
    both = dataclasses.replace(c, scale=c.scale * 2)
    actual = jqx.convert(lambda p, c, d: jnp.where(mask, c, d), NOTHING)({}, c, both)
    real = np.where(mask, c.dequantize(), both.dequantize())
    np.testing.assert_allclose(actual.dequantize(), real, atol=np.abs(real).max() / 254, rtol=1e-6)


def test_each_member_of_a_vmap_has_its_own_state():
    c = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), filled("int8"))
    x = eighths(3, 2, 3, BATCH, HEADS, WIDTH)
    f = jax.vmap(jqx.convert(lambda p, c, x, t: put(c, x[0], t), NOTHING), (None, 0, 0, 0))
    actual = jax.jit(f)({}, c, x, jnp.array([1, 4]))
    for i, t in enumerate((1, 4)):
        assert_same(
            jax.tree.map(lambda leaf, i=i: leaf[i], actual),
            jqx.dynamic_update_slice(filled("int8"), x[i, 0][:, None], (0, t, 0, 0)),
        )


def test_what_has_no_quantized_form_is_an_error_or_goes_on_in_float():
    c = filled("int8")
    f = lambda p, c: jnp.tanh(c).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="a quantized array reaches `tanh`") as error:
        jqx.convert(f, NOTHING)({}, c)
    assert "of argument 1" in str(error.value) and "Rule" not in str(error.value)
    expected = jnp.tanh(c.dequantize()).sum()
    assert relative(jqx.convert(f, NOTHING, unsupported="dequantize")({}, c), expected) < 1e-6
    assert relative(jqx.simulate(f, NOTHING)({}, c), expected) < 1e-6
    g = lambda p, c: lax.fori_loop(0, 2, lambda _, c: c + 1, c)  # noqa: E731
    with pytest.raises(NotImplementedError, match="a quantized array reaches `add`"):
        jqx.convert(g, NOTHING)({}, c)
    kept = jqx.convert(g, NOTHING, unsupported="dequantize")({}, c)
    assert jax.tree.structure(kept) == jax.tree.structure(c)


def test_gradients_pass_what_is_written_straight_through():
    """As though the cache held floats whose values were rounded."""
    plan, p = planned()

    def rounds(p, x, cache, t):
        q, k, v = heads(p, x)
        new = {}
        for name, y in (("k", k), ("v", v)):
            codes = jqx.QTensor.quantize(y, jqx.QSpec(jnp.int8, jqx.per_axis(0, 1, 2)))
            y = jqx.gradients.straight_through(codes.dequantize(), y)
            new[name] = lax.dynamic_update_slice(cache[name].dequantize(), y, (0, t, 0, 0))
        return attend(q, new, t) @ p["out"]

    cache = {"k": filled("int8"), "v": filled("int8")}
    simulated = [TRANSFORMS[name](step, plan) for name in ("simulate", "simulate on integers")]

    @jax.jit
    def gradients(p, x, cache):
        expected = jax.grad(lambda p: rounds(p, x, cache, 2).sum())(p)
        return expected, [jax.grad(lambda p, f=f: f(p, x, cache, 2)[0].sum())(p) for f in simulated]

    expected, others = gradients(p, xs()[0], cache)
    for actual in others:
        assert relative(actual["qkv"], expected["qkv"]) < 1e-5
        assert relative(actual["out"], expected["out"]) < 1e-5


def test_a_step_holds_no_float_copy_of_the_cache():
    shape = (1, 2048, 4, 64)
    cache = jqx.QTensor.zeros(shape, jqx.QSpec(jnp.int8, jqx.per_axis(0, 1, 2)))
    assert cache.nbytes / (4 * cache.size) <= 0.27

    def f(p, q, k, c, t):
        c = lax.dynamic_update_slice(c, k, (0, t, 0, 0))
        return jnp.einsum("bqhd,bkhd->bhqk", q, c), c

    x = jnp.ones((1, 1, 4, 64))
    g = jax.jit(jqx.convert(f, NOTHING), donate_argnums=3)
    memory = g.lower({}, x, x, cache, jnp.int32(0)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < cache.size * 4 / 2


def test_compare_takes_state_as_it_is():
    plan, _ = planned()
    actual = jqx.compare(step, plan)(params(), xs()[0], empty("int8"), jnp.int32(0))
    assert len(actual.sites) == len(plan.sites)


def test_diagnostics_take_state_in_batches():
    plan, p = planned()
    batch = (xs()[0], empty("int8"), jnp.int32(0))
    costs = sensitivity(step, plan)(p, batch)
    assert {cost.path for cost in costs.ranked} == {"qkv", "out"}
    stats = jqx.calibrate_batches(step, plan, p, [batch], progress=False)
    assert jqx.affines(plan, stats) == {}
    assert len(jqx.explain(step, p, *batch, plan=plan).sites) == len(plan.sites) + len(plan.skipped)


def test_state_is_sharded_and_exported_like_arrays():
    """Each of two devices writes to its part of the batch; in `shard_map`, and in a jit with
    shardings of its own.
    """
    mesh = Mesh(np.array(jax.devices()[:2]), ("b",))
    c, x = filled("int8"), eighths(3, BATCH, 1, HEADS, WIDTH)
    expected = jqx.dynamic_update_slice(c, x, (0, 3, 0, 0))
    by_batch = jax.sharding.NamedSharding(mesh, PartitionSpec("b"))

    def at_3(c, x):
        return lax.dynamic_update_slice(c, x, (0, 3, 0, 0))

    parts = {"mesh": mesh, "in_specs": (PartitionSpec("b"),) * 2, "out_specs": PartitionSpec("b")}

    def f(p, c, x):
        inside = jax.jit(at_3, in_shardings=by_batch, out_shardings=by_batch)(c, x)
        return jax.shard_map(at_3, **parts)(c, x), inside

    for transform in TRANSFORMS.values():
        for actual in jax.jit(transform(f, NOTHING))({}, c, x):
            assert_same(actual, expected)
    exported = export.export(jax.jit(jqx.convert(lambda p, c, x: at_3(c, x), NOTHING)))({}, c, x)
    assert_same(export.deserialize(exported.serialize()).call({}, c, x), expected)


def test_bad_state_is_refused():
    tree = {"k": jnp.zeros((2, 4)), "index": jnp.int32(0), "one": jnp.zeros(())}
    spec = jqx.QSpec(jnp.int8, jqx.per_token())
    cases = [
        ({"K": spec}, ValueError, "'K' matches no leaf"),
        ({"k": spec, ".*k": spec}, ValueError, "'.*k' matches no leaf that is left"),
        ({".*": spec}, TypeError, "'index' is not an array of floats"),
        ({"k": jnp.int8}, TypeError, "an entry that is not a spec"),
        ({"(": spec}, ValueError, "is not a regular expression"),
        ([spec], TypeError, "specs"),
        ({"k": jqx.QSpec(jnp.int8)}, ValueError, "would come from zeros"),
        ({"k": jqx.QSpec(jnp.int8, jqx.per_axis(1))}, ValueError, "would come from zeros"),
    ]
    for specs, kind, text in cases:
        with pytest.raises(kind, match=text):
            jqx.quantize_state(tree, specs)
    done = jqx.quantize_state(tree, {"k": spec})
    assert done["index"] is tree["index"]
    with pytest.raises(ValueError, match="quantized already"):
        jqx.quantize_state(done, {"k": spec})
    abstract = jqx.quantize_state({"k": jax.ShapeDtypeStruct((2, 4), jnp.float32)}, {"k": spec})
    assert jax.tree.structure(abstract["k"]) == jax.tree.structure(done["k"])


@pytest.mark.parametrize("leaf", ["k", "v", "k|v"])
def test_a_cache_in_groups_is_read_by_attention(leaf):
    rng = np.random.default_rng(0)
    q = on_device(rng.standard_normal((2, 4, 12)), jnp.float32)
    k, v = on_device(rng.standard_normal((2, 2, 16, 4, 12)), jnp.float32)

    def attend(q, cache):
        shares = jax.nn.softmax(jnp.einsum("bhd,bthd->bht", q, cache["k"]))
        return jnp.einsum("bht,bthd->bhd", shares, cache["v"])

    cache = jqx.quantize_state(
        {"k": k, "v": v}, {leaf: jqx.QSpec("int4", jqx.per_group(8, tail=True))}
    )
    y = jax.jit(jqx.convert(attend, jqx.Policy([])))(q, cache)
    real = attend(q, jqx.dequantize_params(cache))
    np.testing.assert_allclose(y, real, rtol=1e-4, atol=1e-5)
