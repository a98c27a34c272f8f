"""How the steps of `ptq` observe batches."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._errors import fail, message, some, warn
from ..observers._shared import Weight
from ..transforms import Plan
from ..transforms._shared import chained, inputs_of, parts_of
from ._defaults import Choice
from ._late_folders import algorithms, shared_algorithms

_NAMED = 16
"""How many matrices a report names."""


@dataclasses.dataclass(frozen=True)
class Observing:
    """How batches are observed.

    Attributes:
      weight: how much rows count, for static scales.
      ignores: whether rows that are not finite are left out.
      progress: whether to show a progress bar.
    """

    weight: Weight | None
    ignores: bool
    progress: bool

    @property
    def options(self) -> dict[str, Any]:
        """The options of a calibration."""
        return {
            "weight": self.weight,
            "on_nonfinite": "ignore" if self.ignores else "error",
            "progress": self.progress,
        }

    def of(self, method: Callable[..., Any]) -> dict[str, Any]:
        """Returns the options of a method of an algorithm; those of users may not know all."""
        found: dict[str, Any] = {"progress": self.progress}
        if self.ignores and "on_nonfinite" in inspect.signature(method).parameters:
            found["on_nonfinite"] = "ignore"
        return found


def weighted(choice: Choice, plan: Plan, weight: Weight | None) -> tuple[Choice, Weight | None]:
    """Returns a choice whose algorithms have a weight, and the weight for static scales."""
    choice = dataclasses.replace(
        choice,
        algorithm=_with_weight(choice.algorithm, weight),
        instead=_with_weight(choice.instead, weight),
    )
    if weight is not None or not plan.static_specs():
        return choice, weight
    rewrites, rounding, corrections = parts_of(choice.algorithm)
    every = (getattr(x, "weight", None) for x in (*rewrites, rounding, *corrections))
    own = list(dict.fromkeys(x for x in every if callable(x)))
    if not len(own) < 2:
        raise fail(
            "ptq",
            "algorithms weight rows differently, and static scales have no weight.",
            given=f"{len(own)} different `weight`s",
            expected="one function, or weight= of ptq",
            fix="pass the weight for static scales: jqx.ptq(f, policy, algorithm, weight=...).",
        )
    return choice, own[0] if own else None


def has_weight(algorithm: Any) -> bool:
    """Whether a part of an algorithm weights rows."""
    parts = chained(algorithm) or (algorithm,)
    return any(callable(getattr(x, "weight", None)) for x in parts)


def _with_weight(algorithm: Any, weight: Weight | None) -> Any:
    """Returns an algorithm in which each part without a weight has this one, if it can."""
    if weight is None:
        return algorithm
    if parts := chained(algorithm):
        return type(algorithm)(*(_with_weight(x, weight) for x in parts))
    fields = getattr(type(algorithm), "__dataclass_fields__", {})
    if "weight" in fields and algorithm.weight is None:
        return dataclasses.replace(algorithm, weight=weight)
    return algorithm


def note_inputs(choice: Choice, reports: Sequence[Any], few: Mapping[str, str]) -> None:
    """Warns of matrices whose codes an algorithm did not choose, or which it left unchanged,
    because too few inputs reached them, and notes how many there are. Notes too what the inputs of
    the other matrices were too few for.
    """
    found, count = [], 0
    for report in reports:
        if isinstance(report, algorithms.AlgorithmReport):
            choice.notes.extend(report.calibration)
        if isinstance(report, algorithms.Pairs) and report.left:
            choice.notes.append(f"inputs of {len(report.left)} sites not scaled: no clear gain")
        own, every = shared_algorithms.not_chosen(report)
        found, count = found + own, count + every
    if found:
        names = some((name for name, _ in found), _NAMED)
        choice.notes.append(f"{len(found)} of {count} matrices rounded to nearest: {names}")
    every = {**dict(found), **few}
    rest = [name for name in few if name not in dict(found)]
    if rest:
        choice.notes.append(f"{len(rest)} matrices not fitted to few inputs: {some(rest, _NAMED)}")
    if not every:
        return
    text = message(
        "ptq",
        "some matrices were rounded to nearest: the algorithm did not fit them to their inputs.",
        given=some(f"{name}: {why}" for name, why in every.items()),
        expected="about as many inputs as channels for each matrix, or more",
        fix="calibrate on more batches, or on batches that reach them, such as each expert; or "
        "leave it so.",
    )
    warn(text)


def first_of(batches: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Returns the first batch that is not empty, and all batches."""
    every, read = iter(batches), []
    for batch in every:
        read.append(batch)
        if all(getattr(x, "size", 1) for x in jax.tree.leaves(batch)):
            break
    if not read:
        raise fail(
            "ptq",
            "there is no batch.",
            given="an empty `batches`, or an exhausted generator",
            expected="one batch or more",
            fix="pass a list, or create the generator again.",
        )
    is_list = isinstance(batches, (list, tuple))
    return read[-1], batches if is_list else itertools.chain(read, every)


def plans(
    batches: Iterable[Any], known: tuple[Any, Plan], planned: Callable[[tuple[Any, ...]], Plan]
) -> Iterable[tuple[int, Plan]]:
    """Yields how many batches have the same shapes, and the plan of one of them; the shapes that
    most elements have come first, so that few plans are made. That of the first batch is known.
    """
    kinds: dict[Any, list[Any]] = {}
    for batch in batches:
        leaves, structure = jax.tree.flatten(batch)
        kinds.setdefault((structure, tuple(map(np.shape, leaves))), []).append(batch)

    def size(own: list[Any]) -> int:
        return len(own) * sum(np.size(x) for x in jax.tree.leaves(own[0]))

    for own in sorted(kinds.values(), key=size, reverse=True):
        batch, plan = own[0], known[1]
        if not any(x is known[0] for x in own):
            plan = planned(inputs_of(batch))
        yield len(own), plan
