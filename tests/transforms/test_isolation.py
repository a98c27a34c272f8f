"""What jqx leaves alone: other threads, the float function and its caches, memory, parameters."""

import functools
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.presets import w8a8, w8a8_dynamic

from ..arrays import on_device
from ..models.transforms import mlp, mlp_params, normal
from .sources import assert_same, cases

X = normal(3, 7, 16)


def everything(f, policy, params, x):
    """All that jqx makes of a function."""
    plan = jqx.make_plan(f, policy)(params, x)
    out, stats = jqx.calibrate(f, plan)(params, x)
    affines = jqx.affines(plan, stats)
    q = jqx.quantize_params(params, plan)
    converted = jax.jit(jqx.convert(f, plan, affines))(q, x)
    simulated = jax.jit(jqx.simulate(f, plan, affines))(params, x)
    return plan, (out, stats, affines, q, converted, simulated)


def test_two_threads_with_policies_of_their_own_get_what_each_gets_alone():
    params = mlp_params()
    policies = [w8a8(weight={"qtype": jnp.int4}), w8a8_dynamic("w", weight={"qtype": jnp.int2})]
    alone = [everything(mlp, policy, params, X) for policy in policies]
    assert alone[0][0] != alone[1][0]
    barrier, rounds, failed = threading.Barrier(2), 2, []
    found = [[], []]

    def work(i):
        try:
            for _ in range(rounds):
                barrier.wait(timeout=300)
                found[i].append(everything(mlp, policies[i], params, X))
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for i in range(2):
        assert len(found[i]) == rounds
        for plan, values in found[i]:
            assert plan == alone[i][0]
            assert_same(values, alone[i][1])


def test_a_jitted_function_is_traced_once_and_gives_the_same_bits_after():
    traces = []

    @jax.jit
    def f(params, x):
        traces.append(x.shape)
        return mlp(params, x)

    params = mlp_params()
    before, size = f(params, X), f._cache_size()
    text = f.lower(params, X).as_text()
    everything(f, w8a8(), params, X)
    jax.jit(jax.grad(lambda p: jqx.simulate(f, w8a8(), "dynamic")(p, X).sum()))(params)
    assert_same(f(params, X), before)
    assert len(traces) == 1 and f._cache_size() == size == 1
    assert f.lower(params, X).as_text() == text


def test_a_plain_function_is_traced_once_by_each_call_and_not_kept():
    traces = []

    def f(params, x):
        traces.append(x.shape)
        return mlp(params, x)

    params = mlp_params()
    plan = jqx.make_plan(f, w8a8())(params, X)
    converted = jax.jit(jqx.convert(f, plan, "dynamic"))
    assert len(traces) == 1
    q = jqx.quantize_params(params, plan)
    for _ in range(3):
        converted(q, X)
    assert len(traces) == 2


def live_bytes():
    return sum(x.nbytes for x in jax.live_arrays())


def peak_while(f):
    """The most bytes that live arrays hold at any return from a function of jqx within `f`."""
    peak = 0

    def sample(frame, event, arg):
        nonlocal peak
        if event == "return" and frame.f_globals.get("__name__", "").startswith("jqx"):
            peak = max(peak, live_bytes())

    sys.setprofile(sample)
    try:
        result = f()
    finally:
        sys.setprofile(None)
    return result, peak


def chain(params, x):
    for name in sorted(params):
        x = x @ params[name]
    return x


N, LAYERS = 64, 8


@pytest.mark.parametrize("donate", [True, False])
def test_donated_weights_are_held_once_with_one_leaf_and_its_codes(donate):
    jax.clear_caches()
    params = {f"w{i}": normal(i, N, N) for i in range(LAYERS)}
    plan = jqx.make_plan(chain, jqx.presets.w8a16())(params, jnp.ones((1, N)))
    warm = jqx.quantize_params({**params}, plan)  # compiles; constants are cached then
    copies = jax.tree.map(np.asarray, params)
    del warm
    floats = N * N * 4
    base = live_bytes() - LAYERS * floats
    assert base >= 0
    q, peak = peak_while(lambda: jqx.quantize_params(params, plan, donate=donate))
    codes = q["w0"].nbytes
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(q))
    small = 8 * N * 4  # scales, and what finding them leaves behind: rows of N numbers
    if donate:
        assert peak - base <= LAYERS * floats + floats + codes + small
        assert all(w.is_deleted() for w in params.values())
        del params
        assert live_bytes() - base <= held + small
    else:
        assert peak - base >= LAYERS * floats + held
        assert not any(w.is_deleted() for w in params.values())
        assert_same(params, copies)


def test_an_array_that_is_two_leaves_goes_with_its_last():
    w, x = normal(0, 8, 8), normal(1, 2, 8)
    f = lambda p, x: x @ p["a"] @ p["b"]  # noqa: E731
    kept = jnp.copy(w)
    plan = jqx.make_plan(f, jqx.presets.w8a16())({"a": w, "b": w}, x)
    q = jqx.quantize_params({"a": w, "b": w}, plan, donate=True)
    assert w.is_deleted()
    assert_same(q, jqx.quantize_params({"a": kept, "b": kept}, plan))


@pytest.mark.parametrize("path", ["a", "b"])
def test_an_array_that_also_stays_in_float_is_not_deleted(path):
    w, x = normal(0, 8, 8), normal(1, 2, 8)
    f = lambda p, x: x @ p["a"] @ p["b"]  # noqa: E731
    plan = jqx.make_plan(f, jqx.presets.w8a16(path))({"a": w, "b": w}, x)
    q = jqx.quantize_params({"a": w, "b": w}, plan, donate=True)
    assert not w.is_deleted()
    assert jnp.all(jnp.isfinite(jqx.convert(f, plan, "dynamic")(q, x)))


def test_donating_under_jit_is_refused():
    plan = jqx.make_plan(lambda w, x: x @ w, jqx.presets.w8a16())(normal(0, 8, 8), normal(1, 2, 8))
    quantize = jax.jit(functools.partial(jqx.quantize_params, plan=plan, donate=True))
    with pytest.raises(ValueError, match="`donate` has no effect"):
        quantize(normal(0, 8, 8))


MINMAX = {"symmetric": False, "calibrator": jqx.calibrators.minmax}
SPECS = {
    "per channel": jqx.QSpec(jnp.int8, jqx.per_channel()),
    "zero points": jqx.QSpec(jnp.uint4, jqx.per_channel(), **MINMAX),
    "a tail": jqx.QSpec(jnp.int4, jqx.per_group(24, tail=True)),
    "3 bits": jqx.QSpec(jqx.numerics.int3, jqx.per_tensor()),
    "float8": jqx.QSpec(jnp.float8_e4m3fn, jqx.per_channel()),
    "nf4": jqx.QSpec(jqx.numerics.nf4, jqx.per_group(16)),
    "mxfp4": jqx.QSpec(jqx.numerics.mxfp4, jqx.per_group(32)),
    "nvfp4": jqx.QSpec(jqx.numerics.nvfp4, jqx.per_group(16)),
}


@cases(SPECS, slow=("3 bits", "float8", "mxfp4"))
def test_a_checkpoint_is_restored_into_the_abstract_parameters(name):
    f = lambda p, x: x @ p["layer"][0] + p["b"][None]  # noqa: E731
    params = {"layer": [normal(0, 64, 4).astype(jnp.bfloat16)], "b": jnp.zeros(4, jnp.bfloat16)}
    x = normal(1, 2, 64).astype(jnp.bfloat16)
    policy = jqx.Policy([jqx.Rule(weight=SPECS[name])])
    abstract = jax.eval_shape(lambda p: p, params)
    plan = jqx.make_plan(f, policy)(abstract, jax.eval_shape(lambda: x))
    assert plan == jqx.make_plan(f, policy)(params, x)
    q, expected = jqx.quantize_params(params, plan), jqx.quantize_params(abstract, plan)
    assert jax.tree.structure(expected) == jax.tree.structure(q)
    kinds = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), q)
    assert jax.tree.leaves(expected) == jax.tree.leaves(kinds)
    traced = jax.eval_shape(lambda p: jqx.quantize_params(p, plan), params)
    assert jax.tree.structure(expected) == jax.tree.structure(traced)
    assert jax.tree.leaves(expected) == jax.tree.leaves(traced)

    flat = jax.tree_util.tree_flatten_with_path(q)[0]
    saved = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}
    assert len(saved) == len(flat)
    restored = jax.tree_util.tree_map_with_path(
        lambda path, leaf: on_device(saved[jax.tree_util.keystr(path)], leaf.dtype), expected
    )
    assert_same(restored, q)
    assert [*map(jax.typeof, jax.tree.leaves(restored))] == [*map(jax.typeof, jax.tree.leaves(q))]
    assert_same(jqx.convert(f, plan, "dynamic")(restored, x), jqx.convert(f, plan, "dynamic")(q, x))
