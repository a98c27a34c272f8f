"""Contractions on Array | QTensor operands; binds `@` of a QTensor to `matmul`."""

from ..tensor import QTensor
from ._blocks import can_leave_sum as can_leave_sum
from ._dimensions import Dimensions as Dimensions
from ._dot_general import dot_general as dot_general
from ._matmul import matmul as matmul

QTensor.__matmul__ = lambda self, other: matmul(self, other)  # type: ignore[attr-defined]
QTensor.__rmatmul__ = lambda self, other: matmul(other, self)  # type: ignore[attr-defined]
