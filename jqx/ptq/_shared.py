"""What other folders of jqx import from this one, and users do not."""

from ._defaults import Effort as Effort
from ._defaults import check_effort as check_effort
from ._ptq import Target as Target
from ._unbound import leaves_by_path as leaves_by_path
