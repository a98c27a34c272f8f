"""Rows that count by a weight: what has none is left out, wherever views take the rows."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.extend import Observer, absmax, hessian, mean, mean_abs, places

from ..oracles.refusals import assert_error
from .test_custom_observer import MESH, ROWS, WEIGHTS, K, P, expected, forms, integers, weights

D, HEADS, EXPERTS, CHOSEN = 4, 2, 3, 2


def attention(p, x):
    """Two heads; the largest scores take all, so integers stay integers."""
    batch, tokens, _ = x.shape

    def heads(w):
        return (x @ w).reshape(batch, tokens, HEADS, D // HEADS).transpose(0, 2, 1, 3)

    scores = jnp.einsum("bhqd,bhkd->bhqk", heads(p["q"]), heads(p["k"]))
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))[None, None]
    scores = jnp.where(causal, scores, -jnp.inf)
    chosen = (scores == scores.max(-1, keepdims=True)).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", chosen, heads(p["v"]))
    return x + mixed.transpose(0, 2, 1, 3).reshape(x.shape) @ p["o"]


def experts(p, x):
    """Rows are sorted by expert, and added to their tokens again."""
    rows = x.reshape(-1, D)
    best, which = lax.top_k(rows @ p["router"], CHOSEN)
    order = jnp.argsort(which.reshape(-1))
    token = order // CHOSEN
    sizes = jnp.bincount(which.reshape(-1), length=EXPERTS)
    inner = jax.nn.relu(lax.ragged_dot(rows[token], p["up"], sizes))
    outer = lax.ragged_dot(inner, p["down"], sizes) * best.reshape(-1)[order][:, None]
    return x + jnp.zeros_like(rows).at[token].add(outer).reshape(x.shape)


def model(p, tokens):
    """A table, layers in a scan, experts, and a head."""
    x = p["table"][tokens]
    x, _ = lax.scan(
        lambda x, layer: (jax.checkpoint(attention)(layer, x) % 5, None), x, p["layers"]
    )
    return (experts(p, x) % 5) @ p["head"]


def parameters():
    def small(seed, *shape):
        return jnp.asarray(integers(seed, *shape) % 3 - 1)

    layers = {name: small(i, 2, D, D) for i, name in enumerate("qkvo")}
    up, down = small(5, EXPERTS, D, 5), small(6, EXPERTS, 5, D)
    more = {"router": small(7, D, EXPERTS), "head": small(8, D, 3), "table": small(9, 7, D)}
    return {"layers": layers, "up": up, "down": down, **more}


@pytest.mark.slow
def test_padding_is_left_out_of_a_language_model_with_experts():
    p, lengths = parameters(), [5, 2, 0]
    tokens = np.random.default_rng(0).integers(1, 7, (3, 5))
    is_token = np.arange(5)[None] < np.asarray(lengths)[:, None]
    plan = jqx.make_plan(model, WEIGHTS)(p, tokens)
    plain = (hessian, mean, mean_abs, absmax)
    padded = tuple(each(weight=lambda tokens: tokens > 0) for each in plain)
    assert [*map(str, padded)] == [*map(str, plain)]

    def seen(observers, batches):
        given = {".*": observers}
        return jqx.calibrate_batches(model, plan, p, batches, observers=given, progress=False)

    found = seen(padded[:2], [jnp.asarray(np.where(is_token, tokens, 0))])
    want = seen(plain[:2], [jnp.asarray(tokens[i : i + 1, :n]) for i, n in enumerate(lengths) if n])
    assert set(found) == set(want) and len(found) == 2 * 8
    for key, value in want.items():
        for a, b in zip(found[key], value, strict=True):
            np.testing.assert_array_equal(*np.broadcast_arrays(a, b), err_msg=key)
    inputs = found["up:ragged_dot:lhs@hessian"]
    assert inputs.rows.sum() == CHOSEN * sum(lengths) and (inputs.rows > 0).all()


def test_rows_count_by_weights_in_every_form():
    params, x = weights(), integers(0, ROWS, K)
    x[3] = 1
    plan = jqx.make_plan(forms, WEIGHTS)(params, x)
    first = lambda x: abs(x[:, 0]) * jnp.arange(ROWS, dtype=jnp.float32)  # noqa: E731
    given = {".*": (hessian(weight=first), mean(weight=first), places)}
    stats = jax.jit(jqx.calibrate(forms, plan, observers=given))(params, x)[1]
    counts = np.asarray(first(x))
    assert len(set(counts.tolist())) > 3

    def total(*operands):
        return sum((counts @ v for v in operands), np.zeros(K))

    for path, want in expected(x, total).items():
        found = stats[f"{path}:dot_general:lhs@mean"]
        np.testing.assert_array_equal(np.squeeze(found.total, -2), np.float32(want), err_msg=path)

    def gram(*operands):
        return sum((counts * v.T @ v for v in operands), np.zeros((K, K)))

    for path, want in expected(x, gram).items():
        found = stats[f"{path}:dot_general:lhs@hessian"]
        np.testing.assert_array_equal(found.products, np.float32(want), err_msg=path)


class Counts(NamedTuple):
    values: jax.Array
    weights: jax.Array


class Weights(Observer):
    """An operand, and how much its elements count."""

    weight = staticmethod(lambda x: x)

    def empty(self, operand, site):
        return Counts(*(jnp.zeros(operand.shape) for _ in range(2)))

    def observe(self, x, site):
        return Counts(x, jnp.broadcast_to(site.weights, x.shape))

    def merge(self, a, b):
        return b


def first_of_pairs(x):
    def body(state):
        i, y = state
        return i + 1, y.at[i].set(x[2 * i])

    return lax.while_loop(lambda state: state[0] < 3, body, (0, jnp.zeros_like(x[:3])))[1]


def sorted_and_back(x):
    order = jnp.argsort(x.max(1))
    return x[order][jnp.argsort(order)]


def over_devices(collective, out):
    def g(x):
        return jax.shard_map(collective, mesh=MESH, in_specs=P("d"), out_specs=out)(x[:4])

    return g


def windows(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME")


ALGEBRA = {
    "reshape": lambda x: x.reshape(3, 2, 2).transpose(1, 2, 0),
    "slice": lambda x: x[1:5:2],
    "reverse": lambda x: x[::-1],
    "concatenate": lambda x: jnp.concatenate([x[3:], x[:3]], axis=1),
    "stack": lambda x: jnp.stack([x, x[::-1]]),
    "split": lambda x: jnp.split(x, 3)[1],
    "tile": lambda x: jnp.tile(x, (2, 1)),
    "repeat": lambda x: jnp.repeat(x, 2, axis=0),
    "roll": lambda x: jnp.roll(x, 2, axis=0),
    "broadcast": lambda x: jnp.broadcast_to(x[:, None], (6, 3, 2)),
    "pad": lambda x: jnp.pad(x, ((1, 0), (0, 2))),
    "sort": lambda x: jnp.sort(x, axis=0),
    "argsort": lambda x: x[jnp.argsort(x.max(1))],
    "inverse": sorted_and_back,
    "take": lambda x: jnp.take(x, jnp.array([0, 5, 9]), axis=0, fill_value=0, mode="fill"),
    "along": lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1),
    "top": lambda x: lax.top_k(x.T, 3)[0],
    "set": lambda x: x.at[jnp.array([0, 2])].set(x[3:5]),
    "max": lambda x: x.max(0, keepdims=True),
    "least": lambda x: jnp.minimum(x, x[::-1]),
    "where": lambda x: jnp.where(x < 3, x, jnp.minimum(x, x[:1])),
    "so far": lambda x: lax.cummax(x, axis=0, reverse=True),
    "windows": windows,
    "dynamic slice": lambda x: lax.dynamic_slice(x, (x[0, 0].astype(int) % 3, 0), (2, 2)),
    "update": lambda x: lax.dynamic_update_slice(x, x[:2] * 1, (3, 0)),
    "scan": lambda x: lax.scan(lambda c, y: (jnp.minimum(c, y), jnp.minimum(c, y)), x[0], x)[1],
    "while": first_of_pairs,
    "branch": lambda x: lax.cond(x[0, 0] > 2, lambda: x, lambda: x[::-1]),
    "map": lambda x: jax.vmap(lambda row: row[::-1])(x),
    "barrier": lambda x: lax.optimization_barrier((x, 1.0))[0],
    "custom": lambda x: jax.nn.relu(x),
    "most of devices": over_devices(lambda x: lax.pmax(x, "d"), P()),
    "next device": over_devices(
        lambda x: lax.ppermute(x, "d", [(i, (i + 1) % 4) for i in range(4)]), P("d")
    ),
    "abs": lambda x: jnp.abs(jnp.negative(x)),
}
"""Functions made of moves, of the least of elements, and the most along axes: where each element
counts as much as it is large, so do those of results.
"""


def test_what_elements_count_follows_them():
    def f(p, x):
        return {name: g(x).reshape(-1, 1) @ p[name] for name, g in ALGEBRA.items()}

    x = np.random.default_rng(0).permutation(12).reshape(6, 2).astype(np.float32)
    p = {name: jnp.ones((1, 1)) for name in ALGEBRA}
    plan = jqx.make_plan(f, WEIGHTS)(p, x)
    _, stats = jax.jit(jqx.calibrate(f, plan, observers={".*": Weights()}))(p, x)
    assert len(stats) == len(ALGEBRA)
    wrong = [key for key, v in stats.items() if not np.array_equal(v.weights, v.values)]
    assert not wrong, {key: stats[key] for key in wrong}


def test_sums_count_as_the_row_that_counts_most():
    def f(p, x):
        pooled = x.mean(0, keepdims=True)
        mixed = jnp.einsum("tc,ts->sc", x, jnp.ones((6, 3)))
        both = jnp.einsum("tc,sc->ts", x, x[:2])
        image = x.reshape(1, 6, 2)
        patches = lax.conv_general_dilated(
            image, p["kernel"], (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        grouped = lax.conv_general_dilated(
            image.transpose(0, 2, 1),
            p["groups"],
            (1,),
            "VALID",
            rhs_dilation=(2,),
            dimension_numbers=("NCW", "OIW", "NCW"),
            feature_group_count=2,
        )
        added = jnp.zeros((4, 2)).at[jnp.array([1, 1, 3, 0, 0, 0])].add(x)
        values = [pooled, mixed, both, patches, grouped, jnp.cumsum(x, axis=0), added]
        return [v.reshape(-1, 1) @ w for v, w in zip(values, p["w"], strict=True)]

    x = np.random.default_rng(0).permutation(12).reshape(6, 2).astype(np.float32) + 1
    p = {
        "kernel": jnp.ones((3, 2, 3)),
        "groups": jnp.ones((4, 1, 2)),
        "w": [jnp.ones((1, 1)) for _ in range(7)],
    }
    plan = jqx.make_plan(f, jqx.Policy({"w.*": "int8", ".*": "float"}))(p, x)
    _, stats = jax.jit(jqx.calibrate(f, plan, observers={".*": Weights()}))(p, x)
    most = np.stack([x[:3].max(), x[2:5].max(), x[4:].max()])
    added = np.stack([x[3:].max(0), x[:2].max(0), [1, 1], x[2]])  # no row: 1
    want = [
        x.max(0, keepdims=True),
        np.tile(x.max(0), (3, 1)),
        np.minimum(x.max(1)[:, None], x.max(1)[None, :2]),
        np.tile(most[None, :, None], (1, 1, 3)),
        np.repeat(np.maximum(x[:4], x[2:]).T[None], 2, axis=1),
        np.maximum.accumulate(x, axis=0),
        added,
    ]
    assert len(stats) == len(want)
    for i, value in enumerate(want):
        found = stats[f"w/{i}:dot_general:lhs@weights"].weights
        np.testing.assert_array_equal(found, value.reshape(-1, 1), err_msg=str(i))


def test_rows_of_patches_and_of_stacks_count_for_themselves():
    """Whole images are left out of a convolution; slots of a stack by each of its matrices."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (4, 5, 4)).astype(np.float32)
    x[2] = np.nan
    of = {
        "conv": (
            lambda w, x: lax.conv_general_dilated(
                x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=2
            ),
            (3, 2, 6),
            lambda x: jnp.array([True, False, False, True]),
            x[[0, 3]],
        ),
        "stack": (
            lambda w, x: jnp.einsum("etd,edf->etf", x, w),
            (4, 4, 2),
            lambda x: jnp.arange(5)[None] < jnp.array([[5], [3], [0], [2]]),
            None,
        ),
    }
    for name, (f, shape, weight, left) in of.items():
        w = np.ones(shape, np.float32)
        plan = jqx.make_plan(f, WEIGHTS)(w, x)

        def seen(x, *observers, f=f, w=w, plan=plan):
            stats = jax.jit(jqx.calibrate(f, plan, observers={"": observers}))(w, x)[1]
            return {key.partition("@")[2]: value for key, value in stats.items()}

        found = seen(x, hessian(weight=weight), mean(weight=weight), absmax(weight=weight))
        if left is not None:
            for key, value in seen(left, hessian, mean, absmax).items():
                for a, b in zip(found[key], value, strict=True):
                    np.testing.assert_array_equal(*np.broadcast_arrays(a, b), err_msg=name)
            continue
        rows = [x[i, :n] for i, n in enumerate((5, 3, 0, 2))]
        np.testing.assert_array_equal(found["hessian"].products, [v.T @ v for v in rows])
        np.testing.assert_array_equal(found["hessian"].rows, [5, 3, 0, 2])
        np.testing.assert_array_equal(found["mean"].total[:, 0], [v.sum(0) for v in rows])
        np.testing.assert_array_equal(found["mean"].rows.ravel(), [5, 3, 0, 2])
        largest = [np.abs(v).max(0, initial=0) for v in rows]
        np.testing.assert_array_equal(found["absmax"].largest[:, 0], largest)


def test_two_weights_and_none_are_kept_apart_and_arguments_are_those_of_a_batch():
    def f(x, p, y, *, scale):
        return {"a": (x * scale) @ p["a"], "b": y @ p["b"], "c": jnp.ones((2, K)) @ p["c"]}

    p = {name: jnp.eye(K) for name in "abc"}
    x, y = integers(0, ROWS, K), integers(1, 3, K)
    plan = jqx.make_plan(f, WEIGHTS, params=1)(x, p, y, scale=2.0)
    of_x = hessian(weight=lambda x, y, scale: x[:, 0] > 0)
    of_y = hessian(weight=lambda x, y, **rest: jnp.array([1, 0, 2]))
    given = {"a|c": of_x, "b": of_y, "[ab]": mean}
    out, stats = jax.jit(jqx.calibrate(f, plan, observers=given))(x, p, y, scale=2.0)
    of = lambda name: stats[f"{name}:dot_general:lhs@hessian"].products  # noqa: E731
    kept = x[x[:, 0] > 0] * 2
    np.testing.assert_array_equal(of("a"), kept.T @ kept)
    np.testing.assert_array_equal(of("b"), y.T @ (y * [[1], [0], [2]]))
    np.testing.assert_array_equal(of("c"), np.full((K, K), 2))  # of parameters alone
    np.testing.assert_array_equal(stats["b:dot_general:lhs@mean"].total[0], y.sum(0))
    np.testing.assert_array_equal(out["a"], x * 2)


def test_what_cannot_be_followed_is_an_error_that_names_the_site():
    def spectrum(p, x, y):
        return jnp.fft.fft(x, axis=0).real @ p["w"]

    def looped(p, x, y):
        x = lax.fori_loop(0, 3, lambda _, x: jnp.fft.fft(x, axis=0).real @ p["loop"], x)
        return x @ p["w"]

    def other(p, x, y):
        return y @ p["w"], x @ p["loop"]

    def joined(p, x, y):
        return jnp.concatenate([x, y]) @ p["w"]

    p = {name: jnp.eye(K) for name in ("w", "loop")}
    x, y = jnp.ones((ROWS, K)), jnp.ones((3, K))
    rows = lambda x, y: x[:, 0] > 0  # noqa: E731

    def calibrate(f, *args, **observers):
        plan = jqx.make_plan(f, WEIGHTS)(*args)
        return jax.eval_shape(jqx.calibrate(f, plan, observers=observers), *args)

    for f, weight, error, facts in [
        (spectrum, rows, ValueError, ["'w:dot_general'", "`fft`", "(8,)", "float32[8,4]"]),
        (looped, rows, ValueError, ["'loop:dot_general'", "`fft`"]),
        (other, rows, ValueError, ["'w:dot_general'", "argument '2' of shape (3, 4)"]),
        (joined, rows, ValueError, ["'w:dot_general'", "argument '2' of shape (3, 4)"]),
        (other, lambda x, y: x[:5, 0], ValueError, ["no argument", "(5,)", "(8, 4), (3, 4)"]),
        (other, lambda x, y: 3, TypeError, ["does not return an array", "int"]),
        (other, lambda x, y: x[:, 0].astype(complex), ValueError, ["complex64"]),
        (other, lambda x, y: np.full(8, -1), ValueError, ["below 0"]),
    ]:
        call = functools.partial(calibrate, f, p, x, y, **{".*": hessian(weight=weight)})
        assert_error(call, "jqx.calibrate: ", *facts, error=error)
    state = jqx.QTensor.quantize(x, jqx.QSpec(jnp.int8))
    f = lambda p, state, x: jnp.sin(state) @ p["w"] + x @ p["loop"]  # noqa: E731
    given = {".*": hessian(weight=lambda _, x: x[:, 0] > 0)}
    with pytest.raises(ValueError, match=r"'w:dot_general'(.|\n)*quantized state"):
        calibrate(f, p, state, x, **given)
    calibrate(other, p, x, y, loop=hessian(weight=rows), w=hessian)  # what is not asked for
    with pytest.raises(TypeError) as refusal:
        calibrate(other, p, x, y, **{".*": hessian(weight=lambda x: x)})
    assert "without its parameters" in refusal.value.__notes__[0]
