"""jqx: quantization for JAX as functional transforms."""

__version__ = "0.1.0"

from . import gradients as gradients
from . import numerics as numerics
from .numerics import RoundMode as RoundMode
from .ops import affine_from_range as affine_from_range
from .ops import dequantize as dequantize
from .ops import dynamic_dequantize as dynamic_dequantize
from .ops import dynamic_quantize as dynamic_quantize
from .ops import fake_quantize as fake_quantize
from .ops import onednn_dequantize as onednn_dequantize
from .ops import onednn_quantize as onednn_quantize
from .ops import quantize as quantize
from .ops import quantize_dequantize as quantize_dequantize
from .ops import round as round
