"""Requests on their way through an engine, and the queue from which its lanes take them."""

import dataclasses
import sys
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from typing import TypeAlias

from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch.forward.attention import round_up
from es_cookbook.engines.torch.forward.population_layers import ROWS_PER_BLOCK, PopulationModel


@dataclasses.dataclass(slots=True, eq=False)
class Work:
    """A request on its way through the engine.

    Attributes:
        model: the weights that answer, and `row`, their row of the low-rank tables.
        limit: most tokens to sample; 0 for a logprobs request.
        version: of the weights when it came, for what is kept of it.
        wants_tops: of a logprobs request: the most probable tokens are asked as well.
        cancelled: set by the caller's side; the lane then forgets the request.
    """

    request: SampleRequest | LogprobsRequest
    model: PopulationModel
    row: int
    limit: int
    version: int = 0
    wants_tops: bool = False
    cancelled: bool = False

    @property
    def sequence(self) -> tuple[int, ...]:
        """Tokens known beforehand: the prompt, and the continuation of a logprobs request."""
        if isinstance(self.request, LogprobsRequest):
            return self.request.prompt_T + self.request.continuation_T
        return self.request.observation.tokens_T

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        if isinstance(self.request, LogprobsRequest):
            return len(self.request.prompt_T)
        return len(self.request.observation.tokens_T)

    @property
    def who(self) -> Hashable:
        """Whose answers it asks for, of all that an engine hosts."""
        return self.request.target

    @property
    def length(self) -> int:
        """Tokens with those still to be sampled: what it needs of a cache."""
        return len(self.sequence) + self.limit


class Admission:
    """Which requests may enter a lane together: here any.

    Attributes:
        joins: they may also enter while others run there.
    """

    joins = True

    def alike(self, work: Work) -> Hashable:
        """What requests that enter together must have in common."""

    def most(self, work: Work) -> int:
        """How many requests like this may enter together, at least a block."""
        del work
        return sys.maxsize


_ByRow: TypeAlias = dict[int, deque[Work]]
"""Requests for one model, by their genomes' rows."""


class WorkQueue:
    """Requests that wait, by model and genome. Thread-safe.

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
        self._lanes_on: dict[PopulationModel, int] = {}
        self._closed_lanes: set[int] = set()  # threads that take no more until they leave
        # Threads that have their share of what waits for a model, until more comes.
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
        """The model a free lane should turn to, the one fewest lanes are on; None when closed."""
        with self.changed:
            while not self.closed:
                models = [*self._score, *self._sample]
                if models:
                    model = min(models, key=lambda m: self._lanes_on.get(m, 0))
                    self._lanes_on[model] = self._lanes_on.get(model, 0) + 1
                    return model
                self.changed.wait()
            return None

    def leave(self, model: PopulationModel) -> None:
        """A lane turns away from a model."""
        with self.changed:
            self._closed_lanes.discard(threading.get_ident())
            self._lanes_on[model] -= 1
            if not self._lanes_on[model]:
                del self._lanes_on[model]
            # It is the others' turn now, where any wait as well.
            if model in self._score:
                self._score[model] = self._score.pop(model)
            if model in self._sample:
                self._sample[model] = self._sample.pop(model)

    def others_wait(self, model: PopulationModel) -> bool:
        """Whether requests for other models wait."""
        with self.changed:
            return any(m is not model for m in (*self._score, *self._sample))

    def num_waiting(self, model: PopulationModel) -> int:
        """Sample requests that wait for a model."""
        with self.changed:
            return sum(len(works) for works in self._sample.get(model, {}).values())

    def waiting(self) -> set[Hashable]:
        """Whose requests wait."""
        with self.changed:
            by_rows = *self._score.values(), *self._sample.values()
            return {works[0].who for by_row in by_rows for works in by_row.values()}

    def longest(self, model: PopulationModel) -> int:
        """Most cache tokens that a waiting request for this model needs; 0 if none waits."""
        with self.changed:
            by_row = self._sample.get(model, {})
            return max((work.length for works in by_row.values() for work in works), default=0)

    def take_samples(
        self,
        model: PopulationModel,
        free_of_row: dict[int, int],
        empty_blocks: int,
        max_length: int,
        admission: Admission,
    ) -> list[Work]:
        """Requests for the free slots in blocks of each genome, then for empty blocks.

        Returns a lane's share of those that need at most `max_length` cache tokens and that
        `admission` lets enter: as many of a genome as it has free slots, and more in whole blocks.
        """
        taken: list[Work] = []
        with self.changed:
            self._closed_lanes.discard(threading.get_ident())
            by_row = self._sample.get(model)
            if not by_row:
                return taken
            lane, served = threading.get_ident(), self._served[model] - self._closed_lanes
            lanes = self._num_lanes - len(self._closed_lanes)
            if lane not in served:  # or it has had its share, and others may have gone elsewhere
                lanes = max(1, lanes - len(served))
            self._served[model].add(lane)
            share = round_up(-(-sum(map(len, by_row.values())) // lanes), ROWS_PER_BLOCK)

            def pop(row: int, most: int) -> list[Work]:
                works = by_row[row]
                popped: list[Work] = []
                others: list[Work] = []
                while works and len(popped) < most and not _too_long(works[0], max_length):
                    work = works.popleft()
                    if work.cancelled:
                        continue
                    first = (taken or popped or [work])[0]
                    fits = admission.alike(work) == admission.alike(first)
                    (popped if fits else others).append(work)
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
                waiting[row] = len(by_row.get(row, ()))
                if not waiting[row]:
                    del waiting[row]
                if works:
                    empty_blocks -= 1
                    taken += works
                    share = min(share, admission.most(works[0]))
                elif row in by_row and _too_long(by_row[row][0], max_length):
                    break  # or shorter requests could hold it up for ever
                else:
                    waiting.pop(row, None)
            if not by_row:
                del self._sample[model], self._served[model]
            if taken and not admission.joins:
                self._closed_lanes.add(threading.get_ident())
        return taken

    def put_back(self, works: Sequence[Work]) -> None:
        """Let requests that were taken wait on, before all others."""
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
        """Logprobs requests of together at most `max_tokens` tokens, at least one if any waits.

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
        """Wake the lanes to leave. Returns what still waited."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            models = {*self._score, *self._sample}
            return [work for model in models for work in self.take_all(model)]


def _too_long(work: Work, max_length: int) -> bool:
    return not work.cancelled and work.length > max_length
