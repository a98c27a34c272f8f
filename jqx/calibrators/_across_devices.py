"""Scales that the devices of a `shard_map` find together, of an array that each has a part of."""

import dataclasses
from typing import Any

import jax
from jax import lax

from .. import _compat
from .._checks import check_instance, require_that
from ._absmax import absmax
from ._around import Around
from ._calibrator import Affinity, Calibrator


@dataclasses.dataclass(frozen=True)
class AcrossDevices(Around):
    """Finds the scales of another calibrator of what all devices along an axis of a mesh observe.

    For dynamic activations inside of a `jax.shard_map`, where each device has a part of the axis
    that is summed over: with scales of their own the codes of the devices would differ from those
    of the whole array. Statistics are sent, an entry for each scale; the array is not. Outside of a
    `shard_map` an array is whole, however it is partitioned, and nothing is sent. The scale is that
    of the statistics, as of batches: `mse` and `percentile` decide by their histograms.

    Attributes:
      axis_name: of the mesh, or a tuple of names.
      calibrator: the one that finds the scales.

    Raises:
      TypeError: a field is not of its kind.
      ValueError: when it is used, in a `shard_map` over a mesh that has no such axis.

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
        mend = "pass one of jqx.calibrators, such as absmax."
        check_instance(name, "calibrator", self.calibrator, Calibrator, mend=mend)
        require_that(
            bool(self._names) and all(isinstance(x, str) for x in self._names),
            error=TypeError,
            function=name,
            problem="`axis_name` names no axis of a mesh.",
            given=f"axis_name == {self.axis_name!r}",
            expected="a string, or a tuple of strings",
            mend='pass for example "model".',
        )

    def __str__(self) -> str:
        return f"{self.calibrator} across {' and '.join(self._names)}"

    @property
    def _names(self) -> tuple[Any, ...]:
        return self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)

    def observe(self, x: jax.Array, spec: Affinity) -> Any:
        """Returns the statistics of the parts of an array that all devices have."""
        own = self.calibrator.observe(x, spec)
        around = jax.sharding.get_abstract_mesh()
        manual = _compat.manual_axes()
        require_that(
            not manual or {*self._names} <= {*around.axis_names},
            error=ValueError,
            function="calibrators.AcrossDevices",
            problem="the mesh of the shard_map around has no such axis.",
            given=f"axis_name == {self.axis_name!r}",
            expected=f"one of {', '.join(map(repr, around.axis_names))}",
            mend="name the axis that the array is partitioned along.",
        )
        names = tuple(name for name in self._names if name in manual)
        if not names:
            return own
        own = _compat.vary(own, frozenset(names))
        every = lax.all_gather(own, names)
        first = jax.tree.map(lambda leaf: leaf[0], every)
        rest = jax.tree.map(lambda leaf: leaf[1:], every)
        return lax.scan(lambda a, b: (self.merge(a, b), None), first, rest)[0]
