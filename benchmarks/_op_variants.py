"""The elementwise ops as jqx, plain JAX and each peer library spell them, ready to be timed."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Call, donated, fresh, threads

import jqx

CHANNELS = 1024
PEERS = ("qwix", "torch", "onnxruntime")


@dataclass(frozen=True)
class Problem:
    """One array, its int8 codes, and its scales: shape () per tensor, (CHANNELS,) per channel."""

    x: np.ndarray
    q: np.ndarray
    scale: np.ndarray

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that have a scale of their own."""
        return (1,) if self.scale.ndim else ()


Variants = Iterator[tuple[str, Call]]
Factory = Callable[[str, Problem], Variants]


def make_problem(mebi: int, per: str) -> Problem:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((mebi * 2**20 // CHANNELS, CHANNELS), np.float32)
    scale = generator.uniform(0.02, 0.04, CHANNELS if per == "channel" else ()).astype(np.float32)
    return Problem(x, np.clip(np.round(x / scale), -128, 127).astype(np.int8), np.asarray(scale))


def copy_variants(op: str, p: Problem) -> Variants:
    target, n = np.zeros_like(p.x), threads()
    yield "numpy copyto", lambda: np.copyto(target, p.x)
    parts = list(zip(np.array_split(target, n), np.array_split(p.x, n), strict=True))
    pool = ThreadPoolExecutor(n)
    yield f"numpy copyto, {n} threads", lambda: list(pool.map(lambda part: np.copyto(*part), parts))


def jqx_variants(op: str, p: Problem) -> Variants:
    x, q, scale, axes = jnp.asarray(p.x), jnp.asarray(p.q), jnp.asarray(p.scale), p.axes
    over = 0 if axes else None  # the axes that share a scale

    def quantize(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jqx.quantize(x, scale, qtype=jnp.int8, axes=axes)

    def dynamic_quantize(x: jax.Array, scale: jax.Array) -> jax.Array:
        granularity = "per_channel" if axes else "per_tensor"
        return jqx.dynamic_quantize(x, scale.reshape(-1), granularity=granularity, axis=-1)

    def quantize_dequantize(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jqx.quantize_dequantize(x, scale, qtype=jnp.int8, axes=axes)

    def fake_quantize(x: jax.Array, scale: jax.Array) -> jax.Array:
        low, high = -128 * scale, 127 * scale
        return jqx.fake_quantize(x, low, high, low, high, levels=256)

    def symmetric(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        absmax = jnp.max(jnp.abs(x), axis=over)
        scale, _ = jqx.affine_from_range(-absmax, absmax, qtype=jnp.int8, symmetric=True)
        return quantize(x, scale), scale

    def asymmetric(x: jax.Array) -> tuple[jax.Array | None, ...]:
        low, high = jnp.min(x, axis=over), jnp.max(x, axis=over)
        scale, zero_point = jqx.affine_from_range(low, high, qtype=jnp.uint8)
        return jqx.quantize(x, scale, zero_point, qtype=jnp.uint8, axes=axes), scale, zero_point

    match op:
        case "quantize":
            for f in (quantize, dynamic_quantize):
                yield f"jqx {f.__name__}", fresh(f, x, scale)
        case "dequantize":
            yield "jqx dequantize", fresh(lambda q, s: jqx.dequantize(q, s, axes=axes), q, scale)
        case "fake quantize":
            for f in (quantize_dequantize, fake_quantize):
                yield f"jqx {f.__name__}", fresh(f, x, scale)
                yield f"jqx {f.__name__}, donated", donated(f, x, scale)
        case "dynamic symmetric":
            yield "jqx absmax to codes", fresh(symmetric, x)
        case "dynamic asymmetric":
            yield "jqx range to codes", fresh(asymmetric, x)


def reciprocal_variants(op: str, p: Problem) -> Variants:
    """What XLA makes of `x / scale` in plain JAX: inexact, to show what exactness costs."""
    x, scale = jnp.asarray(p.x), jnp.asarray(p.scale)

    def rounded(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.clip(jnp.round(x * (1 / scale)), -128, 127)

    def fake_quantize(x: jax.Array, scale: jax.Array) -> jax.Array:
        return rounded(x, scale) * scale

    match op:
        case "quantize":
            yield "jnp reciprocal", fresh(lambda x, s: rounded(x, s).astype(jnp.int8), x, scale)
        case "fake quantize":
            yield "jnp reciprocal", fresh(fake_quantize, x, scale)
            yield "jnp reciprocal, donated", donated(fake_quantize, x, scale)


def peers() -> list[Factory]:
    """Returns the variants of the peers that can be imported, and prints which cannot."""
    factories = []
    for factory, names in (
        (_qwix_variants, ("qwix", "qwix._src.core.qarray")),
        (_torch_variants, ("torch",)),
        (_onnxruntime_variants, ("onnxruntime", "onnx")),
    ):
        try:
            factories.append(factory(*map(import_module, names)))
        except ImportError as error:
            print(f"{names[0]} left out: {error}")
    return factories


def _qwix_variants(qwix: ModuleType, core: ModuleType) -> Factory:
    def quantize(x: jax.Array, scale: jax.Array) -> Any:
        return core.quantize_with_scale_zero_point(x, jnp.int8, scale, None)

    def dequantize(q: jax.Array, scale: jax.Array) -> jax.Array:
        return qwix.dequantize(qwix.QArray(q, scale))

    def fake_quantize(x: jax.Array, scale: jax.Array) -> jax.Array:
        return qwix.dequantize(quantize(x, scale))

    def variants(op: str, p: Problem) -> Variants:
        x, q, scale = jnp.asarray(p.x), jnp.asarray(p.q), jnp.asarray(p.scale.reshape(1, -1))
        match op:
            case "quantize":
                yield "qwix", fresh(quantize, x, scale)
            case "dequantize":
                yield "qwix", fresh(dequantize, q, scale)
            case "fake quantize":
                yield "qwix", fresh(fake_quantize, x, scale)
                yield "qwix, donated", donated(fake_quantize, x, scale)
            case _:  # int8 in both: it has no uint8
                how = {"dynamic symmetric": "absmax", "dynamic asymmetric": "minmax"}[op]
                given = {"channelwise_axes": p.axes, "calibration_method": how}
                yield "qwix", fresh(lambda x: qwix.quantize(x, jnp.int8, **given), x)

    return variants


def _torch_variants(torch: ModuleType) -> Factory:
    torch.set_num_threads(threads())
    torch.set_grad_enabled(False)

    def variants(op: str, p: Problem) -> Variants:
        x, scale = torch.from_numpy(p.x), torch.from_numpy(np.atleast_1d(p.scale))
        zeros, number = torch.zeros(scale.shape, dtype=torch.int32), float(p.scale.flat[0])

        def per_tensor(scale: float = number) -> Any:
            return torch.quantize_per_tensor(x, scale, 0, torch.qint8)

        def per_channel(scale: Any = scale) -> Any:
            return torch.quantize_per_channel(x, scale, zeros, 1, torch.qint8)

        quantize = per_channel if p.axes else per_tensor
        match op, bool(p.axes):
            case "quantize", _:
                yield "torch", quantize
            case "dequantize", _:
                yield "torch", quantize().dequantize
            case "fake quantize", False:
                fake = torch.fake_quantize_per_tensor_affine
                yield "torch", lambda: fake(x, number, 0, -128, 127)
            case "fake quantize", True:
                fake = torch.fake_quantize_per_channel_affine
                yield "torch", lambda: fake(x, scale, zeros, 1, -128, 127)
            case "dynamic symmetric", False:
                yield "torch", lambda: per_tensor(float(x.abs().amax()) / 127)
            case "dynamic symmetric", True:
                yield "torch", lambda: per_channel(x.abs().amax(0) / 127)
            case "dynamic asymmetric", False:
                yield "torch", lambda: torch.quantize_per_tensor_dynamic(x, torch.quint8, False)

    return variants


def _onnxruntime_variants(runtime: ModuleType, onnx: ModuleType) -> Factory:
    helper, to_tensor = onnx.helper, onnx.numpy_helper.from_array

    def declare(name: str, array: np.ndarray) -> Any:
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        return helper.make_tensor_value_info(name, dtype, array.shape)

    def one_node(kind: str, x: np.ndarray, constants: dict, results: dict, **attributes) -> bytes:
        graph = helper.make_graph(
            [helper.make_node(kind, ["x", *constants], [*results], **attributes)],
            kind,
            [declare("x", x)],
            [declare(name, array) for name, array in results.items()],
            [to_tensor(array, name) for name, array in constants.items()],
        )
        opset = helper.make_opsetid("", 21)
        return helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString()

    def variants(op: str, p: Problem) -> Variants:
        constants = {"scale": p.scale, "zero_point": np.zeros(p.scale.shape, np.int8)}
        match op, bool(p.axes):
            case "quantize", _:
                kind, x, results = "QuantizeLinear", p.x, {"y": np.zeros_like(p.q)}
            case "dequantize", _:
                kind, x, results = "DequantizeLinear", p.q, {"y": np.zeros_like(p.x)}
            case "dynamic asymmetric", False:
                kind, x, constants = "DynamicQuantizeLinear", p.x, {}
                shapes = {"y": (p.x.shape, np.uint8), "scale": ((), np.float32)}
                shapes |= {"zero_point": ((), np.uint8)}
                results = {name: np.zeros(*shape) for name, shape in shapes.items()}
            case _:
                return
        attributes = {"axis": 1} if p.axes else {}
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads()
        options.add_session_config_entry("session.force_spinning_stop", "1")  # after each run
        session = runtime.InferenceSession(
            one_node(kind, x, constants, results, **attributes),
            options,
            providers=["CPUExecutionProvider"],
        )
        yield "onnxruntime", lambda: session.run(None, {"x": x})
        binding = session.io_binding()
        binding.bind_input("x", "cpu", 0, x.dtype, x.shape, x.ctypes.data)
        for name, array in results.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        # The default argument keeps the buffers alive that are bound by address.
        yield "onnxruntime, bound", lambda _=(x, results): session.run_with_iobinding(binding)

    return variants
