"""Slots stay in blocks of their genome, whatever comes, goes and moves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.torch.forward.population_layers import (
    MIN_ROWS,
    ROWS_PER_BLOCK,
    PopulationModel,
)
from es_cookbook.engines.torch.forward.slots import SlotTable
from es_cookbook.engines.torch.forward.work_queue import Work
from es_cookbook.rl.types import Observation, SamplingParams

NUM_SLOTS = 6 * ROWS_PER_BLOCK


def _work(row: int, prompt_length: int = 3, **params: float) -> Work:
    sampling = SamplingParams(**{"max_tokens": 5} | params)
    request = SampleRequest(row, Observation((1,) * prompt_length), sampling, seed=row)
    return Work(request, PopulationModel.__new__(PopulationModel), row, limit=5)


def _check(table: SlotTable, running: list[Work]) -> None:
    assert [w for w in table.works if w is not None and w not in running] == []
    assert table.num_active == len(running)
    assert table.active[: table.num_rows].sum() == len(running)
    assert table.num_rows >= MIN_ROWS and table.num_rows % ROWS_PER_BLOCK == 0
    for slot, work in enumerate(table.works):
        assert table.active[slot] == (work is not None)
        if work is None:
            assert (table.position[slot], table.newest[slot], table.temperature[slot]) == (0, 0, 0)
        else:
            assert table.genome_of_block[slot // ROWS_PER_BLOCK] == work.row
            assert table.limit[slot] == work.limit
            assert table.position[slot] == len(work.sequence) - 1 + table.count[slot]
    used = table.active.reshape(-1, ROWS_PER_BLOCK).any(axis=1)
    assert ((table.genome_of_block >= 0) == used).all()
    assert table.num_empty_blocks() == (~used).sum()


@given(st.data())
def test_every_request_keeps_its_place_in_a_block_of_its_genome(data: st.DataObject) -> None:
    table, running = SlotTable(NUM_SLOTS, 16), []
    for _ in range(data.draw(st.integers(1, 8))):
        rows = data.draw(st.lists(st.integers(0, 3), max_size=20))
        placed: list[Work] = []
        for row in rows:  # As many as fit: free slots of its own blocks, then whole blocks.
            mine = sum(w.row == row for w in placed)
            others = {w.row for w in placed} - {row}
            free = table.free_slots_of_genomes()
            blocks = sum(
                max(0, -(-(sum(w.row == r for w in placed) - free.get(r, 0)) // ROWS_PER_BLOCK))
                for r in others
            )
            room = (table.num_empty_blocks() - blocks) * ROWS_PER_BLOCK + free.get(row, 0)
            if mine < room:
                placed.append(_work(row, data.draw(st.integers(1, 5))))
        slots = table.place(placed)
        assert [table.works[slot] for slot in slots] == placed
        assert len(set(slots)) == len(slots)
        running += placed
        _check(table, running)
        active = table.active.nonzero()[0]
        tokens = data.draw(st.lists(st.integers(1, 9), min_size=len(active), max_size=len(active)))
        table.accept(active, np.array(tokens, dtype=np.int64), None)
        newest = {id(table.works[s]): t for s, t in zip(active.tolist(), tokens, strict=True)}
        ended = [s for s in active.tolist() if data.draw(st.booleans()) or table.count[s] >= 5]
        running = [w for w in running if w not in [table.works[slot] for slot in ended]]
        table.release(ended)
        _check(table, running)
        order = table.packed_order()
        if order is not None:
            before = table.num_rows
            table.reorder(order)
            assert table.num_rows < before
        _check(table, running)
        for slot in table.active.nonzero()[0].tolist():
            assert table.newest[slot] == newest[id(table.works[slot])]
            assert table.tokens[slot, table.count[slot] - 1] == table.newest[slot]


def test_a_full_table_is_not_reordered_and_a_gappy_one_is_packed() -> None:
    table = SlotTable(NUM_SLOTS, 16)
    slots = table.place([_work(g) for g in (0, 1, 2) for _ in range(2 * ROWS_PER_BLOCK)])
    assert table.packed_order() is None
    table.release(slots[1::2])
    order = table.packed_order()
    assert order is not None
    table.reorder(order)
    assert table.num_rows == 3 * ROWS_PER_BLOCK
    assert table.active[: 3 * ROWS_PER_BLOCK].all()


def test_what_belongs_to_a_request_moves_with_it() -> None:
    table = SlotTable(NUM_SLOTS, 16)
    works = [_work(g // 16, temperature=1.0 + g, top_p=0.5) for g in range(48)]
    slots = np.array(table.place(works))
    table.accept(slots, np.arange(48) + 100, np.linspace(-1, 0, 48, dtype=np.float32))
    uniforms = {id(w): table.uniforms[s].copy() for w, s in zip(works, slots, strict=True)}
    table.release(slots[np.arange(48) % 5 > 0].tolist())
    order = table.packed_order()
    assert order is not None
    table.reorder(order)
    for slot in table.active.nonzero()[0].tolist():
        work = table.works[slot]
        assert work is not None
        index = works.index(work)
        assert table.temperature[slot] == 1.0 + index
        assert table.top_p[slot] == 0.5
        assert table.tokens[slot, 0] == 100 + index
        assert table.logprobs[slot, 0] == np.linspace(-1, 0, 48, dtype=np.float32)[index]
        assert np.array_equal(table.uniforms[slot], uniforms[id(work)])
