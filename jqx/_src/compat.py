"""With `compat_kernels`, the only file that touches `jax.extend` and JAX names that change between
versions.

jax 0.11 merged ClosedJaxpr into Jaxpr and made `get_bind_params` return a dict alone; nothing here
dispatches on the class. Supported: jax 0.10.2 to 0.12.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.api_util import shaped_abstractify
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.interpreters import ad, partial_eval
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

Eqn = Any
"""One equation of a jaxpr: `primitive`, `params`, `invars`, `outvars`."""


def trace(f: Callable[..., Any], *args: Any) -> tuple[Any, list[Any]]:
    """Traces `f`, flat in and flat out, and returns `(jaxpr, consts)`.

    The result is the same under `jax.disable_jit`, where JAX would unroll loops and inline jitted
    functions.
    """
    with jax.disable_jit(False):
        return open_jaxpr(jax.make_jaxpr(f)(*args))


def type_of(x: Any) -> Any:
    """Returns the type at which a leaf is traced: the part of an array, or of its stand-in, on
    which a jaxpr depends.
    """
    return shaped_abstractify(x)


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns `(jaxpr, consts)` of a jaxpr, closed or open."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


_NEW_KIND = "call_hi_primitive"


def sub_jaxprs(eqn: Eqn) -> list[Any]:
    """Returns the jaxprs among the parameters of an equation, opened."""
    bodies = []
    for item in _parameters(eqn):
        inner = getattr(item, "jaxpr", item)
        if hasattr(inner, "eqns"):
            bodies.append(inner)
    return bodies


def with_bodies(eqn: Eqn, change: Callable[[Any], Any]) -> Eqn:
    """Returns an equation with `change(body)` in place of each open jaxpr among its parameters; the
    same object if nothing changes.
    """

    def changed(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            items = [changed(item) for item in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else type(value)(items)
        body, _ = open_jaxpr(value)
        if not hasattr(body, "eqns"):
            return value
        new = change(body)
        return value if new is body else with_body(value, new)

    if not sub_jaxprs(eqn):
        return eqn
    params = {name: changed(value) for name, value in eqn.params.items()}
    is_new = any(params[name] is not eqn.params[name] for name in params)
    return eqn.replace(params=params) if is_new else eqn


def arrays_inside(jaxpr: Any) -> Iterator[Any]:
    """Yields the arrays that the equations of a jaxpr hold, as constants of functions or as
    parameters. The text of a jaxpr shows only their shapes.
    """
    for eqn in jaxpr.eqns:
        for item in _parameters(eqn):
            inner, consts = open_jaxpr(item)
            if hasattr(inner, "eqns"):
                yield from consts
                yield from arrays_inside(inner)
            elif isinstance(item, (np.ndarray, jax.Array)):
                yield item


def _parameters(eqn: Eqn) -> list[Any]:
    """Returns the parameters of an equation, and what is in their containers. An operation of the
    new kind (jax 0.12) is one parameter, which holds its own parameters as attributes.
    """
    is_new_kind = eqn.primitive.name == _NEW_KIND
    named = vars(eqn.params["_prim"]) if is_new_kind else eqn.params
    pending, parameters = [*named.values()][::-1], []
    while pending:
        item = pending.pop()
        if isinstance(item, (tuple, list, dict)):
            pending += [*(item.values() if isinstance(item, dict) else item)][::-1]
        else:
            parameters.append(item)
    return parameters


def without_dead(jaxpr: Any) -> Any:
    """Returns an open jaxpr without equations that its effects and results do not need. All of its
    operands stay.
    """
    return partial_eval.dce_jaxpr(jaxpr, True, True)[0]


def needed(jaxpr: Any, used: Sequence[bool] | bool = True) -> list[bool]:
    """Returns which operands of an open jaxpr are needed by its effects and by those of its results
    that are used.
    """
    return list(partial_eval.dce_jaxpr(jaxpr, used)[1])


def with_body(closed: Any, body: Any) -> Any:
    """Returns a jaxpr, closed or open, with another body with the same operands and results."""
    return closed.replace(jaxpr=body) if closed is not open_jaxpr(closed)[0] else body


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a literal constant."""
    return isinstance(atom, jex_core.Literal)


def is_concrete(x: Any) -> bool:
    """Whether an array has a value that Python can read."""
    return not isinstance(x, Tracer)


@contextmanager
def intermediates() -> Iterator[None]:
    """Disables `jax_debug_nans` and `jax_debug_infs` inside the context, for statistics and scales,
    where NaN and infinities mean that there is no value.
    """
    with ExitStack() as stack:
        for name, flag in (("jax_debug_nans", jax.debug_nans), ("jax_debug_infs", jax.debug_infs)):
            if getattr(jax.config, name):
                stack.enter_context(flag(False))
        yield


def equation_context(eqn: Eqn) -> ExitStack:
    """Returns the context an equation was traced in: its name scopes and configuration."""
    stack = ExitStack()
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    stack.enter_context(source_info_util.user_context(eqn.source_info.traceback, name_stack=names))
    stack.enter_context(eqn.ctx.manager)
    return stack


def with_result(eqn: Eqn, dtype: DTypeLike) -> Eqn:
    """Returns a contraction whose result has another dtype."""
    if "preferred_element_type" not in eqn.params:
        return eqn
    return eqn.replace(params={**eqn.params, "preferred_element_type": jnp.dtype(dtype)})


def bind(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluates an equation unchanged, whatever its primitive, and returns its results."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def is_key(atom: Any) -> bool:
    """Whether a variable holds keys of random numbers."""
    return jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key)


def data_of_key(aval: Any) -> Any:
    """Returns the shape and dtype of an array, or those of the data of keys."""
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return aval
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def generator_of(eqn: Eqn) -> Any:
    """Returns the functions of the random numbers that an equation draws."""
    return eqn.params.get("impl") or eqn.invars[0].aval.dtype._impl


def cotangent(x: Any) -> Any:
    """Returns what a function of `jax.vjp` takes for a cotangent from a rule with `symbolic_zeros`:
    an array unchanged, and a zero for a missing cotangent.
    """
    return ad.Zero(x.aval) if isinstance(x, SymbolicZero) else x


def manual_axes() -> frozenset[str]:
    """Returns the mesh axes that the enclosing `shard_map`s have made manual."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def tracks_devices() -> bool:
    """Whether the enclosing `shard_map` knows which arrays differ from device to device."""
    return all(varies_along(jax.lax.axis_index(axis)) for axis in manual_axes())


def vary(x: Any, axes: frozenset[str]) -> Any:
    """Marks the arrays of a pytree as different on the devices along mesh axes."""

    def mark(leaf: Any) -> Any:
        missing = tuple(sorted(axes - varies_along(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, x) if axes else x


def vary_alike(*arrays: Any) -> tuple[Any, ...]:
    """Marks arrays, or pytrees of them, as different along every axis of a `shard_map` along which
    one of them is. A `custom_vjp` does not do so by itself, and its gradients would have another
    type.
    """
    axes = frozenset().union(*map(varies_along, jax.tree.leaves(arrays)))
    return tuple(vary(x, axes) for x in arrays) if axes else arrays


def broadcast_like(x: Any, like: Any) -> Any:
    """Broadcasts an array to the shape of another, with the same partitioning."""
    if explicit_sharding(like) is None:
        return jnp.broadcast_to(x, like.shape)
    return _broadcast_on_its_mesh(x, like)


@partial(jax.jit, keep_unused=True)  # the devices of unused operands count too
def _broadcast_on_its_mesh(x: Any, like: Any) -> Any:
    """Moves a number on one device to the mesh of the other array, because it is jitted."""
    return jnp.broadcast_to(x, like.shape, out_sharding=explicit_sharding(like))


def has_explicit_axes(mesh: Any) -> bool:
    """Whether types specify how arrays are partitioned over some axes of a mesh."""
    return AxisType.Explicit in mesh.axis_types


def is_explicit(eqn: Eqn) -> bool:
    """Whether the type of the result of an equation specifies how it is partitioned."""
    return has_explicit_axes(eqn.outvars[0].aval.sharding.mesh)


def explicit_sharding(x: Any) -> Any:
    """Returns the sharding of an array if it is part of its type, in explicit sharding; otherwise
    `None`.
    """
    sharding = jax.typeof(x).sharding
    return sharding if has_explicit_axes(sharding.mesh) else None


def as_result_of(eqn: Eqn, compute: Callable[..., Any], *operands: Any) -> Any:
    """Returns the result of a computation that replaces an equation. In explicit sharding the
    compiler partitions the computation, and the result is partitioned as its type specifies.
    """
    return _partitioned(
        eqn.outvars[0].aval.sharding if is_explicit(eqn) else None, compute, operands
    )


def as_type_of(x: Any, compute: Callable[..., Any], *operands: Any) -> Any:
    """Returns the result of a computation, partitioned as the type of the array `x` specifies."""
    return _partitioned(explicit_sharding(x), compute, operands)


def whole_of(compute: Callable[..., Any], *operands: Any) -> Any:
    """Returns the result of a computation on trees of arrays; in explicit sharding it is replicated
    on every device.
    """
    known = [explicit_sharding(x) for x in jax.tree.leaves(operands)]
    mesh = next((sharding.mesh for sharding in known if sharding is not None), None)
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return _partitioned(whole, compute, operands)


def _partitioned(sharding: Any, compute: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Computes with a result of this sharding, while the compiler partitions the computation; with
    `None`, as types specify.
    """
    if sharding is None:
        return compute(*operands)
    return jax.sharding.auto_axes(compute, out_sharding=sharding)(*operands)


def is_on_a_mesh(*arrays: Any) -> bool:
    """Whether one of the arrays is on a mesh of several devices over which a compiler may partition
    it, so not manually in a `shard_map`.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return any(
        size > 1 and kind != AxisType.Manual
        for mesh in meshes
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def varies_along(x: Any) -> frozenset[str]:
    """Returns the mesh axes along which an array is marked to differ from device to device."""
    return jax.typeof(x).mat.varying


def shape_that_varies(shape: jax.ShapeDtypeStruct, axes: frozenset[str]) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array that differs on the devices along mesh axes."""
    kind = jax.sharding.ManualAxisType(varying=axes)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, manual_axis_type=kind)


def is_jit(eqn: Eqn) -> bool:
    """Whether an equation is the call of a jitted function."""
    return eqn.primitive.name in ("jit", "pjit") and "jaxpr" in eqn.params


def shardings_of(eqn: Eqn) -> tuple[list[Any], list[Any]]:
    """Returns the shardings that a jit equation fixes for its operands and its results; `None`
    where one is unspecified.
    """

    def known(shardings: Any) -> list[Any]:
        return [None if type(s).__name__ == "UnspecifiedValue" else s for s in shardings]

    return known(eqn.params["in_shardings"]), known(eqn.params["out_shardings"])


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """Returns how many operands of a scan equation are constants, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    parts = eqn.params["ft_in"].update(list(eqn.invars)).unpack()  # jax 0.11
    consts, carried, _ = map(list, parts)
    return len(consts), len(carried)


def shard_map_options(eqn: Eqn) -> dict[str, Any]:
    """Returns the arguments of `jax.shard_map` other than the function and the specs."""
    p = eqn.params
    return {"mesh": p["mesh"], "axis_names": p["newly_manual_axes"], "check_vma": p["check_vma"]}


def scope_of(eqn: Eqn) -> str:
    """Returns the name scopes of an equation, joined by `/`; relative to its own jaxpr."""
    return str(eqn.source_info.name_stack)


def line_of(eqn: Eqn) -> str:
    """Returns the line of the user's code that an equation was traced from."""
    return source_info_util.summarize(eqn.source_info)


def at_line_of(eqn: Eqn) -> str:
    """Returns `", at "` and that line; nothing where JAX has none, as inside of `jnp.sort`."""
    line = line_of(eqn)
    return f", at {line}" if line else ""


def shown_name(eqn: Eqn) -> str:
    """Returns the name of a primitive for users; an operation of the new kind has that of its class
    (jax 0.12).
    """
    is_new_kind = eqn.primitive.name == _NEW_KIND
    return type(eqn.params["_prim"]).__name__ if is_new_kind else eqn.primitive.name


def name_of_jit(eqn: Eqn) -> str:
    """Returns the name of the jitted function that an equation calls; otherwise an empty string."""
    return eqn.params["name"] if is_jit(eqn) else ""


def devices_of_topology(platform: str, name: str, plugin: str = "", **options: str) -> list[Any]:
    """Returns the devices of a machine to compile for, which need not be present.

    `plugin` is the module that provides the platform for JAX. The plugin of CUDA registers only if
    it finds the libraries of CUDA, or is told to (jax 0.10 to 0.12); compiling needs none.

    Raises:
      RuntimeError, NotImplementedError: the compiler of the platform cannot be loaded.
    """
    topologies = importlib.import_module("jax.experimental.topologies")
    try:
        return list(topologies.get_topology_desc(name, platform, **options).devices)
    except NotImplementedError:
        if not plugin:
            raise
    importlib.import_module(plugin).initialize()
    return list(topologies.get_topology_desc(name, platform, **options).devices)


@contextmanager
def names_in_cache_key() -> Iterator[None]:
    """Adds operation names to the key of JAX's persistent compilation cache. Otherwise programs
    that differ only in these names share an entry, and all have the names of the first.
    """
    option = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)
