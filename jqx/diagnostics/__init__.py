"""Error and sensitivity of each layer, and what compilers make of a quantized function."""

import typing as _typing

from .._old_names import renamed as _renamed
from . import plots as plots
from ._accumulators import Accumulator as Accumulator
from ._assignment import Assignment as Assignment
from ._budgets import Bits as Bits
from ._budgets import Bytes as Bytes
from ._budgets import Error as Error
from ._compare import compare as compare
from ._comparison import Comparison as Comparison
from ._comparison import SiteError as SiteError
from ._contraction import Contraction as Contraction
from ._dashboard import Dashboard as Dashboard
from ._dashboard import dashboard as dashboard
from ._explain import Explained as Explained
from ._explain import Explanation as Explanation
from ._explain import explain as explain
from ._held_back import HeldBack as HeldBack
from ._held_back import held_back as held_back
from ._interval_notes import Overflow as Overflow
from ._lowering import Lowering as Lowering
from ._lowering import lowering as lowering
from ._metric import relative_error as relative_error
from ._ranges import Ranges as Ranges
from ._ranges import ranges as ranges
from ._report import Report as Report
from ._report import report as report
from ._search import search as search
from ._sensitivity import Sensitivities as Sensitivities
from ._sensitivity import Sensitivity as Sensitivity
from ._sensitivity import sensitivity as sensitivity
from ._weights import WeightError as WeightError

if not _typing.TYPE_CHECKING:  # type checkers report old and unknown names
    __getattr__ = _renamed(__name__, {})
