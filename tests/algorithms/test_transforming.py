"""Algorithms that only transform leave every function as it is, however often and wherever its
parameters are read.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import algorithms

from ..arrays import normal, on_device
from .programs import Program, along, inputs, norm, together

T, W, D = 8, 8, 8
TABLE = {
    "t": on_device(np.asarray(normal(1, T, D)) * np.exp(normal(2, D))),
    "w": normal(3, D, W),
    "v": normal(4, D, W),
    "q": normal(14, D, D),
    "g": normal(15, D),
    "h": normal(16, D),
}
KEY = jax.random.key(0)
STACK = {"ws": normal(5, 3, D, D) / 3, "v": normal(6, D, W), "g": normal(7, D)}


def keyed(inside, keys=None, count=3):
    """Scans over weights and typed keys; `inside` uses the key of a step."""

    def f(p, x, i):
        key_of_each_step = jax.random.split(jax.random.key(0), count)
        step = lambda c, xs: (jnp.tanh(c @ xs[0] + inside(xs[1])), None)  # noqa: E731
        return lax.scan(step, norm(x[:, :D], p["g"]), (p["ws"], key_of_each_step))[0] @ p["v"]

    return f


def key_as_carry(p, x, i):
    def step(c, w):
        x, key = c
        key, subkey = jax.random.split(key)
        return (jnp.tanh(x @ w + 0 * jax.random.normal(subkey)), key), key

    (y, key), keys = lax.scan(step, (norm(x[:, :D], p["g"]), jax.random.key(1)), p["ws"])
    return y @ p["v"] + 0 * jax.random.normal(key) + 0 * jax.random.normal(keys[1])


def key_in_while(p, x, i):
    def body(c):
        n, x, key = c
        return n + 1, x + 0 * jax.random.normal(key), jax.random.fold_in(key, n)

    _, y, _ = lax.while_loop(lambda c: c[0] < 2, body, (0, x[:, :D], jax.random.key(2)))
    return norm(y, p["g"]) @ p["v"]


def keys_of_parameters(p, x, i):
    step = lambda c, xs: (jnp.tanh(c @ xs[0] + 0 * jax.random.normal(xs[1])), None)  # noqa: E731
    y, _ = lax.scan(step, norm(x[:, :D], p["g"]), (p["ws"], p["key"]))
    return y @ p["v"]


def looked_up_in_scan(p, x, i):
    step = lambda y, k: (y + p["t"][(i + k) % T] @ p["w"], p["t"][i])  # noqa: E731
    y, rows = lax.scan(step, jnp.zeros((len(i), W)), jnp.arange(3, dtype=jnp.int32))
    return y + rows[1] @ p["v"]


def row_in_scan(p, x, i):
    row = lambda k: lax.dynamic_slice(p["a"], (k, np.int32(0)), (1, D))  # noqa: E731
    steps = jnp.arange(4, dtype=jnp.int32)
    y, _ = lax.scan(lambda c, k: (c + row(k) @ p["q"], None), jnp.zeros((1, D)), steps)
    return norm(x[:, :D], p["g"]) @ p["v"] + y


def drop(key):
    return jnp.where(jax.random.bernoulli(key, 0.5, (D,)), 0.0, -0.0)[None]


def in_branches(key):
    one, two = (lambda k: jax.random.uniform(k)), (lambda k: jax.random.normal(k))
    return 0 * lax.cond(jax.random.bits(key) > 9, one, two, key)


def window(how, *more, **kinds):
    most, add = (-jnp.inf, lax.max), (0.0, lax.add)

    def run(h):
        return lax.reduce_window(h, *(most if how == "max" else add), (1, 1), *more, **kinds)

    return lambda p, x, i: run(jax.nn.relu(x[:, :D] @ p["a"]))[:, :4] @ p["b"]


WINDOWED = {"a": normal(8, D, D), "b": normal(9, 4, W)}
NO = (0, 0)
LATENTS = {"a": normal(10, 5, D), "q": normal(11, D, D), "v": normal(12, D, W), "g": normal(13, D)}
CASES = {
    "towers": (lambda p, x, i: (p["t"][i] @ p["w"], p["t"][(i + 1) % T] @ p["v"]), TABLE),
    "sum": (lambda p, x, i: (p["t"][i] + p["t"][(i + 1) % T]) @ p["w"], TABLE),
    "halves": (
        lambda p, x, i: p["t"][i][:, :4] @ p["w"][:4] + p["t"][i][:, 4:] @ p["v"][4:],
        TABLE,
    ),
    "scan": (looked_up_in_scan, TABLE),
    "branches": (
        lambda p, x, i: lax.cond(
            i[0] > 3, lambda: p["t"][i] @ p["w"], lambda: p["t"][i[:1]] @ p["v"] + x[:, :W]
        ),
        TABLE,
    ),
    "reversed": (lambda p, x, i: (p["t"][i] + p["t"][:, ::-1][i]) @ p["w"], TABLE),
    "overlap": (lambda p, x, i: p["t"][:5][i % 5] @ p["w"] + p["t"][3:][i % 5] @ p["v"], TABLE),
    "one-hot": (lambda p, x, i: jax.nn.one_hot(i, T) @ p["t"] @ p["w"] + p["t"][i] @ p["v"], TABLE),
    "row": (lambda p, x, i: (p["t"][i] + p["t"][:1]) @ p["w"], TABLE),
    "head": (lambda p, x, i: norm(p["t"][i] @ p["w"] @ p["v"].T, jnp.ones(D)) @ p["t"].T, TABLE),
    "fixed once": (lambda p, x, i: (p["t"][i] @ p["w"], jnp.tanh(p["t"][i + 0])), TABLE),
    "strides": (window("max", (1, 2), "VALID"), WINDOWED),
    "padding": (window("sum", (1, 1), (NO, (2, 1))), WINDOWED),
    "dilation": (window("sum", (1, 1), (NO, NO), base_dilation=(1, 2)), WINDOWED),
    "gain with two offsets": (
        lambda p, x, i: norm(x[:, :D], p["g"]) @ p["w"] + norm(p["t"][i], 1 + p["g"]) @ p["v"],
        TABLE,
    ),
    "gain after a gain": (
        lambda p, x, i: (
            norm(x[:, :D] @ p["q"], p["g"]) @ p["w"]
            + norm(p["t"][i], p["h"]) * along(p["g"], x) @ p["v"]
        ),
        TABLE,
    ),
    "latents": (
        lambda p, x, i: (
            jax.nn.softmax(p["a"] @ p["q"] @ x[:, :D].T) @ (norm(x[:, :D], p["g"]) @ p["v"])
        ),
        LATENTS,
    ),
    "product looked up": (
        lambda p, x, i: (p["a"] @ p["q"])[i % 5] @ p["v"] + p["a"][i % 5] @ p["v"],
        LATENTS,
    ),
    "weights in a chain": (lambda p, x, i: norm(x[:, :D], p["g"]) @ (p["q"] @ p["v"]), LATENTS),
    "row in a scan": (row_in_scan, LATENTS),
    "keys": (keyed(lambda key: 0 * jax.random.normal(key)), STACK),
    "dropout": (keyed(drop), STACK),
    "split inside": (keyed(lambda key: 0 * jax.random.normal(jax.random.split(key)[1])), STACK),
    "keys in branches": (keyed(in_branches), STACK),
    "keys under checkpoint": (keyed(jax.checkpoint(lambda key: 0 * jax.random.normal(key))), STACK),
    "key as carry": (key_as_carry, STACK),
    "key in while": (key_in_while, STACK),
    "keys as parameters": (keys_of_parameters, STACK | {"key": jax.random.split(KEY, 3)}),
}


def folded(f, plan, params, batches):
    """Another factor for each channel that can have one."""
    pairs = algorithms.find_pairs(f, plan)(params, *batches[0]).without_clips()
    factors = np.exp(np.random.default_rng(0).normal(size=pairs.folds.count))
    factors[0] = 1
    return pairs.folds.folded(params, factors), {}


def rewritten(algorithm):
    def run(f, plan, params, batches):
        chosen = algorithm.rewrite(f, plan, params, batches, progress=False)
        return chosen.params, chosen.maps

    return run


WAYS = {
    "factors": folded,
    "smooth_quant": rewritten(algorithms.smooth_quant(strength=0.85)),
    "awq": rewritten(algorithms.awq(clip=False)),
    "equalize": rewritten(algorithms.equalize()),
    "rotate": rewritten(algorithms.rotate()),
    "offline": rewritten(algorithms.rotate(offline=True)),
    "only offline": rewritten(algorithms.rotate(offline="only")),
    "offline in blocks": rewritten(algorithms.rotate(offline=True, block=4)),
}
MARKS = dict.fromkeys(("smooth_quant", "awq", "offline"), (pytest.mark.slow,)) | {"factors": ()}
EACH_WAY = [pytest.param(way, marks=MARKS.get(way, (pytest.mark.sweep,))) for way in WAYS]


def fitting(f, policy, params, args):
    """A policy that does what the errors say: weights that reach other operations stay in float,
    and those that sites contract along different axes have one scale.
    """
    rules = []
    for _ in range(len(jax.tree.leaves(params)) + 1):
        try:
            result = jqx.Policy([*rules, *policy.rules])
            jqx.make_plan(f, result)(params, *args)
            return result
        except ValueError as error:
            other = re.search("the weight '([^']+)', which", str(error))
            axes = re.search("scale varies along a contracted axis .weight '([^']+)'", str(error))
            if other is None and axes is None:
                raise
            one = jqx.QSpec("int4", jqx.per_tensor())
            rules.append(jqx.Rule(axes[1], weight=one) if other is None else jqx.Rule(other[1]))
    raise AssertionError(f"the plan of {params.keys()} refuses what its own errors say")


EXACT = "factors", "smooth_quant", "awq"
"""Ways that change nothing but parameters and scales at sites."""


def check(f, params, way, policy, names):
    """The results of all functions stay as they are on inputs that were not seen before.

    All is computed in float64, and the bound is 1e-10 of the largest result. Other ways apply
    matrices and shifts in float32: their bound is 1e-5, or ten times what a change of all
    parameters by a last place of float32 changes.
    """
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    float64 = lambda x: x.astype(jnp.float64) if is_float(x) else x  # noqa: E731
    with jax.enable_x64(True):
        params, *batches = jax.tree.map(float64, [params, inputs(1), inputs(2), inputs(3)])
        unseen = batches.pop()
        plan = jqx.make_plan(f, fitting(f, policy, params, batches[0]))(params, *batches[0])
        changed, maps = WAYS[way](f, plan, params, batches)
        both = zip(*map(jax.tree.leaves, (params, changed)), strict=True)
        assert any(np.any(a != b) for a, b in both if is_float(a))
        rng = np.random.default_rng(0)
        by = lambda x: 1 + 2.0**-24 * rng.choice([-1, 1], x.shape)  # noqa: E731
        near = jax.tree.map(lambda x: x * by(x) if is_float(x) else x, params)
        run = jax.jit(f)
        every = run(params, *unseen), run(near, *unseen)
        mapped = jax.jit(jqx.map_channels(f, plan, maps)) if maps else run
        every = jax.device_get((*every, mapped(changed, *unseen)))
    for name, *outputs in zip(names, *every, strict=True):
        flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(y)]) for y in outputs]
        exact, noise, result = np.asarray(flat, np.float64)
        largest = np.abs(exact).max()
        bound = max(1e-5 * largest, 10 * np.abs(noise - exact).max())
        assert bound <= 1e-2 * largest, f"{name} is not exact enough for this test"
        bound = 1e-10 * largest if way in EXACT else bound
        assert np.abs(result - exact).max() <= bound, (name, way)


@pytest.mark.parametrize("way", EACH_WAY)
def test_parameters_that_are_read_more_than_once(way):
    params = {name: own for name, (_, own) in CASES.items()}
    f = lambda p, x, i: [own(p[name], x, i) for name, (own, _) in CASES.items()]  # noqa: E731
    check(f, params, way, jqx.presets.w8a8(), CASES)


def test_a_table_that_is_looked_up_twice_is_scaled_once():
    f = lambda p, x, i: (p["t"][i] @ p["w"], p["t"][(i + 1) % T] @ p["v"])  # noqa: E731
    plan = jqx.make_plan(f, jqx.presets.w8a8())(TABLE, *inputs(1))
    pairs = algorithms.find_pairs(f, plan)(TABLE, *inputs(1))
    assert [(x.before, len(x.after), x.channels) for x in pairs] == [(("t",), 2, D)]


OTHER_USES = {
    "none": lambda w, v, x: jnp.tanh(x @ w) @ v,
    "branch": lambda w, v, x: jnp.tanh(x @ w) @ lax.cond(x[0, 0] < 9, lambda: w, lambda: v),
    "choice": lambda w, v, x: jnp.tanh(x @ w) @ jnp.where(x[0, 0] < 9, w, v),
    "sum": lambda w, v, x: jnp.tanh(x @ w) @ (w + v),
    "norm": lambda w, v, x: jnp.tanh(x @ w) / jnp.sqrt((w * w).sum()),
}


def test_only_weights_without_another_use_are_changed():
    f = lambda p, x: {use: own(*p[use], x) for use, own in OTHER_USES.items()}  # noqa: E731
    params = {use: (normal(i, D, D), normal(9 + i, D, D)) for i, use in enumerate(OTHER_USES)}
    x = inputs(1)[0][:, :D]
    plan = jqx.make_plan(f, jqx.presets.w8a8(), unsupported="dequantize")(params, x)
    args, exact = (f, plan, params, [(x,)]), f(params, x)
    chosen = {
        "smooth_quant": algorithms.smooth_quant(0.85).rewrite(*args, progress=False),
        "awq": algorithms.awq(steps=4, clip=False).rewrite(*args, progress=False),
        "rotate": algorithms.rotate().rewrite(*args, progress=False),
        "loftq": algorithms.loftq(rank=2).run(*args, progress=False),
    }
    for name, result in chosen.items():
        for use, own in result.params.items():
            is_same = all(map(np.array_equal, own, params[use]))
            assert is_same == (use != "none"), (name, use)
        if name != "loftq":  # its products make up for rounding
            y = jqx.map_channels(f, plan, result.maps)(result.params, x)
            for use, want in exact.items():
                assert np.abs(y[use] - want).max() <= 1e-5 * np.abs(want).max(), (name, use)


@pytest.mark.parametrize("way", ["factors", pytest.param("offline", marks=pytest.mark.slow)])
def test_random_functions(way):
    check_seeds(range(4), way, "w8a8")


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(100, 2100, 25))
@pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic", "w4a16", "w4a4"])
@pytest.mark.parametrize("way", WAYS)
def test_thousands_of_random_functions(way, preset, first):
    check_seeds(range(first, first + 25), way, preset)


def check_seeds(seeds, way, preset):
    f, params = together([Program(seed) for seed in seeds])
    check(f, params, way, getattr(jqx.presets, preset)(), seeds)


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(100, 1100, 10))
@pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic", "w4a16", "w4a8"])
def test_defaults_are_not_worse_than_nearest(preset, first):
    """By chance, some of the functions get worse; on average they do not.

    A default fits the rows that it sees. Of seed 130 under w8a8 it loses 1.2 times as much as
    nearest on 96 rows, and .6 times as much on 768.
    """
    programs = [Program(seed) for seed in range(first, first + 10)]
    f, params = together(programs)
    policy = fitting(f, getattr(jqx.presets, preset)(), params, inputs(1))
    run, args, lost = jax.jit(f), [inputs(i) for i in range(2, 10)], {}
    exact = [run(params, *x) for x in args]
    for name, algorithm in (("default", None), ("nearest", algorithms.nearest())):
        q = jqx.ptq(f, policy, algorithm, progress=False)(
            params, [inputs(i) for i in range(10, 74)]
        )
        run = jax.jit(q.function)
        results = [zip(run(q.params, *x), y, strict=True) for x, y in zip(args, exact, strict=True)]
        each = [[np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in x] for x in results]
        lost[name] = np.mean(each, 0)
    ratio = lost["default"] / np.maximum(lost["nearest"], 1e-3)
    print(preset, first, "default / nearest:", np.round(ratio, 2))
    assert np.exp(np.log(ratio).mean()) <= 1 and ratio.max() < 4
