"""Matrices that few rows reached, such as experts with few tokens. Chance decides what few rows
have in common, so no algorithm fits a matrix to them: rounding to nearest would lose less.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..transforms import Site
from ..transforms._shared import flags_of
from ._report import name_of

Array = np.ndarray

UNREACHED = "no batch has reached it"
"""Why a matrix is not fitted that has no inputs."""

_KNOWN = ("dot_general", "ragged_dot")
"""Operations whose rows are rows of the operand."""


def why_few(rows: float, channels: int) -> str:
    """Returns why a matrix is not fitted to its inputs."""
    return f"{rows:.0f} inputs of {channels} channels are too few" if rows else UNREACHED


def reached(flags: Any, op: str) -> Array | None:
    """Returns how many rows of an operand reached each matrix of its site, and how many there are:
    [*steps, *matrices, 2]; `None` if that is not known. Rows of zeros do not reach a matrix: they
    are those of other experts.
    """
    return None if flags is None or op not in _KNOWN else np.asarray(flags)[..., 2:]


def is_few(counts: Array, channels: int) -> Array:
    """Returns which matrices only some rows reached, and fewer than they have channels."""
    rows, total = counts[..., 0], counts[..., 1]
    return (rows == 0) | ((rows < total) & (rows < channels))


class Few:
    """The matrices that few rows reached, and their names with the reason, as far as they are asked
    for.
    """

    def __init__(self, stats: Mapping[str, Any]):
        self._flags = flags_of(stats)
        self.why: dict[str, str] = {}

    def share(self, site: Site, key: str, steps: tuple[int, ...] = ()) -> Array:
        """Returns the part of the rows of an operand that reaches each matrix of a site,
        [*matrices], in some steps of its scans; 1 if that is not known, or if there is no row.
        """
        counts = reached(self._flags.get(key), site.op)
        if counts is None:
            return np.ones(())
        rows, total = counts[steps][..., 0], counts[steps][..., 1]
        return np.where(rows > 0, rows, 1) / np.where(rows > 0, total, 1)

    def at(self, site: Site, key: str, channels: int, steps: tuple[int, ...] = ()) -> Any:
        """Returns which matrices of a site only few rows reached, [*matrices], in some steps of its
        scans; `False` if that is not known.
        """
        counts = reached(self._flags.get(key), site.op)
        if counts is None:
            return np.zeros((), bool)
        found = is_few(counts[steps], channels)
        for at in np.argwhere(found):
            rows = float(counts[(*steps, *at, 0)])
            self.why[name_of([site.name], (*steps, *at.tolist()))] = why_few(rows, channels)
        return found
