"""One step of a language model, from a step function or from a plain function of tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._errors import fail, message, warn
from ..transforms._shared import Unable, arrays_of, stepwise

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
    seen = min(_SEEN, length)
    takes_few = not isinstance(tokens_of(f, params, rows, seen), str)
    whole = seen if takes_few else length  # a table of places may have one length
    tokens, logits = _sample(name, forms[0], params, (rows, whole), seen)
    why = ""
    for each in forms:
        try:
            steps = _derived(each, params, rows, length)
            _check_same(steps, params, tokens, logits)
            return steps
        except Unable as error:
            why = why or str(error)
    if not slow:
        raise Unable(why)
    warn(
        message(
            name,
            "the function is evaluated for all positions at each token, which is slow.",
            given=why,
            expected="a function whose jaxpr can be evaluated one position at a time",
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
        own = tokens.reshape(-1, *self.lead, tokens.shape[-1])
        found = jax.vmap(lambda x: self.f(params, x))(own)
        return found.reshape(*tokens.shape, -1)


def tokens_of(f: Logits, params: Any, rows: int, length: int) -> jax.ShapeDtypeStruct | str:
    """Returns the tokens that a function maps to logits, [rows, length], [1, length] or [length],
    or as text what it does instead.
    """
    arrays, filled = arrays_of(params)
    why = []
    for shape in dict.fromkeys([(rows, length), (1, length), (length,)]):
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        try:
            found = jax.eval_shape(lambda a, x: f(filled(a), x), arrays, tokens)
        except Exception as error:
            why.append(f"for {[*shape]}: {' '.join(str(error).split())[:200]}")
            continue
        kind = getattr(found, "dtype", np.int32)
        if jnp.issubdtype(kind, jnp.floating) and found.shape[:-1] == shape:
            return tokens
        kinds = jax.tree.map(lambda x: f"{x.dtype}{[*x.shape]}", found)
        why.append(f"its result for int32{[*shape]} is {kinds}")
    return "; ".join(why)


def _forms(name: str, f: Logits, params: Any, rows: int, length: int) -> list[_Form]:
    """Returns the ways in which a function takes rows of tokens."""
    tokens = tokens_of(f, params, rows, length)
    if not isinstance(tokens, str):
        one = _Form(f, tokens.shape[:-1] and (1,), True)
        return [_Form(f, (rows,), False), one] if tokens.shape == (rows, length) else [one]
    raise fail(
        name,
        "the function does not map tokens to logits.",
        given=tokens,
        expected=f"float logits [{rows}, {length}, vocabulary], or [{length}, vocabulary] for "
        "one row",
        fix="pass lambda params, tokens: ..., which returns the logits alone, or a step "
        "function with its cache; other functions need batches of their own inputs.",
        error=TypeError,
    )


def _derived(form: _Form, params: Any, rows: int, length: int) -> Decoding:
    """Returns the steps of a function, from its jaxpr."""
    lead = form.lead
    tokens = jax.ShapeDtypeStruct((*lead, length), jnp.int32)
    found = stepwise(form.f, tokens, params)

    def start(params: Any) -> Any:
        cache, parts = found.start(params)
        if form.is_mapped:
            cache = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), cache)
        return (params, parts), cache

    def step(values: Any, cache: Any, tokens: Any, place: Any) -> Any:
        params, parts = values
        run = lambda kept, x: found.step(kept, place, x, parts, params)  # noqa: E731
        if form.is_mapped:
            own = tokens.reshape(rows, *[1 for _ in lead], 1)
            logits, cache = jax.vmap(run)(cache, own)
        else:
            logits, cache = run(cache, tokens[:, None])
        return logits.reshape(rows, -1), cache

    return Decoding(jax.jit(start), jax.jit(step, donate_argnums=1))


def _all_positions(form: _Form, rows: int, length: int) -> Decoding:
    """Returns steps that evaluate all positions; the cache is the tokens."""

    def start(params: Any) -> Any:
        return params, jnp.zeros((rows, length), jnp.int32)

    def step(params: Any, cache: Any, tokens: Any, place: Any) -> Any:
        cache = lax.dynamic_update_slice(cache, tokens[:, None], (0, place))
        logits = form.all(params, cache)
        return lax.dynamic_index_in_dim(logits, place, 1, keepdims=False), cache

    return Decoding(start, jax.jit(step, donate_argnums=1))


def _sample(
    name: str, form: _Form, params: Any, shape: tuple[int, int], seen: int
) -> tuple[Any, Any]:
    """Returns random tokens, and their logits by the function, at the first positions. Raises if
    logits depend on later tokens.
    """
    run = jax.jit(lambda params, tokens: form.all(params, tokens)[:, :seen])
    size = jax.eval_shape(run, params, jax.ShapeDtypeStruct(shape, jnp.int32)).shape[-1]
    tokens = np.random.default_rng(0).integers(0, size, shape).astype(np.int32)
    other, last = tokens.copy(), tokens[:, seen - 1]
    other[:, seen - 1] = np.where(last == 0, 1, last - 1)
    logits, changed = (np.asarray(run(params, x), np.float64) for x in (tokens, other))
    a, b = logits[:, :-1], changed[:, :-1]
    if _near(a, b, params):
        return tokens[:, :seen], logits
    raise fail(
        name,
        "the function is not causal: logits depend on later tokens.",
        given=f"with another last token, earlier logits change by {np.abs(a - b).max():.3g}",
        expected="logits for each token that depend on this token and those before it",
        fix="pass batches of your own inputs, if this is not a model that writes text.",
        error=NotCausal,
    )


def _check_same(steps: Decoding, params: Any, tokens: Any, logits: Any) -> None:
    """Raises `Unable` if steps do not have the logits of the function."""

    values, cache = steps.start(params)
    each = []
    for place, now in enumerate(tokens.T):
        found, cache = steps.step(values, cache, now, np.int32(place))
        each.append(np.asarray(found, np.float64))
    found = np.stack(each, 1)
    if not _near(found, logits, params):
        raise Unable("evaluated one position at a time, its logits differ")


def _near(a: Any, b: Any, params: Any) -> bool:
    """Whether logits are those of another order of sums."""
    kinds = [x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    eps = max([float(jnp.finfo(x).eps) for x in kinds], default=1e-7)
    most = np.abs(b[np.isfinite(b)]).max(initial=0)
    return np.allclose(a, b, rtol=0, atol=max(1e-3, 8 * eps) * most, equal_nan=True)
