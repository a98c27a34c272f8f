"""Decodes with llama.cpp, in a process of an interpreter that has llama-cpp-python:

    PYTHON _language_llama.py FILE THREADS CONTEXT

Lines of standard input say how many tokens to decode, after those that are cached; each is answered
by a line of JSON with the seconds of each token. Needs neither jax nor jqx.
"""

import json
import sys
import time

import llama_cpp

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
            start = time.perf_counter()
            model.eval([token])
            token = int(model.scores[model.n_tokens - 1].argmax())
            taken.append(time.perf_counter() - start)
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
