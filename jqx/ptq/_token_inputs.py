"""Which inputs of a function are its tokens, and what the others are in rows without padding."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..tensor._shared import has_lazy
from ..transforms._shared import arrays_of, inputs_of, is_array, placed
from ._hoisted import Own
from ._padding import Padding


class _Line(NamedTuple):
    """An input whose entry at the i-th token of each row is `first + step * i`: a mask of padding,
    positions, or types of tokens.

    Attributes:
      lead: its shape without the positions; `None` if that of the tokens.
    """

    first: Any
    step: Any
    dtype: Any
    lead: tuple[int, ...] | None

    def of(self, tokens: Any) -> np.ndarray:
        """Returns the input in rows without padding."""
        line = self.first + self.step * np.arange(tokens.shape[-1])
        lead = tokens.shape[:-1] if self.lead is None else self.lead
        return np.tile(line.astype(self.dtype), (*lead, 1)) if lead else line.astype(self.dtype)


class _Same(NamedTuple):
    """An input that is the same in all batches."""

    value: Any

    def of(self, tokens: Any) -> Any:
        """Returns the input."""
        return self.value


@dataclasses.dataclass(frozen=True)
class TokenInputs:
    """The batches of a function from tokens to logits of each.

    Attributes:
      tokens: those of each batch, [rows, length] or [length].
      valid: which of them are no padding, of the same shapes.
    """

    tokens: list[np.ndarray]
    valid: list[np.ndarray]
    _tree: Any
    _others: Sequence[Any]
    _is_tuple: bool

    def rows(self) -> list[np.ndarray]:
        """Returns the tokens of each row without padding; rows of padding alone are left out."""
        each = zip(self.tokens, self.valid, strict=True)
        pairs = [(x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1])) for x, y in each]
        rows = [row[own] for x, y in pairs for row, own in zip(x, y, strict=True)]
        return [row for row in rows if len(row)]

    def inputs(self, tokens: Any) -> Any:
        """Returns the inputs of the function for other tokens, in rows without padding."""
        return self._tree.unflatten([tokens if x is None else x.of(tokens) for x in self._others])

    def batch(self, tokens: np.ndarray) -> Any:
        """Returns a batch of other tokens."""
        inputs = self.inputs(tokens.astype(self.tokens[0].dtype))
        return inputs if self._is_tuple else inputs[0]


def shape_of_tokens(own: Own, inputs: Sequence[Any]) -> tuple[int, ...] | str | None:
    """Returns the shape of the tokens that a function maps to logits for each, [rows, length] or
    [length]; as text, why there are none; or `None` if the function is not one of tokens and logits
    at all.

    Args:
      own: the function and its parameters.
      inputs: those of one batch.
    """
    if has_lazy(own.params):
        is_any = any(map(is_tokens, jax.tree.leaves(inputs)))
        return "parameters are read one at a time" if is_any else None
    arrays, filled = arrays_of((own.params, tuple(inputs)))
    result = jax.eval_shape(lambda x: own.f(*placed(own.places, *filled(x))), arrays)
    found = jax.tree.leaves(result)
    for x in filter(is_tokens, jax.tree.leaves(inputs)):
        shape, most = tuple(x.shape), int(np.max(x, initial=0))
        logits = [y for y in found if tuple(y.shape[:-1]) == shape and _is_float(y)]
        if logits and result is found[0]:
            size = found[0].shape[-1]
            is_known = size > most and int(np.min(x, initial=0)) >= 0
            return shape if is_known else f"its {size} logits are not those of tokens up to {most}"
        if any(y.shape[-1] > most for y in logits):
            return f"it returns {len(found)} arrays, and not logits alone"
    return None


def is_tokens(x: Any) -> bool:
    """Whether an input is an array of integers, [rows, length] or [length]."""
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer):
        return False
    return bool(x.dtype.itemsize > 1 and x.ndim in (1, 2) and x.shape[-1] > 1)


def token_inputs(
    batches: Sequence[Any], padding: Padding | None, shape: tuple[int, ...]
) -> TokenInputs | str:
    """Returns which of the inputs are tokens, and what the others are in rows without padding; or
    as text what is not known.

    An input other than tokens is known if at the i-th token of each row it is `a + b * i`, with the
    same `a` and `b`, or if it is the same in all batches and has no rows. If there is one array of
    integers with the shape of the tokens, it holds them; else the one of these that is not known.

    Args:
      batches: the batches.
      padding: the mask of padded rows, if there is one.
      shape: that of the tokens in the first batch that is not empty.
    """
    flat = [jax.tree.flatten(tuple(inputs_of(x))) for x in batches]
    every, trees = zip(*(x for x in flat if all(map(np.size, x[0]))), strict=True)
    if any(x != trees[0] for x in trees):
        return "batches have several structures"
    mask = None if padding is None else padding.place
    mine = [i for i, x in enumerate(every[0]) if is_tokens(x) and x.shape == shape and i != mask]
    shapes = [leaves[mine[0]].shape for leaves in every] if mine else []
    valid = [np.ones(x, bool) for x in shapes]
    if mask is not None:
        valid = [np.asarray(leaves[mask]).astype(bool) for leaves in every]
    if not mine or [x.shape for x in valid] != shapes:
        return "no input holds the tokens that the mask is for"
    places = range(len(every[0]))
    others = [_other([leaves[i] for leaves in every], valid) for i in places]
    unknown = mine if len(mine) == 1 else [i for i in mine if others[i] is None]
    place = unknown[0] if len(unknown) == 1 else None
    left = [i for i in places if others[i] is None and i != place]
    if place is None or left:
        paths = [path for path, _ in jax.tree.leaves_with_path(tuple(inputs_of(batches[0])))]
        named = [jax.tree_util.keystr(paths[i], simple=True, separator="/") for i in left or mine]
        return f"what inputs {', '.join(named)} are in rows without padding is not known"
    others[place] = None
    own = [np.asarray(leaves[place]) for leaves in every]
    return TokenInputs(own, valid, trees[0], others, type(batches[0]) is tuple)


def _other(xs: Sequence[Any], valid: Sequence[np.ndarray]) -> Any:
    """Returns what an input is in rows without padding; `None` if that is not known."""
    first = xs[0]
    if not is_array(first) or np.ndim(first) == 0:
        is_same = all(type(x) is type(first) and np.all(x == first) for x in xs)
        return _Same(first) if is_same else None
    if all(np.shape(x) == own.shape for x, own in zip(xs, valid, strict=True)):
        lead = None
    else:
        lead = np.shape(first)[:-1]
        pairs = zip(xs, valid, strict=True)
        if lead not in ((), (1,)) or any(np.shape(x) != (*lead, y.shape[-1]) for x, y in pairs):
            return None
    everywhere = [np.ones(np.shape(x), bool) for x in xs]
    for where in (valid, everywhere) if lead is None else (everywhere,):
        values = np.concatenate([np.asarray(x)[y] for x, y in zip(xs, where, strict=True)])
        place = np.concatenate([(np.cumsum(y, -1) - 1)[y] for y in where])
        if values.dtype != bool and not jnp.issubdtype(values.dtype, jnp.number):
            return None
        numbers = values.astype(np.float64)
        if not (place == 1).any():
            continue
        start = numbers[place == 0][0]
        step = numbers[place == 1][0] - start
        if np.array_equal(numbers, start + step * place):
            return _Line(start, step, values.dtype, lead)
    return None


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating) and x.shape)
