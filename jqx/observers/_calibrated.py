"""A calibrator as an observer: its statistics of an operand, under the operand's spec."""

import dataclasses
from typing import Any

import jax

from ..calibrators import Calibrator
from ..calibrators._shared import observe_where
from ._flags import kept_rows
from ._observer import ObservedSite, Observer


@dataclasses.dataclass(frozen=True)
class Calibrated(Observer):
    """Records the statistics of a calibrator, for the scales of each operand that has a spec.

    Attributes:
      calibrator: a `jqx.calibrators.Calibrator`.
    """

    calibrator: Calibrator

    def looks_at(self, site: ObservedSite) -> bool:
        """Whether the plan quantizes the operand, an activation or a result."""
        return site.spec is not None and site.role != "weight"

    def empty(self, operand: jax.ShapeDtypeStruct, site: ObservedSite) -> Any:
        """Returns the calibrator's statistics of no values."""
        assert site.spec is not None
        return self.calibrator.empty(site.spec.granularity.scale_shape(operand.shape))

    def observe(self, x: jax.Array, site: ObservedSite) -> Any:
        """Returns the calibrator's statistics of the operand, without rows of weight 0."""
        assert site.spec is not None
        if site.weights is not None:
            return observe_where(self.calibrator, x, site.spec, kept_rows(site))
        return self.calibrator.observe(x, site.spec)

    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both."""
        return self.calibrator.merge(a, b)

    def __str__(self) -> str:
        return str(self.calibrator)
