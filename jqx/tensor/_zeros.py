"""QTensors of zeros, such as an empty cache."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._checks import as_dtype, check_instance, check_real
from ..calibrators import Affine
from ..numerics import Block, format_of
from ..numerics._shared import E8M0
from ._fit import groups_of
from ._scheme import needed_spec
from ._spec import QSpec
from ._targets import cache_for


def zeros(
    cls: Any,
    shape: Sequence[int],
    spec: QSpec | str,
    dtype: DTypeLike,
    affine: Affine | None,
    target: str | None,
) -> Any:
    """Returns a QTensor of zeros; see `QTensor.zeros`."""
    name = "QTensor.zeros"
    check_instance(name, "shape", shape, (tuple, list), fix="pass for example (2, 128, 64).")
    if isinstance(spec, str):
        spec = needed_spec(name, "spec", spec, "state").resolve(len(shape), range(len(shape) - 1))
    check_instance(name, "spec", spec, QSpec, fix='pass for example jqx.QSpec("int8"), or "int8".')
    dtype = as_dtype(name, "dtype", dtype)
    check_real(name, "`dtype`", dtype)
    q = _zeros(affine, cls=cls, shape=tuple(map(int, shape)), spec=spec, dtype=dtype)
    return q if target is None else cache_for(name, q, target)


# Jitted, so that no array of floats is created.
@partial(jax.jit, static_argnames=("cls", "shape", "spec", "dtype"))
def _zeros(
    affine: Affine | None, *, cls: Any, shape: tuple[int, ...], spec: QSpec, dtype: jnp.dtype
) -> Any:
    form, entries = format_of(spec.qtype), groups_of("QTensor.zeros", spec, shape).scale_shape
    if affine is None and isinstance(form, Block) and form.two_level:
        codes = jnp.ones(entries, form.scale_qtype)
        inner = jnp.ones(spec.of_second_scale(len(shape)).scale_shape(entries), jnp.float32)
        scale = cls(codes, inner, qtype=form.scale_qtype)
        affine = Affine(scale)
    elif affine is None:
        scale = jnp.ones(entries, E8M0 if isinstance(form, Block) else jnp.float32)
        affine = Affine(scale, None if spec.symmetric else jnp.zeros(entries, form.storage))
    return cls.quantize(jnp.zeros(shape, dtype), spec, affine)
