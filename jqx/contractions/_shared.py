"""What other folders of jqx import from this one, and users do not."""

from ._blocks import can_leave_sum as can_leave_sum
from ._bytes import longest as longest
from ._dimensions import Dimensions as Dimensions
from ._dot_gradients import dot_gradients as dot_gradients
from ._fixed_point import FixedPointRounding as FixedPointRounding
from ._indexed import gathered as gathered
from ._indexed import scattered as scattered
from ._requantize import Requantization as Requantization
from ._requantize import requantize as requantize
from ._select import is_like as is_like
from ._select import quantized_like as quantized_like
from ._select import select as select
