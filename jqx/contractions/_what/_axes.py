"""The roles of the axes of an operand in a contraction."""

from typing import NamedTuple

Axes = tuple[int, ...]


class OperandAxes(NamedTuple):
    """The axes of one operand.

    Attributes:
      contracted: the axes that are summed over.
      kept: the axes of the result; each of their indices may have its own scale.
      batch: those of the kept axes that are batch axes.
    """

    contracted: Axes
    kept: Axes
    batch: Axes = ()
