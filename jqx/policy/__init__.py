"""Rules and policies."""

from ._policy import Policy as Policy
from ._policy import check_policy as check_policy
from ._policy import preset_of as preset_of
from ._rule import OPS as OPS
from ._rule import Rule as Rule
