"""Gradient estimators: values that define the gradient of a rounding."""

import typing as _typing

from .._late import unknown as _unknown
from ._estimator import Gradient as Gradient
from ._estimator import GradientEstimator as GradientEstimator
from ._estimator import Surrogate as Surrogate
from ._estimators import ElementwiseGradientScaling as ElementwiseGradientScaling
from ._estimators import LearnedStep as LearnedStep
from ._estimators import LearnedStepAndOffset as LearnedStepAndOffset
from ._estimators import StochasticRounding as StochasticRounding
from ._estimators import additive_noise as additive_noise
from ._estimators import dorefa as dorefa
from ._estimators import dorefa_weights as dorefa_weights
from ._estimators import ewgs as ewgs
from ._estimators import lsq as lsq
from ._estimators import lsq_plus as lsq_plus
from ._estimators import pact as pact
from ._estimators import parq as parq
from ._estimators import proximal_round as proximal_round
from ._estimators import ste as ste
from ._estimators import ste_unclipped as ste_unclipped
from ._estimators import stochastic as stochastic
from ._estimators import stochastic_round as stochastic_round
from ._estimators import straight_through as straight_through

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
