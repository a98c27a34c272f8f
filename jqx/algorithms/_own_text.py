"""Text that a language model writes itself, to calibrate it with."""

import io
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._calls import called
from .._checks import check_integer, shown
from .._errors import fail
from .._files import Path, Replacement
from ..transforms._shared import advancing, arrays_of, check_concrete, check_function
from ._checkpoint import Checkpoint, digest
from ._decoding import Decoding, decoding_of

_NAME = "algorithms.own_text"
_CHUNK = 32
"""Positions that are written by one call, after which a bar advances."""

_SAVED = 4
"""Calls after which a checkpoint is written."""


@called(_NAME, "pass for example own_text(step, params, cache) or own_text(f, params).")
def own_text(
    step: Callable[..., Any],
    params: Any,
    cache: Any = None,
    *,
    start: int | Sequence[int] | np.ndarray | jax.Array = 0,
    rows: int = 16,
    length: int = 512,
    key: jax.Array | None = None,
    temperature: float = 1.0,
    never: Sequence[int] = (),
    checkpoint: Path | None = None,
    progress: bool = True,
) -> jax.Array:
    """Returns rows of tokens that a language model draws, each after those before it.

    They are batches for `ptq` and for all that calibrates. Scales and codes that fit text of the
    model's own carry over to other text, while those that fit one kind of text can lose on another
    kind; see Williams et al., "Self-calibration for Language Model Quantization and Pruning",
    2025, https://arxiv.org/abs/2410.17170. All rows are drawn side by side, by one jitted function.

    Args:
      step: a step of the model, `step(params, cache, tokens, position) -> (logits, cache)`, with
        tokens int32 [rows], a position int32 [], and float logits [rows, vocabulary]. Without a
        `cache` a causal function `step(params, tokens) -> logits` of tokens [rows, length] or
        [length] and logits [..., vocabulary]: its jaxpr is evaluated one position at a time, and
        keys, values and states of earlier positions are kept. If that is not possible, each token
        takes an evaluation of all positions, with a warning.
      params: the parameters, a pytree; QTensors if the model takes them. They are not changed.
      cache: the cache of no tokens, for `rows` rows and `length` positions; a pytree.
      start: the first token of each row; the one that begins or separates texts, best. An integer,
        or integers [rows].
      rows: how many rows.
      length: tokens of a row, with the first.
      key: a random key. The text is the same for the same key, on one kind of processor. `None`:
        `jax.random.key(0)`.
      temperature: divides the logits. 1 draws from the distribution of the model; lower values
        measured worse.
      never: tokens that are not drawn, such as those that end a text.
      checkpoint: a folder for the text so far, and the cache, from which an interrupted call with
        the same arguments continues. It is written about every hundred positions.
      progress: whether to show a progress bar.

    Returns:
      Tokens, int32 [rows, length].

    Raises:
      TypeError: `step` is not a function, or does not return logits.
      ValueError: a size, a token or the temperature is out of range, logits depend on later tokens,
        or hold a NaN.

    Gradient: none.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> table = jax.random.normal(jax.random.key(1), (50, 8))
      >>> f = lambda params, tokens: jnp.cumsum(params[tokens], 1) @ params.T
      >>> text = jqx.algorithms.own_text(f, table, rows=4, length=16, progress=False)
      >>> text.shape, text.dtype
      ((4, 16), dtype('int32'))
    """
    check_function(_NAME, step)
    check_concrete(_NAME, params, (cache,))
    for name, value, least in (("rows", rows, 1), ("length", length, 2)):
        if not check_integer(_NAME, name, value) >= least:
            raise fail(
                _NAME,
                f"`{name}` is too small.",
                given=f"{name} == {value}",
                expected=f"{least} or more",
                fix="16 rows of 512 tokens are enough for models of a hundred million weights.",
            )
    if not (isinstance(temperature, (int, float)) and 0 < temperature < np.inf):
        raise fail(
            _NAME,
            "`temperature` is not a positive number.",
            given=f"temperature == {shown(temperature)}",
            expected="a number above zero; 1.0 draws from the distribution of the model",
            fix="leave it out for 1.0.",
        )
    arrays, filled = arrays_of(params)
    f = lambda arrays, *args: step(filled(arrays), *args)  # noqa: E731
    if cache is None:
        own = decoding_of(_NAME, f, arrays, rows, length)
    else:
        own = Decoding(
            lambda arrays: (arrays, jax.tree.map(jnp.array, cache)),  # steps donate the copy
            jax.jit(f, donate_argnums=1),
        )
    key = jax.random.key(0) if key is None else key
    how = temperature, never, checkpoint, progress
    return written(own, arrays, start, rows, length, key, *how)


def written(
    own: Decoding,
    arrays: Any,
    start: Any,
    rows: int,
    length: int,
    key: jax.Array,
    temperature: float = 1.0,
    never: Any = (),
    checkpoint: Path | None = None,
    progress: bool = True,
) -> jax.Array:
    """Returns the text that steps write; arguments as in `own_text`."""
    size, jaxpr = _vocabulary(own, arrays, rows)
    first, banned = _tokens("start", start, size), _tokens("never", never, size)
    values, kept = own.start(arrays)

    @partial(jax.jit, donate_argnums=0)
    def draw(text: Any, logits: Any, key: Any, place: Any) -> Any:
        tokens, is_good = text
        logits = logits.astype(jnp.float32) / temperature
        is_good &= ~jnp.any(jnp.isnan(logits))
        logits = logits.at[:, banned].set(-jnp.inf)
        new = jax.random.categorical(jax.random.fold_in(key, place), logits).astype(jnp.int32)
        tokens = lax.dynamic_update_slice(tokens, new[:, None], (0, place + 1))
        return (tokens, is_good), new

    tokens = jnp.zeros((rows, length), jnp.int32).at[:, 0].set(jnp.asarray(first, jnp.int32))
    state, saved, begun = (tokens, kept, jnp.asarray(True)), None, 0
    if checkpoint is not None:
        options = first, rows, length, jax.random.key_data(key), temperature, banned
        made_of = {"function": str(jaxpr), "parameters": arrays, "options": options}
        saved = _Saved(checkpoint, {name: digest(x) for name, x in made_of.items()})
        begun, state = saved.read(state)
    tokens, kept, is_good = state
    now, text, state = tokens[:, begun], (tokens, is_good), None
    with advancing("write", "token", rows * (length - 1), progress) as advance:
        advance(rows * begun)
        for begin in range(begun, length - 1, _CHUNK):
            end = min(begin + _CHUNK, length - 1)
            for place in map(np.int32, range(begin, end)):
                logits, kept = own.step(values, kept, now, place)
                text, now = draw(text, logits, key, place)
                now.block_until_ready()  # callbacks of many steps at once may use up all threads
            if not bool(text[1]):
                raise fail(
                    _NAME,
                    "logits hold a NaN.",
                    given=f"at one of the positions {begin} to {end - 1}",
                    expected="logits without NaN",
                    fix="look for what is not finite in the model, or pass a shorter length=, if "
                    "the "
                    "model has fewer positions.",
                )
            advance(rows * (end - begin))
            if saved is not None and (end % (_SAVED * _CHUNK) == 0 or end == length - 1):
                saved.write(end, (text[0], kept, text[1]))
    return text[0]


class _Saved:
    """The text so far and its cache, in a folder."""

    def __init__(self, path: Path, made_of: dict[str, str]):
        self._file = os.path.join(Checkpoint(_NAME, path, made_of).folder, "text.npz")

    def write(self, place: int, state: Any) -> None:
        """Writes what the next position reads."""
        leaves = [np.asarray(x) for x in jax.tree.leaves(state)]
        data = io.BytesIO()  # as bytes: files support only NumPy's own dtypes
        np.savez(data, np.asarray(place), *[x.reshape(-1).view(np.uint8) for x in leaves])
        with Replacement(_NAME, self._file) as file:
            file.write(0, data.getbuffer())
            file.commit()

    def read(self, state: Any) -> tuple[int, Any]:
        """Returns the next position and what it reads; without a file, the first."""
        if not os.path.exists(self._file):
            return 0, state
        leaves, tree = jax.tree.flatten(state)
        with np.load(self._file, allow_pickle=False) as file:
            place, *found = (file[name] for name in file.files)
        pairs = zip(found, leaves, strict=True)
        return int(place), tree.unflatten(
            [jax.device_put(x.view(y.dtype).reshape(y.shape), y.sharding) for x, y in pairs]
        )


def _vocabulary(own: Decoding, arrays: Any, rows: int) -> tuple[int, Any]:
    """Returns the number of tokens, and the jaxpr of a step, after checking what it returns."""

    def one(arrays: Any, tokens: Any, place: Any) -> Any:
        values, cache = own.start(arrays)
        return own.step(values, cache, tokens, place), cache

    tokens, place = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((rows,), ()))
    jaxpr, (found, before) = jax.make_jaxpr(one, return_shape=True)(arrays, tokens, place)
    is_pair = isinstance(found, (tuple, list)) and len(found) == 2
    shape = getattr(found[0], "shape", None) if is_pair else None
    is_same = is_pair and jax.tree.map(_kind, found[1]) == jax.tree.map(_kind, before)
    if not (shape is not None and len(shape) == 2 and shape[0] == rows and is_same):
        raise fail(
            _NAME,
            "`step` does not return logits, and the cache as it was given.",
            given=f"{jax.tree.map(_kind, found)}, for a cache {jax.tree.map(_kind, before)}",
            expected=f"(logits [{rows}, vocabulary], cache)",
            fix="let it take the tokens [rows] of one position, and return the logits of the next.",
            error=TypeError,
        )
    assert shape is not None
    return int(shape[1]), jaxpr


def _kind(x: Any) -> str:
    return f"{x.dtype}{[*x.shape]}"


def _tokens(name: str, given: Any, size: int) -> np.ndarray:
    """Returns tokens as integers, after checking that the vocabulary has them."""
    found = np.asarray(given, np.int64 if np.size(given) == 0 else None)
    if not (np.issubdtype(found.dtype, np.integer) and np.all((found >= 0) & (found < size))):
        raise fail(
            _NAME,
            f"`{name}` is not a token.",
            given=f"{name} == {shown(given)}",
            expected=f"integers from 0 to {size - 1}",
            fix="pass numbers of tokens, not their text.",
        )
    return found
