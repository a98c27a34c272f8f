"""What other folders of jqx import from this one, but users do not."""

from ._absmax import AbsMaxStats as AbsMaxStats
from ._calibrated import Calibrated as Calibrated
from ._cross import BOTH as BOTH
from ._cross import CrossStats as CrossStats
from ._flags import flags as flags
from ._flags import in_total as in_total
from ._flags import without_nonfinite as without_nonfinite
from ._hessian import HessianStats as HessianStats
from ._hessian import gram as gram
from ._hessian import has_rows as has_rows
from ._mean import MeanStats as MeanStats
from ._observer import Patches as Patches
from ._observer import Weight as Weight
from ._samples import SamplesStats as SamplesStats
from ._weighted import Weighted as Weighted
from ._weighted import check_weight as check_weight
