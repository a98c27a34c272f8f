"""`to_litert`: a function, with its weights and its plan, as a model of LiteRT (TensorFlow Lite).

The converter of LiteRT reads a program of JAX in which arrays are marked as fake quantized. Between
them it looks for operations that its int8 kernels compute. Here sites are marked as the plan says,
and afterwards each must have become one of these operations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from .. import Plan, QSpec, QTensor
from . import compat
from .checks import called
from .compat import Eqn
from .errors import fail, some
from .numerics.exact import RoundMode
from .numerics.lookup import format_of
from .onnx.export import Scales, input_name, is_of_params, output_names, with_parameters
from .policy import pattern_of
from .statistics.calibrators import Affine
from .transforms.integers import OnIntegers, contracted, quantized_leaves
from .transforms.interpret import view
from .transforms.plan import Site
from .transforms.trace import Call
from .transforms.views import real_of
from .transforms.walk import Domain, Where, walk

_NAME = "interop.to_litert"

_WEIGHTS = {"int8": "i8", "int8_narrow": "i8", "int4": "i4", "int4_narrow": "i4"}
"""The formats of weights, and what the converter calls them."""

_NEAREST = (RoundMode.NEAREST_TOWARD_EVEN, RoundMode.NEAREST_TOWARD_INFINITY)
"""How LiteRT rounds activations: XNNPACK ties to even, and the reference kernels away from zero."""

_MOVES = ("dequantize", "reshape", "transpose", "no_value")
"""Operations of LiteRT that may have floats at a site."""


def _converter() -> list[Any]:
    """Returns the modules of the converter, or raises an error that says how to install it."""
    try:
        names = ("converter_api_ext", "mlir.ir", "mlir.passmanager")
        return [importlib.import_module(f"litert_converter.{name}") for name in names]
    except ImportError as error:
        problem, fix = "litert-converter is not installed.", "pip install 'jqx[litert]'"
        raise fail(_NAME, problem, fix=fix, error=ImportError) from error


@called(
    "interop.to_litert", "call it in two steps: to_litert(quantized)(x), or to_litert(f, p)(x)."
)
def to_litert(
    f: Callable[..., Any],
    params: Any = None,
    *,
    plan: Plan | None = None,
    affines: Mapping[str, Affine] | None = None,
) -> Callable[..., bytes]:
    """Returns a function that writes `f` as a model of LiteRT (TensorFlow Lite), with its weights.

    Products of static int8 activations and int8 or int4 weights run in int8 kernels. These round
    their results too. The scale is that of the next site, if only a bias and a ReLU are between
    them. Everywhere else the plan must have one: `output="int8"` in the rule.

    Args:
      f: what `jqx.ptq` returns; or a function, whose first argument are the parameters.
      params: the parameters of a function.
      plan: the plan of a function; `None` writes it in float.
      affines: scales of activations and results, if the plan has static ones.

    Returns:
      A function of the other arguments, arrays or `jax.ShapeDtypeStruct`. It returns the bytes of a
      TFLite file with one signature, `serving_default`. Its inputs are the arrays among the
      arguments in order, named by their places, and its outputs are those of the result.

    Raises:
      ImportError: litert-converter is not installed.
      ValueError: an argument has a size that is not known, or is a QTensor.
      NotImplementedError: LiteRT has no kernel for a site as it is planned, or for another
        operation of `f`.

    Example:
      >>> import jqx, jax.numpy as jnp
      >>> from jqx.interop import to_litert
      >>> f = lambda w, x: x @ w
      >>> plan = jqx.make_plan(f, jqx.presets.w8a16())(jnp.eye(4), jnp.ones((2, 4)))
      >>> file = to_litert(f, jnp.eye(4), plan=plan)(jnp.ones((2, 4)))  # doctest: +SKIP
    """
    converter = _converter()
    traced = with_parameters(_NAME, f, params, plan, affines)
    return lambda *args, **kwargs: _model(converter, *traced(*args, **kwargs))


def _model(
    converter: Sequence[Any], call: Call, plan: Plan, affines: Mapping[str, Affine]
) -> bytes:
    """Returns the file of a traced call."""
    api, ir, passmanager = converter
    leaves = quantized_leaves(call, call.leaves, OnIntegers(plan, affines, call=call))
    leaves = [x.unpack() if isinstance(x, QTensor) else x for x in leaves]
    pairs = enumerate(zip(call.paths, call.keys, strict=True))
    places = [i for i, (path, keys) in pairs if path is None and not is_of_params(keys, plan)]
    names = [input_name(call.keys[i], plan) for i in places]
    avals = [call.jaxpr.invars[i].aval for i in places]
    for name, i, aval in zip(names, places, avals, strict=True):
        if isinstance(leaves[i], QTensor) or any(map(export.is_symbolic_dim, aval.shape)):
            problem = f"{name!r} is not an array of known sizes, which is all that LiteRT takes."
            given = repr(leaves[i]) if isinstance(leaves[i], QTensor) else f"shape {aval.shape}"
            raise fail(_NAME, problem, given=given, fix="pass an array, with integers as sizes.")
    marks = _Marks(plan, Scales.of(call, affines), {})

    def run(*inputs: jax.Array) -> list[Any]:
        values = list(leaves)
        for i, x in zip(places, inputs, strict=True):
            values[i] = x
        return list(map(real_of, walk(marks, call.jaxpr, values, consts=call.consts)))

    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    lowered = jax.jit(run).trace(*structs).lower(lowering_platforms=("cpu",))
    text = lowered.as_text("stablehlo", debug_info=True)  # with the scopes of sites
    context = ir.Context()
    api.prepare_mlir_context(context)
    with context:
        module = ir.Module.parse(text)
        api.set_signature(module.operation, "serving_default", names, output_names(call))
        config = api.ConvertToTFLConfig()
        config.strict_qdq_mode = True
        passes = passmanager.PassManager()
        try:
            api.run_convert_to_tfl_passes(module, passes, config)
            passes.run(module.operation)
            _check(module.operation, marks.sites)
            return bytes(api.export_flatbuffer_to_bytes(module.operation))
        except (ir.MLIRError, ValueError) as error:
            problem = "the converter of LiteRT does not take this function."
            given = str(error).strip().partition("\n")[0]
            kind = NotImplementedError
            raise fail(_NAME, problem, given=given, fix=_ELSEWHERE, error=kind) from error


@dataclasses.dataclass(frozen=True)
class _Marks(Domain[Any]):
    """Evaluates a call with its sites marked. What is known of a value is the value itself: an
    array, a tracer, or a QTensor, whose codes and scales are at hand.

    Attributes:
      sites: the sites that are products of codes, by their scopes in the program.
    """

    plan: Plan
    scales: Scales
    sites: dict[str, Site]

    unrolls = True

    def literal(self, atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype)

    def constant(self, array: Any) -> Any:
        return array

    def enters(self, eqn: Eqn, values: list[Any], where: Where) -> bool:
        return eqn.primitive.name not in ("cond", "while")

    def part(self, value: Any, step: int) -> Any:
        with _at_once(value):
            return value[step]

    def stack(self, values: list[Any], aval: Any) -> Any:
        rows = list(map(real_of, values))
        return jnp.stack(rows) if rows else jnp.zeros(aval.shape, aval.dtype)

    def start(self, eqn: Eqn, values: list[Any], where: Where) -> list[Any]:
        return values

    def evaluate(self, eqn: Eqn, values: list[Any], where: Where) -> Sequence[Any]:
        with compat.equation_context(eqn):
            if where.is_marked and (site := self.plan.site_at(where.address)) is not None:
                return [self._at_site(site, eqn, values, where)]
            if where.is_marked and (keys := self.plan.keys_in(where.address)):
                site = self.plan.site_of_key(min(keys))
                facts = "sites that always run, a known number of times"
                raise _refusal(site, f"inside of `{eqn.primitive.name}`", facts, _in_float(site))
            if any(isinstance(x, QTensor) for x in values):
                with _at_once(*values):
                    views = view(eqn, values)
                if views is not None:
                    return views
            return compat.bind(eqn, list(map(real_of, values)))

    def _at_site(self, site: Site, eqn: Eqn, values: list[Any], where: Where) -> Any:
        scales = {key: self.scales.at(site, key, where) for key in site.keys}
        known = {key: affine for key, affine in scales.items() if affine is not None}
        if all(map(compat.is_concrete, jax.tree.leaves(values))):
            with _at_once(*values):
                return OnIntegers(self.plan, known).at_site(site, eqn, values)[0]
        scope = re.sub(r"[^ !#-\[\]-~]", "_", f"jqx[{site.name}]")  # nothing that a program escapes
        with jax.named_scope(scope):
            if site.op == "gather":
                result, restored = _looked_up(site, eqn, values), lambda result: result
            elif site.op in ("dot_general", "conv_general_dilated"):
                marked = list(values)
                for i, operand in enumerate(site.operands):
                    if operand.role == "activation" and operand.spec is not None:
                        marked[i] = _activation(site, values[i], operand.spec, scales[operand.key])
                        self.sites[scope] = site
                product, operands, restored = _as_product(eqn, marked)
                operands = [_weight(site, x) if isinstance(x, QTensor) else x for x in operands]
                (result,) = compat.bind(product, operands)
            else:
                raise _refusal(site, site.op, "products and convolutions", _in_float(site))
            if site.output is not None:
                result = _activation(site, result, site.output, scales[site.output_key])
            return restored(result)


def _looked_up(site: Site, eqn: Eqn, values: list[Any]) -> jax.Array:
    """Looks up codes and scales of rows, and multiplies them."""
    table = values[0]
    if isinstance(table, QTensor) and (codes := table.codes).dtype.name not in ("int8", "uint8"):
        fix = _fix(site, 'weight="int8", tables="int8"')
        raise _refusal(site, f"codes in {codes.dtype.name}", "codes of a byte", fix)
    return contracted(eqn, values)


def _as_product(eqn: Eqn, values: list[Any]) -> tuple[Eqn, list[Any], Callable[[Any], Any]]:
    """Returns a product as kernels have it, with a matrix as its weight on the right: the equation,
    its operands, and what makes its result that of the given equation.
    """
    dims, is_weight = eqn.params["dimension_numbers"], [isinstance(x, QTensor) for x in values]
    if eqn.primitive.name != "dot_general" or any(dims[1]) or not any(is_weight):
        return eqn, values, lambda result: result
    flat = []
    for x, axes, is_matrix in zip(values, dims[0], is_weight, strict=True):
        kept = [i for i in range(x.ndim) if i not in axes]
        sizes, count = [x.shape[i] for i in kept], math.prod(x.shape[i] for i in axes)
        with _at_once(x):
            x = x.transpose((*kept, *axes))
            flat.append(x.reshape((*([math.prod(sizes)] if is_matrix else sizes), count)))
    if is_swapped := is_weight[0]:
        flat.reverse()
    dims = (tuple((x.ndim - 1,) for x in flat), ((), ()))

    def restored(result: Any) -> Any:
        result = jnp.moveaxis(result, -1, 0) if is_swapped else result
        return result.reshape(eqn.outvars[0].aval.shape)

    return eqn.replace(params={**eqn.params, "dimension_numbers": dims}), flat, restored


@contextlib.contextmanager
def _at_once(*values: Any) -> Iterator[None]:
    """Evaluates what depends on known values alone, so that the program has scales as numbers."""
    is_known = all(map(compat.is_concrete, jax.tree.leaves(values)))
    with jax.ensure_compile_time_eval() if is_known else contextlib.nullcontext():
        yield


# Marks.


def _weight(site: Site, q: QTensor) -> jax.Array:
    """Returns a weight, marked with its scales."""
    with jax.ensure_compile_time_eval():
        scale, codes, real = map(np.asarray, (q.real_scale(), q.codes, q.dequantize()))
    form, axes = format_of(q.qtype), [i for i, n in enumerate(scale.shape) if n != 1]
    is_blocked = any(scale.shape[i] != q.shape[i] for i in axes)
    if form.name not in _WEIGHTS or q.zero_point is not None or len(axes) > 1 or is_blocked:
        facts = "weights in int8 or int4, symmetric, with one scale for each index of one axis"
        fix = _fix(site, f'weight="int8{":tensor" if len(axes) > 1 and not is_blocked else ""}"')
        raise _refusal(site, repr(q), facts, fix)
    if codes.min(initial=0) < -form.high:
        fix = _fix(site, f"weight=jqx.QSpec(jqx.numerics.Integer({form.bits}, narrow=True), ...)")
        facts = f"codes from {-form.high} to {form.high}"
        raise _refusal(site, f"the code {codes.min()}", facts, fix)
    axis = {"quantization_dimension": np.int32(axes[0])} if axes else {}
    return _marked(real, _WEIGHTS[form.name], scale, None, narrow_range=True, **axis)


def _activation(site: Site, x: Any, spec: QSpec, affine: Affine | None) -> jax.Array:
    """Returns an activation or a result, marked with its scale and zero point."""
    is_plain = format_of(spec.qtype).name == "int8" and spec.rounding in _NEAREST
    if affine is None or np.size(affine[0]) != 1 or not is_plain:
        facts = "activations and results in int8, with one static scale, rounded to nearest"
        raise _refusal(site, str(spec), facts, _fix(site, 'weight="int8", activation="int8"'))
    return _marked(x, "i8", *affine, narrow_range=False)


def _marked(x: Any, dtype: str, scale: Any, zero_point: Any, **attributes: Any) -> jax.Array:
    """Marks an array as fake quantized, in the form that the converter reads."""
    scale = np.asarray(scale, np.float32).ravel()
    zero_point = np.zeros(scale.shape) if zero_point is None else np.asarray(zero_point)
    attributes |= {"scale": scale, "zero_point": zero_point.astype(np.int64).ravel()}
    mark = jax.lax.composite(lambda x, **_: x, "quant.fake_quant")
    return mark(x, dtype=dtype, **attributes)


# Errors.

_ELSEWHERE = "write this part of the function in another way, or compute it outside."


def _refusal(site: Site, given: str, expected: str, fix: str) -> Exception:
    """Returns the error of a site that has no kernel."""
    problem = f"LiteRT has no kernel for {site.op} at path {site.path!r} as it is planned."
    return fail(_NAME, problem, given=given, expected=expected, fix=fix, error=NotImplementedError)


def _fix(site: Site, specs: str) -> str:
    pattern = repr(pattern_of(site.path))
    return (
        f"put jqx.Rule({pattern}, {specs}) first in the policy, or jqx.Rule({pattern}) for float."
    )


def _in_float(site: Site) -> str:
    return f"leave it in float with jqx.Rule({pattern_of(site.path)!r}) first in the policy."


def _check(module: Any, sites: Mapping[str, Site]) -> None:
    """Raises if an operation has no kernel, if a product of codes became one of floats, or if the
    converter has rounded a bias wrongly.
    """
    others: set[str] = set()
    floats: list[str] = []
    biases: list[str] = []
    for op in _operations(module):
        dialect, _, name = op.name.partition(".")
        if dialect not in ("tfl", "arith", "func", "builtin"):
            others.add(op.name)
        if dialect != "tfl" or name in _MOVES:
            continue
        place = str(op.location)
        for scope in [x for x, site in sites.items() if f"{x}/{site.op}" in place]:
            floats += [scope for x in op.results if "!quant.uniform<i" not in str(x.type)]
            biases += [scope for x in op.operands if _is_same_code(x)]
    if others:
        problem = f"LiteRT has no kernel for operations of `f`: {some(sorted(others))}."
        raise fail(_NAME, problem, fix=_ELSEWHERE, error=NotImplementedError)
    without = [scope for scope in floats if sites[scope].output is None]
    if not floats and not biases:
        return
    problem = "LiteRT has no int8 kernel for products of int8, and would compute them in float."
    fix = 'leave their activations in float: weight="int8" alone.'
    if without:
        problem = "LiteRT would compute products of int8 in float: their results have no scale."
    elif not floats:
        problem = "the converter of LiteRT rounds a bias wrongly whose values are all the same."
    paths = list(dict.fromkeys(sites[scope].path for scope in without or floats or biases))
    if without or not floats:
        rule = f'jqx.Rule({"|".join(map(pattern_of, paths))!r}, ..., output="int8")'
        fix = f"put {rule} first in the policy, with the other specs as they are."
    given = f"at paths {some(map(repr, paths))}"
    raise fail(_NAME, problem, given=given, fix=fix, error=NotImplementedError)


def _is_same_code(x: Any) -> bool:
    """Whether a bias has one code, although its channels have scales: that of the first channel."""
    if "!quant.uniform<i32:f32:0, {" not in str(x.type) or x.owner.name != "tfl.pseudo_qconst":
        return False
    return re.match(r"dense<-?[1-9]\d*>", str(x.owner.attributes["value"])) is not None


def _operations(op: Any) -> Iterator[Any]:
    """Yields an operation and all inside of it."""
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _operations(inner.operation)
