"""Flat token rows over a cache: how batches run where attention can be replaced.

Rows are tokens, whatever requests they are of, so prompts of any length make a batch without
padding, requests come and go while others run, and a row's bits do not depend on its neighbours.

Of prompts only those tokens are rows whose keys and values are not there yet, and of prompts of one
genome that begin alike, only those of the first of them: see `prefix_cache`.
"""

from collections.abc import Iterator, Sequence
from typing import cast

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
    SequenceTable,
    TokenCache,
    round_up,
)
from es_cookbook.engines.torch.forward.population_layers import (
    MIN_ROWS,
    ROWS_PER_BLOCK,
    Batch,
)
from es_cookbook.engines.torch.forward.prefix_cache import Lease, PrefixCache
from es_cookbook.engines.torch.forward.slots import Forward, SlotTable, token_logprobs, tops
from es_cookbook.engines.torch.forward.work_queue import Work
from es_cookbook.engines.torch.kernels.attention import STEP


def new_cache(device: torch.device, num_blocks: int, kept: torch.dtype) -> TokenCache:
    """A cache of so many blocks; `kept` is its dtype on the CPU."""
    return KernelCache(num_blocks, kept) if device.type == "cpu" else TokenCache(num_blocks)


_NOBODYS = -1


class FlatForward(Forward):
    """Flat rows of tokens."""

    def __init__(
        self,
        device: torch.device,
        prefill_tokens: int,
        cache: TokenCache,
        prefixes: PrefixCache,
    ) -> None:
        """`prefixes` shares out the blocks of `cache`."""
        super().__init__(device, prefill_tokens)
        self._cache, self._prefixes = cache, prefixes
        self._leases: dict[Work, Lease] = {}
        self._runs = SequenceTable(0)

    @override
    def fit(self, num_slots: int, slot_length: int) -> None:
        self._runs = SequenceTable(num_slots)

    @override
    def rest(self) -> None:
        super().rest()
        while self._leases:  # of requests that failed
            self._prefixes.give_back(self._leases.popitem()[1])

    @override
    def admit(self, works: Sequence[Work]) -> list[Work]:
        admitted: list[Work] = []
        for work in sorted(works, key=lambda work: work.row):
            lease = self._prefixes.take(work, self)
            if lease is None:
                break
            self._leases[work] = lease
            admitted.append(work)
        return admitted

    @override
    def prefill(
        self, table: SlotTable, placed: Sequence[tuple[Work, int]]
    ) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Run what is new of prompts."""
        del table
        for batch in self._prefill_batches(placed):
            works, slots = map(list, zip(*batch, strict=True))
            leases = [self._leases[work] for work in works]
            for slot, lease in zip(slots, leases, strict=True):
                self._runs.put(slot, lease.runs)
            rows = _FlatRows(works, leases, self.device)
            attention = rows.attention(self._cache, self._runs, slots)
            last = [start + n - 1 for start, n in zip(rows.starts, rows.lengths, strict=True)]
            # A batched matmul of one member takes another code path: see `attention`.
            if len(last) == 1:
                last *= 2
            logits = self._run(rows, attention, torch.tensor(last, device=self.device))
            self._prefixes.computed(leases, self)
            self._count(works, leases)
            yield np.array(slots), logits[: len(works)]

    def _count(self, works: Sequence[Work], leases: Sequence[Lease]) -> None:
        for work, lease in zip(works, leases, strict=True):
            self.num_cached += lease.first
            if isinstance(work.request, SampleRequest) and work.request.progress:
                work.request.progress.cached_tokens = lease.first
            self.num_prefilled += work.num_prompt - lease.first

    @override
    def ended(self, table: SlotTable, slots: Sequence[int]) -> None:
        """Keep what these have, except of actions that are a rollout's last."""
        for slot in slots:
            work = table.works[slot]
            assert work is not None and isinstance(work.request, SampleRequest)
            keep: tuple[int, ...] = ()
            if not work.request.observation.is_last and not work.cancelled:
                # The newest one was not run.
                keep = (*work.sequence, *table.tokens[slot, : table.count[slot] - 1].tolist())
            self._prefixes.give_back(self._leases.pop(work), keep)

    def _prefill_batches(
        self, placed: Sequence[tuple[Work, int]]
    ) -> Iterator[list[tuple[Work, int]]]:
        """Neighbours of which together at most `prefill_tokens` tokens are new, or one alone."""
        batch: list[tuple[Work, int]] = []
        tokens = 0
        for work, slot in placed:
            new = len(work.sequence) - self._leases[work].first
            if batch and tokens + new > self.prefill_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append((work, slot))
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
        slots = torch.from_numpy(np.where(table.active[:n], np.arange(n), _NOBODYS))
        if isinstance(self._cache, KernelCache):
            attention = KernelRows(slots, positions, self._runs, self._cache)
        else:
            attention = DecodeRows(slots, positions, self._runs, self._cache)
        batch = Batch(attention, factors)
        return self._forward(batch, tokens, positions, 0)

    @override
    def keep(self, order: np.ndarray) -> None:
        self._runs.keep(order)

    @override
    def score(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """Log-probabilities of continuations, in one pass."""
        for work in sorted(works, key=lambda work: work.row):
            lease = self._prefixes.take(work, self)
            if lease is None:  # running requests have it all, and do not wait for these
                self._give_back(works)
                return self._apart(works).score(works)
            self._leases[work] = lease
        of_genomes = [work for work in self._leases if work in set(works)]
        leases = [self._leases[work] for work in of_genomes]
        table = SequenceTable(len(works))
        for sequence, lease in enumerate(leases):
            table.put(sequence, lease.runs)
        rows = _FlatRows(of_genomes, leases, self.device)
        attention = rows.attention(self._cache, table, list(range(len(works))))
        logit_rows: list[int] = []
        targets: list[int] = []
        for work, start, lease in zip(of_genomes, rows.starts, leases, strict=True):
            continuation_T = work.sequence[work.num_prompt :]
            first = start + work.num_prompt - 1 - lease.first  # the row before a token predicts it
            logit_rows += range(first, first + len(continuation_T))
            targets += continuation_T
        # One more row keeps a single one from being alone (see `prefill`).
        chosen = torch.tensor([*logit_rows, logit_rows[-1]], device=self.device)
        logits = self._run(rows, attention, chosen)[:-1]
        self._prefixes.computed(leases, self)
        self._count(of_genomes, leases)
        self._give_back(works)
        tokens = torch.tensor(targets, device=self.device)
        scores = token_logprobs(logits, tokens)
        sizes = [len(work.sequence) - work.num_prompt for work in of_genomes]
        of_works = dict(zip(of_genomes, scores.split(sizes), strict=True))
        for work, *given in zip(of_genomes, logits.split(sizes), tokens.split(sizes), strict=True):
            if work.wants_tops:
                of_works[work] = tops(*given)
        return [of_works[work] for work in works]

    def _give_back(self, works: Sequence[Work]) -> None:
        for work in works:
            if work in self._leases:
                self._prefixes.give_back(self._leases.pop(work))

    def _apart(self, works: Sequence[Work]) -> "FlatForward":
        """The same with a cache of its own, of room for these."""
        num_blocks = 1 + sum(-(-work.length // STEP) for work in works)
        cache = self._cache.of_size(num_blocks)
        apart = FlatForward(self.device, self.prefill_tokens, cache, PrefixCache(cache, num_blocks))
        apart.turn_to(self._model)
        return apart

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


class _FlatRows:
    """What is new of several requests as flat rows, each genome's padded to whole blocks."""

    def __init__(
        self, works: Sequence[Work], leases: Sequence[Lease], device: torch.device
    ) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        genomes: list[int] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []
        for i, (work, lease) in enumerate(zip(works, leases, strict=True)):
            sequence, first = work.sequence, lease.first
            if isinstance(work.request, LogprobsRequest):
                sequence = sequence[:-1]  # nobody asks what comes next
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
        self._firsts = [lease.first for lease in leases]
        self.tokens_T = torch.tensor(tokens, device=device)
        self.positions_T = torch.tensor(positions, device=device)
        self.genome_of_block = torch.tensor(genomes, device=device)

    def attention(
        self, cache: TokenCache, table: SequenceTable, sequences: list[int]
    ) -> AttentionRows:
        """How they attend, each request's in its sequence."""
        if not isinstance(cache, KernelCache):
            device = self.tokens_T.device
            rows = self.starts, self.lengths, self._firsts
            return PrefillRows(rows, device, cache, table, sequences)
        sequences_T = torch.full_like(self.tokens_T, _NOBODYS)
        for sequence, start, length in zip(sequences, self.starts, self.lengths, strict=True):
            sequences_T[start : start + length] = sequence
        return KernelRows(sequences_T, self.positions_T, table, cache)
