"""The embedded engine: any Hugging Face causal LM on CPU, CUDA or MPS, without a server.

Low-rank genomes share one model: all of them run in one batch (`population_layers`). Dense genomes
(`FullRank`) have a model each, as many as fit into memory (see `memory`); a larger population runs
in blocks. The centre is kept in float32 and moved by exact arithmetic (`evolution.centre`); the
weights that sample are always derived from it, never undone. Weights of a quantised checkpoint are
held dequantised (`checkpoints.quantised`), so it takes the memory of a plain one.

Common prefixes of a genome's prompts are computed once (`prefix_cache`).

On the CPU weights have the dtype of the checkpoint and products the one that the processor
multiplies fastest (`kernels.products`). An action is a function of (centre, genome, prompt,
sampling seed) alone: not of the batch, of shared prefixes, or of the number of lanes or cores. On
CUDA and MPS matmuls of another height may round differently, and a rare near-tie may flip.
"""

import asyncio
from typing import TYPE_CHECKING, Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.engines.base import ModelEngineBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from es_cookbook.engines.torch.host import TorchEngine
    from es_cookbook.engines.torch.kernels.modules import Path as RowPath
    from es_cookbook.engines.torch.memory import CacheSize
    from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder

_CPU_PASS, _GPU_PASS = 1024, 4096
"""Prompt tokens of one forward pass; see benchmarks/README.md."""


@chz.chz
class TorchEngineBuilder(ModelEngineBuilder):
    """Builds an engine that samples with PyTorch in this process, on CPU, CUDA or MPS."""

    device: str = chz.field(default="auto", doc="auto takes cuda, then mps, then cpu")
    products: Literal["auto", "float32", "bfloat16", "int8"] = chz.field(
        default="auto",
        doc="dtype of matrix products on the CPU; auto: engine.dtype if it is given, and otherwise "
        "what this processor multiplies fastest without rounding weights; int8: weights and rows "
        "rounded by block, on processors with VNNI",
    )
    max_batch_size: int = chz.field(default=2048, doc="most requests decoding at once in all lanes")
    prefill_tokens: int | None = chz.field(
        default=None,
        doc="most prompt tokens of one forward pass; if unset 1024 on the CPU, where longer ones "
        "are no faster and take more memory, 4096 elsewhere",
    )
    kv_cache_gib: float | None = chz.field(
        default=None,
        doc="memory for keys and values of running requests, over all lanes, in GiB; three "
        "eighths of free memory if unset",
    )
    memory_gib: float | None = chz.field(
        default=None, doc="memory for resident genomes, in GiB; a quarter of free memory if unset"
    )
    prefix_cache_gib: float | None = chz.field(
        default=None,
        doc="memory for common prefixes of prompts, and for answers that an Env's next turn "
        "continues, while no request reads them, in GiB; 0 turns both off; an eighth of free "
        "memory if unset",
    )
    num_lanes: int | None = chz.field(
        default=None,
        doc="threads that run batches; if unset one per core on the CPU, at most OMP_NUM_THREADS",
    )

    _counts = in_range("max_batch_size", "prefill_tokens", "num_lanes", above=0, prefix="engine.")
    _sizes = in_range("max_model_len", "kv_cache_gib", "memory_gib", above=0, prefix="engine.")
    _prefix_cache = in_range("prefix_cache_gib", at_least=0, prefix="engine.")

    @override
    async def __call__(
        self, *, model_name: str, search_space: "SearchSpaceBuilder"
    ) -> "TorchEngine":
        return await asyncio.to_thread(self._build, model_name, search_space)

    def _build(self, model_name: str, search_space: "SearchSpaceBuilder") -> "TorchEngine":
        # torch and transformers, which a Config does without.
        from es_cookbook.engines.torch.host import load
        from es_cookbook.engines.torch.self_check import right_path

        options = self.dtype, self.products, self.device, self.context_length
        model, tokenizer, space, products = load(model_name, search_space, *options)
        path, cache_size = right_path(model, space, self.context_length(model), products)
        return self.around(model, tokenizer, space, path, cache_size)

    def around(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        space: "SearchSpace",
        path: "RowPath",
        cache_size: "CacheSize",
    ) -> "TorchEngine":
        """Return an engine of a model in evaluation mode on its device; `path`: how batches run."""
        from es_cookbook.engines.torch.host import TorchEngine
        from es_cookbook.engines.torch.memory import Memory, free_bytes
        from es_cookbook.engines.torch.resident_weights import ResidentWeights

        on_cpu = model.device.type == "cpu"
        num_lanes = self.num_lanes or (num_cores() if on_cpu else 1)
        weights = ResidentWeights(model, space, num_lanes if on_cpu else num_cores(), path)
        free = free_bytes(model.device)
        memory = Memory(free, self.kv_cache_gib, self.memory_gib, self.prefix_cache_gib)
        weights.memory_bytes = memory.genome_bytes
        plan = memory.plan(
            cache_size,
            num_lanes=num_lanes,
            max_rows=self.max_batch_size,
            vocabulary_size=weights.vocabulary_size,
            context_length=self.context_length(model),
            may_shorten=self.max_model_len is None,
        )
        return TorchEngine(weights, tokenizer, path, plan, self.pass_tokens(on_cpu=on_cpu))

    def pass_tokens(self, *, on_cpu: bool) -> int:
        """Return the most prompt tokens of one forward pass."""
        return self.prefill_tokens or (_CPU_PASS if on_cpu else _GPU_PASS)

    @override
    def context_length(self, model: "PreTrainedModel") -> int:
        """Return it as other engines do, up to where rotary positions would depend on the batch.

        Raises:
            ConfigError: The user asks for more.
        """
        length = super().context_length(model)
        steady = _steady_positions(model)
        if steady is None or length <= steady:
            return length
        if self.max_model_len is None:
            return steady
        raise ConfigError(
            f"engine.max_model_len={self.max_model_len}: beyond {steady} tokens the positions of "
            f"{type(model).__name__} depend on the longest request of a batch (its rope_type is "
            f"longrope or dynamic); accepted is up to {steady}, or use engine=vllm"
        )


def _steady_positions(model: "PreTrainedModel") -> int | None:
    """Return the length up to which rotary positions do not depend on the batch; None for any."""
    text = model.config.get_text_config()
    found = getattr(text, "rope_parameters", None) or {}
    # One kind of layers has its settings there, or each of several has its own.
    settings = [found, *(value for value in found.values() if isinstance(value, dict))]
    lengths = [
        each.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or text.max_position_embeddings
        for each in settings
        if each.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(lengths, default=None)
