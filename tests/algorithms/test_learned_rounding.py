"""Rounding that is learned: AutoRound by what blocks return, AdaRound by the Hessians of inputs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.algorithms import store
from jqx.algorithms import adaround, auto_round, chain, gptq, smooth_quant

from ..arrays import on_device
from ..models.layers import conv

RNG, NEAREST = np.random.default_rng(0), jqx.algorithms.nearest()
D, LAYERS = 32, 3


@pytest.fixture(autouse=True)
def _numbers_of_its_own():
    """A test draws the same numbers whichever tests run before it."""
    RNG.bit_generator.state = np.random.default_rng(2).bit_generator.state


def normal(*shape):
    return on_device(RNG.normal(size=shape), jnp.float32)


MIXED = normal(D, D) * on_device(np.exp(-np.arange(D) / 6), jnp.float32)[:, None]
BATCHES = [normal(24, D) @ MIXED for _ in range(2)]
FORMATS = {
    "zero_points": "int3:group=12:asymmetric",  # with a tail
    "channels": "int4",
    "whole": "int4:tensor",
    "mx": "mxfp4",
    "nv": "nvfp4",
    "table": "nf4:group=16",
    "halves": "int3",
}


def sites(p, x):
    """A site for each format, and two of one weight that multiply by a half each."""
    out = {name: jax.nn.relu(x @ p[name] + 0.5) for name in FORMATS if name != "halves"}
    out["left"] = x @ p["halves"][:, :8]
    out["right"] = jnp.tanh(x @ p["halves"][:, 8:])
    return out


def ptq(f, policy, algorithm, params, batches=BATCHES):
    return jqx.ptq(f, policy, algorithm, target=False, progress=False)(params, batches)


def errors_of_results(f, params, codes):
    """The squared error of each result, relative to its size, on average over batches."""

    def error(y, z):
        y, z = np.float64(y), np.float64(z)
        return ((y - z) ** 2).sum() / (y**2).sum()

    real = jqx.dequantize_params(codes)
    errors = [jax.tree.map(error, f(params, x), f(real, x)) for x in BATCHES]
    return jax.tree.map(lambda *x: np.mean(x), *errors)


@pytest.mark.slow
def test_codes_lose_what_the_report_says():
    params = {name: normal(D, 16) for name in FORMATS}
    policy = jqx.Policy(FORMATS)
    quantized = ptq(sites, policy, auto_round(steps=100), params)
    nearest = ptq(sites, policy, NEAREST, params)
    after, before = (
        errors_of_results(sites, params, q) for q in (quantized.params, nearest.params)
    )
    names = [name for name in FORMATS if name != "halves"]
    entries = dict(zip([*names, "left", "right"], quantized.details, strict=True))
    for name, entry in entries.items():
        np.testing.assert_allclose(entry.before, before[name], rtol=1e-4)
        np.testing.assert_allclose(entry.after, after[name], rtol=1e-4)
        assert entry.after < 0.9 * entry.before, name
    assert str(quantized.details).count("\n") == len(entries)


def decoder(p, x):
    """Perceptrons beside a residual stream, in a scan, with one of their own after it."""

    def layer(x, p):
        return x + jax.nn.silu(x @ p["up"]) @ p["down"], None

    x, _ = lax.scan(layer, x, p["stack"])
    return jax.nn.relu(x @ p["head"])


INT3 = jqx.Policy({".*": "int3:channel"})
STACKED = {
    "stack": {"up": normal(LAYERS, D, 48) / 6, "down": normal(LAYERS, 48, D) / 7},
    "head": normal(D, 8),
}


def error(f, quantized, params):
    x = on_device(np.random.default_rng(1).normal(size=(512, D)), jnp.float32) @ MIXED
    y = f(params, x)
    return float(jnp.mean((quantized.function(quantized.params, x) - y) ** 2) / jnp.mean(y**2))


@pytest.mark.slow
def test_bodies_of_scans_are_blocks_and_each_step_has_its_own_codes():
    quantized = ptq(decoder, INT3, auto_round(steps=120), STACKED)
    steps = [(x.sites, x.step) for x in quantized.details]
    pair = ("stack/up:dot_general", "stack/down:dot_general")
    assert steps == [*((pair, (i,)) for i in range(LAYERS)), (("head:dot_general",), ())]
    assert "stack/up:dot_general[2] and 1 more" in str(quantized.details)
    assert not quantized.details.nearest
    for entry in quantized.details:
        assert entry.after < 0.6 * entry.before and entry.best > 0
    losses = [error(decoder, ptq(decoder, INT3, x, STACKED), STACKED) for x in (NEAREST, gptq())]
    assert error(decoder, quantized, STACKED) < 0.8 * min(losses)


def unrolled(p, x):
    for weights in p["layers"]:
        x = x + jax.nn.silu(x @ weights["up"]) @ weights["down"]
    return jax.nn.relu(x @ p["head"])


@pytest.mark.slow
@pytest.mark.parametrize("where", [True, "disk"])
def test_values_elsewhere_give_the_same_codes(where, monkeypatch):
    monkeypatch.setattr(store, "_LEAST", 0)
    quantized, plain = (
        ptq(decoder, jqx.Policy({".*": "int3"}), auto_round(steps=3, offload=own), STACKED)
        for own in (where, False)
    )
    own, told = ([(x.sites, x.step, x.after) for x in each.details] for each in (quantized, plain))
    assert own == told
    jax.tree.map(np.testing.assert_array_equal, quantized.params, plain.params)


@pytest.mark.slow
def test_blocks_are_what_a_pattern_names():
    layers = [{k: v[i] for k, v in STACKED["stack"].items()} for i in range(LAYERS)]
    params = {"layers": layers, "head": STACKED["head"]}
    quantized = ptq(unrolled, INT3, auto_round(steps=60, blocks=r"layers/\d"), params)
    assert [len(x.sites) for x in quantized.details] == [2] * LAYERS + [1]
    # The block ends behind the sum: it is the body of the scan, and learns the same, but for signs
    # of gradients near 0, which the order of sums decides.
    scanned = ptq(decoder, INT3, auto_round(steps=60), STACKED)
    for entry, other in zip(quantized.details, scanned.details, strict=True):
        np.testing.assert_allclose(entry.before, other.before, rtol=0.1)
        np.testing.assert_allclose(entry.after, other.after, rtol=0.1)
    alone = ptq(unrolled, INT3, auto_round(steps=1, learning_rate=1e-6), params)
    assert [len(x.sites) for x in alone.details] == [1] * (2 * LAYERS + 1)
    with pytest.raises(ValueError, match=r"`blocks` matches nothing[\s\S]*paths such as"):
        ptq(unrolled, INT3, auto_round(blocks="attention"), params)


FEW = ("int2", "int3", "int4", "uint2", "uint3", "uint4")


@pytest.mark.many
@pytest.mark.parametrize("qtype", [*FEW[:3], *(f"{x}:asymmetric" for x in FEW)])
def test_ranges_of_every_format_are_learned(qtype):
    f, w, policy = lambda w, x: x @ w, normal(D, 8), jqx.Policy({".*": f"{qtype}:channel"})
    fixed, learned = (
        ptq(f, policy, auto_round(steps=24, ranges=ranges), w).params for ranges in (False, True)
    )
    assert (learned.scale < fixed.scale).any() and (learned.scale > 0).all()
    assert (learned.zero_point is None) == (":" not in qtype)


def test_what_is_no_better_stays_rounded_to_nearest():
    """A step that goes too far is not kept."""
    f, w = lambda w, x: x @ w, normal(D, 8)
    quantized = ptq(f, INT3, auto_round(steps=8, learning_rate=1.0, ranges=False), w)
    (entry,) = quantized.details
    nearest = ptq(f, INT3, NEAREST, w).params
    assert entry.best == 0 and entry.after == entry.before
    assert jnp.array_equal(quantized.params.codes, nearest.codes)


def test_a_body_of_remat_is_a_block_and_shared_weights_are_reported():
    def f(p, x):
        @jax.checkpoint
        def inside(x):
            return jnp.tanh(x @ p["a"]) @ p["b"]

        again = lambda i, x: jnp.tanh(x @ p["shared"])  # noqa: E731
        return lax.fori_loop(0, 2, again, inside(x))

    params = {"a": normal(D, 16), "b": normal(16, D), "shared": normal(D, D) / 6}
    quantized = ptq(f, INT3, auto_round(steps=20), params)
    assert [len(x.sites) for x in quantized.details] == [2]
    ((name, reason),) = quantized.details.nearest
    assert name.startswith("shared:") and "share" in reason
    assert f"rounded to nearest: {name}" in str(quantized.details)
    nearest = ptq(f, INT3, NEAREST, params).params["shared"]
    assert jnp.array_equal(quantized.params["shared"].codes, nearest.codes)


def test_inputs_are_made_by_rounded_weights_also_where_these_are_not_learned():
    """By the loss of the last block: of inputs from codes, on float targets."""

    def f(p, x):
        h = jnp.tanh(x @ p["shared"])
        return jax.nn.relu(jnp.tanh(h @ p["shared"]) @ p["w"])

    params = {"shared": normal(D, D) / 6, "w": normal(D, 8)}
    quantized = ptq(f, INT3, auto_round(steps=40), params)
    error = errors_of_results(f, params, quantized.params)
    np.testing.assert_allclose(quantized.details[0].after, error, rtol=1e-4)
    with pytest.raises(ValueError, match=r"batch 0: 24 rows with NaN at shared:dot_general:lhs"):
        ptq(f, INT3, auto_round(steps=4), params, [BATCHES[0] * jnp.nan])


def test_rows_that_do_not_count_change_nothing():
    f = lambda w, x, mask: jax.nn.relu(x @ w)  # noqa: E731
    w, mask = normal(D, 8), jnp.arange(24) < 18
    algorithm = auto_round(steps=20, weight=lambda x, mask: mask)
    filled = [[(jnp.where(mask[:, None], x, fill), mask) for x in BATCHES] for fill in (3.0, -50.0)]
    a, b = (ptq(f, INT3, algorithm, w, batches) for batches in filled)
    assert jnp.array_equal(a.params.codes, b.params.codes)
    assert jnp.array_equal(a.params.scale, b.params.scale)
    assert a.details[0].after < 0.7 * a.details[0].before


def test_they_follow_what_changes_weights():
    policy = jqx.presets.w8a8(weight={"qtype": "int3"})
    f = lambda p, x: decoder(p, x * 3)  # noqa: E731
    quantized = ptq(f, policy, chain(smooth_quant(0.85), auto_round(steps=20)), STACKED)
    smoothed, learned = quantized.details
    assert smoothed.kept and len(learned) == LAYERS + 1


def test_a_block_that_cannot_be_differentiated_is_named():
    def f(w, x):
        def layer(x, w):
            y = lax.while_loop(lambda y: jnp.sum(y) > 9.0, lambda y: y * 0.5, x @ w)
            return jnp.tanh(y), None

        return lax.scan(layer, x, w)[0]

    with pytest.raises(ValueError, match=r"cannot be differentiated[\s\S]*blocks="):
        ptq(f, INT3, auto_round(steps=2), normal(2, D, D))


# AdaRound

RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state
SMALL = 8
SMALL_MIXED = normal(SMALL, SMALL) * on_device(np.exp(-np.arange(SMALL) / 2), jnp.float32)[:, None]
SMALL_BATCHES = [normal(40, SMALL) @ SMALL_MIXED, normal(24, SMALL) @ SMALL_MIXED]


def small_ptq(f, policy, algorithm, params, batches=SMALL_BATCHES):
    return ptq(f, policy, algorithm, params, batches)


@pytest.mark.many
@pytest.mark.parametrize("scheme", ["int3", "int3:group=4:asymmetric", "nf4:group=8"])
def test_rows_are_near_the_best_of_all_choices(scheme):
    """Of 2**8 ways to round a row of 8 weights, by enumeration."""
    w = normal(SMALL, 12)
    f, policy = lambda w, x: x @ w, jqx.Policy({".*": scheme})
    result = small_ptq(f, policy, adaround(steps=600), w)
    nearest = small_ptq(f, policy, NEAREST, w).params
    x, w = np.concatenate(SMALL_BATCHES).astype(np.float64), np.asarray(w, np.float64)

    def lost(q):
        return ((x @ (w - np.asarray(q.dequantize(), np.float64))) ** 2).sum(0)

    group = SMALL // nearest.scale.shape[0]
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
    choices = np.array(list(itertools.product([False, True], repeat=SMALL)))
    every = np.where(choices[:, :, None], up, down)
    best = (np.einsum("bk,ckn->cbn", x, w - every) ** 2).sum(1).min(0)
    learned, rounded = lost(result.params), lost(nearest)
    (entry,) = result.details
    np.testing.assert_allclose(entry.after * len(x), learned.sum(), rtol=1e-4)
    np.testing.assert_allclose(entry.before * len(x), rounded.sum(), rtol=1e-4)
    # In float64; what codes stand for is rounded to float32.
    assert np.all(learned <= rounded * (1 + 1e-5)) and np.all(learned >= best * (1 - 1e-5))
    assert learned.sum() - best.sum() < 0.6 * (rounded.sum() - best.sum())


def convolved(p, x):
    """A convolution by groups, a perceptron in a scan, and a head."""
    y = conv(x.reshape(-1, 2, 2, SMALL), p["kernel"], feature_group_count=SMALL)
    step = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
    return lax.scan(step, jax.nn.relu(y).reshape(-1, SMALL), p["stack"])[0] @ p["head"]


CONVOLVED = {
    "kernel": normal(3, 3, 1, SMALL),
    "stack": normal(2, SMALL, SMALL),
    "head": normal(SMALL, 4),
}


@pytest.mark.slow
def test_it_goes_through_convolutions_scans_and_checkpoints(tmp_path):
    quantize = lambda **more: small_ptq(convolved, INT3, adaround(steps=200, **more), CONVOLVED)  # noqa: E731
    quantized = quantize(checkpoint=tmp_path / "run")
    names = [x.name for x in quantized.details]
    assert len(names) == SMALL + 2 + 1 and "stack:dot_general[1]" in names
    x = normal(64, SMALL) @ SMALL_MIXED
    losses = []
    for one in (quantized, small_ptq(convolved, INT3, NEAREST, CONVOLVED)):
        losses.append(float(jnp.sum((one.function(one.params, x) - convolved(CONVOLVED, x)) ** 2)))
    assert losses[0] < losses[1]
    before, after = (
        sum(getattr(x, name) for x in quantized.details) for name in ("before", "after")
    )
    assert after < 0.7 * before and all(x.after <= x.before for x in quantized.details)
    again = quantize(checkpoint=tmp_path / "run", offload=True)
    same = jax.tree.map(jnp.array_equal, quantized.params, again.params)
    assert all(jax.tree.leaves(same))
    with pytest.raises(ValueError, match=r"\.adaround: the checkpoint belongs to another"):
        small_ptq(convolved, INT3, adaround(steps=100, checkpoint=tmp_path / "run"), CONVOLVED)


def test_inputs_that_are_no_numbers_and_weights_without_a_matrix_are_errors():
    f = lambda p, x: x @ p["head"]  # noqa: E731
    with pytest.raises(ValueError, match="rows with NaN at head:dot_general:lhs"):
        batches = [SMALL_BATCHES[0] * jnp.nan]
        small_ptq(f, INT3, adaround(steps=2), {"head": CONVOLVED["head"]}, batches)
    g = lambda w, x: x @ w + x @ w.T  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"algorithms.adaround: (.|\n)+different ways"):
        small_ptq(g, INT3, adaround(steps=2), normal(SMALL, SMALL))
