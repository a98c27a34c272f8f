"""Flax nnx: quantized layers, contractions to inject into Flax's own, whole models."""

import typing as _typing

from .._old_names import renamed as _renamed
from ..modules import Mode as Mode
from ._convert import convert as convert
from ._convert import fix_scales as fix_scales
from ._convert import learn_scales as learn_scales
from ._convert import make_plan as make_plan
from ._init_lora import init_lora as init_lora
from ._injected import ConvGeneralDilated as ConvGeneralDilated
from ._injected import DotGeneral as DotGeneral
from ._injected import promote_dtype as promote_dtype
from ._layers import Conv as Conv
from ._layers import ConvTranspose as ConvTranspose
from ._layers import Einsum as Einsum
from ._layers import Embed as Embed
from ._layers import Linear as Linear
from ._layers import LinearGeneral as LinearGeneral
from ._layers import MultiHeadAttention as MultiHeadAttention
from ._lora import LoRALinear as LoRALinear
from ._lora import merge_lora as merge_lora
from ._ptq import bind as bind
from ._ptq import ptq as ptq
from ._quantize import quantize as quantize
from ._quantized import Quantized as Quantized
from ._variables import QParam as QParam
from ._variables import Scale as Scale
from ._variables import Stat as Stat

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _renamed(__name__, {}, internal=False)
