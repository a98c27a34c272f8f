"""Decodes with llama.cpp, in a process of an interpreter that has llama-cpp-python:

    PYTHON _language_llama.py FILE THREADS CONTEXT

Lines of standard input say how many tokens to decode, after those that are cached. Each is answered
by a line of JSON: for each token its seconds, and those of the processor. Needs no jax.
"""

import json
import sys
import time

import llama_cpp
import numpy as np

PROMPT = 32


def main() -> None:
    """Reads the file, says which version this is, then decodes."""
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = llama_cpp.Llama(
        path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    system = llama_cpp.llama_print_system_info().decode().strip()
    print(json.dumps({"version": llama_cpp.__version__, "system": system}), flush=True)
    token = 1
    for line in sys.stdin:
        taken = []
        for _ in range(int(line)):
            if model.n_tokens in (0, context):
                model.reset()
                model.eval([token] * PROMPT)
            start = time.perf_counter(), time.process_time()
            model.eval([token])
            logits = llama_cpp.llama_get_logits(model.ctx)
            token = int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())
            taken.append((time.perf_counter() - start[0], time.process_time() - start[1]))
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
