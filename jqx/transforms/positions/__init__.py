"""A causal function of tokens, one position at a time."""

from ._steps import Unable as Unable
from ._stepwise import stepwise as stepwise
