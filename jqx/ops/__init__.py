"""The specified operators on arrays."""

from ._affine import affine_dequantize as affine_dequantize
from ._affine import affine_fake_quantize as affine_fake_quantize
from ._affine import affine_quantize as affine_quantize
from ._fake_quantize import fake_quantize as fake_quantize
from ._onednn_dequantize import dynamic_dequantize as dynamic_dequantize
from ._onednn_dequantize import onednn_dequantize as onednn_dequantize
from ._onednn_quantize import dynamic_quantize as dynamic_quantize
from ._onednn_quantize import onednn_quantize as onednn_quantize
from ._quantize import dequantize as dequantize
from ._quantize import quantize as quantize
from ._quantize import quantize_dequantize as quantize_dequantize
from ._range import affine_from_range as affine_from_range
from ._range import check_symmetric as check_symmetric
from ._round import check_round_mode as check_round_mode
from ._round import round as round
