"""Quantize, Dequantize and DynamicDequantize of oneDNN Graph; see also `jqx.dynamic_quantize`."""

from ._src.ops.onednn import dynamic_dequantize as dynamic_dequantize
from ._src.ops.onednn import onednn_dequantize as onednn_dequantize
from ._src.ops.onednn import onednn_quantize as onednn_quantize
