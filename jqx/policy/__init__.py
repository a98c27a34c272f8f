"""Rules and policies."""

from ._rule import Policy as Policy
from ._rule import Rule as Rule
