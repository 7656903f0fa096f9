"""Flat token rows over a slot cache: how batches run where attention can be replaced.

Rows are tokens, whatever requests they are of, so prompts of any length make a batch without
padding, requests come and go while others run, and a row's bits do not depend on its neighbours.

The prompt of a rollout's second turn begins with its first turn's prompt and action. What the
model kept of those tokens is kept in a `PrefixCache` when a request ends, by the genome and the
tokens, and copied back into the slot of a request of the same genome that begins with the same
tokens; only the rest is prefilled. A token's keys and values have the same bits however they were
made (on the CPU: see `attention`), so answers are the same with this cache and without it, whatever
it has let go of. It holds a bounded number of bytes, and lets go first of what was not used for
longest. Nothing survives a change of the weights, genomes included.

Left out: sharing. Requests that begin alike keep a copy each, since the copies of one turn are
replaced by those of the next, and a copy is cheap beside the forward pass that it saves.
"""

import bisect
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from typing_extensions import override

from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch.forward.attention import (
    AttentionRows,
    DecodeRows,
    KernelCache,
    KernelRows,
    PrefillRows,
    SlotCache,
    States,
    round_up,
)
from es_cookbook.engines.torch.forward.population_layers import (
    MIN_ROWS,
    ROWS_PER_BLOCK,
    Batch,
)
from es_cookbook.engines.torch.forward.slots import Forward, SlotTable, token_logprobs
from es_cookbook.engines.torch.forward.work_queue import Work


class FlatForward(Forward):
    """Flat rows of tokens, over a cache of slots."""

    def __init__(
        self,
        device: torch.device,
        prefill_tokens: int,
        prefixes: "PrefixCache | None" = None,
        kept: torch.dtype = torch.float32,
    ) -> None:
        """`prefixes` holds what ended requests leave; `kept` is the dtype of caches on the CPU."""
        super().__init__(device, prefill_tokens)
        self._prefixes = prefixes
        self._kept = kept
        self._cache = self._new_cache(0, 0)

    def _new_cache(self, num_slots: int, slot_length: int) -> SlotCache:
        if self.device.type == "cpu":
            return KernelCache(num_slots, slot_length, self._kept)
        return SlotCache(num_slots, slot_length)

    @override
    def fit(self, num_slots: int, slot_length: int) -> None:
        self._cache = self._new_cache(num_slots, slot_length)

    @override
    def prefill(
        self, table: SlotTable, placed: Sequence[tuple[Work, int]]
    ) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Run what is new of prompts, and fill their slots."""
        del table
        of_genomes = sorted(placed, key=lambda pair: pair[0].row)
        for batch in self._prefill_batches([(*pair, self._take(*pair)) for pair in of_genomes]):
            works, slots, firsts = map(list, zip(*batch, strict=True))
            rows = _FlatRows(works, self.device, firsts)
            self.num_prefilled += sum(rows.lengths)
            attention = rows.attention(self._cache, self._kept, slots, firsts)
            last = [start + n - 1 for start, n in zip(rows.starts, rows.lengths, strict=True)]
            # A batched matmul of one member takes another code path: see `attention`.
            if len(last) == 1:
                last *= 2
            logits = self._run(rows, attention, torch.tensor(last, device=self.device))
            yield np.array(slots), logits[: len(works)].float()

    def _take(self, work: Work, slot: int) -> int:
        """Fill a request's slot with what is kept of its prompt's first tokens. Returns how many.

        At most all but the last token, which has to be run to know what comes next.
        """
        if self._prefixes is None:
            return 0
        length, states = self._prefixes.find((work.model, work.row), work.sequence)
        self._cache.paste(slot, length, states)
        self.num_cached += length
        return length

    @override
    def ended(self, table: SlotTable, slots: Sequence[int]) -> None:
        """Keep what is in these slots, except of actions that are a rollout's last."""
        if self._prefixes is None:
            return
        for slot in slots:
            work = table.works[slot]
            assert work is not None and isinstance(work.request, SampleRequest)
            if work.request.observation.is_last:
                continue
            sampled = table.tokens[slot, : table.count[slot] - 1].tolist()  # the newest was not run
            tokens_T = (*work.sequence, *sampled)
            states = self._cache.copy(slot, len(tokens_T))
            self._prefixes.put((work.model, work.row), tokens_T, states, work.version)

    def _prefill_batches(
        self, placed: Sequence[tuple[Work, int, int]]
    ) -> Iterator[list[tuple[Work, int, int]]]:
        """Neighbours of which together at most `prefill_tokens` tokens are new, or one alone."""
        batch: list[tuple[Work, int, int]] = []
        tokens = 0
        for work, slot, first in placed:
            new = len(work.sequence) - first
            if batch and tokens + new > self.prefill_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append((work, slot, first))
            tokens += new
        if batch:
            yield batch

    @override
    def decode(self, table: SlotTable) -> torch.Tensor:
        """One more token for every slot: logits of `table.num_rows` rows."""
        n = table.num_rows
        positions = torch.from_numpy(table.position[:n]).to(self.device)
        tokens = torch.from_numpy(table.newest[:n]).to(self.device)
        genomes = table.genome_of_block[: n // ROWS_PER_BLOCK]
        factors = self.factors_of_blocks(genomes)
        if isinstance(self._cache, KernelCache):
            attention = KernelRows(torch.arange(n), positions, self._cache)
        else:
            attention = DecodeRows(self._cache, positions)
        batch = Batch(attention, factors)
        return self._forward(batch, tokens, positions, 0)

    @override
    def keep(self, order: np.ndarray) -> None:
        self._cache.keep(torch.from_numpy(order).to(self.device))

    @override
    def score(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """Log-probabilities of continuations, in one pass; nothing is cached."""
        rows = _FlatRows(works, self.device)
        attention = rows.attention(None, self._kept, list(range(len(works))))
        spans: list[tuple[int, int]] = []
        for work, start in zip(works, rows.starts, strict=True):
            request = work.request
            assert isinstance(request, LogprobsRequest)
            spans.append((start + len(request.prompt_T), len(request.continuation_T)))
        targets = torch.cat([torch.arange(first, first + n) for first, n in spans])
        targets = targets.to(self.device)
        # The row before a token predicts it; one more row keeps a single one from being alone
        # (see `prefill`).
        logit_rows = torch.cat([targets - 1, targets[-1:]])
        logits = self._run(rows, attention, logit_rows)[:-1].float()
        scores = token_logprobs(logits, rows.tokens_T[targets])
        return list(scores.split([n for _, n in spans]))

    def _run(
        self, rows: "_FlatRows", attention: AttentionRows, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        model = self._model
        head = None
        if model.head_table is not None:
            head = model.head_table.rows(rows.genome_of_block[logit_rows // ROWS_PER_BLOCK])
        batch = Batch(attention, model.gather(rows.genome_of_block), head)
        return self._forward(batch, rows.tokens_T, rows.positions_T, logit_rows)

    def _forward(
        self,
        batch: Batch,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        logit_rows: torch.Tensor | int,
    ) -> torch.Tensor:
        """Logits (rows, vocabulary) of flat token rows: of `logit_rows`, or of all if 0."""
        output = self._model.forward(
            batch,
            input_ids=tokens_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        return cast(torch.Tensor, output.logits)[0]


_Key: TypeAlias = tuple[Hashable, tuple[int, ...]]


class PrefixCache:
    """What was kept of requests that ended. Thread-safe: all lanes share it.

    Args:
        max_bytes: of the keys and values that it holds.

    Attributes:
        version: of the weights; what was computed with others is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.version = 0
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._states: dict[_Key, States] = {}  # the one used last comes last
        # Sorted, so that what has the most tokens in common with a prompt is beside its place.
        self._tokens: dict[Hashable, list[tuple[int, ...]]] = {}

    def clear(self) -> None:
        """Let go of everything: the weights change."""
        with self._lock:
            self.version += 1
            self._bytes = 0
            self._states.clear()
            self._tokens.clear()

    def find(self, who: Hashable, prompt_T: tuple[int, ...]) -> tuple[int, States]:
        """Of how many first tokens of a prompt, all but its last at most, something is kept; what.

        It may be of more tokens than that.
        """
        with self._lock:
            kept = self._tokens.get(who, [])
            place = bisect.bisect_left(kept, prompt_T)
            neighbours = kept[max(0, place - 1) : place + 1]
            common = [_num_common(tokens, prompt_T) for tokens in neighbours]
            length = min(max(common, default=0), len(prompt_T) - 1)
            if length == 0:
                return 0, {}
            key = who, neighbours[common.index(max(common))]
            states = self._states[key] = self._states.pop(key)
            return length, states

    def put(self, who: Hashable, tokens_T: tuple[int, ...], states: States, version: int) -> None:
        """Keep what was computed, with the weights of a version, of these tokens of a request."""
        num_bytes = _num_bytes(states)
        with self._lock:
            if version != self.version or num_bytes > self._max_bytes:
                return
            kept = self._tokens.setdefault(who, [])
            place = bisect.bisect_left(kept, tokens_T)
            if place < len(kept) and kept[place][: len(tokens_T)] == tokens_T:
                return  # there is as much, or more
            kept.insert(place, tokens_T)
            self._states[who, tokens_T] = states
            self._bytes += num_bytes
            if place and tokens_T[: len(kept[place - 1])] == kept[place - 1]:
                self._drop((who, kept[place - 1]))  # the turn before
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._states)))

    def _drop(self, key: _Key) -> None:
        who, tokens_T = key
        self._bytes -= _num_bytes(self._states.pop(key))
        kept = self._tokens[who]
        del kept[bisect.bisect_left(kept, tokens_T)]
        if not kept:
            del self._tokens[who]


def _num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many tokens two sequences begin with alike."""
    least, most = 0, min(len(first), len(second))
    while least < most:  # comparing slices is faster than a loop over tokens
        middle = (least + most + 1) // 2
        if first[least:middle] == second[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _num_bytes(states: States) -> int:
    return sum(part.nbytes for pair in states.values() for part in pair)


class _FlatRows:
    """Token sequences of several requests as flat rows, each genome's padded to whole blocks.

    Args:
        firsts: tokens of each sequence that are left out; none if not given.
    """

    def __init__(
        self, works: Sequence[Work], device: torch.device, firsts: Sequence[int] | None = None
    ) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        genomes: list[int] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []
        for i, work in enumerate(works):
            sequence, first = work.sequence, firsts[i] if firsts else 0
            self.starts.append(len(tokens))
            self.lengths.append(len(sequence) - first)
            tokens += sequence[first:]
            positions += range(first, len(sequence))
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

    def attention(
        self,
        cache: SlotCache | None,
        kept: torch.dtype,
        slots: list[int],
        firsts: list[int] | None = None,
    ) -> AttentionRows:
        """How they attend, each sequence in its slot; without a cache, in one of dtype `kept`."""
        device = self.tokens_T.device
        if (cache is not None and not isinstance(cache, KernelCache)) or device.type != "cpu":
            return PrefillRows(self.starts, self.lengths, device, cache, slots, firsts)
        slots_T = torch.full_like(self.tokens_T, -1)
        for slot, start, length in zip(slots, self.starts, self.lengths, strict=True):
            slots_T[start : start + length] = slot
        return KernelRows(slots_T, self.positions_T, cache, kept)
