"""A model's own forward and its own cache: the path that needs nothing of the architecture.

A batch is a cohort: requests that enter together and decode in step, each a row of a batch of
sequences, padded on the left to one length. So the form of the cache (keys and
values, recurrent or convolution states, both) is up to the model. How much a cohort may mix is the
model's `Path`. Rows that end leave the cache once a fifth of them has; others join with the next
cohort. Long prompts run a few rows at a time, and what they leave is joined.

Every lane runs its own modules around the shared weights, so what a model keeps in its modules
is never another lane's. The rows beside it may change a row's bits by rounding, so a near-tie may
flip a token.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from typing_extensions import override

from es_cookbook.engines.torch.attention import round_up
from es_cookbook.engines.torch.kernels.modules import Path
from es_cookbook.engines.torch.population_layers import ROWS_PER_BLOCK, Batch, PopulationModel
from es_cookbook.engines.torch.slots import Forward, SlotTable, Work, token_logprobs, tops

_OfRows: TypeAlias = Callable[[Sequence[torch.Tensor]], torch.Tensor]
_CACHES = ("cache", "past_key_values", "cache_params", "state", "mems")
"""Names of models' caches, as arguments and in outputs."""


class Unfit(Exception):
    """A model cannot be run on some path; says why."""


class OwnForward(Forward):
    """A model's own forward, over its own cache of any kind."""

    joins = False

    def __init__(
        self,
        path: Path,
        device: torch.device,
        prefill_tokens: int,
        never: torch.Tensor | None = None,
    ) -> None:
        super().__init__(device, prefill_tokens, never)
        self._path = path
        self._cache: object = None
        self._tokens_B_L = torch.empty(0, 0, dtype=torch.int64)
        self._mask_B_L = self._tokens_B_L

    @override
    def turn_to(self, model: PopulationModel) -> None:
        super().turn_to(model)
        self._module = _shell(model)
        self._cache = None

    @override
    def rest(self) -> None:
        super().rest()
        del self._module
        self._cache = None

    @override
    def alike(self, work: Work) -> Hashable:
        """Return the prompt's length and the genome, if the path needs one of each per batch."""
        return (
            None if self._path.padded else len(work.sequence),
            None if self._path.mixed else work.row,
        )

    @override
    def prefill(
        self, table: SlotTable, placed: Sequence[tuple[Work, int]]
    ) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Run a cohort's prompts. Yields slots of its parts, and logits of their first tokens."""
        if not placed:
            return
        num_rows = round_up(max(slot for _, slot in placed) + 1, ROWS_PER_BLOCK)
        sequences = [placed[0][0].sequence] * num_rows  # idle rows run something as well
        for work, slot in placed:
            sequences[slot] = work.sequence
        genomes = table.genome_of_block[: num_rows // ROWS_PER_BLOCK].copy()
        self.num_prefilled += sum(len(work.sequence) for work, _ in placed)
        self._tokens_B_L, self._mask_B_L = _left_padded(sequences, self.device)
        slots = np.array(sorted(slot for _, slot in placed))
        caches: list[object] = []
        pieces = self._pieces(num_rows)
        for rows in pieces:
            here = slots[(slots >= rows.start) & (slots < rows.stop)]
            if not len(here):  # part of a block, so as many rows as the piece before
                caches.append(caches[-1])
                continue
            logits, cache = self._run_piece(rows, genomes)
            caches.append(cache)
            yield here, logits[torch.from_numpy(here - rows.start).to(self.device)]
        self._cache = caches[0]
        if len(caches) > 1:
            sizes = [rows.stop - rows.start for rows in pieces]
            self._cache = _of_rows(functools.partial(_joined, sizes), caches)

    @override
    def decode(self, table: SlotTable) -> tuple[torch.Tensor, np.ndarray]:
        """Run one more token for every row of the cohort."""
        slots = table.active.nonzero()[0]
        num_rows = len(self._tokens_B_L)
        if table.num_rows < 0.8 * num_rows:
            num_rows = table.num_rows
            self.keep(np.arange(num_rows))
        newest = torch.from_numpy(table.newest[:num_rows, None]).to(self.device)
        self._tokens_B_L = torch.cat([self._tokens_B_L, newest], dim=1)
        self._mask_B_L = torch.cat([self._mask_B_L, torch.ones_like(newest)], dim=1)
        genomes = table.genome_of_block[: num_rows // ROWS_PER_BLOCK]
        if self._path.cached:
            inputs = self._tokens_B_L, self._mask_B_L, self._cache
            logits, self._cache = self._run(genomes, *inputs)
            return logits[:, -1], slots
        # A piece of idle rows alone runs as its neighbours do, as in `factors_of_blocks`.
        genomes = np.where(genomes < 0, genomes[genomes >= 0][0], genomes)
        pieces = self._pieces(num_rows)
        return torch.cat([self._run_piece(rows, genomes)[0] for rows in pieces]), slots

    def _rows_at_once(self, length: int) -> int:
        """Return how many sequences of this length run per forward pass: blocks, or part of one."""
        rows = max(2, self.prefill_tokens // length)
        if rows >= ROWS_PER_BLOCK:
            return rows // ROWS_PER_BLOCK * ROWS_PER_BLOCK
        return 1 << (rows.bit_length() - 1)

    def _pieces(self, num_rows: int) -> list[slice]:
        """Return the rows whose whole sequences run together."""
        step = self._rows_at_once(self._tokens_B_L.shape[1])
        return [slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]

    def _run_piece(self, rows: slice, genomes: np.ndarray) -> tuple[torch.Tensor, object]:
        """Return logits (rows, vocabulary) of whole sequences' last tokens, and their cache."""
        blocks = genomes[rows.start // ROWS_PER_BLOCK : -(-rows.stop // ROWS_PER_BLOCK)]
        inputs = self._tokens_B_L[rows], self._mask_B_L[rows]
        logits, cache = self._run(blocks, *inputs)
        return logits[:, -1], cache

    @override
    def keep(self, order: np.ndarray) -> None:
        """Keep these rows only."""
        there = torch.from_numpy(order).to(self.device)
        num_rows = len(self._tokens_B_L)
        self._tokens_B_L, self._mask_B_L = self._tokens_B_L[there], self._mask_B_L[there]
        self._cache = _of_rows(functools.partial(_selected, there, num_rows), [self._cache])

    @override
    def score(self, works: Sequence[Work]) -> list[np.ndarray]:
        """Return log-probabilities of continuations; nothing is cached."""
        scores: dict[Work, np.ndarray] = {}
        cohorts: dict[Hashable, list[Work]] = {}
        for work in sorted(works, key=lambda work: (work.row, len(work.sequence))):
            cohorts.setdefault(self.alike(work), []).append(work)
        for cohort in cohorts.values():
            batch: list[Work] = []
            for work in cohort:
                rows, _ = _in_blocks([*batch, work])
                longest = max(len(row.sequence) for row in rows)
                scored = max(len(row.sequence) - row.num_prompt for row in rows)
                too_many = len(rows) * longest > self.prefill_tokens
                if batch and (too_many or len(rows) * scored > self.rows_scored):
                    scores |= self._score(batch)
                    batch = []
                batch.append(work)
            scores |= self._score(batch)
        return [scores[work] for work in works]

    def _score(self, works: Sequence[Work]) -> dict[Work, np.ndarray]:
        rows, height = _in_blocks(works)
        inputs = tokens_B_L, _ = _left_padded([work.sequence for work in rows], self.device)
        blocks = np.array([work.row for work in rows[::height]])
        last = tokens_B_L.shape[1] - 1  # the token after it is not asked for
        firsts = {work: last - len(work.sequence) + work.num_prompt for work in works}
        keep = last + 1 - min(firsts.values())
        logits_B_L_V, _ = self._run(blocks, *inputs, keep=keep)
        logits_B_L_V = logits_B_L_V[:, -keep:]
        scores: dict[Work, np.ndarray] = {}
        for work, first in firsts.items():
            b = rows.index(work)
            positions = np.arange(first, last) - (last + 1 - keep)
            tokens = tokens_B_L[b, first + 1 :].cpu().numpy()
            found = tops if work.wants_tops else token_logprobs
            scores[work] = found(logits_B_L_V[b], positions, tokens)
        return scores

    def _run(
        self,
        genome_of_block: np.ndarray,
        tokens_B_L: torch.Tensor,
        mask_B_L: torch.Tensor,
        cache: object = None,
        keep: int | None = None,
    ) -> tuple[torch.Tensor, object]:
        """Return logits (rows, at least the last `keep` tokens or 1, vocabulary), and the cache."""
        if not self._path.mixed:  # one block for all rows
            genome_of_block = genome_of_block[genome_of_block >= 0][:1]
        batch = Batch(factors=self.factors_of_blocks(genome_of_block))
        inputs = _inputs(self._path, self._module, tokens_B_L, mask_B_L, cache, keep)
        output = self._model.forward(batch, self._module, **inputs)
        logits = self.of_tokens(cast(torch.Tensor, output.logits))
        return logits, _cache_in(output, inputs)


def _in_blocks(works: Sequence[Work]) -> tuple[list[Work], int]:
    """Return rows in blocks of one height, filled up with rows of their genome, and the height."""
    of_genomes: dict[int, list[Work]] = {}
    for work in works:
        of_genomes.setdefault(work.row, []).append(work)
    height = min(ROWS_PER_BLOCK, max(map(len, of_genomes.values())))
    rows: list[Work] = []
    for own in of_genomes.values():
        rows += own + own[:1] * (-len(own) % height)
    return rows, height


def bytes_of_cache(module: PreTrainedModel, path: Path, num_tokens: int) -> int:
    """Run a model, and return the bytes of its cache for a request of `num_tokens` tokens.

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
    """Return inputs for a model's forward: the tokens not in the cache, or all without one.

    With `keep`, that many of the last tokens have logits, and nothing is cached.
    """
    takes = _takes(type(module).forward)
    inputs: dict[str, object] = {"input_ids": tokens_B_L}
    # Without padding a model counts best by itself: some number positions from elsewhere than 0,
    # and some take a mask for that of the newest token.
    if path.padded:
        inputs["attention_mask"] = mask_B_L
        inputs["position_ids"] = (mask_B_L.cumsum(1) - 1).clamp(min=0)
    # One token alone can look like the next one of a sequence that went before.
    caches = path.cached and keep is None and tokens_B_L.shape[1] > 1
    inputs |= {"use_cache": caches, "logits_to_keep": keep or 1}
    name = next((name for name in _CACHES if name in takes), None)
    if name is not None and cache is not None:
        inputs |= {name: cache, "input_ids": tokens_B_L[:, -1:]}
        if "position_ids" in inputs:
            inputs["position_ids"] = cast(torch.Tensor, inputs["position_ids"])[:, -1:]
    return {key: value for key, value in inputs.items() if key in takes}


@functools.cache
def _takes(forward: Callable[..., object]) -> frozenset[str]:
    """Return the names of a forward's arguments; needed for every token, and slow to find."""
    return frozenset(inspect.signature(forward).parameters)


def _cache_in(output: object, inputs: Mapping[str, object]) -> object:
    """Return the cache that a model returned, for its next token; None if there is none."""
    if not inputs.get("use_cache"):
        return None
    found = (getattr(output, name, None) for name in _CACHES)
    given = (inputs.get(name) for name in _CACHES)
    return next((cache for cache in (*found, *given) if cache is not None), None)


def _left_padded(
    sequences: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and mask, both (rows, longest), int64; padding is token 0."""
    longest = max(map(len, sequences))
    tokens = [[0] * (longest - len(s)) + list(s) for s in sequences]
    mask = [[0] * (longest - len(s)) + [1] * len(s) for s in sequences]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _shell(model: PopulationModel) -> PreTrainedModel:
    """Return a copy with separate modules and buffers around the same parameters."""
    shared = (*model.module.parameters(), *model.groups)
    return copy.deepcopy(model.module, {id(each): each for each in shared})


def _of_rows(function: _OfRows, caches: Sequence[object]) -> object:
    """Make a cache from others like it, by a function of their tensors."""
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
        joined = copy.copy(first)
        for name in vars(first):
            values = [getattr(cache, name) for cache in caches]
            setattr(joined, name, _of_rows(function, values))
        return joined
    return first


def _selected(rows: torch.Tensor, num_rows: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return these rows of one cache's tensor, the only part."""
    return parts[0][rows] if _has_rows(parts[0], num_rows) else parts[0]


def _joined(num_rows: Sequence[int], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all rows of several caches' tensors, which have `num_rows` each."""
    have_rows = [_has_rows(part, n) for part, n in zip(parts, num_rows, strict=True)]
    return torch.cat(list(parts)) if all(have_rows) else parts[0]


def _has_rows(tensor: torch.Tensor, num_rows: int) -> bool:
    """Return whether a cache's tensor has a row per sequence, rather than one number for all.

    Raises:
        Unfit: Neither, so the rows cannot be found.
    """
    if len(tensor) == num_rows:
        return True
    if tensor.numel() == 1:
        return False
    raise Unfit(f"its cache has a tensor of shape {tuple(tensor.shape)} for {num_rows} rows")
