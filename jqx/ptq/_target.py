"""The values of `target=`."""

from typing import Literal

import jax

from .._checks import shown
from .._errors import fail
from ..tensor._shared import TARGETS

Target = str | Literal[False] | None
"""Values of `target=`: `None` is the default backend of JAX; `False` does not change layouts."""

_CALLED: dict[str, str] = dict.fromkeys(("cuda", "rocm", "nvidia", "amd"), "pass 'gpu'")
"""What to write for other names of targets."""


def target_of(function: str, target: Target) -> str | Literal[False]:
    """Returns the target, with `None` resolved, after checking that it has layouts."""
    meant = jax.default_backend() if target is None else target
    if meant is False or (isinstance(meant, str) and meant in TARGETS):
        return meant
    given = f"target == {shown(target)}"
    if target is None:
        given += f", and the backend of JAX is {meant!r}"
    raise fail(
        function,
        "`target` is unknown.",
        given=given,
        expected=f"one of {', '.join(map(repr, TARGETS))}, or False",
        fix=f"{_CALLED.get(str(target).lower(), 'pass one of these')}; target=False keeps the "
        "layout that files use.",
    )
