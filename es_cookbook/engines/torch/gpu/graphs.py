"""Flat token rows on a GPU: steps that do not need the host, repeated as CUDA graphs.

The host takes longer to launch the kernels of a decode step than a GPU takes to run them. So what a
step launches is captured once, and repeated by one launch. A graph repeats kernels at the addresses
with which they were captured. All that a step reads and writes beside weights, genomes' tables and
the cache therefore lies in buffers with fixed addresses, which the host fills between steps. Sizes
are rounded up to buckets, and what moves in memory has its graphs captured again: they are known by
their sizes and addresses. Rows of no request write to block 0 of the cache.

A decode step also chooses its tokens, and a row ends at its limit or at a token that ends every
request, so the host looks only once in `TOKENS_AT_ONCE` tokens. It alone knows stop texts, and
drops what was sampled after one. Prompts whose new parts have similar lengths run as one padded
group. Others, and logprobs requests, run as without graphs.

The first step of a size runs directly. If it makes the host wait, or a capture fails, batches run
as on other devices from then on.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from es_cookbook.common.errors import with_class
from es_cookbook.common.terminal import say_once
from es_cookbook.engines.torch.attention import LENGTH_STEP, RowGroup, TorchRows
from es_cookbook.engines.torch.flat import FlatForward, FlatRows, Span
from es_cookbook.engines.torch.kernels.attention import STEP
from es_cookbook.engines.torch.kernels.low_rank import LowRankRows
from es_cookbook.engines.torch.population_layers import (
    MIN_ROWS,
    ROWS_PER_BLOCK,
    Batch,
    Factors,
    PopulationModel,
)
from es_cookbook.engines.torch.prefix_cache import PrefixCache
from es_cookbook.engines.torch.slots import (
    Choice,
    Chosen,
    SlotTable,
    Work,
    choose_on_device,
    chosen,
)

TOKENS_AT_ONCE = 4
"""Tokens of a row between two looks of the host: rows that end in between wait for the others."""
_MOST_STEPS = 64
"""Captured steps, above which the one used longest ago is dropped."""
_LEAST_WIDTH, _LEAST_PROMPTS = 32, 64
"""Smallest buckets of positions that attention reads, and of prompts' tokens."""

Step: TypeAlias = Callable[[], object]
Capture: TypeAlias = Callable[[Step], Step]
"""Returns a step that repeats what another one launches."""


class CudaCapture:
    """Captures steps as graphs on one device, which share memory for intermediate results.

    A pool of memory lives as long as its graphs: once all are dropped, a new object is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Capture a step, without running it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                    step()
            finally:
                torch.cuda.set_stream(current)  # which torch does not if a capture fails
        return graph.replay


def bucket(number: int, least: int) -> int:
    """Return the smallest of `least` times 1, 1.5, 2, 3, 4, 6, 8, ... that is at least `number`."""
    size = least
    while size < number:
        size *= 2
    return size if size == least or 4 * number > 3 * size else size * 3 // 4


class _Waits(TorchDispatchMode):
    """Finds an operation that makes the host wait for its result."""

    name = ""

    @override
    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if not self.name and _waits(func, args, found):
            self.name = str(func)
        return found


def _waits(func: OpOverload, args: Sequence[Any], found: object) -> bool:
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
        return any(each is not None and each.dtype == torch.bool for each in args[1])
    if not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags):
        return True
    devices = {each.device.type for each in (*args, found) if isinstance(each, torch.Tensor)}
    return len(devices) > 1 and cast("torch.Tensor", found).device.type == "cpu"


class _Buffers:
    """Memory that steps read and write.

    Args:
        rows: most rows of a decode step, and prompts of a prefill step.
        width: most positions of a decoding sequence.
        prompts: numbers that describe prompts.

    Attributes:
        rows_4_R: newest tokens, their positions, and how many tokens may follow, 0 for rows of no
            request; at last the index of the step, in all rows.
        options_O_R: temperature and top-p, and a uniform number for each step.
        places_R_W: places of sequences, and `genome_of_block`, of the rows' blocks.
        prompts: new parts of prompts, as `_prefill_step` takes them apart.
        tokens_K_R: written: tokens by step, and `logprobs_K_R`, theirs.
    """

    def __init__(self, rows: int, width: int, prompts: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.sizes = rows, width, prompts
        self.rows_4_R, self.places_R_W = zeros(4, rows), zeros(rows, width)
        self.genome_of_block, self.prompts = zeros(rows // ROWS_PER_BLOCK), zeros(prompts)
        # Without float64 (MPS) there are no steps.
        self.options_O_R = zeros(2 + TOKENS_AT_ONCE, rows, dtype=torch.float64)
        self.tokens_K_R = zeros(TOKENS_AT_ONCE, rows)
        self.logprobs_K_R = zeros(TOKENS_AT_ONCE, rows, dtype=torch.float32)


class CapturedForward(FlatForward):
    """Flat rows, in steps that are captured.

    Args:
        ends: tokens that end every request.
        new_capture: makes what captures steps.
    """

    def __init__(
        self,
        device: torch.device,
        prefill_tokens: int,
        prefixes: PrefixCache,
        never: torch.Tensor | None,
        ends: np.ndarray,
        new_capture: Callable[[], Capture],
    ) -> None:
        super().__init__(device, prefill_tokens, prefixes, never)
        self._ends, self._new_capture = torch.from_numpy(ends).to(device), new_capture
        self._works = True
        self._resize(0, 0, 0)

    @override
    def release(self) -> None:
        self._resize(0, 0, 0)

    @override
    def fit(self, num_slots: int, slot_length: int) -> None:
        super().fit(num_slots, slot_length)
        self._places_S_W = np.zeros((num_slots, bucket(slot_length, _LEAST_WIDTH)), np.int64)

    @override
    def turn_to(self, model: PopulationModel) -> None:
        super().turn_to(model)
        tables = (table for table in model.tables or () if table is not None)
        self._addresses = tuple((t.data_ptr(), t.shape) for table in tables for t in table.tensors)
        self._blocks = None

    @override
    def keep(self, order: np.ndarray) -> None:
        super().keep(order)
        self._places_S_W[: len(order)] = self._places_S_W[order]
        self._moved = True

    def _resize(self, rows: int, width: int, prompts: int) -> None:
        """Make buffers of other sizes; all steps are captured again."""
        self._capture = self._new_capture() if self._works else None
        self._steps: dict[Hashable, Step | None] = {}
        self._factors: dict[PopulationModel, tuple[Hashable, Factors]] = {}
        self._buffers = _Buffers(rows, width, prompts, self.device)
        self._blocks: np.ndarray | None = None  # those whose factors are gathered
        self._moved = True  # places of rows

    def _fit(self, rows: int, width: int, prompts: int) -> _Buffers:
        sizes = tuple(map(max, (rows, width, prompts), self._buffers.sizes))
        if sizes != self._buffers.sizes:
            self._resize(*sizes)
        return self._buffers

    def _run_step(self, step: Step, *sizes: Hashable, times: int = 1) -> None:
        """Run a step of these sizes some times: at first directly, then as a graph."""
        self._cache.grow()
        key = self._model, self._addresses, self._cache.num_moves, *sizes
        is_new, repeat, waits = key not in self._steps, self._steps.pop(key, None), _Waits()
        if is_new:
            times -= 1
            with waits:
                step()
        elif repeat is None and self._capture is not None:
            try:
                repeat = self._capture(step)
            except Exception as error:  # no memory, a driver without graphs, a forward that waits
                self._give_up(with_class(error))
        self._steps[key] = repeat
        if len(self._steps) > _MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        for _ in range(times):
            (repeat or step)()
        if waits.name:
            self._give_up(f"its forward pass waits for {waits.name}")

    def _give_up(self, why: str) -> None:
        say_once(f"engine: this model runs without CUDA graphs, which takes longer ({why})")
        self._works, self._capture = False, None
        self._steps.clear()

    @override
    def first_tokens(
        self, table: SlotTable, placed: Sequence[tuple[Work, int]]
    ) -> Iterator[Chosen]:
        for spans in self._new_spans(placed):
            slots = np.array([span.sequence for span in spans])
            self._places_S_W[slots] = self._places(slots, self._places_S_W.shape[1])
            self._moved = True
            rows = FlatRows(spans, torch.device("cpu"))
            num, longest = bucket(len(spans), 2), bucket(max(rows.lengths), LENGTH_STEP)
            num_rows = bucket(len(rows.tokens_T) + ROWS_PER_BLOCK, _LEAST_PROMPTS)
            if self._works and num * longest <= 2 * num_rows:
                width = bucket(max(span.end for span in spans), _LEAST_WIDTH)
                yield slots, *self._prefill(table, spans, rows, (num_rows, num, longest, width))
            else:
                yield chosen(table, slots, self._logits(spans), np.arange(len(spans)))

    def _places(self, sequences: np.ndarray, width: int) -> np.ndarray:
        """Return places of sequences' first positions; beyond their ends any that there are."""
        return (
            self._runs.places(sequences, width)
            .clamp(max=self._cache.num_reached * STEP - 1)
            .numpy()
        )

    def _prefill(
        self, table: SlotTable, spans: Sequence[Span], rows: FlatRows, sizes: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run new parts of prompts. Returns tokens and log-probabilities.

        `sizes` are those of the step: rows, prompts, new tokens of each, and their places.
        """
        num_rows, num, longest, width = sizes
        slots = np.array([span.sequence for span in spans])
        at = np.minimum(np.arange(longest), np.array(rows.lengths)[:, None] - 1)

        def padded(values: object, *shape: int, value: int = 0) -> np.ndarray:
            array = np.full(shape, value)
            array[: len(spans)] = values
            return array.ravel()

        more, nothing = num_rows - len(rows.tokens_T), num_rows - 1  # a row of no request
        prompts = np.concatenate(
            [
                np.pad(rows.tokens_T.numpy(), (0, more)),
                np.pad(rows.positions_T.numpy(), (0, more)),
                np.pad(rows.genomes, (0, more // ROWS_PER_BLOCK), mode="edge"),
                padded(np.array(rows.starts)[:, None] + at, num, longest, value=nothing),
                padded(np.array([[span.first] for span in spans]) + at, num, longest),
                padded(self._places(slots, width), num, width),
                padded(rows.last, num, value=nothing),
            ]
        )
        buffers = self._fit(bucket(num, MIN_ROWS), 0, len(prompts))
        buffers.prompts[: len(prompts)].copy_(torch.from_numpy(prompts))
        perturbs, choice = self._model.perturbs(rows.genomes), Choice.of(table, slots)
        self._put_options(table, slots, choice)
        step = partial(self._prefill_step, sizes, perturbs, choice)
        self._run_step(step, "prefill", sizes, perturbs, choice)
        self._computed([span.work for span in spans])
        tokens_K_R, logprobs_K_R = self._found(choice)
        return tokens_K_R[0, : len(spans)], logprobs_K_R[0, : len(spans)]

    def _prefill_step(self, sizes: Sequence[int], perturbs: bool, choice: Choice) -> None:
        num_rows, num, longest, width = sizes
        padded, num_blocks = num * longest, num_rows // ROWS_PER_BLOCK
        parts = [num_rows, num_rows, num_blocks, padded, padded, num * width, num]
        prompts = self._buffers.prompts[: sum(parts)].split(parts)
        tokens_T, positions_T, blocks, rows, positions, places, last_B = prompts
        group = RowGroup(rows.view(num, -1), positions.view(num, -1), places.view(num, -1))
        factors = self._model.gather(blocks) if perturbs else None
        head = self._head_factors(factors, blocks, last_B)
        batch = Batch(TorchRows([group], self._cache), factors, head)
        logits = self._forward(batch, tokens_T, positions_T, last_B)
        tokens, logprobs = choose_on_device(logits, self._buffers.options_O_R[:3, :num], choice)
        self._buffers.tokens_K_R[0, :num] = tokens
        if logprobs is not None:
            self._buffers.logprobs_K_R[0, :num] = logprobs

    @override
    def next_tokens(self, table: SlotTable) -> Iterator[Chosen]:
        if not self._works:
            yield from super().next_tokens(table)
            return
        num, active = table.num_rows, table.active.nonzero()[0]
        num_rows = bucket(num, MIN_ROWS)
        left = np.where(table.active, table.limit - table.count, 0)[:num]
        times = 1 if table.followed.any() else min(TOKENS_AT_ONCE, int(left.max()))
        reached = int((table.position[:num] + np.minimum(left, times)).max())
        width = bucket(reached + 1, _LEAST_WIDTH)
        buffers = self._fit(num_rows, self._places_S_W.shape[1], 0)
        rows_4_R = np.zeros((4, buffers.sizes[0]), np.int64)
        rows_4_R[:3, :num] = table.newest[:num], table.position[:num], left
        buffers.rows_4_R.copy_(torch.from_numpy(rows_4_R))
        if self._moved:
            places_R_W = torch.from_numpy(self._places_S_W[:num])
            buffers.places_R_W[:num, : places_R_W.shape[1]].copy_(places_R_W)
            self._moved = False
        choice = Choice.of(table, active)
        self._put_options(table, np.arange(num), choice)
        genomes = table.genome_of_block[: num // ROWS_PER_BLOCK]
        perturbs = self._model.perturbs(genomes[genomes >= 0])
        if perturbs:
            self._gather(genomes)
        step = partial(self._decode_step, num_rows, width, perturbs, choice)
        self._run_step(step, "decode", num_rows, width, perturbs, choice, times=times)
        tokens_K_R, logprobs_K_R = self._found(choice)
        for k in range(times):
            if len(slots := table.active.nonzero()[0]):
                yield slots, tokens_K_R[k, slots], logprobs_K_R[k, slots]

    def _gather(self, genomes: np.ndarray) -> None:
        """Gather the low-rank parts of the rows' blocks, if these have changed."""
        buffers, known = self._buffers, self._blocks
        blocks = np.zeros(len(buffers.genome_of_block), np.int64) if known is None else known.copy()
        # Blocks of no genome keep the one that they had.
        blocks[: len(genomes)] = np.where(genomes < 0, blocks[: len(genomes)], genomes)
        if known is not None and np.array_equal(blocks, known):
            return
        self._blocks = blocks
        buffers.genome_of_block.copy_(torch.from_numpy(blocks))
        addresses, factors = self._factors.get(self._model, (None, ()))
        if addresses != self._addresses:
            factors = self._model.gather(buffers.genome_of_block)
            self._factors[self._model] = self._addresses, factors
        rows = [each for each in factors if isinstance(each, LowRankRows)]
        self._run_step(lambda: [each.gather() for each in rows], "gather")

    def _decode_step(self, num_rows: int, width: int, perturbs: bool, choice: Choice) -> None:
        buffers = self._buffers
        newest, position, left = (row[:num_rows] for row in buffers.rows_4_R[:3])
        index, running = buffers.rows_4_R[3, :1], left > 0
        places_R_W = buffers.places_R_W[:num_rows, :width].masked_fill(~running[:, None], 0)
        rows = torch.arange(num_rows, device=self.device)[:, None]
        attention = TorchRows([RowGroup(rows, position[:, None], places_R_W)], self._cache)
        factors = None
        if perturbs:
            blocks = buffers.genome_of_block[: num_rows // ROWS_PER_BLOCK]
            tables, whole = self._model.tables or (), self._factors[self._model][1]
            factors = [
                each.first(len(blocks))
                if isinstance(each, LowRankRows)
                else (None if table is None else table.rows(blocks))
                for table, each in zip(tables, whole, strict=True)
            ]
        logits = self._forward(Batch(attention, factors), newest, position, 0)
        options = buffers.options_O_R[:, :num_rows]
        uniform = options[2:].index_select(0, index)
        tokens, logprobs = choose_on_device(logits, torch.cat([options[:2], uniform]), choice)
        tokens = torch.where(running, tokens, newest)
        buffers.tokens_K_R[:, :num_rows].index_copy_(0, index, tokens[None])
        if logprobs is not None:
            buffers.logprobs_K_R[:, :num_rows].index_copy_(0, index, logprobs[None])
        newest.copy_(tokens)
        position.add_(running)
        left.sub_(1).mul_(running & (tokens[:, None] != self._ends).all(dim=1))
        index.add_(1)

    def _put_options(self, table: SlotTable, slots: np.ndarray, choice: Choice) -> None:
        """Upload what rows of these slots need to draw their next tokens, if any does."""
        if not choice.draws:
            return
        options_O_R = np.zeros(self._buffers.options_O_R.shape)
        options_O_R[:2, : len(slots)] = table.temperature[slots], table.top_p[slots]
        at = table.count[slots, None] + np.arange(TOKENS_AT_ONCE)
        uniform = table.uniforms[slots[:, None], np.minimum(at, table.slot_length - 1)]
        options_O_R[2:, : len(slots)] = uniform.T
        self._buffers.options_O_R.copy_(torch.from_numpy(options_O_R))

    def _found(self, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that steps have chosen, and their log-probabilities where wanted."""
        tokens = self._buffers.tokens_K_R.cpu().numpy()
        return tokens, self._buffers.logprobs_K_R.cpu().numpy() if choice.logprobs else 0 * tokens
