"""What extends jqx: bases of formats, calibrators, observers, gradient estimators and algorithms;
the entries of a plan that these read; rules for primitives, also in files of ONNX; other ways
to compute a contraction.
"""

import typing as _typing

from ._src.contractions.formulation import Formulation as Formulation
from ._src.contractions.formulation import using as using
from ._src.contractions.problem import OperandAxes as OperandAxes
from ._src.contractions.scaled import cudnn_blocks as cudnn_blocks
from ._src.gradients.estimators import GradientEstimator as GradientEstimator
from ._src.gradients.estimators import Surrogate as Surrogate
from ._src.late import unknown as _unknown
from ._src.numerics.exact import power_of_two as power_of_two
from ._src.numerics.exact import round_to_integer as round_to_integer
from ._src.numerics.exact import step_of as step_of
from ._src.numerics.qtype import QType as QType
from ._src.statistics.calibrators import Calibrator as Calibrator
from ._src.statistics.granularity import Granularity as Granularity
from ._src.statistics.granularity import Groups as Groups
from ._src.statistics.statistics import ObservedSite as ObservedSite
from ._src.statistics.statistics import Observer as Observer
from ._src.statistics.statistics import absmax as absmax
from ._src.statistics.statistics import hessian as hessian
from ._src.statistics.statistics import mean as mean
from ._src.statistics.statistics import mean_abs as mean_abs
from ._src.statistics.statistics import places as places
from ._src.transforms.algorithm import Algorithm as Algorithm
from ._src.transforms.algorithm import AlgorithmResult as AlgorithmResult
from ._src.transforms.onnx_rules import onnx_rules as onnx_rules
from ._src.transforms.plan import Operand as Operand
from ._src.transforms.plan import Site as Site
from ._src.transforms.plan import Skipped as Skipped
from ._src.transforms.plan import Unreached as Unreached
from ._src.transforms.plan import Weight as Weight
from ._src.transforms.rules import Contraction as Contraction
from ._src.transforms.rules import primitive_rules as primitive_rules
from ._src.transforms.views import View as View

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
