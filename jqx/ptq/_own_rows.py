"""Text that a function writes itself, as batches of `ptq`: alone, or beside those of the user."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import require_that, shown
from .._errors import message
from ..tensor._shared import Lazy
from ..transforms._shared import Unable, arrays_of, placed
from ._hoisted import Own
from ._late_folders import algorithms, shared_algorithms

_ROWS, _LENGTHS = 16, (512, 256, 128, 64, 32, 16)

_BETTER_THAN_CHANCE = 0.8
"""A function predicts the next token if it takes at most this part of the nats that a guess among
all tokens takes.
"""


def check_own_text(own_text: Any) -> None:
    """Checks the value of `own_text=`."""
    require_that(
        own_text is None or own_text is True or own_text is False,
        error=ValueError,
        function="ptq",
        problem="`own_text` is unknown.",
        given=f"own_text == {shown(own_text)}",
        expected="True, False, or None, which writes text beside batches of tokens for the default "
        "algorithm",
        mend="leave it out; or write the text yourself, jqx.algorithms.own_text(f, params, ...), "
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
        self._f = _of_tokens(own)
        self._text: np.ndarray | None = None
        why = ""
        for length in _LENGTHS:
            found = shared_algorithms.tokens_of(self._f, own.params, 1, length)
            if not isinstance(found, str):
                self.first = np.zeros(found.shape, np.int32)
                return
            why = why or found
        raise TypeError(
            message(
                "ptq",
                "there are no batches, and the function does not map tokens to logits.",
                given=why,
                expected="batches; or a causal function f(params, tokens) of tokens [rows, length] "
                "or [length] to logits for each, which writes its own text",
                mend="pass the parameters, and a list of batches, such as [x].",
            )
        )

    @property
    def written(self) -> str:
        """What was written, as text; empty if nothing was read."""
        return "" if self._text is None else f"calibrated on {_described(self._text)}"

    def __iter__(self) -> Iterator[np.ndarray]:
        if self._text is None:
            options = {"rows": _ROWS, "length": self.first.shape[-1], "progress": self._progress}
            self._text = np.asarray(algorithms.own_text(self._f, self._params, **options))
        for row in self._text:
            yield row.reshape(self.first.shape)


def with_own_text(
    own: Own, first: np.ndarray, batches: Sequence[Any], *, progress: bool, slow: bool
) -> tuple[Sequence[Any], str]:
    """Returns batches of tokens, with rows that the function writes itself between them, and what
    was done as text, empty if the function does not return logits.

    The rows have about as many tokens as 16 rows of 512. They come in batches of the shape of the
    first, or of shorter rows, and begin with the token that all rows of the first batch begin with,
    or with 0.

    Args:
      own: the function and its parameters.
      first: the first batch that is not empty.
      batches: the batches of the user.
      progress: whether to show a progress bar.
      slow: whether each token may take an evaluation of all positions.
    """
    tokens, of_tokens = np.asarray(first), _of_tokens(own)
    leaves = jax.tree.leaves(own.params, is_leaf=lambda x: isinstance(x, Lazy))
    if any(isinstance(x, Lazy) for x in leaves):
        return batches, "without text of its own: parameters are read one at a time"
    arrays, filled = arrays_of(own.params)
    f = lambda arrays, tokens: of_tokens(filled(arrays), tokens)  # noqa: E731
    why = _why_not(f, arrays, tokens)
    if why is not None:
        return batches, f"without text of its own: {why}" if why else ""
    given = [np.asarray(x) for x in jax.tree.leaves(batches)]
    firsts = np.concatenate([x[..., 0].reshape(-1) for x in given])
    start = int(firsts[0]) if len(firsts) > 1 and len(np.unique(firsts)) == 1 else 0
    length = min(tokens.shape[-1], _LENGTHS[0])
    count = -(-_ROWS * _LENGTHS[0] // length)
    rows = min(tokens.size // tokens.shape[-1], count)
    form = {"rows": -(-count // rows) * rows, "length": length}
    try:
        steps = shared_algorithms.decoding_of("algorithms.own_text", f, arrays, **form, slow=slow)
    except (Unable, shared_algorithms.NotCausal) as error:
        return batches, f"without text of its own: {str(error).splitlines()[0]}"
    begun = jax.jit(steps.start)(arrays)
    options: dict[str, Any] = {**form, "start": start, "progress": progress}
    text = np.asarray(algorithms.own_text(steps.step, *begun, **options)).astype(tokens.dtype)
    parts = text.reshape(-1, *(rows for _ in tokens.shape[1:]), length)
    note = f"calibrated on {len(firsts)} rows of the batches and on {_described(text)}"
    return _between(batches, list(parts)), note


def _of_tokens(own: Own) -> Any:
    """Returns the function `f(params, tokens)`."""
    return lambda params, tokens: own.f(*placed(own.places, params, (tokens,)))


def is_tokens(inputs: Sequence[Any]) -> bool:
    """Whether inputs are one array of integers, [rows, length] or [length]."""
    kind = getattr(inputs[0], "dtype", np.float32) if len(inputs) == 1 else np.float32
    is_integer = jnp.issubdtype(kind, jnp.integer) and np.dtype(kind).itemsize > 1
    return bool(is_integer and inputs[0].ndim in (1, 2) and inputs[0].shape[-1] > 1)


def _why_not(f: Any, params: Any, tokens: np.ndarray) -> str | None:
    """Returns why a function does not write text, as text; empty if it is not one of tokens and
    logits at all, and `None` if it may write some.
    """
    logits: Any = jax.eval_shape(f, params, tokens)
    kind, shape = getattr(logits, "dtype", np.int32), tuple(getattr(logits, "shape", ()))
    if not jnp.issubdtype(kind, jnp.floating) or not shape or shape[:-1] != tokens.shape:
        return ""
    size = shape[-1]
    if tokens.min() < 0 or tokens.max() >= size:
        return f"its {size} logits are not those of tokens up to {tokens.max()}"

    one = tokens[:1] if tokens.ndim == 2 else tokens
    if shared_algorithms.tokens_of(f, params, 1, one.shape[-1]) == jax.ShapeDtypeStruct(
        one.shape, jnp.int32
    ):
        tokens = one  # logits of all rows may take much memory

    @jax.jit
    def nats(params: Any, tokens: Any) -> Any:
        found = jax.nn.log_softmax(f(params, tokens)[..., :-1, :].astype(jnp.float32))
        return -jnp.take_along_axis(found, tokens[..., 1:, None], -1).mean()

    taken, chance = float(nats(params, tokens)), float(np.log(size))
    if taken <= _BETTER_THAN_CHANCE * chance:
        return None
    return (
        f"it does not predict the next tokens of the first batch ({taken:.3g} nats a token, and a "
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
