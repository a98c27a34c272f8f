"""Names of this folder that other folders of jqx import, but users do not."""

from ._config import quantization_of as quantization_of
from ._config import read_json as read_json
from ._named_tree import Leaf as Leaf
from ._save import save_tree as save_tree
from ._source import INDEX as INDEX
from ._write import GGUF as GGUF
from ._write import TARGETS as TARGETS
from ._write import TOKENIZERS as TOKENIZERS
