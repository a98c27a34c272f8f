"""A plan of concrete sizes holds for symbolic ones, however the function indexes its activations:
JAX traces some of these indices as gathers if a size is symbolic.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jqx
from tests.arrays import normal

D, V = 16, 32
PARAMS = {
    "embed": normal(0, V, D),
    "q": normal(1, D, D) / 4,
    "k": normal(2, D // 2, D) / 4,
    "out": normal(3, D, 8) / 4,
}
X = normal(4, 4, 6, D)
TOKENS = jnp.arange(24).reshape(4, 6) % V


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
    seen = jnp.tril(jnp.ones((1, n, n), bool))
    return jnp.where(seen, h @ jnp.swapaxes(h, 1, 2), -1e9) @ h


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


def model(*names):
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
    plan = jqx.make_plan(model(name), jqx.presets.w8a8_dynamic(tables="int8"))
    here = plan(PARAMS, X, TOKENS)
    there = plan(PARAMS, *symbolic(X, TOKENS))
    assert here.signature == there.signature
    assert [x.address for x in here.sites] == [x.address for x in there.sites]
    assert len(here.sites) == 5 and "gather" in {x.op for x in here.sites}


def test_what_ptq_returns_is_exported_with_symbolic_sizes_and_runs_at_two():
    quantize = jqx.ptq(
        model(*IDIOMS),
        jqx.presets.w8a8(tables="int8"),
        jqx.algorithms.nearest(),
        target=False,
        progress=False,
    )
    quantized = quantize(PARAMS, [(X, TOKENS)])
    f = jax.jit(quantized.function)
    exported = export.export(f)(quantized.params, *symbolic(X, TOKENS))
    for args in ((X, TOKENS), (normal(5, 2, 9, D), TOKENS.reshape(-1)[:18].reshape(2, 9))):
        found, wanted = exported.call(quantized.params, *args), f(quantized.params, *args)
        for name, a, b in zip(IDIOMS, found[0], wanted[0], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=name)


def repeated(x, w):
    return jnp.broadcast_to(w[None], (x.shape[0], *w.shape))


def of_repeated_weights(p, x):
    """Static indices into weights that are repeated for each row of a batch."""
    tile = [repeated(x, own) for own in p]
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
    found = export.export(jax.jit(q.function))(q.params, rows).call(q.params, x)
    for a, b in zip(found, jax.jit(q.function)(q.params, x), strict=True):
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
    found, wanted = (
        jax.jit(jqx.convert(reads, plan))(jqx.quantize_params(params, plan), *args[1:])
        for plan in (old, new)
    )
    np.testing.assert_array_equal(found, wanted)
    scale = jqx.ChannelMap(scale=jnp.full((2, 4), 2.0))
    key = old.sites[1].operands[0].key
    a, b = (jqx.map_channels(reads, plan, {key: scale})(*args) for plan in (old, new))
    np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="another function"):
        jqx.convert(lambda p, x, i: reads(p, x, i) @ p["a"].T, old)(*args)
