"""Quantized parameters: codes, layouts and memory; and what jqx leaves alone: other threads, the
float function and its caches.
"""

import functools
import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx._src.transforms.quantize_params import _compiled
from jqx.presets import w8a8, w8a8_dynamic, w8a16

from ..arrays import assert_same, on_device
from ..models.transforms import int8_grid, mlp, mlp_params, normal, plan_of, product
from .sources import cases

X, PARAMS = normal(3, 7, 16), mlp_params()


PLAN = plan_of(mlp, w8a8(), PARAMS, X)


def test_codes_and_scales_are_those_of_numpy_and_what_the_plan_leaves_alone_is_the_same_object():
    q = jqx.quantize_params(PARAMS, PLAN)
    real = jqx.dequantize_params(q)
    for name, axes in [("w", (0,)), ("v", (1,))]:
        codes, scale = int8_grid(PARAMS[name], axes)
        assert np.array_equal(q[name].values, codes)
        assert np.array_equal(q[name].scale, scale)
        np.testing.assert_array_equal(real[name], q[name].dequantize())
    assert q["b"] is real["b"] is PARAMS["b"]
    assert jax.tree.structure(real) == jax.tree.structure(PARAMS)


def test_a_given_scale_is_used_by_codes_and_simulated_weights():
    w = jnp.array([[0.4], [1.2]])
    plan = plan_of(product, w8a16(), w, jnp.eye(2))
    affines = {":weight": jqx.calibrators.Affine(jnp.full((1, 1), 0.5))}
    q = jqx.quantize_params(w, plan, affines)
    assert q.values.tolist() == [[1], [2]] and float(q.scale[0, 0]) == 0.5
    out = jqx.simulate(product, plan, affines)(w, jnp.eye(2))
    np.testing.assert_array_equal(out, [[0.5], [1.0]])


UNKNOWN_TARGET = r"jqx\.quantize_params: `target` is unknown"
REFUSED = {
    "rows": ({**PARAMS, "w": PARAMS["w"][:8]}, {}, r"float32\[8, 24\]"),
    "a dtype": ({**PARAMS, "w": PARAMS["w"].astype(jnp.bfloat16)}, {}, "bfloat16"),
    "leaves": ({"w": PARAMS["w"]}, {}, "another function or other parameters"),
    "codes": (jqx.quantize_params(PARAMS, PLAN), {}, "'v' is quantized already"),
    "a target": (PARAMS, {"target": "cuda"}, UNKNOWN_TARGET),
    "a number for a target": (PARAMS, {"target": 3}, UNKNOWN_TARGET),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_parameters_and_targets_are_refused(name):
    params, options, fact = REFUSED[name]
    with pytest.raises(ValueError, match=fact):
        jqx.quantize_params(params, PLAN, **options)


def test_donating_under_jit_is_refused():
    quantize = jax.jit(functools.partial(jqx.quantize_params, plan=PLAN, donate=True))
    with pytest.raises(ValueError, match="`donate` has no effect"):
        quantize(PARAMS)


def test_weights_of_equal_shape_share_one_compiled_program_and_its_bits():
    params = {f"w{i}": normal(i, 24, 40) for i in range(6)} | {"other": normal(9, 40, 24)}
    f = lambda p, x: sum(jnp.sum(x[:, : w.shape[0]] @ w) for w in p.values())  # noqa: E731
    plan = plan_of(f, w8a16(), params, normal(10, 2, 40))
    before = _compiled._cache_size()
    q = jqx.quantize_params(params, plan)
    assert _compiled._cache_size() - before == 2
    assert_same(q, plan.map_weights(lambda w, x: jqx.QTensor.quantize(x, w.spec), params))
    assert_same(jax.jit(lambda p: jqx.quantize_params(p, plan))(params), q)


@pytest.mark.parametrize("preset", [w8a16(), jqx.presets.w4a16(block=4)], ids=["w8", "w4"])
@pytest.mark.parametrize("target", ["cpu", "gpu", "tpu"])
def test_a_target_lays_weights_out_as_pack_for_does(target, preset):
    plan = plan_of(mlp, preset, PARAMS, X)
    q = jqx.quantize_params(PARAMS, plan, target=target)
    copies = jax.tree.map(jnp.copy, PARAMS)
    donated = jqx.quantize_params(copies, plan, donate=True, target=target)
    expected = jqx.pack_for(jqx.quantize_params(PARAMS, plan), target)
    for actual in (q, donated):
        assert_same(actual, expected)
        types = [[*map(jax.typeof, jax.tree.leaves(tree))] for tree in (actual, expected)]
        assert types[0] == types[1]
    assert not copies["b"].is_deleted()
    if target == "cpu":
        assert q["w"].layout is not None
        abstract = jqx.quantize_params(jax.eval_shape(lambda p: p, PARAMS), plan, target=target)
        assert jax.tree.structure(abstract) == jax.tree.structure(q)


SQUARES = jqx.QSpec(jnp.float8_e4m3fn, jqx.per_block({-2: 32, -1: 32}))
ANY_WAY = {"blocks of both axes": SQUARES, "one scale": jqx.QSpec(jnp.int8, jqx.per_tensor())}
PRODUCTS = {
    "x @ w": (lambda p, x: x @ p["w"], None),
    "x @ w.T": (lambda p, x: x @ p["w"].T, -1),
    "einsum": (lambda p, x: jnp.einsum("mk,nk->mn", x, p["w"]), -1),
    "step by step": (
        lambda p, x: jax.lax.scan(lambda h, w: (h @ w.T, None), x, jnp.stack([p["w"]] * 2))[0],
        -1,
    ),
    "both": (lambda p, x: x @ p["w"] @ p["w"].T, None),
    "a lookup too": (lambda p, x: x[:2] @ p["w"].T + p["w"][jnp.arange(2)].sum(), -1),
}


@pytest.mark.parametrize("name", ANY_WAY)
@pytest.mark.parametrize("how", PRODUCTS)
def test_where_scales_do_not_tell_the_plan_says_what_is_contracted(how, name):
    f, contracted = PRODUCTS[how]
    params, x = {"w": normal(0, 64, 64)}, normal(1, 3, 64)
    rule = jqx.Rule(weight=ANY_WAY[name], tables=ANY_WAY[name])
    plan = jqx.make_plan(f, jqx.Policy([rule]), unsupported="dequantize")(params, x)
    assert plan.weights[0].contracted == contracted
    plain = jqx.quantize_params(params, plan)
    for target in ("cpu", "gpu", "tpu"):
        actual = jqx.quantize_params(params, plan, target=target)["w"]
        expected = plain["w"].pack_for(target, contracted=contracted)
        assert actual.layout == expected.layout
        assert (actual.values == expected.values).all()
        nearest = jqx.quantize_params(params, plan, target=target, algorithm=rounds)["w"]
        assert nearest.layout == expected.layout


def rounds(plan, params, stats):
    return plan.map_weights(lambda w, x: jqx.QTensor.quantize(x, w.spec), params)


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
    policies = [w8a8(weight={"qtype": jnp.int4}), w8a8_dynamic("w", weight={"qtype": jnp.int2})]
    single_threaded = [everything(mlp, policy, PARAMS, X) for policy in policies]
    assert single_threaded[0][0] != single_threaded[1][0]
    barrier, rounds, failed = threading.Barrier(2), 2, []
    actual = [[], []]

    def work(i):
        try:
            for _ in range(rounds):
                barrier.wait(timeout=300)
                actual[i].append(everything(mlp, policies[i], PARAMS, X))
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
        assert len(actual[i]) == rounds
        for plan, values in actual[i]:
            assert plan == single_threaded[i][0]
            assert_same(values, single_threaded[i][1])


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
    code_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(q))
    small = 8 * N * 4  # scales, and what finding them leaves behind: rows of N numbers
    if donate:
        assert peak - base <= LAYERS * floats + floats + codes + small
        assert all(w.is_deleted() for w in params.values())
        del params
        assert live_bytes() - base <= code_bytes + small
    else:
        assert peak - base >= LAYERS * floats + code_bytes
        assert not any(w.is_deleted() for w in params.values())
        assert_same(params, copies)


def test_an_array_that_is_two_leaves_goes_with_its_last():
    w, x = normal(0, 8, 8), normal(1, 2, 8)
    f = lambda p, x: x @ p["a"] @ p["b"]  # noqa: E731
    copied = jnp.copy(w)
    plan = jqx.make_plan(f, jqx.presets.w8a16())({"a": w, "b": w}, x)
    q = jqx.quantize_params({"a": w, "b": w}, plan, donate=True)
    assert w.is_deleted()
    assert_same(q, jqx.quantize_params({"a": copied, "b": copied}, plan))


@pytest.mark.parametrize("path", ["a", "b"])
def test_an_array_that_also_stays_in_float_is_not_deleted(path):
    w, x = normal(0, 8, 8), normal(1, 2, 8)
    f = lambda p, x: x @ p["a"] @ p["b"]  # noqa: E731
    plan = jqx.make_plan(f, jqx.presets.w8a16(path))({"a": w, "b": w}, x)
    q = jqx.quantize_params({"a": w, "b": w}, plan, donate=True)
    assert not w.is_deleted()
    assert jnp.all(jnp.isfinite(jqx.convert(f, plan, "dynamic")(q, x)))


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


PARTS = r"jqx\.[a-z_]+: .+(\n  given:    .+)?(\n  expected: .+)?\n  fix:      .+"
TWO, TREE = normal(0, 2, 8), {"w": normal(1, 8, 4), "v": normal(2, 4, 4)}


def two_layers(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def test_parameters_that_hold_learned_scales_are_refused_without_them():
    """As `jqx.linen.learn_scales` returns them: each beside its weight."""
    scales = {"w:weight": jqx.calibrators.Affine(jnp.ones((1, 4)), None)}
    params = {**TREE, **scales}
    plan = jqx.make_plan(two_layers, jqx.presets.w8a16())(params, TWO)
    for refused in (
        lambda: jqx.quantize_params(params, plan),
        lambda: jqx.quantize_params(params, plan, {"v:weight": scales["w:weight"]}),
        lambda: jqx.quantize_params(params, plan, algorithm=jqx.algorithms.nearest()),
        lambda: jqx.ptq(two_layers, jqx.presets.w8a16())(params, [TWO]),
    ):
        with pytest.raises(
            ValueError, match=r"hold learned scales(.|\n)*given:    w:weight"
        ) as info:
            refused()
        assert re.fullmatch(PARTS, str(info.value)) and "jqx.linen.convert(" in str(info.value)
    abstract = jax.eval_shape(lambda x: x, params)
    assert isinstance(jqx.quantize_params(abstract, plan, scales)["w"], jqx.QTensor)


def test_a_quantized_function_is_saved_with_the_scales_of_its_weights(tmp_path):
    plan = jqx.make_plan(two_layers, jqx.presets.w8a16())(TREE, TWO)
    scales = {"w:weight": jqx.calibrators.Affine(jnp.full((1, 4), 0.02), None)}
    function, report = jqx.convert(two_layers, plan, scales), jqx.report(plan, TREE, scales)

    def saved(given):
        params = jqx.quantize_params(TREE, plan, given, target="cpu")
        quantized = jqx.Quantized(function, params, plan, scales, report)
        jqx.save(tmp_path / "x", quantized, progress=False)

    with pytest.raises(ValueError, match=r"weights have other scales.*: w\.\n") as info:
        saved(None)
    assert re.fullmatch(PARTS, str(info.value))
    saved(scales)
