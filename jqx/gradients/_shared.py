"""Names that other folders of jqx import from this one; they are not public."""

from ._additive_noise import AdditiveNoise as AdditiveNoise
from ._dorefa import FixedRange as FixedRange
from ._estimator import check_estimator as check_estimator
from ._estimator import check_key as check_key
from ._estimator import draws as draws
from ._limits import moves_limits as moves_limits
from ._pact import ParameterizedClipping as ParameterizedClipping
from ._parq import Parq as Parq
from ._ste import StraightThrough as StraightThrough
from ._ste import StraightThroughUnclipped as StraightThroughUnclipped
from ._with_rule import with_rule as with_rule
