"""llama.cpp's server, for a process that needs no other library."""

import importlib
from typing import Any


def started(model: str, adapter: str | None, requests: int, tokens: int) -> Any:
    """Start a server in this process; llama.cpp may end it.

    Args:
        model: the GGUF file.
        adapter: that of an adapter, or none.
        requests: how many it answers at a time.
        tokens: of all of them together.
    """
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.verbosity = model, 1
    params.n_parallel, params.n_ctx = requests, tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if adapter is not None:
        lora = xllamacpp.CommonAdapterLoraInfo()
        lora.path, lora.scale = adapter, 1.0
        params.lora_adapters = [lora]
    return xllamacpp.Server(params)


def served(model: str, adapter: str, questions: list[str], max_tokens: int) -> list[str]:
    """Return greedy answers of a model with an adapter."""
    server, options = started(model, adapter, 1, 1024), {"max_tokens": max_tokens, "temperature": 0}
    messages = [[{"role": "user", "content": question}] for question in questions]
    answers = [server.handle_chat_completions({"messages": each, **options}) for each in messages]
    return [answer["choices"][0]["message"]["content"] for answer in answers]
