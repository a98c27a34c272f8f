"""Quantized: what `ptq` returns."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..calibrators import Affine
from ..diagnostics import Report
from ..transforms import Plan


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized function, its weights, and all that made it.

    Attributes:
      function: on integers: `jax.jit(quantized.function)(quantized.params, *batch)`; the weights
        stand where the float function takes them.
      params: weights as QTensors, laid out for the target; the other parameters as they were.
      plan: which contractions are quantized, and how.
      affines: scales of activations, by key; empty where none is static.
      report: error and size of each weight. Prints as a table.
    """

    function: Callable[..., Any]
    params: Any
    plan: Plan
    affines: Mapping[str, Affine]
    report: Report

    def __repr__(self) -> str:
        count = len(self.plan.sites) + len(self.plan.skipped)
        before, after = self.report.bytes_before, self.report.bytes_after
        return (
            f"Quantized({len(self.plan.sites)} of {count} contractions, "
            f"{before:,} bytes of parameters become {after:,})"
        )
