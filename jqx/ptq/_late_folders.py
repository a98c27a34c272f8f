"""The folders that `ptq` imports when it runs, so that `import jqx` stays fast."""

from typing import TYPE_CHECKING

from .._late import Late

if TYPE_CHECKING:
    from .. import algorithms, diagnostics
    from ..algorithms import _shared as shared_algorithms
    from ..diagnostics import _shared as shared_diagnostics
else:
    algorithms, shared_algorithms = Late("jqx.algorithms"), Late("jqx.algorithms._shared")
    diagnostics, shared_diagnostics = Late("jqx.diagnostics"), Late("jqx.diagnostics._shared")
