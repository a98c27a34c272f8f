"""A Llama quantized by llm-compressor, NNCF or auto-round, in a process of an interpreter that has
them:

    PYTHON _language_torch.py FOLDER llm-compressor | NNCF | auto-round

`FOLDER` holds what `_language_peers.written` wrote: weights under the names of transformers, tokens
to calibrate on and to evaluate, and a configuration. Schemes come as lines of JSON, with `bits`,
`group` (0: a scale for each channel), `symmetric`, `gptq`, and for auto-round `steps` (0: rounding
to nearest) and the `rows` of a step; a scheme of no bits is float32. Each is answered by one line
of JSON. Needs no jax.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

Scheme = dict[str, Any]
Rows = np.ndarray
Logits = Callable[[Any], Any]
PACKAGES = {
    "llm-compressor": ("llmcompressor", "compressed-tensors"),
    "NNCF": ("nncf", "openvino"),
    "auto-round": ("auto-round",),
}


def pretrained(folder: Path) -> Any:
    """Returns the model, in float32."""
    config = transformers.LlamaConfig(**json.loads((folder / "config.json").read_text()))
    config.save_pretrained(folder)  # llm-compressor reads it there
    config.name_or_path = str(folder)
    model = transformers.LlamaForCausalLM(config).eval()
    found = {name: torch.from_numpy(x) for name, x in np.load(folder / "weights.npz").items()}
    left = model.load_state_dict(found, strict=False)
    assert left.missing_keys == ["lm_head.weight"] and not left.unexpected_keys, left
    model.tie_weights()
    return model


def perplexity(logits: Logits, rows: Rows) -> float:
    """The perplexity of rows of tokens, each by itself."""
    nats = []
    for row in torch.from_numpy(rows):
        guess = logits(row[None, :-1])[0].double()
        nats.append(float(torch.nn.functional.cross_entropy(guess, row[1:])))
    return float(np.exp(np.mean(nats)))


def by_llm_compressor(model: Any, scheme: Scheme, calibration: Rows) -> tuple[Logits, str]:
    """Quantizes in place, with the library's defaults for all that a scheme does not say."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    per = {"strategy": "group", "group_size": scheme["group"]}
    weights = QuantizationArgs(
        num_bits=scheme["bits"],
        type="int",
        symmetric=scheme["symmetric"],
        **(per if scheme["group"] else {"strategy": "channel"}),
    )
    groups = {"linear": QuantizationScheme(targets=["Linear"], weights=weights)}
    make = GPTQModifier if scheme["gptq"] else QuantizationModifier
    recipe = make(config_groups=groups, ignore=["lm_head"])
    rows = [{"input_ids": row[None], "attention_mask": row[None] * 0 + 1} for row in calibration]
    batches = torch.utils.data.DataLoader(rows, batch_size=None)
    oneshot(
        model=model,
        dataset=batches if scheme["gptq"] else None,
        recipe=recipe,
        processor=object(),  # it looks for a tokenizer otherwise, which tokens do not need
        num_calibration_samples=len(rows),
        max_seq_length=calibration.shape[1],
        pipeline="sequential" if scheme["gptq"] else "datafree",
        sequential_targets=["LlamaDecoderLayer"],
    )
    names = ("dampening_frac", "actorder", "block_size")
    told = ", ".join(f"{name} {getattr(recipe, name)}" for name in names if scheme["gptq"])
    return lambda row: model(row, use_cache=False).logits, told


def by_nncf(model: Any, scheme: Scheme, calibration: Rows) -> tuple[Logits, str]:
    """Quantizes an OpenVINO model of the model; a group that does not divide is made smaller."""
    import nncf
    import openvino

    nncf.set_log_level(40)

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Any) -> Any:
            return self.model(tokens, use_cache=False).logits

    # Masks of transformers are made by `vmap`, which `torch.jit.trace` does not follow.
    example = torch.from_numpy(calibration[:1])
    with torch.no_grad():
        made = openvino.convert_model(torch.export.export(Whole(), (example,), strict=False))
    length = example.shape[1]
    told = ""
    if scheme["bits"]:
        if scheme["bits"] not in (4, 8):
            raise NotImplementedError(f"NNCF has no mode of {scheme['bits']} bits")
        name = f"INT{scheme['bits']}_{'SYM' if scheme['symmetric'] else 'ASYM'}"
        smaller = nncf.GroupSizeFallbackMode.ADJUST
        head = [x.get_friendly_name() for x in made.get_ops() if x.get_type_name() == "MatMul"][-1]
        made = nncf.compress_weights(
            made,
            mode=nncf.CompressWeightsMode[name],
            group_size=scheme["group"] or -1,
            ratio=1.0,
            dataset=nncf.Dataset(list(calibration[:, None])) if scheme["gptq"] else None,
            gptq=scheme["gptq"],
            subset_size=len(calibration),
            ignored_scope=nncf.IgnoredScope(names=[head], types=["Gather"]),
            advanced_parameters=nncf.AdvancedCompressionParameters(
                group_size_fallback_mode=smaller
            ),
        )
        told = f"{name}, groups that do not divide: {smaller.value}"
    options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    compiled = openvino.Core().compile_model(made, "CPU", options)

    def logits(row: Any) -> Any:
        """Of the length that was exported: what comes behind a token changes nothing before it."""
        count = row.shape[1]
        padded = np.pad(row.numpy(), ((0, 0), (0, length - count)))
        return torch.from_numpy(np.array(compiled(padded)[0])[:, :count])

    return logits, told


def by_auto_round(model: Any, scheme: Scheme, calibration: Rows) -> tuple[Logits, str]:
    """Quantizes in place, in float32 (by default it casts the model to bfloat16)."""
    from auto_round import AutoRound

    os.environ["AR_WORK_SPACE"] = f"{model.config.name_or_path}/auto_round"  # layers go there
    rows = scheme["rows"]
    quantizer = AutoRound(
        model,
        tokenizer=object(),  # it asks for one, which tokens do not need
        bits=scheme["bits"],
        group_size=scheme["group"] or -1,
        sym=scheme["symmetric"],
        iters=scheme["steps"],
        dataset=list(torch.from_numpy(calibration).split(rows)),
        nsamples=len(calibration),
        seqlen=calibration.shape[1],
        batch_size=rows,
        amp=False,
        device_map="cpu",
    )
    done, _ = quantizer.quantize()
    scales = str(done.model.layers[0].mlp.down_proj.scale.dtype).removeprefix("torch.")
    learned = f"{scheme['steps']} steps of {rows} rows, " if scheme["steps"] else ""
    return lambda row: done(row, use_cache=False).logits, f"{learned}scales {scales}"


def answered(folder: Path, library: str, scheme: Scheme) -> dict[str, Any]:
    """Quantizes and evaluates the model."""
    tokens = np.load(folder / "tokens.npz")
    calibration, evaluation = (tokens[x].astype(np.int64) for x in ("calibration", "evaluation"))
    model, told = pretrained(folder), ""
    start = time.perf_counter()
    if library == "NNCF":
        logits, told = by_nncf(model, scheme, calibration)
    elif scheme["bits"] and library == "auto-round":
        logits, told = by_auto_round(model, scheme, calibration)
    elif scheme["bits"]:
        logits, told = by_llm_compressor(model, scheme, calibration)
    else:
        logits = lambda row: model(row, use_cache=False).logits  # noqa: E731
    seconds = time.perf_counter() - start
    with torch.no_grad():
        found = perplexity(logits, evaluation)
    peak = _peak_megabytes()
    return {"perplexity": found, "seconds": seconds, "told": told, "peak_mb": peak}


def _peak_megabytes() -> float:
    """Returns the largest memory of this process; that of `getrusage` begins with its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kilobytes) / 1e3


def main() -> None:
    """Says which versions these are, then answers schemes."""
    folder, library = Path(sys.argv[1]), sys.argv[2]
    versions = {x: metadata.version(x) for x in ("torch", "transformers", *PACKAGES[library])}
    print(json.dumps({"versions": versions, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                answer = answered(folder, library, json.loads(line))
        except (Exception, SystemExit) as error:  # a library may raise anything, and it is told
            answer = {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
