"""Padding decides no scale, and rows of other lengths and tokens join padded ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..arrays import on_device
from ..watched import Watched

ROWS, LENGTH, WORDS, WIDTH = 6, 12, 50, 16
W8A8 = jqx.presets.w8a8()
RNG = np.random.default_rng(0)
PARAMS = {
    name: RNG.normal(size=shape).astype(np.float32)
    for name, shape in {"table": (WORDS, WIDTH), "up": (WIDTH, 24), "down": (24, 8)}.items()
}
PARAMS["table"][45] *= 100  # of padding
PARAMS = jax.tree.map(on_device, PARAMS)
SIZES = np.array([3, 12, 7, 5, 9, 4])
MASK = np.arange(LENGTH) < SIZES[:, None]
TOKENS = np.where(MASK, RNG.integers(3, 40, MASK.shape), 45).astype(np.int32)
TOKENS[:, 0] = 1
TOKENS[np.arange(ROWS), SIZES - 1] = 2


def encoder(params, tokens, mask):
    """Attends to tokens that are not padding, and pools them."""
    x = params["table"][tokens]
    scores = jnp.where(mask[:, None], jnp.einsum("btd,bsd->bts", x, x) / 40, -1e30)
    x = (x + jax.nn.softmax(scores, -1) @ x) @ params["up"]
    x = jax.nn.relu(x) @ params["down"]
    return jnp.where(mask[..., None], x, 0).sum(1) / mask.sum(1, keepdims=True, dtype=jnp.float32)


def nearest(f, batches, **options):
    return jqx.ptq(f, W8A8, jqx.algorithms.nearest(), progress=False, **options)(PARAMS, batches)


FORMS = {
    "bool": (encoder, lambda tokens, mask: (tokens, mask)),
    "floats before": (lambda p, m, t: encoder(p, t, m > 0), lambda t, m: (m.astype(np.float32), t)),
    "a dict": (
        lambda p, x: encoder(p, x["ids"], x["mask"] == 1),
        lambda t, m: {"ids": t, "mask": m.astype(np.int32), "types": np.zeros_like(t)},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_padding_decides_no_scale(form):
    """A batch without padding comes first; the mask is found in the next one."""
    f, of = FORMS[form]
    whole = TOKENS.copy()
    whole[:, 1:] = 5
    batches = [of(whole, np.ones_like(MASK)), of(TOKENS, MASK)]
    found = nearest(f, batches)
    name = {"bool": "1", "floats before": "0", "a dict": "0/mask"}[form]
    expected = f"nearest(); rows where input {name} is 0 are padding, and left out"
    assert found.report.codes == expected
    own = jax.tree.leaves_with_path((of(TOKENS, MASK),))
    place = [np.array_equal(x, MASK) for _, x in own].index(True)
    weighted = nearest(f, batches, weight=lambda *x: jax.tree.leaves(x)[place])
    jax.tree.map(np.testing.assert_array_equal, found.affines, weighted.affines)
    every = nearest(f, batches, weight=lambda *x: jnp.ones_like(jax.tree.leaves(x)[place]))
    key = next(iter(found.affines))
    assert found.affines[key].scale < every.affines[key].scale / 2


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

    params = {**PARAMS, "relu": jax.nn.relu}
    quantize = jqx.ptq(f, W8A8, jqx.algorithms.nearest(), progress=False)
    assert "input 1 is 0" in quantize(params, [(TOKENS, MASK, True)]).report.codes


def test_an_array_is_tried_once():
    calls = []

    def f(p, tokens, types):
        jax.debug.callback(lambda: calls.append(None))
        return p["table"][tokens] @ p["up"] + types.astype(jnp.float32)[..., None]

    jqx.ptq(f, W8A8, jqx.algorithms.nearest(), progress=False)(PARAMS, [(TOKENS, MASK)] * 2)
    jax.effects_barrier()
    one = len(calls)
    jqx.ptq(f, W8A8, jqx.algorithms.nearest(), progress=False)(PARAMS, [(TOKENS, MASK)] * 5)
    jax.effects_barrier()
    assert len(calls) - one == one + 3  # three more batches are calibrated


def test_the_weight_of_an_algorithm_stays():
    weight = lambda tokens, mask: mask & (tokens != 7)  # noqa: E731
    algorithm = jqx.algorithms.smooth_quant(weight=weight)
    found, expected = (
        jqx.ptq(encoder, W8A8, algorithm, weight=x, progress=False)(PARAMS, [(TOKENS, MASK)])
        for x in (None, weight)
    )
    assert "padding" not in found.report.codes
    jax.tree.map(np.testing.assert_array_equal, found.affines, expected.affines)


@pytest.mark.parametrize("is_left", [True, False])
def test_rows_of_other_lengths_and_tokens_join_padded_rows(is_left):
    """32 parts of rows, and 32 with random tokens of the table; rows begin and end as all do."""
    tokens, mask = (x if is_left else x[:, ::-1] for x in (TOKENS, MASK))
    first, last = (1, 2) if is_left else (2, 1)
    watched = Watched()
    ptq = jqx.ptq(encoder, W8A8, watched, own_text=True, progress=False)
    codes = ptq(PARAMS, [(tokens, mask)]).report.codes
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
    is_part = [any(" ".join(map(str, x[1:-1])) in own for own in text) for x in rows]
    assert all(is_part[:36]) and sum(is_part[36:]) < 18
    assert {len(x) for x in rows} >= {3, 4, 6}
    drawn = np.concatenate([x[1:-1] for x in rows[36:]])
    assert drawn.min() < 3 and drawn.max() > 45 and drawn.max() < WORDS


def test_default_algorithm_adds_rows_to_padded_ones():
    quantize = jqx.ptq(encoder, W8A8, progress=False)
    found = quantize(PARAMS, [(TOKENS, MASK)])
    assert "36 rows of random tokens" in found.report.codes
    alone = jqx.ptq(encoder, W8A8, own_text=False, progress=False)(PARAMS, [(TOKENS, MASK)])
    assert alone.report.codes.endswith("are padding, and left out")
