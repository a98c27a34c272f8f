"""Text that a function writes itself, as batches of `ptq`: alone, or beside those of the user."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import shown
from .._errors import fail
from ..transforms._shared import Unable, arrays_of, placed
from ._hoisted import Own
from ._late_folders import algorithms, shared_algorithms
from ._token_inputs import TokenInputs

_ROWS, _LENGTHS = 16, (512, 256, 128, 64, 32, 16)

WITHOUT = "without text of its own: "

_BETTER_THAN_CHANCE = 0.8
"""A function predicts the next token if it takes at most this part of the nats that a guess among
all tokens takes.
"""


def check_own_text(own_text: Any) -> None:
    """Checks the value of `own_text=`."""
    if own_text is not None and own_text is not True and own_text is not False:
        raise fail(
            "ptq",
            "`own_text` is unknown.",
            given=f"own_text == {shown(own_text)}",
            expected="True, False, or None, which writes text beside batches of tokens for the "
            "default "
            "algorithm",
            fix="leave it out; or write the text yourself, jqx.algorithms.own_text(f, params, "
            "...), "
            "and pass it among the batches.",
        )


class OwnRows:
    """Rows of text that a function writes itself, as batches of one row. They are written when they
    are first read.

    Attributes:
      first: a batch of the same shape.
    """

    def __init__(self, own: Own, progress: bool):
        self._params, self._progress = own.params, progress
        self._f = lambda params, tokens: own.f(*placed(own.places, params, (tokens,)))
        self._text: np.ndarray | None = None
        why = ""
        for length in _LENGTHS:
            found = shared_algorithms.tokens_of(self._f, own.params, 1, length)
            if not isinstance(found, str):
                self.first = np.zeros(found.shape, np.int32)
                return
            why = why or found
        raise fail(
            "ptq",
            "there are no batches, and the function does not map tokens to logits.",
            given=why,
            expected="batches; or a causal function f(params, tokens) of tokens [rows, length] "
            "or [length] to logits for each, which writes its own text",
            fix="pass the parameters, and a list of batches, such as [x].",
            error=TypeError,
        )

    @property
    def written(self) -> str:
        """What was written, as text; empty if nothing was read."""
        return "" if self._text is None else f"calibrated on {_described(self._text)}"

    def __iter__(self) -> Iterator[np.ndarray]:
        if self._text is None:
            options = {"rows": _ROWS, "length": self._length(), "progress": self._progress}
            self._text = np.asarray(algorithms.own_text(self._f, self._params, **options))
        for row in self._text:
            yield row.reshape(*self.first.shape[:-1], -1)

    def _length(self) -> int:
        """Returns the most tokens of which no logits are NaN, as they are after the last place of a
        table that is looked up in by `jnp.take`.
        """
        arrays, filled = arrays_of(self._params)
        *lead, most = self.first.shape

        @jax.jit
        def is_nan(arrays: Any, tokens: Any) -> Any:
            return jnp.isnan(self._f(filled(arrays), tokens)).any()

        lengths = (x for x in _LENGTHS if x <= most)
        found = (x for x in lengths if not is_nan(arrays, np.zeros((*lead, x), np.int32)))
        return next(found, most)


def with_own_text(
    own: Own, given: TokenInputs, batches: Sequence[Any], *, progress: bool, slow: bool
) -> tuple[Sequence[Any], str]:
    """Returns batches of tokens, with rows that the function writes itself between them, and what
    was done as text.

    The rows have about as many tokens as 16 rows of 512. They come in batches of the shape of the
    first, or of shorter rows, and begin with the token that all rows of the batches begin with, or
    with 0. They have no padding.

    Args:
      own: the function and its parameters.
      given: the tokens of the batches, and what other inputs are beside them.
      batches: the batches of the user.
      progress: whether to show a progress bar.
      slow: whether each token may take an evaluation of all positions.
    """
    arrays, filled = arrays_of(own.params)

    def f(arrays: Any, tokens: Any) -> Any:
        return own.f(*placed(own.places, filled(arrays), given.inputs(tokens)))

    shape = given.tokens[0].shape
    length = min(shape[-1], _LENGTHS[0])
    count = -(-_ROWS * _LENGTHS[0] // length)
    rows = min(math.prod(shape[:-1]), count)
    form = {"rows": -(-count // rows) * rows, "length": length}
    if isinstance(shared_algorithms.tokens_of(f, arrays, **form), str):
        return batches, f"{WITHOUT}it does not take {form['rows']} rows of {length} tokens"
    why = _why_not(f, arrays, given)
    if why:
        return batches, WITHOUT + why
    name = "algorithms.own_text"
    try:
        steps = shared_algorithms.decoding_of(name, f, arrays, **form, slow=slow)
    except (Unable, shared_algorithms.NotCausal) as error:
        return batches, WITHOUT + str(error).splitlines()[0].removeprefix(f"jqx.{name}: ")
    firsts = np.array([x[0] for x in given.rows()])
    start = int(firsts[0]) if len(firsts) > 1 and len(np.unique(firsts)) == 1 else 0
    options: dict[str, Any] = {**form, "key": jax.random.key(0), "progress": progress}
    text = np.asarray(shared_algorithms.written(steps, arrays, start, **options))
    parts = text.reshape(-1, *(rows for _ in shape[1:]), length)
    note = f"calibrated on {len(firsts)} rows of the batches and on {_described(text)}"
    return _between(batches, [given.batch(x) for x in parts]), note


def _why_not(f: Any, params: Any, given: TokenInputs) -> str:
    """Returns why a function does not predict the next tokens, as text; empty if it does."""
    length = given.tokens[0].shape[-1]
    row = max(given.rows(), key=len)[:length]
    takes = shared_algorithms.tokens_of(f, params, 1, length)
    lead = given.tokens[0].shape[:-1] if isinstance(takes, str) else takes.shape[:-1]
    tokens = np.broadcast_to(np.resize(row, length), (*lead, length))
    size = jax.eval_shape(f, params, tokens).shape[-1]

    @jax.jit
    def nats(params: Any, tokens: Any) -> Any:
        logits = f(params, tokens).reshape(-1, length, size)[0, : len(row) - 1]
        found = jax.nn.log_softmax(logits.astype(jnp.float32))
        new = tokens.reshape(-1, length)[0, 1 : len(row)]
        return -jnp.take_along_axis(found, new[:, None], 1).mean()

    # What follows the row has no effect, if the function is causal.
    taken, chance = float(nats(params, tokens)), float(np.log(size))
    if taken <= _BETTER_THAN_CHANCE * chance:
        return ""
    return (
        f"it does not predict the next tokens of the longest row ({taken:.3g} nats a token, and a "
        f"guess takes {chance:.3g})"
    )


def _between(batches: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns all batches, those of each kind spread evenly, beginning with one of the first."""
    placed_at = [
        (i / len(every), kind, i)
        for kind, every in enumerate((batches, others))
        for i in range(len(every))
    ]
    return [(batches, others)[kind][i] for _, kind, i in sorted(placed_at)]


def _described(text: np.ndarray) -> str:
    length = text.shape[-1]
    return f"{text.size // length} rows of {length} tokens that the function wrote itself"
