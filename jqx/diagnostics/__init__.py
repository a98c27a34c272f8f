"""Error and sensitivity of each layer, and what compilers make of a quantized function."""

import typing as _typing

from .._late import unknown as _unknown
from . import plots as plots
from ._accumulators import Accumulator as Accumulator
from ._compare import Comparison as Comparison
from ._compare import SiteError as SiteError
from ._compare import compare as compare
from ._dashboard import Dashboard as Dashboard
from ._dashboard import dashboard as dashboard
from ._explain import Explained as Explained
from ._explain import Explanation as Explanation
from ._explain import explain as explain
from ._held_back import HeldBack as HeldBack
from ._held_back import held_back as held_back
from ._interval_walk import Overflow as Overflow
from ._lowering import Contraction as Contraction
from ._lowering import Lowering as Lowering
from ._lowering import lowering as lowering
from ._ranges import Ranges as Ranges
from ._ranges import ranges as ranges
from ._report import Report as Report
from ._report import WeightError as WeightError
from ._report import report as report
from ._search import Assignment as Assignment
from ._search import Bits as Bits
from ._search import Bytes as Bytes
from ._search import Error as Error
from ._search import search as search
from ._sensitivity import Sensitivities as Sensitivities
from ._sensitivity import Sensitivity as Sensitivity
from ._sensitivity import relative_error as relative_error
from ._sensitivity import sensitivity as sensitivity

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
