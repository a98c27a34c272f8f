"""Files and formats of others."""

from ._archive import Archive as Archive
from ._archive import load as load
from ._save import save as save
from ._save import save_leaves as save_leaves
