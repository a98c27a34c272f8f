"""Names that other folders of jqx import from this one; they are not public."""

from ._decode_attention_gpu import decode_attention_gpu as decode_attention_gpu
from ._decode_attention_gpu import fits_gpu as fits_gpu
from ._decode_attention_tpu import decode_attention_tpu as decode_attention_tpu
from ._decode_attention_tpu import fits_tpu as fits_tpu
from ._pallas import Table as Table
from ._pallas import scales as scales
from ._products_cpu import convolution_cpu as convolution_cpu
from ._products_cpu import decoded_product_cpu as decoded_product_cpu
from ._products_cpu import float_product_cpu as float_product_cpu
from ._products_cpu import product_cpu as product_cpu
from ._products_cpu import requantized_product_cpu as requantized_product_cpu
from ._products_gpu import products_gpu as products_gpu
from ._products_gpu import weights_gpu as weights_gpu
from ._products_tpu import products_tpu as products_tpu
from ._products_tpu import weights_tpu as weights_tpu
