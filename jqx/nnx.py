"""Flax nnx: quantized layers, whole models."""

import typing as _typing

from ._src.late import unknown as _unknown
from ._src.modules.quantized_function import Mode as Mode
from ._src.nnx.convert import convert as convert
from ._src.nnx.convert import fix_scales as fix_scales
from ._src.nnx.convert import learn_scales as learn_scales
from ._src.nnx.convert import make_plan as make_plan
from ._src.nnx.layers import Conv as Conv
from ._src.nnx.layers import ConvTranspose as ConvTranspose
from ._src.nnx.layers import Einsum as Einsum
from ._src.nnx.layers import Embed as Embed
from ._src.nnx.layers import Linear as Linear
from ._src.nnx.layers import LinearGeneral as LinearGeneral
from ._src.nnx.layers import LoRALinear as LoRALinear
from ._src.nnx.layers import MultiHeadAttention as MultiHeadAttention
from ._src.nnx.lora import apply_lora as apply_lora
from ._src.nnx.lora import init_lora as init_lora
from ._src.nnx.lora import merge_lora as merge_lora
from ._src.nnx.ptq import bind as bind
from ._src.nnx.ptq import ptq as ptq
from ._src.nnx.ptq import pure as pure
from ._src.nnx.ptq import update as update
from ._src.nnx.quantized import Quantized as Quantized
from ._src.nnx.quantized import quantize as quantize
from ._src.nnx.state import QParam as QParam
from ._src.nnx.state import Scale as Scale
from ._src.nnx.state import Stat as Stat
from ._src.transforms.adapters import LoRA as LoRA

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
