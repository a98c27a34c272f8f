"""Names of this folder that other folders of jqx import, but users do not."""

from .._table import decibels as decibels
from .._table import finite as finite
from ._report import bits_of as bits_of
from ._report import measure as measure
from ._report import report_of as report_of
from ._report import scheme_of as scheme_of
from ._report import short_scheme as short_scheme
from ._report import sqnr as sqnr
