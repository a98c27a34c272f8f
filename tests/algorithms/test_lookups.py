"""Tables are scaled and rotated however their rows are looked up; the function stays as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.algorithms import find_pairs, rotate

from ..arrays import on_device

RNG = np.random.default_rng(0)
ROWS, WIDTH, HIDDEN, LAYERS = 11, 8, 12, 3


def normal(*shape):
    return on_device(RNG.normal(size=shape), jnp.float32)


PARAMS = {
    "table": normal(ROWS, WIDTH),
    "gains": normal(LAYERS, WIDTH),
    "up": normal(LAYERS, WIDTH, HIDDEN),
    "down": normal(LAYERS, HIDDEN, WIDTH),
    "last": normal(WIDTH),
    "head": normal(WIDTH, ROWS),
}
TOKENS = on_device(RNG.integers(0, ROWS, (2, 3)), jnp.int32)
FORMS = {
    "index": lambda t, i: t[i],
    "index in two maps": lambda t, i: jax.vmap(jax.vmap(lambda i: t[i]))(i),
    "dynamic index in two maps": lambda t, i: jax.vmap(
        jax.vmap(lambda i: lax.dynamic_index_in_dim(t, i, keepdims=False))
    )(i),
    "batch last": lambda t, i: jax.vmap(lambda i: t[i], out_axes=1)(i).swapaxes(0, 1),
    "columns first": lambda t, i: jnp.moveaxis(
        jax.vmap(lambda i: t[i], out_axes=-1)(i.ravel()), -1, 0
    ).reshape(*i.shape, WIDTH),
    "two rows at once": lambda t, i: jax.vmap(
        lambda i: lax.dynamic_slice(t, (i, np.int32(0)), (2, WIDTH))
    )(i[:, 0]),
}


def norm(x, gain):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain[None, None]


@pytest.mark.many
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_any_lookup(form, tied):
    def f(p, tokens):
        x = FORMS[form](p["table"], tokens)
        for gain, up, down in zip(p["gains"], p["up"], p["down"], strict=True):
            x = x + jax.nn.relu(norm(x, gain) @ up) @ down
        return norm(x, p["last"]) @ (p["table"].T if tied else p["head"])

    plan = jqx.make_plan(f, jqx.Policy({"up|down|head": "int8"}))(PARAMS, TOKENS)
    pairs = find_pairs(f, plan)(PARAMS, TOKENS)
    factors = np.r_[1, 2.0 ** RNG.uniform(-2, 2, pairs.folds.count - 1)]
    folded = pairs.folds.folded(PARAMS, factors)
    rotated = rotate(offline=True).rewrite(f, plan, PARAMS, [(TOKENS,)], progress=False)
    mapped = jqx.map_channels(f, plan, rotated.maps)
    every = jax.jit(lambda p, q, r, x: (f(p, x), f(q, x), mapped(r, x)))
    exact, *found = every(PARAMS, folded, rotated.params, TOKENS)
    for own in found:  # float32: sums of at most 12 products, through three layers
        assert np.abs(own - exact).max() <= 1e-5 * np.abs(exact).max()
    is_plain = form != "two rows at once"
    for row in rotated.report:
        whole = is_plain and not row.site.startswith("down")
        assert row.offline == whole and bool(row.why) != whole, row
    # Behind a gain, a table that is the head stays as it is: its rows are rotated as looked up.
    assert len(rotated.report.edges) == (2 if tied and is_plain else 0)
