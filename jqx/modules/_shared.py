"""Names of this folder that other folders of jqx import, but users do not."""

from ._adapters import Adapter as Adapter
from ._adapters import by_path as by_path
from ._adapters import check_same_parameters as check_same_parameters
from ._adapters import initial_adapters as initial_adapters
from ._cached_attention import check_cache as check_cache
from ._cached_attention import empty_cache as empty_cache
from ._cached_attention import with_cache as with_cache
from ._entries import flatten as flatten
from ._entries import nest as nest
from ._entries import overlay as overlay
from ._entries import split as split
from ._entries import unscaled as unscaled
from ._entries import without as without
from ._learnable import check_learnable as check_learnable
from ._members import forwards as forwards
from ._members import read as read
from ._mode import check_mode as check_mode
from ._quantized_function import QuantizedFunction as QuantizedFunction
from ._quantized_function import holds_codes as holds_codes
from ._quantized_function import needs_key as needs_key
from ._quantized_function import optional as optional
from ._scales import Scales as Scales
from ._scales import check_scales as check_scales
from ._scales import needs_calibration as needs_calibration
from ._wanted import Wanted as Wanted
