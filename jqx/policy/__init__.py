"""Rules and policies."""

from ._policy import Policy as Policy
from ._policy import Rule as Rule
