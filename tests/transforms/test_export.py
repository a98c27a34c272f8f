"""What `jax.export` writes computes what the transformed function does: every form, format,
platform and size, symbolic ones too, here and read by another process.
"""

import functools
import json
import pathlib
import pickle
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jqx
from jqx import numerics

from ..arrays import assert_same
from ..models.forms import ACTIVATION, FORMS, POLICIES, K, function, rows, weights
from ..models.transforms import close, eighths, mlp, normal, plan_of, product

TOKENS = jqx.QSpec(jnp.int8, jqx.per_token(), dynamic=True)


def spec(qtype, granularity=None, **fields):
    return jqx.QSpec(qtype, granularity or jqx.per_channel(), **fields)


def plain(q):
    return q


WEIGHTS = {
    "int8": (spec(jnp.int8), plain),
    "int8 with zero points": (spec(jnp.int8, symmetric=False), plain),
    "int4": (spec(jnp.int4), plain),
    "uint4 with zero points": (spec(jnp.uint4, symmetric=False), plain),
    "int4 packed": (spec(jnp.int4), jqx.QTensor.pack),
    "uint4 with zero points packed": (spec(jnp.uint4, symmetric=False), lambda q: q.pack(0)),
    "int2 packed": (spec(jnp.int2), jqx.QTensor.pack),
    "int4 for cpu": (spec(jnp.int4), lambda q: q.pack_for("cpu", contracted=-2)),
    "uint8 for cpu": (spec(jnp.uint8, symmetric=False), lambda q: q.pack_for("cpu", contracted=-2)),
    "int4 for gpu": (spec(jnp.int4), lambda q: q.pack_for("gpu", contracted=-2)),
    "nf4": (spec(numerics.nf4), plain),
    "nf4 packed, blocks with a tail": (
        spec(numerics.nf4, jqx.per_group(4, tail=True)),
        jqx.QTensor.pack,
    ),
    "float8": (spec(jnp.float8_e4m3fn), plain),
    "int4 in blocks with a tail": (spec(jnp.int4, jqx.per_group(4, tail=True)), plain),
    "nvfp4": (jqx.QSpec(numerics.nvfp4, jqx.per_group(16, tail=True)), plain),
}
CALLS = {"weights": None, "weights and activations": TOKENS}


def planned(name, calls):
    policy = jqx.Policy([jqx.Rule(weight=WEIGHTS[name][0], activation=CALLS[calls])])
    return jqx.make_plan(product, policy)(eighths(0, K, 8), rows())


@functools.cache
def stored():
    """The weights in every format, of one compiled program."""

    @jax.jit
    def quantized(w):
        plans = {name: planned(name, "weights") for name in WEIGHTS}
        return {
            name: laid_out(jqx.quantize_params(w, plans[name]))
            for name, (_, laid_out) in WEIGHTS.items()
        }

    return quantized(eighths(0, K, 8))


def converted(name, calls):
    """A function of quantized weights and rows, and its arguments."""
    f = jqx.convert(product, planned(name, calls), "dynamic")
    return jax.jit(f), (stored()[name], rows())


def simulated():
    """A function of parameters, scales and rows, and its arguments."""
    params = {"w": eighths(0, 16, 24), "b": eighths(1, 24), "v": eighths(2, 5, 24)}
    x = eighths(3, 7, 16)
    plan = jqx.make_plan(mlp, jqx.presets.w8a8(activation={"symmetric": False}))(params, x)
    affines = jqx.affines(plan, jax.jit(jqx.calibrate(mlp, plan))(params, x)[1])

    def f(params, affines, x):
        return jqx.simulate(mlp, plan, affines)(params, x)

    return jax.jit(f), (params, affines, x)


def calibrated(calibrator):
    """A function that returns statistics, and its arguments."""
    policy = jqx.presets.w8a8(activation={"calibrator": calibrator})
    w, x = eighths(0, K, 8), rows()
    return jax.jit(jqx.calibrate(product, jqx.make_plan(product, policy)(w, x))), (w, x)


CALIBRATORS = [
    value for value in vars(jqx.calibrators).values() if isinstance(value, jqx.extend.Calibrator)
] + [jqx.calibrators.fixed(-1, 1), jqx.calibrators.rms(2.0)]

GROUPS = {
    **{
        calls: {f"{name}, {calls}": (converted, name, calls) for name in WEIGHTS} for calls in CALLS
    },
    "calibrate": {str(calibrator): (calibrated, calibrator) for calibrator in CALIBRATORS},
    "simulate": {"simulate": (simulated,)},
}
"""Cases that are written as one function: of the results of all, by their names."""
CASES = [name for group in GROUPS.values() for name in group]


READER = """
import pathlib, pickle, sys
import jqx
from jax import export

for path in pathlib.Path(sys.argv[1]).glob("*.in"):
    data, args = pickle.loads(path.read_bytes())
    path.with_suffix(".out").write_bytes(pickle.dumps(export.deserialize(data).call(*args)))
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Each case: what it returns here, read back here, and read by a process that imports jqx. That
    one optimizes its programs, so these are optimized too.
    """
    folder, results = tmp_path_factory.mktemp("exported"), {}
    jax.config.update("jax_disable_most_optimizations", False)
    for group, cases in GROUPS.items():
        calls = {name: make(*args) for name, (make, *args) in cases.items()}
        operands = {name: args for name, (_, args) in calls.items()}

        def every(operands, calls=calls):
            return {name: f(*operands[name]) for name, (f, _) in calls.items()}

        f, path = jax.jit(every), folder / f"{group}.in"
        data = bytearray(export.export(f)(operands).serialize())
        path.write_bytes(pickle.dumps((data, (operands,))))
        results[group] = f(operands), export.deserialize(data).call(operands)
    jax.config.update("jax_disable_most_optimizations", True)
    subprocess.run([sys.executable, "-c", READER, str(folder)], check=True)
    return {
        name: (expected[name], actual[name], abstract[name])
        for group, (expected, actual) in results.items()
        for abstract in [pickle.loads((folder / f"{group}.out").read_bytes())]
        for name in expected
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_written_computes_the_same_bits_here_and_elsewhere(name, elsewhere):
    expected, *others = elsewhere[name]
    for actual in others:
        assert_same(actual, expected)


PLATFORMS = ("cpu", "cuda", "tpu")


@partial(jax.jit, static_argnums=0)
def both(functions, operands):
    """Results of two functions of the same operands, of each of some; as one compiled program."""
    return [[f(*args) for f in functions] for args in operands]


def assert_computes(exported, f, *operands):
    """What is written and read again is the function, of each of some operands."""
    read = export.deserialize(exported.serialize())
    for actual, expected in both((read.call, f), operands):
        assert_same(actual, expected)
    return read


def form(name):
    """All but a few forms run with the slow tests."""
    is_fast = name in ("scan_xs", "while_carried", "cond", "remat_in_scan", "custom_vjp")
    return pytest.param(name, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize("name", [form(name) for name in FORMS])
def test_every_control_flow_form_is_exported(name):
    w, x = weights(), rows()
    plan = jqx.make_plan(function(name), POLICIES["weights"])(w, x)
    f, q = jax.jit(jqx.convert(function(name), plan, "dynamic")), jqx.quantize_params(w, plan)
    assert_computes(export.export(f)(q, x), f, (q, x))


def test_quantized_weights_may_be_closed_over():
    w, x = weights()[0], rows()
    plan = jqx.make_plan(product, POLICIES["weights"])(w, x)
    q = jqx.quantize_params(w, plan)
    f = jax.jit(lambda x: jqx.convert(product, plan, "dynamic")(q, x))
    assert_computes(export.export(f)(x), f, (x,))


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", ["int8", "int4 packed", "float8", "int4 in blocks with a tail"])
def test_one_artifact_serves_every_platform(name, calls):
    f, args = converted(name, calls)
    exported = export.export(f, platforms=PLATFORMS)(*args)
    assert assert_computes(exported, f, args).platforms == PLATFORMS


def attend(w, x):
    scores = jnp.clip(jnp.einsum("btk,bsk->bts", x @ w, x), -2, 2)
    return jnp.einsum("bts,bsk->btk", scores, x)


def convolve(w, x):
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def look_up(w, x):
    return w[jnp.max(x, axis=(1, 2)).astype(jnp.int32)]


SYMBOLIC = {
    "product": (product, weights()[0]),
    "stack": (function("scan_xs"), weights()),
    "attention": (attend, weights()[0]),
    "convolution": (convolve, weights()),
    "lookup": (look_up, weights()[0]),
}
"""Functions of weights and [batch, rows, K], whose numbers are exact in any order."""

SPECS = {
    "weights": POLICIES["weights"].rules,
    "weights and activations": (
        *POLICIES["weights and activations"].rules,
        jqx.Rule(activation=ACTIVATION, optional=True),
    ),
    "uint4 and tokens": (jqx.Rule(weight=spec(jnp.uint4, symmetric=False), activation=TOKENS),),
}
TRANSFORMS = {
    "convert": partial(jqx.convert, affines="dynamic"),
    "simulate": partial(jqx.simulate, affines="dynamic"),
    "calibrate": jqx.calibrate,
}


def batch(sizes, *other_sizes, constraints=()):
    (n,) = export.symbolic_shape(sizes, constraints=constraints)
    return jax.ShapeDtypeStruct((n, *other_sizes), jnp.float32)


@pytest.mark.many
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("specs", ["weights", "weights and activations"])
@pytest.mark.parametrize("name", SYMBOLIC)
def test_a_plan_serves_a_symbolic_batch(name, specs, transform):
    (f, w), policy = SYMBOLIC[name], jqx.Policy(SPECS[specs])
    g = jax.jit(TRANSFORMS[transform](f, plan_of(f, policy, w, rows(2))))
    exported = export.export(g)(w, batch("b", *rows().shape))
    assert_computes(exported, g, *((w, rows(n)) for n in (1, 2, 5)))


@pytest.mark.many
@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("granularity", [jqx.per_channel(), jqx.per_group(32)], ids=str)
def test_large_weights_serve_a_symbolic_number_of_rows(specs, granularity):
    rule = SPECS[specs][0]
    weight = jqx.QSpec(rule.weight.qtype, granularity, rule.weight.symmetric)
    policy = jqx.Policy([jqx.Rule(weight=weight, activation=rule.activation)])
    w = normal(0, 128, 144)
    plan = plan_of(product, policy, w, normal(1, 2, 128))
    g, q = jax.jit(jqx.convert(product, plan, "dynamic")), jqx.quantize_params(w, plan)
    for sizes, bounds, numbers in (
        ("b", (), (8, 24)),
        ("8*b", (), (8,)),
        ("b", ("b <= 2",), (1, 2)),
    ):
        exported = export.export(g)(q, batch(sizes, 128, constraints=bounds))
        operands = tuple((q, normal(n, n, 128)) for n in numbers)
        for actual, expected in both((exported.call, g), operands):
            assert close(actual, expected, terms=128)


@pytest.mark.parametrize("name", SYMBOLIC)
def test_a_plan_of_symbolic_sizes_is_that_of_any_sizes(name):
    (f, w), policy = SYMBOLIC[name], jqx.Policy(SPECS["weights and activations"])
    plan = plan_of(f, policy, w, batch("b", *rows().shape))
    assert plan == plan_of(f, policy, w, rows(3))
    assert all(site.macs in (None, 0) for site in plan.sites)
    assert "[b" in str(plan) and "multiply-adds" not in str(plan)
    f, x = jax.jit(jqx.convert(f, policy, "dynamic")), rows(2)
    assert_computes(export.export(f)(w, batch("b", *rows().shape)), f, (w, x))


def test_a_sum_of_symbolic_length_needs_a_bound():
    policy = jqx.Policy([jqx.Rule(activation=ACTIVATION)])
    f = jax.jit(jqx.convert(lambda p, x: x.T @ x, policy, "dynamic"))
    with pytest.raises(ValueError, match="sums of a symbolic length may not fit") as info:
        export.export(f)((), batch("t", K))
    assert 'constraints=["t <= 4096"]' in str(info.value)
    exported = export.export(f)((), batch("t", K, constraints=["t <= 4096"]))
    assert_computes(exported, f, ((), rows()))


@pytest.mark.parametrize("format", ["int4", "uint8:asymmetric"])
def test_a_sum_of_floats_by_codes_of_symbolic_length_needs_no_bound(format):
    f = jax.jit(jqx.convert(jnp.matmul, jqx.Policy([jqx.Rule(activation=f"{format}:dynamic")])))
    for constraints in ((), ("t <= 4096",)):
        y = batch("t", 40, constraints=constraints)
        x = jax.ShapeDtypeStruct((8, y.shape[0]), jnp.float32)
        exported = export.export(f)(x, y)
        x, y = normal(0, 8, 300), normal(1, 300, 40)
        assert close(exported.call(x, y), f(x, y), terms=300)


@pytest.mark.parametrize("scheme", ["int8:group=32:dynamic", "mxfp8:dynamic"])
def test_blocks_along_an_axis_of_symbolic_size_are_refused(scheme):
    policy = jqx.Policy([jqx.Rule(activation=scheme)])
    f = jax.jit(jqx.convert(lambda p, x: x.T @ x, policy, "dynamic"))
    with pytest.raises(ValueError, match=r"per_group: axis \d has a symbolic size") as info:
        export.export(f)((), batch("t", K))
    assert "export with a known size" in str(info.value)


D, V = 16, 32
PARAMS = {
    "embed": normal(0, V, D),
    "q": normal(1, D, D) / 4,
    "k": normal(2, D // 2, D) / 4,
    "out": normal(3, D, 8) / 4,
}
X = normal(4, 4, 6, D)
IDS = jnp.arange(24).reshape(4, 6) % V


def rotary(h):
    a, b = h[..., : D // 2], h[..., D // 2 :]
    angles = (
        jnp.arange(h.shape[1], dtype=jnp.float32)[None, :, None]
        * jnp.linspace(0.1, 1, D // 2)[None, None]
    )
    return jnp.concatenate(
        [a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)], -1
    )


def interleaved(h):
    return jnp.stack([h[..., 0::2], -h[..., 1::2]], -1).reshape(h.shape)


def masked(h):
    n = h.shape[1]
    visible = jnp.tril(jnp.ones((1, n, n), bool))
    return jnp.where(visible, h @ jnp.swapaxes(h, 1, 2), -1e9) @ h


def over_heads(h):
    heads = h.reshape(*h.shape[:2], 4, D // 4)
    return (heads[:, :, :2] + heads[:, :, 2:]).repeat(2, 2).reshape(h.shape)


IDIOMS = {
    "first channels": lambda h: jnp.tile(h[..., : D // 2], 2),
    "last token": lambda h: h + h[:, -1][:, None],
    "first token": lambda h: h - h[:, :1],
    "every second token": lambda h: h[:, ::2],
    "reversed channels": lambda h: h[..., ::-1],
    "all but the last": lambda h: h[:, :-1],
    "newaxis and ellipsis": lambda h: h[:, None, ..., 1:2] * h[:, None],
    "split": lambda h: jnp.concatenate(jnp.split(h, 4, -1)[::-1], -1),
    "take_along_axis": lambda h: h * jnp.take_along_axis(h, jnp.argmax(h, -1, keepdims=True), -1),
    "rows by argmax": lambda h: h + h[jnp.arange(h.shape[0]), jnp.argmax(h[..., 0], 1)][:, None],
    "columns by a list": lambda h: h[..., jnp.array([*range(1, D), 0])],
    "halves of rotary embeddings": rotary,
    "pairs of rotary embeddings": interleaved,
    "causal mask": masked,
    "heads": over_heads,
    "roll": lambda h: h + jnp.roll(h, 1, 1),
    "jitted": jax.jit(lambda h: h.at[..., 0].set(h[..., 1])),
    "remat": jax.checkpoint(lambda h: h[..., ::-1] + h[:, -1:]),
    "cond": lambda h: lax.cond(h[0, 0, 0] > 0, lambda h: h[..., ::-1], lambda h: 2 * h, h),
    "scan": lambda h: lax.scan(lambda c, x: (c + x[..., :1], c[:, ::-1]), h, h[None])[1][0],
    "while": lambda h: lax.fori_loop(0, 2, lambda i, c: c[..., ::-1] + h[:, -1:, :1], h),
    "vmap": lambda h: jax.vmap(lambda row: row[-1:] + row)(h),
}


def indexing(*names):
    """A function that indexes activations in some ways before and between contractions."""

    def f(p, x, tokens):
        h = jnp.take(p["embed"], tokens[:, :-1], axis=0).sum(1, keepdims=True) + x[..., ::-1]
        h = jnp.tanh(h @ p["q"])
        ways = [(IDIOMS[name](h)[..., : D // 2] @ p["k"])[..., ::-1] for name in names]
        h, _ = lax.scan(lambda c, w: (jnp.tanh((c @ w)[..., ::-1]), None), ways[0], p["q"][None])
        return ways, jax.checkpoint(lambda h: h[:, -1:] @ p["out"] + h[..., :8])(h)

    return f


def symbolic(*arrays):
    """Stand-ins whose first two sizes are symbolic."""
    sizes = export.symbolic_shape("n, t", constraints=["n >= 2", "t >= 3"])
    return [jax.ShapeDtypeStruct((*sizes, *x.shape[2:]), x.dtype) for x in arrays]


@pytest.mark.parametrize("name", IDIOMS)
def test_a_plan_of_concrete_sizes_is_the_plan_of_symbolic_sizes(name):
    plan = jqx.make_plan(indexing(name), jqx.presets.w8a8_dynamic(tables="int8"))
    concrete = plan(PARAMS, X, IDS)
    abstract = plan(PARAMS, *symbolic(X, IDS))
    assert concrete.signature == abstract.signature
    assert [x.address for x in concrete.sites] == [x.address for x in abstract.sites]
    assert len(concrete.sites) == 5 and "gather" in {x.op for x in concrete.sites}


def test_what_ptq_returns_is_exported_with_symbolic_sizes_and_runs_at_two():
    quantize = jqx.ptq(
        indexing(*IDIOMS),
        jqx.presets.w8a8(tables="int8"),
        jqx.algorithms.nearest(),
        target=False,
        progress=False,
    )
    quantized = quantize(PARAMS, [(X, IDS)])
    f = jax.jit(quantized.function)
    exported = export.export(f)(quantized.params, *symbolic(X, IDS))
    for args in ((X, IDS), (normal(5, 2, 9, D), IDS.reshape(-1)[:18].reshape(2, 9))):
        actual, expected = exported.call(quantized.params, *args), f(quantized.params, *args)
        for name, a, b in zip(IDIOMS, actual[0], expected[0], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=name)


def repeated(x, w):
    return jnp.broadcast_to(w[None], (x.shape[0], *w.shape))


def of_repeated_weights(p, x):
    """Static indices into weights that are repeated for each row of a batch."""
    tile = [repeated(x, weight) for weight in p]
    return [
        jnp.einsum("bd,bdh->bh", x, tile[0][:, 1]),
        jnp.einsum("bd,bdh->bh", x, tile[1][:, -1, ..., 2:]),
        jnp.einsum("bd,bdh->bh", x[:, :4], tile[2][:, 0, 4:8]),
        jnp.einsum("bd,bkdh->bkh", x, tile[3][:, 1:]),
        jax.vmap(lambda x, w: jnp.tanh(x @ w[1]))(x, tile[4]),
        jax.jit(lambda x, w: jnp.einsum("bd,bdh->bh", x, w[:, 2]))(x, tile[5]),
    ]


@pytest.mark.parametrize("preset", ["w8a8_dynamic", "w4a16"])
def test_static_indices_into_repeated_weights_are_views_for_symbolic_sizes(preset):
    p, x = [normal(i, 3, D, 8) for i in range(6)], normal(6, 4, D)
    policy, nearest = getattr(jqx.presets, preset)(), jqx.algorithms.nearest()
    q = jqx.ptq(of_repeated_weights, policy, nearest, progress=False)(p, [x])
    assert len(q.plan.sites) == 6 and not q.plan.skipped
    rows = jax.ShapeDtypeStruct((*export.symbolic_shape("b"), D), x.dtype)
    actual = export.export(jax.jit(q.function))(q.params, rows).call(q.params, x)
    for a, b in zip(actual, jax.jit(q.function)(q.params, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_indices_that_are_views_for_known_sizes_alone_are_refused():
    p, x = normal(0, 3, D, 8), normal(1, 4, D)
    rows = jax.ShapeDtypeStruct((*export.symbolic_shape("b"), D), x.dtype)
    policy = jqx.Policy([jqx.Rule(weight="int8", tables="weight")])
    for index in (slice(None, None, -1), slice(None, None, 2), jnp.array([1, 2])):

        def f(p, x, index=index):
            return jnp.einsum("bd,bkdh->bkh", x, repeated(x, p)[:, index])

        plan = jqx.make_plan(f, policy)(p, x)
        with pytest.raises(ValueError, match="the plan was made for another function"):
            export.export(jax.jit(jqx.convert(f, plan)))(p, rows)


def reads(p, x, i):
    """A function in which reads come before, between and inside of contractions."""
    h = jnp.take_along_axis(x, i, 1) @ p["a"]
    h = h[jnp.arange(3), jnp.argmax(h, 1)][:, None] + h

    def step(c, w):
        return jnp.tanh(jnp.take_along_axis(c, i[:, :4], 1) @ w), None

    h, _ = lax.scan(step, h, p["s"])
    return jnp.take(p["t"], i[:, 0], axis=0) + h


def test_plans_of_files_in_which_reads_count_in_addresses_hold():
    """The file was written once by jqx 0.1, and is not to be written again."""
    file = pathlib.Path(__file__).with_name("plan_that_counts_reads.json")
    old = jqx.Plan.from_dict(json.loads(file.read_text()))
    params = {"a": normal(0, 6, 4), "s": normal(1, 2, 4, 4), "t": normal(2, 8, 4)}
    args = params, normal(3, 3, 6), jnp.arange(18).reshape(3, 6) % 4
    new = jqx.make_plan(reads, jqx.presets.w8a8_dynamic(tables="int8"))(*args)
    assert [x.name for x in old.sites] == [x.name for x in new.sites]
    assert all(a.address != b.address for a, b in zip(old.sites, new.sites, strict=True))
    actual, expected = (
        jax.jit(jqx.convert(reads, plan))(jqx.quantize_params(params, plan), *args[1:])
        for plan in (old, new)
    )
    np.testing.assert_array_equal(actual, expected)
    scale = jqx.ChannelMap(scale=jnp.full((2, 4), 2.0))
    key = old.sites[1].operands[0].key
    a, b = (jqx.map_channels(reads, plan, {key: scale})(*args) for plan in (old, new))
    np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="another function"):
        jqx.convert(lambda p, x, i: reads(p, x, i) @ p["a"].T, old)(*args)
