"""The engine on llama.cpp: samples and trains a GGUF file as it is, quantised, on CPU or GPU.

The file is mapped once, in a separate process (`child`). Genomes are LoRA adapters: their factors
are made here from seeds, by the same noise and exact arithmetic as for all engines, and written
over the tensors of one loaded adapter. One genome answers at a time, all of its requests in one
batch; a common prefix of prompts is computed once.

llama.cpp multiplies each row of a quantised product alone, but other kernels may round differently
in another batch, so a rare near-tie may flip a token.

Left out: search spaces that move the model's own weights, which are quantised and shared.
"""

import asyncio
import importlib.util
from typing import TYPE_CHECKING

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import ConfigError, ModelError, not_installed
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.common.terminal import GIB
from es_cookbook.engines.base import EngineBuilder, Requests
from es_cookbook.plugins.gguf.conversion import gguf_file
from es_cookbook.plugins.llama_cpp.library import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
    from es_cookbook.plugins.llama_cpp.host import LlamaCppEngine


_MOST_THREADS = 1024
"""More than machines have cores; with many more, llama.cpp ends for lack of memory."""


@chz.chz
class LlamaCppEngineBuilder(EngineBuilder):
    """Builds an engine that samples with llama.cpp; genomes are adapters over a GGUF file."""

    max_model_len: int | None = chz.field(
        default=None, doc="most tokens of prompt and action; if unset the model's own, at most 4096"
    )
    max_batch_size: int = chz.field(default=32, doc="most requests that decode together")
    kv_cache_gib: float = chz.field(
        default=1.0, doc="most memory for keys and values of running requests, in GiB"
    )
    threads: int | None = chz.field(
        default=None, doc="threads of llama.cpp; if unset one per core, at most OMP_NUM_THREADS"
    )
    gpu_layers: int = chz.field(
        default=-1, doc="layers on a GPU, if the installed llama.cpp has one; -1: as many as fit"
    )
    repack: bool = chz.field(
        default=False,
        doc="copy weights into an order that is faster for some types (Q4_0, Q4_K) on some "
        "processors; takes the memory of the file again",
    )

    _sizes = in_range("max_model_len", "kv_cache_gib", above=0, prefix="engine.")
    _max_batch_size = in_range("max_batch_size", at_least=1, at_most=256, prefix="engine.")
    _threads = in_range("threads", at_least=1, at_most=_MOST_THREADS, prefix="engine.")
    _gpu_layers = in_range("gpu_layers", at_least=-1, at_most=2**31 - 1, prefix="engine.")

    @override
    def check(self, model_name: str) -> None:
        self.file(model_name)
        super().check(model_name)

    def file(self, model_name: str) -> "Path":
        """Return the model's GGUF file.

        Raises:
            ConfigError: llama.cpp is not installed.
            ModelError: The model is no GGUF file.
        """
        if importlib.util.find_spec(PACKAGE) is None:
            raise not_installed("engine=llama_cpp", PACKAGE, "es-cookbook[llama-cpp]")
        if (file := gguf_file(model_name)) is None:
            raise ModelError(
                f"model_name: engine=llama_cpp runs GGUF files, and {model_name!r:.300} is none; "
                "take the model's file for llama.cpp, or engine=torch"
            )
        return file

    @override
    def check_space(self, search_space: "SearchSpaceBuilder", max_terms: int = 1) -> None:
        if not search_space.has_adapter:
            raise ConfigError(
                f"search_space: engine=llama_cpp cannot host {type(search_space).__name__}, "
                "because the model's own weights stay as they are in the file; use "
                "search_space=adapter"
            )

    @override
    async def needs(
        self, model_name: str, search_space: "SearchSpaceBuilder", requests: Requests
    ) -> "Sequence[tuple[str, int | str]]":
        from es_cookbook.plugins.llama_cpp.needs import measured

        engine = await self(model_name=model_name, search_space=search_space)
        try:
            return await measured(engine, self.file(model_name), requests)
        finally:
            await engine.close()

    @override
    async def __call__(
        self, *, model_name: str, search_space: "SearchSpaceBuilder"
    ) -> "LlamaCppEngine":
        from es_cookbook.plugins.llama_cpp.host import LlamaCppEngine  # It imports torch.
        from es_cookbook.plugins.llama_cpp.model import load

        self.check_space(search_space)
        file = self.file(model_name)
        model = await asyncio.to_thread(load, model_name, search_space)
        cache_bytes = int(self.kv_cache_gib * GIB)
        engine = LlamaCppEngine(model, self.max_batch_size, self.max_model_len, cache_bytes)
        threads = self.threads or num_cores()
        try:
            await engine.open(file, threads=threads, gpu_layers=self.gpu_layers, repack=self.repack)
        except BaseException:
            await engine.close()
            raise
        return engine
