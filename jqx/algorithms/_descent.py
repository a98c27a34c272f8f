"""Steps over batches in turn, of which the one that has lost least is kept."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")

_CHECKS = 8
"""How often it is looked how much is lost, after the start."""


class Descent(NamedTuple):
    """What was found.

    Attributes:
      kept: what has lost least.
      before: what is lost at the start, on some batches the mean.
      after: by what is kept, likewise.
      best: after how many steps that was found; 0 is the start.
    """

    kept: Any
    before: float
    after: float
    best: int


def descended(
    start: T,
    steps: int,
    batches: int,
    seed: int,
    *,
    lost: Callable[[T, int], Any],
    moved: Callable[[T, int, float], T],
    refuse: Callable[[float, int], Exception],
    done: Callable[[], Any] = lambda: None,
) -> Descent:
    """Goes some steps, each by one batch, all of them in each turn.

    Args:
      start: where it begins.
      steps: how many there are.
      batches: likewise.
      seed: of the order of the batches.
      lost: returns what is lost on the batch of a number.
      moved: returns where a step leads by the batch of a number; its length falls from 1 to 0
        evenly.
      refuse: returns the error where the start loses no number, on so many batches.
      done: is called after each step.
    """
    rng = np.random.default_rng(seed)
    # That many that looking at them takes no more than half as long as the steps.
    checked = rng.permutation(batches)[: max(steps // (2 * _CHECKS), 1)].tolist()

    def mean(found: T) -> float:
        return float(np.mean([lost(found, i) for i in checked]))

    before = least = mean(start)
    if not np.isfinite(before):
        raise refuse(before, len(checked))
    found, kept, best, order = start, start, 0, []
    for k in range(1, steps + 1):
        order = order or rng.permutation(batches).tolist()
        found = moved(found, order.pop(), 1 - (k - 1) / steps)
        if k % max(steps // _CHECKS, 1) == 0 and (now := mean(found)) < least:
            least, kept, best = now, found, k
        done()
    return Descent(kept, before, least, best)
