"""Names that other folders of jqx import from this one; they are not public."""

from ._blocks import can_leave_sum as can_leave_sum
from ._cache import gathered as gathered
from ._cache import is_like as is_like
from ._cache import quantized_like as quantized_like
from ._cache import scattered as scattered
from ._cache import select as select
from ._conv import conv_axes as conv_axes
from ._dimensions import Dimensions as Dimensions
from ._dimensions import OperandAxes as OperandAxes
from ._dot_general import dot_gradients as dot_gradients
from ._exact import ACCUMULATOR as ACCUMULATOR
from ._pending import Pending as Pending
from ._pending import dot_general_pending as dot_general_pending
from ._pending import may_quantize as may_quantize
from ._pending import ragged_dot_pending as ragged_dot_pending
from ._ragged_dot import ROWS_OF_GROUPS as ROWS_OF_GROUPS
from ._requantize import FixedPointRounding as FixedPointRounding
from ._requantize import Requantization as Requantization
from ._requantize import requantize as requantize
