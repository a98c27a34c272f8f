"""Quantize, Dequantize and DynamicDequantize of oneDNN Graph; see also `jqx.dynamic_quantize`."""

from .ops._shared import dynamic_dequantize as dynamic_dequantize
from .ops._shared import onednn_dequantize as onednn_dequantize
from .ops._shared import onednn_quantize as onednn_quantize
