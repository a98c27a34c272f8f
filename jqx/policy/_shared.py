"""What other folders of jqx import from this one, but users do not."""

from ._policy import Selector as Selector
from ._policy import check_policy as check_policy
from ._policy import pattern_of as pattern_of
from ._policy import preset_of as preset_of
