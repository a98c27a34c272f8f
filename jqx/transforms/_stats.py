"""The statistics of a calibration, with flags of what was observed."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from .. import _compat
from .._errors import fail, message, some, warn
from ..observers._shared import flags
from ._entries import FLAGS
from ._origin import Loop
from ._plan import Plan

OnNonfinite = Literal["error", "ignore"]
"""What is done with rows that are not finite."""


class Stats(dict[str, Any]):
    """Statistics by key, such as `layer0/w:dot_general:lhs`; each is the pytree of a calibrator or
    of an observer.

    Attributes:
      flags: for each observed operand, int32 `[..., 4]`: the number of its rows with a NaN, with an
        infinity but no NaN, with a value besides 0, and of all. It has a leading axis for each scan
        over the weight of its site, and one for the matrices of a stack, such as experts. Rows that
        are not finite are in the statistics.
      left_out: the same of a calibration that has left rows out that are not finite.
    """

    def __init__(
        self,
        stats: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        flags: Mapping[str, Any] | None = None,
        left_out: Mapping[str, Any] | None = None,
    ):
        super().__init__(stats)
        self.flags: dict[str, Any] = dict(flags or {})
        self.left_out: dict[str, Any] = dict(left_out or {})

    @property
    def parts(self) -> tuple[dict[str, Any], ...]:
        """The statistics, and both kinds of flags."""
        return dict(self), self.flags, self.left_out


def stats_of(given: Mapping[str, Any]) -> Stats:
    """Returns statistics with their flags, if they have some."""
    return given if isinstance(given, Stats) else Stats(given)


def flags_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags of statistics, of either kind."""
    stats = stats_of(given)
    return {**stats.left_out, **stats.flags}


def _keys(stats: Stats) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(sorted(part)) for part in stats.parts)


def _with_keys(stats: Stats) -> tuple[Any, Any]:
    keys = _keys(stats)
    pairs = zip(("", ".flags", ".left_out"), stats.parts, keys, strict=True)
    return [
        (jax.tree_util.DictKey(f"{key}{name}"), part[key])
        for name, part, own in pairs
        for key in own
    ], keys


def _flat(stats: Stats) -> tuple[Any, Any]:
    keys = _keys(stats)
    return [part[key] for part, own in zip(stats.parts, keys, strict=True) for key in own], keys


def _unflat(keys: Any, children: Iterable[Any]) -> Stats:
    each = iter(children)
    return Stats(*({key: next(each) for key in own} for own in keys))


jax.tree_util.register_pytree_with_keys(Stats, _with_keys, _unflat, _flat)
export.register_pytree_node_serialization(
    Stats,
    serialized_name="jqx.transforms.Stats",
    serialize_auxdata=lambda keys: json.dumps(keys).encode(),
    deserialize_auxdata=lambda data: tuple(map(tuple, json.loads(data))),
)


def with_flags(stats: Mapping[str, Any], leaves_out: bool) -> Stats:
    """Returns recorded statistics, with entries of flags as the flags of operands."""
    found: dict[str, Any] = {}
    for key, x in stats.items():
        part, is_flag, _ = key.rpartition(FLAGS)
        if is_flag:  # rows of several weights
            found[part] = jnp.maximum(found[part], x) if part in found else x
    own = {key: x for key, x in stats.items() if FLAGS not in key}
    return Stats(own, *(({}, found) if leaves_out else (found, {})))


def merged_flags(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags of both."""
    return {
        key: flags.merge(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key))
        for key in [*a, *(key for key in b if key not in a)]
    }


def described(found: Mapping[str, Any]) -> list[str]:
    """Returns what the flags of operands say of rows that are not finite, as text."""
    lines = []
    for key, each in found.items():
        for step in np.ndindex(np.shape(each)[:-1]):
            nans, infinities, *_ = map(int, np.asarray(each)[step])
            counts = ((nans, "NaN"), (infinities, "infinity"))
            kinds = [f"{n} row{'s' * (n > 1)} with {kind}" for n, kind in counts if n]
            if kinds:
                at = f"[{', '.join(map(str, step))}]" if step else ""
                lines.append(f"{' and '.join(kinds)} at {key}{at}")
    return lines


def in_order(plan: Plan, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flags in the order in which the sites of a plan run."""
    keys = [key for site in plan.sites for key in site.keys]
    return {key: found[key] for key in dict.fromkeys((*keys, *found)) if key in found}


def check_finite(function: str, found: Mapping[str, Any], batch: int | None = None) -> None:
    """Raises if observed rows are not finite; the first operand is the cause of the others. Traced
    flags are not checked.
    """
    known = {key: x for key, x in found.items() if _compat.is_concrete(x)}
    bad = described(known)
    if bad:
        raise ValueError(nonfinite_text(function, bad, batch))


def nonfinite_text(function: str, bad: list[str], batch: int | None = None) -> str:
    """Returns the text of the error for rows that are not finite."""
    first, *others = bad
    kinds = [kind for kind in ("NaN", "infinity") if kind in first.partition(" at ")[0]]
    where = "" if batch is None else f"batch {batch}: "
    more = f", and at {len(others)} more operands" if others else ""
    return message(
        function,
        f"an activation is not finite: there is {' and '.join(kinds)} in an operand of a site.",
        given=f"{where}{first}{more}",
        expected="batches on which every operand of a site is finite",
        fix="find where it comes from (float16 overflows above 65504), leave such batches out, or "
        'leave such rows out with on_nonfinite="ignore" of calibrate, calibrate_batches and ptq.',
    )


def warn_left_out(function: str, found: Mapping[str, Any], batches: Iterable[int] = ()) -> None:
    """Warns of rows that were left out."""
    bad = described({key: x for key, x in found.items() if _compat.is_concrete(x)})
    if not bad:
        return
    own = list(map(str, batches))
    where = f"batch{'es' * (len(own) > 1)} {some(own)}: " if own else ""
    warn(
        message(
            function,
            "rows that are not finite were left out of the statistics.",
            given=where + some(bad),
            expected="batches on which every operand of a site is finite",
            fix="nothing, if these few rows do not matter; otherwise find where they come from.",
        )
    )


def check_mode(function: str, value: Any) -> bool:
    """Returns whether rows that are not finite are left out, after checking `on_nonfinite`."""
    if isinstance(value, str) and value in ("error", "ignore"):
        return value == "ignore"
    raise fail(
        function,
        "`on_nonfinite` is unknown.",
        given=f"on_nonfinite == {value!r}",
        expected="'error' or 'ignore'",
        fix="leave it out for 'error'; 'ignore' leaves rows out that are not finite.",
    )


def each_step(f: Callable[..., Any], loops: Sequence[Loop]) -> Callable[..., Any]:
    """Maps `f` over the leading axes of statistics, one for each scan over a weight."""
    for _ in loops:
        f = jax.vmap(f)
    return _compat.intermediates()(f)


def check_keys(
    function: str, argument: str, stats: Mapping[str, Any], specs: Mapping[str, Any]
) -> None:
    if set(stats) == set(specs):
        return
    differ = sorted(set(stats) ^ set(specs))
    raise fail(
        function,
        f"`{argument}` does not have the entries of the plan.",
        given=f"{len(stats)} entries; these differ: {', '.join(differ[:4])}",
        expected=f"one entry for each of the {len(specs)} static activations of the plan",
        fix="pass statistics from jqx.calibrate with the same plan.",
    )
