"""A model's own forward and its own cache: how batches run that need nothing of the architecture.

A batch is a cohort: requests that enter together and decode in step, each a row of a batch of
sequences, padded on the left to one length. So whatever the model keeps of the past (keys and
values, recurrent or convolution states, both) is its own affair. How much a cohort may mix is the
model's `Path`. Rows that end leave the cache once a fifth of them has; others join with the next
cohort.

Rows of other cohorts may change a row's bits by rounding, so a near-tie may flip a token.
"""

import copy
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from es_cookbook.engines.base import LogprobsRequest
from es_cookbook.engines.torch.forward.attention import round_up
from es_cookbook.engines.torch.forward.low_rank_tables import GatheredFactors
from es_cookbook.engines.torch.forward.population_layers import (
    ROWS_PER_BLOCK,
    Batch,
    Factors,
    Path,
    PopulationModel,
)
from es_cookbook.engines.torch.forward.slots import SlotTable
from es_cookbook.engines.torch.forward.work_queue import Work
from es_cookbook.engines.torch.token_sampling import token_logprobs

_OfRows: TypeAlias = Callable[[Sequence[torch.Tensor]], torch.Tensor]
_CACHES = ("past_key_values", "cache_params", "state", "mems")
"""What models call their cache, as an argument and in what they return."""


class Unfit(Exception):
    """A model cannot be run on some path; says why."""


class OwnForward:
    """Runs one lane's batches; see `base.Forward`."""

    joins = False

    def __init__(self, path: Path, device: torch.device, prefill_tokens: int) -> None:
        self.elastic = path.elastic
        self._path = path
        self._device = device
        self._prefill_tokens = prefill_tokens
        self._cache: object = None
        self._tokens_B_L = torch.empty(0, 0, dtype=torch.int64)
        self._mask_B_L = self._tokens_B_L

    def turn_to(self, model: PopulationModel) -> None:
        """Run this model from now on; no request is running."""
        # A model that keeps state in its modules has a shell of them for each lane, and one for
        # scores; the weights are shared.
        rigid = not self._path.elastic
        self._module = _shell(model.module) if rigid else model.module
        self._scorer = _shell(model.module) if rigid else model.module
        self._model = model
        self._factors = GatheredFactors(model)
        self._cache = None

    def rest(self) -> None:
        """Let go of the model."""
        del self._model, self._factors, self._module, self._scorer
        self._cache = None

    def fit(self, num_slots: int, slot_length: int) -> None:
        """A cohort's cache grows with it: there is nothing to prepare."""
        del num_slots, slot_length
        self._cache = None

    def alike(self, work: Work) -> Hashable:
        """The prompt's length and the genome, as far as the path wants one of each."""
        return (
            None if self._path.padded else len(work.sequence),
            None if self._path.mixed else work.row,
        )

    def prefill(
        self, table: SlotTable, placed: Sequence[tuple[Work, int]]
    ) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Run a cohort's prompts: slots of a part of it, and logits of their first tokens."""
        if not placed:
            return
        num_rows = round_up(max(slot for _, slot in placed) + 1, ROWS_PER_BLOCK)
        sequences = [placed[0][0].sequence] * num_rows  # idle rows run something as well
        for work, slot in placed:
            sequences[slot] = work.sequence
        genomes = table.genome_of_block[: num_rows // ROWS_PER_BLOCK].copy()
        self._tokens_B_L, self._mask_B_L = _left_padded(sequences, self._device)
        slots = np.array(sorted(slot for _, slot in placed))
        length = self._tokens_B_L.shape[1]
        step = num_rows
        if self._path.elastic:
            step = max(
                ROWS_PER_BLOCK, self._prefill_tokens // length // ROWS_PER_BLOCK * ROWS_PER_BLOCK
            )
        caches: list[object] = []
        for first in range(0, num_rows, step):
            rows = slice(first, min(first + step, num_rows))
            blocks = genomes[first // ROWS_PER_BLOCK : rows.stop // ROWS_PER_BLOCK]
            factors = GatheredFactors(self._model).of_blocks(self._blocks(blocks), self._device)
            inputs = (self._tokens_B_L[rows], self._mask_B_L[rows])
            logits, cache = self._run(self._module, factors, *inputs)
            caches.append(cache)
            here = slots[(slots >= rows.start) & (slots < rows.stop)]
            yield here, logits[torch.from_numpy(here - first).to(self._device), -1].float()
        self._cache = caches[0] if len(caches) == 1 else _of_rows(_join(step), caches)

    def decode(self, table: SlotTable) -> torch.Tensor:
        """One more token for every row of the cohort."""
        num_rows = len(self._tokens_B_L)
        if self._path.elastic and table.num_rows < 0.8 * num_rows:
            num_rows = table.num_rows
            self.keep(np.arange(num_rows))
        newest = torch.from_numpy(table.newest[:num_rows, None]).to(self._device)
        self._tokens_B_L = torch.cat([self._tokens_B_L, newest], dim=1)
        self._mask_B_L = torch.cat([self._mask_B_L, torch.ones_like(newest)], dim=1)
        blocks = self._blocks(table.genome_of_block[: num_rows // ROWS_PER_BLOCK])
        factors = self._factors.of_blocks(blocks, self._device)
        inputs = (self._tokens_B_L, self._mask_B_L)
        logits, self._cache = self._run(self._module, factors, *inputs, self._cache)
        return logits[:, -1]

    def keep(self, order: np.ndarray) -> None:
        """Move these rows to the front, in this order; no others stay."""
        there = torch.from_numpy(order).to(self._device)
        num_rows = len(self._tokens_B_L)
        self._tokens_B_L, self._mask_B_L = self._tokens_B_L[there], self._mask_B_L[there]
        self._cache = _of_rows(_select(there, num_rows), [self._cache])

    def score(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """Log-probabilities of continuations; nothing is cached."""
        scores: dict[Work, torch.Tensor] = {}
        cohorts: dict[Hashable, list[Work]] = {}
        for work in works:
            cohorts.setdefault(self.alike(work), []).append(work)
        for cohort in cohorts.values():
            # Rows of one genome in blocks, each filled up with its own first.
            rows: list[Work] = []
            for genome in {work.row: None for work in cohort}:
                own = [work for work in cohort if work.row == genome]
                rows += own + own[:1] * (-len(own) % ROWS_PER_BLOCK)
            scores |= self._score(rows)
        return [scores[work] for work in works]

    def _score(self, rows: Sequence[Work]) -> dict[Work, torch.Tensor]:
        tokens_B_L, mask_B_L = _left_padded([work.sequence for work in rows], self._device)
        blocks = np.array([work.row for work in rows[::ROWS_PER_BLOCK]])
        factors = GatheredFactors(self._model).of_blocks(self._blocks(blocks), self._device)
        continuations = {
            b: len(work.request.continuation_T)
            for b, work in enumerate(rows)
            if isinstance(work.request, LogprobsRequest)
        }
        keep = max(continuations.values()) + 1
        logits, _ = self._run(self._scorer, factors, tokens_B_L, mask_B_L, keep=keep)
        return {
            rows[b]: token_logprobs(logits[b, -n - 1 : -1].float(), tokens_B_L[b, -n:])
            for b, n in continuations.items()
        }

    def _blocks(self, genome_of_block: np.ndarray) -> np.ndarray:
        """One block for all rows, where they are of one genome."""
        if self._path.mixed:
            return genome_of_block
        return genome_of_block[genome_of_block >= 0][:1]

    def _run(
        self,
        module: PreTrainedModel,
        factors: Factors | None,
        tokens_B_L: torch.Tensor,
        mask_B_L: torch.Tensor,
        cache: object = None,
        keep: int | None = None,
    ) -> tuple[torch.Tensor, object]:
        """Logits (rows, at least the last `keep` tokens or 1, vocabulary), and the cache."""
        inputs = _inputs(self._path, module, tokens_B_L, mask_B_L, cache, keep)
        output = self._model.forward(Batch(factors=factors), module, **inputs)
        return cast(torch.Tensor, output.logits), _cache_in(output, inputs)


def bytes_of_cache(module: PreTrainedModel, path: Path, num_tokens: int) -> int:
    """Bytes of what a model keeps of one request of so many tokens, found by running it.

    Raises:
        Unfit: It keeps nothing.
    """
    tokens = torch.zeros(1, num_tokens, dtype=torch.int64, device=module.device)
    inputs = _inputs(path, module, tokens, torch.ones_like(tokens))
    found: list[int] = []

    def count(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        found.append(parts[0].nbytes)
        return parts[0]

    cache = _cache_in(module(**inputs), inputs)
    if cache is None:
        raise Unfit("it returns no cache")
    _of_rows(count, [cache])
    return sum(found)


def _inputs(
    path: Path,
    module: PreTrainedModel,
    tokens_B_L: torch.Tensor,
    mask_B_L: torch.Tensor,
    cache: object = None,
    keep: int | None = None,
) -> dict[str, object]:
    """For a model's forward: the tokens that are not in the cache, or all without one.

    With `keep`, so many of the last tokens have logits, and nothing is cached.
    """
    takes = inspect.signature(type(module).forward).parameters
    inputs: dict[str, object] = {"input_ids": tokens_B_L}
    # Without padding a model counts best by itself: some number positions from elsewhere than 0,
    # and some take a mask for that of the newest token.
    if path.padded:
        inputs["attention_mask"] = mask_B_L
    if path.padded or not path.elastic:
        inputs["position_ids"] = (mask_B_L.cumsum(1) - 1).clamp(min=0)
    # One token alone can look like the next one of a sequence that went before.
    caches = path.cached and keep is None and tokens_B_L.shape[1] > 1
    inputs |= {"use_cache": caches, "logits_to_keep": keep or 1}
    name = next((name for name in _CACHES if name in takes), None)
    if name is not None and cache is not None:
        inputs |= {name: cache, "input_ids": tokens_B_L[:, -1:]}
        if "position_ids" in inputs:
            inputs["position_ids"] = cast(torch.Tensor, inputs["position_ids"])[:, -1:]
    elif name == "past_key_values" and caches and not path.elastic:
        # Models that keep some of their state in their modules make no cache by themselves.
        inputs[name] = DynamicCache(config=module.config)
    return {key: value for key, value in inputs.items() if key in takes}


def _cache_in(output: object, inputs: Mapping[str, object]) -> object:
    """What a model returns to be handed to it with the next token; None if nothing."""
    if not inputs.get("use_cache"):
        return None
    found = (getattr(output, name, None) for name in _CACHES)
    given = (inputs.get(name) for name in _CACHES)
    return next((cache for cache in (*found, *given) if cache is not None), None)


def _left_padded(
    sequences: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask, both (rows, longest), int64; padding is token 0."""
    longest = max(map(len, sequences))
    tokens = [[0] * (longest - len(s)) + list(s) for s in sequences]
    mask = [[0] * (longest - len(s)) + [1] * len(s) for s in sequences]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _shell(module: PreTrainedModel) -> PreTrainedModel:
    """Modules of their own around the same tensors."""
    tensors = [*module.parameters(), *module.buffers()]
    groups = {layer.group for layer in module.modules() if hasattr(layer, "group")}
    return copy.deepcopy(module, {id(shared): shared for shared in (*tensors, *groups)})


def _of_rows(function: _OfRows, caches: Sequence[object]) -> object:
    """A cache made of others like it, by a function of their tensors."""
    first = caches[0]
    if isinstance(first, torch.Tensor):
        return function(cast("Sequence[torch.Tensor]", caches)) if first.dim() else first
    if isinstance(first, dict):
        by_key = cast("Sequence[dict[object, object]]", caches)
        return {key: _of_rows(function, [cache[key] for cache in by_key]) for key in by_key[0]}
    if isinstance(first, list | tuple):
        parts = zip(*cast("Sequence[Sequence[object]]", caches), strict=True)
        items = [_of_rows(function, part) for part in parts]
        return tuple(items) if isinstance(first, tuple) else items
    if type(first).__module__.startswith("transformers.") and not isinstance(
        first, PreTrainedConfig
    ):
        made = copy.copy(first)
        for name in vars(first):
            values = [getattr(cache, name) for cache in caches]
            setattr(made, name, _of_rows(function, values))
        return made
    return first


def _select(rows: torch.Tensor, num_rows: int) -> _OfRows:
    """Of one cache: these of its rows."""

    def select(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0][rows] if len(parts[0]) == num_rows else parts[0]

    return select


def _join(num_rows: int) -> _OfRows:
    """All rows of several caches, the first of which has this many."""

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts)) if len(parts[0]) == num_rows else parts[0]

    return join
