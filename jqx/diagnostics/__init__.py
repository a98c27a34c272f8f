"""Error and sensitivity of each layer, and what compilers make of a quantized function."""

import typing as _typing

from .._src.diagnostics.accumulators import Accumulator as Accumulator
from .._src.diagnostics.compare import Comparison as Comparison
from .._src.diagnostics.compare import HeldBack as HeldBack
from .._src.diagnostics.compare import SiteError as SiteError
from .._src.diagnostics.compare import compare as compare
from .._src.diagnostics.compare import held_back as held_back
from .._src.diagnostics.dashboard import Dashboard as Dashboard
from .._src.diagnostics.dashboard import dashboard as dashboard
from .._src.diagnostics.lowering import Contraction as Contraction
from .._src.diagnostics.lowering import Explained as Explained
from .._src.diagnostics.lowering import Explanation as Explanation
from .._src.diagnostics.lowering import Lowering as Lowering
from .._src.diagnostics.lowering import explain as explain
from .._src.diagnostics.lowering import lowering as lowering
from .._src.diagnostics.ranges import Overflow as Overflow
from .._src.diagnostics.ranges import Ranges as Ranges
from .._src.diagnostics.ranges import ranges as ranges
from .._src.diagnostics.report import Report as Report
from .._src.diagnostics.report import WeightError as WeightError
from .._src.diagnostics.report import report as report
from .._src.diagnostics.search import Assignment as Assignment
from .._src.diagnostics.search import Bits as Bits
from .._src.diagnostics.search import Bytes as Bytes
from .._src.diagnostics.search import Error as Error
from .._src.diagnostics.search import search as search
from .._src.diagnostics.sensitivity import Sensitivities as Sensitivities
from .._src.diagnostics.sensitivity import Sensitivity as Sensitivity
from .._src.diagnostics.sensitivity import relative_error as relative_error
from .._src.diagnostics.sensitivity import sensitivity as sensitivity
from .._src.late import unknown as _unknown
from . import plots as plots

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
