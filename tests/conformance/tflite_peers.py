"""TFLite's operations on integers, by its reference kernels; imported where they are called.

Each takes the codes, scales and zero points of its operands and gives the codes of its result.
Scales are float32, of one element or, for the weights of a convolution, one for each channel.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


def quantize(x: np.ndarray, scales: Sequence[Any], zero_points: Sequence[int], qtype: str) -> Any:
    """QUANTIZE of int32, which has no zero point here."""
    tensors = [("int32", x.shape, scales[0], 0), (qtype, x.shape, scales[1], zero_points[1])]
    return _run("QUANTIZE", "QuantizeOptions", tensors, [x])


def mul(a: np.ndarray, b: np.ndarray, scales: Sequence[Any], zero_points: Sequence[int]) -> Any:
    """MUL of arrays of one shape and dtype, which is that of the result."""
    parts = zip(scales, zero_points, strict=True)
    tensors = [(a.dtype.name, a.shape, scale, zero) for scale, zero in parts]
    return _run("MUL", "MulOptions", tensors, [a, b], version=2)


def matmul(a: np.ndarray, b: np.ndarray, scales: Sequence[Any], zero_points: Sequence[int]) -> Any:
    """BATCH_MATMUL of int8 matrices."""
    shapes = a.shape, b.shape, (a.shape[0], b.shape[1])
    parts = zip(shapes, scales, zero_points, strict=True)
    tensors = [("int8", shape, scale, zero) for shape, scale, zero in parts]
    return _run("BATCH_MATMUL", "BatchMatMulOptions", tensors, [a, b], version=4)


def convolution(
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray,
    scales: Sequence[Any],
    zero_points: Sequence[int],
    relu: bool,
) -> Any:
    """CONV_2D of int8 with a window of 1 by 1: rows of `x` times columns of `w`, a bias added."""
    (rows, inner), columns = x.shape, w.shape[1]
    zero = np.zeros(columns, np.int64)
    tensors = [
        ("int8", (1, rows, 1, inner), scales[0], zero_points[0]),
        ("int8", (columns, 1, 1, inner), scales[1], zero),
        ("int32", (columns,), scales[0] * scales[1], zero),
        ("int8", (1, rows, 1, columns), scales[2], zero_points[2]),
    ]
    options = dict.fromkeys(("strideW", "strideH", "dilationWFactor", "dilationHFactor"), 1)
    options |= {"padding": 1, "fusedActivationFunction": int(relu)}
    constants = {1: np.ascontiguousarray(w.T), 2: bias}
    feeds = [x.reshape(1, rows, 1, inner)]
    y = _run("CONV_2D", "Conv2DOptions", tensors, feeds, constants, options, version=3)
    return y.reshape(rows, columns)


def _run(
    op: str,
    options_type: str,
    tensors: Sequence[tuple[str, Sequence[int], Any, Any]],
    feeds: Sequence[np.ndarray],
    constants: dict[int, np.ndarray] | None = None,
    options: dict[str, int] | None = None,
    version: int = 1,
) -> np.ndarray:
    """Runs a model of one operation, whose last tensor is its result."""
    import flatbuffers
    from ai_edge_litert import interpreter
    from ai_edge_litert import schema_py_generated as schema

    constants = constants or {}
    code, node = schema.OperatorCodeT(), schema.OperatorT()
    graph, model = schema.SubGraphT(), schema.ModelT()
    graph.tensors = []
    for i, (dtype, shape, scale, zero_point) in enumerate(tensors):
        tensor, how = schema.TensorT(), schema.QuantizationParametersT()
        tensor.shape, tensor.name, tensor.buffer = list(shape), f"t{i}", i + 1
        tensor.type = getattr(schema.TensorType, dtype.upper())
        how.scale = [float(s) for s in np.ravel(scale)]
        how.zeroPoint = [int(z) for z in np.ravel(zero_point)]
        tensor.quantization = how
        graph.tensors.append(tensor)
    last = len(tensors) - 1
    code.builtinCode = getattr(schema.BuiltinOperator, op)
    code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), version
    node.opcodeIndex, node.inputs, node.outputs = 0, list(range(last)), [last]
    node.builtinOptionsType = getattr(schema.BuiltinOptions, options_type)
    node.builtinOptions = getattr(schema, f"{options_type}T")()
    for name, value in (options or {}).items():
        assert hasattr(node.builtinOptions, name)
        setattr(node.builtinOptions, name, value)
    graph.inputs = [i for i in range(last) if i not in constants]
    graph.outputs, graph.operators = [last], [node]
    model.version, model.operatorCodes, model.subgraphs = 3, [code], [graph]
    model.buffers = [schema.BufferT() for _ in range(len(tensors) + 1)]
    for i, array in constants.items():
        model.buffers[i + 1].data = np.frombuffer(array.tobytes(), np.uint8)
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    run = interpreter.Interpreter(
        model_content=bytes(builder.Output()),
        experimental_op_resolver_type=interpreter.OpResolverType.BUILTIN_REF,
        num_threads=1,
    )
    run.allocate_tensors()
    for details, feed in zip(run.get_input_details(), feeds, strict=True):
        run.set_tensor(details["index"], feed)
    run.invoke()
    return run.get_tensor(run.get_output_details()[0]["index"])
