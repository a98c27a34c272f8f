"""AutoRound: rounding that is learned by what blocks return."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.algorithms import store
from jqx.algorithms import auto_round, chain, gptq, smooth_quant

from ..arrays import on_device

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


@pytest.mark.slow
def test_codes_lose_what_the_report_says():
    params = {name: normal(D, 16) for name in FORMATS}
    policy = jqx.Policy(FORMATS)
    found = ptq(sites, policy, auto_round(steps=100), params)
    nearest = ptq(sites, policy, NEAREST, params)
    lost = {}
    for key, params_of in (("after", found.params), ("before", nearest.params)):
        real = jqx.dequantize_params(params_of)
        each = []
        for x in BATCHES:
            y, z = (jax.tree.map(np.float64, sites(p, x)) for p in (params, real))
            each.append({k: ((y[k] - z[k]) ** 2).sum() / (y[k] ** 2).sum() for k in y})
        lost[key] = {name: np.mean([x[name] for x in each]) for name in each[0]}
    names = [name for name in FORMATS if name != "halves"]
    told = dict(zip([*names, "left", "right"], found.details, strict=True))
    for name, entry in told.items():
        np.testing.assert_allclose(entry.before, lost["before"][name], rtol=1e-4)
        np.testing.assert_allclose(entry.after, lost["after"][name], rtol=1e-4)
        assert entry.after < 0.9 * entry.before, name
    assert str(found.details).count("\n") == len(told)


def decoder(p, x):
    """Perceptrons beside a residual stream, in a scan, with one of their own after it."""

    def layer(x, p):
        return x + jax.nn.silu(x @ p["up"]) @ p["down"], None

    x, _ = lax.scan(layer, x, p["stack"])
    return jax.nn.relu(x @ p["head"])


STACKED = {
    "stack": {"up": normal(LAYERS, D, 48) / 6, "down": normal(LAYERS, 48, D) / 7},
    "head": normal(D, 8),
}
INT3 = jqx.Policy({".*": "int3:channel"})


def error(f, found, params):
    x = on_device(np.random.default_rng(1).normal(size=(512, D)), jnp.float32) @ MIXED
    y = f(params, x)
    return float(jnp.mean((found.function(found.params, x) - y) ** 2) / jnp.mean(y**2))


@pytest.mark.slow
def test_bodies_of_scans_are_blocks_and_each_step_has_its_own_codes():
    found = ptq(decoder, INT3, auto_round(steps=120), STACKED)
    steps = [(x.sites, x.step) for x in found.details]
    pair = ("stack/up:dot_general", "stack/down:dot_general")
    assert steps == [*((pair, (i,)) for i in range(LAYERS)), (("head:dot_general",), ())]
    assert "stack/up:dot_general[2] and 1 more" in str(found.details)
    assert not found.details.nearest
    for entry in found.details:
        assert entry.after < 0.6 * entry.before and entry.best > 0
    losses = [error(decoder, ptq(decoder, INT3, x, STACKED), STACKED) for x in (NEAREST, gptq())]
    assert error(decoder, found, STACKED) < 0.8 * min(losses)


def unrolled(p, x):
    for own in p["layers"]:
        x = x + jax.nn.silu(x @ own["up"]) @ own["down"]
    return jax.nn.relu(x @ p["head"])


@pytest.mark.slow
@pytest.mark.parametrize("where", [True, "disk"])
def test_values_elsewhere_give_the_same_codes(where, monkeypatch):
    monkeypatch.setattr(store, "_LEAST", 0)
    found, plain = (
        ptq(decoder, jqx.Policy({".*": "int3"}), auto_round(steps=3, offload=own), STACKED)
        for own in (where, False)
    )
    own, told = ([(x.sites, x.step, x.after) for x in each.details] for each in (found, plain))
    assert own == told
    jax.tree.map(np.testing.assert_array_equal, found.params, plain.params)


@pytest.mark.slow
def test_blocks_are_what_a_pattern_names():
    layers = [{k: v[i] for k, v in STACKED["stack"].items()} for i in range(LAYERS)]
    params = {"layers": layers, "head": STACKED["head"]}
    found = ptq(unrolled, INT3, auto_round(steps=60, blocks=r"layers/\d"), params)
    assert [len(x.sites) for x in found.details] == [2] * LAYERS + [1]
    # The block ends behind the sum: it is the body of the scan, and learns the same, but for signs
    # of gradients near 0, which the order of sums decides.
    scanned = ptq(decoder, INT3, auto_round(steps=60), STACKED)
    for own, other in zip(found.details, scanned.details, strict=True):
        np.testing.assert_allclose(own.before, other.before, rtol=0.1)
        np.testing.assert_allclose(own.after, other.after, rtol=0.1)
    alone = ptq(unrolled, INT3, auto_round(steps=1, learning_rate=1e-6), params)
    assert [len(x.sites) for x in alone.details] == [1] * (2 * LAYERS + 1)
    with pytest.raises(ValueError, match=r"`blocks` matches nothing[\s\S]*paths such as"):
        ptq(unrolled, INT3, auto_round(blocks="attention"), params)


FEW = ("int2", "int3", "int4", "uint2", "uint3", "uint4")


@pytest.mark.many
@pytest.mark.parametrize("qtype", [*FEW[:3], *(f"{x}:asymmetric" for x in FEW)])
def test_ranges_of_every_format_are_learned(qtype):
    f, w, policy = lambda w, x: x @ w, normal(D, 8), jqx.Policy({".*": f"{qtype}:channel"})
    fixed, own = (
        ptq(f, policy, auto_round(steps=24, ranges=ranges), w).params for ranges in (False, True)
    )
    assert (own.scale < fixed.scale).any() and (own.scale > 0).all()
    assert (own.zero_point is None) == (":" not in qtype)


def test_what_is_no_better_stays_rounded_to_nearest():
    """A step that goes too far is not kept."""
    f, w = lambda w, x: x @ w, normal(D, 8)
    found = ptq(f, INT3, auto_round(steps=8, learning_rate=1.0, ranges=False), w)
    (entry,) = found.details
    nearest = ptq(f, INT3, NEAREST, w).params
    assert entry.best == 0 and entry.after == entry.before
    assert jnp.array_equal(found.params.codes, nearest.codes)


def test_a_body_of_remat_is_a_block_and_shared_weights_are_reported():
    def f(p, x):
        @jax.checkpoint
        def inside(x):
            return jnp.tanh(x @ p["a"]) @ p["b"]

        again = lambda i, x: jnp.tanh(x @ p["shared"])  # noqa: E731
        return lax.fori_loop(0, 2, again, inside(x))

    params = {"a": normal(D, 16), "b": normal(16, D), "shared": normal(D, D) / 6}
    found = ptq(f, INT3, auto_round(steps=20), params)
    assert [len(x.sites) for x in found.details] == [2]
    ((name, reason),) = found.details.nearest
    assert name.startswith("shared:") and "share" in reason
    assert f"rounded to nearest: {name}" in str(found.details)
    nearest = ptq(f, INT3, NEAREST, params).params["shared"]
    assert jnp.array_equal(found.params["shared"].codes, nearest.codes)


def test_inputs_are_made_by_rounded_weights_also_where_these_are_not_learned():
    """By the loss of the last block: of inputs from codes, on float targets."""

    def f(p, x):
        h = jnp.tanh(x @ p["shared"])
        return jax.nn.relu(jnp.tanh(h @ p["shared"]) @ p["w"])

    params = {"shared": normal(D, D) / 6, "w": normal(D, 8)}
    found = ptq(f, INT3, auto_round(steps=40), params)
    real = jqx.dequantize_params(found.params)
    lost = []
    for x in BATCHES:
        y, z = (np.asarray(f(p, x), np.float64) for p in (params, real))
        lost.append(((y - z) ** 2).sum() / (y**2).sum())
    np.testing.assert_allclose(found.details[0].after, np.mean(lost), rtol=1e-4)
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
    found = ptq(f, policy, chain(smooth_quant(0.85), auto_round(steps=20)), STACKED)
    smoothed, learned = found.details
    assert smoothed.kept and len(learned) == LAYERS + 1


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: auto_round(steps=0), ValueError, "`steps` is out of range"),
        (lambda: auto_round(steps=2.5), TypeError, "steps"),
        (lambda: auto_round(learning_rate=-1.0), ValueError, "`learning_rate` is out of range"),
        (lambda: auto_round(blocks=3), TypeError, "`blocks`"),
        (lambda: auto_round(blocks="("), ValueError, "`blocks` is not a regular expression"),
        (lambda: auto_round(calibrator="mse"), TypeError, "`calibrator`"),
        (lambda: auto_round(60), TypeError, "pass options by name"),
    ],
)
def test_options_are_checked(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_a_block_that_cannot_be_differentiated_is_named():
    def f(w, x):
        def layer(x, w):
            y = lax.while_loop(lambda y: jnp.sum(y) > 9.0, lambda y: y * 0.5, x @ w)
            return jnp.tanh(y), None

        return lax.scan(layer, x, w)[0]

    with pytest.raises(ValueError, match=r"cannot be differentiated[\s\S]*blocks="):
        ptq(f, INT3, auto_round(steps=2), normal(2, D, D))
