"""QSpec, QTensor, and its views, which keep the scale in step with the values."""

from ._qtensor import QTensor as QTensor
from ._segments import Segments as Segments
from ._shardings import pack_for as pack_for
from ._spec import QSpec as QSpec
