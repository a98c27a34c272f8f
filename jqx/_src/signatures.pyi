from typing import Any

from typing_extensions import ParamSpec, TypeVar

P = ParamSpec("P", default=...)
R = TypeVar("R", default=Any)
T = TypeVar("T")
