"""Scales rounded to 16 bits, as files of other libraries store them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._checks import as_dtype, check_instance
from .._errors import fail
from ..numerics import Block, format_of
from ._absmax import absmax
from ._around import Around
from ._calibrator import Affine, Affinity, Calibrator

_KINDS = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))


@dataclasses.dataclass(frozen=True)
class Rounded(Around):
    """Rounds the scales of another calibrator to 16 bits, before codes are chosen.

    GPTQ, AWQ and GGUF files store scales in float16. A scale above 0 stays above 0 and finite: it
    is clamped to the smallest and the largest number of the dtype. Scales are still float32 arrays,
    with values that the dtype can hold: `q.scale.astype(dtype)` loses nothing.

    Attributes:
      calibrator: the calibrator that finds the scales.
      dtype: float16 or bfloat16.

    Raises:
      TypeError: if a field has the wrong type.
      ValueError: if `dtype` is another one; on use, if the format has its own format of scales.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> spec = jqx.QSpec("int4", jqx.per_axis(0), calibrator=jqx.calibrators.Rounded())
      >>> jqx.QTensor.quantize(jnp.array([[1.0, 3.0]]), spec).scale
      Array([[0.4284668]], dtype=float32)
    """

    calibrator: Calibrator = absmax
    dtype: DTypeLike = jnp.float16

    def __post_init__(self) -> None:
        fix = "pass one of jqx.calibrators, such as absmax."
        name = "calibrators.Rounded"
        check_instance(name, "calibrator", self.calibrator, Calibrator, fix=fix)
        object.__setattr__(self, "dtype", as_dtype(name, "dtype", self.dtype))
        if self.dtype not in _KINDS:
            raise fail(
                name,
                "`dtype` is not a 16-bit float.",
                given=f"dtype == {self.dtype}",
                expected="float16 or bfloat16",
                fix="pass jnp.float16, which GPTQ, AWQ and GGUF use.",
            )

    def __str__(self) -> str:
        return f"{self.calibrator} in {jnp.dtype(self.dtype).name}"

    def affine(self, stats: Any, spec: Affinity) -> Affine:
        """Returns the rounded scale."""
        return self._rounded(self.calibrator.affine(stats, spec), spec)

    def fit(self, x: jax.Array, spec: Affinity) -> Affine:
        """Returns the rounded scale for one array."""
        return self._rounded(self.calibrator.fit(x, spec), spec)

    def _rounded(self, found: Affine, spec: Affinity) -> Affine:
        form = format_of(spec.qtype)
        if isinstance(form, Block):
            raise fail(
                "calibrators.Rounded",
                "the format has its own format of scales.",
                given=f"qtype {form.name}",
                expected="integers, floats or codebooks",
                fix="use the inner calibrator itself.",
            )
        return found._replace(scale=_nearest(found.scale, jnp.dtype(self.dtype)))


def _nearest(scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the nearest numbers of a dtype, in float32; see `Rounded`.

    XLA may keep excess precision and so remove a conversion to the dtype and back.
    """
    kind = jnp.finfo(dtype)
    size = jnp.abs(scale)
    least = float(kind.smallest_subnormal)
    near = lax.reduce_precision(size, kind.nexp, kind.nmant)
    if dtype == jnp.float16:  # bfloat16 has the subnormal numbers of float32
        near = jnp.where(size < float(kind.tiny), jnp.round(size / least) * least, near)
    near = jnp.where(jnp.isfinite(size), jnp.minimum(near, float(kind.max)), size)
    near = jnp.where(size > 0, jnp.maximum(near, least), near)
    return jnp.copysign(near, scale).astype(scale.dtype)
