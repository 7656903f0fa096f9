"""A lane: one thread that runs requests through one model at a time, with continuous batching.

Requests wait in a `WorkQueue` shared by all lanes. A lane takes as many as it has slots for,
prefills them together, and then decodes one token for all of its slots at a time; finished rows
leave, waiting requests enter. Slots come in blocks of `ROWS_PER_BLOCK` that belong to one genome,
because the low-rank parts are computed by block.

On the CPU there is a lane for each core, and each runs on one thread: nothing waits at a barrier,
and a row's bits do not depend on the number of cores. On CUDA and MPS there is one lane.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch

from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch.attention import DecodeRows, PrefillRows, SlotCache, round_up
from es_cookbook.engines.torch.population_layers import (
    MIN_ROWS,
    ROWS_PER_BLOCK,
    Batch,
    Factors,
    PopulationModel,
)
from es_cookbook.engines.torch.slots import SlotTable
from es_cookbook.engines.torch.token_sampling import choose_tokens, token_logprobs
from es_cookbook.engines.torch.work_queue import Work, WorkQueue
from es_cookbook.rl.types import Action

_SLOT_LENGTH_STEP = 32
_MIN_SLOT_LENGTH = 64
"""Room for the shortest cache view of heads of 8 (see `attention`)."""
_PATIENCE = 8
"""Decode steps after which a waiting request is admitted even if few are."""
_BATCHES_BEFORE_YIELD = 4
"""A lane turns to another model that has work after this many times its slots."""

Answer: TypeAlias = Action | list[float]
"""To a sample request, and to a logprobs request."""


class Lane:
    """Runs requests from the queue, which all lanes share, until it closes.

    Args:
        max_rows: most slots.
        cache_bytes: memory for keys and values, and `bytes_per_token` of one request.
        prefill_tokens: most prompt tokens of one forward pass (a longer prompt goes alone).
        decode: tokens of finished requests to texts.
        deliver: called with finished requests and their results or errors.

    Attributes:
        num_tokens: sampled so far.
    """

    def __init__(
        self,
        queue: WorkQueue,
        *,
        device: torch.device,
        max_rows: int,
        cache_bytes: int,
        bytes_per_token: int,
        prefill_tokens: int,
        eos_token_ids: Sequence[int],
        decode: Callable[[list[list[int]]], list[str]],
        deliver: Callable[[list[tuple[Work, Answer | BaseException]]], None],
    ) -> None:
        self.num_tokens = 0
        self._queue = queue
        self._device = device
        self._max_rows = max_rows
        self._cache_tokens = cache_bytes // bytes_per_token
        self._prefill_tokens = prefill_tokens
        self._eos = np.array(sorted(eos_token_ids), dtype=np.int64)
        self._decode_texts = decode
        self._deliver = deliver
        self._table = SlotTable(0, 0)
        self._cache = SlotCache(0, 0)
        self._scoring: list[Work] = []
        self._num_cancelled = 0
        self._steps_since_admission = 0

    def run(self) -> None:
        """The thread's body."""
        if self._device.type == "cpu":
            torch.set_num_threads(1)
        with torch.inference_mode():
            while (model := self._queue.wait_for_model()) is not None:
                try:
                    self._serve(model)
                except Exception as error:  # its callers get it; the lane itself must live on
                    error.add_note("".join(traceback.format_exception(error)))
                    lost = (*self._table.works, *self._scoring)
                    self._table = SlotTable(0, 0)
                    self._deliver([(work, error) for work in lost if work is not None])
                finally:
                    self._scoring = []
                    self._queue.leave(model)

    def _serve(self, model: PopulationModel) -> None:
        """Run requests for one model until none is left, or others have waited long enough."""
        self._fit_cache(self._queue.longest(model))
        factors = _GatheredFactors(model)
        admitted = 0
        while not self._queue.closed:
            self._scoring = self._queue.take_scores(model, self._prefill_tokens)
            if self._scoring:
                self._score(model, self._scoring)
            may_admit = admitted < _BATCHES_BEFORE_YIELD * self._max_rows
            if may_admit or not self._queue.others_wait(model):
                admitted += self._admit(model)
            self._drop_cancelled()
            if not self._table.num_active:
                return
            self._decode(model, factors)
        self._table = SlotTable(0, 0)

    def _fit_cache(self, longest: int) -> None:
        """Lay the cache out for requests of at most `longest` tokens, while none is running."""
        length = max(_MIN_SLOT_LENGTH, round_up(longest, _SLOT_LENGTH_STEP))
        if self._table.num_slots and length <= self._table.slot_length <= 2 * length:
            return
        slots = min(self._max_rows, self._cache_tokens // max(1, length))
        slots = max(MIN_ROWS, slots // ROWS_PER_BLOCK * ROWS_PER_BLOCK)
        self._table, self._cache = SlotTable(slots, length), SlotCache(slots, length)

    def _admit(self, model: PopulationModel) -> int:
        """Take waiting requests into free slots once they make a good batch. Returns how many."""
        table = self._table
        self._steps_since_admission += 1
        active = table.num_active
        fillable = min(self._queue.num_waiting(model), table.num_slots - active)
        few = fillable < min(active // 8 + 1, self._max_rows // 16)
        if fillable == 0 or (few and self._steps_since_admission < _PATIENCE):
            return 0
        self._steps_since_admission = 0
        works = self._queue.take_samples(
            model, table.free_slots_of_genomes(), table.num_empty_blocks(), table.slot_length
        )
        slots = table.place(works)
        of_genomes = sorted(zip(works, slots, strict=True), key=lambda placed: placed[0].row)
        for batch in self._prefill_batches(of_genomes):
            self._prefill(model, [work for work, _ in batch], [slot for _, slot in batch])
        return len(works)

    def _prefill_batches(self, placed: list[tuple[Work, int]]) -> Iterator[list[tuple[Work, int]]]:
        """Neighbours whose prompts are together at most `prefill_tokens` long, or one alone."""
        batch: list[tuple[Work, int]] = []
        tokens = 0
        for work, slot in placed:
            if batch and tokens + len(work.sequence) > self._prefill_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append((work, slot))
            tokens += len(work.sequence)
        if batch:
            yield batch

    def _prefill(self, model: PopulationModel, works: list[Work], slots: list[int]) -> None:
        """Run whole prompts, fill their slots and sample their first tokens."""
        rows = _FlatRows(works, self._device)
        attention = PrefillRows(rows.starts, rows.lengths, self._device, self._cache, slots)
        last = [start + length - 1 for start, length in zip(rows.starts, rows.lengths, strict=True)]
        # A batched matmul of one member takes another code path: see `attention`.
        if len(last) == 1:
            last *= 2
        logit_rows = torch.tensor(last, device=self._device)
        logits = self._forward_flat(model, rows, attention, logit_rows)
        self._sample(np.array(slots), logits[: len(works)].float())

    def _forward_flat(
        self,
        model: PopulationModel,
        rows: "_FlatRows",
        attention: PrefillRows,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        head = None
        if model.head_table is not None:
            head = model.head_table.rows(rows.genome_of_block[logit_rows // ROWS_PER_BLOCK])
        batch = Batch(attention, model.gather(rows.genome_of_block), head)
        return model.forward(rows.tokens_T, rows.positions_T, batch, logit_rows)

    def _decode(self, model: PopulationModel, factors: "_GatheredFactors") -> None:
        """One more token for every running request."""
        table = self._table
        if (order := table.packed_order()) is not None:
            self._cache.keep(torch.from_numpy(order).to(self._device))
            table.reorder(order)
        n = table.num_rows
        positions = torch.from_numpy(table.position[:n]).to(self._device)
        tokens = torch.from_numpy(table.newest[:n]).to(self._device)
        batch = Batch(
            DecodeRows(self._cache, positions),
            factors.of_blocks(table.genome_of_block[: n // ROWS_PER_BLOCK], self._device),
        )
        logits = model.forward(tokens, positions, batch, None)
        slots = table.active[:n].nonzero()[0]
        if len(slots) < n:
            logits = logits[torch.from_numpy(slots).to(self._device)]
        self._sample(slots, logits.float())

    def _sample(self, slots: np.ndarray, logits_N_V: torch.Tensor) -> None:
        """Sample a token for each slot from its row of logits, and let go of requests that end."""
        table = self._table
        uniform = table.uniforms[slots, table.count[slots]]
        options = (table.temperature[slots], table.top_p[slots], uniform)
        there = (torch.from_numpy(option).to(self._device) for option in options)
        tokens_N = choose_tokens(logits_N_V, *there)
        logprobs = None
        if table.wants_logprobs[slots].any():
            logprobs = token_logprobs(logits_N_V, tokens_N).cpu().numpy()
        tokens = tokens_N.cpu().numpy()
        table.accept(slots, tokens, logprobs)
        self.num_tokens += len(slots)
        stopped = np.isin(tokens, self._eos)
        ended = stopped | (table.count[slots] >= table.limit[slots])
        for i in (table.has_stops[slots] & ~stopped).nonzero()[0].tolist():
            if self._hits_stop(int(slots[i])):
                stopped[i] = ended[i] = True
        if ended.any():
            self._finish(slots[ended], stopped[ended])

    def _hits_stop(self, slot: int) -> bool:
        work = self._table.works[slot]
        assert work is not None and isinstance(work.request, SampleRequest)
        observation = work.request.observation
        tokens = self._table.tokens[slot, : self._table.count[slot]].tolist()
        if tokens[-1] in observation.stop_token_ids:
            return True
        if not observation.stop:
            return False
        (text,) = self._decode_texts([tokens])
        return any(stop in text for stop in observation.stop)

    def _finish(self, slots: np.ndarray, stopped: np.ndarray) -> None:
        table = self._table
        tokens = [table.tokens[slot, : table.count[slot]].tolist() for slot in slots]
        results: list[tuple[Work, Answer | BaseException]] = []
        for slot, tokens_T, text, stop in zip(
            slots.tolist(), tokens, self._decode_texts(tokens), stopped.tolist(), strict=True
        ):
            work = table.works[slot]
            assert work is not None
            logprobs_T = None
            if table.wants_logprobs[slot]:
                logprobs_T = tuple(table.logprobs[slot, : len(tokens_T)].tolist())
            reason = "stop" if stop else "length"
            results.append((work, Action(tuple(tokens_T), text, reason, logprobs_T)))
        table.release(slots.tolist())
        self._deliver(results)

    def _drop_cancelled(self) -> None:
        if self._num_cancelled == self._queue.num_cancelled:
            return
        self._num_cancelled = self._queue.num_cancelled
        works = enumerate(self._table.works)
        self._table.release([slot for slot, work in works if work is not None and work.cancelled])

    def _score(self, model: PopulationModel, works: list[Work]) -> None:
        """Log-probabilities of continuations, in one pass; nothing is cached."""
        rows = _FlatRows(works, self._device)
        attention = PrefillRows(rows.starts, rows.lengths, self._device)
        spans: list[tuple[int, int]] = []
        for work, start in zip(works, rows.starts, strict=True):
            request = work.request
            assert isinstance(request, LogprobsRequest)
            spans.append((start + len(request.prompt_T), len(request.continuation_T)))
        targets = torch.cat([torch.arange(first, first + n) for first, n in spans]).to(self._device)
        # The row before a token predicts it; one more row keeps a single one from being alone
        # (see `_prefill`).
        logit_rows = torch.cat([targets - 1, targets[-1:]])
        logits = self._forward_flat(model, rows, attention, logit_rows)[:-1].float()
        scores = token_logprobs(logits, rows.tokens_T[targets]).cpu().split([n for _, n in spans])
        self._deliver([(work, part.tolist()) for work, part in zip(works, scores, strict=True)])


class _FlatRows:
    """Token sequences of several requests as flat rows, each genome's padded to whole blocks."""

    def __init__(self, works: Sequence[Work], device: torch.device) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        genomes: list[int] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []
        for i, work in enumerate(works):
            sequence = work.sequence
            self.starts.append(len(tokens))
            self.lengths.append(len(sequence))
            tokens += sequence
            positions += range(len(sequence))
            last = i + 1 == len(works)
            if last or works[i + 1].row != work.row:
                least = MIN_ROWS if last else 0
                padding = max(round_up(len(tokens), ROWS_PER_BLOCK), least) - len(tokens)
                tokens += [0] * padding
                positions += [0] * padding
                genomes += [work.row] * (len(tokens) // ROWS_PER_BLOCK - len(genomes))
        self.tokens_T = torch.tensor(tokens, device=device)
        self.positions_T = torch.tensor(positions, device=device)
        self.genome_of_block = torch.tensor(genomes, device=device)


class _GatheredFactors:
    """Low-rank parts gathered for a lane's blocks.

    They are kept while neither the blocks' genomes nor the tables change.
    """

    def __init__(self, model: PopulationModel) -> None:
        self._model = model
        self._tables = model.tables
        self._genomes = np.empty(0, dtype=np.int64)
        self._gathered: Factors | None = None

    def of_blocks(self, genomes: np.ndarray, device: torch.device) -> Factors | None:
        """One (A, B) a block for every linear group; idle blocks (-1) take an active one's."""
        same = np.array_equal(genomes, self._genomes)
        if not same or self._model.tables is not self._tables:
            self._tables = self._model.tables
            self._genomes = genomes.copy()
            stand_in = genomes[genomes >= 0][0]
            blocks = torch.from_numpy(np.where(genomes < 0, stand_in, genomes)).to(device)
            self._gathered = self._model.gather(blocks)
        return self._gathered
