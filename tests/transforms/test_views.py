"""Views of weights: what a plan quantizes runs in the layout of each target, and equals `simulate`.
What scales cannot follow is listed with the view.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.transforms.views import close_over_merges

from ..models.transforms import normal

PRESETS = {
    name: getattr(jqx.presets, name)
    for name in "w8a8 w8a8_dynamic w8a16 w4a16 w4a8 w4a4 fp8 mxfp8 nf4".split()
}
TARGETS = (None, "cpu", "gpu", "tpu")


def times(x, w):
    """Contracts the first axis of a view with the last of `x`, as far as both go."""
    n = min(x.shape[-1], w.shape[0])
    return jnp.tensordot(x[..., :n], w[:n] if w.shape[0] > n else w, 1)


def traced(x, n):
    """A number that no compiler knows."""
    return jnp.where(jnp.sum(x) > 1e9, 0, n)


def one(view):
    return lambda p, x: times(x, view(p["w"]))


def turns(view):
    """A view that is taken of a matrix and of its transpose."""
    return lambda p, x: (times(x, view(p["w"])), times(x, view(p["v"].T)))


def scanned(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(times(h, w[:, ::-1])), None), x, p["stack"])[0]


def numbered(p, x):
    def step(i, h):
        return jnp.tanh(times(h, lax.dynamic_index_in_dim(p["stack"], i, 0, False)))

    return lax.fori_loop(0, 2, step, x)


def while_loop(p, x):
    def body(carry):
        return carry[0] + 1, jnp.tanh(times(carry[1], p["square"][:, ::-1]))

    return lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1]


def branches(p, x):
    def heads(x, p):
        return times(x, p["w"].reshape(-1, 2, 48)[:, 1])

    return lax.cond(jnp.sum(x) > 0, lambda x, p: times(x, p["w"][:, :48]), heads, x, p)


def mapped(p, x):
    def heads(w):
        return times(x, w.reshape(-1, 4, w.shape[1] // 4))

    return jax.vmap(heads)(p["stack"])


def heads_of_both(p, x):
    w = p["w"].reshape(2, -1, 3, p["w"].shape[1] // 3)
    return jnp.einsum("bhd,hdkn->bkn", x.reshape(x.shape[0], 2, -1), w)


def halves(w):
    return jnp.concatenate(jnp.split(w, 2)[::-1])[:, 4:].astype(jnp.float32)


def twice(p, x):
    return times(x, p["w"]), times(x, p["w"][:, 1:7]), times(x, p["v"][::-1])


def fused(p, x):
    q, k, v = jnp.split(p["w"], 3, axis=1)
    heads = [times(x, part.reshape(part.shape[0], 2, -1)) for part in (q, k)]
    return jnp.einsum("bhd,chd->hbc", *heads), times(x, v)


VIEWS = {
    "whole": one(lambda w: w),
    "transposed": lambda p, x: times(x, p["square"].T),
    "heads": one(lambda w: w.reshape(w.shape[0], 4, -1)),
    "heads of the sum": lambda p, x: jnp.einsum(
        "bhd,hdn->bn", x.reshape(x.shape[0], 4, -1), p["w"].reshape(4, -1, p["w"].shape[1])
    ),
    "heads of both": heads_of_both,
    "merged": lambda p, x: times(x, p["stack"].transpose(1, 0, 2).reshape(x.shape[1], -1)),
    "merged sum": lambda p, x: times(jnp.tile(x, 2), p["stack"].reshape(-1, x.shape[1])),
    "fused": fused,
    "split": lambda p, x: [times(x, part) for part in jnp.split(p["w"], [8, 40], 1)],
    "split of the sum": lambda p, x: [times(x, part) for part in jnp.split(p["w"], 2)],
    "columns": turns(lambda w: w[:, 8:24]),
    "rows": turns(lambda w: w[:32]),
    "rows off blocks": turns(lambda w: w[8:48]),
    "rows by one": turns(lambda w: w[1:]),
    "strided": turns(lambda w: w[::2, ::3]),
    "strided by five": turns(lambda w: w[::5]),
    "reversed": turns(lambda w: w[::-1, ::-1]),
    "dynamic columns": lambda p, x: times(
        x, lax.dynamic_slice(p["w"], (0, traced(x, 5)), (x.shape[1], 16))
    ),
    "dynamic rows": lambda p, x: times(x, lax.dynamic_slice(p["w"], (traced(x, 8), 0), (32, 96))),
    "static dynamic": one(lambda w: lax.dynamic_slice(w, (8, 16), (40, 32))),
    "step of a loop": numbered,
    "indexed": lambda p, x: times(x, p["stack"][1]),
    "concatenated": lambda p, x: times(x, jnp.concatenate([p["w"], p["v"]], 1)),
    "concatenated sum": lambda p, x: times(
        jnp.tile(x, 2), jnp.concatenate([p["w"], p["v"][:40], p["v"][40:]])
    ),
    "stacked": lambda p, x: times(x, jnp.stack([p["w"], p["v"]], 1)),
    "stacked in front": lambda p, x: jnp.einsum("bk,skn->sbn", x, jnp.stack([p["w"], p["v"]])),
    "expanded": one(lambda w: w[:, None, :, None]),
    "squeezed": one(lambda w: jnp.squeeze(w[None, :, None], (0, 2))),
    "broadcast": one(lambda w: jnp.broadcast_to(w[:, None], (w.shape[0], 3, w.shape[1]))),
    "rolled": turns(lambda w: jnp.roll(w, 16, 0)),
    "rolled columns": turns(lambda w: jnp.roll(w, 5, 1)),
    "tiled": lambda p, x: times(jnp.tile(x, 2), jnp.tile(p["w"], (2, 2))),
    "raveled": one(lambda w: w.ravel().reshape(w.shape)),
    "chain": one(lambda w: w.T[::-1, 8:].reshape(4, -1, w.shape[0] - 8).transpose(2, 1, 0)[:, 1:]),
    "chain of halves": one(halves),
    "rows of rows": one(lambda w: w[8:][8:32]),
    "scaled": one(lambda w: 2.0 * w[:, ::-1] / 3.0),
    "scan": scanned,
    "while": while_loop,
    "cond": branches,
    "vmap": mapped,
    "remat": jax.checkpoint(one(lambda w: w[::-1, :8])),
    "jit": jax.jit(one(lambda w: w.T[:8].T)),
    "twice": twice,
}
CANNOT = {"rows by one", "strided by five", "dynamic rows", "heads of both", "chain"}
"""Views that scales in blocks cannot always follow."""


def parameters(names, k):
    shapes = {"w": (k, 96), "v": (k, 96), "square": (k, k), "stack": (2, k, k)}
    keys = itertools.count()
    return {
        name: {key: normal(next(keys), *shape) for key, shape in shapes.items()} for name in names
    }


def check(names, preset, targets, k):
    """Compares all views of a preset, in one program for each target; returns the plan."""

    def f(p, x):
        return {name: VIEWS[name](p[name], x) for name in names}

    p, x = parameters(names, k), normal(9, 16, k)
    plan = jqx.make_plan(f, PRESETS[preset]())(p, x)
    for item in plan.skipped:
        if not item.reason.startswith("no weight"):  # products of two activations
            assert "cannot follow its `" in item.reason, item
            assert item.path.split("/")[0] in CANNOT, item
    simulated = jax.jit(jqx.simulate(f, plan, "dynamic", backward=jnp.float32))(p, x)
    for target in targets:
        codes = jqx.quantize_params(p, plan, target=target)
        actual = jax.jit(jqx.convert(f, plan, "dynamic"))(codes, x)
        for name in names:
            pair = actual[name], simulated[name]
            for y, expected in zip(*map(jax.tree.leaves, pair), strict=True):
                limit = 1e-5 * np.max(np.abs(expected))  # sums of floats in another order
                where = f"{name} for {target}"
                np.testing.assert_allclose(y, expected, rtol=0, atol=limit, err_msg=where)
    return plan


FEW = "heads,fused,rows off blocks,reversed,dynamic columns,concatenated,scan,raveled".split(",")


@pytest.mark.parametrize("preset, target", [("w8a8_dynamic", "cpu"), ("w4a16", "tpu")])
def test_views_of_weights_run_in_the_layout_of_a_target(preset, target):
    plan = check(FEW, preset, [target], 64)
    assert not [item for item in plan.skipped if "cannot follow" in item.reason]


@pytest.mark.sweep
@pytest.mark.parametrize("k", [64, 80])
@pytest.mark.parametrize("preset", PRESETS)
def test_all_views_of_weights_run_in_the_layouts_of_all_targets(preset, k):
    check(list(VIEWS), preset, TARGETS, k)


def test_fused_projections_keep_a_layout_and_reshaped_ones_do_not():
    p, x = {"w": normal(0, 64, 96), "v": normal(1, 64, 64)}, normal(2, 4, 64)

    def f(p, x):
        heads = jnp.einsum("bd,dhk->bhk", x, p["v"].reshape(64, 4, 16))
        return [x @ part for part in jnp.split(p["w"], 3, 1)], heads

    plan = jqx.make_plan(f, jqx.presets.w8a16())(p, x)
    codes = jqx.quantize_params(p, plan, target="cpu")
    assert codes["w"].layout.swapped and codes["v"].layout is None
    assert str(plan).endswith("; codes of v stay in order, as f moves its axes")
    assert jqx.explain(f, codes, x, plan=plan).plain == ()
    packed = {**codes, "v": jqx.pack_for(codes["v"], "cpu")}  # it runs all the same
    pair = (jqx.convert(f, plan)(tree, x) for tree in (codes, packed))
    for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_one_site_that_blocks_cannot_follow_leaves_the_weight_in_float_and_says_where():
    p, x = {"w": normal(0, 96, 32), "v": normal(1, 96, 32)}, normal(2, 4, 96)

    def f(p, x):
        joined = jnp.concatenate([p["w"], p["v"]], 1)
        return x @ p["w"], x[:, 1:] @ p["w"][1:], x @ joined, x @ p["v"]

    plan = jqx.make_plan(f, jqx.presets.w4a16())(p, x)
    reason = "scales of 'w' cannot follow its `slice` at w:dot_general#1"
    reasons = {item.path: item.reason for item in plan.skipped}
    also = f"{reason}, and 'v' is multiplied together with it"
    assert plan.sites == () and reasons == {"w": reason, "w+v": reason, "v": also}
    assert jqx.quantize_params(p, plan) == p


def test_joins_along_a_sum_whose_parts_share_no_block_stay_in_float():
    """Each part has scales of its own, and blocks have one size; only the last one is smaller."""
    p = {"w": normal(0, 16, 8), "v": normal(1, 7, 8), "s": normal(2, 2, 8, 8)}
    x = normal(3, 4, 23)

    def step(h, w):
        return jnp.tanh(h @ jnp.roll(w, 3, 0)), None

    def f(p, x):
        hidden = x @ jnp.concatenate([p["v"], p["w"]])
        return hidden, lax.scan(step, hidden, p["s"])[0]

    plan = jqx.make_plan(f, jqx.Policy({".*": "int8"}))
    reason = {item.path: item.reason for item in plan(p, x).skipped}
    assert reason == {
        "v+w": "scales of 'v' cannot follow its `concatenate`",
        "s": "scales of 's' cannot follow its `concatenate`",
    }

    def g(p, x):
        return x @ jnp.concatenate([p["w"], p["v"]])

    fits = jqx.make_plan(g, jqx.presets.w8a8_dynamic())(p, x)
    assert len(fits.sites) == 1
    actual = jax.jit(jqx.convert(g, fits))(jqx.quantize_params(p, fits), x)
    exact = np.asarray(g(p, x))
    np.testing.assert_allclose(actual, exact, atol=0.03 * abs(exact).max())


FLOAT8 = jnp.float8_e4m3fn
ROUNDED = {
    "stored": lambda p, x: x @ p["stored"].astype(x.dtype),
    "stored transposed": lambda p, x: x @ p["stored"].T.astype(x.dtype),
    "cast": lambda p, x: x @ p["w"].astype(FLOAT8).astype(x.dtype),
    "cast both": lambda p, x: lax.dot(
        x.astype(FLOAT8), p["w"].astype(FLOAT8), preferred_element_type=x.dtype
    ),
    "cast to float4": lambda p, x: x @ p["w"].astype(jnp.float4_e2m1fn).T.astype(x.dtype),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_weights_of_less_than_16_bits_are_listed_and_stay_as_they_are(name):
    w, x = normal(0, 32, 32), normal(1, 8, 32)
    p = {"w": w, "stored": w.astype(FLOAT8), "other": w}

    def f(p, x):
        return ROUNDED[name](p, x) @ p["other"]

    plan = jqx.make_plan(f, jqx.presets.w8a16())(p, x)
    (skipped,) = plan.skipped
    rounded = f"f rounds 'w' to {'float4_e2m1fn' if 'float4' in name else 'float8_e4m3fn'}"
    stored = "the parameter 'stored' is float8_e4m3fn, not a float of 16 bits or more"
    assert skipped.reason == (stored if "stored" in name else rounded)
    codes = jqx.quantize_params(p, plan)
    assert codes["stored"] is p["stored"] and codes["w"] is p["w"]
    assert [weight.path for weight in jqx.report(plan, p).weights] == ["other"]
    pair = jqx.convert(f, plan)(codes, x), jqx.simulate(f, plan)(p, x)
    np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_rounded_at_one_use_is_refused_by_name():
    w = normal(0, 32, 32)
    refused = r"(?s)the weight 'w'.+reaches `convert_element_type`"
    with pytest.raises(ValueError, match=refused):
        jqx.make_plan(lambda p, x: ROUNDED["cast"](p, x) @ p["w"], jqx.presets.w8a16())({"w": w}, w)


@pytest.mark.parametrize("preset", ["w8a8_dynamic", "w4a4"])
def test_a_convolution_with_groups_of_the_batch_runs(preset):
    p, x = {"k": normal(0, 3, 3, 6, 8)}, normal(1, 4, 8, 8, 6)

    def f(p, x):
        form = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, p["k"], (1, 1), "SAME", dimension_numbers=form, batch_group_count=2
        )

    plan = jqx.make_plan(f, PRESETS[preset]())(p, x)
    pair = jqx.convert(f, plan)(jqx.quantize_params(p, plan), x), jqx.simulate(f, plan)(p, x)
    np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset", ["w8a8", "w4a16"])
def test_arrays_of_numpy_are_taken_as_jax_takes_them(preset, tmp_path):
    draw = np.random.default_rng(0).normal
    p = {"w": draw(size=(32, 32)), "i": np.arange(32), "b": jnp.zeros(32), "s": 2.0}
    x = draw(size=(8, 32))

    def f(p, x):
        return (x @ p["w"] + p["b"][None])[:, p["i"]] * p["s"]

    quantize = jqx.ptq(f, PRESETS[preset](), jqx.algorithms.nearest(), progress=False)
    quantized = quantize(p, [x])
    again = quantize(jax.tree.map(jnp.asarray, p), [jnp.asarray(x)])
    assert len(quantized.plan.sites) == 1
    y = quantized(x)
    assert y.dtype == jnp.float32 and jnp.array_equal(y, again(jnp.asarray(x)))
    jqx.save(tmp_path / "f", quantized)
    assert jnp.array_equal(jqx.load(tmp_path / "f").bind(f, like=p)(x), y)


SINGLE = {
    "transpose": lambda w: w.T,
    "reshape that splits": lambda w: w.reshape(2, 3, 4),
    "reshape of size-1 axes": lambda w: w.reshape(6, 1, 4, 1),
    "squeeze": lambda w: jnp.squeeze(w[:, None], 1),
    "expand": lambda w: w[:, None, :],
    "broadcast": lambda w: jnp.broadcast_to(w[None], (3, 6, 4)),
    "slice": lambda w: w[1:5:2, :3],
    "row": lambda w: w[2],
    "convert": lambda w: w.astype(jnp.bfloat16),
    "stop_gradient": jax.lax.stop_gradient,
    "copy": jnp.copy,
    "mul": lambda w: w * 4.0,
    "mul from the left": lambda w: 0.5 * w,
    "mul by a traced scalar": lambda w: w * jnp.float32(2),
    "div": lambda w: w / 8.0,
    "neg": lambda w: -w,
    "reverse": lambda w: w[::-1, ::-1],
    "tile": lambda w: jnp.tile(w, (2, 3)),
    "repeat of an axis": lambda w: jnp.broadcast_to(w[:, None], (6, 2, 4)).reshape(12, 4),
    "roll": lambda w: jnp.roll(w, 1, 0),
    "concatenate": lambda w: jnp.concatenate([w[2:], w, w[:1]]),
    "stack": lambda w: jnp.stack([w, 2 * w], 1),
    "split": lambda w: jnp.split(w, [1, 3], axis=1)[1],
    "unstack": lambda w: jnp.unstack(w, axis=1)[2],
    "barrier": lambda w: jax.lax.optimization_barrier((w, 1.0))[0],
    "several in a jit": lambda w: jax.jit(lambda w: (w.T * 2.0)[1:3].reshape(2, 3, 2))(w),
}
NO_VIEWS = {
    "mul by an array": lambda w: w * w,
    "division of a scalar": lambda w: 1.0 / w,
    "conversion to integers": lambda w: w.astype(jnp.int32),
    "sum": lambda w: w.sum(),
}
GRANULARITIES = [jqx.per_tensor(), jqx.per_axis(0), jqx.per_axis(1), jqx.per_axis(0, 1)]
NOTHING = jqx.Policy([])
ASYMMETRIC = {"symmetric": False, "calibrator": jqx.calibrators.minmax}


@pytest.mark.many
@pytest.mark.parametrize("fields", [{}, ASYMMETRIC], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("name", SINGLE)
def test_a_view_of_a_qtensor_is_the_view_of_its_real_values(name, granularity, fields):
    view = SINGLE[name]
    q = jqx.QTensor.quantize(normal(0, 6, 4), jqx.QSpec(jnp.int8, granularity, **fields))
    out, expected = jqx.convert(view, NOTHING)(q), view(q.dequantize())
    assert isinstance(out, jqx.QTensor) and out.qtype == q.qtype
    # All factors are powers of two, so scaling the scale rounds as scaling the values does.
    np.testing.assert_array_equal(out.dequantize(), expected, strict=True)


@pytest.mark.parametrize("name", NO_VIEWS)
def test_what_is_no_view_is_not_taken_for_one(name):
    q = jqx.QTensor.quantize(normal(0, 6, 4), jqx.QSpec(jnp.int8))
    with pytest.raises(NotImplementedError, match="a quantized array reaches"):
        jqx.convert(NO_VIEWS[name], NOTHING)(q)


@pytest.mark.parametrize(
    ("kept", "merges", "expected"),
    [
        ({0, 2}, [{0, 1}], {2}),
        ({0, 1, 2}, [{0, 1}], {0, 1, 2}),
        ({0, 1, 2}, [{0, 1}, {1, 2}, {2, 3}], set()),
    ],
)
def test_merged_axes_are_kept_together_or_not_at_all(kept, merges, expected):
    """And merges that overlap fall together."""
    assert close_over_merges(frozenset(kept), [*map(frozenset, merges)]) == expected


@pytest.mark.parametrize("target", ["cpu", "h200", "tpu-v6e"])
def test_kernels_of_convolutions_keep_the_order_of_their_axes(target):
    """A kernel in another order would be transposed in each call."""
    params = {"taps": jnp.ones((3, 3, 16, 32)), "w": jnp.ones((32, 16))}

    def f(p, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, p["taps"], (1, 1), "SAME", dimension_numbers=numbers)
        return y @ p["w"]

    plan = jqx.make_plan(f, jqx.presets.w8a8())(params, jnp.ones((1, 8, 8, 16)))
    assert "stay in order" not in str(plan)  # that is of weights whose axes a function moves
    laid_out = jqx.quantize_params(params, plan, target=target)
    assert laid_out["taps"].layout is None or not laid_out["taps"].layout.swapped
    assert laid_out["taps"].values.shape == (3, 3, 16, 32)
    assert laid_out["w"].layout == jqx.pack_for(laid_out["w"].unpack(), target).layout
