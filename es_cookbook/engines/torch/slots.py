"""Requests in the slots of a lane: their places, their progress and their next tokens.

All state is arrays over slots, so that a decode step touches Python only for requests that end.
Slots come in blocks of `ROWS_PER_BLOCK` that belong to one genome (a row of the low-rank tables).

A lane runs its batches through `Forward` alone.

Tokens are sampled greedily, or with temperature and top-p, each row a function of the row's logits
and uniform number. The uniform number of a token comes from NumPy's Philox generator keyed by
(sampling seed, purpose), at the token's index, so that a sampled token depends on neither the batch
nor the device. Tokens are drawn by inverting the cumulative distribution in vocabulary order:
genomes that share a seed (common random numbers) then make the same choice wherever their
distributions agree.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import nn

from es_cookbook.checkpoints.models import keep_tokens
from es_cookbook.common.seeds import derive_seed
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch.kernels.choice import draw, first_largest, log_probabilities
from es_cookbook.engines.torch.kernels.lanes import Row
from es_cookbook.engines.torch.kernels.modules import has_kernels, rows_of
from es_cookbook.engines.torch.population_layers import (
    MIN_ROWS,
    ROWS_PER_BLOCK,
    Factors,
    PopulationModel,
)

_LOGITS_AT_ONCE = 1 << 23
"""Logits copied at a time on a GPU, in float32 or float64, with further copies of these."""
SCORED_BYTES, SCORED_BYTES_OF_GPU = 1 << 27, 1 << 31
"""Bytes of float32 logits computed at a time when scoring: with a large vocabulary enough rows for
a product to be as fast as with more, 128 of 262,144 tokens. GPUs want more rows."""
_BYTES_OF_LOGIT = 4
_NO_GENOME = -1

Chosen: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Slots, the next token of each, and its log-probability where one is wanted."""


@dataclasses.dataclass(slots=True, eq=False)
class Work:
    """A request on its way through the engine.

    Attributes:
        model: the weights that answer, and `row`, their row of the low-rank tables.
        limit: most tokens to sample; 0 for a logprobs request.
        version: version of the weights when it came, for its cached tokens.
        wants_tops: a logprobs request also asks for the most probable tokens.
        virtual_T: virtual tokens before the prompt.
        cancelled: set by the caller's side; the lane then forgets the request.
    """

    request: SampleRequest | LogprobsRequest
    model: PopulationModel
    row: int
    limit: int
    version: int = 0
    wants_tops: bool = False
    virtual_T: tuple[int, ...] = ()
    cancelled: bool = False

    @property
    def sequence(self) -> tuple[int, ...]:
        """Tokens known beforehand: the prompt, and the continuation of a logprobs request.

        The prompt begins with the virtual tokens.
        """
        if isinstance(self.request, LogprobsRequest):
            return self.virtual_T + self.request.prompt_T + self.request.continuation_T
        return self.virtual_T + self.request.observation.tokens_T

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        if isinstance(self.request, LogprobsRequest):
            return len(self.virtual_T) + len(self.request.prompt_T)
        return len(self.virtual_T) + len(self.request.observation.tokens_T)

    @property
    def length(self) -> int:
        """Tokens with those still to be sampled: the room it needs in a cache."""
        return len(self.sequence) + self.limit


class SlotTable:
    """State of `num_slots` requests of at most `slot_length` tokens; arrays are indexed by slot.

    Attributes:
        active: whether a slot is decoding.
        position: cache position that the slot's newest token takes; 0 in idle slots, which keeps
            them finite.
        newest: the slot's newest token, not yet in the cache.
        count: tokens sampled so far, and `limit` the most.
        tokens: sampled tokens, and `logprobs` theirs where `wants_logprobs`.
        has_stops: whether the slot's request has its own stop conditions.
        followed: whether the slot's tokens are reported while they are sampled.
        temperature: that of the slot's request, like `top_p`; `uniforms` are its random numbers by
            token index.
        genome_of_block: the genome of each block, or -1.
    """

    def __init__(self, num_slots: int, slot_length: int) -> None:
        self.num_slots = num_slots
        self.slot_length = slot_length
        self.works: list[Work | None] = [None] * num_slots
        self.active, self.wants_logprobs, self.has_stops, self.followed = np.zeros(
            (4, num_slots), dtype=bool
        )
        self.position, self.newest, self.count, self.limit = np.zeros((4, num_slots), np.int64)
        self.temperature, self.top_p = np.zeros(num_slots), np.ones(num_slots)
        self.tokens = np.zeros((num_slots, slot_length), np.int64)
        self.logprobs = np.zeros((num_slots, slot_length), np.float32)
        self.uniforms = np.zeros((num_slots, slot_length))
        self.genome_of_block = np.full(num_slots // ROWS_PER_BLOCK, _NO_GENOME)
        # State that must be 0 in idle slots, which still take part in decode batches.
        self._cleared = (self.active, self.position, self.newest, self.temperature)
        self._cleared += (self.wants_logprobs, self.has_stops, self.followed)
        self._moved = (*self._cleared, self.count, self.limit, self.top_p)
        self._moved += (self.tokens, self.logprobs, self.uniforms)

    @property
    def num_active(self) -> int:
        """Requests that are decoding."""
        return int(self.active.sum())

    @property
    def num_rows(self) -> int:
        """Rows of a decode batch: up to the last active block, at least `MIN_ROWS` if there are."""
        last = int(self.active.nonzero()[0][-1]) if self.active.any() else 0
        return min(self.num_slots, max(MIN_ROWS, (last // ROWS_PER_BLOCK + 1) * ROWS_PER_BLOCK))

    def free_slots_of_genomes(self) -> dict[int, int]:
        """Return the number of free slots in blocks of each genome."""
        free_of_block = ROWS_PER_BLOCK - self.active.reshape(-1, ROWS_PER_BLOCK).sum(axis=1)
        free: dict[int, int] = {}
        blocks = zip(self.genome_of_block.tolist(), free_of_block.tolist(), strict=True)
        for genome, number in blocks:
            if genome != _NO_GENOME and number:
                free[genome] = free.get(genome, 0) + number
        return free

    def num_empty_blocks(self) -> int:
        """Return the number of blocks that belong to no genome."""
        return int((self.genome_of_block == _NO_GENOME).sum())

    def place(self, works: Sequence[Work]) -> list[int]:
        """Give each request a slot of its genome, in empty blocks if need be. Returns the slots."""
        free: dict[int, list[int]] = {}
        for slot in (~self.active).nonzero()[0][::-1].tolist():
            free.setdefault(int(self.genome_of_block[slot // ROWS_PER_BLOCK]), []).append(slot)
        placed: list[int] = []
        for work in works:
            if not free.get(work.row):
                first = free[_NO_GENOME][-1]
                self.genome_of_block[first // ROWS_PER_BLOCK] = work.row
                free[work.row] = free[_NO_GENOME][: -ROWS_PER_BLOCK - 1 : -1][::-1]
                del free[_NO_GENOME][-ROWS_PER_BLOCK:]
            slot = free[work.row].pop()
            self._fill(slot, work)
            placed.append(slot)
        return placed

    def _fill(self, slot: int, work: Work) -> None:
        request = work.request
        assert isinstance(request, SampleRequest)
        observation = request.observation
        self.works[slot] = work
        self.active[slot] = True
        self.position[slot] = work.num_prompt - 1
        self.count[slot] = 0
        self.limit[slot] = work.limit
        self.wants_logprobs[slot] = request.params.logprobs
        self.has_stops[slot] = bool(request.stop or observation.stop_token_ids)
        self.followed[slot] = request.progress is not None and request.progress.follows
        self.temperature[slot] = request.params.temperature
        self.top_p[slot] = request.params.top_p
        if request.params.temperature > 0:
            self.uniforms[slot, : work.limit] = token_uniforms(request.seed, work.limit)

    def release(self, slots: Sequence[int]) -> None:
        """Free slots; an empty block belongs to no genome."""
        for slot in slots:
            self.works[slot] = None
        for array in self._cleared:
            array[slots] = 0
        empty = ~self.active.reshape(-1, ROWS_PER_BLOCK).any(axis=1)
        self.genome_of_block[empty] = _NO_GENOME

    def accept(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray | None) -> None:
        """Take one newly sampled token for each of these slots."""
        self.tokens[slots, self.count[slots]] = tokens
        if logprobs is not None:
            self.logprobs[slots, self.count[slots]] = logprobs
        self.newest[slots] = tokens
        self.count[slots] += 1
        self.position[slots] += 1

    def packed_order(self) -> np.ndarray | None:
        """Return slots in an order with gaps only at genomes' ends, or None if that saves little.

        Returns old slots by new slot; a gap repeats some idle slot.
        """
        genomes = self.genome_of_block.repeat(ROWS_PER_BLOCK)[self.active]
        blocks_of_genomes = -(-np.bincount(genomes) // ROWS_PER_BLOCK)
        if max(MIN_ROWS, blocks_of_genomes.sum() * ROWS_PER_BLOCK) >= 0.8 * self.num_rows:
            return None
        by_genome: dict[int, list[int]] = {}
        for slot, genome in zip(self.active.nonzero()[0].tolist(), genomes.tolist(), strict=True):
            by_genome.setdefault(genome, []).append(slot)
        idle = int((~self.active).nonzero()[0][0])
        order: list[int] = []
        for slots in by_genome.values():
            order += slots + [idle] * (-len(slots) % ROWS_PER_BLOCK)
        return np.array(order)

    def reorder(self, order: np.ndarray) -> None:
        """Move slots to the front in this order; the rest become idle."""
        blocks = order[::ROWS_PER_BLOCK] // ROWS_PER_BLOCK
        genomes = self.genome_of_block[blocks].copy()
        self.genome_of_block[:] = _NO_GENOME
        self.genome_of_block[: len(genomes)] = genomes
        self.works = [self.works[slot] for slot in order.tolist()]
        self.works += [None] * (self.num_slots - len(order))
        for array in self._moved:
            array[: len(order)] = array[order]
        for array in self._cleared:
            array[len(order) :] = 0


class Forward(ABC):
    """How one lane's batches run: on the `flat` path, or by the model's `own` forward.

    Args:
        device: device of the models.
        prefill_tokens: most tokens of one forward pass.
        never: rows of the vocabulary that are not tokens.

    Attributes:
        joins: requests may enter while others run.
        num_prefilled: prompt tokens run so far, and `num_cached` those that were there already.
        rows_scored: rows of logits computed at a time when scoring.
    """

    joins = True

    def __init__(
        self, device: torch.device, prefill_tokens: int, never: torch.Tensor | None = None
    ) -> None:
        self.device, self.prefill_tokens, self._never = device, prefill_tokens, never
        self.num_prefilled = self.num_cached = 0

    def of_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits in which only tokens have probability."""
        return logits if self._never is None else keep_tokens(logits, self._never)

    def fit(self, num_slots: int, slot_length: int) -> None:
        """Allocate `num_slots` slots of `slot_length` tokens, if that is needed."""
        del num_slots, slot_length

    def turn_to(self, model: PopulationModel) -> None:
        """Run this model from now on; no request is running."""
        self._model = model
        embedding = cast("nn.Embedding", model.module.get_input_embeddings())
        most = SCORED_BYTES if self.device.type == "cpu" else SCORED_BYTES_OF_GPU
        self.rows_scored = max(MIN_ROWS, most // (_BYTES_OF_LOGIT * embedding.num_embeddings))
        self._gathered: tuple[object, np.ndarray, Factors | None] = None, np.empty(0), None

    def rest(self) -> None:
        """Release the model."""
        del self._model, self._gathered

    def factors_of_blocks(self, genomes: np.ndarray) -> Factors | None:
        """Return each group's factors for blocks of these genomes; idle ones (-1) take another's.

        It is kept while neither the genomes nor the tables change.
        """
        tables, own, factors = self._gathered
        if tables is not self._model.tables or not np.array_equal(genomes, own):
            blocks = np.where(genomes < 0, genomes[genomes >= 0][0], genomes)
            factors = self._model.factors(blocks)
            self._gathered = self._model.tables, genomes.copy(), factors
        return factors

    def alike(self, work: Work) -> Hashable:
        """Return the key that requests must share to enter together."""
        del work
        return None

    def admit(self, works: Sequence[Work]) -> list[Work]:
        """Return requests for which there is room, in the order in which to prefill them."""
        return list(works)

    def first_tokens(
        self, table: SlotTable, placed: Sequence[tuple[Work, int]]
    ) -> Iterator[Chosen]:
        """Run the prompts of requests in their slots, and choose their first tokens.

        Slots may be released in between.
        """
        for slots, logits in self.prefill(table, placed):
            yield chosen(table, slots, logits, np.arange(len(slots)))

    def next_tokens(self, table: SlotTable) -> Iterator[Chosen]:
        """Run newest tokens and choose the next ones: one of every slot, or one after the other.

        Slots may be released in between.
        """
        logits, rows = self.decode(table)
        yield chosen(table, table.active.nonzero()[0], logits, rows)

    def release(self) -> None:  # noqa: B027 - most keep nothing
        """Give back memory that is kept between batches."""

    @abstractmethod
    def prefill(
        self, table: SlotTable, placed: Sequence[tuple[Work, int]]
    ) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Run the prompts of requests in their slots.

        Yields slots, and logits (slots, vocabulary) of their first tokens, until all are done; they
        may be sampled, and slots released, in between.
        """

    @abstractmethod
    def decode(self, table: SlotTable) -> tuple[torch.Tensor, np.ndarray]:
        """Run every slot's newest token. Returns logits, and the row of each active slot."""

    @abstractmethod
    def keep(self, order: np.ndarray) -> None:
        """Move these slots to the front, in this order."""

    def ended(self, table: SlotTable, slots: Sequence[int]) -> None:
        """End requests in these slots; a next turn may begin with their tokens."""
        del table, slots

    @abstractmethod
    def score(self, works: Sequence[Work]) -> list[np.ndarray]:
        """Return log-probabilities of the continuations of logprobs requests, or their `tops`.

        Slots stay as they are.
        """


def chosen(
    table: SlotTable, slots: np.ndarray, logits_R_V: torch.Tensor, rows: np.ndarray
) -> Chosen:
    """Choose a token for each slot from its row of logits."""
    uniform = table.uniforms[slots, table.count[slots]]
    options = table.temperature[slots], table.top_p[slots], uniform
    tokens = choose_tokens(logits_R_V, *options, rows)
    logprobs = None
    if (asked := table.wants_logprobs[slots]).any():
        logprobs = np.zeros(len(slots), np.float32)
        logprobs[asked] = token_logprobs(logits_R_V, rows[asked], tokens[asked])
    return slots, tokens, logprobs


_PURPOSE_KEY = derive_seed(0, "token uniforms")


def token_uniforms(seed: int, num_tokens: int) -> np.ndarray:
    """Return a uniform number in [0, 1) for each token index, float64, from a sampling seed."""
    key = np.array([seed, _PURPOSE_KEY], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(num_tokens)
    return (np.asarray(words) >> np.uint64(11)) * 2.0**-53


def choose_tokens(
    logits_R_V: torch.Tensor,
    temperature_B: np.ndarray,
    top_p_B: np.ndarray,
    uniform_B: np.ndarray,
    rows_B: np.ndarray,
) -> np.ndarray:
    """Sample one token for each of some rows of logits.

    Args:
        logits_R_V: logits, on the CPU best in float32 or bfloat16.
        temperature_B: 0 is greedy.
        top_p_B: nucleus mass in (0, 1].
        uniform_B: float64 in [0, 1).
        rows_B: row that each token is sampled from.

    Returns:
        Token ids (B,), int64.
    """
    drawn = temperature_B > 0
    if logits_R_V.device.type == "mps":  # which has no float64
        logits_R_V = logits_R_V.cpu()
    if has_kernels(logits_R_V.device):
        logits = _for_kernels(logits_R_V)
        tokens_B = np.empty(len(rows_B), np.int64)
        first_largest(logits, rows_B, tokens_B)
        tokens_of_drawn = tokens_B[drawn]
        options = temperature_B[drawn], top_p_B[drawn], uniform_B[drawn]
        draw(logits, rows_B[drawn], *options, tokens_of_drawn)
        tokens_B[drawn] = tokens_of_drawn
        return tokens_B
    options_3_R = np.zeros((3, len(logits_R_V)))  # other rows draw nothing
    options_3_R[:, rows_B] = temperature_B, top_p_B, uniform_B
    choice = Choice(bool(drawn.any()), bool((top_p_B < 1).any()), logprobs=False)
    options = torch.from_numpy(options_3_R).to(logits_R_V.device)
    return choose_on_device(logits_R_V, options, choice)[0].cpu().numpy()[rows_B]


class Choice(NamedTuple):
    """What a batch's requests want of their logits: whether any draws, by top-p, with logprobs."""

    draws: bool
    nucleus: bool
    logprobs: bool

    @classmethod
    def of(cls, table: SlotTable, slots: np.ndarray) -> "Choice":
        """Return what the requests in these slots want."""
        draws = table.temperature[slots] > 0
        nucleus = (draws & (table.top_p[slots] < 1)).any()
        return cls(bool(draws.any()), bool(nucleus), bool(table.wants_logprobs[slots].any()))


def choose_on_device(
    logits_R_V: torch.Tensor, options_3_R: torch.Tensor, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sample a token for each row as `choose_tokens` does, without asking the host for anything.

    Args:
        logits_R_V: logits.
        options_3_R: temperature, top-p and uniform number of each row, in float64.
        choice: what any row wants.

    Returns:
        Tokens (R,), and their log-probabilities, in float32, if any row wants them.
    """
    tokens_R = logits_R_V.argmax(dim=-1)
    logprobs_R = logits_R_V.new_zeros(len(tokens_R), dtype=torch.float32)
    for rows in _in_parts(*logits_R_V.shape):
        if choice.draws:
            temperature, top_p, uniform = options_3_R[:, rows, None]
            steady = temperature.masked_fill(temperature == 0, 1.0)
            logits = logits_R_V[rows].double()
            drawn = _draw_on_device(logits, steady, top_p, uniform, choice.nucleus)
            tokens_R[rows] = torch.where(temperature[:, 0] > 0, drawn, tokens_R[rows])
        if choice.logprobs:
            logprobs = torch.log_softmax(logits_R_V[rows].float(), dim=-1)
            logprobs_R[rows] = logprobs.gather(1, tokens_R[rows, None])[:, 0]
    return tokens_R, logprobs_R if choice.logprobs else None


def _for_kernels(logits_R_V: torch.Tensor) -> Row:
    if logits_R_V.dtype not in (torch.float32, torch.bfloat16):
        logits_R_V = logits_R_V.float()
    return rows_of(logits_R_V.contiguous())


def _in_parts(rows: int, vocabulary: int) -> list[slice]:
    """Split rows of logits into parts, each as large as copies of logits may be at once."""
    some = max(1, _LOGITS_AT_ONCE // vocabulary)
    return [slice(first, first + some) for first in range(0, rows, some)]


def _draw_on_device(
    logits_B_V: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    nucleus: bool,
) -> torch.Tensor:
    """Draw a token for each row; options are (B, 1); `nucleus`: any top-p is below 1."""
    # Below the largest first: no quotient of a small temperature is infinite but -inf.
    below_top = logits_B_V - logits_B_V.amax(dim=-1, keepdim=True)
    mass = torch.softmax(below_top / temperature, dim=-1)
    if nucleus:
        ordered, order = mass.sort(dim=-1, descending=True, stable=True)
        outside = (ordered.cumsum(dim=-1) - ordered >= top_p) & (top_p < 1)
        mass = mass.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0.0)
    cumulative = mass.cumsum(dim=-1)
    picked = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).flatten()
    return picked.clamp(max=logits_B_V.shape[-1] - 1)


def tops(logits_R_V: torch.Tensor, rows_B: np.ndarray, tokens_B: np.ndarray) -> np.ndarray:
    """Return `Top` of one token for each of some rows of logits: (B, 3)."""
    best_B, logprobs_B_2 = _log_probabilities(logits_R_V, rows_B, tokens_B)
    # Tokens are exact below 2 ** 24.
    return np.stack([logprobs_B_2[:, 0], best_B.astype(np.float32), logprobs_B_2[:, 1]], axis=1)


def token_logprobs(
    logits_R_V: torch.Tensor, rows_B: np.ndarray, tokens_B: np.ndarray
) -> np.ndarray:
    """Return the log-probability of one token for each of some rows of logits: (B,), float32.

    It is a natural logarithm, without temperature.
    """
    return _log_probabilities(logits_R_V, rows_B, tokens_B)[1][:, 0]


def _log_probabilities(
    logits_R_V: torch.Tensor, rows_B: np.ndarray, tokens_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the most probable tokens, and log-probabilities (B, 2) of `tokens_B` and of these."""
    best_B, logprobs_B_2 = np.empty(len(rows_B), np.int64), np.empty((len(rows_B), 2), np.float32)
    if has_kernels(logits_R_V.device):
        logits = _for_kernels(logits_R_V)
        log_probabilities(logits, rows_B, tokens_B, best_B, logprobs_B_2)
        return best_B, logprobs_B_2
    for these in _in_parts(len(rows_B), logits_R_V.shape[1]):
        rows, tokens = (
            torch.from_numpy(each[these]).to(logits_R_V.device) for each in (rows_B, tokens_B)
        )
        logprobs = torch.log_softmax(logits_R_V[rows].float(), dim=-1)
        best = logprobs.argmax(dim=-1)
        best_B[these] = best.cpu().numpy()
        asked = torch.stack([tokens, best], dim=1)
        logprobs_B_2[these] = logprobs.gather(1, asked).cpu().numpy()
    return best_B, logprobs_B_2
