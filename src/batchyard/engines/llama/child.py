"""Floor 3. The child process of the engine `llama`: llama.cpp's own server on loopback.

Run with one argument, the options as JSON (see `engine.ServerOptions`). Knows nothing of Batchyard's
requests; the parent speaks HTTP with it.
"""

from __future__ import annotations

import json
import sys
import threading

from batchyard.engines.child import exit_with_parent, say_error, say_ready


def main() -> None:
    """Serve until the parent is gone."""
    options = json.loads(sys.argv[1])
    exit_with_parent()
    try:
        import xllamacpp  # noqa: PLC0415 - a missing or unloadable wheel is told in words
    except ImportError as error:
        say_error(
            f"The engine llama needs the package xllamacpp, which does not load here ({error}). "
            "Install it with: pip install 'batchyard[local]'"
        )
        return
    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.model_alias = {options["name"]}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = options["parallel"]
    params.n_ctx = options["context_tokens"] * options["parallel"]
    params.n_predict = options["max_output_tokens"]
    params.cpuparams.n_threads = options["threads"]
    params.cpuparams_batch.n_threads = options["threads"]
    params.n_threads_http = max(options["parallel"], 4) + 4
    params.cache_ram_mib = options["prompt_cache_mib"]
    params.endpoint_slots = True
    params.ui = False
    if options["micro_batch"] is not None:
        params.n_ubatch = options["micro_batch"]
        params.n_batch = max(params.n_batch, options["micro_batch"])
    if options["flash_attention"] is not None:
        kinds = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = (
            kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if options["flash_attention"]
            else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
    if options["kv_cache_type"] is not None:
        kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options['kv_cache_type'].upper()}")
        params.cache_type_k = params.cache_type_v = kind
    if options["speculate_ngrams"]:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_MOD]
    try:
        server = xllamacpp.Server(params)
    except Exception as error:  # noqa: BLE001 - whatever llama.cpp raises, it did not load
        say_error(f"llama.cpp cannot load the model {options['model']}: {error}")
        return
    say_ready(url=server.listening_address)
    threading.Event().wait()


if __name__ == "__main__":
    main()
