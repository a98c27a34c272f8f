"""Rules and policies."""

from ._policy import Policy as Policy
from ._rule import Rule as Rule
