"""Contractions on Array | QTensor operands; binds `@` of a QTensor to `matmul`."""

from ..tensor import QTensor
from ._axes import OperandAxes as OperandAxes
from ._blocks import can_leave_sum as can_leave_sum
from ._bytes import longest as longest
from ._cache import dynamic_slice as dynamic_slice
from ._cache import dynamic_update_slice as dynamic_update_slice
from ._cache import zeros as zeros
from ._conv_dimensions import conv_axes as conv_axes
from ._conv_general_dilated import conv_general_dilated as conv_general_dilated
from ._dimensions import Dimensions as Dimensions
from ._dot_general import dot_general as dot_general
from ._dot_gradients import dot_gradients as dot_gradients
from ._einsum import einsum as einsum
from ._fixed_point import FixedPointRounding as FixedPointRounding
from ._formulation import Formulation as Formulation
from ._formulation import formulations as formulations
from ._formulation import using as using
from ._indexed import gathered as gathered
from ._indexed import scattered as scattered
from ._matmul import matmul as matmul
from ._ragged_dot import ROWS_OF_GROUPS as ROWS_OF_GROUPS
from ._ragged_dot import ragged_dot as ragged_dot
from ._requantize import Requantization as Requantization
from ._requantize import requantize as requantize
from ._select import is_like as is_like
from ._select import quantized_like as quantized_like
from ._select import select as select
from ._take import take as take

QTensor.__matmul__ = lambda self, other: matmul(self, other)  # type: ignore[attr-defined]
QTensor.__rmatmul__ = lambda self, other: matmul(other, self)  # type: ignore[attr-defined]
