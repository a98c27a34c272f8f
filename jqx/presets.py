"""Ready-made policies."""

import typing as _typing

from ._src.late import unknown as _unknown
from ._src.presets import fp8 as fp8
from ._src.presets import mxfp8 as mxfp8
from ._src.presets import nf4 as nf4
from ._src.presets import w4a4 as w4a4
from ._src.presets import w4a8 as w4a8
from ._src.presets import w4a16 as w4a16
from ._src.presets import w8a8 as w8a8
from ._src.presets import w8a8_dynamic as w8a8_dynamic
from ._src.presets import w8a16 as w8a16

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _unknown(__name__)
    del _unknown  # not a preset
