"""Gradient estimators: values that define the gradient of a rounding."""

import typing as _typing

from ._src.gradients.estimators import LearnedStep as LearnedStep
from ._src.gradients.estimators import LearnedStepAndOffset as LearnedStepAndOffset
from ._src.gradients.estimators import StochasticRounding as StochasticRounding
from ._src.gradients.estimators import lsq as lsq
from ._src.gradients.estimators import lsq_plus as lsq_plus
from ._src.gradients.estimators import pact as pact
from ._src.gradients.estimators import parq as parq
from ._src.gradients.estimators import ste as ste
from ._src.gradients.estimators import ste_unclipped as ste_unclipped
from ._src.gradients.estimators import stochastic as stochastic
from ._src.gradients.estimators import stochastic_round as stochastic_round
from ._src.gradients.estimators import straight_through as straight_through
from ._src.late import unknown as _unknown

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
