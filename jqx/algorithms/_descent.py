"""Steps over batches in turn; the state with the least loss is kept."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")

_CHECKS = 8
"""How often the loss is measured after the start."""


class Descent(NamedTuple):
    """The result of a descent.

    Attributes:
      kept: the state with the least loss.
      before: the loss at the start, the mean over some batches.
      after: the loss of `kept`, likewise.
      best: after how many steps it was found; 0 is the start.
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
    """Takes some steps, each on one batch; each pass uses all batches.

    Args:
      start: the initial state.
      steps: number of steps.
      batches: number of batches.
      seed: seed of the order of the batches.
      lost: returns the loss on the batch of an index.
      moved: returns the state after a step on the batch of an index; its length decays from 1 to 0
        linearly.
      refuse: returns the error to raise if the loss at the start, on so many batches, is not
        finite.
      done: is called after each step.
    """
    rng = np.random.default_rng(seed)
    # So many batches that measuring the loss takes at most half as long as the steps.
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
