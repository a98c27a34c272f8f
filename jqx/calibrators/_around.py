"""A base class for calibrators that change one step of another calibrator and keep the rest."""

from collections.abc import Sequence
from typing import Any

import jax

from ._calibrator import Affine, Affinity, Calibrator


class Around(Calibrator):
    """Delegates statistics and scales to another calibrator.

    Attributes:
      calibrator: the other calibrator.
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
        """Returns the scale and zero point computed from the statistics."""
        return self.calibrator.affine(stats, spec)
