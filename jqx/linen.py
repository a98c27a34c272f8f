"""Flax linen: quantized layers, whole modules."""

import typing as _typing

from ._src.late import unknown as _unknown
from ._src.linen.convert import convert as convert
from ._src.linen.convert import fix_scales as fix_scales
from ._src.linen.convert import learn_scales as learn_scales
from ._src.linen.convert import make_plan as make_plan
from ._src.linen.layers import Conv as Conv
from ._src.linen.layers import ConvTranspose as ConvTranspose
from ._src.linen.layers import Dense as Dense
from ._src.linen.layers import DenseGeneral as DenseGeneral
from ._src.linen.layers import Einsum as Einsum
from ._src.linen.layers import Embed as Embed
from ._src.linen.layers import LoRADense as LoRADense
from ._src.linen.layers import MultiHeadAttention as MultiHeadAttention
from ._src.linen.layers import MultiHeadDotProductAttention as MultiHeadDotProductAttention
from ._src.linen.lora import apply_lora as apply_lora
from ._src.linen.lora import init_lora as init_lora
from ._src.linen.lora import merge_lora as merge_lora
from ._src.linen.ptq import bind as bind
from ._src.linen.ptq import ptq as ptq
from ._src.linen.ptq import pure as pure
from ._src.linen.quantized import Quantized as Quantized
from ._src.linen.quantized import quantize as quantize
from ._src.modules.quantized_function import Mode as Mode
from ._src.transforms.adapters import LoRA as LoRA

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
