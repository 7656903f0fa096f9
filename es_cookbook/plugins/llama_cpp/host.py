"""A running engine on llama.cpp: a thread that gives its process one genome's requests at a time.

Requests wait in queues, by the genome that answers them. The thread turns to the genome that waits
longest, writes its factors over the adapter's, and runs its requests until none is left; requests
that come in the meantime join. Tokens are chosen here, from the logits in shared memory, by the
torch engine's functions: a seed draws as it does there.
"""

import asyncio
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import psutil
import torch
from typing_extensions import override

from es_cookbook.checkpoints.models import load_causal_lm, save_model
from es_cookbook.common.errors import ConfigError, EngineError, ModelError
from es_cookbook.common.terminal import show_bytes
from es_cookbook.engines.base import (
    EngineTraits,
    LogprobsRequest,
    QueuedEngine,
    SampleRequest,
    Target,
    Usage,
)
from es_cookbook.engines.torch.slots import choose_tokens, token_logprobs, tops
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.plugins.llama_cpp.child import NO_ROOM, PASS_TOKENS
from es_cookbook.plugins.llama_cpp.model import Model
from es_cookbook.plugins.llama_cpp.process import Ended, LlamaProcess
from es_cookbook.plugins.llama_cpp.rows import Row, Work, begin, next_pass
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.types import Action

_CAPACITY = 2**16
"""Genomes, of which only seeds are kept."""
_LONGEST = 4096
Answer: TypeAlias = Action | list[Any]
"""Answer to a sample request, or to a logprobs request."""


class LlamaCppEngine(QueuedEngine):
    """An engine on llama.cpp; call `open` before anything else.

    Args:
        model: the model without its weights, and the centre.
        rows: most requests that decode together.
        max_model_len: most tokens of a request; None for the model's own.
        cache_bytes: most memory of keys and values.
    """

    def __init__(
        self, model: Model, rows: int, max_model_len: int | None, cache_bytes: int
    ) -> None:
        self.tokenizer, self.space = model.tokenizer, model.space
        self._model = model
        own = int(model.architecture.config.get_text_config().max_position_embeddings)
        cache_bytes = min(cache_bytes, psutil.virtual_memory().available // 2)
        self._most_cells = cache_bytes // model.bytes_per_token
        if (max_model_len or 1) > self._most_cells:
            needed = (max_model_len or 1) * model.bytes_per_token
            raise ConfigError(
                f"engine.max_model_len={max_model_len or 1}: keys and values of one request take "
                f"{show_bytes(needed)}, and engine.kv_cache_gib and half of the free memory hold "
                f"{show_bytes(cache_bytes)}; lower the first, or raise the second"
            )
        length = min(own, max_model_len or _LONGEST, self._most_cells)
        self.traits = EngineTraits(_CAPACITY, length, model.dtype)
        self._limits, self._never = (length, model.vocabulary.size), model.vocabulary.never
        self._never_V = torch.tensor(sorted(self._never))
        self._texts, self._ends = AnswerTexts(self.tokenizer), frozenset(model.vocabulary.ends)
        self._usage = Usage()
        self._changed = threading.Condition()
        self._queues: dict[Target, deque[Work]] = {}
        self._genomes_G: list[Genome] = []
        self._target: Target | None = None
        self._rows = [Row(i) for i in range(rows)]
        self._cells = 0
        self._process: LlamaProcess | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        counted = ("tokens", "requests", "prefilled_tokens", "cached_tokens", "load_seconds")
        self._counters: dict[str, float] = dict.fromkeys(counted, 0.0)

    async def open(self, file: Path, *, threads: int, gpu_layers: int, repack: bool) -> None:
        """Start the process, and have it map the model's file.

        Options are the builder's.

        Raises:
            ModelError: llama.cpp refuses it.
            EngineError: Its process has ended.
        """
        size = sum(self._model.factors.values()) // 4
        self._process = await LlamaProcess.start(size, len(self._rows), self._model.vocabulary.size)
        with tempfile.TemporaryDirectory() as directory:
            adapter = Path(directory) / "adapter.gguf"
            self._model.write_genome(adapter, Genome())
            try:
                options = {"threads": threads, "gpu_layers": gpu_layers, "repack": repack}
                await asyncio.to_thread(self._open, self._process, file, adapter, options)
            except Ended:
                raise await self._process.failure() from None
        self._thread = threading.Thread(target=self._run, name="llama.cpp", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def _open(
        self, process: LlamaProcess, file: Path, adapter: Path, options: Mapping[str, int]
    ) -> None:
        found = process.order("open", str(file), **options)
        if found["vocabulary"] != self._model.vocabulary.size:
            raise ModelError(
                f"model_name: the file {str(file)!r:.300} has {found['vocabulary']:,} tokens for "
                f"llama.cpp, and {self._model.vocabulary.size:,} for transformers"
            )
        process.order("load_adapter", str(adapter), list(self._model.factors.items()))
        self._fit(process, 1)

    @override
    async def load(self, genomes_G: Sequence[Genome]) -> None:
        with self._usage.changing("load genomes"):
            self._genomes_G = [*genomes_G]
            if self._target not in ("base", "centre"):
                self._target = None

    @override
    async def apply(self, step: Step) -> int:
        with self._usage.changing("move the centre"), self.spans.span(self.label, "apply"):
            self._genomes_G, self._target = [], None
            return await asyncio.to_thread(self._model.centre.apply, step)

    @override
    async def restore(self, steps: Iterable[Step], snapshot: Path | None = None) -> int:
        with self._usage.changing("restore the centre"):
            self._genomes_G, self._target = [], None
            return await asyncio.to_thread(self._model.centre.restore, list(steps))

    @override
    async def save(self, path: Path) -> None:
        with self._usage.changing("save the centre"):
            await asyncio.to_thread(self._save, path)

    def _save(self, path: Path) -> None:
        """Write the dequantised model with the adapter merged."""
        model = load_causal_lm(self._model.name, self.traits.base_dtype, torch.device("cpu"))
        self.space.merge_(dict(model.named_parameters()), self._model.centre.weights)
        save_model(model.save_pretrained, self.tokenizer, path)

    @override
    def stats(self) -> Mapping[str, float]:
        """Return counters: `tokens` sampled, `requests` taken, and tokens of their prompts.

        `prefilled_tokens` of those were run, and `cached_tokens` were cached. `load_seconds` were
        spent on writing genomes' factors.
        """
        return dict(self._counters)

    def memory(self, length: int) -> dict[str, int]:
        """Return the bytes that requests of so many tokens take, besides the file."""
        rows, model = len(self._rows), self._model
        cells = min(self._most_cells, rows * length)
        return {
            f"keys and values of up to {rows} requests": cells * model.bytes_per_token,
            "adapter: start, centre, a genome, llama.cpp's": 4 * sum(model.factors.values()),
            "logits": 4 * rows * model.vocabulary.size,
        }

    @override
    async def close(self) -> None:
        self._usage.closed = True
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._process is not None:
            process, self._process = self._process, None
            await process.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 60.0)
        self._lose(EngineError("the engine was closed while this request was in flight"))

    @override
    async def _submit(
        self, request: SampleRequest | LogprobsRequest, limit: int, wants_tops: bool = False
    ) -> Answer:
        with self._usage.request():
            target = request.target
            if isinstance(target, int) and not 0 <= target < len(self._genomes_G):
                raise EngineError(
                    f"genome {target} is not resident; {len(self._genomes_G)} are loaded"
                )
            work = Work(request, limit, asyncio.get_running_loop().create_future(), wants_tops)
            with self._changed:
                self._queues.setdefault(target, deque()).append(work)
                self._changed.notify()
            self._counters["requests"] += 1
            return await work.future

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or any(self._queues.values()))
                if self._closing or self._process is None:
                    return
                target = cast(Target, next(each for each, works in self._queues.items() if works))
            began = time.perf_counter()
            try:
                self._serve(self._process, target)
            except Exception as error:  # Its callers get it.
                if not self._closing:
                    failed = self._failed(error, self._process)
                    self._ending = asyncio.run_coroutine_threadsafe(failed, self._loop)
                if isinstance(error, Ended):
                    return
            self.spans.add(self.label, "sample", began, time.perf_counter())

    def _serve(self, process: LlamaProcess, target: Target) -> None:
        """Run the requests of one genome until none is left."""
        queue = self._queues[target]
        self._fit(process, max(work.length for work in queue))
        if self._target != target:
            self._turn_to(process, target)
        while self._admit(queue):
            self._step(process)
        with self._changed:
            if not queue:
                del self._queues[target]  # Others come first when it comes again.

    def _turn_to(self, process: LlamaProcess, target: Target) -> None:
        began = time.perf_counter()
        self._target = None
        genome = self._genomes_G[target] if isinstance(target, int) else Genome()
        if target != "base":
            self._model.fill(process.factors, genome)
        process.order("use_adapter", target != "base")
        for row in self._rows:
            row.tokens = []
        self._target = target
        self._counters["load_seconds"] += time.perf_counter() - began

    def _fit(self, process: LlamaProcess, longest: int) -> None:
        """Make the context large enough for a batch of such requests, as far as memory goes."""
        wanted = PASS_TOKENS
        while wanted < longest * len(self._rows):
            wanted *= 2
        wanted = min(wanted, self._most_cells)
        if wanted > self._cells:
            process.order("make_context", wanted, len(self._rows))
            self._cells, self._target = wanted, None

    def _admit(self, queue: deque[Work]) -> bool:
        """Give free rows to requests that wait; returns whether any runs."""
        with self._changed:
            for row in self._rows:
                if row.work is not None and row.work.future.cancelled():
                    row.end()
            used = sum(row.work.length for row in self._rows if row.work is not None)
            # Rows with few tokens in the cache first: prefixes stay.
            free = [row for row in self._rows if row.work is None]
            free.sort(key=lambda row: -len(row.tokens))
            while free and queue and used + queue[0].length <= self._cells:
                work = queue.popleft()
                if not work.future.cancelled():
                    used += work.length
                    free.pop().work = work
        return any(row.work is not None for row in self._rows)

    def _step(self, process: LlamaProcess) -> None:
        """Run one forward pass, and take the tokens that follow from it."""
        begun = begin(self._rows)
        for number, _, kept in begun:
            work = self._rows[number].work
            assert work is not None
            self._counters["cached_tokens"] += kept
            self._counters["prefilled_tokens"] += len(work.given) - kept
            if isinstance(work.request, SampleRequest) and work.request.progress:
                work.request.progress.cached_tokens = kept
        tokens, outputs = next_pass(self._rows, PASS_TOKENS, len(self._rows))
        if process.order("decode", begun, tokens)["status"] == NO_ROOM:
            idle = [row for row in self._rows if row.work is None or not row.is_begun]
            for row in idle:
                row.tokens = []
            again = [(row.number, row.number, 0) for row in idle]
            if process.order("decode", again, tokens)["status"] == NO_ROOM:
                raise EngineError(f"llama.cpp has no room in a context of {self._cells:,} tokens")
        if outputs:
            self._take(process, outputs)

    def _take(self, process: LlamaProcess, outputs: Sequence[tuple[Row, int]]) -> None:
        logits = torch.from_numpy(process.logits[: len(outputs)])
        if len(self._never_V):
            logits.index_fill_(-1, self._never_V, torch.finfo(logits.dtype).min)
        works = [cast(Work, row.work) for row, _ in outputs]
        scored = [i for i, work in enumerate(works) if isinstance(work.request, LogprobsRequest)]
        sampling = [i for i, work in enumerate(works) if isinstance(work.request, SampleRequest)]
        if scored:
            given = np.array([works[i].given[outputs[i][1] + 1] for i in scored])
            for i, top in zip(scored, tops(logits, np.array(scored), given).tolist(), strict=True):
                works[i].found.append(top if works[i].wants_tops else top[0])
        if sampling:
            self._sample(logits, np.array(sampling), [works[i] for i in sampling])
        answers: list[tuple[Work, Answer]] = []
        followed: list[tuple[Work, list[int]]] = []
        for row, _ in dict(outputs).items():
            work = cast(Work, row.work)
            answer = self._answer(work, is_over=not row.waiting)
            if answer is not None:
                answers.append((work, answer))
                row.end()
            elif isinstance(work.request, SampleRequest):
                row.waiting = [work.sampled[-1]]
                if work.request.progress is not None and work.request.progress.follows:
                    followed.append((work, [*work.sampled]))
        if answers or followed:
            self._loop.call_soon_threadsafe(_settle, followed, answers)

    def _sample(self, logits: torch.Tensor, rows_B: np.ndarray, works: Sequence[Work]) -> None:
        params = [cast(SampleRequest, work.request).params for work in works]
        uniforms = [work.uniforms[len(work.sampled)] if len(work.uniforms) else 0 for work in works]
        options = [each.temperature for each in params], [each.top_p for each in params], uniforms
        temperature_B, top_p_B, uniform_B = (np.array(each, np.float64) for each in options)
        tokens = choose_tokens(logits, temperature_B, top_p_B, uniform_B, rows_B)
        asked = np.array([each.logprobs for each in params])
        logprobs = np.zeros(len(works))
        if asked.any():
            logprobs[asked] = token_logprobs(logits, rows_B[asked], tokens[asked])
        for work, token, logprob in zip(works, tokens.tolist(), logprobs.tolist(), strict=True):
            work.sampled.append(token)
            work.found.append(logprob)
        self._counters["tokens"] += len(works)

    def _answer(self, work: Work, is_over: bool) -> Answer | None:
        """Return the result of a request that has ended, or None."""
        if isinstance(work.request, LogprobsRequest):
            return work.found if is_over else None
        observation, token = work.request.observation, work.sampled[-1]
        stopped = token in self._ends or token in observation.stop_token_ids
        stopped = stopped or self._texts.is_ended(work.sampled, work.request.stop)
        if not stopped and len(work.sampled) < work.limit:
            return None
        text = self._texts.before(work.request.cut_at, self._texts.text(work.sampled))
        logprobs_T = tuple(work.found) if work.request.params.logprobs else None
        return Action(tuple(work.sampled), text, "stop" if stopped else "length", logprobs_T)

    # What follows runs on the event loop again.

    async def _failed(self, error: Exception, process: LlamaProcess) -> None:
        if isinstance(error, Ended):
            self._usage.closed = True  # Nothing would answer later requests.
            failure = await process.failure()
        else:
            failure = EngineError(f"llama.cpp's engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._lose(failure)

    def _lose(self, error: EngineError) -> None:
        """Fail all requests."""
        with self._changed:
            works = [work for works in self._queues.values() for work in works]
            works += [row.work for row in self._rows if row.work is not None]
            self._queues.clear()
            for row in self._rows:
                row.end()
            self._target = None
        for work in works:
            if not work.future.done():
                work.future.set_exception(error)


def _settle(followed: list[tuple[Work, list[int]]], answers: list[tuple[Work, Answer]]) -> None:
    for work, tokens_T in followed:
        assert isinstance(work.request, SampleRequest) and work.request.progress is not None
        if not work.future.done():
            work.request.progress.sampled(tokens_T)
    for work, answer in answers:
        if not work.future.done():
            work.future.set_result(answer)
