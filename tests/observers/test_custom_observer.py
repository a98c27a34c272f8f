"""An observer that jqx does not know of, written here: it works in every form of control flow."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jqx
from jqx.extend import Calibrator, Observer

from ..arrays import on_device
from ..oracles.refusals import assert_error

K, ROWS = 4, 8
MESH = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
WEIGHTS = jqx.Policy([jqx.Rule(weight=jqx.QSpec(jnp.int8, jqx.per_channel()))])


class GramStats(NamedTuple):
    products: jax.Array
    calls: jax.Array


@dataclasses.dataclass(frozen=True)
class Gram(Observer):
    """Sums `x x^T` of an activation, in float32, and counts the operands."""

    def empty(self, operand, site):
        size = operand.shape[site.contracted[0]]
        return GramStats(jnp.zeros((size, size)), jnp.int32(0))

    def observe(self, x, site):
        x = x.astype(jnp.float32)
        axes = site.reduced(x.ndim)
        return GramStats(jnp.tensordot(x, x, (axes, axes), precision="highest"), jnp.int32(1))

    def merge(self, a, b):
        return GramStats(a.products + b.products, a.calls + b.calls)


GRAM = Gram()
EVERYWHERE = {".*": GRAM}


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def forms(p, x):
    """Products in every form; all sums are integers that float32 holds, in any order."""
    dot = lambda x, w: x @ w  # noqa: E731
    split = jax.shard_map(dot, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d"))
    inner = lambda x, w: (split(x, w), None)  # noqa: E731
    stacked = lambda x, w: (lax.scan(lambda x, _: (x @ w, None), x, length=2)[0], None)  # noqa: E731
    return (
        jax.jit(dot)(x, p["jit"]),
        lax.scan(lambda x, w: (x @ w, None), x, p["stack"])[0],
        lax.scan(lambda x, _: (x @ p["shared"], None), x, length=3)[0],
        lax.cond(x[0, 0] > -9, lambda: x @ p["taken"], lambda: x @ p["untaken"]),
        lax.fori_loop(0, jnp.int32(x[0, 0] * 0 + 2), lambda _, x: x @ p["while"], x),
        jax.vmap(dot, (0, None))(x, p["vmap"]),
        jax.checkpoint(dot)(x, p["remat"]),
        split(x, p["shard_map"]),
        lax.scan(inner, x, p["shard_map in scan"])[0],
        lax.scan(stacked, x, p["scan in scan"])[0],
    )


def weights():
    one = ("jit", "shared", "taken", "untaken", "while", "vmap", "remat", "shard_map")
    stacks = ("stack", "shard_map in scan", "scan in scan")
    # Signed permutations keep numbers small.
    move = np.eye(K, dtype=np.float32)[[2, 0, 3, 1]] * [[1], [-1], [1], [1]]
    params = dict.fromkeys(one, move) | dict.fromkeys(stacks, np.stack([move, move.T @ move * 2]))
    return jax.tree.map(jnp.float32, params)


def gram(*operands):
    return sum((x.T @ x for x in np.asarray(operands, np.float64)), np.zeros((K, K)))


def expected(x, gram=gram):
    p = jax.tree.map(np.float64, weights())
    move, (a, b) = p["jit"], p["stack"]
    layers = np.stack([gram(x), gram(x @ a)])
    found = dict.fromkeys(("jit", "taken", "vmap", "remat", "shard_map"), gram(x))
    found |= {"untaken": gram(), "stack": layers, "shard_map in scan": layers}
    found["shared"] = gram(x, x @ move, x @ move @ move)
    found["while"] = gram(x, x @ move)
    found["scan in scan"] = np.stack([gram(x, x @ a), gram(x @ a @ a, x @ a @ a @ b)])
    return found


def name_of(path):
    return f"{path}:dot_general:lhs@gram"


def test_a_hessian_is_recorded_in_every_form_and_merged_over_batches():
    params, batches = weights(), [integers(seed, ROWS, K) for seed in range(3)]
    plan = jqx.make_plan(forms, WEIGHTS)(params, batches[0])
    stats = jqx.calibrate_batches(
        forms, plan, params, batches, observers=EVERYWHERE, progress=False
    )
    each = [expected(x) for x in batches]
    assert set(stats) == {name_of(path) for path in each[0]}
    for path in each[0]:
        want = np.float32(sum(found[path] for found in each))
        np.testing.assert_array_equal(
            stats[name_of(path)].products, want, strict=True, err_msg=path
        )
    calls = {path: stats[name_of(path)].calls for path in each[0]}
    assert calls["untaken"] == 0 and calls["shard_map"] == 12 and calls["shared"] == 9
    np.testing.assert_array_equal(calls["stack"], [3, 3])
    assert jqx.affines(plan, stats) == {}


def projections(p, x):
    """Five products of one value, a sixth of it along another axis, and one in a branch."""
    q = jax.jit(lambda w, x: x.astype(jnp.bfloat16) @ w)(p["q"], x)
    k = x.astype(jnp.bfloat16) @ p["k"]
    v = jax.checkpoint(lambda w, x: jax.jit(lambda w, x: x @ w)(w, x))(
        p["v"], x.astype(jnp.bfloat16)
    )
    gate, up = jax.nn.relu(x) @ p["gate"], jax.nn.relu(x) @ p["up"]
    other = x.T @ p["other"]
    branch = lax.cond(x[0, 0] > 0, lambda: x @ p["branch"], lambda: x)
    return q, k, v, gate, up, other, branch, x @ p["plain"]


def test_what_sites_share_is_computed_once():
    seen = []

    class Counted(Gram):
        def observe(self, x, site):
            if not isinstance(x, jax.core.Tracer):
                seen.append(site.path)
            return super().observe(x, site)

        def __str__(self):
            return "gram"

    params = {
        name: jnp.eye(K, dtype=jnp.bfloat16 if name in ("q", "k", "v") else jnp.float32)
        for name in ("q", "k", "v", "gate", "up", "other", "branch", "plain")
    }
    x = on_device(integers(0, K, K))
    plan = jqx.make_plan(projections, WEIGHTS)(params, x)
    given = {".*": Counted()}
    _, stats = jqx.calibrate(projections, plan, observers=given)(params, x)
    groups = [("q", "k", "v"), ("gate", "up"), ("other",), ("branch",), ("plain",)]
    # What of these is not inside of another function is seen as an array.
    assert sorted(seen) == ["gate", "other", "plain"]
    merged = jqx.merge_stats(plan, stats, stats, observers=given)
    jitted = jqx.calibrate_batches(projections, plan, params, [x], observers=given, progress=False)
    for found in (stats, merged, jitted):
        objects = [{id(found[name_of(path)]) for path in group} for group in groups]
        assert [len(group) for group in objects] == [1] * 5
        assert len(set().union(*objects)) == 5
    np.testing.assert_array_equal(stats[name_of("plain")].products, gram(x))
    np.testing.assert_array_equal(stats[name_of("other")].products, gram(x.T))
    np.testing.assert_array_equal(stats[name_of("up")].products, gram(np.maximum(x, 0)))


def test_what_steps_with_its_weight_is_not_shared_with_what_does_not():
    def f(p, x):
        return lax.scan(lambda c, w: (c + x @ w, x @ p["one"]), x, p["stack"])

    params = {"one": jnp.eye(K), "stack": jnp.stack([jnp.eye(K)] * 3)}
    x = integers(0, ROWS, K)
    plan = jqx.make_plan(f, WEIGHTS)(params, x)
    _, stats = jax.jit(jqx.calibrate(f, plan, observers=EVERYWHERE))(params, x)
    np.testing.assert_array_equal(stats[name_of("one")].products, 3 * gram(x))
    np.testing.assert_array_equal(stats[name_of("stack")].products, [gram(x)] * 3)


def test_observers_do_not_change_the_calibration_of_static_scales():
    def f(p, x):
        return (x @ p["a"]) @ p["b@x"]

    params = dict.fromkeys(("a", "b@x"), np.eye(K, dtype=np.float32))
    x, y = integers(0, ROWS, K), integers(1, 5, K) * 2
    plan = jqx.make_plan(f, jqx.presets.w8a8())(params, x)
    given = {"b.*": (GRAM, jqx.calibrators.minmax)}

    @jax.jit
    def calibrated(params, x, y):
        plain = [jqx.calibrate(f, plan)(params, z)[1] for z in (x, y)]
        both = [jqx.calibrate(f, plan, observers=given)(params, z)[1] for z in (x, y)]
        merged = jqx.merge_stats(plan, *both, observers=given)
        return jqx.merge_stats(plan, *plain), both[0], merged, jqx.affines(plan, merged)

    plain, first, merged, affines = calibrated(params, x, y)
    more = {"b@x:dot_general:lhs@gram", "b@x:dot_general:lhs@minmax"}
    assert set(first) == set(merged) == set(plain) | more
    want = jax.jit(lambda stats: jqx.affines(plan, stats))(plain)
    jax.tree.map(np.testing.assert_array_equal, affines, want)
    np.testing.assert_array_equal(merged["b@x:dot_general:lhs@gram"].products, gram(x) + gram(y))
    assert float(merged["b@x:dot_general:lhs@minmax"].low[0, 0]) == min(x.min(), y.min())


def test_a_result_or_a_weight_is_looked_at_where_an_observer_asks_for_it():
    class Sizes(Observer):
        def looks_at(self, site):
            return site.side in ("rhs", "out")

        def empty(self, operand, site):
            return jnp.zeros(operand.shape[-1])

        def observe(self, x, site):
            assert site.spec == plan.sites[0].operands[1].spec if site.side == "rhs" else True
            assert (site.role, site.kept) == roles[site.side]
            return jnp.abs(x).sum(axis=0)

        def merge(self, a, b):
            return a + b

    roles = {"rhs": ("weight", (1,)), "out": ("result", (0, 1))}
    f = lambda w, x: x @ w  # noqa: E731
    w, x = integers(0, K, 3), integers(1, ROWS, K)
    plan = jqx.make_plan(f, WEIGHTS)(w, x)
    _, stats = jqx.calibrate(f, plan, observers={"": Sizes()})(w, x)
    assert set(stats) == {":dot_general:rhs@sizes", ":dot_general:out@sizes"}
    np.testing.assert_array_equal(stats[":dot_general:rhs@sizes"], np.abs(w).sum(0))
    np.testing.assert_array_equal(stats[":dot_general:out@sizes"], np.abs(x @ w).sum(0))


class _Old(Calibrator):
    """A calibrator as users have written them."""

    def empty(self, shape):
        return jqx.calibrators.absmax.empty(shape)

    def observe(self, x, spec):
        return jqx.calibrators.absmax.observe(x, spec)

    def merge(self, a, b):
        return jqx.calibrators.absmax.merge(a, b)

    def affine(self, stats, spec):
        return jqx.calibrators.absmax.affine(stats, spec)

    def __str__(self):
        return "old"


def test_a_calibrator_of_the_user_is_an_observer():
    f = lambda w, x: x @ w  # noqa: E731
    w, x = np.eye(K, dtype=np.float32), integers(1, ROWS, K)
    old = _Old()
    for policy in (jqx.presets.w8a8(activation={"calibrator": old}), jqx.presets.w8a8_dynamic()):
        plan = jqx.make_plan(f, policy)(w, x)
        stats = jqx.calibrate(f, plan, observers={".*": old})(w, x)[1]
        assert stats[":dot_general:lhs@old"].largest.max() == np.abs(x).max()
        assert len(stats) == 1 + len(plan.static_specs())
        if plan.static_specs():
            assert stats[":dot_general:lhs"] is stats[":dot_general:lhs@old"]


class _Vague(Gram):
    def empty(self, operand, site):
        return GramStats(jnp.zeros(()), jnp.int32(0))


class _Unhashable(Gram):
    __hash__ = None  # pyright: ignore


class _Named(Gram):
    def __init__(self, number):
        object.__setattr__(self, "number", number)

    def __hash__(self):
        return self.number

    def __eq__(self, other):
        return self is other


def test_mistakes_are_errors_in_four_parts():
    def f(p, x):
        return (x @ p["a"]) @ p["b"], p["table"][x[0].astype(int)]

    params = {"a": jnp.eye(K), "b": jnp.eye(K), "table": jnp.ones((5, 4))}
    x = jnp.ones((2, K))
    policy = jqx.Policy([jqx.Rule("b"), *WEIGHTS.rules])
    plan = jqx.make_plan(f, policy)(params, x)
    abstract = jax.eval_shape(lambda: (params, x))
    calibrate = lambda given: jax.eval_shape(  # noqa: E731
        jqx.calibrate(f, plan, observers=given), *abstract
    )
    for given, error, facts in [
        (GRAM, TypeError, ["`observers`", "Gram"]),
        ({0: GRAM}, TypeError, ["a key of observers", "0"]),
        ({".*": Gram}, TypeError, ["observers['.*']", "type"]),
        ({".*": (GRAM, None)}, TypeError, ["observers['.*']"]),
        ({".*": ()}, ValueError, ["records nothing"]),
        ({"(": GRAM}, ValueError, ["not a regular expression", "'('"]),
        ({"c": GRAM}, ValueError, ["matches no site", "'a'", "'table'"]),
        ({"b": GRAM}, ValueError, ["matches no site", "skipped", "leaves it in float"]),
        ({".*": GRAM, "table": GRAM}, ValueError, ["'gram'", "records no operand", "'table'"]),
        ({"a": jqx.calibrators.absmax}, ValueError, ["'absmax'", "records no operand"]),
        ({".*": (_Named(1), _Named(2))}, ValueError, ["two observers", "'_named'"]),
        ({".*": _Unhashable()}, TypeError, ["hash", "frozen"]),
        ({"a": _Vague()}, ValueError, ["`empty` and `observe`", "float32[4, 4]", "float32[]"]),
    ]:
        assert_error(functools.partial(calibrate, given), *facts, error=error)
    stats = calibrate({"a": GRAM})[1]
    for others, given, fact in [
        (stats, None, "not given"),
        (stats, {"table": GRAM}, "not given"),
        ({}, {"a": GRAM}, "do not have the same entries"),
        ({**stats, "c": 0}, {"a": GRAM}, "does not have the entries of the plan"),
        ({key: tuple(value) for key, value in stats.items()}, {"a": GRAM}, "differ in structure"),
    ]:
        assert_error(functools.partial(jqx.merge_stats, plan, stats, others, observers=given), fact)
    with pytest.raises(ValueError, match=r"calibrate_batches: .* matches no site"):
        jqx.calibrate_batches(f, plan, params, [x], observers={"c": GRAM}, progress=False)
