"""The real runtimes behind one signature; each is imported where it is called.

Rows in, `(scale, zero_point, codes)` out, as NumPy arrays; `None` for what a runtime does not say.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import on_device

Result = tuple[Any, Any, Any]


@functools.cache
def _onnx_session(op: str, opset: int, qtype: str, inputs: int) -> Any:
    import onnxruntime
    from onnx import TensorProto, helper

    codes = getattr(TensorProto, qtype.upper())
    types = (TensorProto.FLOAT, TensorProto.FLOAT, codes)
    names = {"QuantizeLinear": ["y"], "DynamicQuantizeLinear": ["y", "scale", "zero_point"]}[op]
    node = helper.make_node(op, ["x", "s", "z"][:inputs], names)
    if op == "QuantizeLinear" and inputs == 2:
        node.attribute.append(helper.make_attribute("output_dtype", codes))
    value = helper.make_tensor_value_info
    taken = [value(n, t, None) for n, t in zip(["x", "s", "z"][:inputs], types, strict=False)]
    given = [
        value(n, t, None) for n, t in zip(names, (codes, TensorProto.FLOAT, codes), strict=False)
    ]
    graph = helper.make_graph([node], "g", taken, given)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 10
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def onnx_quantize(x: np.ndarray, scale: Any, zero_point: int | None, qtype: str) -> np.ndarray:
    """ONNX QuantizeLinear."""
    feed = {"x": x, "s": np.asarray(scale, np.float32)}
    if zero_point is not None:
        feed["z"] = np.asarray(zero_point).astype(qtype)
    return _onnx_session("QuantizeLinear", 21, qtype, len(feed)).run(None, feed)[0]


def onnx_dynamic(x: np.ndarray) -> Result:
    """ONNX DynamicQuantizeLinear, row by row."""
    run = _onnx_session("DynamicQuantizeLinear", 11, "uint8", 1).run
    codes, scales, zero_points = zip(*(run(None, {"x": row}) for row in x), strict=True)
    return np.stack(scales)[:, None], np.stack(zero_points)[:, None], np.stack(codes)


def onnx_symmetric(x: np.ndarray) -> Result:
    """The scale that onnxruntime's quantization tool finds."""
    from onnxruntime.quantization.quant_utils import compute_scale_zp

    bounds = np.array(-127, np.int8), np.array(127, np.int8)
    scales = [compute_scale_zp(r.min(), r.max(), *bounds, symmetric=True)[1] for r in x]
    return np.stack(scales)[:, None], None, None


def torchao(x: np.ndarray, low: int, high: int, mapping: str, eps: float | None) -> Result:
    """torchao's affine quantization primitives."""
    import torch
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        quantize_affine,
    )

    t, block = torch.from_numpy(x), (1, x.shape[-1])
    codes = torch.int8 if low < 0 else torch.uint8
    real, integer = torch.float32, torch.int32
    s, z = choose_qparams_affine(
        t, MappingType[mapping], block, codes, low, high, eps, real, integer, keepdim=True
    )
    q = quantize_affine(t, block, s, z, codes, low, high)
    symmetric = mapping != "ASYMMETRIC"
    return s.numpy(), None if symmetric else z.numpy(), q.numpy()


def qwix(x: np.ndarray, qtype: str, method: str) -> Result:
    """qwix's arrays, a scale for each row."""
    from qwix._src.core import qarray

    how = qarray.HowToQuantize(
        qtype=getattr(jnp, qtype), channelwise_axes=(0,), calibration_method=method
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        q = qarray.quantize(on_device(x), how)
    return q.scale, q.zero_point, q.qvalue


def nncf(x: np.ndarray, mode: str, optimized: bool, monkeypatch: Any) -> Result:
    """NNCF's integer weights, in NumPy or as OpenVINO compiles them."""
    from nncf import CompressWeightsMode
    from nncf.quantization.algorithms.weight_compression.config import WeightCompressionConfig
    from nncf.quantization.algorithms.weight_compression.weight_lowering import (
        do_integer_quantization,
    )
    from nncf.tensor import Tensor

    name = "NNCF_DISABLE_OPTIMIZED_COMPRESSION"
    monkeypatch.delenv(name, raising=False) if optimized else monkeypatch.setitem(
        os.environ, name, "1"
    )
    config = WeightCompressionConfig(mode=CompressWeightsMode[mode], group_size=-1)
    r = do_integer_quantization(Tensor(x), config, reduction_axes=(1,))
    zero_point = None if r.zero_point is None else np.asarray(r.zero_point.data)
    return np.asarray(r.scale.data), zero_point, np.asarray(r.tensor.data)


def tflite_quantize(x: np.ndarray, scale: Any, zero_point: int | None, qtype: str) -> np.ndarray:
    """TFLite's QUANTIZE, by its reference kernel."""
    import flatbuffers
    from ai_edge_litert import interpreter
    from ai_edge_litert import schema_py_generated as schema

    def tensor(kind: Any, buffer: int) -> Any:
        made = schema.TensorT()
        made.shape, made.type, made.buffer, made.name = [x.size], kind, buffer, f"t{buffer}"
        return made

    result = tensor(getattr(schema.TensorType, qtype.upper()), 2)
    result.quantization = schema.QuantizationParametersT()
    result.quantization.scale = [float(scale)]
    result.quantization.zeroPoint = [int(zero_point or 0)]
    code, op, graph, model = (
        schema.OperatorCodeT(),
        schema.OperatorT(),
        schema.SubGraphT(),
        schema.ModelT(),
    )
    quantize = schema.BuiltinOperator.QUANTIZE
    code.builtinCode, code.deprecatedBuiltinCode, code.version = quantize, quantize, 1
    op.opcodeIndex, op.inputs, op.outputs = 0, [0], [1]
    op.builtinOptionsType = schema.BuiltinOptions.QuantizeOptions
    op.builtinOptions = schema.QuantizeOptionsT()
    graph.tensors = [tensor(schema.TensorType.FLOAT32, 1), result]
    graph.inputs, graph.outputs, graph.operators = [0], [1], [op]
    model.version, model.operatorCodes, model.subgraphs = 3, [code], [graph]
    model.buffers = [schema.BufferT() for _ in range(3)]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    run = interpreter.Interpreter(
        model_content=bytes(builder.Output()),
        experimental_op_resolver_type=interpreter.OpResolverType.BUILTIN_REF,
        num_threads=1,
    )
    run.allocate_tensors()
    run.set_tensor(run.get_input_details()[0]["index"], x.ravel())
    run.invoke()
    return run.get_tensor(run.get_output_details()[0]["index"]).reshape(x.shape)
