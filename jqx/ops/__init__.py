"""The specified operators on arrays."""

from ._fake_quantize import fake_quantize as fake_quantize
from ._onednn_quantize import dynamic_quantize as dynamic_quantize
from ._quantize import dequantize as dequantize
from ._quantize import quantize as quantize
from ._quantize import quantize_dequantize as quantize_dequantize
from ._range import affine_from_range as affine_from_range
from ._round import round as round
