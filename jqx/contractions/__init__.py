"""Contractions of arrays and QTensors. Binds `@` of a QTensor to `matmul`."""

from ..tensor import QTensor
from ._cache import dynamic_slice as dynamic_slice
from ._cache import dynamic_update_slice as dynamic_update_slice
from ._conv_general_dilated import conv_general_dilated as conv_general_dilated
from ._dot_general import dot_general as dot_general
from ._dot_general import matmul as matmul
from ._einsum import einsum as einsum
from ._formulation import Formulation as Formulation
from ._formulation import formulations as formulations
from ._formulation import kernels_in_exports as kernels_in_exports
from ._formulation import using as using
from ._ragged_dot import ragged_dot as ragged_dot
from ._take import take as take

QTensor.__matmul__ = lambda self, other: matmul(self, other)  # type: ignore[method-assign]
QTensor.__rmatmul__ = lambda self, other: matmul(other, self)  # type: ignore[method-assign]
