"""`calibrate_batches`: the merged statistics of many batches."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._calls import called
from .._errors import fail
from ..observers import places
from ..observers._shared import BOTH, flags, in_total
from ..tensor._shared import check_read
from ._arguments import check_batch, check_batches, check_plan
from ._calibrate import Weight, calibrate
from ._merge_stats import merge_stats
from ._observers import GivenObservers, check_observers, observers_of
from ._paths import Params, flatten, path_of, rooted
from ._plan import Plan
from ._progress import progress_bar, tell
from ._quantize_params import dequantize_params
from ._stats import (
    OnNonfinite,
    Stats,
    check_finite,
    check_mode,
    in_order,
    merged_flags,
    warn_left_out,
)
from ._trace import check_function, is_array, is_quantized

_LARGE = 2**28
"""The size in bytes from which the size of statistics is printed."""


@called("calibrate_batches", "pass for example jqx.calibrate_batches(f, plan, params, batches).")
def calibrate_batches(
    f: Callable[..., Any],
    plan: Plan,
    params: Any,
    batches: Iterable[Any],
    *,
    observers: GivenObservers = None,
    quantized: Any = None,
    weight: Weight | None = None,
    on_nonfinite: OnNonfinite = "error",
    progress: bool = True,
) -> Stats:
    """Returns the merged statistics of the activations of `f` over batches, one after another.

    One jitted function observes each batch. A batch of another shape compiles another one.

    Args:
      f: the function that the plan was made for.
      plan: from `make_plan`.
      params: the argument of `f` that holds its weights; a tuple of arguments if the plan was made
        with several. Leaves that are not arrays are static, as everywhere.
      batches: a list or another iterable, but not an array; each a tuple of the other arguments of
        `f`, in order, or a single argument: an array, a dict, a named tuple or another pytree. All
        leaves are arrays or numbers. Python's numbers are static, and each other number compiles
        another function.
      observers: other statistics to record, as in `calibrate`.
      quantized: the same parameters quantized, from `quantize_params`. For
        `jqx.observers.cross`, `f` is also run with their dequantized values, side by side with the
        float ones. All other statistics stay the same.
      weight: how much rows count, as in `calibrate`.
      on_nonfinite: `"error"` raises if a row of an operand holds a NaN or an infinity. `"ignore"`
        leaves such rows out, as in `calibrate`, with a warning that counts them.
      progress: whether to show a bar on standard error, if tqdm is installed, and above it the size
        of large statistics, before they are computed.

    Raises:
      TypeError: if `f` is not a function, `plan` is not a `Plan`, `observers` is not a dict of
        observers, or `batches` is not iterable or is an array.
      ValueError: if there is no batch, the plan was made for another function, `observers` does not
        fit it, `quantized` are other parameters, or activations are not finite; the error names the
        sites and the batch.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> f = lambda w, x: x @ w
      >>> w, batches = jnp.eye(2), [jnp.full((1, 2), c) for c in (2.0, -5.0, 3.0)]
      >>> plan = jqx.make_plan(f, jqx.presets.w8a8())(w, batches[0])
      >>> stats = jqx.calibrate_batches(f, plan, w, batches, progress=False)
      >>> float(stats[":dot_general:lhs"].largest[0, 0])
      5.0
    """
    check_function("calibrate_batches", f)
    name = "calibrate_batches"
    order = "calibrate_batches(f, plan, params, batches)"
    check_plan(name, plan, params, batches, order=order)
    ignores = check_mode(name, on_nonfinite)
    check_batches(name, batches)
    checked = check_observers(name, observers)
    observers_of(name, plan, checked)
    named = flatten(rooted(plan.params, params))
    check_read(name, [(path_of(keys), leaf) for keys, leaf in named])
    where = [pattern for pattern, each in checked if places in each]
    each = ((pattern, tuple(x for x in given if x != places)) for pattern, given in checked)
    valued = {pattern: given for pattern, given in each if given}
    arrays, filled = arrays_of(params)
    if quantized is not None:
        arrays = _stacked(arrays, jax.tree.structure(params), quantized)

    def one(arrays: list[Any], batch: Any) -> Stats:
        arguments = arguments_of(plan, filled(arrays), batch)
        options: Any = {"weight": weight, "on_nonfinite": on_nonfinite}
        return calibrate(f, plan, observers=valued, **options)(*arguments)[1]

    @jax.jit
    def observe(arrays: list[Any], batch: Any) -> tuple[_Once, jax.Array]:
        if quantized is None:
            found = one(arrays, batch)
        else:
            both = jax.vmap(lambda own: one(own, batch), axis_name=BOTH)(arrays)
            found, seen = jax.tree.map(lambda x: x[0], both), (both.flags, both.left_out)
            most = jax.tree.map(lambda x: jnp.max(x, 0), seen)
            found = Stats(found, *most)
        return _Once(found), in_total([*found.flags.values(), *found.left_out.values()])

    @jax.jit
    def merge(a: _Once, b: _Once) -> _Once:
        return _Once(merge_stats(plan, a.stats, b.stats, observers=valued))

    found: _Once | None = None
    first: Any = None
    left_out: list[int] = []
    pending: tuple[int, Stats, jax.Array] | None = None

    def settle() -> None:
        """Looks at the flags of the last batch, while the next one is computed."""
        if pending is None or not int(pending[2]):
            return
        check_finite(name, in_order(plan, pending[1].flags), pending[0])
        left_out.append(pending[0])

    shown = progress_bar("calibrate", "batch", batches) if progress else None
    for place, batch in enumerate(batches if shown is None else shown):
        check_batch(name, batch, place)
        given = Batch(batch)
        if found is None and shown is not None:
            size = bytes_of(jax.eval_shape(observe, arrays, given)[0])
            if size >= _LARGE:
                tell(shown, f"calibrate: the statistics take {in_bytes(size)}")
        seen, bad = observe(arrays, given)
        settle()
        pending = place, seen.stats, bad
        found, first = (seen, batch) if found is None else (merge(found, seen), first)
    if found is None:
        raise fail(
            name,
            "there is no batch.",
            given="an empty `batches`, or an exhausted generator",
            expected="one batch or more",
            fix="pass a list, or create the generator again.",
        )
    assert found is not None
    settle()
    stats = found.stats
    if ignores:
        warn_left_out(name, in_order(plan, stats.left_out), left_out)
    stats.update(elements_of(f, plan, params, first, where))
    return stats


def look_at_batches(
    function: str,
    f: Callable[..., Any],
    plan: Plan,
    params: Any,
    batches: Sequence[Any],
    on_nonfinite: OnNonfinite,
) -> Stats:
    """Returns the flags of all operands and results of sites in float, for algorithms that do not
    observe each site. Raises, or warns, if some are not finite.
    """
    ignores = check_mode(function, on_nonfinite)
    arrays, filled = arrays_of(params)

    @jax.jit
    def seen(arrays: list[Any], batch: Any) -> tuple[Stats, jax.Array]:
        options: Any = {"observers": {".*": flags}, "on_nonfinite": on_nonfinite}
        found = calibrate(f, plan, **options)(*arguments_of(plan, filled(arrays), batch))[1]
        found = Stats((), found.flags, found.left_out)
        return found, in_total([*found.flags.values(), *found.left_out.values()])

    every, spoilt = Stats(), []
    for place, batch in enumerate(batches):
        found, bad = seen(arrays, Batch(batch))
        if int(bad):
            check_finite(function, in_order(plan, found.flags), place)
            spoilt.append(place)
        pairs = zip(every.parts[1:], found.parts[1:], strict=True)
        every = Stats((), *(merged_flags(a, b) for a, b in pairs))
    if ignores:
        warn_left_out(function, in_order(plan, every.left_out), spoilt)
    return every


def _stacked(arrays: list[Any], tree: Any, quantized: Any) -> list[Any]:
    """Returns float parameters and dequantized ones, stacked along a new leading axis."""
    found, other = jax.tree.flatten(dequantize_params(quantized))
    own = [x for x in found if is_array(x)]
    kinds = [[f"{x.dtype.name}{list(x.shape)}" for x in each] for each in (arrays, own)]
    if not (other == tree and kinds[0] == kinds[1]):
        raise fail(
            "calibrate_batches",
            "`quantized` are not the same parameters.",
            given=f"arrays {', '.join(kinds[1][:4])}, and in float {', '.join(kinds[0][:4])}",
            expected="the parameters, with QTensors in place of some arrays",
            fix="pass jqx.quantize_params(params, plan), or what an algorithm chose.",
        )
    return [jnp.stack([jnp.asarray(a), jnp.asarray(b)]) for a, b in zip(arrays, own, strict=True)]


def elements_of(
    f: Callable[..., Any], plan: Plan, params: Any, batch: Any, patterns: Sequence[str]
) -> dict[str, Any]:
    """Returns the statistics of `jqx.observers.places` for the sites that regular expressions
    match. They are the same for all batches, and nothing else of the function is computed.
    """
    if not patterns:
        return {}
    arrays, filled = arrays_of((params, batch))

    @jax.jit
    def found(arrays: list[Any]) -> dict[str, Any]:
        arguments = arguments_of(plan, *filled(arrays))
        _, stats = calibrate(f, plan, observers=dict.fromkeys(patterns, places))(*arguments)
        return {key: x for key, x in stats.items() if key.endswith(f"@{places}")}

    return found(arrays)


def arrays_of(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the arrays of a tree, for `jit`, and a function that rebuilds it from arrays."""
    leaves, structure = jax.tree.flatten(tree)

    def filled(arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        return structure.unflatten([next(rest) if is_array(x) else x for x in leaves])

    return [leaf for leaf in leaves if is_array(leaf)], filled


@jax.tree_util.register_pytree_node_class
class _Once:
    """Statistics in which an object that several entries share crosses `jit` once."""

    def __init__(self, stats: Stats):
        self.stats = stats

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the distinct objects, and the index of the object of each entry."""
        parts = self.stats.parts
        objects = {id(value): value for part in parts for value in part.values()}
        places = {key: i for i, key in enumerate(objects)}
        return tuple(objects.values()), tuple(
            tuple((key, places[id(value)]) for key, value in part.items()) for part in parts
        )

    @classmethod
    def tree_unflatten(cls, parts: Any, objects: Any) -> "_Once":
        """Returns the statistics."""
        return cls(Stats(*({key: objects[place] for key, place in part} for part in parts)))


@jax.tree_util.register_pytree_node_class
class Batch:
    """A batch as an argument of `jax.jit`. Its leaves that are not arrays, such as numbers, are
    static, as they are for every transform.
    """

    def __init__(self, value: Any):
        self.value = value.value if isinstance(value, Batch) else value

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the arrays and QTensors, and all else with its type, because 1 == 1.0 == True."""
        leaves, structure = jax.tree.flatten(self.value, is_leaf=is_quantized)
        rest = tuple(None if is_array(x) else (type(x), x) for x in leaves)
        return tuple(x for x in leaves if is_array(x)), (structure, rest)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "Batch":
        """Returns the batch."""
        (structure, rest), own = static, iter(arrays)
        return cls(structure.unflatten([next(own) if x is None else x[1] for x in rest]))


def inputs_of(batch: Any) -> tuple[Any, ...]:
    """Returns a batch as arguments: those of a plain tuple, or a single one, such as a named tuple
    or another pytree.
    """
    batch = batch.value if isinstance(batch, Batch) else batch
    return batch if type(batch) is tuple else (batch,)


def arguments_of(plan: Plan, params: Any, batch: Any) -> list[Any]:
    """Returns the arguments of the function: the parameters at their positions, and the batch, a
    tuple or a single argument.
    """
    return placed(plan.params, params, inputs_of(batch))


def placed(places: Params, params: Any, others: Sequence[Any]) -> list[Any]:
    """Returns arguments: the parameters at their positions, and the others in between."""
    positions = (places,) if isinstance(places, int) else places
    values = (params,) if isinstance(places, int) else params
    arguments = list(others)
    for place, value in sorted(zip(positions, values, strict=True), key=lambda pair: pair[0]):
        arguments.insert(place, value)
    return arguments


def bytes_of(tree: Any) -> int:
    """Returns the size in bytes of arrays, or of objects with shapes and dtypes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def in_bytes(count: int) -> str:
    """Returns a number of bytes as text."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 2 ** (10 * power):.4g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
