"""Rows beside those of the user, so that scales and codes carry over to other inputs: text that a
function of tokens writes itself, or parts of padded rows and random tokens.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import shown
from ..errors import fail
from ..tensor.segments import has_lazy
from ..transforms.arguments import kind_of
from ..transforms.calibrate import arrays_of, inputs_of
from ..transforms.plan import Plan
from ..transforms.trace import is_array
from .quantized import BoundFunction, algorithms, own_text

_ROWS, _LENGTHS = 16, (512, 256, 128, 64, 32, 16)
"""How many rows of text are written, and the lengths that are tried."""

_BETTER_THAN_CHANCE = 0.8
"""A function predicts the next token if it takes at most this part of the nats that a guess among
all tokens takes.
"""

_MIN_VARIED, _MAX_VARIED = 32, 128
"""Limits of the number of varied rows of each kind; between them it is that of the user's rows."""

_TOLERANCE = 1e-5
"""How much results may differ, relative to the largest, if padding has other values."""

_WITHOUT = "without text of its own: "


class Padding(NamedTuple):
    """Which array among the inputs says what is padding: the `weight` of an algorithm.

    Attributes:
      leaf_index: its number among the leaves of the inputs.
      name: its path, as text.
    """

    leaf_index: int
    name: str

    def __call__(self, *inputs: Any) -> Any:
        """Returns how much rows count: those of padding do not."""
        return jax.tree.leaves(inputs)[self.leaf_index]

    def __repr__(self) -> str:
        return "padding"

    def __str__(self) -> str:
        return f"rows where input {self.name} is 0 are padding, and left out"


def check_own_text(own_text: Any) -> None:
    """Checks the value of `own_text=`."""
    if own_text is not None and not isinstance(own_text, bool):
        problem = f"`own_text` is not True, False or None: own_text == {shown(own_text)}."
        fix = "leave it out; or write the text yourself, jqx.algorithms.own_text(f, params, ...), "
        fix += "and pass it among the batches."
        raise fail("ptq", problem, fix=fix)


def add_rows(
    bound: BoundFunction,
    plan: Plan,
    inputs: Sequence[Any],
    batches: Iterable[Any],
    padding: Padding | None,
    *,
    required: bool,
    progress: bool,
) -> tuple[Iterable[Any], list[str]]:
    """Returns batches with others beside them, and what was done as text; no text if the function
    is not one of tokens.

    Args:
      bound: the function and its parameters.
      plan: the plan.
      inputs: the arguments of the first batch.
      batches: the batches of the user. They are read only if they are tokens.
      padding: the mask of padded rows, if there is one.
      required: whether it is an error if there are no other rows.
      progress: whether to show a progress bar.

    Raises:
      TypeError: `required`, and there are no other rows.
    """
    notes: list[str] = []
    shape = _shape_of_tokens(bound, inputs)
    is_read = padding is not None or shape is not None
    user_batches = all_batches = list(batches) if is_read else []
    if shape is not None:
        tokens = shape if isinstance(shape, str) else _token_inputs(user_batches, padding, shape)
        if isinstance(tokens, str):
            notes.append(_WITHOUT + tokens)
        else:
            options: Any = {"progress": progress, "slow": required}
            all_batches, note = _with_own_text(bound, tokens, user_batches, **options)
            notes.append(note)
    if padding is not None and all_batches is user_batches:
        all_batches, note = _with_varied_rows(plan, user_batches, padding)
        notes.extend([note] if note else [])
    if required and len(all_batches) <= len(user_batches):
        problem = "own_text=True, and there is no other text for the function."
        details = "; ".join(notes) or f"batches of {', '.join(map(kind_of, inputs))}"
        expected = "a causal function f(params, tokens) of the logits of the next token, and "
        expected += (
            "integers [rows, length] or [length]; or rows of tokens with a mask of their padding"
        )
        fix = "leave own_text out, and pass batches of all kinds of inputs."
        raise fail("ptq", problem, given=details, expected=expected, fix=fix, error=TypeError)
    return all_batches if is_read else batches, notes


class OwnText:
    """Rows of text that a function writes itself, as batches of one row. They are written when they
    are first read.

    Attributes:
      first: a batch of the same shape.
    """

    def __init__(self, bound: BoundFunction, progress: bool):
        self._params, self._progress = bound.params, progress
        self._f = lambda params, tokens: bound.call(params, (tokens,))
        self._text: np.ndarray | None = None
        reasons = []
        for length in _LENGTHS:
            takes = own_text.tokens_of(self._f, bound.params, 1, length)
            if not isinstance(takes, str):
                self.first = np.zeros(takes.shape, np.int32)
                return
            reasons.append(takes)
        problem = "there are no batches, and the function does not map tokens to logits."
        fix = "pass the parameters, and a list of batches, such as [x]; only a causal function of "
        fix += "tokens [rows, length] or [length] to logits for each writes its own text."
        raise fail("ptq", problem, given=reasons[0], fix=fix, error=TypeError)

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
        """Returns the most tokens of which no logits are NaN, as they are beyond the end of a table
        that is looked up in by `jnp.take`.
        """
        arrays, filled = arrays_of(self._params)
        *lead, longest = self.first.shape

        @jax.jit
        def is_nan(arrays: Any, tokens: Any) -> Any:
            return jnp.isnan(self._f(filled(arrays), tokens)).any()

        lengths = (x for x in _LENGTHS if x <= longest)
        finite = (x for x in lengths if not is_nan(arrays, np.zeros((*lead, x), np.int32)))
        return next(finite, longest)


def padding_of(bound: BoundFunction, batches: Iterable[Any]) -> Padding | None:
    """Returns the array that says what is padding, if one does.

    An array of zeros and ones, [rows, length], is the mask if results do not depend on the values
    of other arrays that begin with its shape where it is 0, and depend on them where it is 1. Each
    array is tried once, with the first batch in which it has both.
    """
    if has_lazy(bound.params):
        return None
    tried: set[int] = set()
    for inputs in map(inputs_of, batches):
        paths, _ = jax.tree_util.tree_flatten_with_path(tuple(inputs))
        shapes = [np.shape(x)[:2] for _, x in paths]
        for i, (path, x) in enumerate(paths):
            if i in tried or shapes.count(shapes[i]) < 2 or not _is_mask(x):
                continue
            if _is_padding(bound, inputs, i):
                return Padding(i, jax.tree_util.keystr(path, simple=True, separator="/"))
            tried.add(i)
    return None


def _is_mask(x: Any) -> bool:
    """Whether an array holds zeros and ones, [rows, length], and both."""

    def is_binary(x: np.ndarray) -> bool:
        return bool(((x == 0) | (x == 1)).all())

    if np.ndim(x) != 2 or not hasattr(x, "dtype") or not is_binary(np.asarray(x[:1])):
        return False
    x = np.asarray(x)
    return is_binary(x) and bool((x == 0).any() and (x == 1).any())


def _is_padding(bound: BoundFunction, inputs: Sequence[Any], mask_index: int) -> bool:
    """Whether results depend on what other arrays hold where a mask is 1, and nowhere else."""
    values, tree = jax.tree.flatten(inputs)
    mask = np.asarray(values[mask_index]).astype(bool)

    def shuffled(is_replaced: np.ndarray) -> list[Any]:
        """Returns arrays in which other rows replace some."""
        sources = np.flatnonzero(~is_replaced)
        sources = np.random.default_rng(0).permutation(np.resize(sources, is_replaced.size))

        def of(i: int, x: Any) -> Any:
            if i == mask_index or np.shape(x)[:2] != mask.shape or _is_mask(x):
                return x
            rows = np.asarray(x).reshape(is_replaced.size, -1)
            return np.where(is_replaced.reshape(-1, 1), rows[sources], rows).reshape(x.shape)

        return [of(i, x) for i, x in enumerate(values)]

    _, filled = arrays_of((bound.params, inputs))
    run = jax.jit(lambda arrays: jax.tree.leaves(bound.call(*filled(arrays))))
    original, without_padding, without_rows = (
        run(arrays_of((bound.params, tree.unflatten(x)))[0])
        for x in (values, shuffled(~mask), shuffled(mask))
    )

    def is_same(others: Sequence[Any]) -> bool:
        return all(_is_near(a, b, mask) for a, b in zip(original, others, strict=True))

    return is_same(without_padding) and not is_same(without_rows)


def _is_near(a: Any, b: Any, mask: np.ndarray) -> bool:
    """Whether two results agree, except for those of padding."""
    dtype = np.float64 if jnp.issubdtype(a.dtype, jnp.inexact) else None
    a, b = (np.abs(x) if jnp.iscomplexobj(x) else np.asarray(x, dtype) for x in (a, b))
    if a.shape[:2] == mask.shape:
        a, b = a[mask], b[mask]
    if dtype is None:
        return np.array_equal(a, b)
    largest = np.abs(a[np.isfinite(a)]).max(initial=0)
    return np.allclose(a, b, rtol=0, atol=_TOLERANCE * largest, equal_nan=True)


class _Line(NamedTuple):
    """An input whose entry at the i-th token of each row is `start + step * i`: a mask of padding,
    positions, or types of tokens.

    Attributes:
      lead: its shape without the positions; `None` if that of the tokens.
    """

    start: Any
    step: Any
    dtype: Any
    lead: tuple[int, ...] | None

    def of(self, tokens: Any) -> np.ndarray:
        """Returns the input in rows without padding."""
        line = self.start + self.step * np.arange(tokens.shape[-1])
        lead = tokens.shape[:-1] if self.lead is None else self.lead
        return np.tile(line.astype(self.dtype), (*lead, 1)) if lead else line.astype(self.dtype)


class _Constant(NamedTuple):
    """An input that is equal in all batches."""

    value: Any

    def of(self, tokens: Any) -> Any:
        """Returns the input."""
        return self.value


@dataclasses.dataclass(frozen=True)
class _TokenInputs:
    """The batches of a function from tokens to logits of each.

    Attributes:
      tokens: those of each batch, [rows, length] or [length].
      valid: which of them are no padding, of the same shapes.
      others: the other inputs, with `None` in place of the tokens.
    """

    tokens: list[np.ndarray]
    valid: list[np.ndarray]
    tree: Any
    others: Sequence[Any]
    is_tuple: bool

    def rows(self) -> list[np.ndarray]:
        """Returns the tokens of each row without padding; rows of padding alone are left out."""
        pairs = [
            (x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1]))
            for x, y in zip(self.tokens, self.valid, strict=True)
        ]
        rows = [row[valid] for x, y in pairs for row, valid in zip(x, y, strict=True)]
        return [row for row in rows if len(row)]

    def inputs(self, tokens: Any) -> Any:
        """Returns the inputs of the function for other tokens, in rows without padding."""
        return self.tree.unflatten([tokens if x is None else x.of(tokens) for x in self.others])

    def batch(self, tokens: np.ndarray) -> Any:
        """Returns a batch of other tokens."""
        inputs = self.inputs(tokens.astype(self.tokens[0].dtype))
        return inputs if self.is_tuple else inputs[0]


def _shape_of_tokens(bound: BoundFunction, inputs: Sequence[Any]) -> tuple[int, ...] | str | None:
    """Returns the shape of the tokens that a function maps to logits for each, [rows, length] or
    [length]; as text, why there are none; or `None` if the function is not one of tokens and logits
    at all.

    Args:
      bound: the function and its parameters.
      inputs: those of one batch.
    """
    candidates = [x for x in jax.tree.leaves(inputs) if _is_tokens(x)]
    if has_lazy(bound.params):
        return "parameters are read one at a time" if candidates else None
    arrays, filled = arrays_of((bound.params, tuple(inputs)))
    result = jax.eval_shape(lambda x: bound.call(*filled(x)), arrays)
    leaves = jax.tree.leaves(result)
    for x in candidates:
        shape, largest = tuple(x.shape), int(np.max(x, initial=0))
        logits = [
            y
            for y in leaves
            if y.shape and tuple(y.shape[:-1]) == shape and jnp.issubdtype(y.dtype, jnp.floating)
        ]
        if logits and result is leaves[0]:
            size = result.shape[-1]
            if size > largest and int(np.min(x, initial=0)) >= 0:
                return shape
            return f"its {size} logits are not those of tokens up to {largest}"
        if any(y.shape[-1] > largest for y in logits):
            return f"it returns {len(leaves)} arrays, and not logits alone"
    return None


def _is_tokens(x: Any) -> bool:
    """Whether an input is an array of integers, [rows, length] or [length]."""
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer):
        return False
    return bool(x.dtype.itemsize > 1 and x.ndim in (1, 2) and x.shape[-1] > 1)


def _token_inputs(
    batches: Sequence[Any], padding: Padding | None, shape: tuple[int, ...]
) -> _TokenInputs | str:
    """Returns which of the inputs are tokens, and what the others are in rows without padding; or
    as text what is not known.

    An input other than tokens is known if at the i-th token of each row it is `a + b * i`, with one
    `a` and `b` for all, or if it is equal in all batches and has no rows. If there is one array of
    integers with the shape of the tokens, it holds them; else the one of these that is not known.

    Args:
      batches: the batches.
      padding: the mask of padded rows, if there is one.
      shape: that of the tokens in the first batch that is not empty.
    """
    flat = [jax.tree.flatten(tuple(inputs_of(x))) for x in batches]
    leaves, trees = zip(*(x for x in flat if all(map(np.size, x[0]))), strict=True)
    if any(x != trees[0] for x in trees):
        return "batches have several structures"
    mask = None if padding is None else padding.leaf_index
    indices = range(len(leaves[0]))
    candidates = [
        i for i in indices if i != mask and _is_tokens(leaves[0][i]) and leaves[0][i].shape == shape
    ]
    shapes = [batch[candidates[0]].shape for batch in leaves] if candidates else []
    valid = [np.ones(x, bool) for x in shapes]
    if mask is not None:
        valid = [np.asarray(batch[mask]).astype(bool) for batch in leaves]
    if not candidates or [x.shape for x in valid] != shapes:
        return "no input holds the tokens that the mask is for"
    others = [_without_padding([batch[i] for batch in leaves], valid) for i in indices]
    unknown = candidates
    if len(candidates) > 1:
        unknown = [i for i in candidates if others[i] is None]
    tokens = unknown[0] if len(unknown) == 1 else None
    unclear = [i for i in indices if others[i] is None and i != tokens]
    if tokens is None or unclear:
        paths = [path for path, _ in jax.tree.leaves_with_path(tuple(inputs_of(batches[0])))]
        named = [paths[i] for i in unclear or candidates]
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in named]
        return f"what inputs {', '.join(names)} are in rows without padding is not known"
    others[tokens] = None
    arrays = [np.asarray(batch[tokens]) for batch in leaves]
    return _TokenInputs(arrays, valid, trees[0], others, type(batches[0]) is tuple)


def _without_padding(xs: Sequence[Any], valid: Sequence[np.ndarray]) -> Any:
    """Returns what an input is in rows without padding; `None` if that is not known."""
    x = xs[0]
    if not is_array(x) or np.ndim(x) == 0:
        is_constant = all(type(y) is type(x) and np.all(y == x) for y in xs)
        return _Constant(x) if is_constant else None
    if all(np.shape(y) == is_valid.shape for y, is_valid in zip(xs, valid, strict=True)):
        lead = None
    else:
        lead = np.shape(x)[:-1]
        pairs = zip(xs, valid, strict=True)
        if lead not in ((), (1,)) or any(np.shape(y) != (*lead, v.shape[-1]) for y, v in pairs):
            return None
    everywhere = [np.ones(np.shape(y), bool) for y in xs]
    for masks in (valid, everywhere) if lead is None else (everywhere,):
        values = np.concatenate([np.asarray(y)[m] for y, m in zip(xs, masks, strict=True)])
        positions = np.concatenate([(np.cumsum(m, -1) - 1)[m] for m in masks])
        if values.dtype != bool and not jnp.issubdtype(values.dtype, jnp.number):
            return None
        numbers = values.astype(np.float64)
        if not (positions == 1).any():
            continue
        start = numbers[positions == 0][0]
        step = numbers[positions == 1][0] - start
        if np.array_equal(numbers, start + step * positions):
            return _Line(start, step, values.dtype, lead)
    return None


def _with_own_text(
    bound: BoundFunction,
    tokens: _TokenInputs,
    batches: Sequence[Any],
    *,
    progress: bool,
    slow: bool,
) -> tuple[Sequence[Any], str]:
    """Returns batches of tokens, with rows that the function writes itself between them, and what
    was done as text.

    The rows have about as many tokens as 16 rows of 512. They come in batches of the shape of the
    first, or of shorter rows, and begin with the token that all rows of the batches begin with, or
    with 0. They have no padding.

    Args:
      bound: the function and its parameters.
      tokens: the tokens of the batches, and what other inputs are beside them.
      batches: the batches of the user.
      progress: whether to show a progress bar.
      slow: whether each token may take an evaluation of all positions.
    """
    arrays, filled = arrays_of(bound.params)

    def f(arrays: Any, x: Any) -> Any:
        return bound.call(filled(arrays), tokens.inputs(x))

    shape = tokens.tokens[0].shape
    length = min(shape[-1], _LENGTHS[0])
    count = -(-_ROWS * _LENGTHS[0] // length)
    rows = min(math.prod(shape[:-1]), count)
    form = {"rows": -(-count // rows) * rows, "length": length}
    if isinstance(own_text.tokens_of(f, arrays, **form), str):
        return batches, f"{_WITHOUT}it does not take {form['rows']} rows of {length} tokens"
    if reason := _why_no_prediction(f, arrays, tokens):
        return batches, _WITHOUT + reason
    name = "algorithms.own_text"
    try:
        steps = own_text.decoding_of(name, f, arrays, **form, slow=slow)
    except (own_text.Unable, own_text.NotCausal) as error:
        return batches, _WITHOUT + str(error).splitlines()[0].removeprefix(f"jqx.{name}: ")
    firsts = np.array([x[0] for x in tokens.rows()])
    start = int(firsts[0]) if len(firsts) > 1 and len(np.unique(firsts)) == 1 else 0
    options: dict[str, Any] = {**form, "key": jax.random.key(0), "progress": progress}
    text = np.asarray(own_text.written(steps, arrays, start, **options))
    parts = text.reshape(-1, *(rows for _ in shape[1:]), length)
    note = f"calibrated on {len(firsts)} rows of the batches and on {_described(text)}"
    return _interleaved(batches, [tokens.batch(x) for x in parts]), note


def _why_no_prediction(f: Any, params: Any, tokens: _TokenInputs) -> str:
    """Returns why a function does not predict the next tokens, as text; empty if it does."""
    length = tokens.tokens[0].shape[-1]
    row = max(tokens.rows(), key=len)[:length]
    takes = own_text.tokens_of(f, params, 1, length)
    lead = tokens.tokens[0].shape[:-1] if isinstance(takes, str) else takes.shape[:-1]
    repeated = np.broadcast_to(np.resize(row, length), (*lead, length))
    size = jax.eval_shape(f, params, repeated).shape[-1]

    @jax.jit
    def nats(params: Any, tokens: Any) -> Any:
        logits = f(params, tokens).reshape(-1, length, size)[0, : len(row) - 1]
        log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
        targets = tokens.reshape(-1, length)[0, 1 : len(row)]
        return -jnp.take_along_axis(log_probabilities, targets[:, None], 1).mean()

    # What follows the row has no effect, if the function is causal.
    taken, chance = float(nats(params, repeated)), float(np.log(size))
    if taken <= _BETTER_THAN_CHANCE * chance:
        return ""
    return (
        f"it does not predict the next tokens of the longest row ({taken:.3g} nats a token, and a "
        f"guess takes {chance:.3g})"
    )


def _interleaved(batches: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns all batches, those of each kind spread evenly, beginning with one of the first."""
    positions = [
        (i / len(kind), number, i)
        for number, kind in enumerate((batches, others))
        for i in range(len(kind))
    ]
    return [(batches, others)[number][i] for _, number, i in sorted(positions)]


def _described(text: np.ndarray) -> str:
    length = text.shape[-1]
    return f"{text.size // length} rows of {length} tokens that the function wrote itself"


def _with_varied_rows(
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
    flat = [jax.tree.flatten(inputs_of(x)) for x in batches]
    flat = [(leaves, tree) for leaves, tree in flat if all(map(np.size, leaves))]
    arrays, tree = flat[0]
    shape = np.shape(arrays[padding.leaf_index])
    if any(t != tree or {np.shape(x)[1:] for x in leaves} != {shape[1:]} for leaves, t in flat):
        return batches, ""
    rows = [np.concatenate(x) for x in zip(*(leaves for leaves, _ in flat), strict=True)]
    mask = rows[padding.leaf_index].astype(bool)
    others = [i for i, x in enumerate(rows) if not _is_mask(x) and x.any()]
    if len(others) != 1 or not jnp.issubdtype(rows[others[0]].dtype, jnp.integer):
        return batches, ""
    token_index = others[0]
    tokens = rows[token_index]
    size = _vocabulary(plan, np.shape(arrays[token_index]), int(tokens.max()))
    is_left = bool(mask[:, 0].all())
    changes = np.diff(mask, axis=1).sum(1)
    if size is None or not (is_left or mask[:, -1].all()) or changes.max() > 1:
        return batches, ""
    count = -(-min(max(len(mask), _MIN_VARIED), _MAX_VARIED) // shape[0]) * shape[0]
    plain_rows = [row[valid] for row, valid in zip(tokens, mask, strict=True) if valid.any()]
    ends = len({row[0] for row in plain_rows}) == 1, len({row[-1] for row in plain_rows}) == 1
    rng = np.random.default_rng(0)
    blank = [0] * len(rows)
    blank[token_index] = tokens[~mask][0]
    sources = rng.integers(0, len(mask), 2 * count)
    varied = [x[sources] for x in rows]
    for i, source in enumerate(sources):
        valid = np.flatnonzero(mask[source])
        _shorten([x[i] for x in varied], valid, blank, ends, rng, is_left)
        if i >= count:
            inner = np.flatnonzero(varied[padding.leaf_index][i])[ends[0] : -ends[1] or None]
            varied[token_index][i, inner] = rng.integers(0, size, len(inner))
    parts = [np.split(x, 2 * count // shape[0]) for x in varied]
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
        for site in (*plan.sites, *plan.skipped)
        if site.op == "gather" and len(site.shapes) == 2
        for table, indices in (site.shapes,)
        if tuple(indices)[:-1] == shape and isinstance(table[0], int) and table[0] > largest
    ]
    return min(sizes, default=None)


def _shorten(
    row: Sequence[np.ndarray],
    valid: np.ndarray,
    blank: Sequence[Any],
    ends: tuple[int, int],
    rng: np.random.Generator,
    is_left: bool,
) -> None:
    """Keeps a part of the valid elements of a row, in place, and those at its ends; the others
    become padding.
    """
    low, high = ends[0], len(valid) - ends[1]
    if high <= low:
        return
    size = int(np.exp(rng.uniform(0, np.log(high - low + 1))))
    start = low + rng.integers(0, high - low - size + 1)
    sources = np.concatenate([valid[:low], valid[start : start + size], valid[high:]])
    targets = slice(len(sources)) if is_left else slice(len(row[0]) - len(sources), None)
    for x, empty in zip(row, blank, strict=True):
        values = x[sources]
        x[:] = empty
        x[targets] = values
