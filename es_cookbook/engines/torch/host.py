"""A running torch engine: the model in this process, and the lanes that run its batches.

Its builder is in a separate module (`engine`): a Config is made, shown and checked without torch.
"""

import asyncio
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import anyio
import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from es_cookbook.checkpoints.models import (
    Vocabulary,
    architecture_for,
    load_causal_lm,
    load_tokenizer,
    parameter_infos,
)
from es_cookbook.checkpoints.tensors import dtype_name
from es_cookbook.common.errors import ConfigError, EngineError, with_class
from es_cookbook.common.terminal import interrupted, say_once
from es_cookbook.engines.base import (
    EngineTraits,
    LogprobsRequest,
    QueuedEngine,
    SampleRequest,
    Usage,
)
from es_cookbook.engines.torch.flat import FlatForward, new_cache
from es_cookbook.engines.torch.gpu.graphs import Capture, CapturedForward, CudaCapture
from es_cookbook.engines.torch.kernels.modules import Path as RowPath
from es_cookbook.engines.torch.kernels.products import (
    multiplies_bfloat16,
    multiplies_int8,
    products_of,
)
from es_cookbook.engines.torch.kernels.vectors import check_vectors
from es_cookbook.engines.torch.lane import Answer, Lane, WorkQueue
from es_cookbook.engines.torch.memory import CachePlan, check_weights_fit, trim, weight_bytes
from es_cookbook.engines.torch.own import OwnForward
from es_cookbook.engines.torch.prefix_cache import PrefixCache
from es_cookbook.engines.torch.resident_weights import ResidentWeights
from es_cookbook.engines.torch.slots import Forward, Work
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder
from es_cookbook.evolution.spaces.factors import StoredAdapter
from es_cookbook.rl.messages.answer_texts import AnswerTexts


def load(
    model_name: str,
    search_space: SearchSpaceBuilder,
    dtype: str,
    products: str,
    device_name: str,
    context_length: Callable[[PreTrainedModel], int],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, SearchSpace, torch.dtype]:
    """Load a model on its device, after it is known to fit there.

    Args:
        model_name: a directory or Hub name.
        search_space: parameters that genomes perturb.
        dtype: `engine.dtype`, of weights.
        products: `engine.products`.
        device_name: `engine.device`.
        context_length: most tokens of a request of a model.

    Returns:
        The model, its tokenizer, the search space over it, and the dtype of its products.

    Raises:
        ModelError: It cannot be read, or the search space does not suit it.
        ConfigError: It does not fit, there is no such device, or products cannot be as asked for.
    """
    device = _device(device_name)
    tokenizer = load_tokenizer(model_name)
    search_space = search_space.tokenized(partial(tokenizer.encode, add_special_tokens=False))
    architecture = architecture_for(search_space, model_name)
    space = search_space(parameter_infos(architecture), _read_adapter)
    check_vectors(architecture, space, context_length(architecture))
    if products == "int8" and space.is_dense:
        raise ConfigError(
            "engine.products=int8 rounds the weights that genomes share, and in this search space "
            "each has its own; use engine.products=float32, or search_space=low_rank"
        )
    configured = cast("torch.dtype | None", architecture.config.dtype)
    held = configured if dtype == "auto" else getattr(torch, dtype)
    if held is not None:
        chosen_products(products, dtype, held, device)  # refuses before the model is loaded
    size = (held or torch.float32).itemsize  # unset, the weights tell, which have at most 32 bits
    needed = weight_bytes(architecture, space, size, int8=products == "int8")
    check_weights_fit(model_name, needed, device)
    model = load_causal_lm(model_name, dtype, device)
    space = search_space(parameter_infos(model), _read_adapter)
    return model, tokenizer, space, chosen_products(products, dtype, model.dtype, device)


def _read_adapter(path: Path, weights: Mapping[str, tuple[int, int]]) -> StoredAdapter:
    from es_cookbook.checkpoints.peft import read_adapter  # Few search spaces start from one.

    return read_adapter(path, weights)


def chosen_products(
    products: str, dtype: str, weights: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the dtype of products for weights of a dtype, as the options ask for it.

    Raises:
        ConfigError: Products are chosen on another device than the CPU, would round weights that
            are not in bfloat16, or this processor has no such instructions.
    """
    if device.type != "cpu":
        if products != "auto":
            raise ConfigError(
                f"engine.products={products} is for the CPU, and the model is on {device.type}, "
                "where products have the dtype of the weights; leave it out, or set engine.dtype"
            )
        return weights
    if products == "int8":
        if not multiplies_int8():
            raise ConfigError(
                "engine.products=int8 takes a processor with AVX512_VNNI or AVX-VNNI, and this one "
                "has neither, or is held to fewer instructions; leave it out, or set "
                "engine.products=float32"
            )
        return torch.int8
    if products == "bfloat16" and weights != torch.bfloat16:
        raise ConfigError(
            f"engine.products=bfloat16 takes weights in bfloat16, and these are in "
            f"{dtype_name(weights)}; set engine.dtype=bfloat16 as well, or engine.products=float32"
        )
    asked = products if products != "auto" else dtype
    if asked == "auto":
        return products_of(weights, device)
    if asked != "bfloat16":
        return torch.float32
    if not multiplies_bfloat16():
        say_once(
            f"engine.{'dtype' if products == 'auto' else 'products'}=bfloat16: this processor has "
            "no instructions for bfloat16, and such products take several times as long as those "
            "in float32; engine.products=float32 keeps the weights in bfloat16 and multiplies in "
            "float32"
        )
    return torch.bfloat16


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


def captures(device: torch.device) -> Callable[[], Capture] | None:
    """Return what makes captures of steps on a device; None if it has no graphs."""
    return partial(CudaCapture, device) if device.type == "cuda" else None


class TorchEngine(QueuedEngine):
    """The embedded engine: runs requests on its lanes.

    Args:
        weights: its base, its centre and its genomes, this engine's alone.
        path: path on which batches run.
        plan: memory of the lanes.
        prefill_tokens: most prompt tokens of one forward pass.
    """

    def __init__(
        self,
        weights: ResidentWeights,
        tokenizer: PreTrainedTokenizerBase,
        path: RowPath,
        plan: CachePlan,
        prefill_tokens: int,
    ) -> None:
        model, self.tokenizer, self.space = weights.base, tokenizer, weights.space
        self._weights = weights
        self._usage = Usage()
        self._requests = 0
        self._in_flight: dict[Work, asyncio.Future[Answer]] = {}
        self._outbox: list[Work] = []
        base_dtype = dtype_name(model.dtype)
        products = dtype_name(path.products) if path.products is not None else None
        context_length = plan.context_length - self.space.num_virtual
        self.traits = EngineTraits(weights.capacity, context_length, base_dtype, products=products)
        self._queue = WorkQueue(plan.num_lanes)
        cache = new_cache(model.device, plan.num_blocks, path.kept)
        self._prefixes = PrefixCache(cache, plan.num_idle_blocks)
        vocabulary = Vocabulary(model, self.tokenizer)
        self._limits = self.traits.context_length, vocabulary.size
        self._never = vocabulary.never
        texts, ends = AnswerTexts(self.tokenizer), np.array(vocabulary.ends, np.int64)
        never = torch.tensor(sorted(self._never), device=model.device) if self._never else None

        def forward() -> Forward:
            if not path.flat:
                return OwnForward(path, model.device, prefill_tokens, never)
            flat = model.device, prefill_tokens, self._prefixes, never
            # Lanes beside each other would move what graphs of others read.
            if (capture := captures(model.device)) is None or plan.num_lanes > 1:
                return FlatForward(*flat)
            return CapturedForward(*flat, ends, capture)

        self._lanes = [
            Lane(
                *(self._queue, forward(), plan, texts, ends),
                *(self._deliver, self._tell, partial(self._served, i)),
            )
            for i in range(plan.num_lanes)
        ]
        self._threads = [
            threading.Thread(target=lane.run, name=f"lane-{i}", daemon=True)
            for i, lane in enumerate(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    @override
    async def load(self, genomes_G: Sequence[Genome]) -> None:
        """Fill tables of low-rank genomes, or make a set of weights for each dense one."""
        with self._usage.changing("load genomes"):
            # The centre stays where it is.
            self._prefixes.clear(lambda target: isinstance(target, int))
            await asyncio.to_thread(self._weights.load, genomes_G)

    @override
    async def apply(self, step: Step) -> int:
        with self._changing("move the centre"), self.spans.span(self.label, "apply"):
            return await asyncio.to_thread(self._weights.apply, step)

    @override
    async def restore(self, steps: Iterable[Step], snapshot: Path | None = None) -> int:
        self._usage.rests = False
        with self._changing("restore the centre"):
            return await asyncio.to_thread(self._weights.restore, list(steps), snapshot)

    @override
    async def save(self, path: Path) -> None:
        with self._usage.changing("save the centre"):
            await asyncio.to_thread(self._weights.save, path, self.tokenizer)

    @override
    async def rest(self) -> None:
        with self._changing("rest"):
            self._prefixes.cache.release()
            for lane in self._lanes:
                lane.forward.release()
            self._weights.release()
            trim()
            self._usage.rests = True

    @override
    def stats(self) -> Mapping[str, float]:
        """Return counters: `tokens` sampled, `requests` taken, and tokens of their prompts.

        `prefilled_tokens` of those were run, and `cached_tokens` were cached, from a prompt with
        the same prefix or an earlier turn.
        """
        return {
            "tokens": sum(lane.num_tokens for lane in self._lanes),
            "requests": self._requests,
            "prefilled_tokens": sum(lane.forward.num_prefilled for lane in self._lanes),
            "cached_tokens": sum(lane.forward.num_cached for lane in self._lanes),
        }

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
        # A lane inside a forward pass cannot be interrupted; it is a daemon thread.
        with anyio.move_on_after(0.3 if interrupted.is_set() else 60.0):
            while any(thread.is_alive() for thread in self._threads):
                await anyio.sleep(0.005)

    @contextmanager
    def _changing(self, what: str) -> Generator[None]:
        """Take exclusive access inside, and drop cached tokens of the weights."""
        with self._usage.changing(what):
            self._prefixes.clear()
            yield

    @override
    async def _submit(
        self, request: SampleRequest | LogprobsRequest, limit: int, wants_tops: bool = False
    ) -> Answer:
        with self._usage.request():
            model, row = self._weights.answering(request.target)
            virtual_T = self._weights.virtual_tokens(request.target)
            work = Work(request, model, row, limit, self._prefixes.version, wants_tops, virtual_T)
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

    def _served(self, lane: int, began: float, ended: float) -> None:
        """Record the time in which a lane had requests; called on its thread."""
        self.spans.add(f"{self.label}, lane {lane}", "sample", began, ended)

    def _tell(self, told: list[tuple[Work, list[int]]]) -> None:
        """Report tokens of followed requests, before their answers; called on a lane's thread."""
        futures = (self._in_flight.get(work) for work, _ in told)
        if (future := next(filter(None, futures), None)) and not future.get_loop().is_closed():
            future.get_loop().call_soon_threadsafe(_follow, told)

    def _deliver(self, results: list[tuple[Work, Answer | BaseException]]) -> None:
        """Hand results to the event loop; called on a lane's thread."""
        futures = [(self._in_flight.get(work), result) for work, result in results]
        waiting = [(future, result) for future, result in futures if future is not None]
        if waiting and not (loop := waiting[0][0].get_loop()).is_closed():
            loop.call_soon_threadsafe(_settle, waiting)


def _follow(told: list[tuple[Work, list[int]]]) -> None:
    for work, tokens_T in told:
        if isinstance(work.request, SampleRequest) and work.request.progress and not work.cancelled:
            work.request.progress.sampled(tokens_T)


def _settle(waiting: "list[tuple[asyncio.Future[Answer], Answer | BaseException]]") -> None:
    for future, result in waiting:
        if future.done():
            continue
        if isinstance(result, BaseException):
            error = EngineError(f"the torch engine failed: {with_class(result)}")
            error.__cause__ = result
            future.set_exception(error)
        else:
            future.set_result(result)
