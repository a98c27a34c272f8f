"""Names that other folders of jqx import from this one, and that users do not need."""

from ._defaults import Effort as Effort
from ._defaults import check_effort as check_effort
from ._quantized import Basis as Basis
from ._quantized import Hoist as Hoist
from ._quantized import Quantize as Quantize
from ._quantized import Target as Target
from ._quantized import leaves_by_path as leaves_by_path
