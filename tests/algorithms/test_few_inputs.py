"""What few, weighted and missing rows of inputs do: experts that few rows reached are left no worse
than rounded to nearest, padding has no part, and reports say which inputs are few or alike.
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx import algorithms
from jqx._src.algorithms.matrices import Drift, Matrix, corrected
from jqx.algorithms import adaround, gptq

from ..arrays import on_device
from ..models.layers import conv
from ..observers import test_weighted as weighted

D = 16
COUNTS = np.array([0, 1, 2, 3, 400, 640])
"""Rows that reach each expert in calibration."""

FEW, EXPERTS = COUNTS < D, len(COUNTS)
RNG = np.random.default_rng(3)
MIXED = RNG.normal(size=(D, D)) * np.exp(-np.arange(D) / 4)[:, None] * np.exp(RNG.normal(size=D))
"""Inputs have few directions, and channels of different magnitudes."""

OF_EXPERTS = {
    "gain": jnp.ones((1, D), jnp.float32),
    "up": on_device(RNG.normal(size=(EXPERTS, D, D)) / 4, jnp.float32),
    "down": on_device(RNG.normal(size=(EXPERTS, D, D)) / 4, jnp.float32),
}


def batch_of(counts):
    which = RNG.permutation(np.repeat(np.arange(EXPERTS), counts)).astype(np.int32)
    return on_device(RNG.normal(size=(len(which), D)) @ MIXED, jnp.float32), jnp.asarray(which)


CALIBRATION, TEST = batch_of(COUNTS), batch_of(np.full(EXPERTS, 256))
ROUTED = [tuple(x[:500] for x in CALIBRATION), tuple(x[500:] for x in CALIBRATION)]


def sorted_rows(p, x, which):
    order, sizes = jnp.argsort(which), jnp.bincount(which, length=EXPERTS).astype(jnp.int32)
    h = jax.nn.relu(lax.ragged_dot(x[order] * p["gain"], p["up"], sizes))
    y = lax.ragged_dot(h, p["down"], sizes)
    return jnp.zeros_like(y).at[order].set(y)


def masked(p, x, which):
    mine = (which[None] == jnp.arange(EXPERTS)[:, None])[..., None]
    h = jax.nn.relu(jnp.einsum("etk,ekn->etn", jnp.where(mine, x * p["gain"], 0), p["up"]))
    return jnp.einsum("etk,ekn->etn", h, p["down"]).sum(0)


def scanned(p, x, which):
    def expert(y, xs):
        i, up, down = xs
        h = jnp.where((which == i)[:, None], x * p["gain"], 0)
        return y + jax.nn.relu(h @ up) @ down, None

    each = jnp.arange(EXPERTS), p["up"], p["down"]
    return lax.scan(expert, jnp.zeros_like(x), each)[0]


FORMS = {"ragged": sorted_rows, "masked": masked, "scanned": scanned}
"""Rows sorted by expert; all rows at all experts, those of others as zeros; one after another."""

W4, W8A8 = jqx.Policy({".*": "int4:channel"}), jqx.presets.w8a8()
ALGORITHMS = {
    "gptq": (algorithms.gptq(), W4),
    "one_pass": (algorithms.gptq(sequential=False), W4),
    "adaround": (algorithms.adaround(steps=50), W4),
    "auto_round": (algorithms.auto_round(steps=20), W4),
    "bias_correction": (algorithms.bias_correction(), W4),
    "awq": (algorithms.awq(steps=8), W4),
    "awq_static": (algorithms.awq(steps=8), W8A8),
    "smooth_quant": (algorithms.smooth_quant(strength=0.85), W8A8),
    "chained": (algorithms.chain(algorithms.smooth_quant(strength=0.85), algorithms.gptq()), W8A8),
}
EXACT = "gptq", "one_pass", "adaround", "auto_round", "bias_correction"
"""What is left as rounding to nearest leaves it, bit by bit."""


def errors(function, y):
    """Of the rows of each expert, relative to their results in float."""
    x, which = TEST
    exact = np.asarray(function(OF_EXPERTS, x, which), np.float64)
    lost, which = np.asarray(y, np.float64) - exact, np.asarray(which)
    norms = lambda x: np.array([np.linalg.norm(x[which == e]) for e in FEW.nonzero()[0]])  # noqa: E731
    return norms(lost) / norms(exact)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_few_rows_leave_no_expert_worse_than_rounding_to_nearest(form):
    f = FORMS[form]
    quantized = partial(jqx.ptq, f, target=False, progress=False)
    nearest = {}
    for policy in (W4, W8A8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an expert without rows has the static scale 1
            result = quantized(policy, algorithms.nearest())(OF_EXPERTS, ROUTED)
        nearest[policy] = errors(f, result(*TEST))
    for name, (algorithm, policy) in ALGORITHMS.items():
        with pytest.warns(UserWarning, match="rounded to nearest(.|\n)+inputs of 16 channels"):
            result = quantized(policy, algorithm)(OF_EXPERTS, ROUTED)
        ratio = errors(f, result(*TEST)) / nearest[policy]
        if name in EXACT:
            np.testing.assert_allclose(ratio, 1, atol=1e-4, err_msg=name)
        # Factors of channels that all experts read move single weights to other codes.
        assert ratio.mean() <= 1.02 and ratio.max() <= 1.15, (name, ratio)
        site = "ragged_dot" if form == "ragged" else "dot_general"
        is_named = [f"up:{site}[{i}]" in result.report.codes for i in range(EXPERTS)]
        assert is_named == list(FEW), (name, result.report.codes)


@pytest.mark.slow
def test_an_ordinary_layer_of_few_rows_is_fitted_as_before():
    f = lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"]  # noqa: E731
    params, x = {"a": OF_EXPERTS["up"][0], "b": OF_EXPERTS["down"][0]}, TEST[0][:5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for algorithm, policy in ALGORITHMS.values():
            quantized = jqx.ptq(f, policy, algorithm, progress=False)(params, [x])
            assert "few inputs" not in quantized.report.codes


# Reports

INT4 = jqx.Policy({".*": "int4"})
SIZES = np.array([4, 0, 28], np.int32)


def normal(*shape):
    return np.float32(RNG.normal(size=shape))


def numbers(rows, weights=1.0):
    """The rank and the number of inputs of rows `[rows, columns]`, in float64."""
    rows = np.float64(rows) * np.sqrt(np.float64(weights))[..., None]
    hessian, lengths = rows.T @ rows, np.square(rows).sum(1)
    trace, squares = lengths.sum(), (hessian * hessian).sum()
    return trace**2 / squares, trace**2 / np.square(lengths).sum()


def several(p, x, y, image):
    """A matrix, one that two sites share, experts, and a convolution of two groups."""
    shared = x @ p["shared"], y @ p["shared"]
    experts = lax.ragged_dot(x, p["experts"], jnp.asarray(SIZES))
    patches = conv(image, p["conv"], "VALID", (2, 2), feature_group_count=2)
    return *shared, experts, patches


PARAMS = {"shared": normal(6, 5), "experts": normal(3, 6, 5), "conv": normal(2, 2, 3, 4)}
BATCHES = [
    (normal(32, 6) * np.geomspace(1, 9, 32, dtype=np.float32)[:, None], normal(7, 6), images)
    for images in normal(2, 3, 4, 4, 6)
]


def patches(image):
    """The patches of each of two groups, `[groups, rows, columns]`."""
    parts = image.reshape(-1, 2, 2, 2, 2, 2, 3)  # image, y, its tap, x, its tap, group, channel
    return parts.transpose(5, 0, 1, 3, 2, 4, 6).reshape(2, -1, 12)


@pytest.mark.parametrize(
    "algorithm",
    [gptq(), gptq(sequential=False), adaround(steps=1)],
    ids=["gptq", "one pass", "adaround"],
)
def test_the_rank_and_the_effective_number_of_inputs_are_those_of_numpy(algorithm):
    done = jqx.ptq(several, INT4, algorithm, progress=False)
    with pytest.warns(UserWarning, match="no batch has reached it"):
        details = done(PARAMS, BATCHES).details
    x, y, images = (np.concatenate(each) for each in zip(*BATCHES, strict=True))
    split = [np.split(batch[0], SIZES.cumsum()) for batch in BATCHES]
    want = {("shared", ()): np.concatenate([x, y])}
    for i in (0, 2):
        want["experts", (i,)] = np.concatenate([parts[i] for parts in split])
    want |= {("conv", (i,)): rows for i, rows in enumerate(patches(images))}
    results = {(entry.path, entry.at): entry for entry in details}
    assert set(results) == {*want, ("experts", (1,))}
    for key, rows in want.items():
        entry = results[key]
        assert entry.inputs == len(rows), key
        assert (entry.rank, entry.effective_inputs) == pytest.approx(numbers(rows), rel=1e-5), key
        assert 1 < entry.rank < entry.effective_inputs < entry.inputs, key
    empty = results["experts", (1,)]
    assert (empty.rank, empty.effective_inputs, empty.inputs) == (0, 0, 0)


def product(p, x):
    return x @ p["a"]


def test_rows_count_by_their_weight():
    x = normal(48, 6)
    weights = lambda x: jnp.arange(48, dtype=jnp.float32) % 3  # noqa: E731
    for sequential in (True, False):
        algorithm = gptq(weight=weights, sequential=sequential)
        quantize = jqx.ptq(product, INT4, algorithm, progress=False)
        (entry,) = quantize({"a": normal(6, 5)}, [x]).details
        result = entry.rank, entry.effective_inputs
        assert result == pytest.approx(numbers(x, np.arange(48) % 3), rel=1e-5)


def test_a_length_out_of_the_range_of_float32_is_not_taken_for_few_inputs():
    quantize = jqx.ptq(product, INT4, gptq(), progress=False)
    for size in (1e10, 1e-14):
        details = quantize({"a": normal(6, 5)}, [normal(48, 6) * np.float32(size)]).details
        assert details[0].effective_inputs == 0 and details[0].rank > 1
        assert details.calibration == ()


def two(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


def notes_of(x, width=16):
    """The notes on inputs `[rows, 16]`; `b` has `width` columns."""
    params = {"a": normal(16, width), "b": normal(width, 3)}
    done = jqx.ptq(two, INT4, gptq(), progress=False)(params, [x])
    notes = "; ".join(done.details.calibration)
    assert str(done.details).endswith("\n".join(done.details.calibration))
    assert done.report.codes.endswith(f"; {notes}" if notes else "()")
    return notes


def test_what_the_inputs_are_too_few_for_is_noted_with_the_worst_matrix():
    even = normal(64, 16)
    assert notes_of(even) == "" and notes_of(even[:16]) == ""
    assert notes_of(even, width=100) == (
        "calibration is small: 1 of 2 matrices have fewer inputs than columns "
        "(least: b:dot_general, 64 of 100)"
    )
    assert notes_of(even[:12], width=13) == (
        "calibration is small: 2 of 2 matrices have fewer inputs than columns "
        "(least: a:dot_general, 12 of 16)"
    )
    long = np.concatenate([even, 1e3 * even[:4] / np.linalg.norm(even[:4], axis=1)[:, None]])
    assert notes_of(np.repeat(long[-4:], 8, axis=0)) == ""  # 32, though only 4 differ
    assert notes_of(long) == (
        "calibration is dominated by a few: 1 of 2 matrices have fewer effective inputs than "
        "columns (least: a:dot_general, 4 of 16)"
    )
    assert "calibration is small" in notes_of(long[-5:]) and "few:" not in notes_of(long[-5:])
    dead = even * (np.arange(16) != 3)
    assert notes_of(dead) == ""  # less than a tenth
    assert notes_of(dead * (np.arange(16) != 5)) == (
        "calibration leaves columns out: 1 of 2 matrices have a tenth or more dead "
        "(most: a:dot_general, 2 of 16)"
    )


def test_a_matrix_that_is_rounded_for_few_inputs_is_noted_once():
    params = {"a": normal(16, 4), "b": normal(4, 3)}
    quantize = jqx.ptq(two, INT4, gptq(least_inputs=2), progress=False)
    with pytest.warns(UserWarning, match="12 inputs of 16 channels are too few"):
        quantized = quantize(params, [normal(12, 16)])
    assert quantized.details.calibration == ()
    assert quantized.report.codes.endswith("; 1 of 2 matrices rounded to nearest: a:dot_general")


def test_an_interrupted_run_reports_the_same(tmp_path):
    params, x = {"a": normal(16, 100), "b": normal(100, 3)}, normal(64, 16)
    quantize = jqx.ptq(two, INT4, gptq(checkpoint=tmp_path), progress=False)
    first, again = (quantize(params, [x]) for _ in range(2))
    assert first.details.entries == again.details.entries
    assert first.report.codes == again.report.codes and "64 of 100" in again.report.codes


def test_a_correction_beyond_the_limits_of_the_scales_is_left_out_where_it_would_lose():
    """Two columns are nearly multiples of each other in a few massive rows. What the float function
    has besides them asks for corrections that cancel each other.
    """
    rng = np.random.default_rng(2)
    quantized = 0.05 * rng.normal(size=(512, 12))
    massive = rng.normal(size=(8, 1))
    quantized[:8, :2] += 400 * np.abs(massive) * [1, 0.4] + rng.normal(size=(8, 2))
    difference = 0.001 * rng.normal(size=(512, 12))
    difference[:8, :2] += 3 * (quantized[:8, 1:2] - 0.4 * quantized[:8, :1]) * [1, 0.3]
    w = rng.normal(size=(24, 12))
    w[:4, :2] = 0  # nothing of what these rows multiply by is missing
    drift = Drift(difference.T @ quantized, difference.T @ difference)
    ids = np.arange(w.size).reshape(w.shape)
    matrix = Matrix(("f",), (), (), ids, quantized.T @ quantized, len(quantized), drift)
    limits = np.full_like(w, -1.5), np.full_like(w, 1.5)

    def loss(changed):
        return np.square((quantized + difference) @ w.T - quantized @ changed.T).sum(0)

    unlimited = corrected(w, matrix.hessian, drift.cross, 1.0, 1e-6)
    held = np.clip(unlimited, np.minimum(limits[0], w), np.maximum(limits[1], w))
    is_worse = loss(held) > loss(w)
    assert 0 < is_worse.sum() < len(w) and not is_worse[:4].any()
    result = matrix.corrected(w, limits, 1.0, 1e-6)
    np.testing.assert_array_equal(result, np.where(is_worse[:, None], w, unlimited))
    np.testing.assert_allclose(matrix.losses(w, held)[0], loss(held), rtol=1e-6)
    assert np.all(loss(unlimited) <= loss(w))  # they are no worse without limits


LENGTHS = [5, 2, 4]


def model(p, tokens):
    """Layers in a scan, experts whose rows are sorted, a branch and a head."""
    x = p["table"][tokens]
    x, _ = jax.lax.scan(
        lambda x, weights: (weighted.attention(weights, x) % 5, None), x, p["layers"]
    )
    x = weighted.experts(p, x) % 5
    return jax.lax.cond(tokens[0, 0] >= 0, lambda: x @ p["head"], lambda: x[..., :3])


def padded_and_cut():
    def small(seed, *shape):
        return jnp.asarray(weighted.integers(seed, *shape)) + 0.25

    p = {
        "table": jnp.asarray(weighted.integers(9, 7, weighted.D)),
        "layers": {name: small(i, 2, weighted.D, weighted.D) for i, name in enumerate("qkvo")},
        "up": small(5, 3, weighted.D, 4),
        "down": small(6, 3, 4, weighted.D),
        "router": jnp.asarray(weighted.integers(7, weighted.D, 3)),
        "head": small(8, weighted.D, 3),
    }
    tokens = np.random.default_rng(0).integers(1, 7, (3, 5))
    padded = np.where(np.arange(5)[None] < np.asarray(LENGTHS)[:, None], tokens, 0)
    cut = [jnp.asarray(tokens[i : i + 1, :n]) for i, n in enumerate(LENGTHS)]
    return p, [jnp.asarray(padded[:2]), jnp.asarray(padded[2:])], cut


INT3 = jqx.Policy({"router|table": "float", ".*": "int3"})


@pytest.mark.slow
@pytest.mark.many
@pytest.mark.parametrize("sequential", [False, True])
def test_padding_has_no_part_in_the_codes(sequential):
    p, padded, cut = padded_and_cut()
    with_weight = gptq(sequential=sequential, weight=lambda tokens: tokens > 0)
    quantized = jqx.ptq(model, INT3, with_weight, progress=False)(p, padded)
    want = jqx.ptq(model, INT3, gptq(sequential=sequential), progress=False)(p, cut)
    blind = jqx.ptq(model, INT3, gptq(sequential=sequential), progress=False)(p, padded)
    assert [x.inputs for x in quantized.details] == [x.inputs for x in want.details]
    assert [x.inputs for x in quantized.details] != [x.inputs for x in blind.details]
    jax.tree.map(np.testing.assert_array_equal, quantized.params, want.params)


@pytest.mark.parametrize("sequential", [True, False])
def test_rows_that_cannot_be_followed_are_an_error_that_names_the_site(sequential):
    f = lambda p, x: jnp.fft.fft(x, axis=0).real @ p["w"]  # noqa: E731
    algorithm = gptq(sequential=sequential, weight=lambda x: x[:, 0] > 0)
    quantize = jqx.ptq(f, jqx.Policy({".*": "int4"}), algorithm, progress=False)
    with pytest.raises(ValueError, match=r"rows of 'w(.|\n)*`fft`"):
        quantize({"w": jnp.eye(2)}, [jnp.ones((3, 2))])
