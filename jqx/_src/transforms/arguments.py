"""Checks of the arguments `f`, `plan`, `stats` and `batches`, of the operations of `f`, and of
whether a plan fits it. Errors name the object if it is another value of jqx, or was passed as the
wrong argument.
"""

import base64
import contextlib
import dataclasses
import inspect
import itertools
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..checks import check_instance
from ..compat import is_concrete
from ..errors import fail, message, warn
from ..policy import Policy, preset_of
from ..statistics.calibrators import Affine
from ..tensor.spec import QSpec
from .find import Found, contractions
from .paths import AGAIN, addresses_of, check_ranks, check_same, without_addresses
from .plan import Plan
from .rules import CONTRACTIONS
from .views import Address, Origin

_MAKE = "plan = jqx.make_plan(f, policy)(params, x)"


def check_function(function: str, f: Any) -> None:
    """Checks that `f` can be traced."""
    linen = sys.modules.get("flax.linen")
    is_unbound = linen is not None and isinstance(f, linen.Module) and f.scope is None
    if callable(f) and not is_unbound:  # calling an unbound module is an error in Flax
        return
    details = "an array" if hasattr(f, "shape") else f"an object of type {type(f).__name__}"
    fix = f"call it in two steps: jqx.{function}(f, ...)(params, x)."
    if isinstance(f, (Plan, Policy)):
        fix = f"pass the function first: jqx.{function}(f, ...)(params, x)."
    elif hasattr(f, "shape"):
        fix = f"pass the function itself, not its result: jqx.{function}(f, ...)(params, x)."
    elif callable(f):
        details += ", a linen module without variables"
        fix = "pass module.apply, whose parameters are the variables, or use jqx.linen."
    raise fail(function, "`f` is not a function.", given=details, fix=fix, error=TypeError)


def check_plan(function: str, plan: Any, *others: Any, order: str, policies: bool = False) -> None:
    """Checks that `plan` is a `Plan`, or a `Policy` where policies are allowed.

    Args:
      function: name of the calling function, for messages.
      plan: what was passed as the plan.
      *others: the other arguments, one of which may be the plan.
      order: how the function is called: `quantize_params(params, plan)`.
      policies: whether a `Policy` is allowed.
    """
    kinds = (Plan, Policy) if policies else Plan
    if isinstance(plan, kinds):
        return
    name, fix = preset_of(plan), "make one with jqx.make_plan(f, policy)(*args)."
    if any(isinstance(argument, Plan) for argument in others):
        fix = f"the arguments are in another order: call jqx.{order}."
    elif isinstance(plan, Policy):
        fix = f"a policy is not a plan: make the plan first, {_MAKE}."
    elif name is not None:
        fix = f"call the preset, jqx.presets.{name}(), and plan with it: {_MAKE}."
    elif hasattr(plan, "shape") and hasattr(plan, "dtype"):
        fix = f"call it in two steps, jqx.{function}(f, plan)(params, x)."
    elif isinstance(plan, Mapping) and any(isinstance(x, (str, QSpec)) for x in plan.values()):
        fix = "make a policy of the dict: jqx.Policy({...})."
        fix += "" if policies else f" Then make the plan, {_MAKE}."
    elif callable(plan):
        fix = f"call the function that jqx.make_plan returns: {_MAKE}."
    check_instance(function, "plan", plan, kinds, fix=fix)


def check_stats(function: str, argument: str, stats: Any) -> None:
    """Checks that statistics are a dict of statistics, not of scales."""
    entry = next(iter(stats.values()), None) if isinstance(stats, Mapping) else None
    if isinstance(stats, Mapping) and not isinstance(entry, Affine):
        return
    details = f"an object of type {type(stats).__name__}"
    fix = "pass statistics from jqx.calibrate with the same plan."
    if isinstance(entry, Affine):
        details, fix = "a dict of scales, from jqx.affines", "pass what jqx.calibrate returned."
    elif isinstance(stats, tuple) and len(stats) == 2 and isinstance(stats[1], Mapping):
        fix = "take the second: out, stats = jqx.calibrate(f, plan)(params, x)."
    elif isinstance(stats, (list, tuple)):
        fix = "merge them first: jqx.merge_stats(plan, a, b), or jqx.calibrate_batches."
    elif callable(stats):
        fix = "call it: out, stats = jqx.calibrate(f, plan)(params, x)."
    problem = f"`{argument}` is not a dict of statistics."
    raise fail(function, problem, given=details, fix=fix, error=TypeError)


def check_batches(function: str, batches: Any) -> None:
    """Checks that batches are an iterable of batches."""
    shape = getattr(batches, "shape", None) if hasattr(batches, "dtype") else None
    is_one = isinstance(batches, (Mapping, str, bytes)) or hasattr(batches, "_fields")
    if isinstance(batches, Iterable) and shape is None and not is_one:
        return
    details, fix = f"an object of type {type(batches).__name__}", "pass a list, or a generator."
    if shape is not None:
        details = f"an array of shape {list(shape)}, which iterates over its first axis"
        fix = "pass a list of batches: [x]."
    elif isinstance(batches, Mapping) or hasattr(batches, "_fields"):
        fix = "pass a list of batches: [batch]."
    elif isinstance(batches, (Plan, Policy)):
        fix = "call jqx.calibrate_batches(f, plan, params, batches)."
    problem = "`batches` is not a list of batches."
    raise fail(function, problem, given=details, fix=fix, error=TypeError)


def check_batch(function: str, batch: Any, index: int) -> None:
    """Checks that the leaves of a batch are arrays or numbers."""
    kinds = (np.ndarray, np.generic, jax.Array, bool, int, float, complex)
    bad = [
        leaf
        for leaf in jax.tree.leaves(batch)
        if not (isinstance(leaf, kinds) or hasattr(leaf, "__jax_array__"))
        or (isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "OUSM")
    ]
    if bad:
        problem = f"batch {index} holds an object of type {type(bad[0]).__name__}, not an array."
        fix = "convert it with jnp.asarray; bind the others: functools.partial(f, train=False)."
        raise fail(function, problem, fix=fix, error=TypeError)


def check_concrete(function: str, *trees: Any) -> None:
    """Checks that arrays have values: the function runs on the host, outside of `jit`."""
    if any(isinstance(x, jax.Array) and not is_concrete(x) for x in jax.tree.leaves(trees)):
        fix = f"call jqx.{function} outside of jit, and then use "
        fix += "jax.jit(quantized.function)(quantized.params, x)."
        problem = "it runs on the host, and cannot be traced."
        raise fail(function, problem, fix=fix, error=TypeError)


def number_of(function: str, argument: str, f: Callable[..., Any], *values: Any) -> jax.Array:
    """Returns the result of a user's metric or loss, after checking that it is one real number."""
    fix = "return one number, such as jnp.mean(...) of the array."
    try:
        number = jnp.asarray(f(*values))
        description = f"{number.dtype.name}{list(number.shape)}"
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        number, description = None, f"a function that reads values: {type(error).__name__}"
        fix = "write it with jax.numpy: it is traced."
    except TypeError as error:
        number, description = None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
        fix = f"{fix} Its arguments are two results of f."
    if number is None or number.shape or jnp.issubdtype(number.dtype, jnp.complexfloating):
        problem = f"`{argument}` does not return one number."
        raise fail(function, problem, given=description, fix=fix, error=TypeError)
    return number


# Errors that a function raises while it is traced are attributed to it, with its arguments.


_KEPT = (NotImplementedError, jax.errors.InconclusiveDimensionOperation)
"""The exceptions that JAX raises for what it cannot do, such as with sizes that are open."""

_OWN = (TypeError, ValueError, LookupError, AttributeError, *_KEPT)
"""The exceptions that a function raises for arguments that do not fit."""

_TRACED = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
"""The exceptions that JAX raises if a function needs the value of a traced array."""


@contextlib.contextmanager
def evaluating(
    function: str, f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Raises an error in four parts if `f` fails on its arguments. Errors of jqx pass unchanged,
    and errors of JAX keep their class.
    """
    try:
        yield
    except _OWN as error:
        if str(error).startswith("jqx."):
            raise
        text = _text(function, f, args, kwargs, error)
        if isinstance(error, _TRACED):
            same = type(error).__new__(type(error))  # its constructor would require the tracer
            same.args = (text,)
            raise same from error
        if isinstance(error, _KEPT):
            raise type(error)(text) from error
        raise (TypeError if isinstance(error, TypeError) else ValueError)(text) from error


def _text(
    function: str,
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    error: Exception,
) -> str:
    arguments = ", ".join([*map(kind_of, args), *(f"{k}={kind_of(x)}" for k, x in kwargs.items())])
    misfit = _misfit(f, args, kwargs)
    if misfit is not None:
        problem, expected = misfit
        fix = "pass the arguments of f in its order."
        if "too many positional" in problem:
            fix += " Leave out what f does not take, such as labels."
        if any(isinstance(x, list) for x in args[1:]):
            fix += " A batch that is a list is one argument: several are a tuple."
        return message(function, problem, given=arguments or "none", expected=expected, fix=fix)
    reason = next(iter(str(error).splitlines()), "")
    fix = "call f itself with them to see where it fails."
    if isinstance(error, _TRACED):
        fix = "write f with jax.numpy, as for jax.jit: it is traced, without values."
    elif isinstance(error, jax.errors.InconclusiveDimensionOperation):
        fix = "say what is known: jax.export.symbolic_shape('n', constraints=['n >= 2'])."
    elif any(hasattr(x, "aval") for x in args):
        fix += " Under jax.vmap, f sees one example: map the batch alone, in_axes=(None, 0)."
    problem = f"`f` cannot be evaluated on these arguments. {type(error).__name__}: {reason[:300]}"
    return message(function, problem, given=arguments, fix=fix)


def _misfit(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Returns why `f` does not accept these arguments, and what it accepts; otherwise `None`."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # it has no signature
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(map(str, signature.parameters))
        return f"`f` does not take these arguments: {error}.", f"those of f: ({names})"
    return None


def kind_of(x: Any) -> str:
    """Describes an argument by its type: an array by its shape, a tree by its arrays."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    leaves = [leaf for leaf in jax.tree.leaves(x) if hasattr(leaf, "shape")]
    shapes = ", ".join(map(kind_of, leaves[:3])) + (", ..." if len(leaves) > 3 else "")
    return f"a {type(x).__name__}" + (f" of {shapes}" if leaves else "")


# The names of a function's operations in order, from which a file tells that `bind` gets another
# function with the same contractions.
#
# Functions that compute the same in the same order have the same names: calls of jitted functions
# and of custom derivatives are opened, and operations that only move or convert elements are left
# out, because jit, sizes and 64-bit types add or remove them. Numbers in the function are not
# compared.


_OPENED = set(
    """
    checkpoint closed_call core_call custom_jvp_call custom_vjp_call custom_vmap_call jit pjit
    remat2
    """.split()
)
"""Calls of functions that compute what the function alone would compute."""

_LEFT_OUT = set(
    """
    broadcast_in_dim convert_element_type copy copy_p device_put dim_as_value dynamic_slice
    expand_dims gather name optimization_barrier pvary reshape reshard sharding_constraint slice
    split squeeze stop_gradient transpose
    """.split()
)

_END = "end_of_"
"""Before the name of an operation: the end of one of the functions inside the operation."""

_EMPTY = re.compile(rf" ?\b(\w+)(?: {_END}\1\b)+ ?")
"""An operation with functions inside, of which none holds a contraction."""

_LIMIT = 2**26
"""The most bytes of names that are read from a file."""


def operations_of(jaxpr: Any) -> str:
    """Returns the names of the operations of an open jaxpr, compressed, and the version of jax."""
    names = " ".join(_names(jaxpr, {}))
    return f"{jax.__version__}:{base64.b85encode(zlib.compress(names.encode(), 9)).decode()}"


def _names(jaxpr: Any, names_of: dict[int, list[str]]) -> list[str]:
    if id(jaxpr) not in names_of:
        names_of[id(jaxpr)] = list(
            itertools.chain.from_iterable(_of(e, names_of) for e in jaxpr.eqns)
        )
    return names_of[id(jaxpr)]


def _of(eqn: compat.Eqn, names_of: dict[int, list[str]]) -> Iterator[str]:
    name = eqn.primitive.name
    if name in _LEFT_OUT:
        return
    bodies = compat.sub_jaxprs(eqn)
    opened = bool(bodies) and name in _OPENED
    if not opened:
        yield name
    for body in bodies:
        yield from _names(body, names_of)
        if not opened:
            yield f"{_END}{name}"


def check_operations(function: str, planned: str, jaxpr: Any, strict: bool) -> None:
    """Warns, or raises if `strict`, if a function has other operations than were planned. With
    another version of jax, and for plans without operations, only `strict` has an effect.
    """
    version, _, stored = planned.partition(":")
    if version != jax.__version__:
        if strict:
            details = f"operations of jax {version}" if version else "a file without operations"
            problem = "the operations of the function cannot be compared."
            fix = "leave out check=, which then compares parameters and contractions, or write the "
            fix += "file again with this jax."
            raise fail(function, problem, given=details, fix=fix)
        return
    operations = operations_of(jaxpr).partition(":")[2]
    if stored == operations:
        return
    text = _difference(function, _read(function, stored), _read(function, operations), strict)
    if strict:
        raise ValueError(text)
    warn(text)


def _difference(function: str, planned: list[str], names: list[str], strict: bool) -> str:
    """Returns the text about the first operation that differs from the planned ones."""
    pairs = enumerate(itertools.zip_longest(names, planned))
    index = next(i for i, (a, b) in pairs if a != b)
    position = f"after `{names[index - 1]}`" if index else "at the start"
    fix = "leave out check="
    if not strict:
        fix = "bind the first function, and then this one: jqx.load(path).bind(f).bind(step)"
    return message(
        function,
        "the function has the contractions of the plan, and other operations between them.",
        given=f"{_shown(names, index)}, operation {index} {position}",
        expected=f"{_shown(planned, index)}, as in the function that was quantized",
        fix=f"bind that function. If the difference is meant, {fix}.",
    )


def same_nesting(function: str, planned: str, jaxpr: Any) -> bool:
    """Whether a function has its contractions in the same loops and branches as was planned. False
    for plans without operations.
    """
    _, _, stored = planned.partition(":")
    operations = operations_of(jaxpr).partition(":")[2]
    return bool(stored) and _nesting(_read(function, stored)) == _nesting(
        _read(function, operations)
    )


def _nesting(names: list[str]) -> str:
    """Returns the contractions among names of operations, and the loops and branches that hold
    any.
    """
    ends = {name for name in names if name.startswith(_END)}
    counted = {*CONTRACTIONS, *ends, *(name.removeprefix(_END) for name in ends)}
    text, previous = " ".join(name for name in names if name in counted), ""
    while text != previous:
        previous, text = text, _EMPTY.sub(" ", text)
    return text


def _read(function: str, stored: str) -> list[str]:
    stream = zlib.decompressobj()
    try:
        names = stream.decompress(base64.b85decode(stored), _LIMIT).decode().split()
    except (ValueError, zlib.error):
        names = None
    if names is None or not stream.eof:
        problem = f"the operations in the plan cannot be read: {stored[:40]!r}."
        raise fail(function, problem, fix="write the file again with jqx.save(path, quantized).")
    return names


def _shown(names: list[str], index: int) -> str:
    if index == len(names):
        return "the end"
    return f"`{names[index]}`".replace(_END, "end of ")


# Whether a plan fits a traced function.


def signature_of(call: Any, items: Sequence[Found], *, axes: bool = True) -> tuple[str, ...]:
    """Returns one line per parameter and contraction, without batch sizes.

    `axes=False` leaves out the position of a weight's axes in the contracted operand, as plans of
    jqx 0.1.0 do.
    """
    lines = [*call.lines]
    for item in items:
        operands = [_described(origin, axes) if origin else "-" for origin in item.origins]
        pattern = item.family.pattern(item.eqn)
        lines.append(f"contraction {item.address} {item.op}{pattern} of {' and '.join(operands)}")
    return tuple(lines)


def _described(origin: Origin, axes: bool) -> str:
    """Returns the paths of a weight, or of joined ones; a transposed one is such as `w[1,0]`."""
    if not axes:
        return origin.name
    dims = [
        ["&".join(map(str, sorted(axes_of_dim))) for axes_of_dim in part.dims]
        for part in origin.parts
    ]
    named = zip(origin.parts, dims, strict=True)
    return "+".join(
        dict.fromkeys(f"{part.path}[{','.join(axes_of_dim)}]" for part, axes_of_dim in named)
    )


def fitted_plan(
    function: str, plan: Plan, call: Any, items: Sequence[Found], fix: str = AGAIN
) -> Plan:
    """Returns a plan with the addresses of a function, which differ in plans of jqx 0.1, and where
    other parts of it are under jit or remat. Raises if the plan is for another function.
    """
    signature = signature_of(call, items)
    if plan.signature in (signature, signature_of(call, items, axes=False)):
        return plan
    old_items = contractions(call, count_reads=True)
    older = signature_of(call, old_items), signature_of(call, old_items, axes=False)
    if plan.signature in older and len(old_items) == len(items):
        return _renumbered(plan, [item.address for item in old_items], items, signature)
    alike = without_addresses(signature) == without_addresses(plan.signature)
    if alike and same_nesting(function, plan.operations, call.jaxpr):
        return _renumbered(plan, addresses_of(plan.signature), items, signature)
    check_ranks(function, plan, items)
    check_same(function, signature, plan.signature, fix)
    return plan


def _renumbered(
    plan: Plan,
    old_addresses: Sequence[Address],
    new_items: Sequence[Found],
    signature: tuple[str, ...],
) -> Plan:
    """Returns a plan with the addresses of contractions found in place of those before."""
    items = dict(zip(old_addresses, new_items, strict=True))
    new = {old: item.address for old, item in items.items()}
    sites = [
        dataclasses.replace(
            site, address=items[site.address].address, loops=items[site.address].loops
        )
        for site in plan.sites
    ]
    skipped = [dataclasses.replace(item, address=new[item.address]) for item in plan.skipped]
    return dataclasses.replace(
        plan, sites=tuple(sites), skipped=tuple(skipped), signature=signature
    )
