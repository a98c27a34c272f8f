"""Text that a language model writes itself, to calibrate it with."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import called, check_integer, shown
from ..errors import fail, message, warn
from ..files import Path
from ..transforms.arguments import check_concrete, check_function
from ..transforms.calibrate import advancing, arrays_of
from .stepwise import Unable, stepwise
from .store import Checkpoint, digest

# One step of a language model, from a step function or from a plain function of tokens.


_SEEN = 8
"""Positions at which a derived step is compared with the function."""

Logits = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A model that is given a token of each row at a time.

    Attributes:
      start: `start(params) -> (values, cache)`, what each step reads in place of the parameters,
        and the cache before the first token.
      step: `step(values, cache, tokens, position) -> (logits, cache)`, tokens [rows] and logits
        [rows, vocabulary]; jitted, and the cache is donated.
    """

    start: Callable[[Any], tuple[Any, Any]]
    step: Callable[..., tuple[Any, Any]]


class NotCausal(ValueError):
    """Logits depend on later tokens."""


def decoding_of(
    name: str, f: Logits, params: Any, rows: int, length: int, slow: bool = True
) -> Decoding:
    """Returns the steps of a causal function `f(params, tokens)`, [rows, length] or [length] to
    logits for each token, of parameters that are all arrays.

    Where each step has to evaluate all positions, this warns, or raises unless `slow`.

    Raises:
      TypeError: the result of `f` is something else.
      NotCausal: a result depends on later tokens.
      Unable: each step would have to evaluate all positions.
    """
    forms = _forms(name, f, params, rows, length)
    checked = min(_SEEN, length)
    takes_few = not isinstance(tokens_of(f, params, rows, checked), str)
    evaluated = checked if takes_few else length  # a table of places may have one length
    tokens, logits = _sample(name, forms[0], params, (rows, evaluated), checked)
    reason = ""
    for form in forms:
        try:
            steps = _derived(form, params, rows, length)
            _check_same(steps, params, tokens, logits)
            return steps
        except Unable as error:
            reason = reason or str(error)
    if not slow:
        raise Unable(reason)
    warn(
        message(
            name,
            "the function is evaluated for all positions at each token, which is slow.",
            given=reason,
            fix="pass a step function with its cache: own_text(step, params, cache, ...).",
        )
    )
    return _all_positions(forms[0], rows, length)


@dataclasses.dataclass(frozen=True)
class _Form:
    """How a function takes tokens: `f(params, tokens)` of tokens [*lead, length], for all rows at
    once, or mapped over rows.
    """

    f: Logits
    lead: tuple[int, ...]
    is_mapped: bool

    def all(self, params: Any, tokens: Any) -> Any:
        """Returns the logits of all rows."""
        if not self.is_mapped:
            return self.f(params, tokens)
        by_row = tokens.reshape(-1, *self.lead, tokens.shape[-1])
        logits = jax.vmap(lambda x: self.f(params, x))(by_row)
        return logits.reshape(*tokens.shape, -1)


def tokens_of(f: Logits, params: Any, rows: int, length: int) -> jax.ShapeDtypeStruct | str:
    """Returns the tokens that a function maps to logits, [rows, length], [1, length] or [length],
    or as text what it does instead.
    """
    arrays, filled = arrays_of(params)
    reasons = []
    for shape in dict.fromkeys([(rows, length), (1, length), (length,)]):
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        try:
            result = jax.eval_shape(lambda a, x: f(filled(a), x), arrays, tokens)
        except Exception as error:
            reasons.append(f"for {[*shape]}: {' '.join(str(error).split())[:200]}")
            continue
        kind = getattr(result, "dtype", np.int32)
        if jnp.issubdtype(kind, jnp.floating) and result.shape[:-1] == shape:
            return tokens
        kinds = jax.tree.map(lambda x: f"{x.dtype}{[*x.shape]}", result)
        reasons.append(f"its result for int32{[*shape]} is {kinds}")
    return "; ".join(reasons)


def _forms(name: str, f: Logits, params: Any, rows: int, length: int) -> list[_Form]:
    """Returns the ways in which a function takes rows of tokens."""
    tokens = tokens_of(f, params, rows, length)
    if not isinstance(tokens, str):
        mapped = _Form(f, tokens.shape[:-1] and (1,), True)
        return [_Form(f, (rows,), False), mapped] if tokens.shape == (rows, length) else [mapped]
    problem = "the function does not map tokens to logits."
    expected = f"float logits [{rows}, {length}, vocabulary], or [{length}, vocabulary]"
    fix = "pass lambda params, tokens: ..., which returns the logits alone, or a step function "
    fix += "with its cache; other functions need batches of their own inputs."
    raise fail(name, problem, given=tokens, expected=expected, fix=fix, error=TypeError)


def _derived(form: _Form, params: Any, rows: int, length: int) -> Decoding:
    """Returns the steps of a function, from its jaxpr."""
    lead = form.lead
    tokens = jax.ShapeDtypeStruct((*lead, length), jnp.int32)
    derived = stepwise(form.f, tokens, params)

    def start(params: Any) -> Any:
        cache, parts = derived.start(params)
        if form.is_mapped:
            cache = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), cache)
        return (params, parts), cache

    def step(values: Any, cache: Any, tokens: Any, position: Any) -> Any:
        params, parts = values
        run = lambda state, x: derived.step(state, position, x, parts, params)  # noqa: E731
        if form.is_mapped:
            row_tokens = tokens.reshape(rows, *[1 for _ in lead], 1)
            logits, cache = jax.vmap(run)(cache, row_tokens)
        else:
            logits, cache = run(cache, tokens[:, None])
        return logits.reshape(rows, -1), cache

    return Decoding(jax.jit(start), jax.jit(step, donate_argnums=1))


def _all_positions(form: _Form, rows: int, length: int) -> Decoding:
    """Returns steps that evaluate all positions; the cache is the tokens."""

    def start(params: Any) -> Any:
        return params, jnp.zeros((rows, length), jnp.int32)

    def step(params: Any, cache: Any, tokens: Any, position: Any) -> Any:
        cache = lax.dynamic_update_slice(cache, tokens[:, None], (0, position))
        logits = form.all(params, cache)
        return lax.dynamic_index_in_dim(logits, position, 1, keepdims=False), cache

    return Decoding(start, jax.jit(step, donate_argnums=1))


def _sample(
    name: str, form: _Form, params: Any, shape: tuple[int, int], checked: int
) -> tuple[Any, Any]:
    """Returns random tokens, and their logits by the function, at the first positions. Raises if
    logits depend on later tokens.
    """
    run = jax.jit(lambda params, tokens: form.all(params, tokens)[:, :checked])
    size = jax.eval_shape(run, params, jax.ShapeDtypeStruct(shape, jnp.int32)).shape[-1]
    tokens = np.random.default_rng(0).integers(0, size, shape).astype(np.int32)
    altered, last_tokens = tokens.copy(), tokens[:, checked - 1]
    altered[:, checked - 1] = np.where(last_tokens == 0, 1, last_tokens - 1)
    logits, changed = (np.asarray(run(params, x), np.float64) for x in (tokens, altered))
    a, b = logits[:, :-1], changed[:, :-1]
    if _near(a, b, params):
        return tokens[:, :checked], logits
    problem = "the function is not causal: logits depend on later tokens."
    detail = f"with another last token, earlier logits change by {np.abs(a - b).max():.3g}"
    fix = "pass batches of your own inputs, if this is not a model that writes text."
    raise fail(name, problem, given=detail, fix=fix, error=NotCausal)


def _check_same(steps: Decoding, params: Any, tokens: Any, logits: Any) -> None:
    """Raises `Unable` if steps do not have the logits of the function."""

    values, cache = steps.start(params)
    by_position = []
    for position, current in enumerate(tokens.T):
        new_logits, cache = steps.step(values, cache, current, np.int32(position))
        by_position.append(np.asarray(new_logits, np.float64))
    if not _near(np.stack(by_position, 1), logits, params):
        raise Unable("evaluated one position at a time, its logits differ")


def _near(a: Any, b: Any, params: Any) -> bool:
    """Whether logits are those of another order of sums."""
    kinds = [x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    eps = max([float(jnp.finfo(x).eps) for x in kinds], default=1e-7)
    largest = np.abs(b[np.isfinite(b)]).max(initial=0)
    return np.allclose(a, b, rtol=0, atol=max(1e-3, 8 * eps) * largest, equal_nan=True)


_NAME = "algorithms.own_text"
_CHUNK = 32
"""Positions that are written by one call, after which a bar advances."""

_SAVED = 4
"""Calls after which a checkpoint is written."""

_TEXT = "text"
"""The name of the text so far, and of its cache, in a checkpoint."""


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
    for name, value, minimum in (("rows", rows, 1), ("length", length, 2)):
        if check_integer(_NAME, name, value) < minimum:
            problem = f"`{name}` is {value}, and not {minimum} or more."
            fix = "16 rows of 512 tokens are enough for models of a hundred million weights."
            raise fail(_NAME, problem, fix=fix)
    if not (isinstance(temperature, (int, float)) and 0 < temperature < np.inf):
        problem = f"`temperature` is not a positive number: temperature == {shown(temperature)}."
        fix = "leave it out for 1.0, the distribution of the model."
        raise fail(_NAME, problem, fix=fix)
    arrays, filled = arrays_of(params)
    f = lambda arrays, *args: step(filled(arrays), *args)  # noqa: E731
    if cache is None:
        decoding = decoding_of(_NAME, f, arrays, rows, length)
    else:
        decoding = Decoding(
            lambda arrays: (arrays, jax.tree.map(jnp.array, cache)),  # steps donate the copy
            jax.jit(f, donate_argnums=1),
        )
    key = jax.random.key(0) if key is None else key
    how = temperature, never, checkpoint, progress
    return written(decoding, arrays, start, rows, length, key, *how)


def written(
    decoding: Decoding,
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
    size, jaxpr = _vocabulary(decoding, arrays, rows)
    first_tokens, banned = _tokens("start", start, size), _tokens("never", never, size)
    values, state_cache = decoding.start(arrays)

    @partial(jax.jit, donate_argnums=0)
    def draw(text: Any, logits: Any, key: Any, position: Any) -> Any:
        tokens, is_good = text
        logits = logits.astype(jnp.float32) / temperature
        is_good &= ~jnp.any(jnp.isnan(logits))
        logits = logits.at[:, banned].set(-jnp.inf)
        new = jax.random.categorical(jax.random.fold_in(key, position), logits).astype(jnp.int32)
        tokens = lax.dynamic_update_slice(tokens, new[:, None], (0, position + 1))
        return (tokens, is_good), new

    tokens = jnp.zeros((rows, length), jnp.int32).at[:, 0].set(jnp.asarray(first_tokens, jnp.int32))
    state, saved, begun = (tokens, state_cache, jnp.asarray(True)), None, 0
    if checkpoint is not None:
        options = first_tokens, rows, length, jax.random.key_data(key), temperature, banned
        made_of = {"function": str(jaxpr), "parameters": arrays, "options": options}
        saved = Checkpoint(_NAME, checkpoint, {name: digest(x) for name, x in made_of.items()})
        begun, state = _saved(saved, state)
    tokens, state_cache, is_good = state
    current, text, state = tokens[:, begun], (tokens, is_good), None
    with advancing("write", "token", rows * (length - 1), progress) as advance:
        advance(rows * begun)
        for begin in range(begun, length - 1, _CHUNK):
            end = min(begin + _CHUNK, length - 1)
            for position in map(np.int32, range(begin, end)):
                logits, state_cache = decoding.step(values, state_cache, current, position)
                text, current = draw(text, logits, key, position)
                # Callbacks of many steps at once may use up all threads.
                current.block_until_ready()
            if not bool(text[1]):
                problem = f"logits hold a NaN, at one of the positions {begin} to {end - 1}."
                fix = "look for what is not finite in the model, or pass a shorter length=, if the "
                fix += "model has fewer positions."
                raise fail(_NAME, problem, fix=fix)
            advance(rows * (end - begin))
            if saved is not None and (end % (_SAVED * _CHUNK) == 0 or end == length - 1):
                leaves = map(np.asarray, jax.tree.leaves((text[0], state_cache, text[1])))
                arrays = [np.asarray(end), *(x.reshape(-1).view(np.uint8) for x in leaves)]
                saved.put(_TEXT, {f"arr_{i}": x for i, x in enumerate(arrays)})
    return text[0]


def _saved(checkpoint: Checkpoint, state: Any) -> tuple[int, Any]:
    """Returns the next position and what it reads, from a checkpoint; without one, the first."""
    stored = checkpoint.get(_TEXT)
    if stored is None:
        return 0, state
    leaves, tree = jax.tree.flatten(state)
    position, *arrays = stored.values()
    pairs = zip(arrays, leaves, strict=True)
    return int(position), tree.unflatten(
        [jax.device_put(x.view(y.dtype).reshape(y.shape), y.sharding) for x, y in pairs]
    )


def _vocabulary(decoding: Decoding, arrays: Any, rows: int) -> tuple[int, Any]:
    """Returns the number of tokens, and the jaxpr of a step, after checking what it returns."""

    def one(arrays: Any, tokens: Any, position: Any) -> Any:
        values, cache = decoding.start(arrays)
        return decoding.step(values, cache, tokens, position), cache

    tokens, position = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((rows,), ()))
    jaxpr, (result, first_cache) = jax.make_jaxpr(one, return_shape=True)(arrays, tokens, position)
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    shape = getattr(result[0], "shape", None) if is_pair else None
    is_same = is_pair and jax.tree.map(_kind, result[1]) == jax.tree.map(_kind, first_cache)
    if not (shape is not None and len(shape) == 2 and shape[0] == rows and is_same):
        problem = "`step` does not return logits, and the cache as it was given."
        kinds, cache_kinds = (jax.tree.map(_kind, x) for x in (result, first_cache))
        detail, expected = (
            f"{kinds}, for a cache {cache_kinds}",
            f"(logits [{rows}, vocabulary], cache)",
        )
        fix = "let it take the tokens [rows] of one position, and return the logits of the next."
        raise fail(_NAME, problem, given=detail, expected=expected, fix=fix, error=TypeError)
    return int(shape[1]), jaxpr


def _kind(x: Any) -> str:
    return f"{x.dtype}{[*x.shape]}"


def _tokens(name: str, tokens: Any, size: int) -> np.ndarray:
    """Returns tokens as integers, after checking that the vocabulary has them."""
    numbers = np.asarray(tokens, np.int64 if np.size(tokens) == 0 else None)
    if not (np.issubdtype(numbers.dtype, np.integer) and np.all((numbers >= 0) & (numbers < size))):
        problem = f"`{name}` is not a token: {shown(tokens)}."
        fix = f"pass numbers of tokens, integers from 0 to {size - 1}, not their text."
        raise fail(_NAME, problem, fix=fix)
    return numbers
