"""Names that other folders of jqx import from this one; they are not public."""

from ._estimator import check_estimator as check_estimator
from ._estimator import check_key as check_key
from ._estimator import draws as draws
from ._estimator import moves_limits as moves_limits
from ._estimator import with_rule as with_rule
from ._estimators import AdditiveNoise as AdditiveNoise
from ._estimators import FixedRange as FixedRange
from ._estimators import ParameterizedClipping as ParameterizedClipping
from ._estimators import Parq as Parq
from ._estimators import StraightThrough as StraightThrough
from ._estimators import StraightThroughUnclipped as StraightThroughUnclipped
