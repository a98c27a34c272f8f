"""Names that other folders of jqx import from this one, and that users do not need."""

from ._engine import calibrate_stages as calibrate_stages
from ._grids import bodies_of as bodies_of
from ._hadamard import factors_of as factors_of
from ._hadamard import hadamard as hadamard
from ._hadamard import is_order as is_order
from ._hadamard import signs_of as signs_of
from ._own_text import NotCausal as NotCausal
from ._own_text import decoding_of as decoding_of
from ._own_text import tokens_of as tokens_of
from ._own_text import written as written
from ._report import not_chosen as not_chosen
