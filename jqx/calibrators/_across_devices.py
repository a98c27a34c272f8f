"""Scales that the devices of a `shard_map` find together, for an array that is split over them."""

import dataclasses
from typing import Any

import jax
from jax import lax

from .. import _compat
from .._checks import check_instance
from .._errors import fail
from ._absmax import absmax
from ._around import Around
from ._calibrator import Affinity, Calibrator


@dataclasses.dataclass(frozen=True)
class AcrossDevices(Around):
    """Applies another calibrator to what all devices along a mesh axis observe.

    For dynamic activations inside a `jax.shard_map`, where each device holds a part of the axis
    that is summed over. If each device used its own scale, the codes would differ from those of
    the whole array. The devices exchange statistics, one entry for each scale, not the array.
    Outside a `shard_map` an array is whole, however it is partitioned, and nothing is exchanged.
    The scale is computed from the merged statistics, as it is from several batches. So `mse` and
    `percentile` decide from their histograms.

    Attributes:
      axis_name: name of a mesh axis, or a tuple of names.
      calibrator: the calibrator that finds the scales.

    Raises:
      TypeError: if a field has the wrong type.
      ValueError: on use, if the mesh of the enclosing `shard_map` has no such axis.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> together = jqx.calibrators.AcrossDevices("model")
      >>> spec = jqx.QSpec("int8", jqx.per_axis(0), dynamic=True, calibrator=together)
      >>> scale = lambda x: jqx.QTensor.quantize(x, spec).scale
      >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> columns = P(None, "model")
      >>> run = jax.shard_map(scale, mesh=mesh, in_specs=columns, out_specs=columns)
      >>> run(jnp.array([[1.0, -127.0]]))
      Array([[1.]], dtype=float32)
    """

    axis_name: str | tuple[str, ...]
    calibrator: Calibrator = absmax

    def __post_init__(self) -> None:
        name = "calibrators.AcrossDevices"
        fix = "pass one of jqx.calibrators, such as absmax."
        check_instance(name, "calibrator", self.calibrator, Calibrator, fix=fix)
        if not (bool(self._names) and all(isinstance(x, str) for x in self._names)):
            raise fail(
                name,
                "`axis_name` names no mesh axis.",
                given=f"axis_name == {self.axis_name!r}",
                expected="a string, or a tuple of strings",
                fix='pass for example "model".',
                error=TypeError,
            )

    def __str__(self) -> str:
        return f"{self.calibrator} across {' and '.join(self._names)}"

    @property
    def _names(self) -> tuple[Any, ...]:
        return self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)

    def observe(self, x: jax.Array, spec: Affinity) -> Any:
        """Returns the statistics of the parts of an array on all devices."""
        own = self.calibrator.observe(x, spec)
        around = jax.sharding.get_abstract_mesh()
        manual = _compat.manual_axes()
        if manual and not {*self._names} <= {*around.axis_names}:
            raise fail(
                "calibrators.AcrossDevices",
                "the mesh of the enclosing shard_map has no such axis.",
                given=f"axis_name == {self.axis_name!r}",
                expected=f"one of {', '.join(map(repr, around.axis_names))}",
                fix="name the axis along which the array is partitioned.",
            )
        names = tuple(name for name in self._names if name in manual)
        if not names:
            return own
        own = _compat.vary(own, frozenset(names))
        every = lax.all_gather(own, names)
        first = jax.tree.map(lambda leaf: leaf[0], every)
        rest = jax.tree.map(lambda leaf: leaf[1:], every)
        return lax.scan(lambda a, b: (self.merge(a, b), None), first, rest)[0]
