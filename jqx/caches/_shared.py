"""What other folders of jqx import from this one, and users do not."""

from ._kv_cache import check_format as check_format
