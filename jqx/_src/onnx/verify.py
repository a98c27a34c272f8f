"""`verify_onnx`: a model of ONNX in onnxruntime beside the function that it was written from."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import importlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from ... import QTensor, Quantized
from ..checks import called, check_instance
from ..compat import Eqn
from ..diagnostics.report import sqnr
from ..errors import fail
from ..table import Table, Tabular, decibels
from ..transforms.arguments import check_function
from ..transforms.calibrate import arguments_of
from ..transforms.higher_order import Records
from ..transforms.integers import OnIntegers, quantized_leaves
from ..transforms.interpret import interpret
from ..transforms.make_plan import as_plan
from ..transforms.plan import Site
from ..transforms.trace import trace_call
from ..transforms.views import real_of
from .export import SITES, named
from .graph import onnx_module, onnx_type


@dataclasses.dataclass(frozen=True)
class FileSite:
    """A site in a file beside the same site in the function, both with what came before them.

    Attributes:
      path: what tables call the site.
      step: which run of the site this is, if it is in a scan; otherwise 0.
      differing: the share of the codes of its activations that differ; NaN if these are in float,
        or are an image of a float convolution, which a file rounds after turning its axes.
      sqnr: signal-to-noise ratio of its result in the file relative to that in the function, in dB;
        infinite if both are equal.
      max_error: the largest absolute difference of the results.
    """

    path: str
    step: int
    differing: float
    sqnr: float
    max_error: float


@dataclasses.dataclass(frozen=True)
class FileComparison(Tabular):
    """The result of `verify_onnx`. Prints as a table.

    Attributes:
      sites: in the order of the file; without those inside of its branches and loops, and without
        lookups.
      result: the results of the file, run operation by operation as it is written.
      optimized: the results of the file as onnxruntime runs it by default, which rewrites it.
    """

    sites: tuple[FileSite, ...]
    result: FileSite
    optimized: FileSite

    def table(self) -> Table:
        """Returns the rows as text."""
        steps = collections.Counter(site.path for site in self.sites)
        rows = [
            (
                f"{row.path}[{row.step}]" if steps[row.path] > 1 else row.path,
                "-" if np.isnan(row.differing) else f"{row.differing:.3%}",
                decibels(row.sqnr),
                f"{row.max_error:.3g}",
            )
            for row in (*self.sites, self.result, self.optimized)
        ]
        return Table(("site", "codes that differ", "SQNR dB", "max error"), tuple(rows))


@called("interop.verify_onnx", "call it in two steps: verify_onnx(model, quantized)(x).")
def verify_onnx(model: Any, quantized: Callable[..., Any]) -> Callable[..., FileComparison]:
    """Returns a function that runs a model of ONNX in onnxruntime and compares it with the
    quantized function, site by site.

    Both run the whole function, so that a code which differs at one site changes what later sites
    get. In the table, a site at which many codes differ at once is where the two part. Values of
    sites are those of the file as it is written; what onnxruntime makes of it by default, in fused
    operations, is compared in the last row.

    Args:
      model: the `onnx.ModelProto` that `jqx.interop.to_onnx` has written, or the path of its file.
      quantized: what `jqx.ptq` returned, from which the model was written.

    Returns:
      A function of the other arguments, arrays, that returns a `FileComparison`.

    Raises:
      ImportError: onnx or onnxruntime is not installed.
      TypeError: `model` is not a model, or `quantized` is not the result of `jqx.ptq`.
      ValueError: the model was not written by this version of jqx, or takes other arguments.

    Example:
      >>> import jqx, jax, jax.numpy as jnp
      >>> from jqx.interop import to_onnx, verify_onnx
      >>> f = lambda w, x: x @ w
      >>> x = jnp.linspace(-1.0, 1.0, 64).reshape(4, 16)
      >>> quantized = jqx.ptq(f, jqx.presets.w8a8(), progress=False)(x.T, [x])
      >>> found = verify_onnx(to_onnx(quantized)(x), quantized)(x)
      >>> found.sites[0].differing, found.result.sqnr > 100
      (0.0, True)
    """
    name = "interop.verify_onnx"
    onnx, runtime = onnx_module(), _runtime()
    check_instance(name, "quantized", quantized, Quantized, fix="pass what jqx.ptq returned.")
    # The signature does not say it: Sphinx knows several classes of this name.
    assert isinstance(quantized, Quantized)
    check_function(name, quantized.source)
    if isinstance(model, (str, os.PathLike)):
        model = onnx.load(os.fspath(model))
    fix = "pass the result of jqx.interop.to_onnx, or the path of its file."
    check_instance(name, "model", model, onnx.ModelProto, fix=fix)
    sites = next((x.value for x in model.metadata_props if x.key == SITES), None)
    if sites is None:
        problem = "`model` does not say where its sites are."
        raise fail(name, problem, expected="a model of jqx.interop.to_onnx", fix=fix)
    listed = json.loads(sites)
    used = (x for _, operands, result, *_ in listed for x in (*operands.values(), result))
    names = list(dict.fromkeys(used))

    def compared(*args: Any, **kwargs: Any) -> FileComparison:
        arrays = [np.require(x, requirements="C") for x in jax.tree.leaves((args, kwargs))]
        types = [x.type.tensor_type.elem_type for x in model.graph.input]
        if [onnx_type(x.dtype) for x in arrays] != types:
            problem = f"the model takes {len(types)} arrays, of other dtypes than those given."
            facts = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in arrays)
            fix = "pass the arguments that the model was written for."
            raise fail(name, problem, given=facts, fix=fix)
        levels, count = runtime.GraphOptimizationLevel, len(model.graph.output)
        found = _run(runtime, _with_outputs(onnx, model, names), arrays, levels.ORT_DISABLE_ALL)
        optimized = _run(runtime, _with_outputs(onnx, model, []), arrays, levels.ORT_ENABLE_ALL)
        in_file = dict(zip(names, found[count:], strict=True))
        outputs = [x.name for x in model.graph.output]
        results, at_sites = _recorded(quantized, args, kwargs, outputs)
        labels = {site.output_key: site.label for site in quantized.plan.sites}
        steps: collections.Counter[str] = collections.Counter()
        rows = []
        for key, operands, result, *bias in listed:
            codes, y = at_sites[key][steps[key]]
            if bias:
                y = _with_bias(onnx, model, y, *bias)
            pairs = [(in_file[x], codes[int(i)]) for i, x in operands.items()]
            equal = [_as_in_file(x, a) == a for a, x in pairs]
            differing = 1 - np.concatenate([x.ravel() for x in equal]).mean() if equal else np.nan
            rows.append(_row(labels[key], steps[key], float(differing), [in_file[result]], [y]))
            steps[key] += 1
        whole = _row("result", 0, np.nan, found[:count], results)
        rewritten = _row("result, optimized", 0, np.nan, optimized, results)
        return FileComparison(tuple(rows), whole, rewritten)

    return compared


def _runtime() -> Any:
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        problem, fix = "onnxruntime is not installed.", "pip install onnxruntime"
        raise fail("interop.verify_onnx", problem, fix=fix, error=ImportError) from error


def _with_outputs(onnx: Any, model: Any, names: Sequence[str]) -> Any:
    """Returns a copy of a model with more outputs, and float32 in place of bfloat16, which NumPy
    does not have.
    """
    model, helper = copy.deepcopy(model), onnx.helper
    bfloat16 = onnx.TensorProto.BFLOAT16
    inferred = onnx.shape_inference.infer_shapes(model) if names else model
    types = {x.name: x.type.tensor_type.elem_type for x in inferred.graph.value_info}
    outputs = [(x.name, x.type.tensor_type.elem_type) for x in model.graph.output]
    del model.graph.output[:]
    for name, kind in [*outputs, *((x, types[x]) for x in names)]:
        if kind == bfloat16:
            wide = f"{name} in float32"
            model.graph.node.append(helper.make_node("Cast", [name], [wide], to=1))
            name, kind = wide, onnx.TensorProto.FLOAT
        model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    return model


def _run(runtime: Any, model: Any, arrays: Sequence[np.ndarray], level: Any) -> list[np.ndarray]:
    options = runtime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 3
    session = runtime.InferenceSession(model.SerializeToString(), options)
    feeds = {}
    for node, x in zip(session.get_inputs(), arrays, strict=True):
        of_numpy = runtime.OrtValue.ortvalue_from_numpy
        if x.dtype.name == "bfloat16":
            of_numpy = runtime.OrtValue.ortvalue_from_numpy_with_onnx_type
            feeds[node.name] = of_numpy(x.view(np.uint16), onnx_type(x.dtype))
        else:
            feeds[node.name] = of_numpy(x)
    outputs = [x.name for x in session.get_outputs()]
    return [x.numpy() for x in session.run_with_ort_values(outputs, feeds)]


def _as_in_file(q: QTensor, in_file: np.ndarray) -> np.ndarray:
    """Returns codes in the form of a file: of 8 bits from its least code on, or as the numbers that
    they stand for.
    """
    if in_file.dtype.kind == "f":
        return np.asarray(q.dequantize(), np.float32)
    codes = np.asarray(q.unpack().values)
    moved = np.iinfo(in_file.dtype).min - np.iinfo(codes.dtype).min
    return codes.astype(np.int32) + moved


def _with_bias(onnx: Any, model: Any, y: np.ndarray, name: str, axis: int) -> np.ndarray:
    """Adds what a convolution of the file adds to its channels."""
    (stored,) = [x for x in model.graph.initializer if x.name == name]
    bias = onnx.numpy_helper.to_array(stored)
    return y + bias.reshape([-1 if i == axis else 1 for i in range(y.ndim)])


def _row(
    path: str,
    step: int,
    differing: float,
    found: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
) -> FileSite:
    """Returns the errors of arrays together."""
    a, b = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in arrays] or [np.zeros(0)])
        for arrays in (found, expected)
    )
    with np.errstate(invalid="ignore"):
        largest = np.abs(np.where(a == b, 0, a - b)).max(initial=0)
    return FileSite(path, step, differing, sqnr(b, a), float(largest))


# The function.


@dataclasses.dataclass(frozen=True)
class _Recording(OnIntegers):
    """Evaluates sites on codes, and keeps the codes and the result of each run of a site."""

    kept: dict[str, list[Any]] = dataclasses.field(default_factory=dict)

    def at_site(self, site: Site, eqn: Eqn, operands: Sequence[Any]) -> tuple[jax.Array, Records]:
        result, records = super().at_site(site, eqn, operands)
        codes = {
            i: QTensor.quantize(x, operand.spec, self.affines.get(operand.key))
            for i, (operand, x) in enumerate(zip(site.operands, operands, strict=False))
            if operand.role == "activation" and operand.spec and not isinstance(x, QTensor)
        }
        keep = functools.partial(self._keep, site.output_key)
        io_callback(keep, None, codes, result, ordered=True)
        return result, records

    def _keep(self, key: str, codes: dict[int, QTensor], result: jax.Array) -> None:
        self.kept.setdefault(key, []).append((codes, np.asarray(result)))


def _recorded(
    quantized: Quantized, args: Sequence[Any], kwargs: Any, outputs: Sequence[str]
) -> tuple[list[np.ndarray], dict[str, list[Any]]]:
    """Returns the results of a quantized function, of which a file has these outputs, and the codes
    and results at its sites.
    """
    name, plan, function = "interop.verify_onnx", quantized.plan, quantized.source
    assert function is not None
    arguments = arguments_of(plan, quantized.params, args)
    call = trace_call(name, function, plan.parameters, arguments, kwargs)
    positions: Any = plan.params
    fitted = as_plan(name, plan, call, positions)
    rules = _Recording(fitted, fitted.scales_of(name, quantized.affines), call=call)

    @jax.jit
    def run(leaves: Any) -> list[Any]:
        out, _ = interpret(call.jaxpr, call.consts, leaves, rules)
        pairs = named(call, out)
        # A state in codes has an output for its codes and one for its scales.
        return jax.tree.leaves([real_of(x) if name in outputs else x for name, x in pairs])

    results = list(map(np.asarray, run(quantized_leaves(call, call.leaves, rules))))
    jax.effects_barrier()
    return results, rules.kept
