"""Flat token rows over a cache: the path of models whose attention can be replaced.

Rows are tokens of any requests, so prompts of any length make a batch without
padding, requests come and go while others run, and a row's bits do not depend on its neighbours.

Only tokens of prompts whose keys and values are not cached yet are rows; a common prefix of one
genome's prompts is computed once: see `prefix_cache`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from typing_extensions import override

from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.torch.attention import (
    NO_SEQUENCE,
    AttentionRows,
    KernelCache,
    SequenceTable,
    TokenCache,
    attention_rows,
    round_up,
)
from es_cookbook.engines.torch.kernels.attention import STEP
from es_cookbook.engines.torch.kernels.modules import has_kernels, suits_kernels
from es_cookbook.engines.torch.population_layers import (
    MIN_ROWS,
    ROWS_PER_BLOCK,
    Batch,
    Factors,
    GroupFactors,
)
from es_cookbook.engines.torch.prefix_cache import Lease, PrefixCache
from es_cookbook.engines.torch.slots import Forward, SlotTable, Work, token_logprobs, tops


def new_cache(device: torch.device, num_blocks: int, kept: torch.dtype) -> TokenCache:
    """Return a cache of `num_blocks` blocks; `kept` is its dtype on the CPU."""
    return (KernelCache if has_kernels(device) else TokenCache)(num_blocks, kept)


class FlatForward(Forward):
    """Flat rows of tokens."""

    def __init__(
        self,
        device: torch.device,
        prefill_tokens: int,
        prefixes: PrefixCache,
        never: torch.Tensor | None = None,
    ) -> None:
        """`prefixes` shares out the blocks of its cache."""
        super().__init__(device, prefill_tokens, never)
        self._cache, self._prefixes = prefixes.cache, prefixes
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
        """Run the new parts of prompts."""
        del table
        for spans in self._new_spans(placed):
            yield np.array([span.sequence for span in spans]), self._logits(spans)

    def _new_spans(self, placed: Sequence[tuple[Work, int]]) -> Iterator[list["Span"]]:
        """Yield the new parts of prompts, by batch."""
        for batch in self._prefill_batches(placed):
            for work, slot in batch:
                self._runs.put(slot, self._leases[work].runs)
            yield [Span(w, slot, self._leases[w].first, len(w.sequence)) for w, slot in batch]

    def _logits(self, spans: Sequence["Span"]) -> torch.Tensor:
        """Run new parts of prompts. Returns logits of their first tokens."""
        rows = FlatRows(spans, self.device)
        attention = rows.attention(self._cache, self._runs)
        logits = self._run(rows, attention, _together(rows.last, self.device))
        self._computed([span.work for span in spans])
        return logits[: len(spans)]

    def _computed(self, works: Sequence[Work]) -> None:
        """Record that the prompts of these requests are in the cache."""
        leases = [self._leases[work] for work in works]
        self._prefixes.computed(leases, self)
        for work, lease in zip(works, leases, strict=True):
            self.num_cached += lease.first
            if isinstance(work.request, SampleRequest) and work.request.progress:
                work.request.progress.cached_tokens = max(0, lease.first - len(work.virtual_T))
            self.num_prefilled += work.num_prompt - lease.first

    @override
    def ended(self, table: SlotTable, slots: Sequence[int]) -> None:
        """Keep these requests' tokens, except after a rollout's last action."""
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
        """Yield neighbours with at most `prefill_tokens` new tokens together, or one alone."""
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
    def decode(self, table: SlotTable) -> tuple[torch.Tensor, np.ndarray]:
        """Run one more token for `table.num_rows` slots; on the CPU logits of active ones alone."""
        n = table.num_rows
        positions = torch.from_numpy(table.position[:n]).to(self.device)
        tokens = torch.from_numpy(table.newest[:n]).to(self.device)
        genomes = table.genome_of_block[: n // ROWS_PER_BLOCK]
        factors = self.factors_of_blocks(genomes)
        slots = torch.from_numpy(np.where(table.active[:n], np.arange(n), NO_SEQUENCE))
        attention = attention_rows(slots, positions, self._runs, self._cache)
        active = table.active[:n].nonzero()[0]
        batch = Batch(attention, factors, live=int(active[-1]) + 1)
        if len(active) == n or not self._picks_rows:
            return self._forward(batch, tokens, positions, 0), active
        # With a large vocabulary, the head is most of a model, and a block may have one row left.
        chosen = _together(active.tolist(), self.device)
        batch.head_factors = self._head_factors(factors, torch.from_numpy(genomes), chosen)
        return self._forward(batch, tokens, positions, chosen), np.arange(len(active))

    @property
    def _picks_rows(self) -> bool:
        """Whether a row of the head has the same bits in any batch."""
        table = self._model.head_table
        return has_kernels(self.device) and (table is None or suits_kernels(table.a_G_R_N))

    @override
    def keep(self, order: np.ndarray) -> None:
        self._runs.keep(order)

    @override
    def score(self, works: Sequence[Work]) -> list[np.ndarray]:
        """Return log-probabilities of continuations, `rows_scored` tokens of them at a time."""
        of_genomes = sorted(works, key=lambda work: work.row)
        for work in of_genomes:
            lease = self._prefixes.take(work, self)
            if lease is None:  # running requests have it all, and do not wait for these
                self._give_back(works)
                return self._apart(works).score(works)
            self._leases[work] = lease
        leases = [self._leases[work] for work in of_genomes]
        table = SequenceTable(len(works))
        for sequence, lease in enumerate(leases):
            table.put(sequence, lease.runs)
        scores: dict[Work, list[np.ndarray]] = {work: [] for work in of_genomes}
        for spans in self._score_batches(of_genomes, leases):
            for span, found in zip(spans, self._score(spans, table), strict=True):
                scores[span.work].append(found)
        self._computed(of_genomes)
        self._give_back(works)
        return [np.concatenate(scores[work]) for work in works]

    def _score_batches(
        self, works: Sequence[Work], leases: Sequence[Lease]
    ) -> Iterator[list["Span"]]:
        """Yield batches in which at most `rows_scored` rows have their logits read.

        A continuation may be cut: keys and values of what ran before are in the cache.
        """
        batch: list[Span] = []
        free = self.rows_scored
        for sequence, (work, lease) in enumerate(zip(works, leases, strict=True)):
            first, last = lease.first, len(work.sequence) - 1  # nothing after it is asked
            while first < last:
                end = min(last, max(first, work.num_prompt - 1) + free)
                batch.append(Span(work, sequence, first, end))
                free -= batch[-1].num_scored
                first = end
                if not free:
                    yield batch
                    batch, free = [], self.rows_scored
        if batch:
            yield batch

    def _score(self, spans: Sequence["Span"], table: SequenceTable) -> Iterator[np.ndarray]:
        """Run these tokens, and score those that come after them in continuations."""
        rows = FlatRows(spans, self.device)
        logit_rows: list[int] = []
        for span, start, length in zip(spans, rows.starts, rows.lengths, strict=True):
            logit_rows += range(start + length - span.num_scored, start + length)
        attention = rows.attention(self._cache, table)
        logits = self._run(rows, attention, _together(logit_rows, self.device))
        done = 0
        for span in spans:
            of_span = np.arange(done, done := done + span.num_scored)
            tokens = np.array(span.work.sequence[: span.end + 1][-span.num_scored :], np.int64)
            yield (tops if span.work.wants_tops else token_logprobs)(logits, of_span, tokens)

    def _give_back(self, works: Sequence[Work]) -> None:
        for work in works:
            if work in self._leases:
                self._prefixes.give_back(self._leases.pop(work))

    def _apart(self, works: Sequence[Work]) -> "FlatForward":
        """Return a copy with a separate cache that has room for these."""
        num_blocks = 1 + sum(-(-work.length // STEP) for work in works)
        prefixes = PrefixCache(type(self._cache)(num_blocks, self._cache.dtype), num_blocks)
        apart = FlatForward(self.device, self.prefill_tokens, prefixes, self._never)
        apart.turn_to(self._model)
        return apart

    def _run(
        self, rows: "FlatRows", attention: AttentionRows, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        factors = self._model.factors(rows.genomes)
        head = self._head_factors(factors, rows.genome_of_block, logit_rows)
        return self._forward(
            Batch(attention, factors, head), rows.tokens_T, rows.positions_T, logit_rows
        )

    def _head_factors(
        self, factors: Factors | None, genome_of_block: torch.Tensor, logit_rows: torch.Tensor
    ) -> GroupFactors | None:
        """Return the genomes' additions to these rows' logits; None if no genome adds to logits."""
        if factors is None or self._model.head_table is None:
            return None
        return self._model.head_table.rows(genome_of_block[logit_rows // ROWS_PER_BLOCK])

    def _forward(
        self,
        batch: Batch,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        logit_rows: torch.Tensor | int,
    ) -> torch.Tensor:
        """Return logits (rows, vocabulary) of flat token rows: of `logit_rows`, or of all if 0."""
        output = self._model.forward(
            batch,
            input_ids=tokens_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        return self.of_tokens(cast(torch.Tensor, output.logits)[0])


def _together(rows: list[int], device: torch.device) -> torch.Tensor:
    """Double a single member: a batched matmul of one takes another code path."""
    return torch.tensor(rows if len(rows) > 1 else 2 * rows, device=device)


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens of a request that run in one batch.

    Attributes:
        sequence: where a `SequenceTable` has the request.
        first: position of the first token; all before it is in the cache, or is when this is read.
        end: one past the last.
    """

    work: Work
    sequence: int
    first: int
    end: int

    @property
    def num_scored(self) -> int:
        """Number of tokens, the last ones, that precede a scored token of a logprobs request."""
        return self.end - max(self.first, self.work.num_prompt - 1)


class FlatRows:
    """Tokens of several requests as flat rows, each genome's padded to whole blocks."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        genomes: list[int] = []
        self.starts: list[int] = []
        self.lengths = [span.end - span.first for span in spans]
        for i, span in enumerate(spans):
            self.starts.append(len(tokens))
            tokens += span.work.sequence[span.first : span.end]
            positions += range(span.first, span.end)
            last = i + 1 == len(spans)
            if last or spans[i + 1].work.row != span.work.row:
                least = MIN_ROWS if last else 0
                padding = max(round_up(len(tokens), ROWS_PER_BLOCK), least) - len(tokens)
                tokens += [0] * padding
                positions += [0] * padding
                genomes += [span.work.row] * (len(tokens) // ROWS_PER_BLOCK - len(genomes))
        self._spans = spans
        self.genomes = np.array(genomes)
        self.tokens_T = torch.tensor(tokens, device=device)
        self.positions_T = torch.tensor(positions, device=device)
        self.genome_of_block = torch.tensor(genomes, device=device)

    @property
    def last(self) -> list[int]:
        """The row of each span's last token."""
        return [start + n - 1 for start, n in zip(self.starts, self.lengths, strict=True)]

    def attention(self, cache: TokenCache, table: SequenceTable) -> AttentionRows:
        """Return attention of these rows, each within its request's sequence."""
        sequences_T = torch.full((len(self.tokens_T),), NO_SEQUENCE)
        for span, start, length in zip(self._spans, self.starts, self.lengths, strict=True):
            sequences_T[start : start + length] = span.sequence
        return attention_rows(sequences_T, self.positions_T, table, cache)
