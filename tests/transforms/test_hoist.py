"""`jqx.hoist`: what a function computes from parameters alone, and the rest of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

import jqx

from ..models.transforms import normal

X = normal(0, 4, 16)
P = {
    "w": normal(1, 16, 16),
    "mask": jnp.tri(16),
    "g": normal(2, 1, 16),
    "u": normal(3, 16),
    "b": normal(4, 1, 16),
}
STACK = {"w": normal(5, 3, 16, 16), "s": normal(6, 3, 1, 16), "v": normal(7, 16, 16)}


def norm(w):
    return w / jnp.linalg.norm(w, axis=0, keepdims=True)


@jax.custom_vjp
def ruled(w, x):
    return x @ norm(w)


ruled.defvjp(
    lambda w, x: (ruled(w, x), (w, x)), lambda residuals, c: (0 * residuals[0], 3 * residuals[1])
)


def spectral(p, x):
    v = p["w"].T @ p["u"]
    v = v / jnp.linalg.norm(v)
    return x @ (p["w"] / (p["u"] @ p["w"] @ v))


def in_jit(p, x):
    layer = jax.jit(lambda w, x: jnp.tanh(x @ norm(w).T))
    return layer(p["w"], layer(p["w"], x)) + jax.checkpoint(layer)(p["w"], x) @ p["w"]


def in_branches(p, x):
    w = lax.cond(p["on"], norm, lambda w: 2 * w, p["w"])
    return lax.cond(x.sum() > 0, lambda x, w: x @ norm(w), lambda x, w: x @ w, x @ w, p["w"])


def in_scan(p, x):
    def step(h, ws):
        w, s = ws
        return jnp.tanh(h @ (norm(w) * s) @ norm(p["v"])), h.sum()

    h, sums = lax.scan(step, x, (p["w"], p["s"]), reverse=True)
    return h + sums.sum()


def in_nested_scans(p, x):
    def inner(h, w):
        return jnp.tanh(h @ norm(w)), None

    return lax.scan(lambda h, w: (lax.scan(inner, h, w)[0], None), x, p["w"])[0]


def in_loops(p, x):
    def body(_, state):
        return jnp.tanh(state[0] @ norm(state[1])), state[1]

    h, _ = lax.fori_loop(0, 3, body, (x, p["w"]))
    return lax.while_loop(lambda h: h.sum() < -9, lambda h: h @ norm(p["w"]), h)


def scan_of_parameters(p, x):
    return x @ lax.scan(lambda c, w: (c @ norm(w), None), jnp.eye(16), p["w"])[0]


def attention_of_latents(p, x):
    """The latents are repeated for each example, so their product stays where it is."""
    q = jnp.broadcast_to(p["q"], (x.shape[0], 5, 16)) @ p["wq"]
    return jnp.einsum("bqd,bd->bq", q, x @ norm(p["wk"]))


def on_devices(p, x):
    """Weights that are computed outside of a shard_map, and read through views inside."""
    rows, replicated = PartitionSpec("devices"), PartitionSpec()
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    inside = jax.shard_map(
        lambda x, w: jnp.tanh(x @ w.T), mesh=mesh, in_specs=(rows, replicated), out_specs=rows
    )
    return inside(x, norm(p["w"]))


# Function, parameters, what is split off in full, and what of it `what="weights"` leaves.
CASES = {
    "outside of shard_map": (on_devices, P, "computed/w", ""),
    "masked": (lambda p, x: jnp.tanh(x @ (p["w"] * p["mask"]) + p["b"]), P, "computed/mask,w", ""),
    "mask of a constant": (lambda p, x: x @ jnp.tril(p["w"]), P, "computed/w", ""),
    "weight norm": (lambda p, x: x @ (norm(p["w"]) * p["g"]), P, "computed/g,w", ""),
    "spectral norm": (spectral, P, "computed/u,w", ""),
    "padded": (
        lambda p, x: jnp.pad(x, ((0, 0), (0, 2))) @ jnp.pad(p["w"], ((0, 2), (0, 0))),
        P,
        "computed/w",
        "computed/w",
    ),
    "low rank": (
        lambda p, x: x @ (p["a"] @ p["b"]),
        {"a": normal(8, 16, 4), "b": normal(9, 4, 16)},
        "computed/a,b",
        "computed/a,b",
    ),
    "factors": (
        lambda p, x: x @ jnp.einsum("kir,kro->io", p["a"], p["b"]),
        {"a": normal(8, 4, 16, 2), "b": normal(9, 4, 2, 16)},
        "computed/a,b",
        "",
    ),
    "codes of a user": (
        lambda p, x: x @ (p["q"].astype(jnp.float32) * p["s"]),
        {"q": jnp.arange(256, dtype=jnp.int8).reshape(16, 16), "s": normal(6, 1, 16)},
        "computed/q,s",
        "",
    ),
    "complex pairs": (
        lambda p, x: (x.astype(jnp.complex64) @ lax.complex(p["re"], p["im"]) @ p["c"]).real,
        {"re": normal(1, 16, 8), "im": normal(2, 16, 8), "c": jnp.ones((8, 4), jnp.complex64)},
        "computed/im,re",
        "computed/im,re",
    ),
    "in jit": (in_jit, P, "computed/w", ""),
    "in a derivative rule": (lambda p, x: ruled(p["w"], x), P, "computed/w", ""),
    "in branches": (in_branches, {**P, "on": jnp.array(True)}, "computed/on,w computed/w", ""),
    "in a scan": (in_scan, STACK, "computed/s,w computed/v", ""),
    "in scans in scans": (in_nested_scans, {"w": normal(5, 2, 3, 16, 16)}, "computed/w", ""),
    "in loops": (in_loops, P, "computed/w", ""),
    "at an index of a loop": (
        lambda p, x: lax.fori_loop(
            0, 3, lambda i, h: jnp.tanh(h @ jax.vmap(norm)(p["w"])[i] * h.max()), x
        ),
        STACK,
        "computed/w",
        "",
    ),
    "a scan of parameters": (scan_of_parameters, STACK, "computed/w", ""),
    "of a map": (
        lambda p, x: jnp.einsum("bi,kio->bo", x, jax.vmap(norm)(p["w"])),
        STACK,
        "computed/w",
        "",
    ),
    "twice": (lambda p, x: jnp.exp(x @ norm(p["w"])) @ norm(p["w"]), P, "computed/w", ""),
    "two of one": (
        lambda p, x: x @ norm(p["w"]) @ jnp.tanh(p["w"]),
        P,
        "computed/w computed/w-2",
        "",
    ),
    "several places": (
        lambda p, x: x @ (p["a"]["l1"]["w"] * p["a"]["l2"]["w"]) @ jnp.tanh(p["a"]["l1"]["w"]),
        {"a": {"l1": {"w": P["w"]}, "l2": {"w": P["mask"]}}},
        "a/computed/l1.w,l2.w a/l1/computed/w",
        "",
    ),
    "latents": (
        attention_of_latents,
        {"q": normal(1, 5, 16), "wq": normal(2, 16, 16), "wk": P["w"]},
        "computed/wk",
        "",
    ),
    "an array alone": (lambda w, x: x @ norm(w), P["w"], "computed", ""),
    "only views": (lambda p, x: x @ p["w"].T.reshape(16, 16)[:, ::-1] * 2.0, P, "", ""),
}


def paths_of(tree):
    return {
        keystr(keys, simple=True, separator="/"): x for keys, x in tree_flatten_with_path(tree)[0]
    }


@pytest.fixture(scope="module")
def results():
    """Runs all functions, and what is left of them, in one program."""

    def run(params, x):
        return {
            name: (CASES[name][0](p, x), *(run_split(CASES[name][0], what)(p, x) for what in WHATS))
            for name, p in params.items()
        }

    return jax.jit(run)({name: case[1] for name, case in CASES.items()}, X)


WHATS = ("all", "weights")


def run_split(f, what):
    def run(p, x):
        g, computed = jqx.hoist(f, what)(p, x)
        return g(computed, x)

    return run


@pytest.mark.parametrize("name", CASES)
def test_the_parts_are_the_function_and_values_are_named_after_their_parameters(name, results):
    f, params, expected, left = CASES[name]
    for got in results[name][1:]:
        # XLA may fuse the two programs differently; sums of 16 products of numbers of about 1.
        np.testing.assert_allclose(got, results[name][0], rtol=2e-5, atol=2e-5)
    split_off = {*expected.split()}
    for what, computed_paths in (("all", split_off), ("weights", split_off - {*left.split()})):
        _, computed = jqx.hoist(f, what)(jax.eval_shape(lambda p=params: p), X)
        paths = paths_of(computed)
        originals = paths_of(params)
        assert paths.keys() - originals.keys() == computed_paths, what
        for path in paths.keys() & originals.keys():
            assert paths[path].shape == originals[path].shape


def test_what_is_read_as_it_is_stays_and_the_rest_is_dropped():
    f = lambda p, x: (x @ (p["w"] * p["mask"]) + p["b"], p["u"])  # noqa: E731
    g, computed = jqx.hoist(f)(P, X)
    assert paths_of(computed).keys() == {"b", "u", "computed/mask,w"}
    assert computed["u"] is P["u"] and g(computed, X)[1] is P["u"]
    np.testing.assert_array_equal(g(computed, X)[0], f(P, X)[0])


def test_leaves_that_stay_may_be_typed_keys_and_float64_of_numpy():
    def f(p, x):
        return x @ (p["w"] * p["mask"]) @ p["v"] + jax.random.normal(p["key"], x.shape)

    wide = {"v": np.eye(16), "key": jax.random.key(0), "w": P["w"], "mask": np.tri(16)}
    g, computed = jqx.hoist(f)(wide, X)
    np.testing.assert_allclose(g(computed, X), f(wide, X), rtol=1e-5, atol=1e-5)


def test_steps_of_a_scan_are_stacked():
    _, computed = jqx.hoist(in_scan)(STACK, X)
    np.testing.assert_allclose(
        computed["computed"]["s,w"], jax.vmap(norm)(STACK["w"]) * STACK["s"], rtol=1e-5
    )


def test_both_parts_have_gradients_and_compose():
    f = CASES["weight norm"][0]

    def split(p, x):
        g, computed = jqx.hoist(f)(p, x)
        return g(computed, x).sum()

    g, computed = jqx.hoist(f)(P, X)
    replicated = jax.grad(lambda p: f(p, X).sum())
    actual = jax.jit(
        lambda p, c: (
            jax.grad(split)(p, X),
            replicated(p),
            jax.vmap(g, (None, 0))(c, X),
            jax.grad(lambda c: g(c, X).sum())(c),
        )
    )(P, computed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *actual[:2])
    np.testing.assert_allclose(actual[2], f(P, X), rtol=2e-5, atol=2e-5)
    assert paths_of(actual[3])["computed/g,w"].shape == (16, 16)


def test_other_positions_names_and_static_values():
    def f(x, layers, scale, *, shift=0.0):
        return scale["s"] * (x @ norm(layers[0]["w"]) * layers[0]["n"]) + shift

    layers, scale = [{"w": P["w"], "n": 3, "name": "dense"}], {"s": jnp.float32(2)}
    g, computed = jqx.hoist(f, params=(1, 2), names={"1/0": "first"})(X, layers, scale)
    assert paths_of(computed).keys() == {"first/computed/w", "2/s"}
    np.testing.assert_array_equal(g(X, computed, shift=1.0), f(X, layers, scale, shift=1.0))
    plan = jqx.make_plan(g, jqx.presets.w8a16(), params=1)(X, computed)
    assert [weight.path for weight in plan.weights] == ["first/computed/w"]


def test_g_holds_for_other_batches_unless_a_value_depends_on_their_size():
    g, computed = jqx.hoist(in_scan)(STACK, X)
    np.testing.assert_allclose(g(computed, X[:2]), in_scan(STACK, X[:2]), rtol=1e-5)
    g, computed = jqx.hoist(lambda p, x: x @ jnp.exp(p["w"] / x.shape[0]))(P, X)
    with pytest.raises(ValueError, match="depends on the sizes of the other arguments"):
        g(computed, X[:2])


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: jqx.hoist(3), TypeError, "`f` is not a function"),
        (lambda: jqx.hoist(in_scan, "some"), ValueError, "`what` is unknown"),
        (lambda: jqx.hoist(in_scan, STACK, X), TypeError, "call it in two steps"),
        (lambda: jqx.hoist(in_scan)(STACK, X)[0](STACK, X), ValueError, "'computed/s,w': none"),
        (lambda: jqx.hoist(in_scan)(STACK, X)[0](), ValueError, "no computed parameters"),
    ],
)
def test_wrong_calls_say_what_to_write(call, error, words):
    with pytest.raises(error) as raised:
        call()
    text = str(raised.value)
    assert words in text and "fix:" in text, text


def test_a_derivative_rule_that_lost_its_parameters_is_an_error_and_not_another_gradient():
    g, computed = jqx.hoist(CASES["in a derivative rule"][0])(P, X)
    with pytest.raises(NotImplementedError, match="has no derivative here"):
        jax.grad(lambda x: g(computed, x).sum())(X)


def test_reasons_offer_hoist_by_name_and_say_what_is_larger():
    policy = jqx.Policy([jqx.Rule(weight="int8", optional=True)])
    for name, (f, params, expected, left) in CASES.items():
        skipped = jqx.make_plan(f, policy, unsupported="dequantize")(params, X).skipped
        text = "\n".join(item.reason for item in skipped)
        if "complex" in name:
            assert "it is complex64, not a float" in text
        elif expected:
            assert "jqx.hoist" in text, name
            other_text = text.replace("jqx.hoist computes it outside of f", "")
            assert ("outside of f" in other_text) == (name == "latents"), name
            assert ("ptq(hoist='all')" in text) == bool(left), name
        else:
            assert "hoist" not in text
    with pytest.raises(ValueError, match=r"fix:      use jqx\.hoist, or ptq\(hoist='all'\);"):
        jqx.make_plan(CASES["in jit"][0], policy)(P, X)
    with pytest.raises(ValueError, match=r"g, computed = jqx\.hoist\(f\)\(params, x\)"):
        jqx.make_plan(CASES["masked"][0], jqx.presets.w8a8())(P, X)
