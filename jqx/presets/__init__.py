"""Ready-made policies."""

from ._integer import w8a8 as w8a8
from ._integer import w8a8_dynamic as w8a8_dynamic
from ._integer import w8a16 as w8a16
