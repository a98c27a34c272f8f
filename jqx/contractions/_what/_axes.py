"""What becomes of the axes of an operand in a contraction."""

from typing import NamedTuple

Axes = tuple[int, ...]


class OperandAxes(NamedTuple):
    """The axes of one operand.

    Attributes:
      contracted: those that are summed over.
      kept: those of which each index may have a scale of its own: the result has them.
      batch: of these, the ones along which each array of a stack meets another one.
    """

    contracted: Axes
    kept: Axes
    batch: Axes = ()
