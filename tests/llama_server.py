"""llama.cpp's server, for a process that needs no other library."""

import importlib
from typing import Any


def served(model: str, adapter: str, questions: list[str], max_tokens: int) -> list[str]:
    """Return greedy answers of a model with an adapter."""
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params, lora = xllamacpp.CommonParams(), xllamacpp.CommonAdapterLoraInfo()
    params.model.path, params.verbosity, params.n_ctx, params.n_parallel = model, 1, 1024, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    lora.path, lora.scale = adapter, 1.0
    params.lora_adapters = [lora]
    server, options = xllamacpp.Server(params), {"max_tokens": max_tokens, "temperature": 0}
    messages = [[{"role": "user", "content": question}] for question in questions]
    answers = [server.handle_chat_completions({"messages": each, **options}) for each in messages]
    return [answer["choices"][0]["message"]["content"] for answer in answers]
