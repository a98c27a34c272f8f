"""`ptq` without batches: on text that the function writes itself."""

from collections.abc import Iterator

import numpy as np

from .._errors import message
from ..transforms._shared import placed
from ._hoisted import Own
from ._late_folders import algorithms, shared_algorithms

_ROWS, _LENGTHS = 16, (512, 256, 128, 64, 32, 16)


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
        if self._text is None:
            return ""
        rows, length = self._text.shape
        return f"calibrated on {rows} rows of {length} tokens that the function wrote itself"

    def __iter__(self) -> Iterator[np.ndarray]:
        if self._text is None:
            options = {"rows": _ROWS, "length": self.first.shape[-1], "progress": self._progress}
            self._text = np.asarray(algorithms.own_text(self._f, self._params, **options))
        for row in self._text:
            yield row.reshape(self.first.shape)
