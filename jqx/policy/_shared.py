"""What other folders of jqx import from this one, but users do not."""

from ._policy import check_policy as check_policy
from ._policy import preset_of as preset_of
from ._rule import pattern_of as pattern_of
from ._steps import Selector as Selector
