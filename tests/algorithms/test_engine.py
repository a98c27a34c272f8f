"""What layer by layer means for memory and for time: stacks of matrices, values on the host, runs
that were interrupted.
"""

import dataclasses
import gc
import importlib.util
import os
import sys
import tempfile
import tracemalloc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jqx
from jqx._src.algorithms import store
from jqx._src.algorithms.engine import Entered, Frame
from jqx._src.algorithms.grids import Grids
from jqx._src.algorithms.matrices import Drift, Matrix
from jqx._src.algorithms.stages import Programs
from jqx._src.algorithms.store import NAME, OnDisk, OnHost
from jqx._src.transforms import calibrate
from jqx._src.transforms.plan import Weight
from jqx.algorithms import gptq

from ..arrays import on_device
from ..oracles.algorithms import Interruption, interrupt_gptq

RNG = np.random.default_rng(0)
D, L = 16, 3


def normal(*shape):
    return on_device(np.float32(RNG.normal(size=shape)))


PARAMS = {"layers": normal(L, D, D), "experts": normal(3, D, D)}
BATCHES = [normal(n, D) for n in (32, 24)]
TWO = {"a": PARAMS["layers"][0], "b": PARAMS["layers"][1]}
INT4 = jqx.Policy({".*": "int4"})


def f(p, x):
    """A scan over weights with results of each step, a branch, experts."""

    def layer(h, w):
        return h + jnp.tanh(h @ w.T), h.sum(1)

    h, rows = lax.scan(layer, x, p["layers"])
    h = lax.cond(h.sum() > 1e9, lambda h: h, lambda h: jax.checkpoint(jnp.sin)(h), h)
    sizes = jnp.array([10, 4, x.shape[0] - 14], jnp.int32)
    return lax.ragged_dot(jnp.tanh(h), p["experts"], sizes) + rows.sum()


@pytest.fixture(scope="module")
def plan():
    return jqx.make_plan(f, INT4)(PARAMS, BATCHES[0])


@pytest.fixture(scope="module")
def plain(plan):
    return gptq().run(f, plan, PARAMS, BATCHES, progress=False)


@pytest.fixture
def solved(monkeypatch):
    """The matrices that GPTQ is given, a list for each call."""
    calls, solve = [], gptq.solve

    def spy(self, matrices, *args):
        calls.append(matrices)
        return solve(self, matrices, *args)

    monkeypatch.setattr(gptq, "solve", spy)
    return calls


def run(f, params, batches=BATCHES, policy=INT4, **options):
    """What GPTQ chooses for a function."""
    plan = jqx.make_plan(f, policy)(params, batches[0])
    return gptq(**options).run(f, plan, params, batches, progress=False)


def check_same(a, b):
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_array_equal(x, y)


def without_time(entries):
    """As text: a NaN equals itself."""
    return repr([dataclasses.replace(entry, seconds=0.0) for entry in entries])


def stack_of(count, rows, columns, drift):
    """A weight, and the matrices of a stack of it, one of them without a Hessian."""
    rng = np.random.default_rng(1)
    w = on_device(np.float32(rng.normal(size=(count, rows, columns))))
    places = np.arange(w.size, dtype=np.int32).reshape(w.shape)
    results = []
    for i in range(count):
        x, d = rng.normal(size=(2, 4 * columns, columns)) * np.exp(rng.normal(size=columns))
        drift_of_one = Drift(d.T @ x, d.T @ d) if drift else None
        products = x.T @ x * (np.nan if i == 1 else 1)
        results.append(Matrix(("w",), (), (i,), places[i], products, len(x), drift_of_one))
    return w, results


OPTIONS = (
    ((24, 1, 9), "int4:block=9", {}),
    ((3, 5, 160), "int4:group=32:asymmetric", {"order": "activation"}),
    ((3, 5, 64), "int4:group=32:asymmetric", {"groups": "dynamic"}),
    ((3, 5, 64), "int4:group=32", {"propagation": "qep"}),
    ((3, 5, 64), "int4:group=32", {"propagation": "gptaq"}),
)


@pytest.mark.many
@pytest.mark.parametrize("shape, scheme, options", OPTIONS, ids=str)
def test_a_stack_is_rounded_as_each_matrix_alone(shape, scheme, options):
    """Bit for bit."""
    w, matrices = stack_of(*shape, "propagation" in options)
    size = int("".join(filter(str.isdigit, scheme.split("=")[1])))
    spec = dataclasses.replace(
        jqx.QSpec("int4", jqx.per_block({0: 1, 1: 1, 2: size})),
        symmetric="asymmetric" not in scheme,
    )
    weight = Weight("w", spec, "w", 1)
    solver = gptq(ill_conditioned="round", **options)
    together, alone = (Grids.of({"w": w}, {"w": spec}) for _ in range(2))
    entries = solver.solve(matrices, together, weight)
    for matrix, entry in zip(matrices, entries, strict=True):
        (entry_alone,) = solver.solve([matrix], alone, weight)
        assert without_time([entry_alone]) == without_time([entry])
    assert [entry.damping is None for entry in entries] == [i == 1 for i in range(shape[0])]
    np.testing.assert_array_equal(together.codes, alone.codes)
    np.testing.assert_array_equal(together.scale, alone.scale)
    if together.zero_point is not None:
        np.testing.assert_array_equal(together.zero_point, alone.zero_point)


def test_a_table_has_one_line_for_matrices_that_are_multiplied_by_at_once(plain):
    *_, line = str(plain.report).splitlines()
    experts = [entry for entry in plain.report if entry.path == "experts"]
    assert len(experts) == 3 and str(plain.report).count("\n") == L + 2
    for text in ("experts:ragged_dot ", " 3 x (16 x 16) ", " 8 to 28 "):
        assert text in line
    assert f" {sum(x.before for x in experts):.4g} " in line


@pytest.fixture
def held(monkeypatch):
    """A function that returns the values of batches that are held now, each once."""
    holders = weakref.WeakSet()
    for cls in (Entered, Frame):

        def record(self, *args, init=cls.__init__):
            holders.add(self)
            init(self, *args)

        monkeypatch.setattr(cls, "__init__", record)
    fields = ("values", "_consts", "_carry", "_xs", "_rows")

    def values():
        results = [[vars(x).get(name) for name in fields] for x in holders]
        results = [
            list(x.values()) if isinstance(x, dict) else x
            for fields_of_one in results
            for x in fields_of_one
        ]
        return list({id(x): x for x in jax.tree.leaves(results)}.values())

    return values


@pytest.mark.many
@pytest.mark.parametrize("where", [True, "disk"])
@pytest.mark.parametrize("propagation", ["none", "gptaq"])
def test_activations_elsewhere_give_the_same_codes(
    plan, plain, propagation, where, held, monkeypatch, tmp_path
):
    monkeypatch.setattr(store, "_LEAST", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen, files, solve = [], [], gptq.solve

    def spy(self, *args):
        seen.append([type(x) for x in held()])
        files.append(sum(len(names) for *_, names in os.walk(tmp_path)))
        return solve(self, *args)

    monkeypatch.setattr(gptq, "solve", spy)
    algorithm, kind = gptq(propagation=propagation), OnDisk if where == "disk" else OnHost
    away = dataclasses.replace(algorithm, offload=where)
    chosen = away.run(f, plan, PARAMS, BATCHES, progress=False)
    assert len(seen) == L + 1 and all(set(kinds) == {kind} for kinds in seen)
    told = "on disk" if where == "disk" else "on the host"
    assert chosen.report.memory.offload == where and told in str(chosen.report.memory)
    assert files == [len(kinds) if where == "disk" else 0 for kinds in seen]
    if propagation != "none":
        plain = algorithm.run(f, plan, PARAMS, BATCHES, progress=False)
        assert all(kind not in kinds for kinds in seen[L + 1 :])
    check_same(chosen, plain)
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_values_on_disk_are_those_that_were_kept():
    x = jnp.arange(24).reshape(4, 6)
    keeper = store.Offload("disk")
    for dtype in ("float32", "bfloat16", "int8", "bool", "float8_e4m3fn", "int4"):
        values = jnp.tile(x.astype(dtype), (store._LEAST, 1))
        away = keeper.kept(values)
        assert isinstance(away, OnDisk)
        back = store.on_device(away)
        assert back.dtype == values.dtype and back.sharding == values.sharding
        np.testing.assert_array_equal(back, values)
    assert isinstance(keeper.kept(x), OnHost)
    key = jax.random.key(0)
    assert keeper.kept(key) is key


def test_memory_is_known_before_it_is_taken(plan, plain, held, solved, monkeypatch, capsys):
    """Of what is held: weights and statistics to the byte, activations too."""
    live = []

    def put(self, stage, results):
        self.values.update(zip(stage.gives, results, strict=True))
        live.append(sum(x.nbytes for x in held()))
        self.drop(stage)

    monkeypatch.setattr(Frame, "put", put)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    memory = gptq().run(f, plan, PARAMS, BATCHES).report.memory
    assert memory == plain.report.memory
    sums = [sum(matrix.hessian.nbytes for matrix in matrices) for matrices in solved]
    assert memory.statistics == max(sums) * 3 // 2  # and of one batch in float32
    assert memory.activations == max(live)
    expected = 2 * 4 * sum(x.size for x in PARAMS.values())  # the parameters twice
    for weight in plan.weights:
        grids = Grids.of(PARAMS, {weight.path: weight.spec})
        expected += sum(x.nbytes for x in (grids.codes, grids.scale))
    assert memory.weights == expected
    if importlib.util.find_spec("tqdm"):
        assert f"quantize: {memory}\n" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_held_grows_with_codes_alone(monkeypatch):
    """Beside the parameters and their copy: arrays of NumPy and of JAX that are alive at a step."""
    layers, width = 8, 64
    params, batch = normal(layers, width, width), normal(8, width)

    def scanned(p, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w.T), None), x, p)[0]

    plan = jqx.make_plan(scanned, jqx.Policy({".*": "int4:group=32"}))(params, batch)
    numpy_only = [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]
    live = lambda: {id(x): x.nbytes for x in jax.live_arrays()}  # noqa: E731
    before, most, solve = live(), [], gptq.solve

    def spy(self, *args):
        gc.collect()
        traces = tracemalloc.take_snapshot().filter_traces(numpy_only).traces
        arrays = sum(size for key, size in live().items() if key not in before)
        most.append((sum(trace.size for trace in traces), arrays))
        return solve(self, *args)

    monkeypatch.setattr(gptq, "solve", spy)
    tracemalloc.start(1)
    try:
        memory = gptq().run(scanned, plan, params, [batch], progress=False).report.memory
    finally:
        tracemalloc.stop()
    one = width * width  # of one step: places, and the sum in float64 with what becomes of it
    grids = memory.weights - 2 * params.nbytes
    assert grids == params.size + params.size // 32 * 4  # codes and scales
    on_host, arrays = (max(x) for x in zip(*most, strict=True))
    assert len(most) == layers
    assert grids <= on_host <= grids + one * (4 + 2 * 8) + 4096
    assert arrays <= params.nbytes + memory.activations + one * 8


def test_large_statistics_are_stated_before_they_are_taken(plan, monkeypatch, capsys):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    options = {"observers": {".*": jqx.extend.hessian}}
    traces = []

    def counted(p, x):
        traces.append(x)
        return f(p, x)

    batches = BATCHES[:1]
    jqx.calibrate_batches(counted, plan, PARAMS, batches, **options, progress=False)
    count = len(traces)
    monkeypatch.setattr(calibrate, "_LARGE", 1)
    stats = jqx.calibrate_batches(counted, plan, PARAMS, batches, **options)
    assert len(traces) == 2 * count  # stating it traces nothing more
    size = sum(x.nbytes for x in jax.tree.leaves(stats))
    assert f"the statistics take {size / 1024:.4g} KiB\n" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{}, {"groups": "dynamic"}, {"sequential": False}], ids=str)
def test_a_run_that_was_interrupted_ends_as_if_it_had_not(
    plan, plain, options, tmp_path, monkeypatch
):
    solved, limit = interrupt_gptq(monkeypatch, 1)
    resumed = gptq(checkpoint=tmp_path / "run", **options)
    resume = partial(resumed.run, f, plan, PARAMS, BATCHES, progress=False)
    with pytest.raises(Interruption):
        resume()
    limit[0] = 100
    result = resume()
    assert len(solved) == len({*map(tuple, solved)})
    count = len(solved)
    whole = plain
    if options:
        whole = gptq(**options).run(f, plan, PARAMS, BATCHES, progress=False)
        count += count
    assert len(solved) == count
    check_same(result, whole)
    assert without_time(result.report) == without_time(whole.report)
    again = resume()
    assert len(solved) == count and again.report == result.report


def refused(plan, folder, g=f, batches=BATCHES, params=PARAMS, **options):
    with pytest.raises(ValueError, match=r"jqx\.algorithms\.gptq: (.|\n)+fix:") as info:
        gptq(checkpoint=folder, **options).run(g, plan, params, batches, progress=False)
    return str(info.value)


def test_a_checkpoint_of_something_else_is_an_error(plan, tmp_path):
    folder = tmp_path / "run"
    gptq(checkpoint=folder).run(f, plan, PARAMS, BATCHES, progress=False)
    assert sorted(os.listdir(folder)) == ["000000.npz", *(f"00000{i}.npz" for i in (1, 2, 3)), NAME]
    other = lambda p, x: jnp.abs(f(p, x))  # noqa: E731
    assert "with other function\n" in refused(plan, folder, other)
    assert "with other batches\n" in refused(plan, folder, batches=[x + 1 for x in BATCHES])
    assert "with other parameters\n" in refused(
        plan, folder, params={**PARAMS, "layers": PARAMS["layers"] * 2}
    )
    assert "with other options\n" in refused(plan, folder, damping=0.1)
    eight = jqx.make_plan(f, jqx.Policy({".*": "int8"}))(PARAMS, BATCHES[0])
    assert "with other plan\n" in refused(eight, folder)
    (folder / "000002.npz").write_bytes(b"PK")
    assert "000002.npz" in refused(plan, folder)
    (folder / "000002.npz").write_bytes((folder / "000001.npz").read_bytes())
    assert "000002.npz" in refused(plan, folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine")
    for path in (tmp_path / "other", tmp_path / "other" / "notes"):
        assert "not a checkpoint folder" in refused(plan, path)


def beside(p, x):
    """Weights joined along what is kept."""
    return jnp.tanh(x) @ jnp.concatenate([p["a"], p["b"].T], axis=1)


def above(p, x):
    """Weights joined along what is summed over, turned round."""
    return jnp.concatenate([x, jnp.tanh(x)], axis=1) @ jnp.concatenate([p["a"], p["b"]])[::-1]


def in_steps(p, x):
    """Weights as the steps of a scan."""
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack([p["a"], p["b"]]))[0]


def in_a_loop(p, x):
    w = jnp.concatenate([p["a"], p["b"]], axis=1)
    return lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ w)[:, :D], x)


JOINED = {
    beside: (lambda w, x: jnp.tanh(x) @ w, lambda a, b: np.concatenate([a, b.T], 1)),
    above: (
        lambda w, x: jnp.concatenate([x, jnp.tanh(x)], axis=1) @ w,
        lambda a, b: np.concatenate([a, b])[::-1],
    ),
    in_steps: (
        lambda w, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0],
        lambda a, b: np.stack([a, b]),
    ),
    in_a_loop: (
        lambda w, x: lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ w)[:, :D], x),
        lambda a, b: np.concatenate([a, b], 1),
    ),
}
"""The same function of one weight, and which weight that is."""


@pytest.mark.many
@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("g", JOINED, ids=lambda g: g.__name__)
def test_weights_that_are_joined_have_the_codes_of_one_weight(g, sequential):
    """Of scales for each weight, which all parts of the one have too."""
    of_one, join = JOINED[g]
    whole = on_device(join(*map(np.asarray, TWO.values())))
    policy = jqx.Policy({".*": "int4:group=16"})
    joined, one = (
        run(f, p, policy=policy, sequential=sequential) for f, p in ((g, TWO), (of_one, whole))
    )
    values = join(*(np.asarray(x.dequantize()) for x in joined.params.values()))
    np.testing.assert_array_equal(values, one.params.dequantize())
    assert [x.path for x in joined.report] == ["a+b"] * len(one.report)
    assert [x.after for x in joined.report] == [x.after for x in one.report]


def test_what_follows_joined_weights_sees_all_of_them_quantized(solved):
    params, x = {**TWO, "c": normal(2 * D, D)}, BATCHES[0]

    def f(p, x):
        return jnp.tanh(beside(p, x)) @ p["c"]

    codes = run(f, params, [x], jqx.Policy({".*": "int3"})).params
    a, b = (np.asarray(codes[name].dequantize()) for name in "ab")
    h = np.tanh(np.tanh(x) @ np.concatenate([a, b.T], 1))
    (_, (matrix,)) = solved
    np.testing.assert_allclose(matrix.hessian, h.T @ h, rtol=0, atol=1e-5 * len(h))


def on_devices(p, x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (P(), P("d")), "out_specs": P("d")}
    return jax.shard_map(lambda w, x: jnp.tanh(x @ w), **specs)(p["a"], x) @ p["b"]


@pytest.mark.parametrize("sequential", [True, False])
def test_a_weight_inside_of_a_shard_map_is_an_error_that_names_the_site(sequential):
    with pytest.raises(NotImplementedError, match=r"(?s)jqx\..+'a:dot_general'.+fix:") as info:
        run(on_devices, TWO, sequential=sequential)
    assert "replace a shard_map" in str(info.value)


EXPERTS, CHOSEN = 3, 2


def top(scores):
    return lax.top_k(scores, CHOSEN)


def in_order(which):
    """An argsort as one sort of two operands."""
    rows = jnp.arange(which.size, dtype=jnp.float32)
    return lax.sort((which.astype(jnp.float32), rows), num_keys=1)[1].astype(jnp.int32)


def routed(p, x, argsort):
    """Experts whose tokens are chosen by what a quantized site has made."""
    h = jnp.tanh(x @ p["in"])
    best, which = jax.jit(top)(h[:, :EXPERTS])
    order = argsort(which.reshape(-1))
    sizes = jnp.bincount(which.reshape(-1), length=EXPERTS)
    rows = h[order // CHOSEN] * best.reshape(-1)[order][:, None]
    return lax.ragged_dot(rows, p["experts"], sizes)


@pytest.mark.parametrize("weight", [None, lambda x: jnp.ones(x.shape[:1])], ids=["all", "counted"])
@pytest.mark.parametrize("argsort", [jnp.argsort, in_order])
def test_experts_compare_the_tokens_that_the_quantized_router_sends_them(argsort, weight, solved):
    params, x = {"in": PARAMS["layers"][0], "experts": PARAMS["experts"]}, BATCHES[0]
    f = partial(routed, argsort=argsort)
    int2 = jqx.Policy({".*": "int2"})
    chosen = run(f, params, [x], int2, propagation="qep", weight=weight)
    rounded, exact = (np.tanh(x @ w) for w in (chosen.params["in"].dequantize(), params["in"]))
    by_score = np.argsort(-rounded[:, :EXPERTS], axis=1, kind="stable")[:, :CHOSEN]
    assert (by_score != np.argsort(-exact[:, :EXPERTS], axis=1)[:, :CHOSEN]).any(1).sum() > 5
    assert len(solved[1]) == EXPERTS
    for expert, matrix in enumerate(solved[1]):
        tokens = np.flatnonzero((by_score == expert).any(1))
        a, b = (h[tokens] * h[tokens, expert][:, None] for h in (rounded, exact))
        assert matrix.rows == len(tokens)
        size = np.abs(a).max() * np.abs(b - a).max() * len(tokens)
        np.testing.assert_allclose(matrix.drift.cross, (b - a).T @ a, rtol=0, atol=1e-5 * size)
        np.testing.assert_allclose(matrix.drift.gram, (b - a).T @ (b - a), rtol=0, atol=1e-5 * size)


def test_a_reversed_scan_is_stepped_through_from_its_end(solved):
    """Each step sees what those after it, quantized, have made; results keep their places."""
    params = {"layers": PARAMS["layers"], "head": normal(D, D)}
    x = BATCHES[0]
    count = np.arange(1.0, L + 1, dtype=np.float32)[:, None, None]

    def f(p, x):
        def layer(h, w):
            h = jnp.tanh(h @ w)
            return h, h

        _, rows = lax.scan(layer, x, p["layers"], reverse=True)
        return (rows * count).sum(0) @ p["head"]

    codes = run(f, params, [x]).params
    h, rows, inputs = np.asarray(x), [], []
    for w in np.asarray(codes["layers"].dequantize())[::-1]:
        inputs.append(h)
        h = np.tanh(h @ w)
        rows.insert(0, h)
    inputs.append((np.stack(rows) * count).sum(0))
    matrices = [matrix for call in solved for matrix in call]
    assert [matrix.step for matrix in matrices] == [*((i,) for i in reversed(range(L))), ()]
    for matrix, rows in zip(matrices, inputs, strict=True):
        size = 1e-5 * len(rows) * np.abs(rows).max() ** 2
        np.testing.assert_allclose(matrix.hessian, rows.T @ rows, rtol=0, atol=size)


@pytest.mark.parametrize("options", [{}, {"sequential": False}, {"propagation": "qep"}], ids=str)
def test_a_scan_of_no_steps_has_no_matrices(options):
    params = {"layers": PARAMS["layers"][:0], "head": PARAMS["layers"][0]}

    def f(p, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0] @ p["head"]

    chosen = run(f, params, **options)
    assert [entry.path for entry in chosen.report] == ["head"]
    assert chosen.params["layers"].shape == (0, D, D)


def test_scales_that_rows_share_cannot_be_dynamic():
    with pytest.raises(ValueError, match=r"(?s)jqx\.algorithms\.gptq: scales of this .+fix:"):
        run(f, PARAMS, policy=jqx.Policy({".*": "int4:tensor"}), groups="dynamic")


def test_functions_of_one_text_and_the_same_constants_are_one_program():
    """Places that are read are arguments; other numbers, and constants, are not."""
    programs, x = Programs(), jnp.arange(8.0)
    first, second = jnp.ones(8), jnp.full(8, 2.0)

    def at(i):
        return lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False) * 2

    for i in (1, 5):
        assert float(programs.call(i, at(i), x)) == 2 * i
    assert len(programs._compiled) == 1
    for key, f, count in (
        ("three", lambda x: x[1] * 3, 2),
        ("a", lambda x: x + first, 3),
        ("b", lambda x: x + second, 4),
        ("again", lambda x: x + second, 4),
    ):
        np.testing.assert_array_equal(programs.call(key, f, x), f(x))
        assert len(programs._compiled) == count
    # The text of a function that is jitted inside has the shapes of its constants alone.
    for count, constant in ((5, first), (6, second)):
        inside = jax.jit(lambda x, constant=constant: x + constant)
        np.testing.assert_array_equal(programs.call(("inside", count), inside, x), x + constant)
        assert len(programs._compiled) == count


def test_equal_layers_are_compiled_once(monkeypatch):
    made, init = [], Programs.__init__
    monkeypatch.setattr(Programs, "__init__", lambda self: made.append(self) or init(self))
    params = [{"w": normal(D, D), "b": normal(D)} for _ in range(4)]

    def deep(p, x):
        for weights in p:
            x = jnp.tanh(x @ weights["w"] + weights["b"][None])
        return x * 3

    run(deep, params, BATCHES[:1])
    (programs,) = made
    # A product, and what stands between two; nothing is run behind the last site.
    assert len(programs._compiled) == 3 and len(programs._called) == 4 + 3
