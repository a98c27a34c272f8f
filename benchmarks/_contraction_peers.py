"""The contractions as torch, onnxruntime and OpenVINO spell them, ready to be timed.

Each is given as many threads as XLA takes. Where a library does a problem only in another scheme,
the name of its variant says in which.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from _contraction_problems import (
    Attention,
    Conv,
    NotAvailable,
    Problem,
    Product,
    Variant,
    Variants,
)
from _harness import Call, threads

Factory = Callable[[Problem, np.ndarray, np.ndarray], Variants]

ENGINES = ("onednn", "fbgemm")  # torch's others are one of these (x86) or for ARM (qnnpack)


def peers() -> Iterator[tuple[str, Factory | None, str]]:
    """Yields a name, the variants, and the settings; or `None` and why there are no variants."""
    for name, needed, prepare in (
        ("torch", ("torch",), _torch),
        ("onnxruntime", ("onnxruntime", "onnx"), _onnxruntime),
        ("openvino", ("openvino", "openvino.opset13"), _openvino),
    ):
        try:
            factory, settings = prepare(*map(import_module, needed))
        except (ImportError, OSError) as error:  # OSError: a shared library does not load
            yield name, None, f"not available ({type(error).__name__}: {error})"
        else:
            yield name, factory, settings


def missing(name: str, why: str) -> Variant:
    """A variant that is not there, for a reason."""

    def make() -> Call:
        raise NotAvailable(why)

    return Variant(name, make)


def symmetric(x: np.ndarray, over: Any, bits: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Returns int8 codes and scales, with the axes that share one kept as 1."""
    scale = np.abs(x).max(axis=over, keepdims=True) / np.float32(2 ** (bits - 1) - 1)
    return np.round(x / scale).astype(np.int8), scale


def asymmetric(x: np.ndarray, over: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns uint8 codes, scales and zero points."""
    low, high = x.min(axis=over, keepdims=True), x.max(axis=over, keepdims=True)
    scale = (high - low) / np.float32(255)
    zero = np.round(-low / scale)
    codes = np.clip(np.round(x / scale) + zero, 0, 255)
    return codes.astype(np.uint8), scale, zero.astype(np.uint8)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Packs pairs along the last axis into bytes, the first in the lower half."""
    return np.ascontiguousarray((codes[..., ::2] & 15) | (codes[..., 1::2] << 4)).view(np.uint8)


def _torch(torch: Any) -> tuple[Factory, str]:
    torch.set_num_threads(threads())
    torch.set_grad_enabled(False)
    factory = partial(_torch_variants, torch)
    return factory, f"{threads()} threads, engines {', '.join(ENGINES)}"


def _torch_variants(torch: Any, problem: Problem, x: np.ndarray, w: np.ndarray) -> Variants:
    if isinstance(problem, Product) and problem.m == 1:
        buffer = torch.ones(problem.weight_bytes // 4)
        name = f"torch, read of {buffer.nbytes / 1e6:.2f} MB"
        yield Variant(name, lambda: lambda: torch.sum(buffer), bare=True)
    match problem:
        case Product(scheme="weight-only"):
            yield from _torch_weight_only(torch, problem, torch.tensor(x), torch.tensor(w.T.copy()))
        case Product():
            yield from _torch_products(torch, problem, x, w)
        case Conv():
            yield from _torch_convs(torch, problem, x, w)
        case Attention():
            for engine in ENGINES:
                make = partial(_torch_attention, torch, problem, engine, x, w)
                yield Variant(f"torch, {engine}, float products", make)


def _torch_products(torch: Any, p: Product, x: np.ndarray, w: np.ndarray) -> Variants:
    (a, a_scale), (b, b_scale) = symmetric(x, None), symmetric(w, 0)
    a, b, scale = torch.tensor(a), torch.tensor(b), torch.tensor(a_scale * b_scale)
    if p.m > 1:
        yield Variant("torch, _int_mm to int32", lambda: lambda: torch._int_mm(a, b), bare=True)
    match p.scheme:
        case "static":
            yield Variant("torch, _int_mm", lambda: lambda: torch._int_mm(a, b) * scale)
        case "asymmetric":
            make = partial(_torch_zero_points, torch, x, w)
            yield Variant("torch, fbgemm, uint8 out", make, lambda y: y.dequantize().numpy())
        case "dynamic":
            for engine in ENGINES:
                name = f"torch, {engine}, one scale for x"
                yield Variant(name, partial(_torch_dynamic, torch, engine, x, w))


def _torch_dynamic(torch: Any, engine: str, x: np.ndarray, w: np.ndarray) -> Call:
    linear, values = _torch_linear(torch, engine, w), torch.tensor(x)
    return lambda: linear(values)


def _torch_linear(torch: Any, engine: str, w: np.ndarray) -> Callable[[Any], Any]:
    """Returns a linear layer that quantizes what it is given, with one scale."""
    torch.backends.quantized.engine = engine
    codes = _torch_per_channel(torch, torch.tensor(w.T.copy()))
    packed = torch.ops.quantized.linear_prepack(codes, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, False)


def _torch_per_channel(torch: Any, w: Any) -> Any:
    """Quantizes a weight whose first axis is that of the channels."""
    scale = w.abs().flatten(1).amax(1) / 127
    return torch.quantize_per_channel(w, scale, torch.zeros(len(w)).int(), 0, torch.qint8)


def _torch_zero_points(torch: Any, x: np.ndarray, w: np.ndarray) -> Call:
    torch.backends.quantized.engine = "fbgemm"  # onednn takes none for weights
    _, scale, zero = asymmetric(x, None)
    codes = torch.quantize_per_tensor(torch.tensor(x), scale.item(), zero.item(), torch.quint8)
    _, scales, zeros = (torch.tensor(part.reshape(-1)) for part in asymmetric(w, 0))
    values = torch.tensor(w.T.copy())
    weight = torch.quantize_per_channel(values, scales, zeros.int() - 128, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    out_scale = 10 * x.std().item() / 255  # outputs are as wide as inputs: 5 sigma either way
    return lambda: torch.ops.quantized.linear(codes, packed, out_scale, 128)


def _torch_weight_only(torch: Any, p: Product, x: Any, w: Any) -> Variants:
    """`w` is [N, K]."""
    groups = w.reshape(p.n, -1, p.block or p.k)
    scale = groups.abs().amax(2) / (2 ** (p.bits - 1) - 1)
    codes = torch.round(groups / scale[..., None]).to(torch.int32).reshape(p.n, p.k)
    zero = torch.zeros(p.k // (p.block or p.k), p.n)
    affine = torch.stack([scale.T, zero], -1).contiguous()

    def make(dtype: Any) -> Call:
        given = x.to(dtype)
        if p.bits == 8:
            values, scales = codes.to(torch.int8), scale[:, 0].to(dtype)
            return lambda: torch._weight_int8pack_mm(given, values, scales)
        pack, product = torch._convert_weight_to_int4pack_for_cpu, torch._weight_int4pack_mm_for_cpu
        values, scales = pack(codes + 8, 2), affine.to(dtype)
        return lambda: product(given, values, p.block, scales)

    for dtype in (torch.float32, torch.bfloat16):
        name = f"torch, _weight_int{p.bits}pack_mm, {str(dtype).partition('.')[2]}"
        yield Variant(name, partial(make, dtype), lambda y: y.float().numpy())


def _torch_convs(torch: Any, p: Conv, x: np.ndarray, w: np.ndarray) -> Variants:
    images = torch.tensor(x).permute(0, 3, 1, 2)  # NCHW in shape, NHWC in memory
    kernel = torch.tensor(w.transpose(3, 2, 0, 1).copy())
    float32 = partial(torch.nn.functional.conv2d, padding=p.kernel // 2, groups=p.groups)

    def make(engine: str) -> Call:
        torch.backends.quantized.engine = engine
        codes = torch.quantize_per_tensor(images, images.abs().max() / 127, 128, torch.quint8)
        scale = (float32(images, kernel).abs().max() / 127).item()
        options = [1, 1], [p.kernel // 2] * 2, [1, 1], p.groups
        weight = _torch_per_channel(torch, kernel)
        packed = torch.ops.quantized.conv2d_prepack(weight, None, *options)
        return lambda: torch.ops.quantized.conv2d(codes, packed, scale, 128)

    def to_nhwc(y: Any) -> np.ndarray:
        return (y.dequantize() if y.is_quantized else y).permute(0, 2, 3, 1).numpy()

    yield Variant("torch, float32", lambda: lambda: float32(images, kernel), to_nhwc)
    for engine in ENGINES:
        yield Variant(f"torch, {engine}, uint8 out", partial(make, engine), to_nhwc)


def _torch_attention(torch: Any, p: Attention, engine: str, x: np.ndarray, w: np.ndarray) -> Call:
    *inner, last = [_torch_linear(torch, engine, matrix) for matrix in w]
    values = torch.tensor(x)

    def call() -> Any:
        q, k, v = (f(values).reshape(1, p.length, p.heads, -1).transpose(1, 2) for f in inner)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return last(y.transpose(1, 2).reshape(p.length, p.width))

    return call


def _onnxruntime(runtime: Any, onnx: Any) -> tuple[Factory, str]:
    return partial(_onnxruntime_variants, runtime, onnx), f"{threads()} threads, no spinning"


def _onnxruntime_variants(
    runtime: Any, onnx: Any, problem: Problem, x: np.ndarray, w: np.ndarray
) -> Variants:
    node = onnx.helper.make_node
    session = partial(_session, runtime, onnx)
    to_float = [node("Cast", ["i"], ["f"], to=onnx.TensorProto.FLOAT)]
    scaled = [node("MatMulInteger", ["x", "w"], ["i"]), *to_float, node("Mul", ["f", "s"], ["y"])]
    match problem:
        case Product(scheme="static"):
            (a, a_scale), (b, b_scale) = symmetric(x, None), symmetric(w, 0)
            constants = {"w": b, "s": a_scale * b_scale}
            bare = [node("MatMulInteger", ["x", "w"], ["y"])]
            if problem.m > 1:
                make = partial(session, bare, a, {"w": b}, np.int32)
                yield Variant("onnxruntime, MatMulInteger to int32", make, first, bare=True)
            make = partial(session, scaled, a, constants)
            yield Variant("onnxruntime, MatMulInteger", make, first)
        case Product(scheme="asymmetric"):
            (a, a_scale, a_zero), (b, b_scale, b_zero) = asymmetric(x, None), asymmetric(w, 0)
            constants = {"w": b, "s": a_scale * b_scale}
            constants |= {"a": a_zero.reshape(()), "b": b_zero.reshape(-1)}
            zeros = [node("MatMulInteger", ["x", "w", "a", "b"], ["i"]), *scaled[1:]]
            make = partial(session, zeros, a, constants)
            yield Variant("onnxruntime, uint8 zero points", make, first)
        case Product(scheme="dynamic"):
            b, b_scale = symmetric(w, 0)
            dynamic = [
                node("DynamicQuantizeLinear", ["x"], ["q", "a", "z"]),
                node("MatMulInteger", ["q", "w", "z"], ["i"]),
                *to_float,
                node("Mul", ["a", "s"], ["t"]),
                node("Mul", ["f", "t"], ["y"]),
            ]
            make = partial(session, dynamic, x, {"w": b, "s": b_scale})
            yield Variant("onnxruntime, one scale for x", make, first)
        case Product():
            for level, name in {0: "float32", 4: "int8 inside"}.items():
                make = partial(_matmul_n_bits, session, node, problem, x, w, level)
                block = problem.block or 128
                yield Variant(f"onnxruntime, blocks of {block}, {name}", make, first)
        case Conv():
            yield _qlinear_conv(session, node, problem, x, w)
        case Attention():
            yield missing("onnxruntime", "this benchmark builds no attention model for it")


def first(results: Sequence[Any]) -> np.ndarray:
    return results[0]


def _session(
    runtime: Any,
    onnx: Any,
    nodes: list[Any],
    x: np.ndarray,
    constants: dict[str, np.ndarray],
    result: Any = np.float32,
) -> Call:
    """Returns a call of a graph from "x" to "y"."""
    helper = onnx.helper

    def declare(name: str, dtype: Any, shape: Any = None) -> Any:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return helper.make_tensor_value_info(name, kind, shape)

    constants = {name: np.asarray(array) for name, array in constants.items()}
    graph = helper.make_graph(
        nodes,
        "contraction",
        [declare("x", x.dtype, x.shape)],
        [declare("y", result)],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")  # after each run
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(None, {"x": x})


def _matmul_n_bits(
    session: Any, node: Any, p: Product, x: np.ndarray, w: np.ndarray, level: int
) -> Call:
    block, half = p.block or 128, 2 ** (p.bits - 1)
    codes, scale = symmetric(w.T.reshape(p.n, -1, block), 2, p.bits)
    codes = (codes + np.int8(-128 if half == 128 else half)).view(np.uint8)  # wraps to + half
    attributes = {"K": p.k, "N": p.n, "bits": p.bits, "block_size": block, "accuracy_level": level}
    product = node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **attributes)
    weight = codes if p.bits == 8 else nibbles(codes)
    return session([product], x, {"w": weight, "s": scale[..., 0]})


def _qlinear_conv(session: Any, node: Any, p: Conv, x: np.ndarray, w: np.ndarray) -> Variant:
    images, image_scale = symmetric(x.transpose(0, 3, 1, 2), None)
    kernel, kernel_scale = symmetric(w.transpose(3, 2, 0, 1), (1, 2, 3))
    out_scale = np.float32(np.sqrt(x.var()) * 5 / 127)  # outputs are as wide as inputs: 5 sigma
    constants = {"a": image_scale.reshape(()), "z": np.zeros((), np.int8), "w": kernel}
    constants |= {"b": kernel_scale.reshape(-1), "c": out_scale}
    names = ["x", "a", "z", "w", "b", "z", "c", "z"]
    conv = node("QLinearConv", names, ["y"], pads=[p.kernel // 2] * 4, group=p.groups)
    make = partial(session, [conv], images, constants, np.int8)
    return Variant(
        "onnxruntime, NCHW, int8 out",
        make,
        lambda results: results[0].transpose(0, 2, 3, 1) * out_scale,
    )


def _openvino(openvino: Any, opset: Any) -> tuple[Factory, str]:
    core = openvino.Core()
    options = {"INFERENCE_NUM_THREADS": threads(), "PERFORMANCE_HINT": "LATENCY"}
    options |= {"INFERENCE_PRECISION_HINT": "f32"}
    settings = ", ".join(f"{name} {value}" for name, value in options.items())
    settings = f"{openvino.__version__}, {settings}"
    return partial(_openvino_variants, openvino, opset, core, options), settings


def _openvino_variants(
    openvino: Any,
    opset: Any,
    core: Any,
    options: dict[str, Any],
    problem: Problem,
    x: np.ndarray,
    w: np.ndarray,
) -> Variants:
    def infer(x: np.ndarray, body: Callable[[Any], Any], group: int = 0) -> Call:
        parameter = opset.parameter(x.shape, np.float32)
        model = openvino.Model([body(parameter)], [parameter], "contraction")
        dynamic = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": group}
        request = core.compile_model(model, "CPU", options | dynamic).create_infer_request()
        request.set_input_tensor(openvino.Tensor(x, shared_memory=True))

        def call() -> Any:
            request.infer()
            return request.get_output_tensor().data

        return call

    def fake_quantize(node: Any, limit: Any, levels: int) -> Any:
        high = np.asarray(limit, np.float32)
        low = -high if levels == 255 else -high * np.float32(128 / 127)
        return opset.fake_quantize(node, low, high, low, high, levels)

    match problem:
        case Product(scheme="static"):
            a, b = np.abs(x).max(), np.abs(w).max(axis=0)[:, None]

            def body(node: Any) -> Any:
                weight = fake_quantize(opset.constant(w.T.copy()), b, 255)
                return opset.matmul(fake_quantize(node, a, 256), weight, False, True)

            yield Variant("openvino, quantizes x as well", lambda: infer(x, body))
        case Product(scheme="asymmetric"):
            yield missing("openvino", "this benchmark builds no such model for it")
        case Product():
            body = partial(_compressed, openvino, opset, problem, w)
            dynamic = problem.scheme == "dynamic"
            name = "openvino" if dynamic else "openvino, float32"
            yield Variant(name, lambda: infer(x, body, problem.k if dynamic else 0))
            if not dynamic:
                yield Variant("openvino, int8 inside", lambda: infer(x, body, problem.block or 128))
        case Conv():
            images, kernel = x.transpose(0, 3, 1, 2).copy(), w.transpose(3, 2, 0, 1).copy()
            limit = np.abs(kernel).max(axis=(1, 2, 3), keepdims=True)
            if problem.depthwise:
                kernel, limit = kernel[:, None], limit[:, None]
            conv = opset.group_convolution if problem.depthwise else opset.convolution
            window = [1, 1], *[[problem.kernel // 2] * 2] * 2, [1, 1]

            def body(node: Any) -> Any:
                weight = fake_quantize(opset.constant(kernel), limit, 255)
                return conv(fake_quantize(node, np.abs(x).max(), 256), weight, *window)

            name = "openvino, NCHW, quantizes x as well"
            yield Variant(name, lambda: infer(images, body), lambda y: y.transpose(0, 2, 3, 1))
        case Attention():
            yield missing("openvino", "this benchmark builds no attention model for it")


def _compressed(openvino: Any, opset: Any, p: Product, w: np.ndarray, node: Any) -> Any:
    """`node` times a weight whose codes are constants of the graph."""
    codes, scale = symmetric(w.T.reshape(p.n, -1, p.block or p.k), 2, p.bits)
    if p.bits == 8:
        constant = opset.constant(codes)
    else:
        tensor = openvino.Tensor(nibbles(codes), list(codes.shape), openvino.Type.i4)
        constant = opset.constant(tensor, shared_memory=False)  # the codes are let go here
    weight = opset.multiply(opset.convert(constant, np.float32), opset.constant(scale))
    return opset.matmul(node, opset.reshape(weight, [p.n, p.k], False), False, True)
