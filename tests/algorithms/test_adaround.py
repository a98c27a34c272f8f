"""AdaRound: neighbours on the grid, chosen by the Hessians of inputs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.algorithms import adaround

from ..arrays import on_device

RNG, NEAREST = np.random.default_rng(0), jqx.algorithms.nearest()
D = 8


def normal(*shape):
    return on_device(RNG.normal(size=shape), jnp.float32)


MIXED = normal(D, D) * on_device(np.exp(-np.arange(D) / 2), jnp.float32)[:, None]
BATCHES = [normal(40, D) @ MIXED, normal(24, D) @ MIXED]


def ptq(f, policy, algorithm, params, batches=BATCHES):
    return jqx.ptq(f, policy, algorithm, target=False, progress=False)(params, batches)


@pytest.mark.many
@pytest.mark.parametrize("scheme", ["int3", "int3:group=4:asymmetric", "nf4:group=8"])
def test_rows_are_near_the_best_of_all_choices(scheme):
    """Of 2**8 ways to round a row of 8 weights, by enumeration."""
    w = normal(D, 12)
    found = ptq(lambda w, x: x @ w, jqx.Policy({".*": scheme}), adaround(steps=600), w)
    nearest = ptq(lambda w, x: x @ w, jqx.Policy({".*": scheme}), NEAREST, w).params
    x, w = np.concatenate(BATCHES).astype(np.float64), np.asarray(w, np.float64)

    def lost(q):
        return ((x @ (w - np.asarray(q.dequantize(), np.float64))) ** 2).sum(0)

    group = D // nearest.scale.shape[0]
    scale = np.asarray(nearest.real_scale(), np.float64).repeat(group, 0)
    zero = 0.0
    if nearest.zero_point is not None:
        zero = np.asarray(nearest.zero_point, np.float64).repeat(group, 0)
    form = jqx.numerics.format_of(nearest.qtype)
    codes = jnp.arange(*np.add(form.code_range, (0, 1)), dtype=jnp.int32)
    table = np.sort(np.asarray(form.decode(codes.astype(form.storage)), np.float64))
    exact = np.clip(w / scale + zero, table[0], table[-1])
    above = np.clip(np.searchsorted(table, exact), 1, len(table) - 1)
    down, up = ((table[i] - zero) * scale for i in (above - 1, above))
    choices = np.array(list(itertools.product([False, True], repeat=D)))
    every = np.where(choices[:, :, None], up, down)
    best = (np.einsum("bk,ckn->cbn", x, w - every) ** 2).sum(1).min(0)
    own, rounded = lost(found.params), lost(nearest)
    (entry,) = found.details
    np.testing.assert_allclose(entry.after * len(x), own.sum(), rtol=1e-4)
    np.testing.assert_allclose(entry.before * len(x), rounded.sum(), rtol=1e-4)
    # In float64; what codes stand for is rounded to float32.
    assert np.all(own <= rounded * (1 + 1e-5)) and np.all(own >= best * (1 - 1e-5))
    assert own.sum() - best.sum() < 0.6 * (rounded.sum() - best.sum())


def f(p, x):
    """A convolution by groups, a perceptron in a scan, and a head."""
    options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=D)
    y = lax.conv_general_dilated(x.reshape(-1, 2, 2, D), p["kernel"], (1, 1), "SAME", **options)
    step = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
    return lax.scan(step, jax.nn.relu(y).reshape(-1, D), p["stack"])[0] @ p["head"]


PARAMS = {"kernel": normal(3, 3, 1, D), "stack": normal(2, D, D), "head": normal(D, 4)}
INT3 = jqx.Policy({".*": "int3:channel"})


@pytest.mark.slow
def test_it_goes_through_convolutions_scans_and_checkpoints(tmp_path):
    quantize = lambda **more: ptq(f, INT3, adaround(steps=200, **more), PARAMS)  # noqa: E731
    found = quantize(checkpoint=tmp_path / "run")
    names = [x.name for x in found.details]
    assert len(names) == D + 2 + 1 and "stack:dot_general[1]" in names
    x = normal(64, D) @ MIXED
    losses = []
    for own in (found, ptq(f, INT3, NEAREST, PARAMS)):
        losses.append(float(jnp.sum((own.function(own.params, x) - f(PARAMS, x)) ** 2)))
    assert losses[0] < losses[1]
    before, after = (sum(getattr(x, name) for x in found.details) for name in ("before", "after"))
    assert after < 0.7 * before and all(x.after <= x.before for x in found.details)
    again = quantize(checkpoint=tmp_path / "run", offload=True)
    same = jax.tree.map(jnp.array_equal, found.params, again.params)
    assert all(jax.tree.leaves(same))
    with pytest.raises(ValueError, match=r"\.adaround: the checkpoint belongs to another"):
        ptq(f, INT3, adaround(steps=100, checkpoint=tmp_path / "run"), PARAMS)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"steps": 0}, ValueError, "`steps` is out of range"),
        ({"learning_rate": -1.0}, ValueError, "`learning_rate` is out of range"),
        ({"pull": -0.1}, ValueError, "`pull` is out of range"),
        ({"propagation": "gptaq"}, ValueError, "`propagation` is out of range"),
        ({"calibrator": "mse"}, TypeError, "`calibrator`"),
    ],
)
def test_options_are_checked(options, error, match):
    with pytest.raises(error, match=match):
        adaround(**options)


def test_inputs_that_are_no_numbers_are_an_error():
    with pytest.raises(ValueError, match="rows with NaN at head:dot_general:lhs"):
        g = lambda p, x: x @ p["head"]  # noqa: E731
        ptq(g, INT3, adaround(steps=2), {"head": PARAMS["head"]}, [BATCHES[0] * jnp.nan])


def test_a_weight_that_no_matrix_is_known_of_is_an_error_of_its_own():
    def g(w, x):
        return x @ w + x @ w.T

    with pytest.raises(NotImplementedError, match=r"algorithms.adaround: (.|\n)+different ways"):
        ptq(g, INT3, adaround(steps=2), normal(D, D))
