"""Rows that are left out. NaN and infinities are an error that names site and batch, or their rows
are left out, as if the batches did not have them. Rows of padding decide no scale, and rows of
other lengths and tokens join padded ones.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jqx
import jqx.linen
import jqx.nnx
from jqx import algorithms, presets
from jqx.extend import absmax, hessian, mean

from ..arrays import normal, on_device
from ..models.modules import LinenLayers, NnxLayers
from ..watched import Watched

D, L = 16, 2
ROWS = 24


def plain(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


def scanned(p, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0]


def branches(p, x):
    h = jax.lax.cond(x.shape[0] > jnp.float32(0), lambda x: x @ p["a"], lambda x: x @ p["b"], x)
    return jax.nn.sigmoid(h) @ p["c"]


def looped(p, x):
    return jax.lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ p["a"]), x) @ p["b"]


def experts(p, x):
    """Rows that are sorted by expert; a NaN goes to the first."""
    which = jnp.argmax(x @ p["router"], -1)
    order = jnp.argsort(which)
    rows, sizes = x[order], jnp.bincount(which, length=3).astype(jnp.int32)
    h = jax.nn.gelu(jax.lax.ragged_dot(rows, p["up"], sizes))
    return jnp.zeros_like(h).at[order].set(h) @ p["down"]


def masked(p, x):
    """Attention of each row to fixed tokens: its mask holds negative infinities."""
    scores = jnp.where(jnp.arange(D) < 9, x @ p["a"], -jnp.inf)
    return jax.nn.softmax(scores) @ p["b"]


def online(p, x):
    """The same, key by key: the largest score begins at negative infinity."""

    def step(carry, key):
        most, total, out = carry
        score, value = key
        now = jnp.maximum(most, score)
        scale, weight = jnp.exp(most - now), jnp.exp(score - now)
        return (now, total * scale + weight, out * scale + weight * value[None]), None

    start = jnp.full((len(x), 1), -jnp.inf), jnp.zeros((len(x), 1)), jnp.zeros((len(x), D))
    keys = (x @ p["a"]).T[:, :, None], p["b"]
    (_, total, out), _ = jax.lax.scan(step, start, keys)
    return (out / total) @ p["c"]


FORMS = {
    "plain": (plain, {"a": (D, D), "b": (D, D)}),
    "scan": (scanned, {"layers": (L, D, D)}),
    "cond": (branches, {"a": (D, D), "b": (D, D), "c": (D, D)}),
    "loop": (looped, {"a": (D, D), "b": (D, D)}),
    "experts": (experts, {"router": (D, 3), "up": (3, D, D), "down": (D, D)}),
    "masked": (masked, {"a": (D, D), "b": (D, D)}),
    "online": (online, {"a": (D, D), "b": (D, D), "c": (D, D)}),
}
PARAMS = {
    form: {key: normal(i, *shape) / 3 for i, (key, shape) in enumerate(shapes.items())}
    for form, (_, shapes) in FORMS.items()
}
X = [np.asarray(normal(seed, ROWS, D)) for seed in (7, 8, 9)]
KINDS = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}
PLACES = {"first": 0, "one": 1, "last": 2}


def spoilt(kind, index, dtype=np.float32):
    """Batches of which one has three more rows with such a value; and without these rows."""
    batches, bad = [x.astype(dtype) for x in X], X[0][:3].copy()
    bad[range(3), [0, 5, D - 1]] = KINDS.get(kind)
    if kind == "float16":  # its products overflow
        bad = np.full((3, D), 60000.0)
    rows = batches[index]
    batches[index] = np.concatenate([rows[:5], bad.astype(dtype), rows[5:]])
    return [on_device(x) for x in batches], [on_device(x.astype(dtype)) for x in X]


def every(p, x):
    return {form: f(p[form], x) for form, (f, _) in FORMS.items()}


POLICY = presets.w8a8(activation={"calibrator": jqx.calibrators.minmax})
OBSERVERS = {
    ".*": (hessian, mean, absmax),
    "plain/.*": jqx.calibrators.percentile,
}


def observed(plan, batch, mode):
    options = {"observers": OBSERVERS, "on_nonfinite": mode}
    return jqx.calibrate(every, plan, **options)(PARAMS, batch)[1]


@pytest.fixture(scope="module")
def calibration():
    plan = jqx.make_plan(every, POLICY)(PARAMS, X[0])
    return plan, jax.jit(functools.partial(observed, plan), static_argnums=1)


def assert_alike(a, b):
    """Whether statistics are the same up to float sums, and to counts as floats."""
    assert set(a) == set(b)
    for key in a:
        for name, x, y in zip(a[key]._fields, a[key], b[key], strict=True):
            got, want = (np.asarray(z, np.float64) for z in (x, y))
            # Sums of rows in another order: an ulp of the largest for each of 24 rows.
            most = np.abs(want[np.isfinite(want)]).max(initial=1)
            got, want = np.broadcast_arrays(got, want)
            np.testing.assert_allclose(got, want, 0, 24 * 2**-23 * most, err_msg=f"{key} {name}")


def test_rows_left_out_are_as_if_they_were_not_there(calibration):
    _, seen = calibration
    want = seen(X[1], "error")
    assert not any(np.asarray(x)[..., :2].any() for x in want.flags.values())
    for kind in KINDS:
        bad, _ = spoilt(kind, 1)
        result = seen(bad[1], "ignore")
        assert_alike(result, want)
        for form in FORMS:
            first = next(x for k, x in result.left_out.items() if k.startswith(f"{form}/"))
            assert np.asarray(first)[..., :2].sum() >= 3, (kind, form)


def test_flags_merge_and_are_an_error_of_scales():
    plan, params = jqx.make_plan(plain, presets.w8a8())(PARAMS["plain"], X[0]), PARAMS["plain"]
    calibrated = jax.jit(jqx.calibrate(plain, plan))
    _, good = calibrated(params, X[1])
    _, bad = calibrated(params, X[1] + np.where(np.arange(ROWS) < 3, np.inf, 0)[:, None])
    merged = jqx.merge_stats(plan, good, bad)
    assert merged.flags["a:dot_general:lhs"].tolist() == [0, 3, 2 * ROWS, 2 * ROWS]
    with pytest.raises(ValueError, match=r"there is infinity(.|\n)+3 rows with infinity at a:"):
        jqx.affines(plan, merged)
    with pytest.raises(ValueError, match=r"there is infinity(.|\n)+fix:"):
        jqx.quantize_params(params, plan, algorithm=algorithms.nearest(), stats=merged)
    without_flags = dict(merged.items())
    with pytest.raises(ValueError, match=r"affines: an activation is not finite"):
        jqx.affines(plan, without_flags)


def test_rows_of_any_length_are_counted():
    """Long rows are reduced in parts; each row has one value besides 0, in any of its places."""
    sizes = 100, 127, 128, 192, 1000, 1024
    f = lambda p, x: {n: (x[n] @ p[n], p[n].T @ x[n].T) for n in x}  # noqa: E731
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, 1e-30, -3e38, 0.0, -0.0])
    for dtype in (jnp.float32, jnp.bfloat16):
        kinds = values[np.arange(1200) % 8]
        x, params = {}, {}
        for size in sizes:
            values_of_rows = np.zeros((1200, size), np.float32)
            values_of_rows[np.arange(1200), np.arange(1200) % size] = kinds
            x[f"n{size}"] = jnp.asarray(values_of_rows).astype(dtype)
            params[f"n{size}"] = jnp.ones((size, 2), dtype)
        plan = jqx.make_plan(f, presets.w8a8())(params, x)
        result = jax.jit(lambda p, x, plan=plan: jqx.calibrate(f, plan)(p, x)[1].flags)(params, x)
        assert len(result) == 2 * len(sizes)
        for key, each in result.items():
            assert each.tolist() == [300, 300, 900, 1200], key


def test_the_error_names_site_batch_and_kind():
    f, plan = plain, jqx.make_plan(plain, presets.w8a8())(PARAMS["plain"], X[0])
    for kind, name in (("inf", "infinity"), ("nan", "NaN")):
        batches, _ = spoilt(kind, 2)
        match = rf"there is {name} in(.|\n)+batch 2: 3 rows with {name} at a:dot_general:lhs"
        with pytest.raises(ValueError, match=match) as info:
            jqx.calibrate_batches(f, plan, PARAMS["plain"], batches, progress=False)
        assert {"NaN", "infinity"} - {name} not in str(info.value).split()


def test_overflow_of_float16_is_named_where_it_is_seen():
    params = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS["plain"])
    batches, good = spoilt("float16", 0, np.float16)
    plan = jqx.make_plan(plain, presets.w8a8())(params, good[0])
    with pytest.raises(ValueError, match=r"batch 0: 3 rows with \w+ at b:dot_general:lhs"):
        # tanh makes overflow finite: here it is divided by itself.
        g = lambda p, x: (h := x @ p["a"], (h / jnp.abs(h)) @ p["b"])[1]  # noqa: E731
        jqx.calibrate_batches(g, plan, params, batches, progress=False)
    options = {"progress": False, "on_nonfinite": "ignore"}
    result, want = (
        jqx.calibrate_batches(plain, plan, params, x, **options) for x in (batches, good)
    )
    key = "b:dot_general:lhs"  # the first site sees finite rows
    assert result[key].largest.tolist() == want[key].largest.tolist()


def test_weights_that_are_not_finite_are_an_error_and_other_leaves_are_not():
    f = lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"] + p["mask"]  # noqa: E731
    params = {"w": normal(0, D, D), "v": normal(1, D, D), "mask": jnp.full((1, D), -jnp.inf)}
    plan = jqx.make_plan(f, jqx.Policy({"w": "int8"}))(params, X[0])
    jqx.quantize_params(params, plan)
    spoilt = {**params, "v": params["v"].at[0, 0].set(jnp.inf)}
    jqx.quantize_params(spoilt, plan)  # no site of the plan reads it
    for value, name in ((jnp.inf, "1 infinite"), (-jnp.inf, "1 infinite"), (jnp.nan, "1 NaN")):
        bad = {**params, "w": params["w"].at[3, 4].set(value)}
        match = rf"the weight 'w' is not finite(.|\n)+{name} of {D * D} elements"
        for call in (
            lambda bad=bad: jqx.quantize_params(bad, plan),
            lambda bad=bad: jqx.quantize_params(bad, plan, algorithm=algorithms.nearest()),
            lambda bad=bad: jqx.ptq(f, jqx.Policy({"w": "int8"}), progress=False)(bad, [X[0]]),
        ):
            with pytest.raises(ValueError, match=match):
                call()


CALIBRATORS = {
    "absmax": jqx.calibrators.absmax,
    "delayed": jqx.calibrators.delayed,
    "minmax": jqx.calibrators.minmax,
    "mse": jqx.calibrators.mse,
    "percentile": jqx.calibrators.Percentile(90),
}
"""By the name of the layer whose inputs they calibrate."""


class LinenHeads(nn.Module):
    @nn.compact
    def __call__(self, x):
        return [nn.Dense(2, name=name)(x) for name in CALIBRATORS]


class NnxHeads(nnx.Module):
    def __init__(self):
        for name in CALIBRATORS:
            setattr(self, name, nnx.Linear(D, 2, rngs=nnx.Rngs(0)))

    def __call__(self, x):
        return [getattr(self, name)(x) for name in CALIBRATORS]


def calibrated_linen(policy, batches):
    """Returns the call that converts a module whose statistics come from batches."""
    module = jqx.linen.quantize(LinenHeads(), policy, mode=jqx.linen.Mode.CALIBRATE)
    variables = jax.jit(LinenHeads().init)(jax.random.key(0), batches[0])
    for x in batches:
        variables = {**variables, **module.apply(variables, x, mutable=["quant_stats"])[1]}
    integers = module.clone(mode=jqx.linen.Mode.CONVERT)
    return lambda: jqx.linen.convert(integers, variables, batches[0])


def averaged_linen(policy, batches):
    """The same, with the moving average of the statistics that have one."""
    module = jqx.linen.quantize(LinenHeads(), policy, mode=jqx.linen.Mode.CALIBRATE)
    variables = jax.jit(LinenHeads().init)(jax.random.key(0), batches[0])
    stats, *others = (
        module.apply(variables, x, mutable=["quant_stats"])[1]["quant_stats"] for x in batches
    )
    mix = lambda a, b: jqx.calibrators.moving_average(a, b, 0.5)  # noqa: E731
    for other in others:
        stats = {
            name: mix(value, other[name])
            if name in ("absmax", "delayed", "minmax")
            else other[name]
            for name, value in stats.items()
        }
    integers = module.clone(mode=jqx.linen.Mode.CONVERT)
    return lambda: jqx.linen.convert(integers, {**variables, "quant_stats": stats}, batches[0])


def calibrated_nnx(policy, batches):
    model = jqx.nnx.quantize(NnxHeads(), policy, mode=jqx.nnx.Mode.CALIBRATE)
    for x in batches:
        model(x)
    return lambda: jqx.nnx.convert(model, batches[0])


@pytest.mark.many("calibrated")
@pytest.mark.parametrize("kind", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("calibrated", [calibrated_linen, calibrated_nnx, averaged_linen])
def test_statistics_of_modules_keep_what_is_not_finite(calibrated, kind):
    """They have no flags. Some calibrators clip an infinity, and have a finite scale."""
    int8 = lambda c: jqx.QSpec(jnp.int8, calibrator=c)  # noqa: E731
    policy = jqx.Policy(
        {
            f"{name}/.*": jqx.Rule(weight="int8", activation=int8(x))
            for name, x in CALIBRATORS.items()
        }
    )
    x = normal(0, 64, D)
    averaged = ["absmax", "delayed", "minmax"] if calibrated is averaged_linen else CALIBRATORS
    call = calibrated(policy, [x, x.at[3, 2].set(float(kind)), x])
    name = "NaN" if kind == "nan" else "infinity"
    others = rf"{name}[^\n]+, and at {len(averaged) - 1} more operands"
    with pytest.raises(ValueError, match=rf"there is {name} in an operand(.|\n)+{others}"):
        call()


def test_other_values_of_the_option_are_refused():
    module, model = nn.Dense(D), nnx.Linear(D, D, rngs=nnx.Rngs(0))
    plan = jqx.make_plan(plain, presets.w8a8())(PARAMS["plain"], X[0])
    for call in (
        lambda: jqx.calibrate(plain, plan, on_nonfinite="skip"),
        lambda: jqx.calibrate_batches(plain, plan, PARAMS["plain"], [X[0]], on_nonfinite=True),
        lambda: jqx.ptq(plain, presets.w8a8(), on_nonfinite=None),
        lambda: jqx.linen.ptq(module, presets.w8a8(), on_nonfinite="skip")({"params": {}}, [X[0]]),
        lambda: jqx.nnx.ptq(model, presets.w8a8(), on_nonfinite="skip")([X[0]]),
    ):
        with pytest.raises(ValueError, match=r"`on_nonfinite` is unknown(.|\n)+'ignore'"):
            call()


def test_a_weight_of_rows_reaches_static_scales():
    """Padding is the token 0, whose row in the table is large."""
    table = normal(0, 8, D).at[0].set(100.0)
    f = lambda p, tokens: p["table"][tokens] @ p["w"]  # noqa: E731
    params = {"table": table, "w": normal(1, D, D)}
    tokens, is_token = on_device(np.array([[3, 5, 0, 0], [1, 0, 0, 0]])), lambda x: x != 0
    policy = jqx.Policy({"w": presets.w8a8(), ".*": "float"})
    plan = jqx.make_plan(f, policy)(params, tokens)
    largest = float(jnp.abs(table[jnp.array([1, 3, 5])]).max())
    stats = jqx.calibrate_batches(f, plan, params, [tokens], weight=is_token, progress=False)
    assert float(stats["w:dot_general:lhs"].largest[0, 0, 0]) == largest
    for options in (
        {"algorithm": algorithms.nearest(), "weight": is_token},
        {"algorithm": algorithms.bias_correction(weight=is_token)},
    ):
        result = jqx.ptq(f, policy, progress=False, **options)(params, [tokens])
        scale = result.affines["w:dot_general:lhs"].scale.item()
        np.testing.assert_allclose(scale, largest / 127, rtol=1e-6)


def test_a_site_that_saw_only_zeros_is_named():
    f = lambda p, x: x @ p["a"] + jnp.where(x > 100, x, 0.0) @ p["b"]  # noqa: E731
    params = PARAMS["plain"]
    plan = jqx.make_plan(f, presets.w8a8())(params, X[0])
    _, stats = jqx.calibrate(f, plan)(params, X[0])
    match = r"only zeros(.|\n)+given:    b:dot_general:lhs\n(.|\n)+dynamic=True"
    with pytest.warns(UserWarning, match=match):
        jqx.affines(plan, stats)


def test_inputs_of_all_batches_count_in_any_order():
    x = on_device(X[0])
    for batches in ([x[:1], x], [x[:0], x]):
        result = jqx.ptq(lambda p, x: x @ p, jqx.Policy({".*": "int4"}), progress=False)
        codes = result(PARAMS["plain"]["a"], batches).report.codes
        assert codes.startswith("gptq("), codes
    few = jqx.ptq(lambda p, x: x @ p, jqx.Policy({".*": "int4"}), progress=False)
    assert "3 inputs of 16 channels are too few" in few(PARAMS["plain"]["a"], [x[:3]]).report.codes


def test_matrices_that_were_rounded_for_want_of_inputs_are_named():
    f = lambda p, x: jnp.einsum("erd,edf->erf", x, p)  # noqa: E731
    x = normal(3, 3, ROWS, D).at[2].set(jnp.nan)
    x = x.at[1, 4:].set(jnp.nan)
    quantize = jqx.ptq(
        f, jqx.Policy({".*": "int4"}), algorithms.gptq(), on_nonfinite="ignore", progress=False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = quantize(normal(4, 3, D, D), [x])
    texts = "\n".join(str(each.message) for each in caught)
    assert "4 inputs of 16 channels are too few" in texts and "no batch has reached it" in texts
    assert "; 2 of 3 matrices rounded to nearest" in result.report.codes
    nearest = jqx.ptq(f, jqx.Policy({".*": "int4"}), algorithms.nearest(), progress=False)
    rounded = nearest(normal(4, 3, D, D), [x]).params
    np.testing.assert_array_equal(result.params.codes[1:], rounded.codes[1:])


def quantized(form, policy, algorithm, batches, **options):
    """What `ptq` makes of one of the forms."""
    options = {"progress": False, "target": False, **options}
    if form == "linen":
        layers = {k: {"kernel": w, "bias": jnp.zeros(D)} for k, w in PARAMS["plain"].items()}
        module = LinenLayers((D, D), jnp.tanh)
        return jqx.linen.ptq(module, policy, algorithm, **options)({"params": layers}, batches)
    if form == "nnx":
        model = NnxLayers((D, D, D), jnp.tanh)
        return jqx.nnx.ptq(model, policy, algorithm, **options)(batches)
    return jqx.ptq(FORMS[form][0], policy, algorithm, **options)(PARAMS[form], batches)


ALGORITHMS = {
    "default": lambda: None,
    "nearest": algorithms.nearest,
    "smooth_quant": algorithms.smooth_quant,
    "awq": lambda: algorithms.awq(steps=3),
    "equalize": algorithms.equalize,
    "rotate": algorithms.rotate,
    "gptq": lambda: algorithms.gptq(propagation="gptaq"),
    "gptq in one pass": lambda: algorithms.gptq(sequential=False),
    "adaround": lambda: algorithms.adaround(steps=5),
    "auto_round": lambda: algorithms.auto_round(steps=3),
    "bias_correction": algorithms.bias_correction,
    "eora": lambda: algorithms.eora(rank=2),
    "loftq": lambda: algorithms.loftq(rank=2, rounds=1),
}
PRESETS = {
    "w8a8": presets.w8a8,
    "w8a8_dynamic": presets.w8a8_dynamic,
    "w4a16": lambda: presets.w4a16(block=8),
    "w4a4": presets.w4a4,
    "fp8": presets.fp8,
}


def check(form, preset, algorithm, kind, batch):
    """The error names the batch, and a result without these rows is the same as with none."""
    bad, good = spoilt(kind, PLACES[batch])
    policy, chosen_algorithm = PRESETS[preset](), ALGORITHMS[algorithm]()
    try:
        want = quantized(form, policy, chosen_algorithm, good)
    except (ValueError, NotImplementedError):
        return  # the algorithm has nothing to do in this function
    try:
        result = quantized(form, policy, chosen_algorithm, bad)
    except ValueError as error:
        assert f"batch {PLACES[batch]}: " in str(error), error
    else:  # nothing was observed
        jax.tree.map(np.testing.assert_array_equal, result.params, want.params)
        return
    with pytest.warns(UserWarning, match="rows that are not finite were left out"):
        result = quantized(form, policy, chosen_algorithm, bad, on_nonfinite="ignore")
    for a, b in zip(jax.tree.leaves(result.affines), jax.tree.leaves(want.affines), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    y, z = (np.asarray(q(good[0]), np.float64) for q in (result, want))
    # Float sums in another order may round single weights to another code.
    assert np.linalg.norm(y - z) <= 0.02 * np.linalg.norm(z)


FEW = [
    ("plain", "w8a8", "nearest", "inf", "first"),
    ("plain", "w4a16", "gptq", "nan", "last"),
]


@pytest.mark.parametrize("case", FEW, ids="-".join)
def test_ptq_leaves_rows_out_or_raises(case):
    check(*case)


SLOW = [
    ("scan", "w4a16", "default", "-inf", "one"),
    ("plain", "w8a8", "bias_correction", "nan", "one"),
    ("experts", "w4a16", "gptq", "nan", "first"),
    ("linen", "w4a16", "auto_round", "inf", "last"),
    ("nnx", "w4a4", "rotate", "nan", "one"),
    ("plain", "w8a8", "rotate", "nan", "one"),
    ("plain", "w8a8", "rotate", "-inf", "one"),
    ("plain", "w8a8", "eora", "inf", "one"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids="-".join)
def test_ptq_leaves_rows_out_or_raises_in_more_forms(case):
    check(*case)


@pytest.mark.sweep
@pytest.mark.parametrize("batch", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("form", [*FORMS, "linen", "nnx"])
def test_ptq_leaves_rows_out_or_raises_everywhere(form, preset, algorithm, kind, batch):
    check(form, preset, algorithm, kind, batch)


# Padding

SENTENCES, LENGTH, WORDS, WIDTH = 6, 12, 50, 16
W8A8 = jqx.presets.w8a8()
RNG = np.random.default_rng(0)
ENCODER = {
    name: RNG.normal(size=shape).astype(np.float32)
    for name, shape in {"table": (WORDS, WIDTH), "up": (WIDTH, 24), "down": (24, 8)}.items()
}
ENCODER["table"][45] *= 100  # of padding
ENCODER = jax.tree.map(on_device, ENCODER)
SIZES = np.array([3, 12, 7, 5, 9, 4])
MASK = np.arange(LENGTH) < SIZES[:, None]
TOKENS = np.where(MASK, RNG.integers(3, 40, MASK.shape), 45).astype(np.int32)
TOKENS[:, 0] = 1
TOKENS[np.arange(SENTENCES), SIZES - 1] = 2


def encoder(params, tokens, mask):
    """Attends to tokens that are not padding, and pools them."""
    x = params["table"][tokens]
    scores = jnp.where(mask[:, None], jnp.einsum("btd,bsd->bts", x, x) / 40, -1e30)
    x = (x + jax.nn.softmax(scores, -1) @ x) @ params["up"]
    x = jax.nn.relu(x) @ params["down"]
    return jnp.where(mask[..., None], x, 0).sum(1) / mask.sum(1, keepdims=True, dtype=jnp.float32)


def nearest(f, batches, **options):
    return jqx.ptq(f, W8A8, jqx.algorithms.nearest(), progress=False, **options)(ENCODER, batches)


INPUTS = {
    "bool": (encoder, lambda tokens, mask: (tokens, mask)),
    "floats before": (lambda p, m, t: encoder(p, t, m > 0), lambda t, m: (m.astype(np.float32), t)),
    "a dict": (
        lambda p, x: encoder(p, x["ids"], x["mask"] == 1),
        lambda t, m: {"ids": t, "mask": m.astype(np.int32), "types": np.zeros_like(t)},
    ),
}


@pytest.mark.parametrize("form", INPUTS)
def test_padding_decides_no_scale(form):
    """A batch without padding comes first; the mask is found in the next one."""
    f, of = INPUTS[form]
    whole = TOKENS.copy()
    whole[:, 1:] = 5
    batches = [of(whole, np.ones_like(MASK)), of(TOKENS, MASK)]
    result = nearest(f, batches)
    name = {"bool": "1", "floats before": "0", "a dict": "0/mask"}[form]
    expected = f"nearest(); rows where input {name} is 0 are padding, and left out"
    assert result.report.codes == expected
    leaves = jax.tree.leaves_with_path((of(TOKENS, MASK),))
    index = [np.array_equal(x, MASK) for _, x in leaves].index(True)
    weighted = nearest(f, batches, weight=lambda *x: jax.tree.leaves(x)[index])
    jax.tree.map(np.testing.assert_array_equal, result.affines, weighted.affines)
    every = nearest(f, batches, weight=lambda *x: jnp.ones_like(jax.tree.leaves(x)[index]))
    key = next(iter(result.affines))
    assert result.affines[key].scale < every.affines[key].scale / 2


NO_PADDING = {
    "types of tokens": (
        lambda p, t, m: encoder(p, t, jnp.ones_like(m, bool)) + m.sum(dtype=jnp.float32),
        MASK,
    ),
    "an argument that nothing reads": (
        lambda p, t, m: encoder(p, TOKENS, MASK) + 0 * t.sum(dtype=jnp.float32),
        MASK,
    ),
    "all ones": (encoder, np.ones_like(MASK)),
    "a weight in a sum": (
        lambda p, t, m: (p["table"][t] * (m.astype(jnp.float32) + 1)[..., None]).sum(1) @ p["up"],
        MASK,
    ),
}


@pytest.mark.parametrize("case", NO_PADDING)
def test_other_arrays_of_zeros_and_ones_are_no_masks(case):
    f, mask = NO_PADDING[case]
    assert nearest(f, [(TOKENS, mask)]).report.codes == "nearest()"


def test_parameters_and_inputs_may_hold_what_is_no_array():
    """A function among the parameters, as in Equinox, and a flag among the inputs."""

    def f(p, tokens, mask, is_pooled):
        x = p["relu"](encoder(p, tokens, mask)) if is_pooled else p["table"][tokens]
        return x @ p["up"] if not is_pooled else x

    params = {**ENCODER, "relu": jax.nn.relu}
    quantize = jqx.ptq(f, W8A8, jqx.algorithms.nearest(), progress=False)
    assert "input 1 is 0" in quantize(params, [(TOKENS, MASK, True)]).report.codes


def test_an_array_is_tried_once():
    calls = []

    def f(p, tokens, types):
        jax.debug.callback(lambda: calls.append(None))
        return p["table"][tokens] @ p["up"] + types.astype(jnp.float32)[..., None]

    jqx.ptq(f, W8A8, jqx.algorithms.nearest(), progress=False)(ENCODER, [(TOKENS, MASK)] * 2)
    jax.effects_barrier()
    one = len(calls)
    jqx.ptq(f, W8A8, jqx.algorithms.nearest(), progress=False)(ENCODER, [(TOKENS, MASK)] * 5)
    jax.effects_barrier()
    assert len(calls) - one == one + 3  # three more batches are calibrated


def test_the_weight_of_an_algorithm_stays():
    weight = lambda tokens, mask: mask & (tokens != 7)  # noqa: E731
    algorithm = jqx.algorithms.smooth_quant(weight=weight)
    result, expected = (
        jqx.ptq(encoder, W8A8, algorithm, weight=x, progress=False)(ENCODER, [(TOKENS, MASK)])
        for x in (None, weight)
    )
    assert "padding" not in result.report.codes
    jax.tree.map(np.testing.assert_array_equal, result.affines, expected.affines)


@pytest.mark.parametrize("is_left", [True, False])
def test_rows_of_other_lengths_and_tokens_join_padded_rows(is_left):
    """32 parts of rows, and 32 with random tokens of the table; rows begin and end as all do."""
    tokens, mask = (x if is_left else x[:, ::-1] for x in (TOKENS, MASK))
    first, last = (1, 2) if is_left else (2, 1)
    watched = Watched()
    ptq = jqx.ptq(encoder, W8A8, watched, own_text=True, progress=False)
    codes = ptq(ENCODER, [(tokens, mask)]).report.codes
    assert codes == (
        "Watched; rows where input 1 is 0 are padding, and left out; calibrated on 6 rows of the "
        "batches, 36 parts of them and 36 rows of random tokens"
    )
    np.testing.assert_array_equal(watched.batches[0][0], tokens)
    assert {x[0].shape for x in watched.batches} == {TOKENS.shape}
    others = [np.concatenate(x) for x in zip(*watched.batches[1:], strict=True)]
    rows = [t[m] for t, m in zip(*others, strict=True)]
    assert all((t[~m] == 45).all() for t, m in zip(*others, strict=True))
    assert all(m[0 if is_left else -1] for m in others[1])
    assert all(len(x) >= 3 and x[0] == first and x[-1] == last for x in rows)
    text = [" ".join(map(str, t[m])) for t, m in zip(tokens, mask, strict=True)]
    is_part = [any(" ".join(map(str, x[1:-1])) in row for row in text) for x in rows]
    assert all(is_part[:36]) and sum(is_part[36:]) < 18
    assert {len(x) for x in rows} >= {3, 4, 6}
    drawn = np.concatenate([x[1:-1] for x in rows[36:]])
    assert drawn.min() < 3 and drawn.max() > 45 and drawn.max() < WORDS


def test_default_algorithm_adds_rows_to_padded_ones():
    quantize = jqx.ptq(encoder, W8A8, progress=False)
    result = quantize(ENCODER, [(TOKENS, MASK)])
    assert "36 rows of random tokens" in result.report.codes
    alone = jqx.ptq(encoder, W8A8, own_text=False, progress=False)(ENCODER, [(TOKENS, MASK)])
    assert alone.report.codes.endswith("are padding, and left out")
