"""jqx: quantization for JAX as functional transforms.

Ops with written semantics, QTensors and exact integer contractions, and transforms that plan,
calibrate, simulate and convert any JAX function. Start with `ptq`, which does it all in one call.
"""

import typing as _typing

from . import calibrators as calibrators
from . import gradients as gradients
from . import numerics as numerics
from . import onednn as onednn
from . import presets as presets
from . import tflite as tflite
from ._src.caches.decode_attention import decode_attention as decode_attention
from ._src.caches.kv_cache import KVCache as KVCache
from ._src.contractions.cache import dynamic_slice as dynamic_slice
from ._src.contractions.cache import dynamic_update_slice as dynamic_update_slice
from ._src.contractions.cache import take as take
from ._src.contractions.conv_general_dilated import conv_general_dilated as conv_general_dilated
from ._src.contractions.dot_general import dot_general as dot_general
from ._src.contractions.dot_general import matmul as matmul
from ._src.contractions.einsum import einsum as einsum
from ._src.contractions.formulation import formulations as formulations
from ._src.contractions.formulation import kernels_in_exports as kernels_in_exports
from ._src.contractions.ragged_dot import ragged_dot as ragged_dot
from ._src.late import late as _late
from ._src.numerics.exact import RoundMode as RoundMode
from ._src.ops.affine import affine_from_range as affine_from_range
from ._src.ops.fake_quantize import fake_quantize as fake_quantize
from ._src.ops.onednn import dynamic_quantize as dynamic_quantize
from ._src.ops.quantize import dequantize as dequantize
from ._src.ops.quantize import quantize as quantize
from ._src.ops.quantize import quantize_dequantize as quantize_dequantize
from ._src.ops.quantize import round as round
from ._src.policy import Policy as Policy
from ._src.policy import Rule as Rule
from ._src.ptq.ptq import ptq as ptq
from ._src.ptq.quantized import Quantized as Quantized
from ._src.ptq.quantized import SavedModel as SavedModel
from ._src.statistics.granularity import per_axis as per_axis
from ._src.statistics.granularity import per_block as per_block
from ._src.statistics.granularity import per_channel as per_channel
from ._src.statistics.granularity import per_group as per_group
from ._src.statistics.granularity import per_tensor as per_tensor
from ._src.statistics.granularity import per_token as per_token
from ._src.tensor.qtensor import QTensor as QTensor
from ._src.tensor.segments import Segments as Segments
from ._src.tensor.shardings import pack_for as pack_for
from ._src.tensor.spec import QSpec as QSpec
from ._src.transforms.calibrate import affines as affines
from ._src.transforms.calibrate import calibrate as calibrate
from ._src.transforms.calibrate import calibrate_batches as calibrate_batches
from ._src.transforms.calibrate import merge_stats as merge_stats
from ._src.transforms.channel_map import ChannelMap as ChannelMap
from ._src.transforms.channel_map import LowRank as LowRank
from ._src.transforms.convert import convert as convert
from ._src.transforms.convert import simulate as simulate
from ._src.transforms.hoist import hoist as hoist
from ._src.transforms.make_plan import make_plan as make_plan
from ._src.transforms.map_channels import map_channels as map_channels
from ._src.transforms.plan import Plan as Plan
from ._src.transforms.quantize_params import dequantize_params as dequantize_params
from ._src.transforms.quantize_params import quantize_params as quantize_params
from ._src.transforms.quantize_params import quantize_state as quantize_state

if _typing.TYPE_CHECKING:
    from . import algorithms as algorithms
    from . import diagnostics as diagnostics
    from . import extend as extend
    from . import interop as interop
    from . import optim as optim
    from . import parallel as parallel
    from . import recipes as recipes
    from ._src.diagnostics.compare import compare as compare
    from ._src.diagnostics.lowering import explain as explain
    from ._src.diagnostics.lowering import lowering as lowering
    from ._src.diagnostics.report import report as report
    from ._src.interop.archive import load as load
    from ._src.interop.save import save as save
    from ._src.train.train import train as train
    from ._src.train.train import train_state as train_state
else:  # type checkers report unknown names
    __getattr__, __dir__ = _late(
        __name__,
        {
            "jqx.algorithms": (),
            "jqx.diagnostics": (),
            "jqx.extend": (),
            "jqx.interop": (),
            "jqx.optim": (),
            "jqx.parallel": (),
            "jqx.recipes": (),
            "jqx._src.diagnostics.compare": ("compare",),
            "jqx._src.diagnostics.lowering": ("explain", "lowering"),
            "jqx._src.diagnostics.report": ("report",),
            "jqx._src.interop.archive": ("load",),
            "jqx._src.interop.save": ("save",),
            "jqx._src.train.train": ("train", "train_state"),
        },
    )
__version__ = "0.1.0"
