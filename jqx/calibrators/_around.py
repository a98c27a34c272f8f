"""A calibrator that does something to what another one sees or finds, and all else as that one."""

from collections.abc import Sequence
from typing import Any

import jax

from ._calibrator import Affine, Affinity, Calibrator


class Around(Calibrator):
    """Has the statistics of another calibrator, and its scales.

    Attributes:
      calibrator: the other one.
    """

    calibrator: Calibrator

    def empty(self, shape: Sequence[int]) -> Any:
        """Returns the statistics of no values."""
        return self.calibrator.empty(shape)

    def observe(self, x: jax.Array, spec: Affinity) -> Any:
        """Returns the statistics of one array."""
        return self.calibrator.observe(x, spec)

    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both."""
        return self.calibrator.merge(a, b)

    def observed(self, stats: Any) -> jax.Array:
        """Returns how many arrays were observed."""
        return self.calibrator.observed(stats)

    def nans(self, stats: Any) -> jax.Array:
        """Returns how many NaN values were observed."""
        return self.calibrator.nans(stats)

    def affine(self, stats: Any, spec: Affinity) -> Affine:
        """Returns the scale and zero point decided from the statistics."""
        return self.calibrator.affine(stats, spec)
