"""Names that other folders of jqx import from this one; they are not public."""

from ._affine import affine_dequantize as affine_dequantize
from ._affine import affine_fake_quantize as affine_fake_quantize
from ._affine import affine_quantize as affine_quantize
from ._onednn import dynamic_dequantize as dynamic_dequantize
from ._onednn import onednn_dequantize as onednn_dequantize
from ._onednn import onednn_quantize as onednn_quantize
from ._quantize import check_round_mode as check_round_mode
from ._range import check_symmetric as check_symmetric
