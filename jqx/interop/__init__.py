"""Reads and writes checkpoint files of other libraries."""

from ..tensor._shared import Lazy as Lazy
from ._archive import Archive as Archive
from ._archive import load as load
from ._archive import read as read
from ._gguf import Gguf as Gguf
from ._gguf import GgufTensor as GgufTensor
from ._gguf import read_gguf as read_gguf
from ._gguf_blocks import GgufBlocks as GgufBlocks
from ._named_tree import Name as Name
from ._named_tree import named as named
from ._named_tree import tree as tree
from ._orbax import from_gemma as from_gemma
from ._orbax import from_orbax as from_orbax
from ._orbax import to_orbax as to_orbax
from ._save import save as save
from ._save import save_leaves as save_leaves
from ._verify import TensorCheck as TensorCheck
from ._verify import Verification as Verification
from ._verify import verify as verify
from ._write import write as write
