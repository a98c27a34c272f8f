"""Names that other folders of jqx import from this one, and that users do not need."""

from ._decode_attention import attention_named as attention_named
from ._kv_cache import check_format as check_format
