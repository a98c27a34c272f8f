"""Files of ONNX, quantized by onnxruntime's own tools and by OpenVINO's NNCF, and how they are run.

The tools start from the float file that jqx writes, and get the same calibration data. They are
told to quantize the same products as jqx: not those of two activations, nor those that `excluded`
names.
NNCF chooses what else is quantized in static schemes, and smooths transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from _harness import Call, threads

Feed = Sequence[np.ndarray]
Prepare = Callable[[Feed], Call]
"""From the inputs to a call that returns the first output."""


@dataclass(frozen=True)
class Task:
    """What a tool is given. `excluded`: names of products that stay in float."""

    path: Path
    feeds: Sequence[Feed]
    has_convolutions: bool
    excluded: Sequence[str]

    def beside(self, name: str) -> Path:
        """A path in the same folder."""
        return self.path.with_name(f"{name}.onnx")


class Onnxruntime:
    """Its sessions, and `onnxruntime.quantization`."""

    name, products = "onnxruntime", ("uint8", "qdq_uint8")

    def __init__(self) -> None:
        self.runtime = import_module("onnxruntime")
        self.tools = import_module("onnxruntime.quantization")
        self.runtime.set_default_logger_severity(3)

    def load(self, path: Path, scheme: str, profile: Path | None = None) -> Prepare:
        """Opens a file."""
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = threads()
        options.add_session_config_entry("session.force_spinning_stop", "1")  # after each run
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile)
        session = self.runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [x.name for x in session.get_inputs()]
        first = [session.get_outputs()[0].name]

        def prepare(feed: Feed) -> Call:
            return partial(session.run, first, dict(zip(names, feed, strict=True)))

        return prepare

    def quantizers(self, task: Task) -> dict[str, Callable[[Path], None]]:
        """Functions that write a file, by scheme."""
        tools, kinds = self.tools, self.tools.QuantType
        given = {
            "op_types_to_quantize": ["Conv", "MatMul"] if task.has_convolutions else ["MatMul"],
            "nodes_to_exclude": list(task.excluded),
            "per_channel": True,
            "weight_type": kinds.QInt8,
            "extra_options": {"MatMulConstBOnly": True},
        }

        def prepared() -> Path:
            tools.shape_inference.quant_pre_process(
                str(task.path), str(task.beside("prepared")), skip_symbolic_shape=True
            )
            return task.beside("prepared")

        def dynamic(path: Path) -> None:
            tools.quantize_dynamic(prepared(), path, **given)

        def static(path: Path) -> None:
            source = prepared()
            names = [x.name for x in self.runtime.InferenceSession(source).get_inputs()]

            class Reader(tools.CalibrationDataReader):
                def __init__(self) -> None:
                    self.left = iter(task.feeds)

                def get_next(self) -> dict[str, np.ndarray] | None:
                    feed = next(self.left, None)
                    return None if feed is None else dict(zip(names, feed, strict=True))

            # uint8 by int8 is what it multiplies fastest on x86 with VNNI
            tools.quantize_static(source, path, Reader(), activation_type=kinds.QUInt8, **given)

        def weights(bits: int, path: Path) -> None:
            module = import_module("onnxruntime.quantization.matmul_nbits_quantizer")
            made = module.MatMulNBitsQuantizer(
                str(task.path),
                bits=bits,
                block_size=32,
                is_symmetric=True,
                accuracy_level=4,  # as of QDQ in a session: activations are rounded to 8 bits
                nodes_to_exclude=list(task.excluded),
            )
            made.process()
            made.model.save_model_to_file(str(path))

        found = {"W8A8 dynamic": dynamic, "W8A8 static": static}
        if not task.has_convolutions:
            found |= {"W8 32": partial(weights, 8), "W4 32": partial(weights, 4)}
        return found


class Openvino:
    """Its compiled models, and NNCF."""

    name, products = "openvino", ("int8", "qdq_uint8")

    def __init__(self) -> None:
        self.runtime, self.tools = import_module("openvino"), import_module("nncf")
        self.tools.set_log_level(40)  # errors
        self.core = self.runtime.Core()

    def load(self, path: Path, scheme: str) -> Prepare:
        """Opens a file. Activations are rounded if the scheme says so."""
        options = {"INFERENCE_NUM_THREADS": threads(), "PERFORMANCE_HINT": "LATENCY"}
        options |= {"INFERENCE_PRECISION_HINT": "f32"}
        options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 2**20 if scheme == "W8A8 dynamic" else 0
        compiled = self.core.compile_model(self.core.read_model(path), "CPU", options)

        def prepare(feed: Feed) -> Call:
            request = compiled.create_infer_request()
            for i, x in enumerate(feed):
                request.set_input_tensor(i, self.runtime.Tensor(np.require(x, requirements="C")))

            def call() -> list[np.ndarray]:
                request.infer()
                return [np.array(request.get_output_tensor(0).data)]

            return call

        return prepare

    def quantizers(self, task: Task) -> dict[str, Callable[[Path], None]]:
        """Functions that write a file, by scheme."""
        nncf = self.tools
        names = nncf.IgnoredScope(names=list(task.excluded), validate=False)
        tables = nncf.IgnoredScope(names=list(task.excluded), types=["Gather"], validate=False)

        def save(model: Any, path: Path) -> None:
            self.runtime.save_model(model, path.with_suffix(".xml"), compress_to_fp16=False)

        def weights(mode: str, path: Path, **fields: Any) -> None:
            model = self.core.read_model(task.path)
            mode_value = nncf.CompressWeightsMode[mode]
            save(
                nncf.compress_weights(model, mode=mode_value, ignored_scope=tables, **fields), path
            )

        def static(path: Path) -> None:
            model, data = self.core.read_model(task.path), nncf.Dataset(task.feeds, list)
            fields = {"subset_size": len(task.feeds), "ignored_scope": names}
            if not task.has_convolutions:
                fields["model_type"] = nncf.ModelType.TRANSFORMER
            save(nncf.quantize(model, data, **fields), path)

        eight = partial(weights, "INT8_SYM")
        found = {"W8A8 dynamic": eight, "W8A8 static": static, "W8": eight}
        if not task.has_convolutions:
            blocks: Mapping[str, Any] = {"group_size": 32, "ratio": 1.0, "all_layers": True}
            found["W4 32"] = partial(weights, "INT4_SYM", **blocks)
        return found
