"""What other folders of jqx import from this one."""

from ._decode_attention_gpu import decode_attention_gpu as decode_attention_gpu
from ._decode_attention_gpu import fits_gpu as fits_gpu
from ._decode_attention_tpu import decode_attention_tpu as decode_attention_tpu
from ._decode_attention_tpu import fits_tpu as fits_tpu
