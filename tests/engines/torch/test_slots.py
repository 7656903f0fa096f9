"""Slots stay in blocks of their genome, whatever comes, goes and moves."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.torch.population_layers import MIN_ROWS, ROWS_PER_BLOCK, PopulationModel
from es_cookbook.engines.torch.slots import (
    SlotTable,
    Work,
    choose_tokens,
    token_logprobs,
    token_uniforms,
    tops,
)
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


def test_all_state_of_a_request_moves_with_it() -> None:
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


def _choose(
    logits: list[list[float]], temperature: float, top_p: float, uniform: list[float]
) -> list[int]:
    rows = len(logits)
    options = np.full(rows, temperature), np.full(rows, top_p), np.array(uniform)
    return choose_tokens(torch.tensor(logits), *options, np.arange(rows)).tolist()


def test_uniform_numbers_are_a_function_of_seed_and_index() -> None:
    long, short = token_uniforms(2**63 - 1, 1000), token_uniforms(2**63 - 1, 7)
    assert np.array_equal(long[:7], short)
    assert not np.intersect1d(long, token_uniforms(1, 1000)).size
    assert long.min() >= 0 and long.max() < 1
    assert abs(long.mean() - 0.5) < 4 / np.sqrt(12 * 1000)


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert _choose([[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]], 0.0, 0.1, [0.9, 0.9]) == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [7, 256, 1000])
def test_tokens_of_a_large_vocabulary_are_torchs(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(40, size, generator=generator) * 4).to(dtype)
    logits[0, size // 2 :] = torch.nan  # the first NaN
    logits[1, ::2], logits[2, 1::2] = torch.inf, -torch.inf
    logits[3] = torch.nan
    rows = np.array([0, 1, 2, 3, *range(39, 9, -1)])
    zero, one = np.zeros(len(rows)), np.ones(len(rows))
    largest = choose_tokens(logits, zero, one, zero, rows)
    assert largest.tolist() == logits.float().argmax(-1)[rows].tolist()
    hot, uniform = rows[4:], np.linspace(0, 0.999, len(rows) - 4)
    drawn = choose_tokens(logits, 0.7 * one[4:], one[4:], uniform, hot)
    cumulative = (logits[hot].double() / 0.7).softmax(-1).cumsum(-1)
    below = np.take_along_axis(np.pad(cumulative.numpy(), ((0, 0), (1, 0))), drawn[:, None], 1)
    above = cumulative.numpy()[np.arange(len(hot)), drawn]
    assert ((below[:, 0] <= uniform + 1e-12) & (uniform < above + 1e-12)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [7, 256, 5000])
def test_a_nucleus_is_that_of_sorted_probabilities(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(1, size, generator=generator) * 3).to(dtype)
    logits[:, 1::3] = -torch.inf
    uniform = np.append(np.linspace(0, 0.999, 200), 1 - 2.0**-53)
    rows, ones = np.zeros(len(uniform), np.int64), np.ones(len(uniform))
    mass = (logits[0].double() / 0.7).softmax(0)
    ordered, order = mass.sort(descending=True, stable=True)
    for top_p in (1e-9, 0.3, 0.9, 1.0):
        before = ordered.cumsum(0) - ordered
        inside, maybe = (set(order[before < top_p + by].tolist()) for by in (-1e-6, 1e-6))
        drawn = choose_tokens(logits, 0.7 * ones, top_p * ones, uniform, rows).tolist()
        assert set(drawn) <= maybe and drawn == sorted(drawn)
        allowed = sum(mass[token] for token in inside)
        likely = {token for token in inside if mass[token] > allowed / 150}
        assert likely <= set(drawn), "numbers lie closer together than these are wide"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [7, 256, 5000])
def test_logprobs_of_a_large_vocabulary_are_torchs(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(40, size, generator=generator) * 4).to(dtype)
    logits[3, ::2] = -torch.inf
    rows = np.arange(39, -1, -1)
    tokens = np.arange(40) % size
    expected = logits[rows].double().log_softmax(-1)
    found = tops(logits, rows, tokens)
    np.testing.assert_allclose(found[:, 0], expected[np.arange(40), tokens], atol=2e-6)
    assert found[:, 1].tolist() == expected.argmax(-1).tolist()
    np.testing.assert_allclose(found[:, 2], expected.max(-1).values, atol=2e-6)
    assert token_logprobs(logits, rows[5:9], tokens[5:9]).tolist() == found[5:9, 0].tolist()


def test_logits_that_are_nan_have_no_logprob() -> None:
    logits = torch.zeros(3, 300)
    logits[0, 280], logits[1, 2] = torch.nan, torch.inf
    found = token_logprobs(logits, np.arange(3), np.zeros(3, np.int64))
    assert np.isnan(found).tolist() == [True, True, False]
