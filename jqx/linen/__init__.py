"""Flax linen: quantized layers, contractions to inject into Flax's own, whole modules."""

import typing as _typing

from .._old_names import renamed as _renamed
from ..modules import Mode as Mode
from ._init_lora import init_lora as init_lora
from ._injected import ConvGeneralDilated as ConvGeneralDilated
from ._injected import DotGeneral as DotGeneral
from ._injected import promote_dtype as promote_dtype
from ._layers import Conv as Conv
from ._layers import ConvTranspose as ConvTranspose
from ._layers import Dense as Dense
from ._layers import DenseGeneral as DenseGeneral
from ._layers import Einsum as Einsum
from ._layers import Embed as Embed
from ._layers import MultiHeadAttention as MultiHeadAttention
from ._layers import MultiHeadDotProductAttention as MultiHeadDotProductAttention
from ._lora import LoRADense as LoRADense
from ._lora import merge_lora as merge_lora
from ._ptq import bind as bind
from ._ptq import ptq as ptq
from ._quantize import quantize as quantize
from ._quantized import Quantized as Quantized
from ._variables import convert as convert
from ._variables import fix_scales as fix_scales
from ._variables import learn_scales as learn_scales
from ._variables import make_plan as make_plan

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _renamed(__name__, {}, internal=False)
