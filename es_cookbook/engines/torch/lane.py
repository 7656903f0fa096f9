"""Lanes, and the queue of requests that they share.

A lane is one thread that runs requests through one model at a time, with continuous batching. It
takes as many as it has slots for, prefills them together, and then decodes one token for all of its
slots at a time; finished rows leave, waiting requests enter. Slots come in blocks of
`ROWS_PER_BLOCK` that belong to one genome, because the low-rank parts are computed by block.

On the CPU there is a lane for each core, and each runs on one thread: nothing waits at a barrier,
and a row's bits do not depend on the number of cores. On CUDA and MPS there is one lane.
"""

import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch.attention import round_up
from es_cookbook.engines.torch.kernels.attention import STEP
from es_cookbook.engines.torch.memory import CachePlan
from es_cookbook.engines.torch.population_layers import ROWS_PER_BLOCK, PopulationModel
from es_cookbook.engines.torch.slots import Forward, SlotTable, Work
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.types import Action

_PATIENCE = 8
"""Decode steps after which a waiting request is admitted even if few are."""
_UNTIL_OTHERS_END = 0.01
"""Seconds before an idle lane checks again whether others have freed memory."""
_BATCHES_BEFORE_YIELD = 4
"""A lane turns to another model that has work after this many times its slots."""

Answer: TypeAlias = Action | list[float]
"""Answer to a sample request, or to a logprobs request."""


_ByRow: TypeAlias = dict[int, deque[Work]]
"""Requests for one model, by their genomes' rows."""


class WorkQueue:
    """Waiting requests, by model and genome. Thread-safe.

    Attributes:
        changed: notified when work arrives or the queue closes; guards the rest.
        closed: no more work is handed out.
        num_cancelled: requests cancelled so far, so that lanes know when to look.
    """

    def __init__(self, num_lanes: int) -> None:
        self.changed = threading.Condition()
        self.closed = False
        self.num_cancelled = 0
        self._num_lanes = num_lanes
        self._sample: dict[PopulationModel, _ByRow] = {}
        self._score: dict[PopulationModel, _ByRow] = {}
        self._lanes_on = Counter[PopulationModel]()
        # Lanes that have their share of requests for a model, until more come.
        self._served: dict[PopulationModel, set[int]] = {}

    def put(self, works: Sequence[Work]) -> None:
        """Add requests and wake the lanes."""
        with self.changed:
            for work in works:
                scores = isinstance(work.request, LogprobsRequest)
                by_row = (self._score if scores else self._sample).setdefault(work.model, {})
                by_row.setdefault(work.row, deque()).append(work)
                if not scores:
                    self._served[work.model] = set()
            self.changed.notify_all()

    def wait_for_model(self) -> PopulationModel | None:
        """Return the model for a free lane, the one that fewest lanes run; None when closed."""
        with self.changed:
            while not self.closed:
                models = [*self._score, *self._sample]
                if models:
                    model = min(models, key=self._lanes_on.__getitem__)
                    self._lanes_on[model] += 1
                    return model
                self.changed.wait()
            return None

    def leave(self, model: PopulationModel) -> None:
        """Record that a lane leaves a model."""
        with self.changed:
            self._lanes_on[model] -= 1
            if not self._lanes_on[model]:
                del self._lanes_on[model]
            # It is the others' turn now, where any wait as well.
            for waiting in (self._score, self._sample):
                if model in waiting:
                    waiting[model] = waiting.pop(model)

    def others_wait(self, model: PopulationModel) -> bool:
        """Return whether requests for other models wait."""
        with self.changed:
            return any(m is not model for m in (*self._score, *self._sample))

    def num_waiting(self, model: PopulationModel) -> int:
        """Return the number of sample requests that wait for a model."""
        with self.changed:
            return sum(len(works) for works in self._sample.get(model, {}).values())

    def longest(self, model: PopulationModel) -> int:
        """Return the most cache tokens that a request in the queue needs; 0 if none waits."""
        with self.changed:
            by_row = self._sample.get(model, {})
            return max((work.length for works in by_row.values() for work in works), default=0)

    def take_samples(
        self,
        model: PopulationModel,
        free_of_row: dict[int, int],
        empty_blocks: int,
        max_length: int,
        alike: Callable[[Work], Hashable],
    ) -> list[Work]:
        """Take requests for the free slots in blocks of each genome, then for empty blocks.

        Returns a lane's share of those that need at most `max_length` cache tokens and that are all
        `alike`: as many of a genome as it has free slots, and more in whole blocks.
        """
        taken: list[Work] = []
        with self.changed:
            by_row = self._sample.get(model)
            if not by_row:
                return taken
            lane, served = threading.get_ident(), self._served[model]
            # A lane that has had its share comes again where others may have gone elsewhere.
            lanes = self._num_lanes - (0 if lane in served else len(served))
            served.add(lane)
            share = round_up(-(-sum(map(len, by_row.values())) // max(1, lanes)), ROWS_PER_BLOCK)

            def pop(row: int, most: int) -> list[Work]:
                works = by_row[row]
                popped: list[Work] = []
                others: list[Work] = []
                while works and len(popped) < most and not _too_long(works[0], max_length):
                    work = works.popleft()
                    if not work.cancelled:
                        first = (taken or popped or [work])[0]
                        (popped if alike(work) == alike(first) else others).append(work)
                works.extendleft(reversed(others))
                if not works:
                    del by_row[row]
                return popped

            for row, free in free_of_row.items():
                if row in by_row:
                    taken += pop(row, min(free, share - len(taken)))
            waiting = {row: len(works) for row, works in by_row.items()}
            row = None
            while empty_blocks > 0 and len(taken) < share and waiting:
                if row not in waiting:  # all of one genome together: they share prompts
                    row = max(waiting, key=waiting.__getitem__)
                works = pop(row, ROWS_PER_BLOCK)
                taken += works
                empty_blocks -= bool(works)
                waiting[row] = len(by_row.get(row, ()))
                if not works and row in by_row and _too_long(by_row[row][0], max_length):
                    break  # or shorter requests could hold it up for ever
                if not works or not waiting[row]:
                    del waiting[row]
            if not by_row:
                del self._sample[model], self._served[model]
        return taken

    def put_back(self, works: Sequence[Work]) -> None:
        """Put taken requests back at the front of the queue."""
        with self.changed:
            for work in reversed(works):
                by_row = self._sample.setdefault(work.model, {})
                by_row.setdefault(work.row, deque()).appendleft(work)
                self._served.setdefault(work.model, set())

    def take_all(self, model: PopulationModel) -> list[Work]:
        with self.changed:
            self._served.pop(model, None)
            by_rows = self._score.pop(model, {}), self._sample.pop(model, {})
            return [work for by_row in by_rows for works in by_row.values() for work in works]

    def take_scores(self, model: PopulationModel, max_tokens: int) -> list[Work]:
        """Take logprobs requests of at most `max_tokens` tokens, at least one if any waits.

        All of one genome come together: they share prompts.
        """
        with self.changed:
            by_row = self._score.get(model, {})
            taken: list[Work] = []
            tokens = 0
            for row, works in list(by_row.items()):
                while works and (not taken or tokens + works[0].length <= max_tokens):
                    work = works.popleft()
                    if not work.cancelled:
                        taken.append(work)
                        tokens += work.length
                if works:
                    break
                del by_row[row]
            if not by_row:
                self._score.pop(model, None)
            return taken

    def close(self) -> list[Work]:
        """Have the lanes end. Returns the requests that still waited."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            models = {*self._score, *self._sample}
            return [work for model in models for work in self.take_all(model)]


def _too_long(work: Work, max_length: int) -> bool:
    return not work.cancelled and work.length > max_length


class Lane:
    """Runs requests from the queue, which all lanes share, until it closes.

    Args:
        forward: runs the batches.
        plan: its share of memory.
        texts: texts of finished requests.
        ends: tokens that end a request.
        deliver: called with finished requests and their results or errors.
        tell: called with followed requests and their tokens up to now.
        served: called with when it began to run requests and when none was left.

    Attributes:
        num_tokens: sampled so far.
        forward: runs the batches.
    """

    def __init__(
        self,
        queue: WorkQueue,
        forward: Forward,
        plan: CachePlan,
        texts: AnswerTexts,
        ends: np.ndarray,
        deliver: Callable[[list[tuple[Work, Answer | BaseException]]], None],
        tell: Callable[[list[tuple[Work, list[int]]]], None],
        served: Callable[[float, float], None],
    ) -> None:
        self.num_tokens = 0
        self.forward = forward
        self._queue, self._plan = queue, plan
        self._texts, self._ends = texts, ends
        self._deliver, self._tell = deliver, tell
        self._served = served
        self._table = SlotTable(0, 0)
        self._taken: list[Work] = []  # from the queue, and not in a slot
        self._num_cancelled = 0
        self._steps_since_admission = 0

    def run(self) -> None:
        if self.forward.device.type == "cpu":
            torch.set_num_threads(1)
        with torch.inference_mode():
            while (model := self._queue.wait_for_model()) is not None:
                try:
                    self._serve(model)
                except Exception as error:  # its callers get it; the lane itself must live on
                    error.add_note("".join(traceback.format_exception(error)))
                    lost = {work for work in (*self._table.works, *self._taken) if work is not None}
                    # A failure before any request is taken would repeat forever.
                    lost = lost or self._queue.take_all(model)
                    self._table = SlotTable(0, 0)
                    self._deliver([(work, error) for work in lost])
                finally:
                    self._taken = []
                    self._queue.leave(model)
        # They are of the engine, whose memory would wait for the garbage collector.
        del self._deliver, self._tell, self._served

    def _serve(self, model: PopulationModel) -> None:
        """Run requests for one model until none is left, or others have waited long enough."""
        began = time.perf_counter()
        self.forward.turn_to(model)
        try:
            self._fit_cache(self._queue.longest(model))
            admitted = 0
            while not self._queue.closed:
                self._score(model)
                may_admit = admitted < _BATCHES_BEFORE_YIELD * self._plan.max_rows
                if may_admit or not self._queue.others_wait(model):
                    admitted += self._admit(model)
                self._drop_cancelled()
                if not self._table.num_active:
                    return
                self._decode()
            self._table = SlotTable(0, 0)
        finally:
            self.forward.rest()
            self._served(began, time.perf_counter())

    def _score(self, model: PopulationModel) -> None:
        works = self._taken = self._queue.take_scores(model, self.forward.prefill_tokens)
        if works:
            answers = [scores.tolist() for scores in self.forward.score(works)]
            self._deliver(list(zip(works, answers, strict=True)))

    def _fit_cache(self, longest: int) -> None:
        """Make slots for requests of at most `longest` tokens, while none is running."""
        length = round_up(max(1, longest), STEP)  # cache views are as long
        if self._table.num_slots and length <= self._table.slot_length <= 2 * length:
            return
        slots = self._plan.num_slots(length)
        self._table = SlotTable(slots, length)
        self.forward.fit(slots, length)

    def _admit(self, model: PopulationModel) -> int:
        """Take waiting requests into free slots once they make a good batch. Returns how many."""
        table = self._table
        active = table.num_active
        if active and not self.forward.joins:
            return 0
        fillable = min(self._queue.num_waiting(model), table.num_slots - active)
        few = fillable < min(active // 8 + 1, self._plan.max_rows // 16)
        if fillable == 0 or (few and self._steps_since_admission < _PATIENCE):
            return 0
        self._steps_since_admission = 0
        waited = self._taken = self._queue.take_samples(
            model,
            table.free_slots_of_genomes(),
            table.num_empty_blocks(),
            table.slot_length,
            self.forward.alike,
        )
        works = self.forward.admit(waited)
        if len(works) < len(waited):
            admitted = set(works)
            self._queue.put_back([work for work in waited if work not in admitted])
            if not works and not active:
                time.sleep(_UNTIL_OTHERS_END)
        placed = list(zip(works, table.place(works), strict=True))
        self._taken = []
        for slots, tokens, logprobs in self.forward.first_tokens(table, placed):
            self._accept(slots, tokens, logprobs)
        return len(works)

    def _decode(self) -> None:
        """Run another token, or a few, for every running request."""
        table = self._table
        if (order := table.packed_order()) is not None:
            self.forward.keep(order)
            table.reorder(order)
        for slots, tokens, logprobs in self.forward.next_tokens(table):
            self._steps_since_admission += 1
            self._accept(slots, tokens, logprobs)

    def _accept(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray | None) -> None:
        """Take a token for each slot, and let go of requests that end."""
        table = self._table
        table.accept(slots, tokens, logprobs)
        self.num_tokens += len(slots)
        stopped = np.isin(tokens, self._ends)
        ended = stopped | (table.count[slots] >= table.limit[slots])
        for i in (table.has_stops[slots] & ~stopped).nonzero()[0].tolist():
            if self._hits_stop(int(slots[i])):
                stopped[i] = ended[i] = True
        if (told := table.followed[slots] & ~ended).any():
            self._tell([self._up_to_now(slot) for slot in slots[told].tolist()])
        if ended.any():
            self._finish(slots[ended], stopped[ended])

    def _up_to_now(self, slot: int) -> tuple[Work, list[int]]:
        work = self._table.works[slot]
        assert work is not None
        return work, self._table.tokens[slot, : self._table.count[slot]].tolist()

    def _hits_stop(self, slot: int) -> bool:
        work, tokens = self._up_to_now(slot)
        assert isinstance(work.request, SampleRequest)
        observation = work.request.observation
        if tokens[-1] in observation.stop_token_ids:
            return True
        return self._texts.is_ended(tokens, work.request.stop)

    def _finish(self, slots: np.ndarray, stopped: np.ndarray) -> None:
        table = self._table
        results: list[tuple[Work, Answer | BaseException]] = []
        for slot, stop in zip(slots.tolist(), stopped.tolist(), strict=True):
            work, tokens_T = self._up_to_now(slot)
            logprobs_T, request = None, work.request
            assert isinstance(request, SampleRequest)
            if table.wants_logprobs[slot]:
                logprobs_T = tuple(table.logprobs[slot, : len(tokens_T)].tolist())
            text = self._texts.before(request.cut_at, self._texts.text(tokens_T))
            reason = "stop" if stop else "length"
            results.append((work, Action(tuple(tokens_T), text, reason, logprobs_T)))
        self.forward.ended(table, slots.tolist())
        table.release(slots.tolist())
        self._deliver(results)

    def _drop_cancelled(self) -> None:
        if self._num_cancelled == self._queue.num_cancelled:
            return
        self._num_cancelled = self._queue.num_cancelled
        works = enumerate(self._table.works)
        slots = [slot for slot, work in works if work is not None and work.cancelled]
        self.forward.ended(self._table, slots)
        self._table.release(slots)
