"""The common part of all presets: one rule, whose specs can be refined, and its docstring."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from .checks import called, check_instance
from .errors import fail
from .numerics.blocks import Block, mxfp8_e4m3
from .numerics.codebooks import nf4 as nf4_codes
from .numerics.lookup import as_qtype, format_of
from .numerics.qtype import QType
from .policy import Policy, Rule
from .statistics.granularity import Granularity, per_channel, per_group, per_tensor, per_token
from .statistics.searches import Mse, ceil
from .tensor.spec import QSpec, Role, as_spec, needed_spec

Fields = Mapping[str, Any] | QSpec | str
"""Fields of a `QSpec` to replace, by name; or a spec, or a scheme, to use instead."""

NONE: Fields = {}

Tables = DTypeLike | QType | QSpec | None
"""How lookup tables are quantized: a format, a scheme, a spec; `None` leaves them in float."""

Exclude = str | Sequence[str]
"""Regular expressions of paths that stay in float: one, or several."""

_ARGUMENTS = {
    "path": """regular expression of the paths to quantize.""",
    "block": """number of weights that share a scale along the axes that a contraction sums over. If
    it does not divide an axis, some blocks are smaller: the last one along the axis, and all blocks
    of a kernel of 3x3 taps. (`weight={"granularity": jqx.per_group(32)}` makes that an error.)""",
    "exclude": """regular expression, or several, of paths to leave in float. Each becomes a rule in
    front of the others. As for any rule, it is an error if one matches nothing, and a warning if an
    alternative in it does.""",
    "tables": """format of the tables used for lookups, such as `"int8"`, with one scale for each
    row; or a scheme such as `"int4:group=32"`, or a `QSpec`. `None` leaves tables in float. A table
    that is also used in a product is quantized for all its uses or for none: by default for
    none.""",
    "weight": """fields to replace in the `QSpec` of the weights; or a `QSpec`, or a scheme such as
    `"int4:group=32"`, to use instead.""",
    "activation": """the same for the activations, such as `"int8:token:dynamic"`.""",
}
_RAISES = {
    "TypeError": "if a field is not one of `QSpec`, or an argument has the wrong type.",
    "ValueError": "if `path` is not a regular expression, or fields do not fit together.",
}
_Preset = TypeVar("_Preset", bound=Callable[..., Policy])


def preset(f: _Preset) -> _Preset:
    """Makes a preset of a function: adds what all presets share to its docstring.

    Calls that do not fit the signature raise errors in four parts.
    """
    signature = inspect.signature(f)
    taken = {name: _ARGUMENTS[name] for name in signature.parameters}
    summary, heading, example = inspect.cleandoc(f.__doc__ or "").partition("Example:")
    sections = [_section("Args", taken), _section("Raises", _RAISES), heading + example]
    f.__doc__ = summary + "\n\n".join(sections)

    def instead(name: str) -> str | None:
        return _instead(name, taken, f)

    return called(f"presets.{f.__name__}", instead=instead)(f)


def _instead(name: str, taken: Collection[str], f: Callable[..., Policy]) -> str | None:
    """Returns what to write in the place of an argument that a preset does not take."""
    if name.startswith("act") and "activation" not in taken:
        return "activations stay in the model's float dtype: see jqx.presets.w8a8_dynamic()."
    if name in ("bits", "dtype"):
        return 'pass a format: weight={"qtype": "int4"}.'
    if name in ("group", "groups", "group_size", "block", "blocks", "block_size"):
        if "block" in taken:
            return f"{name}= is called block=."
        spec = f().rules[-1].weight
        assert spec is not None
        form = format_of(spec.qtype)
        if isinstance(form, Block):
            return f"drop {name}=: {form.name} has blocks of {form.size}."
        return f'pass a scheme: weight="{form.name}:group=32".'
    if name in {field.name for field in dataclasses.fields(QSpec)}:
        return f'pass a field of the spec: weight={{"{name}": ...}}.'
    return None


def policy(
    name: str,
    path: str,
    exclude: Exclude,
    weight: QSpec,
    activation: QSpec | None,
    tables: Tables,
    weight_fields: Fields,
    activation_fields: Fields = NONE,
) -> Policy:
    """Returns the policy of a preset: a rule for each path to leave in float, and a rule with some
    fields of its specs replaced.
    """
    function = f"presets.{name}"
    check_instance(
        function, "exclude", exclude, (str, list, tuple), fix='pass for example exclude="head/.*".'
    )
    left = (exclude,) if isinstance(exclude, str) else exclude
    refined = _refined(function, "weight", weight, weight_fields)
    if activation is not None:
        activation = _refined(function, "activation", activation, activation_fields)
    spec = _table_spec(function, tables)
    rule = Rule(path, weight=refined, activation=activation, tables=spec)
    return Policy([*map(Rule, left), rule])


def _refined(function: str, role: Role, spec: QSpec, fields: Fields) -> QSpec:
    """Returns a spec with some fields replaced, or the spec that was given instead."""
    if isinstance(fields, Mapping):
        return dataclasses.replace(spec, **fields)
    return needed_spec(function, role, fields, role)


def _table_spec(function: str, tables: Tables) -> QSpec | None:
    if tables is None or isinstance(tables, (str, QSpec)):
        return as_spec(function, "tables", tables)
    qtype = as_qtype(function, "tables", tables, "Table")
    form = format_of(qtype)
    if isinstance(form, Block):
        return QSpec(qtype, per_group(form.size, tail=True))
    return QSpec(qtype, per_channel())


def blocks(function: str, block: int, default: int, weight_fields: Fields) -> Granularity:
    """Returns blocks of weights; the last ones may be smaller."""
    has_granularity = not isinstance(weight_fields, Mapping) or "granularity" in weight_fields
    if block != default and has_granularity:
        problem = "`block` and `weight` both set the granularity."
        raise fail(f"presets.{function}", problem, fix="drop block, or that in weight.")
    return per_group(block, tail=True)


def _section(heading: str, entries: Mapping[str, str]) -> str:
    return "\n".join([f"{heading}:", *(f"  {name}: {text}" for name, text in entries.items())])


# Integer presets: weights per channel or in blocks; activations per tensor if their scales are
# static, per token if they are dynamic.


_INT8 = QSpec(jnp.int8, per_channel())
_INT4 = QSpec(jnp.int4, per_channel())
_SIGNED = Mse(2, 0.8, signed=True)
_PER_TOKEN = QSpec(jnp.int8, per_token(), dynamic=True)


@preset
def w8a8(
    path: str = ".*",
    *,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
    activation: Fields = NONE,
) -> Policy:
    """Returns a policy with int8 weights and int8 activations with static, calibrated scales.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> jqx.presets.w8a8(weight={"qtype": jnp.int4}).rules[0].weight.qtype
      dtype(int4)
    """
    spec = QSpec(jnp.int8, per_tensor())
    return policy("w8a8", path, exclude, _INT8, spec, tables, weight, activation)


@preset
def w8a8_dynamic(
    path: str = ".*",
    *,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
    activation: Fields = NONE,
) -> Policy:
    """Returns a policy with int8 weights and int8 activations. The activations have dynamic scales
    per token, computed from the current values.

    Example:
      >>> import jqx
      >>> jqx.presets.w8a8_dynamic().rules[0].activation.dynamic
      True
    """
    return policy("w8a8_dynamic", path, exclude, _INT8, _PER_TOKEN, tables, weight, activation)


@preset
def w8a16(
    path: str = ".*", *, exclude: Exclude = (), tables: Tables = None, weight: Fields = NONE
) -> Policy:
    """Returns a policy with int8 weights only; activations stay in the model's float dtype.

    Example:
      >>> import jqx
      >>> jqx.presets.w8a16().rules[0].activation is None
      True
    """
    return policy("w8a16", path, exclude, _INT8, None, tables, weight)


@preset
def w4a16(
    path: str = ".*",
    *,
    block: int = 32,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
) -> Policy:
    """Returns a policy with int4 weights in blocks; activations stay in the model's float dtype.

    GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978) use this format, with blocks of 128. Each
    block takes the best of six scales, some of them negative (`jqx.calibrators.Mse`), which costs
    nothing at run time. To use zero points as well: `weight={"qtype": jnp.uint4,
    "symmetric": False, "calibrator": jqx.calibrators.minmax}`.

    Example:
      >>> import jqx
      >>> str(jqx.presets.w4a16(block=128).rules[0].weight)
      'int4 per_group(128, tail=True) mse(2, 0.8, signed)'
    """
    spec = QSpec(jnp.int4, blocks("w4a16", block, 32, weight), calibrator=_SIGNED)
    return policy("w4a16", path, exclude, spec, None, tables, weight)


@preset
def w4a8(
    path: str = ".*",
    *,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
    activation: Fields = NONE,
) -> Policy:
    """Returns a policy with int4 weights and int8 activations. The activations have dynamic scales
    per token, computed from the current values.

    A channel has one scale, so that one exact integer sum covers all products, as in the
    per-channel form of QServe (arXiv:2405.04532). Blocks are more accurate but need a sum each:
    `weight={"granularity": jqx.per_group(32, tail=True)}`.

    Example:
      >>> import jqx
      >>> str(jqx.presets.w4a8().rules[0].activation)
      'int8 per_token dynamic'
    """
    return policy("w4a8", path, exclude, _INT4, _PER_TOKEN, tables, weight, activation)


@preset
def w4a4(
    path: str = ".*",
    *,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
    activation: Fields = NONE,
) -> Policy:
    """Returns a policy with int4 weights and int4 activations. The activations have dynamic scales
    per token, computed from the current values.

    For training with `jqx.simulate`, or for models whose outliers were rotated away (QuaRot,
    arXiv:2404.00456). Other models lose much accuracy.

    Example:
      >>> import jqx
      >>> str(jqx.presets.w4a4().rules[0].activation)
      'int4 per_token dynamic'
    """
    spec = QSpec(jnp.int4, per_token(), dynamic=True)
    return policy("w4a4", path, exclude, _INT4, spec, tables, weight, activation)


# Presets of 8-bit floats, on weights and activations.


@preset
def fp8(
    path: str = ".*",
    *,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
    activation: Fields = NONE,
) -> Policy:
    """Returns a policy with float8_e4m3fn weights and activations with static, calibrated scales.

    An activation has one scale, as in Micikevicius et al. (arXiv:2209.05433): in a float format an
    outlier does not cost the other values accuracy, so a scale for each token gains little. The
    scale is static, so that no maximum must be computed before a cast. Values beyond the calibrated
    range saturate. Per token: `activation={"granularity": jqx.per_token(), "dynamic": True}`.

    Example:
      >>> import jqx
      >>> str(jqx.presets.fp8().rules[0].weight)
      'float8_e4m3fn per_channel'
    """
    form = jnp.float8_e4m3fn
    weights, activations = QSpec(form, per_channel()), QSpec(form, per_tensor())
    return policy("fp8", path, exclude, weights, activations, tables, weight, activation)


@preset
def mxfp8(
    path: str = ".*",
    *,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
    activation: Fields = NONE,
) -> Policy:
    """Returns a policy with MXFP8 weights and activations: float8_e4m3fn in blocks of 32 along the
    axes that a contraction sums over. The scale of a block is a power of two.

    Scales of activations are dynamic, computed from the current values, as the format intends. The
    powers of two are rounded up (`jqx.calibrators.ceil`), so that nothing is clipped. If 32 does
    not divide an axis, the last block is smaller. In a kernel of 3x3 taps all blocks are smaller.

    Example:
      >>> import jqx
      >>> str(jqx.presets.mxfp8().rules[0].activation)
      'mxfp8_e4m3 per_group(32, tail=True) ceil dynamic'
    """
    blocks = per_group(mxfp8_e4m3.size, tail=True)
    weights = QSpec(mxfp8_e4m3, blocks, calibrator=ceil)
    activations = QSpec(mxfp8_e4m3, blocks, calibrator=ceil, dynamic=True)
    return policy("mxfp8", path, exclude, weights, activations, tables, weight, activation)


# Presets of codebooks.


@preset
def nf4(
    path: str = ".*",
    *,
    block: int = 64,
    exclude: Exclude = (),
    tables: Tables = None,
    weight: Fields = NONE,
) -> Policy:
    """Returns a policy with NF4 weights in blocks; activations stay in the model's float dtype.

    The base weights of QLoRA (Dettmers et al., arXiv:2305.14314), without the second quantization
    of their scales.

    Example:
      >>> import jqx
      >>> str(jqx.presets.nf4().rules[0].weight)
      'nf4 per_group(64, tail=True)'
    """
    spec = QSpec(nf4_codes, blocks("nf4", block, 64, weight))
    return policy("nf4", path, exclude, spec, None, tables, weight)
