"""QSpec, QTensor, and the views through which a scale follows its values."""

from ._pack_for import pack_for as pack_for
from ._qtensor import QTensor as QTensor
from ._segments import Segments as Segments
from ._spec import QSpec as QSpec
