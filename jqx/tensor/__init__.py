"""QSpec, QTensor, and the views through which a scale follows its values."""

from ._fit import fake_quantize_as as fake_quantize_as
from ._qtensor import QTensor as QTensor
from ._spec import QSpec as QSpec
from ._views import axis_groups as axis_groups
