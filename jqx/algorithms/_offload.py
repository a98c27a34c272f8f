"""Where values of batches are kept between stages: on the devices, on the host, or in files."""

import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import tempfile
import weakref
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import shown
from .._errors import fail
from ..transforms._shared import is_counted

Where = bool | Literal["disk"]

_LEAST = 1 << 16
"""Smaller arrays are kept on the host and not in a file."""


@dataclasses.dataclass(frozen=True, eq=False)
class OnHost:
    """An array that is kept on the host.

    Attributes:
      values: its values.
      sharding: their sharding on the devices; `None` leaves it to JAX.
    """

    values: np.ndarray
    sharding: Any


class OnDisk:
    """An array that is kept in a file, which is deleted together with this object.

    Args:
      path: path of the file.
      values: the array to write.
      sharding: its sharding on the devices; `None` leaves it to JAX.
    """

    def __init__(self, path: str, values: np.ndarray, sharding: Any):
        self._path, self._kind, self.sharding = path, (values.dtype, values.shape), sharding
        np.ascontiguousarray(values).tofile(path)
        weakref.finalize(self, _remove, path)

    @property
    def values(self) -> np.ndarray:
        """Its values, read from the file at each access."""
        dtype, shape = self._kind
        return np.fromfile(self._path, np.uint8).view(dtype).reshape(shape)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.remove(path)


def check_offload(function: str, where: Any) -> None:
    """Raises if `offload` has no such value."""
    if not isinstance(where, bool) and where != "disk":
        raise fail(
            function,
            "`offload` is unknown.",
            given=f"offload == {shown(where)}",
            expected="False, True or 'disk'",
            fix="pass False to keep values on the devices, True for the host, 'disk' for files.",
        )


class Offload:
    """Keeps values of batches.

    Args:
      where: on the host, or in files of a temporary folder, which is deleted with this object.
    """

    def __init__(self, where: Where):
        self._where, self._numbers = where, itertools.count()

    @functools.cached_property
    def _folder(self) -> str:
        return temporary_folder(self)

    def kept(self, x: Any) -> Any:
        """Returns a value as it is kept. Random keys stay on the devices."""
        if is_counted(x):
            return jax.tree.map(self.kept, x)
        is_array = isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        if not self._where or not is_array:
            return x
        sharding = x.sharding if x.committed else None
        if self._where == "disk" and x.nbytes >= _LEAST:
            path = os.path.join(self._folder, f"{next(self._numbers):08}")
            return OnDisk(path, np.asarray(x), sharding)
        return OnHost(np.asarray(x), sharding)


def on_device(x: Any) -> Any:
    """Returns a kept value, on the device."""
    if is_counted(x):
        return jax.tree.map(on_device, x)
    return jax.device_put(x.values, x.sharding) if isinstance(x, (OnHost, OnDisk)) else x


def temporary_folder(owner: Any) -> str:
    """Makes a folder that is deleted together with an object, or at exit."""
    path = tempfile.mkdtemp(prefix="jqx-")
    # A `TemporaryDirectory` would warn when it is collected.
    weakref.finalize(owner, shutil.rmtree, path, ignore_errors=True)
    return path
