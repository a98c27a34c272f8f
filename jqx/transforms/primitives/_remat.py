"""`jax.checkpoint`: the body is recomputed in the backward pass, quantized."""

from collections.abc import Sequence
from typing import Any

import jax

from ..._compat import Eqn
from ._form import Form, Records, Runner, as_function, looks_into


def _apply(eqn: Eqn, operands: Sequence[Any], runner: Runner) -> tuple[list[Any], Records]:
    run = as_function(runner, eqn.params["jaxpr"])
    remat = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return remat(runner.given, *operands)


REMAT = dict.fromkeys(("remat2", "remat", "checkpoint"), Form(looks_into("jaxpr"), _apply))
