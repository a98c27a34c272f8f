"""Rows beside those of the user, so that scales and codes carry over to other inputs."""

from collections.abc import Iterable, Sequence
from typing import Any

from .._errors import fail
from ..transforms import Plan
from ..transforms._shared import kind_of
from ._hoisted import Own
from ._own_rows import WITHOUT, with_own_text
from ._padding import Padding
from ._token_inputs import shape_of_tokens, token_inputs
from ._varied import with_varied_rows


def with_other_rows(
    own: Own,
    plan: Plan,
    first: Sequence[Any],
    batches: Iterable[Any],
    padding: Padding | None,
    *,
    required: bool,
    progress: bool,
) -> tuple[Iterable[Any], list[str]]:
    """Returns batches with others beside them, and what was done as text; no text if the function
    is not one of tokens.

    Args:
      own: the function and its parameters.
      plan: the plan.
      first: the arguments of the first batch.
      batches: the batches of the user. They are read only if they are tokens.
      padding: the mask of padded rows, if there is one.
      required: whether it is an error if there are no other rows.
      progress: whether to show a progress bar.

    Raises:
      TypeError: `required`, and there are no other rows.
    """
    notes: list[str] = []
    shape = shape_of_tokens(own, first)
    is_read = padding is not None or shape is not None
    given = every = list(batches) if is_read else []
    if shape is not None:
        found = shape if isinstance(shape, str) else token_inputs(given, padding, shape)
        if isinstance(found, str):
            notes.append(WITHOUT + found)
        else:
            options: Any = {"progress": progress, "slow": required}
            every, note = with_own_text(own, found, given, **options)
            notes.append(note)
    if padding is not None and every is given:
        every, note = with_varied_rows(plan, given, padding)
        notes.extend([note] if note else [])
    if required and not len(every) > len(given):
        raise fail(
            "ptq",
            "own_text=True, and there is no other text for the function.",
            given="; ".join(notes) or f"batches of {', '.join(map(kind_of, first))}",
            expected="batches of tokens, integers [rows, length] or [length], and a causal "
            "function "
            "f(params, tokens) of the logits of the next token; or rows of tokens with a mask of "
            "their "
            "padding",
            fix="leave own_text out, and pass batches of all kinds of inputs.",
            error=TypeError,
        )
    return every if is_read else batches, notes
