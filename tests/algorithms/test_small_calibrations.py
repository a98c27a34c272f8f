"""What reports say of inputs that are few, or alike, or leave columns out."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.algorithms.matrices import Drift, Matrix, corrected
from jqx.algorithms import adaround, gptq

RNG = np.random.default_rng(0)
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
    dimensions = ("NHWC", "HWIO", "NHWC")
    options = {"feature_group_count": 2, "dimension_numbers": dimensions}
    return (
        *shared,
        experts,
        lax.conv_general_dilated(image, p["conv"], (2, 2), "VALID", **options),
    )


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
    found = {(entry.path, entry.at): entry for entry in details}
    assert set(found) == {*want, ("experts", (1,))}
    for key, rows in want.items():
        entry = found[key]
        assert entry.inputs == len(rows), key
        assert (entry.rank, entry.effective_inputs) == pytest.approx(numbers(rows), rel=1e-5), key
        assert 1 < entry.rank < entry.effective_inputs < entry.inputs, key
    empty = found["experts", (1,)]
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
        found = entry.rank, entry.effective_inputs
        assert found == pytest.approx(numbers(x, np.arange(48) % 3), rel=1e-5)


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
        found = quantize(params, [normal(12, 16)])
    assert found.details.calibration == ()
    assert found.report.codes.endswith("; 1 of 2 matrices rounded to nearest: a:dot_general")


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
