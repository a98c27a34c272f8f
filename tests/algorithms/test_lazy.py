"""Parameters that are read when their site comes, and dropped after it."""

import dataclasses
import gc
import signal
import subprocess
import sys
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.algorithms import adaround, auto_round, awq, gptq, nearest
from jqx.interop import Lazy

from ..arrays import normal
from ..interop.trees import assert_same
from ..oracles.algorithms import Interruption, interrupt_gptq

KILLS = 3
NAMES = [f"layer{i}" for i in range(4)]
D = 32


def f(p, x):
    for name in NAMES:
        x = jnp.tanh(x @ p[name]["w"] + p[name]["b"][None])
    return x


PARAMS = {
    name: {"w": normal(i, D, D) / D**0.5, "b": normal(9 + i, D)} for i, name in enumerate(NAMES)
}
BATCHES = [normal(20 + n, n, D) for n in (48, 40)]
POLICY = jqx.Policy({".*": "int4:group=16"})


def integers(seed, *shape):
    """Small whole numbers: sums of their products are exact, in any order."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(-3, 4, shape), jnp.float32)


def whole(x):
    """Whole numbers again."""
    return jnp.clip(jnp.round(x / 4), -7, 7)


def lazily(tree, reads=None, copy=jnp.array):
    """The same parameters, copied when they are needed; `reads` are told which are."""

    def leaf(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")

        def make():
            if reads is not None:
                reads.append(name)
            return copy(x)

        return Lazy(jax.ShapeDtypeStruct(x.shape, x.dtype), make, f"test {name}")

    return jax.tree_util.tree_map_with_path(leaf, tree)


def read(tree):
    return jax.tree.map(lambda x: x.read() if isinstance(x, Lazy) else x, tree)


def quantized(g, params, batches, *algorithm, policy=POLICY):
    return jqx.ptq(g, policy, *algorithm, progress=False)(params, batches)


def written(path, tree):
    jqx.save(path, tree, resume=True)
    return path.read_bytes()


@pytest.mark.parametrize("given", [(nearest(),), ()], ids=str)
def test_rounding_to_nearest_reads_a_leaf_for_the_report_and_when_it_is_written(given, tmp_path):
    reads, policy = [], jqx.presets.w8a16()
    result = quantized(f, lazily(PARAMS, reads), BATCHES, *given, policy=policy)
    eager = quantized(f, PARAMS, BATCHES, *given, policy=policy)
    assert result.report == eager.report
    assert all(isinstance(x, Lazy) for x in jax.tree.leaves(result.params))
    assert max(reads.count(name) for name in set(reads)) == 2  # beside what became of it
    reads.clear()
    assert written(tmp_path / "a", result) == written(tmp_path / "b", eager)
    assert len(reads) == len(set(reads)) == 2 * len(NAMES)


def test_steps_that_rules_select_are_read_and_laid_out(tmp_path):
    scan = lambda p, x: jax.lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0]  # noqa: E731
    params = {"w": normal(0, 4, D, D)}
    policy = jqx.Policy({"w[0]": "int8", ".*": "int4"})
    for target in ("cpu", False):
        quantize = jqx.ptq(scan, policy, nearest(), target=target, progress=False)
        result, eager = (quantize(p, [BATCHES[0]]) for p in (lazily(params), params))
        both = read(result.params), eager.params
        assert jax.tree.structure(both[0]) == jax.tree.structure(both[1])
        assert_same(*map(jax.tree.leaves, both))
        assert written(tmp_path / "a", result) == written(tmp_path / "b", eager)


def test_weights_that_are_quantized_already_may_be_lazy_too():
    plan = jqx.make_plan(f, POLICY)(PARAMS, BATCHES[0])
    codes = jqx.quantize_params(lazily(PARAMS), plan)
    real = jqx.dequantize_params(codes)
    assert all(isinstance(x, Lazy) for x in jax.tree.leaves(real))
    assert_same(read(real), jqx.dequantize_params(jqx.quantize_params(PARAMS, plan)))
    mixed = {**lazily(PARAMS), "layer0": codes["layer0"]}
    policy = jqx.Policy({"layer[1-3]/.*": "int4:group=16"})
    result = quantized(f, mixed, BATCHES, nearest(), policy=policy)
    assert_same(read(result.params["layer0"]["w"]), read(codes["layer0"]["w"]))


class Observing:
    """An algorithm that says that leaves may be lazy, and asks for statistics."""

    lazy, observers = True, {".*": jqx.extend.hessian}

    def __call__(self, plan, params, stats):
        return params


@pytest.mark.parametrize(
    "use",
    [
        lambda p, plan: quantized(f, p, BATCHES, lambda plan, p, stats: p, policy=STATIC),
        lambda p, plan: quantized(f, p, BATCHES, awq()),
        lambda p, plan: quantized(f, p, BATCHES, auto_round(steps=1)),
        lambda p, plan: quantized(f, p, BATCHES, gptq(sequential=False)),
        lambda p, plan: quantized(f, p, BATCHES, lambda plan, p, stats: p),
        lambda p, plan: quantized(f, p, BATCHES, Observing()),
        lambda p, plan: quantized(f, p, BATCHES, policy=jqx.presets.w4a4()),
        lambda p, plan: quantized(f, p, BATCHES, nearest())(BATCHES[0]),
        lambda p, plan: jqx.quantize_params(p, plan, algorithm=nearest()),
        lambda p, plan: jqx.calibrate_batches(f, plan, p, BATCHES),
        lambda p, plan: jqx.simulate(f, plan)(p, BATCHES[0]),
        lambda p, plan: jqx.convert(f, plan)(p, BATCHES[0]),
        lambda p, plan: np.asarray(p["layer0"]["w"]),
    ],
)
def test_what_computes_on_arrays_says_so(use):
    params = lazily(PARAMS)
    plan = jqx.make_plan(f, POLICY)(params, BATCHES[0])
    with pytest.raises(TypeError, match=r"jqx\.[\w.]+: (.|\n)+not been read yet(.|\n)+fix:"):
        use(params, plan)


def scanned(p, x):
    return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w.T), None), x, p["w"])[0]


def joined(p, x):
    return jnp.tanh(x) @ jnp.concatenate([p["a"], p["b"].T], axis=1)


def alone(w, x):
    return x @ w


STATIC = jqx.presets.w8a8()


MODELS = {
    "layers": (f, PARAMS),
    "scan": (scanned, {"w": normal(0, 3, D, D) / D**0.5}),
    "joined": (joined, {"a": normal(1, D, D), "b": normal(2, D, D)}),
    "alone": (alone, normal(3, D, D)),
}
CASES = [
    *((name, gptq(), "int4:group=16:asymmetric") for name in MODELS),
    *(("layers", gptq(propagation=way), "int4:group=16") for way in ("qep", "gptaq")),
    ("scan", gptq(propagation="qep"), "int4:group=16"),
    *(("layers", gptq(), scheme) for scheme in ("nvfp4", "mxfp4", "nf4")),
    ("layers", adaround(steps=3), "int4:group=16"),
]


def every_form(p, x):
    """Scans over weights, one of them backwards, and over none; a branch that no batch takes;
    products of activations; experts.
    """

    def layer(h, xs):
        weight, bias = xs
        inner, rows = jax.lax.scan(lambda c, b: (whole(c @ p["once"]) + b, c), h, bias)
        return whole(inner @ weight) + rows[0], h.sum(1)

    h, sums = jax.lax.scan(layer, x, (p["stack"], p["biases"]), reverse=True)
    h = jax.lax.cond(sums.sum() > 1e9, lambda h: h @ p["never"], whole, h)
    h = jax.checkpoint(lambda h: whole(whole(h @ h.T) @ h))(h)
    sizes = jnp.array([10, 4, x.shape[0] - 14], jnp.int32)
    return jax.lax.ragged_dot(h, p["experts"], sizes) + jax.jit(jnp.dot)(x, p["last"])


FORMS = {
    "stack": integers(0, 3, D, D),
    "biases": integers(1, 3, 2, 1, D),
    "once": integers(2, D, D),
    "never": integers(3, D, D),
    "experts": integers(4, 3, D, D),
    "last": integers(5, D, D),
}
WHOLE = [integers(6 + n, n, D) for n in (48, 40)]
CALIBRATORS = {
    "absmax": jqx.calibrators.absmax,
    "minmax": jqx.calibrators.minmax,
    "percentile": jqx.calibrators.percentile,
    "mse": jqx.calibrators.mse,
}


@pytest.mark.many
@pytest.mark.parametrize("calibrator", CALIBRATORS)
def test_static_scales_are_those_of_parameters_in_memory(calibrator):
    """Exactly: activations are whole numbers. Of others the last bits depend on what is fused."""
    spec = jqx.QSpec("int8", calibrator=CALIBRATORS[calibrator])
    rules = [
        jqx.Rule("never", weight="int8"),
        jqx.Rule("", activation=spec, output=spec),
        jqx.Rule("once", weight="int8", activation=spec, output=spec),
        jqx.Rule(weight="int8", activation=spec, output=spec),
    ]
    reads = []
    result = quantized(every_form, lazily(FORMS, reads), WHOLE, nearest(), policy=jqx.Policy(rules))
    assert max(reads.count(name) for name in set(reads)) <= 12
    eager = quantized(every_form, FORMS, WHOLE, nearest(), policy=jqx.Policy(rules))
    assert result.affines.keys() == eager.affines.keys() and len(result.affines) > 12
    for key, (scale, zero_point) in eager.affines.items():
        np.testing.assert_array_equal(result.affines[key].scale, scale, strict=True, err_msg=key)
        assert (result.affines[key].zero_point is None) == (zero_point is None)
    assert_same(read(result.params), eager.params)


def test_a_static_scale_inside_of_a_while_loop_needs_arrays():
    def g(w, x):
        def step(carry):
            return jnp.tanh(carry[0] @ w), carry[1] + 1

        return jax.lax.while_loop(lambda carry: carry[1] < 3, step, (x, 0))[0]

    weight = lazily(PARAMS["layer0"]["w"])
    with pytest.raises(NotImplementedError, match=r"jqx\.ptq: (.|\n)+while loop(.|\n)+fix:"):
        quantized(g, weight, BATCHES, nearest(), policy=STATIC)


@pytest.mark.many
@pytest.mark.parametrize("name, algorithm, scheme", CASES, ids=str)
def test_codes_are_those_of_parameters_in_memory(name, algorithm, scheme):
    """Bit for bit; what is not quantized is the leaf that was given."""
    g, params = MODELS[name]
    policy, lazy = jqx.Policy([jqx.Rule(weight=scheme)]), lazily(params)
    result, eager = (quantized(g, p, BATCHES, algorithm, policy=policy) for p in (lazy, params))
    assert all(isinstance(x, Lazy) for x in jax.tree.leaves(result.params))
    codes = read(result.params)
    assert jax.tree.structure(codes) == jax.tree.structure(eager.params)
    assert_same(*map(jax.tree.leaves, (codes, eager.params)))
    assert result.report == eager.report
    if g is f:
        assert all(result.params[name]["b"] is lazy[name]["b"] for name in NAMES)
        assert result.details.memory.weights < eager.details.memory.weights / 3


@pytest.mark.parametrize("propagation", ["none", "qep"])
def test_a_leaf_is_read_where_its_site_comes_and_held_until_the_next(propagation):
    """Each once in each stream: its site is one stage with what chooses its codes."""
    made, most, reads = [], [0], []

    def copy(x):
        made.append(weakref.ref(y := np.array(x)))
        alive = [array for ref in made if (array := ref()) is not None]
        most[0] = max(most[0], sum(array.ndim == 2 for array in alive))
        return y

    params = lazily(PARAMS, reads, copy)
    plan = jqx.make_plan(f, POLICY)(params, BATCHES[0])
    algorithm = gptq(propagation=propagation)
    chosen = algorithm.run(f, plan, params, BATCHES, progress=False)
    gc.collect()
    assert not any(ref() is not None for ref in made)
    streams = 1 if propagation == "none" else 2
    expected = [f"{name}/{part}" for name in NAMES for part in ("w",) * streams]
    assert [name for name in reads if name.endswith("w")] == expected
    assert most[0] <= streams
    reads.clear()
    read(chosen.params)
    assert {name for name in reads if name.endswith("w")} == set()  # codes lie in files


@pytest.mark.parametrize("name", ["layers", "scan"])
def test_a_run_that_was_interrupted_goes_on_from_its_folder(name, tmp_path, monkeypatch):
    (g, params), (solved, limit) = MODELS[name], interrupt_gptq(monkeypatch, 2)
    resumed = gptq(checkpoint=tmp_path / "run")
    with pytest.raises(Interruption):
        quantized(g, lazily(params), BATCHES, resumed)
    limit[0] = 100
    result = quantized(g, lazily(params), BATCHES, resumed)
    assert len(solved) == len({*map(tuple, solved)})
    again = quantized(g, lazily(params), BATCHES, resumed)
    assert len(solved) == len({*map(tuple, solved)})
    plain = quantized(g, params, BATCHES, gptq())
    assert_same(*map(jax.tree.leaves, (read(result.params), plain.params)))
    sources = [[x.source for x in jax.tree.leaves(one.params)] for one in (result, again)]
    assert sources[0] == sources[1] and all(sources[0])
    other = quantized(g, lazily(params), [x + 1 for x in BATCHES], gptq())
    of_others, of_params = (
        {x.source for x in jax.tree.leaves(tree)} for tree in (other.params, lazily(params))
    )
    assert not set(sources[0]) & of_others - of_params
    changed = jax.tree.map(
        lambda x: Lazy(x.spec, x.make, x.source + "!"),
        lazily(params),
        is_leaf=lambda x: isinstance(x, Lazy),
    )
    with pytest.raises(ValueError, match="with other parameters"):
        quantized(g, changed, BATCHES, resumed)


def test_a_write_of_what_gptq_chose_goes_on_after_another_run(tmp_path):
    """Codes lie in a folder of their own, which lives as long as they."""
    first = quantized(f, lazily(PARAMS), BATCHES, gptq())
    leaves, tree = jax.tree.flatten(first.params)

    def fails():
        raise KeyboardInterrupt

    leaves[-1] = Lazy(leaves[-1].spec, fails, leaves[-1].source)
    broken = dataclasses.replace(first, params=jax.tree.unflatten(tree, leaves))
    with pytest.raises(KeyboardInterrupt):
        jqx.save(tmp_path / "a", broken, resume=True)
    reads = []
    again = quantized(f, lazily(PARAMS), BATCHES, gptq())
    params = jax.tree.map(
        lambda x: Lazy(x.spec, lambda: reads.append(x) or x.read(), x.source), again.params
    )
    jqx.save(tmp_path / "a", dataclasses.replace(again, params=params), resume=True)
    assert len(reads) == 1
    eager = quantized(f, PARAMS, BATCHES, gptq())
    assert written(tmp_path / "b", eager) == (tmp_path / "a").read_bytes()


def test_a_checkpoint_needs_sources():
    def bare(x):
        return Lazy(jax.ShapeDtypeStruct(x.shape, x.dtype), lambda: x)

    params = jax.tree.map(bare, PARAMS)
    with pytest.raises(ValueError, match=r"cannot identify(.|\n)+'layer0/[bw]'(.|\n)+fix:"):
        quantized(f, params, BATCHES, gptq(checkpoint="/tmp/never-there"))
    result = quantized(f, params, BATCHES, gptq())
    assert not any(x.source for x in jax.tree.leaves(result.params))


def test_the_default_does_not_rotate_what_is_read_when_needed():
    result = quantized(f, lazily(PARAMS), BATCHES, policy=jqx.presets.w4a8())
    assert result.report.codes.startswith("gptq(") and len(result.details) == len(NAMES)
    assert "without rotate(offline='only'): parameters are read one" in result.report.codes


def tied(p, x):
    """A table, looked up at the bottom and multiplied by at the top."""
    return whole(p["table"][x] @ p["w"]) @ p["table"].T


def repeated(p, x):
    """A weight that a loop uses in all of its steps, and another one beside it."""

    def step(h, bias):
        return whole(h @ p["w"] + bias), None

    return jax.lax.scan(step, x, p["biases"])[0] @ p["last"]


SHARED = {
    "tied": (tied, {"table": integers(0, 40, D), "w": integers(1, D, D)}, jnp.arange(96) % 37),
    "repeated": (
        repeated,
        {"w": integers(2, D, D), "biases": integers(3, 3, 1, D), "last": integers(4, D, D)},
        integers(5, 96, D),
    ),
}


@pytest.mark.parametrize("counts", [None, lambda x: (jnp.arange(len(x)) % 3).astype(jnp.float32)])
@pytest.mark.parametrize("name", SHARED)
def test_a_weight_that_sites_share_is_chosen_by_one_more_run(name, counts):
    g, params, x = SHARED[name]
    algorithm = gptq(weight=counts, unsupported="round")
    args = [x[:48], x[48:]], algorithm
    policy = jqx.Policy({".*": "int4:group=16:asymmetric"})
    reads = []
    result = quantized(g, lazily(params, reads), *args, policy=policy)
    eager = quantized(g, params, *args, policy=policy)
    assert any(entry.after < entry.before for entry in eager.details)
    assert result.report == eager.report
    assert_same(*map(jax.tree.leaves, (read(result.params), eager.params)))


def test_a_shared_weight_inside_of_a_while_loop_needs_arrays():
    def g(p, x):
        step = lambda carry: (jnp.tanh(carry[0] @ p["w"]), carry[1] + 1)  # noqa: E731
        return jax.lax.while_loop(lambda carry: carry[1] < 3, step, (x, 0))[0]

    with pytest.raises(NotImplementedError, match=r"'w:dot_general'(.|\n)+fix:"):
        quantized(g, lazily({"w": normal(0, D, D)}), BATCHES, gptq())


PROGRAM = """
import sys, jax, jax.numpy as jnp, jqx

def f(p, x):
    for i in range(12):
        x = jnp.tanh(x @ p[f"{i}.weight"])
    return x

with jqx.interop.Archive(sys.argv[1]) as archive:
    params = archive.map(archive.lazy)
    batches = [jax.random.normal(jax.random.key(i), (64, 128)) for i in range(2)]
    algorithm = jqx.algorithms.gptq(checkpoint=sys.argv[2], offload="disk")
    quantize = jqx.ptq(f, jqx.Policy({".*": "int4:group=32"}), algorithm, progress=False)
    jqx.save(sys.argv[3], quantize(params, batches), resume=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment_and_run_again_the_bytes_are_the_same(tmp_path):
    rng, shape = np.random.default_rng(0), (128, 128)
    weights = {f"{i}.weight": rng.standard_normal(shape, np.float32) / 8 for i in range(12)}
    jqx.interop.save_leaves(tmp_path / "in", weights, weights.values())
    command = [sys.executable, "-c", PROGRAM, tmp_path / "in"]
    start = time.perf_counter()
    subprocess.run([*command, tmp_path / "other", tmp_path / "plain"], check=True)
    whole = time.perf_counter() - start
    plain, out, kills = (tmp_path / "plain").read_bytes(), tmp_path / "out", 0
    while kills < KILLS:
        process = subprocess.Popen([*command, tmp_path / "run", out])
        try:
            process.wait(whole * (0.3 + 0.6 * rng.random()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        if out.exists():
            assert out.read_bytes() == plain
            out.unlink()
    subprocess.run([*command, tmp_path / "run", out], check=True)
    assert out.read_bytes() == plain
