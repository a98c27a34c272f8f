"""Shardings of parameters over devices: the arrays of a QTensor are sharded in step."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import keystr

from .. import compat
from ..checks import called
from ..errors import fail
from ..signatures import T
from .layout import permuted_axis
from .qtensor import QTensor
from .segments import Segments
from .targets import check_target, lay_out_for

# Partitioning of a QTensor over devices: its scale is partitioned in step with its values.


AnyTensor = TypeVar("AnyTensor", bound=Any)
"""A QTensor; `qtensor.py` is above this file."""


def partition_specs(
    function: str, q: AnyTensor, spec: PartitionSpec, sizes: Mapping[str, int], place: str = ""
) -> AnyTensor:
    """Returns a QTensor with the PartitionSpec of each of its arrays in place of the array.

    Args:
      function: the caller, for messages.
      q: QTensor.
      spec: the partition of its real array: for each axis the names of mesh axes, or `None`.
      sizes: size of each axis of the mesh.
      place: path of the QTensor, for messages.

    Raises:
      ValueError: the codes of one byte, or the elements of one block, would be split.
    """
    check_parts(function, q, spec, sizes, place)
    where = f" of {place!r}" if place else ""
    entries = (*spec, *(None,) * (q.ndim - len(spec)))
    packing = q.layout.packing if q.layout is not None else None
    for axis, entry in enumerate(entries):
        n = _count(entry, sizes)
        if n == 1:
            continue
        size, block = q.shape[axis] // n, q.groups.sizes[axis]
        if packing is not None and packing.axis % q.ndim == axis:
            problem = f"axis {axis}{where} is partitioned, but codes are packed along it."
            fix = "pack it along another axis, or unpack() it first."
            raise fail(function, problem, given=f"{spec} of {q!r}", fix=fix)
        if q.scale.shape[axis] != 1 and size % block != 0:
            problem = f"axis {axis}{where} is partitioned within blocks that share a scale."
            facts = f"{spec} of {q!r}: {size} elements per device, blocks of {block}"
            fix = f"use whole blocks on each device: {_counts(q.shape[axis] // block)} parts."
            raise fail(function, problem, given=facts, fix=fix)

    def of_parameter(parameter: Any) -> Any:
        pairs = zip(entries, parameter.shape, strict=True)
        parameter_spec = PartitionSpec(*(entry if n > 1 else None for entry, n in pairs))
        if not hasattr(parameter, "qtype"):
            return parameter_spec
        return partition_specs(function, parameter, parameter_spec, sizes, place)

    swapped = q.layout is not None and q.layout.swapped
    stored = PartitionSpec(*entries[:-2], *reversed(entries[-2:])) if swapped else spec
    axis = None if q.order is None else permuted_axis(q.order)
    if axis is not None and _count(entries[axis], sizes) != 1:
        problem = f"axis {axis}{where} is partitioned, but it is permuted."
        raise fail(function, problem, given=f"{spec} of {q!r}", fix="partition another axis.")
    leaves = (q.scale, q.zero_point, q.offset, q.order)
    parameters = [of_parameter(leaf) for leaf in leaves if leaf is not None]
    return jax.tree.unflatten(jax.tree.structure(q), jax.tree.leaves([stored, *parameters]))


def check_parts(
    function: str, x: Any, spec: PartitionSpec, sizes: Mapping[str, int], place: str = ""
) -> None:
    """Checks that an array has the axes that are partitioned, and that its parts are equal."""
    where = f" of {place!r}" if place else ""
    if len(spec) > x.ndim:
        problem = f"the partition{where} has more axes than the array: {spec}, {list(x.shape)}."
        fix = f"pass {x.ndim} entries or fewer, None where an axis is not partitioned."
        raise fail(function, problem, fix=fix)
    for axis, (entry, size) in enumerate(zip(spec, x.shape, strict=False)):
        n = _count(entry, sizes)
        if size % n != 0:
            problem = f"axis {axis}{where} does not divide into parts."
            facts = f"{spec} of shape {list(x.shape)}: {n} parts"
            fix = f"use {_counts(size)} parts, or partition another axis."
            raise fail(function, problem, given=facts, fix=fix)


def _counts(size: int) -> str:
    """Returns the numbers of parts into which an axis divides, as text."""
    divisors = [str(n) for n in range(2, min(size, 512) + 1) if size % n == 0]
    return ", ".join(divisors[:8]) + (", ..." if len(divisors) > 8 else "") if divisors else "no"


def _count(entry: Any, sizes: Mapping[str, int]) -> int:
    """Returns over how many devices an axis is partitioned."""
    return math.prod(sizes.get(name, 1) for name in names_of(entry))


def names_of(entry: Any) -> tuple[Any, ...]:
    """Returns the names of the mesh axes in an entry of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def shardings_of(
    function: str,
    leaf: Any,
    sharding: Sharding | PartitionSpec,
    sizes: Mapping[str, int] | None = None,
    place: str = "",
) -> Any:
    """Returns a leaf with the sharding of each of its arrays in place of the array.

    Args:
      function: the caller, for messages.
      leaf: an array, a QTensor or Segments; its arrays may be `jax.ShapeDtypeStruct`.
      sharding: the sharding of its real array. The result has values of the same type. A sharding
        without axis names applies to all arrays.
      sizes: size of each axis of the mesh; not needed for a `NamedSharding`.
      place: path of the leaf, for messages.

    Raises:
      ValueError: a part is not a whole number of blocks or elements; or an axis along which codes
        are packed or permuted is partitioned.
    """
    if isinstance(leaf, Segments):
        parts = [shardings_of(function, part, sharding, sizes, place) for part in leaf.parts]
        return jax.tree.unflatten(jax.tree.structure(leaf), jax.tree.leaves(parts))
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        specs = shardings_of(function, leaf, sharding.spec, dict(mesh.shape), place)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    if not isinstance(sharding, PartitionSpec):
        return jax.tree.map(lambda _: sharding, leaf)
    if isinstance(leaf, QTensor):
        return partition_specs(function, leaf, sharding, sizes or {}, place)
    check_parts(function, leaf, sharding, sizes or {}, place)
    return sharding


def put(function: str, leaf: Any, sharding: Sharding, place: str = "") -> Any:
    """Puts a leaf where its real array should be; arrays that are already there are not copied."""
    shardings = shardings_of(function, leaf, sharding, place=place)
    arrays = jax.tree.leaves(leaf)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), leaf, shardings
        )
    if all(map(compat.is_concrete, arrays)):
        return jax.tree.map(_placed, leaf, shardings)
    explicit = isinstance(sharding, NamedSharding) and sharding.mesh.are_all_axes_explicit
    move = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    return move(leaf, shardings)


def _placed(x: Any, sharding: Sharding) -> jax.Array:
    """Puts an array on devices, also on those of other processes. Each process must have the whole
    array, or its part already in place.
    """
    current = x.sharding if isinstance(x, jax.Array) else None
    if sharding.is_fully_addressable or (current and not current.is_fully_addressable):
        return jax.device_put(x, sharding)
    values = np.asarray(x)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def sharding_of(x: Any) -> NamedSharding | None:
    """Returns how the real array of a leaf is partitioned over devices; `None` if it is not, or if
    it is a tracer whose type does not include a sharding.
    """
    if isinstance(x, Segments):
        inner = sharding_of(x.parts[0])
        if inner is None or len(inner.spec) <= x.axis:
            return inner
        entries = [None if n == x.axis else entry for n, entry in enumerate(inner.spec)]
        return NamedSharding(inner.mesh, PartitionSpec(*entries))
    if isinstance(x, QTensor):
        inner = sharding_of(x.values)
        if inner is None or x.layout is None or not x.layout.swapped:
            return inner
        entries = (*inner.spec, *(None,) * (x.values.ndim - len(inner.spec)))
        return NamedSharding(inner.mesh, PartitionSpec(*entries[:-2], *reversed(entries[-2:])))
    if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return None
    sharding = x.sharding if compat.is_concrete(x) else compat.explicit_sharding(x)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def kept(function: str, old: Any, new: Any, place: str = "") -> Any:
    """Returns `new`, which was computed from `old`, with the sharding of `old`."""
    sharding = sharding_of(old)
    return new if sharding is None else put(function, new, sharding, place)


# `pack_for`: lays out the weights of a tree once for the target that contracts them.


@called("pack_for", 'pass a target: jqx.pack_for(params, "cpu").')
def pack_for(tree: T, target: str, *, contracted: int | None = None) -> T:
    """Gives every QTensor of a tree the memory layout that a target contracts fastest.

    Call it once, after loading: files keep the default layout. The real arrays, shape, scale and
    zero point do not change; `unpack` restores the default layout, bit for bit.

    ==============  =============================  ==============================================
    target          scales per channel, or one     scales in blocks along the contracted axis
    ==============  =============================  ==============================================
    "cpu"           [N, K], contracted axis last   [K, N], contracted axis before the other
    "gpu", by name  [N, K]                         [K, N], for a kernel
    "tpu", by name  [K, N], for a kernel           [K, N], for a kernel
    ==============  =============================  ==============================================

    On CPU, integers of 8 bits or fewer are stored as int8 (`jnp.uint8` minus 128), and `jnp.int4`
    in one byte per code; elsewhere codes keep their dtype. Packed codes are unpacked. If the
    package jqx-cpu is installed and used (see its README for processors), weights with one scale or
    with blocks are stored as [N, K]: integers of 8, 4 and 2 bits, codes of 4-bit floats, and 8-bit
    floats; codes of fewer than 8 bits are packed along K. The kernels of jqx-cpu are not used for
    arrays on several devices, for programs that a compiler partitions over devices, or in exported
    functions outside of `jqx.kernels_in_exports`.

    Pallas kernels read the codes without widening them in memory. They support integers of 8 bits
    or fewer, float8_e4m3fn and float8_e5m2, in blocks that divide the axis. They also support codes
    of 4 bits or fewer that are looked up (float4 and codebooks), with any scale, which are stored
    as uint4 (on TPU7x, float4 keeps its dtype). On a GPU there is no kernel for 2-bit codes, nor
    for 4-bit codes if an axis is not a multiple of 16; on a TPU there is none for 2-bit codes if N
    is not a multiple of 128. With float activations, each weight is scaled and then rounded to
    their dtype; an activation that `convert` quantizes is quantized in the kernel. If no kernel
    supports a weight, or on a platform other than the target, the contraction runs without a
    kernel; `jqx.explain` shows which one is used. It is an error to `jax.export` a function that
    would run a Pallas kernel, or to run it in a program that a compiler partitions over devices.

    Args:
      tree: any pytree with QTensors of any shape and dtype, or a QTensor; other leaves do not
        change. The arrays may be `jax.ShapeDtypeStruct`. The last two axes of a QTensor are its
        matrix. A QTensor of fewer axes is returned as it is, and so is one that already has the
        layout of the target. If each index of both axes has its own scale, neither can be
        contracted, and they keep their order.
      target: `"cpu"`, `"gpu"` or `"tpu"`, as `jax.default_backend()` names it, or a machine as in
        `jqx.lowering`: `"h200"`, `"b200"`, `"tpu-v5e"`, `"tpu-v6e"`, `"tpu7x"`.
      contracted: the axis to be contracted, -2 or -1, for QTensors whose scales do not determine
        it; `None` means -2, as in `x @ w`. The scales determine it if one of the two axes has a
        scale for each index (the other one is contracted), or else if only one of them has blocks
        (this one is contracted).

    Returns:
      The same tree, with QTensors of the same shapes, dtypes and formats.

    Raises:
      ValueError: the tree holds no QTensor; the target is unknown; `contracted` is neither of the
        last two axes, or contradicts a scale.

    Gradient: JAX differentiates it with respect to scales; codes have no gradient.
    NaN and infinities: kept; nothing is computed.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> w = jqx.QTensor.quantize(jnp.ones((4, 3)), jqx.QSpec(jnp.int8, jqx.per_axis(1)))
      >>> packed = jqx.pack_for({"w": w, "b": jnp.zeros(3)}, "cpu")["w"]
      >>> packed.shape, packed.values.shape, packed.layout.swapped
      ((4, 3), (3, 4), True)
    """
    check_target("pack_for", target, contracted)
    flat, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, QTensor)
    )
    if not any(isinstance(leaf, QTensor) for _, leaf in flat):
        problem = f"the tree of {len(flat)} leaves has no QTensor to lay out."
        raise fail("pack_for", problem, fix="pass what jqx.quantize_params returns.")
    leaves = []
    for path, leaf in flat:
        if isinstance(leaf, QTensor):
            name = keystr(path, simple=True, separator="/")
            where = f" at {name!r}" if path else ""
            laid_out = lay_out_for("pack_for", leaf, target, contracted, where)
            leaf = kept("pack_for", leaf, laid_out, name)
        leaves.append(leaf)
    return jax.tree.unflatten(structure, leaves)
