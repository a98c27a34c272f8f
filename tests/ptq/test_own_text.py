"""Text that a function writes itself: the same whichever way its steps are evaluated. Functions of
tokens and a mask of padding write theirs without padding.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jqx
from jqx.algorithms import own_text

from ..arrays import on_device
from ..watched import Watched

WORDS, WIDTH, HEADS, LENGTH, ROWS = 40, 16, 2, 16, 3
LAYERS = 2


def weights(seed, *shape):
    values = np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-2])
    return on_device(values.astype(np.float32))


PARAMS = {
    "table": 2 * weights(0, WORDS, WIDTH),
    "places": weights(1, LENGTH, WIDTH),
    "qkv": weights(2, LAYERS, WIDTH, 3 * WIDTH),
    "out": weights(3, LAYERS, WIDTH, WIDTH),
    "up": weights(4, LAYERS, WIDTH, 24),
    "down": weights(5, LAYERS, 24, WIDTH),
    "taps": weights(6, 3, WIDTH, WIDTH),
    "experts": weights(7, 3, WIDTH, WIDTH),
}
TOKENS = np.random.default_rng(8).integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32)


def heads(x):
    return x.reshape(*x.shape[:-1], HEADS, -1)


def rotated(x):
    angles = jnp.arange(0.0, x.shape[-3])[:, None] * jnp.arange(1.0, x.shape[-1] // 2 + 1)[None]
    a, b, (cos, sin) = x[..., ::2], x[..., 1::2], (jnp.cos(angles), jnp.sin(angles))
    cos, sin = cos[None, :, None], sin[None, :, None]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def attention(x, w, mask):
    q, k, v = map(heads, jnp.split(x @ w, 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k)) / 3
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)
    return mixed.reshape(x.shape)


def layer(x, p, mask):
    norm = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    x = x + attention(norm, p["qkv"], mask) @ p["out"]
    return x + jax.nn.silu(x @ p["up"]) @ p["down"]


def causal(length):
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


def layers_of(params, i=slice(None)):
    return {name: params[name][i] for name in ("qkv", "out", "up", "down")}


def scanned(params, tokens):
    """A stack of layers, scanned."""
    x, mask = params["table"][tokens], causal(tokens.shape[1])
    x, _ = lax.scan(lambda x, p: (layer(x, p, mask), None), x, layers_of(params))
    return x @ params["table"].T


def unrolled(params, tokens):
    """Layers one by one, rematerialized, after learned positions."""
    x = params["table"][tokens] + params["places"][None, : tokens.shape[1]]
    for i in range(LAYERS):
        x = jax.checkpoint(layer)(x, layers_of(params, i), causal(tokens.shape[1]))
    return x @ params["table"].T


def padded(params, tokens):
    """Positions and a mask that depend on the tokens."""
    places = jnp.cumsum(tokens != 3, 1) - 1
    x = params["table"][tokens] + params["places"][places]
    mask = causal(tokens.shape[1]) & (tokens != 3)[:, None, None]
    x = layer(x, layers_of(params, 0), mask)
    return x @ params["table"].T


def grouped(params, tokens):
    """Attention of jax.nn, in which heads share keys; the result is a distribution."""
    x = params["table"][tokens]
    q, k, v = jnp.split(x @ params["qkv"][0], 3, -1)
    k, v = (part[..., None, : WIDTH // HEADS] for part in (k, v))
    x = x + jax.nn.dot_product_attention(heads(q), k, v, is_causal=True).reshape(x.shape)
    return jax.nn.log_softmax(x @ params["table"].T)


def cached(params, tokens):
    """Keys and values that are written to a stack of all layers, and read from it."""
    x, mask = params["table"][tokens], causal(tokens.shape[1])
    shape = (LAYERS, 2, *tokens.shape, WIDTH)

    def step(carry, xs):
        x, cache = carry
        p, i = xs
        q, *keys_and_values = jnp.split(x @ p["qkv"], 3, -1)
        cache = lax.dynamic_update_slice(cache, jnp.stack(keys_and_values)[None], (i, 0, 0, 0, 0))
        k, v = lax.dynamic_index_in_dim(cache, i, keepdims=False)
        scores = jnp.where(mask[0], jnp.einsum("bqd,bkd->bqk", q, k), -1e30)
        return (x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v), cache), None

    numbers = jnp.arange(LAYERS)
    (x, _), _ = lax.scan(step, (x, jnp.zeros(shape)), (layers_of(params), numbers))
    return x @ params["table"].T


def recurrent(params, tokens):
    """A recurrent network."""

    def cell(state, x):
        state = jnp.tanh(x + state @ params["out"][0])
        return state, state

    x = params["table"][tokens].swapaxes(0, 1)
    _, x = lax.scan(cell, jnp.ones((tokens.shape[0], WIDTH)), x)
    return x.swapaxes(0, 1) @ params["table"].T


def convolved(params, tokens):
    """A causal convolution, and cumulative sums."""
    x, axes = params["table"][tokens], ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(x, params["taps"], (1,), [(2, 0)], dimension_numbers=axes)
    return (jax.nn.gelu(y) + jnp.cumsum(x, 1) / 9) @ params["table"].T


def routed(params, tokens):
    """Experts that are chosen for each token."""
    x = params["table"][tokens]
    gates, chosen = lax.top_k(jax.nn.softmax(x[..., :3]), 2)
    each = jnp.einsum("btd,edf->btef", x, params["experts"])
    mixed = jnp.take_along_axis(each, chosen[..., None], 2) * gates[..., None]
    return (x + mixed.sum(2)) @ params["table"].T


def merged(params, tokens):
    """Rows and positions on one axis."""
    x = params["table"][tokens].reshape(-1, WIDTH)
    x = x + jax.nn.relu(x @ params["up"][0]) @ params["down"][0]
    return (x @ params["table"].T).reshape(*tokens.shape, -1)


def one_row(params, tokens):
    """A function of one row."""
    return scanned(params, tokens[None])[0]


def mapped(params, tokens):
    """A function of one row, mapped over rows."""
    return jax.vmap(lambda row: one_row(params, row))(tokens)


def segments(params, tokens):
    """A mask from a comparison of positions."""
    x, of = params["table"][tokens], jnp.cumsum(tokens == 5, 1)
    mask = causal(tokens.shape[1]) & (of[:, :, None] == of[:, None])[:, None]
    x = layer(x, layers_of(params, 0), mask)
    return x @ params["table"].T


def of_one_length(params, tokens):
    """A table of places for rows of one length, and no others."""
    x = params["table"][tokens] + params["places"][None]
    x = layer(x, layers_of(params, 0), causal(LENGTH))
    return x @ params["table"].T


def of_one_batch(params, tokens):
    """A function of batches of one row."""
    return scanned(params, tokens + jnp.zeros((1, 1), jnp.int32).reshape(tokens.shape[0], 1))


FUNCTIONS = [scanned, padded, grouped, cached, recurrent, merged, of_one_length, of_one_batch]
OTHERS = [unrolled, convolved, routed, one_row, mapped, segments]


def shifted(params, tokens):
    """What is not evaluated one position at a time."""
    x = params["table"][tokens]
    return (x + jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))) @ params["table"].T


def all_positions(f, rows=ROWS):
    """A step function that evaluates `f` at all positions; its cache is the tokens so far."""

    def step(params, cache, tokens, position):
        cache = lax.dynamic_update_slice(cache, tokens[:, None], (0, position))
        each = partial(f, params)
        if f is one_row:
            each = jax.vmap(each)
        elif f is of_one_batch:
            each = jax.vmap(lambda x: f(params, x[None])[0])
        return lax.dynamic_index_in_dim(each(cache), position, 1, keepdims=False), cache

    return step, jnp.zeros((rows, LENGTH), jnp.int32)


def write(f, cache=None, **options):
    arguments = {"rows": ROWS, "length": LENGTH, "progress": False, **options}
    return np.asarray(own_text(f, PARAMS, cache, **arguments))


@pytest.mark.filterwarnings(r"error:jqx\.")
@pytest.mark.parametrize(
    "f",
    [*FUNCTIONS, *(pytest.param(f, marks=pytest.mark.slow) for f in OTHERS)],
    ids=lambda f: f.__name__,
)
def test_text_is_that_of_a_step_that_evaluates_all_positions(f):
    step, cache = all_positions(f)
    text = write(f)
    assert text.shape == (ROWS, LENGTH) and np.all(text[:, 0] == 0)
    np.testing.assert_array_equal(text, write(step, cache))


def test_a_function_that_takes_a_slow_way_says_so():
    step, cache = all_positions(shifted)
    with pytest.warns(UserWarning, match="all positions at each token, which is slow"):
        text = write(shifted)
    np.testing.assert_array_equal(text, write(step, cache))


def test_text_depends_on_the_key_alone():
    text, first = write(routed), jax.tree.map(np.asarray, PARAMS)
    np.testing.assert_array_equal(text, write(routed, key=jax.random.key(0)))
    assert np.mean(text == write(routed, key=jax.random.key(1))) < 0.5
    jax.tree.map(np.testing.assert_array_equal, PARAMS, first)


def test_tokens_are_drawn_by_their_probability():
    logits = np.random.default_rng(9).normal(size=(1, 8)).astype(np.float32)

    def step(params, cache, tokens, position):
        return jnp.broadcast_to(params, (64, 8)), cache

    for temperature, never in ((1.0, ()), (0.5, (2, 5))):
        options = {"temperature": temperature, "never": never, "progress": False}
        text = own_text(step, on_device(logits), {}, rows=64, length=201, **options)
        counts = np.bincount(np.asarray(text)[:, 1:].ravel(), minlength=8)
        odds = np.exp(logits[0].astype(np.float64) / temperature)
        odds[list(never)] = 0
        expected = 64 * 200 * odds / odds.sum()
        assert np.all(counts[list(never)] == 0)
        kept = expected > 0
        chi_squared = np.sum((counts - expected)[kept] ** 2 / expected[kept])
        assert chi_squared < 25, chi_squared  # 7 degrees of freedom: one in a thousand


def test_rows_begin_with_given_tokens():
    text = write(routed, start=[3, 1, 2])
    assert text[:, 0].tolist() == [3, 1, 2]


def test_an_interrupted_text_continues(tmp_path):
    is_killed, positions = [False], []

    def watch(reached):
        positions.append(int(reached))
        if is_killed[0] and reached >= 200:
            raise RuntimeError("killed")

    def step(params, cache, tokens, position):
        jax.debug.callback(watch, position)
        state = jnp.tanh(params["table"][tokens] + cache @ params["out"][0])
        return state @ params["table"].T, state

    def text(**options):
        arguments = {"rows": 2, "length": 300, "progress": False, **options}
        return np.asarray(own_text(step, PARAMS, jnp.zeros((2, WIDTH)), **arguments))

    expected = text()
    is_killed[0] = True
    with pytest.raises(Exception, match="killed"):
        text(checkpoint=tmp_path)
    is_killed[0] = False
    positions.clear()
    np.testing.assert_array_equal(text(checkpoint=tmp_path), expected)
    jax.effects_barrier()
    assert min(positions) == 128
    with pytest.raises(ValueError, match="belongs to another run"):
        text(checkpoint=tmp_path, length=301)


MISTAKES = {
    "not causal": (lambda p, t: scanned(p, t[:, ::-1])[:, ::-1], {},
                   "not causal: logits depend on later tokens"),
    "a NaN": (lambda p, t: jnp.sqrt(routed(p, t) - 1e9), {}, "logits hold a NaN"),
    "no logits": (lambda p, t: p["table"][t].sum(), {}, "does not map tokens to logits"),
    "two results": (lambda p, t: (routed(p, t), t), {}, "which returns the logits alone"),
    "no cache": (all_positions(routed)[0], {}, "does not map tokens to logits"),
    "a text": (routed, {"start": 40}, "integers from 0 to 39"),
    "never": (routed, {"never": [-1]}, "`never` is not a token"),
    "rows": (routed, {"rows": 0}, "`rows` is 0"),
    "length": (routed, {"length": 1}, "`length` is 1"),
    "temperature": (routed, {"temperature": 0}, "temperature == 0"),
    "a step without its cache": (lambda p, c, t, i: p["table"][t], {"cache": jnp.zeros(3)},
                                 r"expected: \(logits \[3, vocabulary\], cache\)"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    f, options, text = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=text):
        write(f, **options)


@pytest.mark.parametrize(
    ("f", "length"),
    [(unrolled, LENGTH), pytest.param(one_row, 512, marks=pytest.mark.slow)],
    ids=["unrolled", "one_row"],
)
def test_ptq_without_batches_calibrates_on_own_text(f, length):
    """`unrolled` takes no more tokens than it has places."""
    text = own_text(f, PARAMS, rows=16, length=length, progress=False)
    rows = [row if f is one_row else row[None] for row in np.asarray(text)]
    quantize, alone = (
        lambda f, own=own: jqx.ptq(f, jqx.presets.w8a8(), own_text=own, progress=False)
        for own in (None, False)
    )
    quantized, expected = quantize(f)(PARAMS), alone(f)(PARAMS, rows)
    assert_same(quantized, expected)
    assert quantized.report.codes.endswith(
        f"on 16 rows of {length} tokens that the function wrote itself"
    )


def assert_same(a, b):
    """Asserts that two results of `ptq` have the same codes and scales."""
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
    jax.tree.map(np.testing.assert_array_equal, a.affines, b.affines)


def test_ptq_without_batches_says_where_nothing_was_read():
    quantized = jqx.ptq(scanned, jqx.presets.w8a16(), progress=False)(PARAMS)
    assert quantized.report.codes.endswith("without data")
    np.testing.assert_allclose(
        quantized.function(quantized.params, TOKENS), scanned(PARAMS, TOKENS), atol=0.3
    )


def test_ptq_without_batches_needs_a_function_of_tokens():
    with pytest.raises(TypeError, match=r"no batches(?s:.*)a list of batches, such as \[x\]"):
        jqx.ptq(lambda p, x: x @ p["table"].T, jqx.presets.w8a8(), progress=False)(PARAMS)


PREDICTING = {"table": PARAMS["table"], "mix": weights(9, WIDTH, 24)}
PREDICTING["head"] = on_device(np.asarray(40 * (PREDICTING["table"] @ PREDICTING["mix"]).T))


def predicting(params, tokens):
    """Predicts that each token is followed by itself, mostly."""
    return params["table"][tokens] @ params["mix"] @ params["head"]


REPEATED = np.repeat(np.arange(ROWS, dtype=np.int32)[:, None] + 5, LENGTH, 1)
W8A8 = jqx.presets.w8a8()


@pytest.mark.parametrize("rank", [1, 2])
def test_default_algorithm_adds_own_text_to_batches_of_tokens(rank):
    """Batches of rows of 16 tokens, with as many tokens of own text as 16 rows of 512."""
    f = predicting if rank == 2 else lambda params, tokens: predicting(params, tokens[None])[0]
    batches = [REPEATED] if rank == 2 else list(REPEATED)
    quantized = jqx.ptq(f, W8A8, progress=False)(PREDICTING, batches)
    rows = 513 if rank == 2 else 512
    codes = "smooth_quant() (effort='seconds'); inputs of 2 sites not scaled: no clear gain"
    assert quantized.report.codes == (
        f"{codes}; calibrated on 3 rows of the batches and on {rows} rows of 16 tokens that the "
        "function wrote itself"
    )
    text = own_text(predicting, PREDICTING, rows=rows, length=LENGTH, progress=False)
    together = [*batches, *np.asarray(text).reshape(-1, *batches[0].shape)]
    alone = jqx.ptq(f, W8A8, own_text=False, progress=False)
    expected = alone(PREDICTING, together)
    assert_same(quantized, expected)
    without = alone(PREDICTING, batches)
    assert without.report.codes == codes


def test_parameters_may_hold_functions():
    """As in Equinox."""
    f = lambda p, tokens: p["own"](predicting(p, tokens))  # noqa: E731
    params = {**PREDICTING, "own": lambda x: 1.0 * x}
    codes = jqx.ptq(f, W8A8, progress=False)(params, [REPEATED]).report.codes
    assert "513 rows of 16 tokens that the function wrote itself" in codes


def test_own_text_begins_like_the_rows_of_a_batch():
    batch, watched = np.concatenate([np.full((ROWS, 1), 7, np.int32), REPEATED], 1), Watched()
    quantize = jqx.ptq(predicting, W8A8, watched, own_text=True, progress=False)
    quantize(PREDICTING, [batch, batch])
    batches = [np.asarray(x) for x in watched.batches]
    assert {x.shape for x in batches} == {batch.shape}
    assert all((x[:, 0] == 7).all() for x in batches)
    places = [i for i, x in enumerate(batches) if np.array_equal(x, batch)]
    count = len(batches)
    assert places[0] == 0 and abs(places[1] - count / 2) <= 1  # between those of the text


REFUSED = {
    "no better than chance": (
        predicting,
        [TOKENS],
        r"does not predict the next tokens of the longest row \(",
    ),
    "not causal": (
        lambda p, t: (
            predicting(p, t) + 0.1 * predicting(p, t[:, ::-1])[:, ::-1].sum(1, keepdims=True)
        ),
        [REPEATED],
        "not causal",
    ),
    "other logits": (lambda p, t: predicting(p, t)[..., :4], [REPEATED], "its 4 logits are not"),
    "batches of three rows": (
        lambda p, t: predicting(p, t.reshape(3, LENGTH)),
        [REPEATED],
        "it does not take 513 rows of 16 tokens",
    ),
    "other results": (
        lambda p, t: predicting(p, t).sum(1),
        [REPEATED],
        "batches of int32\\[3, 16\\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_own_text_is_not_added_where_there_is_none(case):
    """The default says why, and `own_text=True` raises."""
    f, batches, why = REFUSED[case]
    codes = jqx.ptq(f, W8A8, progress=False)(PREDICTING, batches).report.codes
    if why.startswith("batches"):
        assert "text" not in codes
    else:
        assert re.search(f"without text of its own: .*{why}", codes)
    with pytest.raises(TypeError, match=f"there is no other text for the function(?s:.*){why}"):
        jqx.ptq(f, W8A8, own_text=True, progress=False)(PREDICTING, batches)


def test_mistakes_in_own_text_of_ptq():
    with pytest.raises(ValueError, match=r"there are no batches, and own_text=False"):
        jqx.ptq(predicting, W8A8, own_text=False)(PREDICTING)
    with pytest.raises(ValueError, match=r"own_text == 'yes'(?s:.*)pass it among the batches"):
        jqx.ptq(predicting, W8A8, own_text="yes")
    nothing = jqx.ptq(predicting, jqx.presets.w8a16(), own_text=True, progress=False)
    assert nothing(PREDICTING, [REPEATED]).report.codes == (
        "nearest() (effort='seconds'); without text of its own: nothing is calibrated"
    )


# Masks of padding

PAD = 39
RNG = np.random.default_rng(0)
UNIT = RNG.normal(size=(WORDS, WIDTH))
UNIT = (UNIT / np.linalg.norm(UNIT, axis=1, keepdims=True)).astype(np.float32)
PLACES = 0.02 * RNG.normal(size=(LENGTH, WIDTH)).astype(np.float32)
MIX = np.linalg.qr(RNG.normal(size=(24, WIDTH)))[0].T.astype(np.float32)
REPEATING = {"table": UNIT, "places": PLACES, "mix": MIX, "head": 12 * (UNIT @ MIX).T}
REPEATING = jax.tree.map(on_device, REPEATING)
SIZES = np.array([5, 16, 9])
CONSTANT = np.repeat(np.arange(ROWS, dtype=np.int32)[:, None] + 5, LENGTH, 1)
CONSTANT[:, 0] = 1


def decoder(params, tokens, mask, places):
    """Attends to earlier tokens that are not padding, and predicts that each is repeated."""
    x = params["table"][tokens] + params["places"][places]
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[: mask.shape[1], : mask.shape[1]]
    scores = jnp.einsum("btd,bsd->bts", x, x) / 40
    scores = jnp.where(seen[None] & (mask > 0)[:, None], scores, -1e30)
    x = x + 0.1 * jax.nn.softmax(scores) @ params["table"][tokens]
    return x @ params["mix"] @ params["head"]


def with_padding(is_left):
    """Rows with padding, their mask, and positions that count what is no padding."""
    mask = np.arange(LENGTH) < SIZES[:, None]
    mask = mask[:, ::-1] if is_left else mask
    tokens = np.where(mask, CONSTANT, PAD)
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
    args = (CONSTANT, *WHOLE) if padding == "none" else with_padding(padding == "left")
    batch, watched = of(*args), Watched()
    quantize = jqx.ptq(f, W8A8, watched, own_text=True, progress=False)
    codes = quantize(REPEATING, [batch]).report.codes
    left = "rows where input {} is 0 are padding, and left out; " if padding != "none" else ""
    names = {"a dict": "0/mask", "one row of positions, types, a flag and a number": "2"}
    assert codes == (
        f"Watched; {left.format(names.get(form, 1))}calibrated on 3 rows of the batches and on 513 "
        "rows of 16 tokens that the function wrote itself"
    )
    plain = lambda p, t: counted(p, t, jnp.ones_like(t))  # noqa: E731
    options = {"rows": 513, "length": LENGTH, "start": 1, "progress": False}
    text = np.asarray(own_text(plain, REPEATING, **options)).reshape(-1, ROWS, LENGTH)
    for result, rows in zip(watched.batches, [None, *text], strict=True):
        want = batch if rows is None else of(rows, *WHOLE)
        jax.tree.map(np.testing.assert_array_equal, result, want)
        kinds, wanted = (jax.tree.map(lambda x: np.asarray(x).dtype, y) for y in (result, want))
        assert kinds == wanted


UNKNOWN = {
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


@pytest.mark.parametrize("case", UNKNOWN)
def test_where_no_text_is_written_the_report_says_why(case):
    """Padded rows get parts of them and random tokens then, if there are no other inputs."""
    f, of, why = UNKNOWN[case]
    quantize = jqx.ptq(f, W8A8, progress=False)
    codes = quantize(REPEATING, [of(*with_padding(False))]).report.codes
    assert f"; without text of its own: {why}" in codes, codes
    assert codes.endswith("rows of random tokens") == (case in ("logits and a cache", "not causal"))
    codes = quantize(REPEATING, [of(CONSTANT, *WHOLE)]).report.codes
    assert f"; without text of its own: {why}" in codes and "random tokens" not in codes
