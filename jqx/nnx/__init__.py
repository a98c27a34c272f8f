"""Flax nnx: quantized layers, contractions to inject into Flax's own, whole models."""

import typing as _typing

from .._late import unknown as _unknown
from ..modules import Mode as Mode
from ._convert import convert as convert
from ._convert import fix_scales as fix_scales
from ._convert import learn_scales as learn_scales
from ._convert import make_plan as make_plan
from ._layers import Conv as Conv
from ._layers import ConvGeneralDilated as ConvGeneralDilated
from ._layers import ConvTranspose as ConvTranspose
from ._layers import DotGeneral as DotGeneral
from ._layers import Einsum as Einsum
from ._layers import Embed as Embed
from ._layers import Linear as Linear
from ._layers import LinearGeneral as LinearGeneral
from ._layers import LoRALinear as LoRALinear
from ._layers import MultiHeadAttention as MultiHeadAttention
from ._layers import init_lora as init_lora
from ._layers import merge_lora as merge_lora
from ._layers import promote_dtype as promote_dtype
from ._ptq import bind as bind
from ._ptq import ptq as ptq
from ._quantized import Quantized as Quantized
from ._quantized import quantize as quantize
from ._state import QParam as QParam
from ._state import Scale as Scale
from ._state import Stat as Stat

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
