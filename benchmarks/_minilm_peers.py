"""The same encoder, quantized by qwix, torchao, onnxruntime and OpenVINO's NNCF.

Each is given the same weights, sentences and as many threads as XLA takes, and quantizes linear
layers alone. qwix replaces functions of JAX for the whole process while it traces: it comes last.
"""

import contextlib
import copy
import dataclasses
import io
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _harness import Call, threads
from minilm import Encoder, get_model_path

Batch = tuple[np.ndarray, np.ndarray]
Prepare = Callable[[np.ndarray, np.ndarray], Call]
"""From tokens and mask to a call that embeds them."""

SCHEMES = {
    "float32": "float32",
    "W8": "int8 weights, one scale a channel",
    "W8 64": "int8 weights in groups of 64",
    "W8A8 dynamic": "int8 weights, int8 activations scaled from the values at hand",
    "W8A8 static": "int8 weights, int8 activations of calibrated scales",
    "W4 32": "4-bit weights in groups of 32",
    "NF4 64": "NF4 weights in groups of 64",
    "FP8": "float8_e4m3fn weights and activations",
    "MXFP8": "MXFP8 weights and activations",
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A library's form of a scheme; `make` quantizes, and returns what is called with batches."""

    name: str
    scheme: str
    make: Callable[[], Prepare]


def peers(params: Any, calibration: list[Batch]) -> Iterator[tuple[str, list[Variant], str]]:
    """Yields each library's name, its variants, and its settings or why there are none."""
    for name, needed, variants in (
        ("torch", ("torch", "transformers"), _torch),
        ("torchao", ("torch", "transformers", "torchao.quantization"), _torchao),
        ("onnxruntime", ("torch", "transformers", "onnxruntime", "onnx"), _onnxruntime),
        (
            "openvino",
            ("torch", "transformers", "openvino", "nncf"),
            partial(_openvino, calibration),
        ),
        ("qwix", ("qwix",), partial(_qwix, params, calibration)),
    ):
        try:
            found, settings = variants(*map(import_module, needed))
        except (ImportError, OSError) as error:  # OSError: a shared library does not load
            yield name, [], f"not available ({type(error).__name__}: {error})"
        else:
            yield name, found, settings


def _pretrained(torch: Any, transformers: Any, attention: str = "sdpa") -> Any:
    """Returns the model in torch, with pooling: from tokens and mask to embeddings."""
    torch.set_num_threads(threads())
    torch.set_grad_enabled(False)

    class Embed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            load = transformers.AutoModel.from_pretrained
            with contextlib.redirect_stderr(io.StringIO()):  # a bar
                self.bert = load(get_model_path(), attn_implementation=attention).eval()

        def forward(self, tokens: Any, mask: Any) -> Any:
            x = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
            counts = mask[..., None].to(x.dtype)
            mean = (x * counts).sum(1) / counts.sum(1)
            return torch.nn.functional.normalize(mean, dim=-1)

    return Embed()


def _tensors(torch: Any, *arrays: np.ndarray) -> list[Any]:
    return [torch.tensor(np.asarray(x), dtype=torch.int64) for x in arrays]


def _torch(torch: Any, transformers: Any) -> tuple[list[Variant], str]:
    def make() -> Prepare:
        return partial(_prepare_torch, torch, _pretrained(torch, transformers))

    return [Variant("torch", "float32", make)], f"eager, {threads()} threads"


def _prepare_torch(torch: Any, model: Any, tokens: np.ndarray, mask: np.ndarray) -> Call:
    arguments = _tensors(torch, tokens, mask)
    return lambda: model(*arguments).numpy()


def _torchao(torch: Any, transformers: Any, ao: Any) -> tuple[list[Variant], str]:
    group, rows = import_module("torchao.quantization.granularity"), ao.MappingType
    configs = {
        ("torchao", "W8"): lambda: ao.Int8WeightOnlyConfig(),
        ("torchao", "W8 64"): lambda: ao.IntxWeightOnlyConfig(torch.int8, group.PerGroup(64)),
        ("torchao", "W8A8 dynamic"): lambda: ao.Int8DynamicActivationInt8WeightConfig(),
        ("torchao, zero points", "W8A8 dynamic"): lambda: ao.Int8DynamicActivationInt8WeightConfig(
            act_mapping_type=rows.ASYMMETRIC
        ),
        ("torchao", "W4 32"): lambda: ao.IntxWeightOnlyConfig(torch.int4, group.PerGroup(32)),
        ("torchao, zero points", "W4 32"): lambda: ao.IntxWeightOnlyConfig(
            torch.int4, group.PerGroup(32), rows.ASYMMETRIC
        ),
        ("torchao", "FP8"): lambda: ao.Float8DynamicActivationFloat8WeightConfig(
            granularity=group.PerRow()
        ),
    }

    def make(config: Callable[[], Any]) -> Prepare:
        model = _pretrained(torch, transformers)
        ao.quantize_(model, config())
        return partial(_prepare_torch, torch, model)

    found = [Variant(*key, partial(make, config)) for key, config in configs.items()]
    return found, f"eager, {threads()} threads"


def _onnxruntime(
    torch: Any, transformers: Any, runtime: Any, onnx: Any
) -> tuple[list[Variant], str]:
    del onnx  # which the export needs
    tools = import_module("onnxruntime.quantization")

    def make(**quantization: Any) -> Prepare:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "float32.onnx"
            sizes = {0: "batch", 1: "time"}
            example = _tensors(torch, np.ones((2, 8)), np.ones((2, 8)))
            torch.onnx.export(
                _pretrained(torch, transformers, "eager"),  # the form that is exported
                tuple(example),
                path,
                input_names=["tokens", "mask"],
                dynamic_axes={"tokens": sizes, "mask": sizes},
                opset_version=17,
                dynamo=False,
            )
            if quantization:
                quantized = path.with_name("quantized.onnx")
                only = {"op_types_to_quantize": ["MatMul"], "weight_type": tools.QuantType.QInt8}
                tools.quantize_dynamic(path, quantized, **only, **quantization)
                path = quantized
            options = runtime.SessionOptions()
            options.log_severity_level = 3
            options.intra_op_num_threads = threads()
            options.add_session_config_entry("session.force_spinning_stop", "1")  # after each run
            session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        def prepare(tokens: np.ndarray, mask: np.ndarray) -> Call:
            feed = {"tokens": tokens.astype(np.int64), "mask": mask.astype(np.int64)}
            return lambda: session.run(None, feed)[0]

        return prepare

    found = [
        Variant("onnxruntime", "float32", make),
        Variant("onnxruntime", "W8A8 dynamic", partial(make, per_channel=True)),
    ]
    return found, f"{threads()} threads"


def _openvino(
    calibration: list[Batch], torch: Any, transformers: Any, openvino: Any, nncf: Any
) -> tuple[list[Variant], str]:
    nncf.set_log_level(40)  # errors
    options = {"INFERENCE_NUM_THREADS": threads(), "PERFORMANCE_HINT": "LATENCY"}
    options |= {"INFERENCE_PRECISION_HINT": "f32"}
    core = openvino.Core()
    texts = [  # one at a time, without padding
        (tokens[None, : mask.sum()], mask[None, : mask.sum()])
        for batch in calibration
        for tokens, mask in zip(*batch, strict=True)
    ]

    def feed(batch: Batch) -> list[np.ndarray]:
        return [x.astype(np.int64) for x in batch]

    def make(quantize: Callable[[Any], Any] = lambda model: model, group: int = 0) -> Prepare:
        example = _tensors(torch, np.ones((2, 8)), np.ones((2, 8)))
        model = openvino.convert_model(
            _pretrained(torch, transformers, "eager"),
            example_input=dict(zip(("tokens", "mask"), example, strict=True)),
        )
        dynamic = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": group}
        compiled = core.compile_model(quantize(model), "CPU", options | dynamic)

        def prepare(tokens: np.ndarray, mask: np.ndarray) -> Call:
            request = compiled.create_infer_request()
            for i, x in enumerate(feed((tokens, mask))):
                request.set_input_tensor(i, openvino.Tensor(x))

            def call() -> np.ndarray:
                request.infer()
                return request.get_output_tensor().data

            return call

        return prepare

    def weights(mode: str, **fields: Any) -> Callable[[Any], Any]:
        def quantize(model: Any) -> Any:
            tables = nncf.IgnoredScope(types=["Gather"])
            mode_value = nncf.CompressWeightsMode[mode]
            return nncf.compress_weights(model, mode=mode_value, ignored_scope=tables, **fields)

        return quantize

    def static(model: Any) -> Any:
        data = nncf.Dataset(texts, feed)
        kind, mixed = nncf.ModelType.TRANSFORMER, nncf.QuantizationPreset.MIXED
        return nncf.quantize(model, data, model_type=kind, preset=mixed, subset_size=len(texts))

    blocks = {"group_size": 32, "ratio": 1.0, "all_layers": True}
    forms = {
        ("openvino", "float32"): {},
        ("NNCF", "W8"): {"quantize": weights("INT8_SYM")},
        ("NNCF, zero points", "W8"): {"quantize": weights("INT8_ASYM")},
        ("NNCF", "W8A8 dynamic"): {"quantize": weights("INT8_SYM"), "group": 384},
        ("NNCF, smoothed", "W8A8 static"): {"quantize": static},
        ("NNCF", "W4 32"): {"quantize": weights("INT4_SYM", **blocks)},
        ("NNCF, zero points", "W4 32"): {"quantize": weights("INT4_ASYM", **blocks)},
        ("NNCF", "NF4 64"): {"quantize": weights("NF4", **blocks | {"group_size": 64})},
    }
    found = [Variant(*key, partial(make, **form)) for key, form in forms.items()]
    return found, ", ".join(f"{name} {value}" for name, value in options.items())


def _qwix(params: Any, calibration: list[Batch], qwix: Any) -> tuple[list[Variant], str]:
    linear = r".*(query|key|value|dense)"  # not the attention scores
    # Its static scales are one a position, and so serve texts of one length alone.

    def make(static: bool = False, **fields: Any) -> Prepare:
        model, stats = Encoder(), {}
        fields |= {"module_path": linear}
        if "act_qtype" in fields:
            fields |= {"act_static_scale": static}
        if static:
            observer = qwix.quantize_model(model, qwix.QtProvider([qwix.QtRule(**fields)]))
            for batch in calibration:
                _, stats = observer.apply({**params, **stats}, *batch, mutable="quant_stats")
            stats = stats["quant_stats"]
        quantized = qwix.quantize_model(model, qwix.PtqProvider([qwix.QuantizationRule(**fields)]))
        form = jax.eval_shape(quantized.init, jax.random.key(0), *calibration[0])["params"]
        values = {"params": qwix.quantize_params(params["params"], form, stats)}
        return jitted(quantized.apply, values)

    int8, fp8, minmax = {"weight_qtype": "int8"}, "float8_e4m3fn", "minmax"
    zero_points, int4 = {"weight_calibration_method": minmax}, {"weight_qtype": "int4"}
    both = {"act_qtype": "int8", **int8}
    forms = {
        ("qwix", "W8"): int8,
        ("qwix, zero points", "W8"): int8 | zero_points,
        ("qwix", "W8 64"): int8 | {"tile_size": 64},
        ("qwix, zero points", "W8 64"): int8 | zero_points | {"tile_size": 64},
        ("qwix", "W8A8 dynamic"): both,
        ("qwix, zero points", "W8A8 dynamic"): both | {"act_calibration_method": minmax},
        ("qwix", "W8A8 static"): both | {"static": True},
        ("qwix, zero points", "W8A8 static"): both
        | {"static": True, "act_calibration_method": minmax},
        ("qwix", "W4 32"): int4 | {"tile_size": 32},
        ("qwix, zero points", "W4 32"): int4 | zero_points | {"tile_size": 32},
        ("qwix", "NF4 64"): {"weight_qtype": "nf4", "tile_size": 64},
        ("qwix", "FP8"): {"weight_qtype": fp8, "act_qtype": fp8},
        ("qwix", "MXFP8"): {"weight_qtype": "mxfp8", "act_qtype": "mxfp8", "tile_size": 32},
    }
    found = [Variant(*key, partial(make, **copy.copy(form))) for key, form in forms.items()]
    return found, "traced last"


def jitted(apply: Callable[..., Any], weights: Any) -> Prepare:
    """Compiles a function once for each shape."""
    compiled = jax.jit(apply)

    def prepare(*batch: np.ndarray) -> Call:
        arrays = jax.device_put(batch)
        return lambda: jax.block_until_ready(compiled(weights, *arrays))

    return prepare
