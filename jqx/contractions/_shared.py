"""Names that other folders of jqx import from this one; they are not public."""

from ._dot_gradients import dot_gradients as dot_gradients
from ._how._blocks import can_leave_sum as can_leave_sum
from ._indexed import gathered as gathered
from ._indexed import scattered as scattered
from ._integers._bytes import ACCUMULATOR as ACCUMULATOR
from ._integers._fixed_point import FixedPointRounding as FixedPointRounding
from ._integers._requantize import Requantization as Requantization
from ._integers._requantize import requantize as requantize
from ._pending import Pending as Pending
from ._pending import dot_general_pending as dot_general_pending
from ._pending import may_quantize as may_quantize
from ._ragged_dot import ROWS_OF_GROUPS as ROWS_OF_GROUPS
from ._ragged_pending import ragged_dot_pending as ragged_dot_pending
from ._select import is_like as is_like
from ._select import quantized_like as quantized_like
from ._select import select as select
from ._what._axes import OperandAxes as OperandAxes
from ._what._conv_dimensions import conv_axes as conv_axes
from ._what._dimensions import Dimensions as Dimensions
