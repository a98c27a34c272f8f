"""Rows beside those of the user, for functions of padded tokens: parts of its rows, and random
tokens.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..transforms import Plan
from ..transforms._shared import inputs_of
from ._padding import Padding, is_mask

_LEAST, _MOST = 32, 128
"""Limits of the number of rows of each kind; between them it is that of the user's rows."""


def with_varied_rows(
    plan: Plan, batches: Sequence[Any], padding: Padding
) -> tuple[Sequence[Any], str]:
    """Returns batches of padded rows of tokens, with others after them, and what was done as text,
    empty if the inputs have another form.

    Scales and codes that fit rows of one kind lose on shorter rows and on other tokens. Half of the
    other rows are parts of those of the user; half have random tokens of the table. All have
    lengths of any order of magnitude, and the first and the last token that all rows have.

    Args:
      plan: the plan of the function.
      batches: the batches. All arrays are [rows, length]; one holds tokens, others zeros and ones.
      padding: which array is the mask.
    """
    every = [jax.tree.flatten(inputs_of(x)) for x in batches]
    flat = [(x, tree) for x, tree in every if all(map(np.size, x))]
    arrays, tree = flat[0]
    shape = np.shape(arrays[padding.place])
    is_alike = all(
        own == tree and {np.shape(x)[1:] for x in values} == {shape[1:]} for values, own in flat
    )
    if not is_alike:
        return batches, ""
    rows = [np.concatenate(x) for x in zip(*(values for values, _ in flat), strict=True)]
    mask = rows[padding.place].astype(bool)
    others = [i for i, x in enumerate(rows) if not is_mask(x) and x.any()]
    if len(others) != 1 or not jnp.issubdtype(rows[others[0]].dtype, jnp.integer):
        return batches, ""
    tokens = rows[others[0]]
    size = _vocabulary(plan, np.shape(arrays[others[0]]), int(tokens.max()))
    is_left = bool(mask[:, 0].all())
    changes = np.diff(mask, axis=1).sum(1)
    if size is None or not (is_left or mask[:, -1].all()) or changes.max() > 1:
        return batches, ""
    count = -(-min(max(len(mask), _LEAST), _MOST) // shape[0]) * shape[0]
    rng, ends = np.random.default_rng(0), _common_ends(tokens, mask)
    blank = [0] * len(rows)
    blank[others[0]] = tokens[~mask][0]
    source = rng.integers(0, len(mask), 2 * count)
    more = [x[source] for x in rows]
    for i in range(2 * count):
        _shorten([x[i] for x in more], np.flatnonzero(mask[source[i]]), blank, ends, rng, is_left)
        if i >= count:
            inner = np.flatnonzero(more[padding.place][i])[ends[0] : -ends[1] or None]
            more[others[0]][i, inner] = rng.integers(0, size, len(inner))
    parts = [np.split(x, 2 * count // shape[0]) for x in more]
    added = [tree.unflatten(x) for x in zip(*parts, strict=True)]
    if type(batches[0]) is not tuple:
        added = [x[0] for x in added]
    note = (
        f"calibrated on {len(mask)} rows of the batches, {count} parts of them and {count} rows of "
        "random tokens"
    )
    return [*batches, *added], note


def _vocabulary(plan: Plan, shape: tuple[int, ...], largest: int) -> int | None:
    """Returns the size of the table that tokens are looked up in; `None` if none is known."""
    sizes = [
        table[0]
        for x in (*plan.sites, *plan.skipped)
        if x.op == "gather" and len(x.shapes) == 2
        for table, places in (x.shapes,)
        if tuple(places)[:-1] == shape and isinstance(table[0], int) and table[0] > largest
    ]
    return min(sizes, default=None)


def _common_ends(tokens: np.ndarray, mask: np.ndarray) -> tuple[int, int]:
    """Returns whether all rows have the same first token, and the same last token."""
    valid = [row[own] for row, own in zip(tokens, mask, strict=True) if own.any()]
    return len({row[0] for row in valid}) == 1, len({row[-1] for row in valid}) == 1


def _shorten(
    row: Sequence[np.ndarray],
    valid: np.ndarray,
    blank: Sequence[Any],
    ends: tuple[int, int],
    rng: np.random.Generator,
    is_left: bool,
) -> None:
    """Leaves a part of the valid places of a row, in place, and those at its ends; the rest becomes
    padding.
    """
    first, last = ends[0], len(valid) - ends[1]
    if last <= first:
        return
    size = int(np.exp(rng.uniform(0, np.log(last - first + 1))))
    start = first + rng.integers(0, last - first - size + 1)
    kept = np.concatenate([valid[:first], valid[start : start + size], valid[last:]])
    places = slice(len(kept)) if is_left else slice(len(row[0]) - len(kept), None)
    for x, empty in zip(row, blank, strict=True):
        own = x[kept]
        x[:] = empty
        x[places] = own
