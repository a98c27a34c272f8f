"""jqx: quantization for JAX as functional transforms.

Ops with written semantics, QTensors and exact integer contractions, and transforms that plan,
calibrate, simulate and convert any JAX function. Start with `make_plan`.
"""

import typing as _typing

from . import calibrators as calibrators
from . import gradients as gradients
from . import numerics as numerics
from . import observers as observers
from . import onednn as onednn
from . import presets as presets
from . import tflite as tflite
from ._late import late as _late
from .caches import KVCache as KVCache
from .caches import decode_attention as decode_attention
from .calibrators._shared import per_axis as per_axis
from .calibrators._shared import per_block as per_block
from .calibrators._shared import per_channel as per_channel
from .calibrators._shared import per_group as per_group
from .calibrators._shared import per_tensor as per_tensor
from .calibrators._shared import per_token as per_token
from .contractions import conv_general_dilated as conv_general_dilated
from .contractions import dot_general as dot_general
from .contractions import dynamic_slice as dynamic_slice
from .contractions import dynamic_update_slice as dynamic_update_slice
from .contractions import einsum as einsum
from .contractions import formulations as formulations
from .contractions import kernels_in_exports as kernels_in_exports
from .contractions import matmul as matmul
from .contractions import ragged_dot as ragged_dot
from .contractions import take as take
from .numerics._shared import RoundMode as RoundMode
from .ops import affine_from_range as affine_from_range
from .ops import dequantize as dequantize
from .ops import dynamic_quantize as dynamic_quantize
from .ops import fake_quantize as fake_quantize
from .ops import quantize as quantize
from .ops import quantize_dequantize as quantize_dequantize
from .ops import round as round
from .policy import Policy as Policy
from .policy import Rule as Rule
from .ptq import Algorithm as Algorithm
from .ptq import Quantized as Quantized
from .ptq import Unbound as Unbound
from .ptq import ptq as ptq
from .tensor import QSpec as QSpec
from .tensor import QTensor as QTensor
from .tensor import Segments as Segments
from .tensor import pack_for as pack_for
from .transforms import ChannelMap as ChannelMap
from .transforms import LowRank as LowRank
from .transforms import Plan as Plan
from .transforms import affines as affines
from .transforms import calibrate as calibrate
from .transforms import calibrate_batches as calibrate_batches
from .transforms import convert as convert
from .transforms import dequantize_params as dequantize_params
from .transforms import hoist as hoist
from .transforms import make_plan as make_plan
from .transforms import map_channels as map_channels
from .transforms import merge_stats as merge_stats
from .transforms import quantize_params as quantize_params
from .transforms import quantize_state as quantize_state
from .transforms import simulate as simulate

if _typing.TYPE_CHECKING:
    from . import algorithms as algorithms
    from . import diagnostics as diagnostics
    from . import interop as interop
    from . import parallel as parallel
    from .diagnostics import compare as compare
    from .diagnostics import explain as explain
    from .diagnostics import lowering as lowering
    from .diagnostics import report as report
    from .interop import load as load
    from .interop import save as save
else:  # type checkers report unknown names
    __getattr__, __dir__ = _late(
        __name__,
        {
            "algorithms": (),
            "diagnostics": ("compare", "explain", "lowering", "report"),
            "interop": ("load", "save"),
            "parallel": (),
        },
    )
__version__ = "0.1.0"
