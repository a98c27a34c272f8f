"""Every primitive that holds functions, by name."""

from ._cond import COND
from ._custom_derivative import CUSTOM_DERIVATIVE
from ._form import Form
from ._jit import JIT
from ._remat import REMAT
from ._scan import SCAN
from ._shard_map import SHARD_MAP
from ._while import WHILE

FORMS: dict[str, Form] = {
    **JIT,
    **SCAN,
    **WHILE,
    **COND,
    **REMAT,
    **CUSTOM_DERIVATIVE,
    **SHARD_MAP,
}
