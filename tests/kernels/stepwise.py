"""Kernels run step by step on the CPU, where a contraction would take them on their platform."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from unittest import mock

from jqx.contractions import using
from jqx.contractions._how import _kernels
from jqx.contractions._how._formulation import PLATFORMS, Formulation

KINDS = {"tpu": _kernels.kernel_tpu, "gpu": _kernels.kernel_gpu}
ARRAYS = ("weights_tpu", "weights_gpu")


def stepwise(platform: str) -> Formulation:
    """Returns the formulation of the kernels of a platform, for all platforms."""
    form = KINDS[platform]
    return dataclasses.replace(form, name=f"{form.name}_step_by_step", platforms=PLATFORMS)


@contextlib.contextmanager
def on(platform: str) -> Iterator[None]:
    """Takes the kernels of a platform for what is traced inside, to be run step by step."""
    known = {name: getattr(_kernels, name) for name in ARRAYS}
    slow = {name: functools.partial(run, interpret=True) for name, run in known.items()}
    with mock.patch.multiple(_kernels, **slow), using(stepwise(platform)):
        yield
