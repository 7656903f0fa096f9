"""The embedded engine: any Hugging Face causal LM on CPU, CUDA or MPS, without a server.

Low-rank genomes share one model: all of them run in one batch (`population_layers`). Dense genomes
(`FullRank`) get a model each, as many as there is memory
for (see `memory`); a larger population goes in blocks.
The centre is kept in float32 and moved by exact arithmetic (`evolution.centre`); the weights that
sample are always derived from it, never undone. Of a quantised checkpoint the weights are held as
what they stand for (`checkpoints.quantised`), so it takes the memory of a plain one.

On the CPU an action is a function of (centre, genome, prompt, sampling seed) alone, in float32: not
of the batch, the number of lanes or cores. On CUDA and MPS matmuls of other heights may round
otherwise, and a rare near-tie may flip.
"""

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import chz
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from es_cookbook.checkpoints.models import (
    architecture_for,
    end_of_sequence_ids,
    load_architecture,
    load_causal_lm,
    load_tokenizer,
    parameter_infos,
)
from es_cookbook.checkpoints.peft import read_adapter
from es_cookbook.checkpoints.quantised import is_quantised
from es_cookbook.common.checks import check_range
from es_cookbook.common.cores import num_cores
from es_cookbook.common.errors import ConfigError, EngineError
from es_cookbook.engines.base import (
    Engine,
    EngineTraits,
    LogprobsRequest,
    ModelEngineBuilder,
    SampleRequest,
)
from es_cookbook.engines.requests import Usage, check_logprobs, check_sample
from es_cookbook.engines.torch.forward.cache_size import CacheSize
from es_cookbook.engines.torch.forward.flat import FlatForward
from es_cookbook.engines.torch.forward.own import OwnForward
from es_cookbook.engines.torch.forward.population_layers import Path as RowPath
from es_cookbook.engines.torch.forward.self_check import right_path
from es_cookbook.engines.torch.forward.work_queue import Work, WorkQueue
from es_cookbook.engines.torch.lane import Answer, Lane
from es_cookbook.engines.torch.memory import (
    Memory,
    WeightBytes,
    check_weights_fit,
    free_bytes,
    weight_bytes,
)
from es_cookbook.engines.torch.resident_weights import ResidentWeights
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder
from es_cookbook.rl.types import Action


@chz.chz
class TorchEngineBuilder(ModelEngineBuilder):
    """Builds a `TorchEngine`."""

    device: str = chz.field(default="auto", doc="auto takes cuda, then mps, then cpu")
    max_batch_size: int = chz.field(
        default=2048, doc="most requests that decode together, over all lanes"
    )
    prefill_tokens: int = chz.field(default=4096, doc="most prompt tokens of one forward pass")
    kv_cache_gib: float | None = chz.field(
        default=None,
        doc="memory for keys and values, over all lanes, in GiB; half of what is free if unset",
    )
    memory_gib: float | None = chz.field(
        default=None,
        doc="memory for resident genomes, in GiB; a quarter of what is free if unset",
    )
    num_lanes: int | None = chz.field(
        default=None,
        doc="threads that run batches; if unset one a core on the CPU, at most OMP_NUM_THREADS",
    )

    @chz.validate
    def _ranges(self) -> None:
        counts = ("max_batch_size", "prefill_tokens", "max_model_len", "num_lanes")
        check_range(self, *counts, "kv_cache_gib", "memory_gib", above=0, prefix="engine.")

    @override
    async def __call__(self, *, model_name: str, search_space: SearchSpaceBuilder) -> "TorchEngine":
        return await asyncio.to_thread(self._build, model_name, search_space)

    def _build(self, model_name: str, search_space: SearchSpaceBuilder) -> "TorchEngine":
        device = _device(self.device)
        tokenizer = load_tokenizer(model_name)
        check_weights_fit(model_name, self._weight_bytes(model_name, search_space), device)
        model = load_causal_lm(model_name, self.dtype, device)
        space = search_space(parameter_infos(model), read_adapter)
        path, cache_size = right_path(model, space, self.context_length(model))
        return TorchEngine(model, tokenizer, space, self, device, path, cache_size)

    @override
    def context_length(self, model: PreTrainedModel) -> int:
        """As all engines', but no further than rotary positions are the same for any batch.

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

    def _weight_bytes(self, model_name: str, search_space: SearchSpaceBuilder) -> WeightBytes:
        quantised = is_quantised(model_name)
        architecture = (
            architecture_for(search_space, model_name)
            if quantised
            else load_architecture(model_name)
        )
        space = search_space(parameter_infos(architecture), read_adapter)
        own = str(architecture.config.dtype or torch.float32).removeprefix("torch.")
        dtype: torch.dtype = getattr(torch, own if self.dtype == "auto" else self.dtype)
        return weight_bytes(architecture, space, dtype.itemsize)


def _steady_positions(model: PreTrainedModel) -> int | None:
    """Tokens up to which a token's rotary position is its own; None if that is any number."""
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


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"engine.device: {name!r} is not available here ({str(error).splitlines()[0]}); "
            "accepted are auto, cpu, cuda, cuda:<index> and mps"
        ) from error
    return torch.device(name)


class TorchEngine(Engine):
    """The embedded engine: runs requests on its lanes. It keeps the model's weights, the base."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        space: SearchSpace,
        options: TorchEngineBuilder,
        device: torch.device,
        path: RowPath,
        cache_size: CacheSize,
    ) -> None:
        self.tokenizer = tokenizer
        self.space = space
        embedding = cast("torch.nn.Embedding", model.get_input_embeddings())
        self._vocabulary_size = embedding.num_embeddings
        self._usage = Usage()
        self._requests = 0
        self._in_flight: dict[Work, asyncio.Future[Answer]] = {}
        self._outbox: list[Work] = []
        on_cpu = device.type == "cpu"
        num_lanes = options.num_lanes or (num_cores() if on_cpu else 1)
        num_threads = num_lanes if on_cpu else num_cores()
        self._weights = ResidentWeights(model, space, num_threads, path)
        memory = Memory(free_bytes(device), options.kv_cache_gib, options.memory_gib)
        self._weights.memory_bytes = memory.genome_bytes
        plan = memory.plan(
            cache_size,
            num_lanes=num_lanes,
            max_rows=options.max_batch_size,
            vocabulary_size=self._vocabulary_size,
            context_length=options.context_length(model),
            may_shorten=options.max_model_len is None,
        )
        base_dtype = str(model.dtype).removeprefix("torch.")
        self.traits = EngineTraits(self._weights.capacity, plan.context_length, base_dtype)
        self._queue = WorkQueue(plan.num_lanes)
        self._lanes = [
            Lane(
                self._queue,
                FlatForward(device, options.prefill_tokens)
                if path.flat
                else OwnForward(path, device, options.prefill_tokens),
                device=device,
                max_rows=plan.max_rows,
                cache_bytes=plan.lane_bytes,
                bytes_of_request=cache_size.of,
                prefill_tokens=options.prefill_tokens,
                eos_token_ids=end_of_sequence_ids(model, tokenizer),
                decode=partial(tokenizer.batch_decode, skip_special_tokens=True),
                deliver=self._deliver,
            )
            for _ in range(plan.num_lanes)
        ]
        self._threads = [
            threading.Thread(target=lane.run, name=f"lane-{i}", daemon=True)
            for i, lane in enumerate(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    @override
    async def load(self, genomes_G: Sequence[Genome]) -> None:
        """Low rank: fills tables. Dense: a set of weights a genome."""
        with self._usage.changing("load genomes"):
            await asyncio.to_thread(self._weights.load, genomes_G)

    @override
    async def sample(self, request: SampleRequest) -> Action:
        limit = check_sample(request, self.traits.context_length, self._vocabulary_size)
        return cast(Action, await self._submit(request, limit))

    @override
    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        check_logprobs(request, self.traits.context_length, self._vocabulary_size)
        return cast("list[float]", await self._submit(request, limit=0))

    @override
    async def apply(self, step: Step) -> int:
        with self._usage.changing("move the centre"):
            return await asyncio.to_thread(self._weights.apply, step)

    @override
    async def restore(self, steps: Iterable[Step], snapshot: Path | None = None) -> int:
        with self._usage.changing("restore the centre"):
            return await asyncio.to_thread(self._weights.restore, list(steps), snapshot)

    @override
    async def save(self, path: Path) -> None:
        with self._usage.changing("save the centre"):
            await asyncio.to_thread(self._weights.save, path, self.tokenizer)

    @override
    def stats(self) -> Mapping[str, float]:
        """Counters: `tokens` sampled and `requests` taken."""
        return {"tokens": sum(lane.num_tokens for lane in self._lanes), "requests": self._requests}

    @override
    async def close(self) -> None:
        if self._usage.closed:
            return
        self._usage.closed = True
        error = EngineError("the engine was closed while this request was in flight")
        for work in self._queue.close():
            work.cancelled = True
        for future in self._in_flight.values():
            if not future.done():  # its task may not have run yet since it was
                future.set_exception(error)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    async def _submit(self, request: SampleRequest | LogprobsRequest, limit: int) -> Answer:
        with self._usage.request():
            model, row = self._weights.answering(request.target)
            work = Work(request, model, row, limit)
            loop = asyncio.get_running_loop()
            self._requests += 1
            future = self._in_flight[work] = loop.create_future()
            if not self._outbox:  # requests made in one turn of the event loop go together
                loop.call_soon(self._flush)
            self._outbox.append(work)
            try:
                return await future
            except asyncio.CancelledError:
                work.cancelled = True
                self._queue.num_cancelled += 1
                raise
            finally:
                del self._in_flight[work]

    def _flush(self) -> None:
        works, self._outbox = self._outbox, []
        self._queue.put(works)

    def _deliver(self, results: list[tuple[Work, Answer | BaseException]]) -> None:
        """Called on a lane's thread: hand results to the event loop."""
        futures = [(self._in_flight.get(work), result) for work, result in results]
        waiting = [(future, result) for future, result in futures if future is not None]
        if waiting and not (loop := waiting[0][0].get_loop()).is_closed():
            loop.call_soon_threadsafe(_settle, waiting)


def _settle(waiting: "list[tuple[asyncio.Future[Answer], Answer | BaseException]]") -> None:
    for future, result in waiting:
        if future.done():
            continue
        if isinstance(result, BaseException):
            error = EngineError(f"the torch engine failed: {type(result).__name__}: {result}")
            error.__cause__ = result
            future.set_exception(error)
        else:
            future.set_result(result)
