"""Flax linen: quantized layers, contractions to inject into Flax's own, whole modules."""

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
from ._layers import Dense as Dense
from ._layers import DenseGeneral as DenseGeneral
from ._layers import DotGeneral as DotGeneral
from ._layers import Einsum as Einsum
from ._layers import Embed as Embed
from ._layers import LoRADense as LoRADense
from ._layers import MultiHeadAttention as MultiHeadAttention
from ._layers import MultiHeadDotProductAttention as MultiHeadDotProductAttention
from ._layers import init_lora as init_lora
from ._layers import merge_lora as merge_lora
from ._layers import promote_dtype as promote_dtype
from ._ptq import bind as bind
from ._ptq import ptq as ptq
from ._quantized import Quantized as Quantized
from ._quantized import quantize as quantize

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
