"""The decoder in torch, quantized by torchao and compiled by `torch.compile`."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from _gpu_decoder_model import EPS, THETA, Config
from _gpu_decoder_rows import STEPS, Job
from _gpu_torch import reason_without_torch

FORMS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {  # name: scheme, class, arguments
    "torch bfloat16": ("bfloat16", "", {}),
    "torchao int8 weights": ("W8A16", "Int8WeightOnlyConfig", {}),
    "torchao int4 g128": ("W4A16 g128", "Int4WeightOnlyConfig", {"group_size": 128}),
    "torchao int8 dynamic": ("W8A8 dynamic", "Int8DynamicActivationInt8WeightConfig", {}),
    "torchao fp8 dynamic": ("fp8", "Float8DynamicActivationFloat8WeightConfig", {"rows": True}),
}


def reason_without_torchao() -> str:
    """Returns why there can be no rows of torch and torchao, or nothing."""
    for module in ("torch", "torchao.quantization"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"not installed ({error})"
    return reason_without_torch()


def decoder(config: Config, device: str, dtype: Any = None) -> Any:
    """Returns a module of (tokens, caches, place): logits of the last token.

    `caches` is a tensor for each layer, [2, batch, kv_heads, room, head], and is written to.
    """
    torch = importlib.import_module("torch")
    nn, functional = torch.nn, torch.nn.functional
    heads = (config.heads, config.kv_heads, config.kv_heads)

    def norm(x: Any) -> Any:
        return functional.rms_norm(x, (config.width,), eps=EPS)  # its weights are 1

    def rotated(x: Any, places: Any) -> Any:
        even = torch.arange(0, config.head, 2, device=x.device)
        angles = places[:, None] * THETA ** (-even / config.head)
        a, b = x.float().chunk(2, dim=-1)
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, (rows, columns) in config.matrices.items():
                setattr(self, name, nn.Linear(rows, columns, bias=False))

        def forward(self, x: Any, cache: Any, places: Any) -> Any:
            batch, time, _ = x.shape
            qkv = self.qkv(norm(x)).view(batch, time, -1, config.head).transpose(1, 2)
            q, k, v = qkv.split(heads, dim=1)
            q, k = rotated(q, places), rotated(k, places)
            cache[0].index_copy_(2, places, k)
            cache[1].index_copy_(2, places, v)
            attend = functional.scaled_dot_product_attention
            if time > 1:
                y = attend(q, k, v, is_causal=True, enable_gqa=True)
            else:
                seen = (torch.arange(cache.shape[3], device=x.device) <= places)[None, None]
                y = attend(q, cache[0], cache[1], attn_mask=seen, enable_gqa=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, time, -1))
            gate, up = self.gate_up(norm(x)).chunk(2, dim=-1)
            return x + self.down(functional.silu(gate) * up)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(config.tokens, config.width)
            self.layers = nn.ModuleList(Layer() for _ in range(config.layers))
            self.head = nn.Linear(config.width, config.tokens, bias=False)

        def forward(self, tokens: Any, caches: Any, places: Any) -> Any:
            x = self.embed(tokens)
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, cache, places)
            return self.head(norm(x[:, -1]))

    with torch.device(device):
        return Decoder().to(dtype or torch.bfloat16).eval()


def call(config: Config, name: str, job: Job, device: str) -> tuple[Callable[[], Any], int, int]:
    """Returns a call that waits for its work, how many runs it makes, and the bytes of weights."""
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    _, form, options = FORMS[name]
    model = decoder(config, device)
    if form:
        _quantize(model, form, options)
    if device == "cuda":
        torch._dynamo.reset()
        mode = "max-autotune-no-cudagraphs" if job.group == "prefill" else "max-autotune"
        model = torch.compile(model, mode=mode, dynamic=False)
    room, length = job.context, job.context if job.group == "prefill" else 1
    with torch.device(device):
        shape = (2, job.batch, config.kv_heads, room, config.head)
        caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(config.layers)]
        tokens = torch.randint(config.tokens, (job.batch, length))
        last = torch.arange(room)
    for cache in caches:  # which CUDA graphs write to where they lie
        torch._dynamo.mark_static_address(cache)
    steps = 1 if job.group == "prefill" else min(STEPS, room)

    def run() -> Any:
        fed, logits = tokens, None
        for place in range(room - steps, room):
            places = last if length > 1 else last[place : place + 1]
            logits = model(fed, caches, places)
            fed = logits.argmax(dim=-1, keepdim=True)
        if device == "cuda":
            torch.cuda.synchronize()
        return logits

    return run, steps, _weight_bytes(model)


def _quantize(model: Any, form: str, options: Mapping[str, Any]) -> None:
    quantization = importlib.import_module("torchao.quantization")
    given = dict(options)
    if given.pop("rows", False):
        given["granularity"] = quantization.PerRow()
    quantization.quantize_(model, getattr(quantization, form)(**given))


def _weight_bytes(model: Any) -> int:
    """Returns the bytes of all weights but the table of tokens, those inside of tensors counted."""

    def size(x: Any) -> int:
        if hasattr(x, "__tensor_flatten__"):
            names, _ = x.__tensor_flatten__()
            return sum(size(getattr(x, name)) for name in names)
        return x.numel() * x.element_size()

    named = model.named_parameters()
    return sum(size(x) for name, x in named if "embed" not in name)
