"""Ready-made policies."""

import typing as _typing

from .._old_names import renamed as _renamed
from ._codebook import nf4 as nf4
from ._float import fp8 as fp8
from ._float import mxfp8 as mxfp8
from ._integer import w4a4 as w4a4
from ._integer import w4a8 as w4a8
from ._integer import w4a16 as w4a16
from ._integer import w8a8 as w8a8
from ._integer import w8a8_dynamic as w8a8_dynamic
from ._integer import w8a16 as w8a16

if not _typing.TYPE_CHECKING:  # so that type checkers report unknown names
    __getattr__ = _renamed(__name__, {})
    del _renamed  # not a preset
