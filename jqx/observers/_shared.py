"""What other folders of jqx import from this one, but users do not."""

from ._observer import Calibrated as Calibrated
from ._observer import Patches as Patches
from ._observer import Weight as Weight
from ._observer import Weighted as Weighted
from ._observer import check_weight as check_weight
from ._observer import flags as flags
from ._observer import in_total as in_total
from ._observer import without_nonfinite as without_nonfinite
from ._statistics import BOTH as BOTH
from ._statistics import AbsMaxStats as AbsMaxStats
from ._statistics import HessianStats as HessianStats
from ._statistics import MeanStats as MeanStats
from ._statistics import gram as gram
from ._statistics import has_rows as has_rows
