"""One call that turns a function and its weights into a quantized function, which files store."""

from ..transforms._shared import Algorithm as Algorithm
from ._ptq import ptq as ptq
from ._quantized import Quantized as Quantized
from ._quantized import Unbound as Unbound
