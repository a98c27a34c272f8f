"""Optimizer states as codes: a wrapper of any transformation of optax.

The state is dequantized before an update and quantized after it, so the update itself is computed
from moments that are not rounded yet. Second moments need a format without zero: where a small one
becomes 0 and the first moment does not, the quotient of both is huge.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import GetAttrKey

from ... import QSpec, QTensor, per_group
from ...extend import QType
from ...numerics import Block, Squares, format_of
from ..checks import called, check_instance, is_real, shown
from ..errors import fail, message, warn
from ..numerics.qtype import neighbour
from ..tensor.grid import fit
from ..tensor.spec import needed_spec

if TYPE_CHECKING:
    import optax

CHOICES: Mapping[str, QSpec] = {
    "8bit": QSpec(Squares(8), per_group(256, tail=True)),
    "8bit_positive": QSpec(Squares(8, signed=False), per_group(256, tail=True)),
    "4bit": QSpec(Squares(4), per_group(128, tail=True)),
    "4bit_positive": QSpec(Squares(4, signed=False), per_group(128, tail=True)),
    "fp8": QSpec("fp8", per_group(256, tail=True)),
}
"""The ready-made choices, by name."""

_SECOND_MOMENTS = ("nu", "nu_max", "sum_of_squares", "v_row", "v_col", "e_g")
"""Fields of states in optax whose square root divides an update."""


def optax_module(function: str) -> Any:
    """Returns the module optax, or raises an error that says how to install it."""
    try:
        return importlib.import_module("optax")
    except ImportError as error:
        problem = "optax is not installed."
        fix = "pip install 'jqx[optim]'"
        raise fail(function, problem, fix=fix, error=ImportError) from error


def as_transformation(function: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that accepts extra arguments, after checking that it is one."""
    optax = optax_module(function)
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        problem = "`tx` is not a gradient transformation of optax."
        given = f"an object of type {type(tx).__name__}"
        fix = "pass what an optimizer returns, such as optax.adam(1e-3)."
        raise fail(function, problem, given=given, fix=fix, error=TypeError)
    return optax.with_extra_args_support(tx)


@called("optim.quantized", 'pass for example optax.adam(1e-3), {"mu": "8bit"}.')
def quantized(
    tx: optax.GradientTransformation, specs: Mapping[str, QSpec | str]
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation with the updates of `tx`, whose state holds codes.

    The float arrays in the fields that `specs` names become QTensors, wherever in the state the
    fields are. Everything else stays as it is. Each update dequantizes them, calls `tx.update`, and
    quantizes the new ones.

    ===================  ==================================================  ======  ======
    choice               format                                              blocks  size
    ===================  ==================================================  ======  ======
    `"8bit"`             `jqx.numerics.Squares(8)`                              256    .254
    `"8bit_positive"`    the same without a sign, for second moments            256    .254
    `"4bit"`             `jqx.numerics.Squares(4)`, packed                      128    .133
    `"4bit_positive"`    the same without a sign, for second moments            128    .133
    `"fp8"`              e4m3                                                   256    .254
    ===================  ==================================================  ======  ======

    The size is that of float32 times this. Blocks lie along the last axis; where it is shorter,
    they hold several rows. Codes have the shape of the parameter, unless they are packed: then the
    last axis of even length has half of it.

    Args:
      tx: any transformation, such as `optax.adamw(1e-3)`, with extra arguments or without.
      specs: for each field, such as `"mu"` and `"nu"` of Adam or `"trace"` of momentum, a choice of
        the table, a `jqx.QSpec`, or a scheme such as `"int8:group=64"`. A relative granularity is
        along all axes of an array. Codes of less than 8 bits are packed.

    Raises:
      ImportError: optax is not installed.
      TypeError: `tx` is no transformation, or a spec has the wrong type.
      ValueError: a spec is unknown; or, in `init`, a field is not in the state.

    Rounding: up or down, with a hash of the number as noise, so that it is right in the mean. The
      same numbers give the same bits. (In block formats, and with zero points, to nearest.)
    NaN and infinities: one in a moment spreads to its block, as it would later spread through the
      loss. Put `optax.apply_if_finite` around the result.
    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, for
      blocks. The codes differ: even steps of the root need no table, and have no zero without sign.

    Example:
      >>> import jax.numpy as jnp, jqx.optim, optax
      >>> specs = {"mu": "8bit", "nu": "8bit_positive"}
      >>> tx = jqx.optim.quantized(optax.adam(1e-3), specs)
      >>> tx.init(jnp.ones((64, 256)))[0].nu
      QTensor(usquares8[64, 256] per_axis(0), scale float32[64, 1], dtype=float32, 16,640 bytes)
    """
    name = "optim.quantized"
    inner = as_transformation(name, tx)
    fix = 'pass for example {"mu": "8bit", "nu": "8bit_positive"}.'
    check_instance(name, "specs", specs, Mapping, fix=fix)
    if not specs or not all(isinstance(field, str) for field in specs):
        problem = f"`specs` does not name fields of a state: {shown(dict(specs))}."
        raise fail(name, problem, fix=fix)
    by_field = {field: _spec_of(field, spec) for field, spec in specs.items()}

    def init(params: Any) -> Any:
        state = inner.init(params)
        _check_fields(state, params, by_field)
        return _map_fields(_quantize, state, params, by_field)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        real_state = _map_fields(_dequantize, state, updates, by_field)
        new_updates, new_state = inner.update(updates, real_state, params, **extra)
        return new_updates, _map_fields(_quantize, new_state, updates, by_field)

    return optax_module(name).GradientTransformationExtraArgs(init, update)


def _spec_of(field: str, value: Any) -> QSpec:
    """Returns the spec of a field. Warns of a format with zero for a second moment."""
    name = "optim.quantized"
    spec = CHOICES.get(value) if isinstance(value, str) else None
    if spec is None:
        try:
            spec = needed_spec(name, f"specs[{field!r}]", value, "array")
        except ValueError as error:
            if not isinstance(value, str) or ":" in value:
                raise
            problem = f"the choice {value!r} for {field!r} is unknown."
            expected = f"one of {', '.join(map(repr, CHOICES))}, a jqx.QSpec, or a scheme"
            fix = f"pass {field}={'8bit'!r}, or for example 'int8:group=256'."
            raise fail(name, problem, expected=expected, fix=fix) from error
    form = format_of(spec.qtype)
    if field in _SECOND_MOMENTS and form.low <= 0:
        problem = f"{form.name} rounds small second moments (`{field}`) to 0, and updates that are "
        problem += "divided by their root may explode."
        fix = "pass '8bit_positive' or '4bit_positive', whose codes have no zero."
        warn(message(name, problem, fix=fix))
    return spec


def _is_qtensor(x: Any) -> bool:
    """Whether a node of a state is a QTensor."""
    return isinstance(x, QTensor)


def _is_whole(params: Any) -> Callable[[Any], bool]:
    """Returns whether a node of a state is a QTensor, or has the structure of the parameters: these
    may have attributes of the names of fields.
    """
    structure = jax.tree.structure(params)

    def is_whole(x: Any) -> bool:
        return _is_qtensor(x) or jax.tree.structure(x, is_leaf=_is_qtensor) == structure

    return is_whole


def _map_fields(
    f: Callable[[QSpec, Any], Any], state: Any, params: Any, by_field: Mapping[str, QSpec]
) -> Any:
    """Returns a state with `f(spec, leaf)` in place of each leaf of the named fields; where fields
    are inside of each other, the outermost counts.
    """

    def mapped(path: Any, node: Any) -> Any:
        fields = [key.name for key in path if isinstance(key, GetAttrKey) and key.name in by_field]
        if not fields:
            return node
        return jax.tree.map(partial(f, by_field[fields[0]]), node, is_leaf=_is_qtensor)

    return jax.tree_util.tree_map_with_path(mapped, state, is_leaf=_is_whole(params))


def _is_float(x: Any) -> bool:
    """Whether a leaf is an array of floats of 16 bits or more, or was one before."""
    return _is_qtensor(x) or (hasattr(x, "dtype") and is_real(x.dtype))


def _quantize(spec: QSpec, x: Any) -> Any:
    """Returns an array of floats as a QTensor; anything else stays."""
    if _is_qtensor(x) or not _is_float(x):
        return x
    form, spec = format_of(spec.qtype), spec.resolve(x.ndim, ())
    groups, affine, pack = spec.granularity.groups(x.shape), fit(x, spec), None
    if form.low > 0:  # blocks of zeros, such as those of a first state, stay 0
        is_filled = groups.largest_magnitude(x) != 0
        affine = affine._replace(scale=affine.scale * is_filled.astype(affine.scale.dtype))
    if spec.symmetric and not isinstance(form, Block):
        x = groups.join(_dithered(groups.split(x), groups.split_scale(affine.scale), form))
    if form.bits < 8 and x.ndim:
        filled = [axis for axis, size in enumerate(x.shape) if size * form.bits % 8 == 0]
        pack = filled[-1] if filled else max(range(x.ndim), key=x.shape.__getitem__)
    return QTensor.quantize(x, spec, affine, pack=pack)


def _dithered(x: jax.Array, scale: jax.Array, form: QType) -> jax.Array:
    """Returns each number rounded to one of its neighbours in a format, so that sums are right in
    the mean. Rounded to nearest, a slow average would not change: with a decay of .999, a second
    moment moves by less than half a step of 8 bits.

    The random number is a hash of the number itself (the finalizer of MurmurHash3), so that no key
    is needed: its last bits are as good as random.
    """
    y = x.astype(jnp.float32) / jnp.where(scale == 0, jnp.ones_like(scale), scale)
    bits = lax.bitcast_convert_type(y, jnp.uint32) * jnp.uint32(0x9E3779B1)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    noise = (bits >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    return (neighbour(form, y, noise) * scale).astype(x.dtype)


def _dequantize(spec: QSpec, x: Any) -> Any:
    """Inverts `_quantize`."""
    return x.dequantize() if _is_qtensor(x) else x


def _check_fields(state: Any, params: Any, by_field: Mapping[str, QSpec]) -> None:
    """Checks that each field is in the state, and that it holds floats, if anything."""
    names: set[str] = set()
    is_whole = _is_whole(params)

    def is_leaf(x: Any) -> bool:
        if is_whole(x):
            return True
        names.update(getattr(type(x), "_fields", ()))  # also of fields without leaves
        return False

    filled, floats = set(), set()
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_leaf):
        fields = [key.name for key in path if isinstance(key, GetAttrKey)]
        leaves = jax.tree.leaves(node, is_leaf=_is_qtensor)
        filled.update(fields if leaves else ())
        floats.update(fields if any(map(_is_float, leaves)) else ())
    names |= filled
    wrong = [x for x in by_field if x not in names or (x in filled and x not in floats)]
    if wrong:
        problem = f"the state has no field {wrong[0]!r} that holds floats."
        listed = ", ".join(sorted(floats)) or "(none)"
        fix = "name fields of the state of this optimizer: print(tx.init(params)) shows them."
        raise fail("optim.quantized", problem, expected=f"some of {listed}", fix=fix)
