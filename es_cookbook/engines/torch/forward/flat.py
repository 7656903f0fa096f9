"""Flat token rows over a slot cache: how batches run where attention can be replaced.

Rows are tokens, whatever requests they are of, so prompts of any length make a batch without
padding, requests come and go while others run, and a row's bits do not depend on its neighbours.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch

from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch.forward.attention import (
    AttentionRows,
    DecodeRows,
    KernelCache,
    KernelRows,
    PrefillRows,
    SlotCache,
    round_up,
)
from es_cookbook.engines.torch.forward.low_rank_tables import GatheredFactors
from es_cookbook.engines.torch.forward.population_layers import (
    MIN_ROWS,
    ROWS_PER_BLOCK,
    Batch,
    PopulationModel,
)
from es_cookbook.engines.torch.forward.prefix_cache import PrefixCache
from es_cookbook.engines.torch.forward.slots import SlotTable
from es_cookbook.engines.torch.forward.work_queue import Work
from es_cookbook.engines.torch.token_sampling import token_logprobs


class FlatForward:
    """Runs one lane's batches; see `base.Forward`."""

    joins = True
    elastic = True

    def __init__(
        self,
        device: torch.device,
        prefill_tokens: int,
        prefixes: PrefixCache | None = None,
        kept: torch.dtype = torch.float32,
    ) -> None:
        """`prefixes` holds what ended requests leave; `kept` is the dtype of caches on the CPU."""
        self._device = device
        self._prefill_tokens = prefill_tokens
        self._prefixes = prefixes
        self._kept = kept
        self._cache = self._new_cache(0, 0)
        self.num_prefilled = self.num_cached = 0

    def _new_cache(self, num_slots: int, slot_length: int) -> SlotCache:
        if self._device.type == "cpu":
            return KernelCache(num_slots, slot_length, self._kept)
        return SlotCache(num_slots, slot_length)

    def turn_to(self, model: PopulationModel) -> None:
        """Run this model from now on; no request is running."""
        self._model = model
        self._factors = GatheredFactors(model)

    def rest(self) -> None:
        """Let go of the model."""
        del self._model, self._factors

    def fit(self, num_slots: int, slot_length: int) -> None:
        """Make room for so many requests of so many tokens each."""
        self._cache = self._new_cache(num_slots, slot_length)

    def alike(self, work: Work) -> None:
        """Any requests make a batch."""

    def most(self, work: Work) -> int:
        """Any number of them."""
        del work
        return sys.maxsize

    def prefill(
        self, table: SlotTable, placed: Sequence[tuple[Work, int]]
    ) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Run what is new of prompts, and fill their slots."""
        del table
        of_genomes = sorted(placed, key=lambda pair: pair[0].row)
        for batch in self._prefill_batches([(*pair, self._take(*pair)) for pair in of_genomes]):
            works, slots, firsts = map(list, zip(*batch, strict=True))
            rows = _FlatRows(works, self._device, firsts)
            self.num_prefilled += sum(rows.lengths)
            attention = rows.attention(self._cache, self._kept, slots, firsts)
            last = [start + n - 1 for start, n in zip(rows.starts, rows.lengths, strict=True)]
            # A batched matmul of one member takes another code path: see `attention`.
            if len(last) == 1:
                last *= 2
            logits = self._run(rows, attention, torch.tensor(last, device=self._device))
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
            if batch and tokens + new > self._prefill_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append((work, slot, first))
            tokens += new
        if batch:
            yield batch

    def decode(self, table: SlotTable) -> torch.Tensor:
        """One more token for every slot: logits of `table.num_rows` rows."""
        n = table.num_rows
        positions = torch.from_numpy(table.position[:n]).to(self._device)
        tokens = torch.from_numpy(table.newest[:n]).to(self._device)
        genomes = table.genome_of_block[: n // ROWS_PER_BLOCK]
        factors = self._factors.of_blocks(genomes, self._device)
        if isinstance(self._cache, KernelCache):
            attention = KernelRows(torch.arange(n), positions, self._cache)
        else:
            attention = DecodeRows(self._cache, positions)
        batch = Batch(attention, factors)
        return self._forward(batch, tokens, positions, 0)

    def keep(self, order: np.ndarray) -> None:
        """Move these slots to the front, in this order."""
        self._cache.keep(torch.from_numpy(order).to(self._device))

    def score(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """Log-probabilities of continuations, in one pass; nothing is cached."""
        rows = _FlatRows(works, self._device)
        attention = rows.attention(None, self._kept, list(range(len(works))))
        spans: list[tuple[int, int]] = []
        for work, start in zip(works, rows.starts, strict=True):
            request = work.request
            assert isinstance(request, LogprobsRequest)
            spans.append((start + len(request.prompt_T), len(request.continuation_T)))
        targets = torch.cat([torch.arange(first, first + n) for first, n in spans])
        targets = targets.to(self._device)
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
