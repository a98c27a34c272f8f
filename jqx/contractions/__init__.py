"""Contractions on Array | QTensor operands; binds `@` of a QTensor to `matmul`."""

from ..tensor import QTensor
from ._cache import dynamic_slice as dynamic_slice
from ._cache import dynamic_update_slice as dynamic_update_slice
from ._cache import zeros as zeros
from ._conv_general_dilated import conv_general_dilated as conv_general_dilated
from ._dot_general import dot_general as dot_general
from ._dot_gradients import dot_gradients as dot_gradients
from ._einsum import einsum as einsum
from ._how._blocks import can_leave_sum as can_leave_sum
from ._how._formulation import Formulation as Formulation
from ._how._formulation import formulations as formulations
from ._how._formulation import using as using
from ._indexed import gathered as gathered
from ._indexed import scattered as scattered
from ._integers._bytes import longest as longest
from ._integers._fixed_point import FixedPointRounding as FixedPointRounding
from ._integers._requantize import Requantization as Requantization
from ._integers._requantize import requantize as requantize
from ._matmul import matmul as matmul
from ._ragged_dot import ROWS_OF_GROUPS as ROWS_OF_GROUPS
from ._ragged_dot import ragged_dot as ragged_dot
from ._select import is_like as is_like
from ._select import quantized_like as quantized_like
from ._select import select as select
from ._take import take as take
from ._what._axes import OperandAxes as OperandAxes
from ._what._conv_dimensions import conv_axes as conv_axes
from ._what._dimensions import Dimensions as Dimensions

QTensor.__matmul__ = lambda self, other: matmul(self, other)  # type: ignore[attr-defined]
QTensor.__rmatmul__ = lambda self, other: matmul(other, self)  # type: ignore[attr-defined]
