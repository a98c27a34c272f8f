"""Number formats, round modes, and arithmetic that XLA leaves alone."""

from ._exact import common_dtype as common_dtype
from ._exact import compute_dtype as compute_dtype
from ._exact import difference as difference
from ._exact import divide as divide
from ._exact import divide_by_steps as divide_by_steps
from ._exact import float_difference as float_difference
from ._exact import holds_codes as holds_codes
from ._exact import multiply as multiply
from ._exact import narrow as narrow
from ._exact import saturating_float_sum as saturating_float_sum
from ._exact import saturating_sum as saturating_sum
from ._exact import widen as widen
from ._formats import INTEGERS as INTEGERS
from ._formats import as_quantized_type as as_quantized_type
from ._formats import bit_width as bit_width
from ._formats import integer_range as integer_range
from ._formats import is_quantized_type as is_quantized_type
from ._formats import is_signed as is_signed
from ._rounding import RoundMode as RoundMode
from ._rounding import round_to_integer as round_to_integer
