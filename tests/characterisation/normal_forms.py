"""Normal forms: what a plan, weights and a converted function are, by public names alone.

They leave out what may change without a change of behaviour: texts, private names, the order of
equations, and which operand of a product stands first.
"""

import collections
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jqx

REASONS = {
    "no rule matches": "no rule",
    "no weight reaches": "no weight",
    "leaves lookups in float": "rule: lookups in float",
    "leaves it in float": "rule: float",
    "for all its uses or for none": "another use in float",
    "is multiplied together with it": "multiplied with a weight in float",
    "fall under different rules": "several rules",
    "is computed from": "computed from weights",
    "closed over": "closed over",
    "drawn at random": "random",
    "not floats": "operands not float",
    "not a float": "weight not float",
    "f rounds": "rounded in the function",
    "cannot follow": "scales cannot follow",
    "only operands of contractions": "no operand of a contraction",
    "only views": "only views",
    "not a lookup along one axis": "no plain lookup",
    "would need its own scale": "rows of one number",
    "nothing uses it": "unused",
}
"""What a reason says, by words in it."""

BACKENDS = {
    "dot_general": "xla",
    "conv_general_dilated": "xla",
    "ragged_dot_general": "xla",
    "scaled_matmul": "xla",
    "pallas_call": "pallas",
    "ffi_call": "ffi",
}
"""What evaluates a primitive that is a contraction or a kernel."""

PLATFORMS = "cpu", "cuda", "tpu"


def digest(form: Any) -> str:
    """A short hash of a form, or of bytes."""
    raw = form if isinstance(form, bytes) else json.dumps(form, sort_keys=True).encode()
    return hashlib.sha256(raw).hexdigest()[:16]


def plan_form(plan: jqx.Plan) -> dict[str, Any]:
    """A plan: all of its public fields but texts and the source of its signature."""
    sites = [
        {
            "address": list(site.address),
            "path": site.path,
            "name": site.name,
            "scope": site.scope,
            "op": site.op,
            "operands": [
                [x.role, spec_form(x.spec), x.key, x.path, [list(axes) for axes in x.axes]]
                for x in site.operands
            ],
            "output": spec_form(site.output),
            "rule": site.rule,
            "loops": [[list(loop.address), loop.length] for loop in site.loops],
            "shapes": [list(shape) for shape in (*site.shapes, site.result)],
            "macs": site.macs,
            "codes": site.codes,
            "static": {key: list(site.scale_shape(key)) for key in site.static_specs()},
        }
        for site in plan.sites
    ]
    skipped = [
        [list(x.address), x.path, x.op, reason_form(x.reason), *map(list, x.shapes), x.macs]
        for x in plan.skipped
    ]
    weights = [
        [x.path, spec_form(x.spec), x.key, x.sites, x.contracted, list(x.moved), list(x.cut)]
        for x in plan.weights
    ]
    unreached = [[x.path, reason_form(x.reason), list(x.shape)] for x in plan.unreached]
    splits = [[x.path, x.axis, list(x.bounds)] for x in plan.splits]
    form = {"sites": sites, "skipped": skipped, "weights": weights, "unreached": unreached}
    return form | {"splits": splits, "names": [list(x) for x in plan.names]}


def spec_form(spec: jqx.QSpec | None) -> str | None:
    """A spec as it prints, with what it does not print."""
    if spec is None:
        return None
    gradient = "ste" if spec.gradient == jqx.gradients.ste else "another gradient"
    return f"{spec}, {spec.rounding.name}, {gradient}"


def reason_form(reason: str) -> str:
    """The kind of a reason."""
    kind = next((kind for words, kind in REASONS.items() if words in reason), None)
    assert kind is not None, f"name the kind of this reason in REASONS: {reason}"
    return kind


def is_codes(x: Any) -> bool:
    """Whether a leaf of parameters is quantized, whole or in parts."""
    return isinstance(x, (jqx.QTensor, jqx.Segments))


def tensors(params: Any) -> list[tuple[str, Any]]:
    """The QTensors and arrays of parameters, by path; parts of a stack are numbered."""
    found = []
    for keys, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_codes):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        parts = x.parts if isinstance(x, jqx.Segments) else None
        found += (
            [(path, x)] if parts is None else [(f"{path}[{i}]", y) for i, y in enumerate(parts)]
        )
    return found


def ordinals(codes: Any) -> np.ndarray:
    """Codes as integers, in which neighbours differ by one: those of floats by their bits."""
    codes = np.asarray(codes)
    if np.issubdtype(codes.dtype, np.integer) or codes.dtype.name.startswith(("int", "uint")):
        return codes.astype(np.int16)
    bits = codes.view(np.uint8).astype(np.int16)
    return np.where(bits < 128, bits, 128 - bits)


def codes_form(params: Any) -> dict[str, Any]:
    """Quantized weights, bit for bit: what describes them, and digests of codes and scales."""
    return {path: tensor_form(x) for path, x in tensors(params) if isinstance(x, jqx.QTensor)}


def tensor_form(q: jqx.QTensor) -> dict[str, Any]:
    """A QTensor, bit for bit."""
    name = getattr(q.qtype, "name", str(q.qtype))
    form = {"qtype": name, "dtype": str(q.dtype), "shape": list(q.shape), "blocks": list(q.blocks)}
    form["codes"] = digest(ordinals(q.codes).astype("<i2").tobytes())
    for field in ("scale", "zero_point", "offset", "order"):
        x = getattr(q, field)
        if isinstance(x, jqx.QTensor):
            form[field] = tensor_form(x)
        elif x is not None:
            x = np.asarray(x)
            form[field] = [x.dtype.name, list(x.shape), digest(x.tobytes())]
    return form


def kernels_form(jaxpr: Any) -> dict[str, list[int]]:
    """The contractions and kernels of a jaxpr: how often each is evaluated on each platform."""
    counts = [_kernels(jaxpr, platform, 1) for platform in PLATFORMS]
    return {kernel: [each[kernel] for each in counts] for kernel in sorted(set().union(*counts))}


def _kernels(jaxpr: Any, platform: str, times: int) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for eqn in _live(getattr(jaxpr, "jaxpr", jaxpr)):
        name = eqn.primitive.name
        if name in BACKENDS:
            found[_described(eqn)] += times
            continue
        bodies = list(_bodies(eqn.params))
        platforms = eqn.params.get("branches_platforms")
        if platforms:
            at = next(i for i, each in enumerate(platforms) if each is None or platform in each)
            bodies = bodies[at : at + 1]
        for body in bodies:
            found += _kernels(body, platform, times * eqn.params.get("length", 1))
    return found


def _live(jaxpr: Any) -> list[Any]:
    """The equations of a jaxpr on which its results and effects depend."""
    needed, live = {id(x) for x in jaxpr.outvars}, []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(id(x) in needed for x in eqn.outvars):
            live.append(eqn)
            needed |= {id(x) for x in eqn.invars}
    return live


def _bodies(params: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in params.values() if isinstance(params, dict) else params:
        if hasattr(getattr(value, "jaxpr", value), "eqns"):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from _bodies(value)


def _described(eqn: Any) -> str:
    """A contraction as [batch, rows, inputs] x [batch, inputs, columns], or a kernel."""
    name, backend = eqn.primitive.name, BACKENDS[eqn.primitive.name]
    operands, result = [x.aval for x in eqn.invars], eqn.outvars[0].aval
    a, b = (operands * 2)[:2]
    if name == "dot_general":
        (left, _), (batch, _) = eqn.params["dimension_numbers"]
        sizes = math.prod(a.shape[i] for i in batch), math.prod(a.shape[i] for i in left)
        rows, columns = (x.size // max(math.prod(sizes), 1) for x in (a, b))
    elif name == "conv_general_dilated":
        numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
        groups *= eqn.params["batch_group_count"]
        features = b.shape[numbers.rhs_spec[0]]
        sizes = groups, math.prod(b.shape) // features
        rows, columns = math.prod(result.shape) // features, features // groups
    elif name == "ragged_dot_general":
        sizes, rows, columns = b.shape[:2], a.shape[0], b.shape[-1]
    else:
        target = eqn.params.get("target_name", "")
        texts = (
            f"{x.dtype.name}{list(x.shape)}" for x in (*operands, *(y.aval for y in eqn.outvars))
        )
        return f"{backend} {name} {target} {' '.join(texts)}"
    sides = sorted((f"{rows} of {a.dtype.name}", f"{columns} of {b.dtype.name}"))
    return (
        f"{backend} {name} batch {sizes[0]} inputs {sizes[1]} {' x '.join(sides)}"
        f" -> {result.dtype.name}"
    )
