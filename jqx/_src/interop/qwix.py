"""Rules of Qwix as a policy, without Qwix: the same sites, formats, scales and calibration.

Qwix matches the path of the module that calls an operation, jqx the path of the weight in it. Each
index that a product keeps has its own scale. A tile is along the last axis that is summed over; the
others share its scale.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ... import (
    Policy,
    QSpec,
    Rule,
    numerics,
    per_axis,
    per_channel,
    per_group,
    per_tensor,
)
from ...calibrators import absmax, ceil, fixed, minmax, rms
from ...extend import Granularity
from ...recipes import Products, Rounded
from ..checks import check_instance, check_pattern, shown
from ..errors import fail, some
from ..files import as_path, open_regular
from ..statistics.granularity import PerTile

_FIELDS: dict[str, Any] = {
    "module_path": ".*",
    "op_names": (),
    "weight_qtype": None,
    "act_qtype": None,
    "tile_size": None,
    "act_static_scale": None,
    "weight_calibration_method": "absmax",
    "act_calibration_method": None,
    "act_batch_axes": (0,),
    "bwd_qtype": None,
    "bwd_calibration_method": "absmax",
    "bwd_weight_grad_tile_size": None,
    "disable_channelwise_axes": False,
    "bwd_stochastic_rounding": None,
    "channelwise_noise_axes": (0,),
    "additional_qt_config": None,
}
"""The fields of `qwix.QtRule` and their defaults; `QuantizationRule` has the first nine."""

_OF_TRAINING = tuple(_FIELDS)[9:]

_NEEDS = {
    "act_qtype": "weight_qtype",
    "bwd_qtype": "weight_qtype",
    "tile_size": "weight_qtype",
    "weight_calibration_method": "weight_qtype",
    "act_static_scale": "act_qtype",
    "act_calibration_method": "act_qtype",
    "bwd_calibration_method": "bwd_qtype",
    "bwd_weight_grad_tile_size": "bwd_qtype",
    "bwd_stochastic_rounding": "bwd_qtype",
}
"""Fields that Qwix ignores unless another one is set."""

_OPS = ("dot_general", "einsum", "conv_general_dilated", "ragged_dot")
"""The operations that Qwix replaces; `PtqProvider` leaves the last one."""

_BLOCKS = {"mxfp8": "mxfp8_e4m3", "mxfp4": "mxfp4"}
_FORMATS = {f"int{bits}" for bits in range(2, 9)} | {*_BLOCKS, "nf4", "float4_e2m1fn"}
_FORMATS |= {"float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz"}

_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"
_MAXTEXT = {"int4": "int4", "int8": "int8", "fp8": _E4M3, "fp8_e4m3": _E4M3, "fp8_e5m2": _E5M2}
_MAXTEXT |= {"fp8_full": _E4M3, "fp8_gpu": _E4M3}
"""What MaxText rounds activations and weights to, by its `quantization=`."""


def from_qwix(rules: Any, *, merge_einsum: bool = False) -> Policy:
    """Returns the policy that quantizes what rules of Qwix quantize, in the same formats.

    Integers have the arithmetic of Qwix, `jqx.numerics.qwix`, and weights its codes. A rule becomes
    one for weights, which has to match some; and others that need not: for convolutions, which have
    no tiles in Qwix; for `ragged_dot`, whose experts share scales there; and for products of two
    activations, if it has an `act_qtype`. These have no module in jqx but a name scope. An `einsum`
    in a linen module is found by it, all others only by `module_path=".*"`.

    If a rule has a `bwd_qtype`, each becomes one rule with `products`, for `jqx.train` with
    `jqx.recipes.Recipe("qwix", {rule.path: rule.products for rule in policy.rules})`. Products of
    two activations then stay in float, and experts do not share scales.

    What differs: a static scale covers the largest magnitude of all batches, and is one for the
    array; Qwix takes the mean over batches, for each index that is neither summed nor in
    `act_batch_axes`. A table that is also multiplied, such as a tied embedding, stays in float. A
    weight on the left of a product is one, while `PtqProvider` takes it for an activation. A share
    as `bwd_weight_grad_tile_size` is that of all rows; in Qwix that of their last axis. In
    training, operands are rounded again for each product; Qwix moves scales to `dy`.

    Args:
      rules: a sequence of `qwix.QuantizationRule` or `qwix.QtRule`, of other objects with these
        attributes, or of dicts; a dict that has such a list under `"rules"`, itself under `"qwix"`
        or not, as tpu-inference reads from YAML; JSON with one of both, or the path of a file
        of JSON; or what MaxText takes as `quantization=`: `"int4"`, `"int8"`, `"fp8"`,
        `"fp8_e4m3"`, `"fp8_e5m2"`, `"fp8_full"` or `"fp8_gpu"`, with the defaults of its other
        options and on one slice. (`gmm`, which MaxText quantizes itself, is not in the policy.)
      merge_einsum: whether a rule whose `op_names` has only one of `"dot_general"` and `"einsum"`
        is for weights of both, which are one operation in jqx. MaxText names only `"dot_general"`.

    Raises:
      TypeError: if a rule has neither fields nor attributes, or a field has the wrong type.
      ValueError: if a field is unknown, or has a value that jqx has no equal for.

    Example:
      >>> import jqx
      >>> rules = [
      ...     {"module_path": ".*mlp.*", "weight_qtype": "int4"},
      ...     {"weight_qtype": "int8", "act_qtype": "int8"},
      ... ]
      >>> for rule in jqx.interop.from_qwix(rules).rules:
      ...     print(rule.path, rule.op, rule.weight, rule.activation)
      (?:.*mlp.*)/[^/]+ dot_general|conv_general_dilated int4 per_channel qwix None
      .* dot_general|conv_general_dilated int8 per_channel qwix int8 per_channel dynamic qwix
      .* dot_general None int8 per_channel dynamic qwix
    """
    if isinstance(rules, str) and rules in _MAXTEXT:
        read = [_of_maxtext(rules)]
    else:
        read = [_read(index, rule) for index, rule in enumerate(_listed(rules))]
    for_training = any(fields["bwd_qtype"] is not None for fields in read)
    ops = _OPS if any(fields["is_qt"] for fields in read) else _OPS[:3]
    made: list[Rule] = []
    for index, fields in enumerate(read):
        translated = _Translated(index, fields, ops, merge_einsum)
        made += translated.for_training() if for_training else translated.rules()
    return Policy(made)


def _of_maxtext(name: str) -> dict[str, Any]:
    """Returns the fields of the rule that MaxText makes of its `quantization=`."""
    ops = ["dot_general", *(["ragged_dot"] if name == "fp8_full" else [])]
    forward = _MAXTEXT[name]
    backward = _E5M2 if name == "fp8_full" else forward
    own = {"module_path": "decoder/.*layers.*", "op_names": ops, "is_qt": True, "name": name}
    return _FIELDS | own | {"weight_qtype": forward, "act_qtype": forward, "bwd_qtype": backward}


def _listed(rules: Any) -> Iterable[Any]:
    """Returns the rules in what is given."""
    if isinstance(rules, (str, os.PathLike)):
        rules = _parsed(rules)
    for name in ("qwix", "rules"):  # "use_abstract_model" is about loading
        if isinstance(rules, Mapping) and name in rules:
            others = [key for key in rules if key not in (name, "use_abstract_model")]
            if others:
                problem = f"`rules` has {some(map(repr, others))} beside {name!r}."
                raise _fail(problem, fix="leave out what has no place in a policy.")
            rules = rules[name]
    fix = "pass a list, such as [qwix.QuantizationRule(weight_qtype='int8')]."
    check_instance("interop.from_qwix", "rules", rules, (list, tuple), fix=fix)
    return rules


def _parsed(text: Any) -> Any:
    """Returns what JSON, or a file of JSON, has."""
    if isinstance(text, os.PathLike) or text.endswith(".json"):
        with open_regular("interop.from_qwix", as_path("interop.from_qwix", text)) as file:
            text = file.read().decode(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        problem = "`rules` is neither JSON, nor a quantization of MaxText that uses Qwix."
        expected = f"JSON, or one of {', '.join(_MAXTEXT)}"
        fix = "parse YAML first, yaml.safe_load(text); for other names of MaxText choose a value "
        fix += "of jqx.presets or jqx.recipes."
        raise _fail(problem, given=shown(text, 60), expected=expected, fix=fix) from None


def _read(index: int, rule: Any) -> dict[str, Any]:
    """Returns the fields of a rule, with defaults, after checking that no other is set."""
    defaults: dict[str, Any] = {}
    if isinstance(rule, Mapping):
        given = dict(rule)
    elif dataclasses.is_dataclass(rule) and not isinstance(rule, type):
        fields = dataclasses.fields(rule)
        given = {field.name: getattr(rule, field.name) for field in fields}
        defaults = {field.name: field.default for field in fields}
    else:
        given = dict(getattr(rule, "__dict__", {}))
    if not isinstance(rule, Mapping) and "module_path" not in given:
        problem = f"rule {index} is neither a rule of Qwix nor a dict."
        fix = "pass qwix.QuantizationRule(...), or a dict of its fields."
        raise _fail(problem, given=type(rule).__name__, fix=fix, error=TypeError)
    unset = [name for name, value in defaults.items() if given[name] == value]
    unknown = [name for name in given if name not in (*_FIELDS, *unset)]
    if unknown:
        problem = f"rule {index} has fields that jqx does not know: {some(map(repr, unknown))}."
        details = some(f"{name} == {shown(given[name])}" for name in unknown)
        fix = "leave them out, or write the jqx.Rule yourself."
        raise _fail(problem, given=details, expected=", ".join(_FIELDS), fix=fix)
    own = {name: value for name, value in given.items() if name in _FIELDS}
    return _FIELDS | own | {"is_qt": any(name in own for name in _OF_TRAINING)}


class _Translated:
    """What becomes of one rule.

    Attributes:
      index: its position.
      fields: its fields.
      ops: the operations of Qwix that it is for.
    """

    def __init__(
        self, index: int, fields: Mapping[str, Any], ops: Sequence[str], merge_einsum: bool
    ) -> None:
        self.index, self.fields, names = index, fields, fields["op_names"]
        self.ops = ((names,) if isinstance(names, str) else tuple(names)) or tuple(ops)
        where = f"module_path of rule {index}"
        self.module = check_pattern("interop.from_qwix", where, fields["module_path"]).pattern
        if not set(self.ops) <= set(_OPS):
            fix = "name those that JAX has. A kernel of your own needs jqx.extend.primitive_rules."
            raise self._no_equal("op_names", f"has others than {', '.join(_OPS)}", fix)
        if len({"dot_general", "einsum"} & {*self.ops}) == 1 and not merge_einsum:
            problem = "has one of 'dot_general' and 'einsum', which are one operation in jqx"
            fix = "pass merge_einsum=True if weights of both may be quantized, or name both."
            raise self._no_equal("op_names", problem, fix)
        for field, needed in _NEEDS.items():
            is_set = fields[field] not in (None, False, "absmax")
            if fields[needed] is None and is_set:
                problem = f"has no effect in Qwix without {needed}"
                fix = f"leave it out, or set {needed}. To round activations alone, write "
                fix += "jqx.Rule(activation=...)."
                raise self._no_equal(field, problem, fix)
        if fields["act_static_scale"] and [*fields["act_batch_axes"]] != [0]:
            problem = "has no equal: a static scale is one for the array"
            raise self._no_equal("act_batch_axes", problem, "leave it out.")
        if fields["additional_qt_config"]:
            fix = "write the jqx.recipes.Products yourself."
            raise self._no_equal("additional_qt_config", "has no equal", fix)

    def _no_equal(self, field: str, problem: str, fix: str) -> Exception:
        given = f"{field} == {shown(self.fields[field])}"
        return _fail(f"`{field}` of rule {self.index} {problem}.", given=given, fix=fix)

    @property
    def _path(self) -> str:
        """The path of the weights in the modules: that of a module, and a name."""
        if self.module == ".*":
            return self.module
        at_root = re.fullmatch(self.module, "") is not None
        return f"(?:(?:{self.module})/)?[^/]+" if at_root else f"(?:{self.module})/[^/]+"

    def _op(self, *among: str) -> str:
        """Returns the operations of jqx for those among these; empty for none."""
        names = [name.replace("einsum", "dot_general") for name in self.ops if name in among]
        return "|".join(dict.fromkeys(names))

    def _float(self) -> Rule:
        return Rule(self._path, self._op(*_OPS) if self.fields["op_names"] else None)

    def rules(self) -> list[Rule]:
        """Returns the rules for inference and simulated quantization."""
        weight, x = self._spec("weight"), self._spec("act")
        if weight is None:
            others = [] if self.module == ".*" else self._of_activations(None)
            return [self._float(), *others]
        is_block = bool({self.fields["weight_qtype"], self.fields["act_qtype"]} & {*_BLOCKS})
        is_tiled = self._size("tile_size") is not None
        in_one = ("dot_general", "einsum", *([] if is_tiled else ["conv_general_dilated"]))
        specs: dict[str, tuple[QSpec | None, QSpec | None]] = {self._op(*in_one): (weight, x)}
        if is_tiled and not is_block:
            untiled = self._spec("weight", tiled=False), self._spec("act", tiled=False)
            specs[self._op("conv_general_dilated")] = untiled
        if "ragged_dot" in self.ops and not is_block:  # with absmax, and experts share scales
            shared = QSpec(weight.qtype, per_axis(2), numerics=weight.numerics)
            rows = x and QSpec(x.qtype, per_channel(), dynamic=True, numerics=x.numerics)
            specs["ragged_dot"] = shared, rows
        made: list[Rule] = []
        for op, (w, activation) in specs.items():
            if op:
                rule = Rule(self._path, op, weight=w, activation=activation, optional=bool(made))
                made.append(rule)
        return [*made, *(self._of_activations(x) if x is not None else [])]

    def _of_activations(self, spec: QSpec | None) -> list[Rule]:
        """Returns the rule for products of two activations, found by their name scope. That of an
        einsum ends with its formula, which has a comma.
        """
        named = {"dot_general", "einsum"} & {*self.ops}
        if self.module == ".*":
            path = ".*" if len(named) == 2 else ".*,.*" if "einsum" in named else "[^,]*"
        else:
            path = f"[^/]+/(?:{self.module})/[^/]*,[^/]*"
        is_found = named and (self.module == ".*" or "einsum" in named)
        return [Rule(path, "dot_general", activation=spec, optional=True)] if is_found else []

    def for_training(self) -> list[Rule]:
        """Returns the rule with its three products."""
        fields, weight, x = self.fields, self._spec("weight"), self._spec("act")
        if weight is None:
            return [self._float()]
        absent = None if x is not None else "act_qtype"
        field = next((name for name in ("tile_size", "act_static_scale") if fields[name]), absent)
        if field is not None or x is None:
            problem = "has no equal in training: each product rounds both operands to scales of "
            problem += "their own values"
            fix = "drop bwd_qtype in all rules, or change this field."
            raise self._no_equal(field or "act_qtype", problem, fix)
        x = dataclasses.replace(x, dynamic=False)
        if fields["bwd_qtype"] is None:  # floats, of the operands before they were rounded
            products = Products((x, weight), ("float32", "float32"), ("float32", "float32"))
        elif fields.get("name") == "fp8_gpu":  # flax's Fp8DirectDotGeneralOp ignores the rule
            e4m3, e5m2 = (Rounded(QSpec(q, per_tensor()), history=1024) for q in (_E4M3, _E5M2))
            products = Products((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2))
        else:
            products = self._products(x, weight)
        return [Rule(self._path, self._op(*_OPS), products=products)]

    def _products(self, x: QSpec, w: QSpec) -> Products:
        """Returns the products of a rule with `bwd_qtype`."""
        dy = self._spec("bwd")
        assert dy is not None
        x_of_rows, dy_of_rows = x, dy
        size = self._size("bwd_weight_grad_tile_size")
        if size is not None:
            if self.fields["disable_channelwise_axes"]:
                field, fix = "disable_channelwise_axes", "leave one of both out."
                raise self._no_equal(field, "has no equal with bwd_weight_grad_tile_size", fix)
            runs = per_group(size) if isinstance(size, int) else PerTile(size)
            x_of_rows, dy_of_rows = (  # a fixed range has no tiles
                s if s.granularity == per_tensor() else dataclasses.replace(s, granularity=runs)
                for s in (x, dy)
            )
        method = self.fields["bwd_stochastic_rounding"]
        if method is None:
            return Products((x, w), (dy, w), (x_of_rows, dy_of_rows), "rounded")
        if method != "uniform" or [*self.fields["channelwise_noise_axes"]] != [0]:
            field = "channelwise_noise_axes" if method == "uniform" else "bwd_stochastic_rounding"
            raise self._no_equal(field, "has no equal", "pass 'uniform' and leave noise axes out.")
        if dy.numerics != numerics.qwix:
            problem = "has no effect in Qwix on floats"
            raise self._no_equal("bwd_stochastic_rounding", problem, "leave it out.")
        noisy = [
            Rounded(dataclasses.replace(spec, numerics=numerics.ngraph), "stochastic")
            for spec in (dy, dy_of_rows)
        ]
        return Products((x, w), (noisy[0], w), (x_of_rows, noisy[1]), "rounded")

    def _size(self, field: str) -> int | float | None:
        """Returns the size of tiles, or their share of an axis; that of 1 is the whole axis."""
        size = self.fields[field]
        if not size or (isinstance(size, float) and size == 1):
            return None
        if type(size) not in (int, float) or size < 0 or (isinstance(size, float) and size > 1):
            fix = "give the number of elements of a tile, or a share of the axis as a float."
            raise self._no_equal(field, "is neither a size nor a share", fix)
        return size

    def _spec(self, role: str, tiled: bool = True) -> QSpec | None:
        """Returns how weights ("weight"), activations ("act") or gradients ("bwd") are rounded."""
        qtype = self.fields[f"{role}_qtype"]
        if qtype is None:
            return None
        try:
            name = qtype if isinstance(qtype, str) else jnp.dtype(qtype).name
        except TypeError:
            name = ""
        if name not in _FORMATS:
            fix = f"pass one of {', '.join(sorted(_FORMATS))}, or write the jqx.Rule yourself."
            raise self._no_equal(f"{role}_qtype", "is no format of both Qwix and jqx", fix)
        size = self._size("tile_size") if tiled and role != "bwd" else None
        is_static = role == "act" and bool(self.fields["act_static_scale"])
        is_whole = bool(self.fields["disable_channelwise_axes"])
        if size and (is_static or is_whole):
            field = "act_static_scale" if is_static else "disable_channelwise_axes"
            raise self._no_equal(field, "has no equal with tile_size", "leave one of both out.")
        calibrator, is_symmetric = self._calibrator(f"{role}_calibration_method")
        options: dict[str, Any] = {"symmetric": is_symmetric, "calibrator": calibrator}
        if name in _BLOCKS:
            if size != 32 or calibrator != absmax:
                fix = "set tile_size=32, and leave the calibration method out."
                raise self._no_equal(f"{role}_qtype", "has blocks of 32, with absmax", fix)
            options["calibrator"] = ceil
        if name.startswith("int"):
            options["numerics"] = numerics.qwix
        granularity: Granularity = PerTile(size) if size else per_channel()
        if is_static or is_whole or type(calibrator) is type(fixed(0, 1)):
            granularity = per_tensor()
        is_dynamic = role == "act" and not is_static
        return QSpec(_BLOCKS.get(name, name), granularity, dynamic=is_dynamic, **options)

    def _calibrator(self, field: str) -> tuple[Any, bool]:
        """Returns a calibrator, and whether it is symmetric."""
        text = self.fields[field] or "absmax"
        where = f"{field} of rule {self.index}"
        check_instance("interop.from_qwix", where, text, str, fix="pass 'absmax'.")
        fix = "pass 'absmax' or 'minmax', with or without a factor above 0 as in 'absmax,0.8', "
        fix += "'rms,<multiple>' or 'fixed,<low>,<high>'."
        method, *args = text.lower().split(",")
        try:
            values = [float(number) for number in args]
        except ValueError:
            raise self._no_equal(field, "has an argument that is no number", fix) from None
        match method, values:
            case "absmax" | "minmax", [] | [_] if all(factor > 0 for factor in values):
                calibrator = {"absmax": absmax, "minmax": minmax}[method]
                factor = values[0] if values else 1.0
                return dataclasses.replace(calibrator, factor=factor), method == "absmax"
            case "rms", [multiple] if multiple > 0:
                return rms(multiple), True
            case "fixed", [high] if high > 0:
                return fixed(-high, high), True
            case "fixed", [low, high] if low <= 0 <= high and low < high:
                return fixed(low, high), low == -high
        raise self._no_equal(field, "has no equal", fix)


def _fail(problem: str, **parts: Any) -> Exception:
    return fail("interop.from_qwix", problem, **parts)
