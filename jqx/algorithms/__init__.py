"""Algorithms that choose the codes of weights, where rounding to nearest is not enough."""

from ..transforms._shared import Chosen as Chosen
from ._folds import Pair as Pair
from ._gptq import Gptq as Gptq
from ._gptq import gptq as gptq
from ._memory import Memory as Memory
from ._pairs import Pairs as Pairs
from ._pairs import find_pairs as find_pairs
from ._report import AlgorithmReport as AlgorithmReport
from ._report import MatrixReport as MatrixReport
