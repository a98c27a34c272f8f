"""Error and sensitivity of each layer, and what compilers make of a quantized function."""

import typing as _typing

from .._src.diagnostics.compare import held_back as held_back
from .._src.diagnostics.dashboard import dashboard as dashboard
from .._src.diagnostics.ranges import ranges as ranges
from .._src.diagnostics.search import Bits as Bits
from .._src.diagnostics.search import Bytes as Bytes
from .._src.diagnostics.search import Error as Error
from .._src.diagnostics.search import search as search
from .._src.diagnostics.sensitivity import relative_error as relative_error
from .._src.diagnostics.sensitivity import sensitivity as sensitivity
from .._src.late import unknown as _unknown
from . import plots as plots

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
