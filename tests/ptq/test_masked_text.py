"""Causal functions of tokens and a mask of padding write their own text, without padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx
from jqx.algorithms import own_text

from ..arrays import on_device
from ..watched import Watched

ROWS, LENGTH, WORDS, WIDTH, PAD = 3, 16, 40, 16, 39
W8A8 = jqx.presets.w8a8()
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(WORDS, WIDTH))
TABLE = (TABLE / np.linalg.norm(TABLE, axis=1, keepdims=True)).astype(np.float32)
PLACES = 0.02 * RNG.normal(size=(LENGTH, WIDTH)).astype(np.float32)
MIX = np.linalg.qr(RNG.normal(size=(24, WIDTH)))[0].T.astype(np.float32)
PARAMS = {"table": TABLE, "places": PLACES, "mix": MIX, "head": 12 * (TABLE @ MIX).T}
PARAMS = jax.tree.map(on_device, PARAMS)
SIZES = np.array([5, 16, 9])
TOKENS = np.repeat(np.arange(ROWS, dtype=np.int32)[:, None] + 5, LENGTH, 1)
TOKENS[:, 0] = 1


def decoder(params, tokens, mask, places):
    """Attends to earlier tokens that are not padding, and predicts that each is repeated."""
    x = params["table"][tokens] + params["places"][places]
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[: mask.shape[1], : mask.shape[1]]
    scores = jnp.einsum("btd,bsd->bts", x, x) / 40
    scores = jnp.where(seen[None] & (mask > 0)[:, None], scores, -1e30)
    x = x + 0.1 * jax.nn.softmax(scores) @ params["table"][tokens]
    return x @ params["mix"] @ params["head"]


def padded(is_left):
    """Rows with padding, their mask, and positions that count what is no padding."""
    mask = np.arange(LENGTH) < SIZES[:, None]
    mask = mask[:, ::-1] if is_left else mask
    tokens = np.where(mask, TOKENS, PAD)
    tokens[np.arange(ROWS), mask.argmax(1)] = 1
    places = np.where(mask, np.cumsum(mask, 1) - 1, 1)
    return tokens, mask.astype(np.int32), places.astype(np.int32)


WHOLE = np.ones((ROWS, LENGTH), np.int32), np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))


def counted(p, t, m):
    return decoder(p, t, m, jnp.maximum(jnp.cumsum(m, 1) - 1, 0))


FORMS = {
    "tokens and a mask": (counted, lambda t, m, i: (t, m)),
    "positions before": (lambda p, i, m, t: decoder(p, t, m, i), lambda t, m, i: (i, m, t)),
    "a dict": (
        lambda p, x: decoder(p, x["ids"], x["mask"].astype(jnp.int32), x["at"]),
        lambda t, m, i: {"ids": t, "mask": m == 1, "at": i},
    ),
    "one row of positions, types, a flag and a number": (
        lambda p, t, i, m, kinds, flag, n: decoder(p, t + 0 * kinds, m, i) * (n if flag else 0),
        lambda t, m, i: (t, np.arange(LENGTH)[None], m, np.zeros_like(t), True, np.float32(1)),
    ),
}


CASES = [
    (form, padding)
    for form in FORMS
    for padding in ("right", "left", "none")
    if "one row" not in form or padding != "left"  # whose positions begin elsewhere in each row
]


@pytest.mark.parametrize(("form", "padding"), CASES)
def test_functions_of_a_mask_write_text_without_padding(form, padding):
    """The text is that of the function without a mask, and has the form of the batches."""
    f, of = FORMS[form]
    given = (TOKENS, *WHOLE) if padding == "none" else padded(padding == "left")
    batch, watched = of(*given), Watched()
    quantize = jqx.ptq(f, W8A8, watched, own_text=True, progress=False)
    codes = quantize(PARAMS, [batch]).report.codes
    left = "rows where input {} is 0 are padding, and left out; " if padding != "none" else ""
    names = {"a dict": "0/mask", "one row of positions, types, a flag and a number": "2"}
    assert codes == (
        f"Watched; {left.format(names.get(form, 1))}calibrated on 3 rows of the batches and on 513 "
        "rows of 16 tokens that the function wrote itself"
    )
    plain = lambda p, t: counted(p, t, jnp.ones_like(t))  # noqa: E731
    options = {"rows": 513, "length": LENGTH, "start": 1, "progress": False}
    text = np.asarray(own_text(plain, PARAMS, **options)).reshape(-1, ROWS, LENGTH)
    for found, rows in zip(watched.batches, [None, *text], strict=True):
        want = batch if rows is None else of(rows, *WHOLE)
        jax.tree.map(np.testing.assert_array_equal, found, want)
        kinds, wanted = (jax.tree.map(lambda x: np.asarray(x).dtype, y) for y in (found, want))
        assert kinds == wanted


REFUSED = {
    "positions that do not count": (
        lambda p, t, m, i: decoder(p, t, m, i),
        lambda t, m, i: (t, m, np.where(m == 1, i // 2 + t, 0)),
        "what inputs 0, 2 are in rows without padding is not known",
    ),
    "weights of rows": (
        lambda p, t, m, x: counted(p, t, m) * x[:, None, None],
        lambda t, m, i: (t, m, np.arange(1.0, 4, dtype=np.float32)),
        "what inputs 2 are in rows without padding is not known",
    ),
    "logits and a cache": (
        lambda p, t, m: (counted(p, t, m), p["table"][t]),
        lambda t, m, i: (t, m),
        "it returns 2 arrays, and not logits alone",
    ),
    "not causal": (
        lambda p, t, m: (
            counted(p, t, m.astype(jnp.int32))
            + 0.1 * (m[..., None] * (p["table"][t] @ p["mix"] @ p["head"])).sum(1, keepdims=True)
        ),
        lambda t, m, i: (t, m.astype(np.float32)),
        "the function is not causal",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_where_no_text_is_written_the_report_says_why(case):
    """Padded rows get parts of them and random tokens then, if there are no other inputs."""
    f, of, why = REFUSED[case]
    quantize = jqx.ptq(f, W8A8, progress=False)
    codes = quantize(PARAMS, [of(*padded(False))]).report.codes
    assert f"; without text of its own: {why}" in codes, codes
    assert codes.endswith("rows of random tokens") == (case in ("logits and a cache", "not causal"))
    codes = quantize(PARAMS, [of(TOKENS, *WHOLE)]).report.codes
    assert f"; without text of its own: {why}" in codes and "random tokens" not in codes
