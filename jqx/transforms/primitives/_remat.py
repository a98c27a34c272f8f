"""`jax.checkpoint`: the body is computed anew in the backward pass, quantized."""

from collections.abc import Sequence
from typing import Any

import jax

from ..._compat import Eqn
from .._origin import Origin
from ._form import Finder, Form, Records, Runner


def _track(eqn: Eqn, known: Sequence[Origin | None], finder: Finder) -> Sequence[Origin | None]:
    return finder.enter(eqn.params["jaxpr"], known)


def _apply(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    def run(given: Any, *args: Any) -> tuple[list[Any], Records]:
        return runner.run(eqn.params["jaxpr"], args, given=given)

    remat = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return remat(runner.given, *operands)


REMAT = dict.fromkeys(("remat2", "remat", "checkpoint"), Form(_track, _apply))
