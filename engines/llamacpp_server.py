"""llama.cpp's HTTP server in a process of its own: a script, run by :mod:`engines.llamacpp`.

    python llamacpp_server.py '{"model": "x.gguf", "draft": null, "gamma": 0, "n_ctx": 512, ...}'

It prints one line of JSON, its ``address`` or an ``error``, and ends with its standard input. A
process is ended at any time; a server in a caller's process is waited for, at times in vain.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def start(asked: dict[str, Any]) -> tuple[Any, int]:
    """The server, and the most tokens that it reads at once. Raises whatever its start raises."""
    import xllamacpp

    said, exact = xllamacpp.CommonParams(), xllamacpp.ggml_type.GGML_TYPE_F32
    draft = said.speculative.draft
    said.model.path, said.n_ctx = asked["model"], asked["n_ctx"]
    said.n_gpu_layers = draft.n_gpu_layers = 0
    said.n_parallel, said.warmup, said.ui, said.verbosity = 1, False, False, -1
    said.cache_type_k = said.cache_type_v = exact
    said.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for cpu in (said.cpuparams, said.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        cpu.n_threads = asked["threads"]
    if asked["gamma"]:
        said.speculative.types = [
            xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        ]
        draft.mparams.path = asked["draft"]
        draft.n_max, draft.n_min, draft.p_min = asked["gamma"], 0, 0.0
        draft.cache_type_k = draft.cache_type_v = exact
    return xllamacpp.Server(said), int(said.n_batch)


def serve(asked: dict[str, Any]) -> None:
    """Serves until standard input ends."""
    try:
        try:
            server, most = start(asked)
            told = {"address": server.listening_address, "max_batched_tokens": most}
        except Exception as error:
            reason = str(error)
            if not isinstance(error, RuntimeError):
                reason = f"{type(error).__name__}: {error}"
            print(json.dumps({"error": reason}), flush=True)
            return
        print(json.dumps(told), flush=True)
        sys.stdin.read()
    finally:
        os._exit(0)  # without the server's own end, also when the caller is gone


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
