"""Reads and writes checkpoint files of other libraries, and functions as models of ONNX."""

from ._src.interop.archive import Archive as Archive
from ._src.interop.archive import read as read
from ._src.interop.gguf import read_gguf as read_gguf
from ._src.interop.keras import from_keras as from_keras
from ._src.interop.keras import to_keras as to_keras
from ._src.interop.named_tree import Name as Name
from ._src.interop.named_tree import named as named
from ._src.interop.named_tree import tree as tree
from ._src.interop.orbax import from_gemma as from_gemma
from ._src.interop.orbax import from_orbax as from_orbax
from ._src.interop.orbax import to_orbax as to_orbax
from ._src.interop.qarray import from_qarray as from_qarray
from ._src.interop.qarray import to_qarray as to_qarray
from ._src.interop.qwix import from_qwix as from_qwix
from ._src.interop.save import save_leaves as save_leaves
from ._src.interop.verify import verify as verify
from ._src.interop.write import write as write
from ._src.litert import to_litert as to_litert
from ._src.onnx.export import to_onnx as to_onnx
from ._src.onnx.verify import verify_onnx as verify_onnx
from ._src.tensor.segments import Lazy as Lazy
