"""Kernels run step by step on the CPU, where a contraction would take them on their platform."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from unittest import mock

from jqx._src.contractions import kernels
from jqx._src.contractions.formulation import FORMULATIONS, PLATFORMS, using

OF_GROUPS = ("ragged_kernel", "ragged_kernel_quantizing")
KINDS = ("kernel", "kernel_of_codes", "kernel_quantizing", *OF_GROUPS)
RUN_BY = ("products_tpu", "products_gpu", "weights_tpu", "weights_gpu")


@contextlib.contextmanager
def on(platform: str) -> Iterator[None]:
    """Takes the kernels of a platform for what is traced inside, to be run step by step."""
    own = [FORMULATIONS[f"{kind}_{platform}"] for kind in KINDS]
    forms = [
        dataclasses.replace(form, name=f"{form.name}_step_by_step", platforms=PLATFORMS)
        for form in own
    ]
    with contextlib.ExitStack() as stack:
        slow = {name: functools.partial(getattr(kernels, name), interpret=True) for name in RUN_BY}
        stack.enter_context(mock.patch.multiple(kernels, **slow))
        stack.enter_context(using(*forms))
        yield
