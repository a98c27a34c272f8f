"""The language model in other libraries, each in a process of an interpreter that has it.

The same weights, as jqx reads them from the GGUF file, and the same tokens. Processes live as long
as they are asked, so that decoding with llama.cpp takes turns with jqx.
"""

import contextlib
import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class Peer:
    """A process that answers lines by lines of JSON. `about` is what it says of itself."""

    def __init__(self, *command: Any):
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.about = self._answer()

    def __call__(self, line: str) -> Any:
        """Asks."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"the process ended with {self._process.wait()}")
        return json.loads(line)


@contextlib.contextmanager
def peer(name: str, python: Path | None, *command: Any) -> Iterator[Peer | None]:
    """Runs a script with an interpreter, or says why not."""
    found = None
    try:
        if python is None:
            print(f"{name}: skipped: no interpreter that has it was named")
        else:
            found = Peer(python, *command)
            print(f"{name}: {json.dumps(found.about)}")
    except OSError as error:
        print(f"{name}: skipped: {python}: {error}")
    try:
        yield found
    finally:
        if found is not None:
            found.close()


def llama(python: Path | None, path: Path, threads: int, context: int) -> Any:
    """llama.cpp on the same file."""
    return peer("llama.cpp", python, HERE / "_language_llama.py", path, threads, context)


@contextlib.contextmanager
def written(file: Any, config: Any, **tokens: np.ndarray) -> Iterator[Path]:
    """A folder with the model and the tokens, as the scripts of torch read them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "weights.npz", **weights(file, config))
        np.savez(folder / "tokens.npz", **tokens)
        (folder / "config.json").write_text(json.dumps(_config(config)))
        yield folder


def weights(file: Any, config: Any) -> dict[str, np.ndarray]:
    """The weights under the names of transformers, rows of queries and keys in its order."""

    def weight(name: str) -> np.ndarray:
        return np.asarray(file.tensors[f"{name}.weight"].dequantize(), np.float32)

    found = {
        "model.embed_tokens.weight": weight("token_embd"),
        "model.norm.weight": weight("output_norm"),
    }
    for i in range(config.layers):
        for ours, theirs in NAMES.items():
            x = weight(f"blk.{i}.{ours}")
            if ours in ("attn_q", "attn_k"):
                pairs = x.reshape(-1, config.head // 2, 2, config.width)
                x = pairs.swapaxes(1, 2).reshape(x.shape)
            found[f"model.layers.{i}.{theirs}.weight"] = x
    return found


def _config(config: Any) -> dict[str, Any]:
    of = dataclasses.asdict(config)
    return {
        "num_hidden_layers": of["layers"],
        "hidden_size": of["width"],
        "num_attention_heads": of["heads"],
        "num_key_value_heads": of["kv_heads"],
        "intermediate_size": of["hidden"],
        "vocab_size": of["tokens"],
        "rope_theta": of["theta"],
        "rms_norm_eps": of["eps"],
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }
