"""The specified operators on arrays."""

from ._fake_quantize import fake_quantize as fake_quantize
from ._onednn import dynamic_quantize as dynamic_quantize
from ._quantize import dequantize as dequantize
from ._quantize import quantize as quantize
from ._quantize import quantize_dequantize as quantize_dequantize
from ._quantize import round as round
from ._range import affine_from_range as affine_from_range
