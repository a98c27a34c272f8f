"""Kernels run step by step on the CPU, where a contraction would take them on their platform."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from unittest import mock

from jqx._src.contractions import kernels, pending, ragged_dot
from jqx._src.contractions.formulation import FORMULATIONS, PLATFORMS, using

OF_GROUPS = ("ragged_kernel", "ragged_kernel_quantizing")
KINDS = ("kernel", "kernel_of_codes", "kernel_quantizing", *OF_GROUPS)
RUN_BY = {
    kernels: ("products_tpu", "products_gpu", "weights_tpu", "weights_gpu"),
    pending: ("products_tpu", "products_gpu"),
    ragged_dot: ("products_tpu", "products_gpu", "weights_tpu", "weights_gpu"),
}


@contextlib.contextmanager
def on(platform: str) -> Iterator[None]:
    """Takes the kernels of a platform for what is traced inside, to be run step by step."""
    own = [FORMULATIONS[f"{kind}_{platform}"] for kind in KINDS]
    forms = [
        dataclasses.replace(form, name=f"{form.name}_step_by_step", platforms=PLATFORMS)
        for form in own
    ]
    with contextlib.ExitStack() as stack:
        for module, names in RUN_BY.items():
            slow = {
                name: functools.partial(getattr(module, name), interpret=True) for name in names
            }
            stack.enter_context(mock.patch.multiple(module, **slow))
        stack.enter_context(using(*forms))
        yield
