"""The one call: from a function and its weights to a quantized one, which files hold."""

from ..transforms._shared import Algorithm as Algorithm
from ._ptq import ptq as ptq
from ._quantized import Quantized as Quantized
from ._unbound import Unbound as Unbound
