"""Rotations: Hadamard matrices of many sizes, and functions that stay as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx._src.algorithms.hadamard import factors_of, hadamard, is_order, largest_block
from jqx.algorithms import chain, gptq, rotate

from ..arrays import on_device

RNG, NEAREST = np.random.default_rng(0), jqx.algorithms.nearest()
D, H, LAYERS = 24, 40, 2


def normal(*shape):
    return on_device(RNG.normal(size=shape), jnp.float32)


OUTLIERS = on_device(np.where(np.arange(D) % 11 == 0, 8.0, 1.0), jnp.float32)
PARAMS = {
    "up": normal(LAYERS, D, H) / OUTLIERS[None, :, None],
    "down": normal(LAYERS, H, D) / np.sqrt(H),
    "kernel": normal(3, 3, 12, 4),
    "experts": normal(2, D, 4),
    "stack": normal(2, D, 5),
}
BATCHES = [normal(24, D), normal(16, D)]


def f(p, x):
    """Perceptrons in a scan, a grouped convolution, experts and a stack of matrices."""

    def layer(x, p):
        h = jnp.tanh(x) * OUTLIERS[None]
        return x + jax.nn.relu(h @ p["up"]) @ p["down"], None

    x = lax.scan(layer, x, {"up": p["up"], "down": p["down"]})[0]
    image = x.reshape(-1, 2, 2, D)
    options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2)
    y = lax.conv_general_dilated(image, p["kernel"], (1, 1), "SAME", **options)
    sizes = jnp.array([x.shape[0] // 4, x.shape[0] - x.shape[0] // 4], jnp.int32)
    z = lax.ragged_dot(x, p["experts"], sizes)
    return x, y, z, jnp.einsum("bsk,bkn->bsn", x.reshape(2, -1, D), p["stack"])


def test_hadamard_matrices_are_orthogonal_and_of_ones():
    sizes = [n for n in (1, 2, *range(4, 257, 4)) if is_order(n)]
    assert {12, 20, 28, 36, 44, 60, 108, 140, 156, 172} < set(sizes)
    assert set(range(4, 257, 4)) - set(sizes) == {188, 236}
    for n in sizes:
        h = hadamard(n).astype(int)
        assert set(np.unique(h)) <= {-1, 1}
        np.testing.assert_array_equal(h @ h.T, n * np.eye(n, dtype=int))
    assert not any(map(is_order, (0, 3, 6, 10, 18, 188)))


def test_sizes_are_products_of_two_that_are_near_each_other():
    cases = {64: (64,), 576: (24, 24), 1536: (32, 48), 11008: (64, 172), 156: (156,), 49: ()}
    assert {n: factors_of(n) for n in cases} == cases
    assert [largest_block(n) for n in (576, 13696, 49, 98, 18)] == [576, 128, 1, 2, 2]


@pytest.mark.many
@pytest.mark.parametrize("block", [None, 4, 2])
def test_the_function_stays_as_it_is(block):
    policy = jqx.presets.w4a4()
    plan = jqx.make_plan(f, policy)(PARAMS, BATCHES[0])
    found, report, maps = rotate(block=block).rewrite(f, plan, PARAMS, BATCHES, progress=False)[:3]
    assert [(x.site.split(":")[0], x.channels) for x in report] == [
        *(("up", D), ("down", H), ("kernel", 12), ("experts", D), ("stack", D)),
    ]
    blocks = [int(np.prod(x.factors)) for x in report]
    assert blocks == ([24, 40, 12, 24, 24] if block is None else [block] * 5)
    assert len(maps) == 5 and len(str(report).splitlines()) == 6
    exact, own = f(PARAMS, BATCHES[0]), jqx.map_channels(f, plan, maps)(found, BATCHES[0])
    for a, b in zip(exact, own, strict=True):
        assert np.abs(a - b).max() <= 3e-6 * np.abs(a).max()
    changed = [np.abs(found[name] - PARAMS[name]).max() for name in PARAMS]
    assert min(changed) > 0.1


@pytest.mark.slow
def test_outliers_lose_less_and_more_so_with_gptq():
    def lost(algorithm):
        quantized = jqx.ptq(f, jqx.presets.w4a4(), algorithm, progress=False)(PARAMS, BATCHES)
        exact, found = f(PARAMS, BATCHES[0])[0], quantized(BATCHES[0])[0]
        return float(jnp.sum((exact - found) ** 2) / jnp.sum(exact**2))

    plain, rotated, both = map(lost, (NEAREST, rotate(), chain(rotate(), gptq())))
    assert rotated < 0.8 * plain and both < rotated


def test_sites_of_one_value_share_a_rotation():
    g = lambda p, x: jnp.tanh(x @ p["a"]) + x @ p["b"]  # noqa: E731
    params = {"a": normal(D, 4), "b": normal(D, 4)}
    quantized = jqx.ptq(g, jqx.presets.w4a4(), rotate(seed=3), progress=False)(params, BATCHES)
    (a,), (b,) = quantized.maps.values()
    jax.tree.map(np.testing.assert_array_equal, a, b)
    (other,) = jqx.ptq(g, jqx.presets.w4a4(), rotate(), progress=False)(params, BATCHES).maps[
        "a:dot_general:lhs"
    ]
    assert (other.scale != a.scale).any()


def test_what_means_nothing_is_refused():
    cases = (
        (lambda: rotate(block=6), ValueError, "Hadamard"),
        (lambda: rotate(block=1), ValueError, "Hadamard"),
        (lambda: rotate(block=2.5), TypeError, "`block`"),
        (lambda: rotate(seed=None), TypeError, "`seed`"),
        (lambda: jqx.ptq(f, jqx.presets.w4a4(), rotate(block=16), progress=False)(PARAMS, BATCHES),
         ValueError, "does not divide"),
    )  # fmt: skip
    for make, error, fact in cases:
        with pytest.raises(error, match=rf"(?s)jqx\.algorithms\.rotate: .*{fact}.*fix:"):
            make()
    odd = lambda w, x: x[:, :7] @ w  # noqa: E731
    with pytest.raises(ValueError, match=r"(?s)no site can be rotated.*a divisor of 7.*fix:"):
        jqx.ptq(odd, jqx.presets.w4a4(), rotate(), progress=False)(normal(7, 2), BATCHES)


def attention(p, x):
    q, k, v = (x.reshape(2, -1, D) @ p[name] for name in "qkv")
    q, k = (jnp.concatenate([-y[..., 12:], y[..., :12]], -1) + y for y in (q, k))  # as RoPE does
    with jax.named_scope("scores"):
        weights = jax.nn.softmax(q @ k.mT / 9)
    with jax.named_scope("mixed"):
        return weights @ v


HEADS = {name: normal(D, D) / D for name in "qkv"}
HEADS["q"] = HEADS["q"] * OUTLIERS[None]
INT4 = jqx.QSpec("int4", jqx.per_token(), dynamic=True)
SCORES = jqx.Policy([jqx.Rule("scores", activation=INT4), jqx.Rule("[qkv]", weight="int8")])


def test_queries_and_keys_are_rotated_alike():
    plan = jqx.make_plan(attention, SCORES)(HEADS, BATCHES[0])
    chosen = rotate(products="scores:dot_general").rewrite(
        attention, plan, HEADS, BATCHES[:1], progress=False
    )
    keys = {f"scores:dot_general:{side}" for side in ("lhs", "rhs")}
    assert keys < set(chosen.maps)
    (entry,) = (x for x in chosen.report if x.site == "scores:dot_general")
    assert (entry.channels, entry.factors) == (D, (D,))
    mapped = jqx.map_channels(attention, plan, chosen.maps)
    for x in BATCHES:  # of any number of tokens
        exact, own = attention(HEADS, x), mapped(chosen.params, x)
        # float32: sums of D products, rotated twice
        assert np.abs(exact - own).max() <= 1e-5 * np.abs(exact).max()

    def lost(algorithm):
        quantized = jqx.ptq(attention, SCORES, algorithm, progress=False)(HEADS, BATCHES[:1])
        return float(((quantized(BATCHES[0]) - attention(HEADS, BATCHES[0])) ** 2).mean())

    assert lost(rotate(products="scores:dot_general")) < 0.5 * lost(rotate())
    for pattern, error, fact in (
        ("mixed:.*", ValueError, "which matches none"),
        (".*", ValueError, "also matches other sites(.|\n)+'scores:dot_general'"),
        ("(", ValueError, "not a regular expression"),
        (3, TypeError, "`products`"),
    ):
        with pytest.raises(error, match=fact) as info:
            algorithm = rotate(products=pattern)
            algorithm.rewrite(attention, plan, HEADS, BATCHES[:1], progress=False)
        assert "fix:" in str(info.value)
